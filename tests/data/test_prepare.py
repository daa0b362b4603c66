"""From text files to shards: every format, nothing lost, and the same bytes after any interruption."""

import gzip
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm.data import executors, index, pipeline, reading
from canonlm.data import prepare as preparing
from canonlm.data.prepare import prepare, prepare_stdlib
from canonlm.data.tokenizers import bytes_tokenizer

WORDS = ["the", "of", "naïve", "漢字", "\n", "<eos>", "0", "emoji 😀", "\t", "  "]


def texts(count, seed=0, words=40):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randrange(words))) + f" {number}" for number in range(count)]


def jsonl(documents, **more):
    return "".join(json.dumps({"text": text, **more}) + "\n" for text in documents).encode()


def documents(folder, split, bos=256, eos=257):
    """The contents of the shards, read without our code: bytes between bos and eos."""
    collected = []
    described = json.loads((folder / "index.json").read_text())
    for shard in described["splits"][split]:
        tokens = np.fromfile(folder / shard["name"], np.dtype(described["dtype"]).newbyteorder("<"))
        ends = np.fromfile(folder / f"{shard['name']}.index", "<u8").tolist()
        assert (len(tokens), len(ends)) == (shard["tokens"], shard["documents"])
        assert ends[-1] == len(tokens)
        pieces = [tokens[start:stop].tolist() for start, stop in zip([0, *ends], ends, strict=False)]
        assert all(piece[0] == bos and piece[-1] == eos for piece in pieces)
        directory = [bytes(piece[1:-1]).decode("utf-8") for piece in pieces]
        assert shard["bytes"] == sum(len(text.encode()) for text in directory)
        collected += directory
    return collected


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def run(out, *inputs, **changes):
    return prepare(out, [str(path) for path in inputs], **{"tokenizer": "bytes", "workers": 1, **changes})


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(["", "<bos>", "\r\n", "\0"])


@settings(max_examples=25)
@given(found=st.lists(ANY_TEXT, min_size=1, max_size=30), tasks=st.integers(1, 4), escape=st.booleans())
def test_any_documents_come_back_in_order(tmp_path_factory, found, tasks, escape):
    folder = tmp_path_factory.mktemp("any")
    lines = [json.dumps({"text": text}, ensure_ascii=escape) for text in found]
    (folder / "a.jsonl").write_bytes("\n".join(lines).encode())  # and no newline at the end
    run(folder / "out", folder / "a.jsonl", tasks=tasks)
    assert documents(folder / "out", "train") == found


