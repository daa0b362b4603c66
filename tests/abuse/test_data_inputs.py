"""Inputs of `canonlm data` from strangers: no file hangs it, fills the memory, runs code or causes a traceback."""

import gzip
import io
import json
import os
import resource
import shutil
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from canonlm import tasks
from canonlm.cli import main
from canonlm.data import parquet_guard, prepare, reading, tokenizers
from canonlm.data.answers import grade_file
from canonlm.data.dump import dump
from canonlm.data.encode import PATTERNS, Encoder
from canonlm.suites.babilong import facts
from canonlm.tasks.capo import pools
from canonlm.tasks.capo.tokens import tokenise
from canonlm.tasks.lano import text as grammar

MEGABYTES = 200  # that reading a bomb of 300 may take


def run(out, *inputs, **changes):
    return prepare.prepare(out, [str(path) for path in inputs], **{"tokenizer": "bytes", "workers": 1, **changes})


def one_line(function, *arguments, **options):
    with pytest.raises(ValueError) as error:
        function(*arguments, **options)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000
    return str(error.value)


def special(path, kind):
    path.parent.mkdir(parents=True, exist_ok=True)
    {"fifo": os.mkfifo, "device": lambda path: path.symlink_to("/dev/zero"), "folder": Path.mkdir}[kind](path)
    return path