@settings(max_examples=200)
@given(lines=st.lists(st.integers(0, 30), max_size=40), tasks=st.integers(1, 12), empty=st.integers(0, 2))
def test_every_line_starts_in_one_share(tmp_path_factory, lines, tasks, empty):
    """This includes lines longer than a share, and several files, some of them empty."""
    folder = tmp_path_factory.mktemp("shares")
    result = ["x" * length for length in lines]
    parts = [result[: len(result) // 2], [], result[len(result) // 2 :]][empty:]
    for number, part in enumerate(parts):
        (folder / f"{number}.jsonl").write_bytes(jsonl(part))
    inputs = reading.find([str(folder)])
    shares = [pipeline.share(inputs, rank, tasks) for rank in range(tasks)]
    read = [document.text for start, stop in shares for document in reading.read(inputs, start, stop, "text")]
    assert read == [text for part in parts for text in part]


def table(path, found, **options):
    pq.write_table(pa.table({"id": range(len(found)), "text": found}), path, row_group_size=7, **options)


WRITERS = {
    "a.jsonl": lambda path, found: path.write_bytes(jsonl(found, url="x")),
    "a.json": lambda path, found: path.write_bytes(jsonl(found)),
    "a.jsonl.gz": lambda path, found: path.write_bytes(b"".join(gzip.compress(jsonl([text])) for text in found)),
    "a.jsonl.zst": lambda path, found: path.write_bytes(pa.compress(jsonl(found), "zstd", asbytes=True)),
    "a.parquet": table,
    "b.parquet": lambda path, found: table(path, pa.array(found).dictionary_encode()),
    "c.parquet": lambda path, found: table(path, pa.array(found, pa.large_string()), compression="zstd"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
def test_every_format(tmp_path, name):
    result = texts(50)
    WRITERS[name](tmp_path / name, result)
    run(tmp_path / "out", tmp_path / name, tasks=4)
    assert documents(tmp_path / "out", "train") == result
    shards = index.read(tmp_path / "out").splits["train"]
    assert (len(shards) > 1) == (not name.endswith(("gz", "zst")))  # these cannot be divided


@pytest.mark.parametrize("name", [*WRITERS, "a.txt"])
def test_capital_letters_in_a_file_name(tmp_path, name):
    result = texts(5)
    (tmp_path / "in").mkdir()
    WRITERS.get(name, lambda path, result: path.write_text(result[0], encoding="utf-8"))(tmp_path / name, result)
    (tmp_path / name).rename(tmp_path / "in" / name.upper())
    for source in ("in", f"in/{name.upper()}"):
        run(tmp_path / f"from-{source}".replace("/", "-"), tmp_path / source)
        read = documents(tmp_path / f"from-{source}".replace("/", "-"), "train")
        assert read == (result[:1] if name == "a.txt" else result)


def test_a_text_file_is_a_document_and_patterns_select_files(tmp_path):
    files = {"b/2.txt": "two\r\n", "b/10.txt": "ten", "a.py": "import a", "b/tests/c.py": "import c", "d.md": "# d"}
    for name, text in (files | {"e.txt": ""}).items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(text.encode())
    (tmp_path / "in" / "f.txt.gz").write_bytes(gzip.compress(b"zipped"))
    (tmp_path / "in" / "g.txt").write_bytes(b"\xef\xbb\xbfmarked")
    run(tmp_path / "1", tmp_path / "in")
    assert documents(tmp_path / "1", "train") == ["ten", "two\r\n", "", "zipped", "marked"]
    run(tmp_path / "2", tmp_path / "in", glob="*.py", exclude=["test*"])
    assert documents(tmp_path / "2", "train") == ["import a"]
    run(tmp_path / "3", tmp_path / "in/d.md", tmp_path / "in/**/*.py")  # in the order given; a glob's files sorted
    assert documents(tmp_path / "3", "train") == ["# d", "import a", "import c"]


def test_names_are_chosen_from_a_folder_and_from_a_glob_alike(tmp_path):
    """Below the fixed part of the path: the folder test at the top is what was asked for."""
    top = tmp_path / "test"
    for name in ("a.txt", "b.md", "test/c.txt", "d/e.txt", "d/test/f.txt"):
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(name)
    for source in (top, f"{top}/**/*", f"{top}/**"):
        files = reading.find([str(source)], "*.txt", ["te*"])
        assert [Path(file.path).relative_to(top).as_posix() for file in files] == ["a.txt", "d/e.txt"]
    assert len(reading.find([str(top / "a.txt")], "*.txt")) == 1
    with pytest.raises(ValueError, match=r"--input: expected files to read, got .*b\.md"):
        reading.find([str(top / "b.md")], "*.txt")


def test_a_dataset_of_hugging_face(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    result = texts(30)
    result[0] = "é" * max(map(len, result))
    (tmp_path / "data" / "data").mkdir(parents=True)
    for part in range(3):
        path = tmp_path / "data" / "data" / f"train-{part}-of-3.parquet"
        pq.write_table(pa.table({"content": result[part * 10 : part * 10 + 10]}), path)
    run(tmp_path / "out", f"hf:{tmp_path / 'data'}", text_key="content", tasks=2)
    assert documents(tmp_path / "out", "train") == result
    run(tmp_path / "same", f"hf:{tmp_path / 'data'}:default:train", text_key="content", tasks=3)
    assert documents(tmp_path / "same", "train") == result
    monkeypatch.setattr(reading, "MAX_DOCUMENT", len(result[0]))
    with pytest.raises(ValueError, match="longer than"):
        run(tmp_path / "long", f"hf:{tmp_path / 'data'}", text_key="content")
    with pytest.raises(ValueError, match=r'no key "text"'):
        run(tmp_path / "bad", f"hf:{tmp_path / 'data'}")
    with pytest.raises(ValueError, match=r"--input: expected hf:NAME\[:config\[:split\]\] of a dataset \("):
        run(tmp_path / "none", f"hf:{tmp_path / 'data'}:default:nothing")


LINES = [
    (b'{"text": "fine"}', None), (b"{text}", "not JSON"), (b'{"text": "also fine", "text": "the last counts"}', None),
    (b'{"text": "\xff"}', "invalid UTF-8 (byte 11 of the line)"), (b'{"txt": "a"}', 'no key "text"'),
    (b'{"text": null}', '"text" is not a string but null'), (b'{"text": ["a"]}', '"text" is not a string but a list'),
    (b'["text"]', "not a JSON object but a list"), (b'"text"', "not a JSON object but a string"),
    (b"", "an empty line"), (b'{"text": "\\ud83d"}', "half of a surrogate pair"), (b"[" * 100_000, "not JSON"),
    ('{"text": "é"}'.encode("utf-16-le"), "invalid UTF-8"), (b'{"text": "fine \\ud83d\\ude00"}\r', None),
    (b'{"text": "cut of', "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize("tasks", [1, 5])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_lines_are_listed_and_the_others_kept(tmp_path, name, tasks):
    content = b"\n".join(line for line, _ in LINES)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    wrong = [(number, reason) for number, (_, reason) in enumerate(LINES, 1) if reason]
    message = rf"--max-bad: {len(wrong)} bad lines, more than 0; .*{name}, line 2: not JSON"
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", tmp_path / name, tasks=tasks)
    assert not (tmp_path / "out" / "index.json").exists()
    described = run(tmp_path / "out", tmp_path / name, tasks=tasks, max_bad=len(wrong))
    assert described.bad_lines == len(wrong)
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad-lines.jsonl").read_text().splitlines()]
    assert [line["line"] for line in listed] == [number for number, _ in wrong]
    assert all(line["reason"].startswith(reason) for line, (_, reason) in zip(listed, wrong, strict=True))
    assert {line["file"] for line in listed} == {str(tmp_path / name)}
    assert documents(tmp_path / "out", "train") == ["fine", "the last counts", "fine 😀"]


def test_bad_rows_and_bad_files(tmp_path):
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"a\xff")])
    column = pa.chunked_array([pa.array(["fine", None]), broken])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=1)
    (tmp_path / "b.txt").write_bytes(b"first\nsecond \xe9\n")
    described = run(tmp_path / "out", tmp_path / "a.parquet", tmp_path / "b.txt", max_bad=3)
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad-lines.jsonl").read_text().splitlines()]
    reasons = ['"text" is null', "invalid UTF-8 (byte 2)", "invalid UTF-8 (byte 14 of the file)"]
    assert [line["reason"] for line in listed] == reasons
    assert [line["line"] for line in listed] == [2, 3, 2]
    assert described.bad_lines == 3
    assert documents(tmp_path / "out", "train") == ["fine"]


def test_where_every_line_is_bad_it_stops_early(tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "MAX_LISTED", 20)
    lines = [b"{}\n"] * 100 + [json.dumps({"id": "", "body": None}).encode() + b"\n"] * 900
    (tmp_path / "b.jsonl").write_bytes(b'{"body": "fine"}\n' + b"".join(lines))
    reason = r'--max-bad: at least 23 bad lines, more than 3; the first: .*no key "body", but no keys'
    with pytest.raises(ValueError, match=reason):
        run(tmp_path / "out", tmp_path / "b.jsonl", text_key="body", max_bad=3)
    assert len((tmp_path / "out" / "bad-lines.jsonl").read_text().splitlines()) == 23


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_not_a_bad_line(tmp_path, name):
    WRITERS[name](tmp_path / name, texts(50))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(ValueError, match=rf"{name}: cannot be read \("):
        run(tmp_path / "out", tmp_path / name, max_bad=1000)


@pytest.mark.parametrize("name", WRITERS)
def test_a_wrong_key_is_found_before_anything_is_written(tmp_path, name):
    WRITERS[name](tmp_path / name, texts(3))
    (tmp_path / "a.txt").write_text("a text, which has no keys")
    for key in ("tex", "id"):
        with pytest.raises(ValueError, match=rf'unknown --text-key "{key}".*in .*{name}: text(, url)?\.$'):
            run(tmp_path / "out", tmp_path / "a.txt", tmp_path / name, text_key=key)
    assert not (tmp_path / "out").exists()


def test_a_key_that_only_some_lines_have(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"title": "a"}\n\n[]\n{"title": "b", "text": "c"}\n')
    with pytest.raises(ValueError, match=r'3 bad lines, more than 0; .*line 1: no key "text", but title'):
        run(tmp_path / "out", tmp_path / "a.jsonl")
    assert run(tmp_path / "out", tmp_path / "a.jsonl", max_bad=3).bad_lines == 3
    (tmp_path / "a.jsonl").write_bytes(b'{"title": "a"}\n')
    with pytest.raises(ValueError, match="expected at least one document"):  # the user accepts this bad line
        run(tmp_path / "none", tmp_path / "a.jsonl", max_bad=1)


def test_a_tokenizer_without_known_names(tmp_path):
    tokenizer = bytes_tokenizer()
    tokenizer.add_special_tokens(["<start>"])
    content = tokenizer.to_str().replace("<bos>", "<a>").replace("<eos>", "<b>")
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "a.jsonl").write_bytes(jsonl(["text"]))
    names = {"tokenizer": tmp_path / "tokenizer.json"}
    what = r'--bos: expected .* tokenizer_config\.json beside it that names one \(\{"bos_token": "<…>"\}\), or --no-bos'
    with pytest.raises(ValueError, match=what):
        run(tmp_path / "out", tmp_path / "a.jsonl", **names)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<start>", "eos_token": "<b>"}')
    described = run(tmp_path / "out", tmp_path / "a.jsonl", **names)
    assert (described.bos_id, described.eos_id) == (258, 257)


def test_processes_and_tasks_change_nothing(tmp_path, monkeypatch):
    """The number of processes changes no byte. The number of tasks changes no token, only where shards end."""
    monkeypatch.setattr(preparing, "TASK_SIZE", 6000)  # small inputs make many tasks
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(200)))
    table(tmp_path / "b.parquet", texts(100, seed=1))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(texts(50, seed=2))))
    inputs = [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.jsonl.gz")]
    options = {"validation": 0.2, "seed": 3}
    one = run(tmp_path / "one", *inputs, **options)
    run(tmp_path / "two", *inputs, **options, workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert one.command["tasks"] > 5
    run(tmp_path / "other", *inputs, **options, tasks=3)
    for split in ("train", "valid"):
        assert documents(tmp_path / "other", split) == documents(tmp_path / "one", split)
    everything = texts(200) + texts(100, seed=1) + texts(50, seed=2)
    kept = {split: set(documents(tmp_path / "one", split)) for split in ("train", "valid")}
    assert kept["train"].isdisjoint(kept["valid"])
    assert kept["train"] | kept["valid"] == set(everything)
    assert index.check(tmp_path / "one") == one


def test_seed_and_text_decide_the_held_out_documents(tmp_path):
    result = texts(4000, words=5)
    (tmp_path / "a.jsonl").write_bytes(jsonl(result))
    (tmp_path / "b.jsonl").write_bytes(jsonl([*texts(50, seed=9), *reversed(result)]))
    held = {}
    for name, seed in (("a", 0), ("b", 0), ("a", 1)):
        run(tmp_path / f"{name}{seed}", tmp_path / f"{name}.jsonl", validation=0.1, seed=seed)
        held[name, seed] = set(documents(tmp_path / f"{name}{seed}", "valid"))
    assert held["a", 0] == held["b", 0] & set(result)
    # 4000 coins of 0.1 have a standard deviation of 19; two independent sets share about 40 ± 6 of them.
    assert abs(len(held["a", 0]) - 400) < 80
    assert len(held["a", 0] & held["a", 1]) < 70


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (False, False)])
def test_bos_and_eos_as_requested(tmp_path, bos, eos):
    (tmp_path / "a.jsonl").write_bytes(jsonl(["ab", "", "c"]))
    described = run(tmp_path / "out", tmp_path / "a.jsonl", bos=bos, eos=eos)
    assert (described.bos_id, described.eos_id) == (256 if bos else None, 257 if eos else None)
    expected = [[*[256] * bos, *text.encode(), *[257] * eos] for text in ("ab", "", "c")]
    tokens = np.fromfile(tmp_path / "out" / "train-00000.ds", "<u2").tolist()
    assert tokens == [token for document in expected for token in document]
    ends = np.fromfile(tmp_path / "out" / "train-00000.ds.index", "<u8").tolist()
    assert ends == np.cumsum([len(document) for document in expected]).tolist()


@pytest.mark.slow
def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    for size, dtype in ((2**16, "uint16"), (2**16 + 1, "uint32")):
        tokenizer = bytes_tokenizer()
        tokenizer.add_special_tokens([f"<{number}>" for number in range(258, size - 1)] + ["</s>"])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        config = {"bos_token": "<bos>", "eos_token": "</s>"}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "a.jsonl").write_bytes(jsonl(["é", "b"]))
        described = run(tmp_path / dtype, tmp_path / "a.jsonl", tokenizer=tmp_path / "tokenizer.json")
        assert described.dtype == dtype
        assert documents(tmp_path / dtype, "train", eos=described.eos_id) == ["é", "b"]


def test_links_to_folders_are_followed_once(tmp_path):
    """One to another disk, one to a folder that is read anyway, and a loop."""
    top, elsewhere = tmp_path / "top", tmp_path / "elsewhere"
    for folder, name in ((top, "a.txt"), (top / "sub", "b.txt"), (elsewhere / "deep", "c.txt")):
        folder.mkdir(parents=True)
        (folder / name).write_text(name)
    for link, target in ((top / "disk", elsewhere), (top / "again", top / "sub"), (elsewhere / "loop", top)):
        link.symlink_to(target)
    assert [file.name for file in reading.find([str(top)])] == ["a.txt", "disk/deep/c.txt", "sub/b.txt"]