def jsonl(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


# -- paths that are not files -----------------------------------------------------------------------------------------


def test_an_irregular_file_beside_the_input_is_ignored(tmp_path):
    special(tmp_path / "in" / "socket.log", "fifo")
    (tmp_path / "in" / "fine.jsonl").write_bytes(jsonl("a"))
    assert run(tmp_path / "out", tmp_path / "in").splits["train"][0].documents == 1


# -- bombs ------------------------------------------------------------------------------------------------------------


def measured(arguments, output):
    """Run a command with its standard error in a file, and add the megabytes by which its memory grew."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 2)
    code = main([*map(str, arguments)])
    sys.stderr.flush()
    output.with_suffix(".size").write_text(str((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024))
    raise SystemExit(code)


def bomb_of_parquet(path, **options):
    """A table with a cell of 300 MB of one letter."""
    cell = pa.array(["0" * (300 * 2**20)], pa.large_string())
    pq.write_table(pa.table({"text": cell, "index": [0], "answers": cell}), path, compression="zstd", **options)
    assert path.stat().st_size < 2**18


@pytest.mark.slow
@pytest.mark.parametrize("use_dictionary", [True, False])
def test_a_parquet_decompression_bomb(tmp_path, start, use_dictionary):
    path = tmp_path / "a.parquet"
    bomb_of_parquet(path, use_dictionary=use_dictionary, write_statistics=False)
    for name, command in (
        ("prepare", ["data", "prepare", tmp_path / "out", "--input", path, "--tokenizer", "bytes"]),
        ("verify", ["data", "dump", "copying", "--verify", path]),
    ):
        process = start(measured, command, tmp_path / name)
        process.join()
        assert process.exitcode == 2
        assert f"{path}: cannot be read (a page of " in (tmp_path / name).read_text()
        assert int((tmp_path / f"{name}.size").read_text()) < MEGABYTES


def test_pages_of_a_column_with_a_dot_in_its_name_are_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_guard, "MAX_PAGE", 2**16)
    table = pa.table({"a.b": ["a" * 2**20] * 20})
    pq.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    read = reading.read(reading.find([str(tmp_path / "a.parquet")]), 0, 10**9, "a.b")
    assert "a.parquet: cannot be read (a page of " in one_line(lambda: list(read))


def repeated(path, rows):
    """A table with a text of one megabyte, which is in the file once, in many rows."""
    column = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["a" * 2**20]))
    pq.write_table(pa.table(dict.fromkeys(("text", "input", "question", "target"), column)), path, compression="zstd")


def test_a_long_text_in_many_rows_is_held_once(tmp_path):
    repeated(tmp_path / "a.parquet", 200)
    read = reading.read(reading.find([str(tmp_path / "a.parquet")]), 0, 10**9, "text")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert [len(next(read).text) for _ in range(20)] == [2**20] * 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_gigabytes_of_text_in_a_small_file(tmp_path, monkeypatch):
    repeated(tmp_path / "qa1.parquet", 10_000)
    reason = "more than 268,435,456 bytes of text in a file of "
    documents = reading.read(reading.find([str(tmp_path / "qa1.parquet")]), 0, 10**9, "text")
    assert reason in one_line(lambda: sum(len(document.text) for document in documents))
    assert reason in one_line(facts.read, str(tmp_path), "qa1", "0k", padded=False)
    monkeypatch.setattr(facts, "MAX_PAGE", 2**22)
    texts = [f"{number}" + "a" * 2**17 for number in range(36)]  # each page is allowed
    columns = dict.fromkeys(("input", "question", "target"), texts)
    pq.write_table(pa.table(columns), tmp_path / "qa1.parquet", compression="zstd", row_group_size=10)
    assert "bytes in a file of" in one_line(facts.read, str(tmp_path), "qa1", "0k", padded=False)


@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_files_of_tasks_that_are_not_regular(tmp_path, kind):
    shutil.copytree(Path(pools.__file__).parent / "data" / "pools", tmp_path / "pools")
    (tmp_path / "pools" / "city.txt").unlink()
    for read, name in ((pools.load, "pools/city.txt"), (grammar.content_of, "g.txt"), (tokenise, "t.json")):
        path = special(tmp_path / name, kind)
        argument = path.parent if read is pools.load else str(path) if read is tokenise else path
        assert name.rpartition("/")[2] in one_line(read, argument)


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_ordinary_pages_are_accepted(tmp_path, compression, version):
    result = [f"text {number} " * 50 for number in range(3000)]
    pq.write_table(
        pa.table({"text": result, "n": [[{"a": 1}]] * 3000}), tmp_path / "a.parquet", compression=compression,
        data_page_version=version, data_page_size=1000, row_group_size=700,
    )  # fmt: skip
    with (tmp_path / "a.parquet").open("rb") as file:
        table = pq.ParquetFile(file)
        for group in range(table.num_row_groups):
            parquet_guard.check_pages(file, table, group, ("text", "n"))
    read = reading.read(reading.find([str(tmp_path / "a.parquet")]), 0, 10**9, "text")
    assert [document.text for document in read] == result


def test_a_line_or_a_cell_or_a_text_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_DOCUMENT", 1000)
    monkeypatch.setattr(reading, "BUFFER", 64)
    long, short = "x" * 1001, "y" * 900
    (tmp_path / "a.jsonl").write_bytes(jsonl(short, long, short) + b"0" * 2000)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(long, short)))
    pq.write_table(pa.table({"text": [short, long, None, short]}), tmp_path / "c.parquet")
    (tmp_path / "d.txt").write_text(long)
    (tmp_path / "e.txt").write_text(short)
    described = run(tmp_path / "out", tmp_path, max_bad=6, workers=1)
    bad = [json.loads(line) for line in (tmp_path / "out" / "bad-lines.jsonl").read_text().splitlines()]
    places = [(Path(line["file"]).name, line["line"]) for line in bad]
    assert places == [
        ("a.jsonl", 2),
        ("a.jsonl", 4),
        ("b.jsonl.gz", 1),
        ("c.parquet", 2),
        ("c.parquet", 3),
        ("d.txt", 1),
    ]
    assert {line["reason"] for line in bad if line["line"] != 3} == {"longer than 67,108,864 bytes"}
    assert sum(shard.documents for shard in described.splits["train"]) == 6


@pytest.mark.parametrize("size", [1, 63, 64, 65, 128, 999, 1000, 1001, 5000])
@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_are_lines(size, end, monkeypatch):
    monkeypatch.setattr(reading, "MAX_DOCUMENT", 1000)
    monkeypatch.setattr(reading, "BUFFER", 64)
    one = b"a" * (size - len(end)) + end
    content = b"first\n" + (one if end else b"") + b"\n" + one
    result = list(reading.lines(io.BytesIO(content)))
    expected = content.splitlines(keepends=True)
    assert result == [(line if len(line) <= 1000 else None, len(line)) for line in expected]


# -- tokenizers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [b"{", b"IQ== 0\n", b"\x0a"])
def test_a_tokenizer_of_a_gigabyte(tmp_path, start):
    (tmp_path / "tokenizer.json").write_bytes(start)
    os.truncate(tmp_path / "tokenizer.json", 2**30)
    assert "at most 67,108,864 bytes" in one_line(tokenizers.load, tmp_path)


@pytest.mark.parametrize("config", ["[]", "{", '{"bos_token": 3}', '{"bos_token": {"content": []}}', "[" * 10**5])
def test_an_untrusted_configuration(tmp_path, config):
    tokenizers.bytes_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(config)
    assert "tokenizer_config.json" in one_line(tokenizers.load, tmp_path)


# -- one giant text ---------------------------------------------------------------------------------------------------


def trained(before, normalizer=None, size=600):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = before
    if normalizer:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<bos>", "<eos>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    text = "the cat's on the mat, isn't it? 12345 naïve é \n\n  Then the hat 漢字 e\u0301 the  the\tthe " * 5
    tokenizer.train_from_iterator([text, "we'll see the other thing " * 5], trainer)
    return tokenizers._strict(tokenizer)


def split(pattern):
    from tokenizers import Regex

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])


CUT = {
    "bytes": tokenizers.bytes_tokenizer,
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "llama3": lambda: trained(split(PATTERNS[0])),
    "qwen": lambda: trained(split(PATTERNS[1]), normalizers.NFC()),
}
WHOLE = {
    "prefix": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "metaspace": lambda: trained(pre_tokenizers.Metaspace()),
    "no regex": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
    "other regex": lambda: trained(split(r"\w+ \w+|.")),
    "normalizer": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Lowercase()),
}
WORDS = [
    "the", "cat's", " ", "  ", "\n", "é", "e\u0301", "isn't", "123", "漢字", "'ll", ",", "<eos>", "a b", "\t", "\u00a0",
    "ﬁ",
]  # fmt: skip


@pytest.mark.parametrize("name", CUT)
@settings(max_examples=100)
@given(words=st.lists(st.sampled_from(WORDS) | st.text(max_size=4), max_size=60), blank=st.sampled_from(["", " "]))
def test_a_text_in_pieces_has_the_same_tokens(name, words, blank):
    text = blank.join(words).encode("utf-8", "ignore").decode()
    tokenizer = made(name)
    full = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
    encoder = Encoder(tokenizer, long=12, piece=3)
    assert "".join(encoder.pieces(text)) == text
    collected = [[], []]
    for number, ids in encoder.encode([text, "the hat"]):
        collected[number] += ids
    assert collected == [full, tokenizer.encode_batch_fast(["the hat"], add_special_tokens=False)[0].ids]


def made(name, kept={}):  # noqa: B006
    if name not in kept:
        kept[name] = CUT[name]()
    return kept[name]


@pytest.mark.parametrize("name", [*CUT, *WHOLE])
def test_tokenizers_that_allow_cutting_long_texts(name):
    pieces = Encoder({**CUT, **WHOLE}[name](), long=12, piece=3).pieces("the cat and the hat of it")
    assert (len(pieces) > 3) == (name in CUT)


def test_special_token_names_in_a_text():
    tokenizer = CUT["gpt2"]()
    tokenizer.add_tokens(["cat and"])
    assert len(Encoder(tokenizer, long=12, piece=3).pieces("the cat and the hat of it")) == 1


# -- dumps and answers ------------------------------------------------------------------------------------------------


@pytest.fixture
def copying():
    return tasks.get("copying", N=8, min_items=2)


EVIL = """
from pathlib import Path
Path("ran").touch()
"""


@pytest.mark.parametrize(
    "about",
    [
        {"version": "0.1.0", "task": "mine.py:Evil", "settings": {}, "split": "train", "seed": 0, "n": 2},
        {"version": "0.1.0", "task": "copying", "settings": []},
        {"task": "copying"},
        [],
        "x",
        {"version": "9" * 10_000, "task": "copying", "settings": {"N": "8" * 10_000}},
    ],
)
def test_metadata_of_a_dump_is_only_compared(copying, tmp_path, monkeypatch, about):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(EVIL)
    schema = pa.schema([("index", pa.int64())], metadata={"canonlm": json.dumps(about)})
    pq.write_table(pa.table({"index": [0]}, schema=schema), "a.parquet")
    one_line(dump, copying, Path("a.parquet"), n=2)
    with pytest.raises(ValueError, match="expected the columns index and answers"):
        grade_file(copying, Path("a.parquet"), n=2)
    Path("b.parquet.parts").mkdir()
    Path("b.parquet.parts/settings.json").write_text(json.dumps(about))
    one_line(dump, copying, Path("b.parquet"), n=2)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "columns",
    [
        {"index": ["0", "1"], "answers": [[[1]], [[2]]]},
        {"index": [0.5, 1.5], "answers": [[[1]], [[2]]]},
        {"index": [0, 1], "answers": [{"a": 1}, {"a": 2}]},
        {"index": [0, 1], "answers": [1.5, 2.5]},
        {"index": [0, 1], "answers": [[[{"a": 1}]], [[{"a": 2}]]]},
        {"index": [[0], [1]], "answers": [[[1]], [[2]]]},
        {"index": [2**62, -1], "answers": [[[1]], [[2]]]},
        {"index": pa.array([0, 1], pa.decimal128(30)), "answers": [[[1]], [[2]]]},
    ],
)
def test_answers_of_other_types_are_not_graded(copying, tmp_path, columns):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert "expected lines such as" in one_line(grade_file, copying, tmp_path / "a.parquet", n=2)


def test_untrusted_parts_of_a_dump(copying, tmp_path):
    out = tmp_path / "a.parquet"
    assert dump(copying, out, n=2)
    full = out.read_bytes()
    out.unlink()

    def stop(phase, done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dump(copying, out, n=2, on_progress=stop)
    [part] = (tmp_path / "a.parquet.parts").glob("*.arrow")
    table = pa.table({"x": [1]})
    with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert "was damaged and is removed" in one_line(dump, copying, out, n=2)
    assert dump(copying, out, n=2)
    assert out.read_bytes() == full


# -- half-done folders ------------------------------------------------------------------------------------------------


def test_an_untrusted_progress_file(tmp_path):
    for number, content in enumerate(
        ["[1, 2, 3]", "", "[x, y, z]", "9" * 10_000, "[1, 2]", "[4, 5, 6]", "\udcff", "{}", "7", "[1, null, 3]"]
    ):
        (tmp_path / f"{number}.json").write_text(content, errors="surrogateescape")
    special(tmp_path / "fifo.json", "fifo")
    assert prepare._sums(tmp_path, 10) == (5, 10, 7, 9)