def test_files_that_cannot_be_found_are_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "shut").mkdir()
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("shut"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ValueError, match=r"^--input: expected folders that can be read \(Permission denied\), got .*shut"
    ):
        reading.find([str(tmp_path)])
    monkeypatch.undo()
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere")
    for source in (tmp_path, tmp_path / "*.txt", tmp_path / "b.txt"):
        with pytest.raises(ValueError, match=r"^--input: expected no broken links, got .*b\.txt"):
            reading.find([str(source)])


def test_a_finished_folder_is_not_prepared_again(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(5)))
    first = run(tmp_path / "out", tmp_path / "a.jsonl", validation=0.5)
    (tmp_path / "out" / "work" / "logs").mkdir(parents=True)  # as a kill at the very end leaves it
    (tmp_path / "out" / ".train-00000.ds.tmp-here-1").touch()
    run(tmp_path / "out", tmp_path / "a.jsonl", validation=0.5)
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith((".", "work"))]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert sorted(path.name for path in before)[:2] == ["index.json", "tokenizer.json"]
    assert run(tmp_path / "out", tmp_path / "a.jsonl", validation=0.5, workers=2) == first
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


@pytest.mark.parametrize("finished", [True, False])
def test_an_input_that_is_newer_than_the_folder_is_named(tmp_path, caplog, finished):
    """An edit need not change the size."""
    source = tmp_path / "a.jsonl"
    source.write_bytes(jsonl(texts(5)) + (b"" if finished else b"{}\n"))

    def again(out):
        caplog.clear()
        with nullcontext() if finished else pytest.raises(ValueError, match="1 bad lines"):
            run(tmp_path / out, source)
        return caplog.messages

    assert again("out") == again("out") == []
    later = time.time_ns() + 10**9
    os.utime(source, ns=(later, later))
    [message] = again("out")
    half_done = "" if finished else "the half-done "
    assert message.startswith(f"{source} is newer than {half_done}{tmp_path / 'out'}; if its text has changed, ")
    assert again("other") == []


CHANGES = {
    "validation": (lambda folder: {"validation": 0.3}, r"--validation: expected 0\.5, as in .*, got 0\.3"),
    "bos": (lambda folder: {"bos": False}, r"--bos: expected 256, as in"),
    "tokenizer": (lambda folder: {"tokenizer": folder / "other"}, "--tokenizer: expected '[0-9a-f]{64}', as in"),
    "text_key": (lambda folder: {"text_key": "body"}, "--text-key: expected 'text', as in .*, got \"body\""),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("finished", [True, False])
def test_another_command_is_refused(tmp_path, name, finished):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_text(bytes_tokenizer().to_str().replace("<eos>", "</s>"))
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(5)) + (b"" if finished else b"{}\n"))
    with nullcontext() if finished else pytest.raises(ValueError, match="1 bad lines"):
        run(tmp_path / "out", tmp_path / "a.jsonl", validation=0.5)
    change, message = CHANGES[name]
    before = contents(tmp_path / "out")
    way = "(choose another folder)" if finished else "(or remove it)"
    with pytest.raises(ValueError, match=message) as refused:
        run(tmp_path / "out", tmp_path / "a.jsonl", **{"validation": 0.5, **change(tmp_path)})
    assert f"{tmp_path / 'out'} {way}, got" in str(refused.value)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(4)))
    with pytest.raises(ValueError, match=r"--input: expected the same files, as in .* got .*'name': 'a.jsonl'"):
        run(tmp_path / "out", tmp_path / "a.jsonl", validation=0.5)
    assert contents(tmp_path / "out") == before


def test_invalid_inputs_and_outputs(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"")
    inputs = {"nothing.jsonl": "a file, a folder, a glob or hf:NAME, got", "*.txt": "files to read, got",
              "empty": "files to read, got", "a.jsonl": "at least one document"}  # fmt: skip
    for path, what in inputs.items():
        with pytest.raises(ValueError, match=rf"--input: expected {what}"):
            run(tmp_path / "out", tmp_path / path)
    with pytest.raises(ValueError, match="OUT: expected a folder that does not exist yet"):
        run(tmp_path, tmp_path / "a.jsonl")
    for wrong in ({"validation": 1.0}, {"seed": -1}, {"tasks": 0}, {"workers": 0}, {"max_bad": -1}):
        with pytest.raises(ValueError, match=rf"--{next(iter(wrong)).replace('_', '-')}: expected"):
            run(tmp_path / "out2", tmp_path / "a.jsonl", **wrong)
    with pytest.raises(ValueError, match=r'unknown executor "slrum". Did you mean "slurm"\?'):
        run(tmp_path / "out2", tmp_path / "a.jsonl", executor="slrum")


def test_too_many_files_or_tasks_are_refused_before_a_file_is_read(tmp_path, monkeypatch):
    for number in range(6):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    inputs, plan = [tmp_path / f"{number}.txt" for number in range(6)], {"tasks": 6, "validation": 0.5}
    per_task = index.MAX_SHARD * 2
    monkeypatch.setattr(index, "MAX_INDEX", len(index.encoded(run(tmp_path / "a", *inputs, **plan))) + 6 * per_task)
    assert index.read(tmp_path / "a") == run(tmp_path / "b", *inputs, **plan)
    monkeypatch.setattr(preparing, "check_key", lambda *_: pytest.fail("it reads the files"))
    monkeypatch.setattr(index, "MAX_INDEX", index.MAX_INDEX - 4 * per_task)
    with pytest.raises(ValueError, match=r"^--tasks: expected at most [1-5] with these files, got 6$"):
        run(tmp_path / "c", *inputs, **plan)
    monkeypatch.setattr(index, "MAX_INDEX", 1600)
    for tasks in (None, 6):
        with pytest.raises(ValueError, match=r"^--input: expected at most [1-5] files with names this long .*, got 6$"):
            run(tmp_path / "c", *inputs, validation=0.5, tasks=tasks)
    assert not (tmp_path / "c").exists()


def test_no_shard_is_larger_in_an_index_than_its_bound(tmp_path):
    largest = 2**48 - 1
    shard = index.Shard(f"train-{preparing.MAX_TASKS}.ds", largest, largest, largest, "f" * 64, "f" * 64)
    described = index.Index(2**24, "uint32", {"name": "t", "sha256": "f" * 64}, None, None, {}, (), 0, {})
    sizes = [len(index.encoded(replace(described, splits={"train": (shard,) * count}))) for count in (1, 2)]
    assert sizes[1] - sizes[0] <= index.MAX_SHARD


def test_a_flipped_byte_is_found(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(20)))
    run(tmp_path / "out", tmp_path / "a.jsonl")
    for name in ("train-00000.ds", "train-00000.ds.index", "tokenizer.json"):
        path = tmp_path / "out" / name
        full = path.read_bytes()
        path.write_bytes(full[:9] + bytes([full[9] ^ 1]) + full[10:])
        with pytest.raises(ValueError, match=rf"{name}: damaged: its sha256"):
            index.check(tmp_path / "out")
        path.unlink()
        with pytest.raises(ValueError, match=rf"{name}: missing"):
            index.check(tmp_path / "out")
        path.write_bytes(full)
    index.check(tmp_path / "out")
    written = (tmp_path / "out" / "index.json").read_text()
    for key in ("tokens", "documents"):
        changed = re.sub(rf'"{key}": (\d+)', rf'"{key}": 1\1', written, count=1)
        (tmp_path / "out" / "index.json").write_text(changed)
        with pytest.raises(ValueError, match=r"-00000\.ds.*: damaged: [0-9,]+ bytes, where index\.json says"):
            index.check(tmp_path / "out")
    for content, message in {
        "": "not JSON",
        "[]": "expected a JSON object, got list",
        "{}": "expected what `canonlm data prepare` writes, version 1",
        '{"format": "canonlm tokens", "version": 99}': "expected what `canonlm data prepare` writes, version 1",
    }.items():
        (tmp_path / "out" / "index.json").write_text(content)
        with pytest.raises(ValueError, match=rf"index\.json: {message}"):
            index.read(tmp_path / "out")
    with pytest.raises(ValueError, match="expected a folder that `canonlm data prepare` finished"):
        index.read(tmp_path)


@pytest.mark.slow
def test_a_killed_process_is_an_error_and_does_not_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(preparing, "TASK_SIZE", 20_000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(5000)))

    def kill_one(progress):
        for child in multiprocessing.active_children():
            os.kill(child.pid, signal.SIGKILL)

    full = run(tmp_path / "whole", tmp_path / "a.jsonl")
    monkeypatch.setattr(pipeline, "EVERY", 0.0)
    with pytest.raises(ValueError, match="--workers: expected fewer: a process was killed"):
        run(tmp_path / "out", tmp_path / "a.jsonl", workers=2, on_progress=kill_one)
    assert run(tmp_path / "out", tmp_path / "a.jsonl", workers=2) == full
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_progress_ends_at_the_total(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(50)))
    seen = []
    monkeypatch.setattr(preparing, "remove_folder", lambda folder: time.sleep(0.0))  # so that the last report is read
    monkeypatch.setattr(preparing, "finish", lambda out, max_bad: time.sleep(1.2))
    run(tmp_path / "out", tmp_path / "a.jsonl", tasks=3, on_progress=seen.append)
    tokens = sum(len(text.encode()) + 2 for text in texts(50))
    assert (seen[-1].read, seen[-1].documents, seen[-1].tokens) == (seen[-1].total, 50, tokens)


def test_the_standard_library(tmp_path, monkeypatch):
    """A library of three files, as the real one takes seconds; `canonlm train debug` prepares it."""
    for name in ("b.py", "a.py", "test/c.py", "pkg/site-packages/d.py", "pkg/e.py", "notes.txt"):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"name = {name!r}\n")
    real = sysconfig.get_path
    library = {"stdlib": str(tmp_path / "lib")}
    monkeypatch.setattr(sysconfig, "get_path", lambda name, *rest: library.get(name) or real(name, *rest))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, sha256 = prepare_stdlib()
    assert folder == tmp_path / "cache" / "canonlm" / f"python-stdlib-{sha256[:16]}"
    result = documents(folder, "train") + documents(folder, "valid")
    assert sorted(result) == [f"name = {name!r}\n" for name in ("a.py", "b.py", "pkg/e.py")]
    monkeypatch.setattr(preparing, "__version__", "99.0")
    assert prepare_stdlib() == (folder, sha256)
    (tmp_path / "lib" / "a.py").write_text("name = 1\n")
    assert prepare_stdlib()[0] != folder


SBATCH = """#!/bin/bash
# An imitation: runs the script's array, one task after the other, on this machine.
for last; do :; done
array=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$last")
cp "$last" "$SLURM_IMITATION/$(ls "$SLURM_IMITATION" | wc -l).sh"
export SLURM_NODELIST=here
for task in $(seq 0 "$array"); do SLURM_ARRAY_TASK_ID=$task bash "$last" >> "$SLURM_IMITATION.log" 2>&1; done
echo Submitted batch job 7
"""


@pytest.mark.slow
def test_on_slurm_it_is_the_same_command(tmp_path, monkeypatch):
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {"sbatch": SBATCH, "srun": '#!/bin/bash\nshift 3\nexec "$@"\n', "scontrol": "#!/bin/bash\necho here\n"}
    for name, script in scripts.items():
        (tools / name).write_text(script)
        (tools / name).chmod(0o755)
    (tmp_path / "jobs").mkdir()
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")  # as after `.venv/bin/canonlm`: without datatrove's programs
    monkeypatch.setenv("SLURM_IMITATION", str(tmp_path / "jobs"))
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(100)))
    run(tmp_path / "here", tmp_path / "a.jsonl", tasks=2)
    slurm = {"executor": "slurm", "options": {"partition": "cpu", "time": "1:00:00"}, "tasks": 2, "workers": None}
    assert run(tmp_path / "out", tmp_path / "a.jsonl", **slurm) is None
    described = index.read(tmp_path / "out")
    assert index.check(tmp_path / "out") == index.read(tmp_path / "here") == described
    script = (tmp_path / "jobs" / "0.sh").read_text()
    assert len(list((tmp_path / "jobs").iterdir())) == 2
    assert {"#SBATCH --partition=cpu", "#SBATCH --time=1:00:00", "#SBATCH --array=0-1"} <= set(script.splitlines())
    assert run(tmp_path / "out", tmp_path / "a.jsonl", **slurm) == described


def test_options_of_an_executor(tmp_path):
    given = {"partition": "cpu", "time": "4:00:00", "mem_per_cpu_gb": "4", "sbatch_args": "{account: me}"}
    typed = {"partition": "cpu", "time": "4:00:00", "mem_per_cpu_gb": 4, "sbatch_args": {"account": "me"}}
    assert executors.checked("slurm", given, tmp_path / "é-1.0") == typed
    for kind, options, message in (
        ("slurm", {"partition": "cpu"}, "time: missing; --executor slurm needs time="),
        ("slurm", given | {"mem": "4"}, 'unknown option of --executor slurm "mem"'),
        ("slurm", given | {"mem_per_cpu_gb": "much"}, 'mem_per_cpu_gb: expected a number, got "much"'),
        ("slurm", given | {"mem_per_cpu_gb": "yes"}, 'mem_per_cpu_gb: expected a number, got "yes"'),
        ("slurm", given | {"mem_per_cpu_gb": "["}, r'mem_per_cpu_gb: expected a number, got "\["'),
        ("slurm", given | {"requeue": "flase"}, 'requeue: expected true or false, got "flase"'),
        ("slurm", given | {"sbatch_args": "{account"}, r'sbatch_args: expected pairs such as "{account: me}", got'),
        ("slurm", given | {"sbatch_args": "me"}, r'sbatch_args: expected pairs such as "{account: me}", got "me"'),
        ("slurm", given | {"tasks": "4"}, 'unknown option of --executor slurm "tasks"'),
        ("local", {"partition": "cpu"}, 'partition: expected no options for --executor local, got "cpu"'),
    ):
        with pytest.raises(ValueError, match=message):
            executors.checked(kind, options, tmp_path)


@pytest.mark.parametrize("name", ["a b", "80%a", "a\\b", "it's", "$HOME", "a;b", "a*", "a\nb"])
def test_a_folder_that_a_script_for_slurm_cannot_name(name, tmp_path):
    (tmp_path / "a.txt").write_text("words")
    options = {"executor": "slurm", "options": {"partition": "cpu", "time": "5"}}
    with pytest.raises(ValueError, match=r"^OUT: expected a path of letters, digits and /\._- for --executor"):
        run(tmp_path / name, tmp_path / "a.txt", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_full_disk_keeps_no_unfinished_shards(tmp_path, monkeypatch):
    """A limit for the size of files stands in for the disk: closing a shard fails, too, as it writes the rest."""
    monkeypatch.setattr(pipeline, "BATCH", 1_000)
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(3_000)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(ValueError, match=r"^OUT: expected a folder that can be written \(File too large\)"):
            run(tmp_path / "out", tmp_path / "a.jsonl")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["tokenizer.json", "work"]
    run(tmp_path / "out", tmp_path / "a.jsonl")
    assert documents(tmp_path / "out", "train") == texts(3_000)


def test_leftovers_are_removed_before_the_first_write(tmp_path, monkeypatch):
    """A killed command may have filled the disk with them."""
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts(5)) + b"{}\n")
    with pytest.raises(ValueError, match="1 bad lines"):
        run(tmp_path / "out", tmp_path / "a.jsonl")
    leftover = tmp_path / "out" / ".train-00000.ds.tmp-1"
    leftover.touch()
    write_text, kept = preparing.write_text, []
    monkeypatch.setattr(preparing, "write_text", lambda *to: (kept.append(leftover.exists()), write_text(*to)))
    run(tmp_path / "out", tmp_path / "a.jsonl", max_bad=1)
    assert set(kept) == {False}


def test_two_commands_at_the_same_time(tmp_path, monkeypatch):
    """The second finds that the first has just finished, at the worst moment."""
    (tmp_path / "a.txt").write_text("some words")
    options = {"inputs": [str(tmp_path / "a.txt")], "tokenizer": "bytes", "workers": 1}
    begin, folder = preparing._begin, tmp_path / "out"

    def begin_late(*arguments):
        begin(*arguments)
        monkeypatch.setattr(preparing, "_begin", begin)
        prepare(folder, **options)

    monkeypatch.setattr(preparing, "_begin", begin_late)
    assert prepare(folder, **options) == prepare(folder, **options)
    assert [path.name for path in folder.iterdir() if path.is_dir()] == []
    assert documents(folder, "train") == ["some words"]
