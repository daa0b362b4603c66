"""`canonlm data`: samples for people, samples in a file, and grades for a file of answers."""

import json
import multiprocessing
import random
import resource
import subprocess
import sys
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from canonlm import tasks
from canonlm.cli import main, status
from canonlm.data import dump as dumping
from canonlm.data.answers import numbers
from canonlm.launch.recipes import load_preset

DEPO = ["depo", "task.N=6", "task.K=3", "task.M=4", "task.name_vocab=3", "task.max_name_len=2"]


@pytest.fixture
def depo():
    return tasks.get("depo", N=6, K=3, M=4, name_vocab=3, min_name_len=1, max_name_len=2)


@pytest.fixture(autouse=True)
def workdir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return tmp_path


def tiny(name):
    return tasks.get(**load_preset(name, "tiny").run["task"])


def files(place):
    return sorted(str(path.relative_to(place)) for path in place.rglob("*"))


# -- show -------------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tasks.names())
def test_show_prints_each_question_with_its_answer_and_reason(name, capsys):
    task = tiny(name)
    assert main(["data", "show", name, "--n", "2", "--split", "test", "--seed", "5"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    for index in range(2):
        sample = task.sample("test", 5, index)
        for query in sample.queries:
            assert task.explain(sample, query) in printed
    questions = sum(len(task.sample("test", 5, index).queries) for index in range(2))
    assert sum(" → " in line for line in printed.splitlines() if line.startswith("  ")) == questions


def test_show_prints_every_token_and_wraps(capsys):
    task = tasks.get("copying", N=200)
    assert main(["data", "show", "copying", "task.N=200", "--n", "1", "--split", "test"]) == 0
    printed = capsys.readouterr().out.splitlines()
    start = printed.index("sample 0, 402 tokens") + 1
    wrapped = [line for line in printed[start:] if not line.startswith("  ")]
    sample = task.sample("test", 0, 0)
    assert " ".join(wrapped).split() == task.vocab.show(sample).split()
    assert len(wrapped) > 5
    assert all(len(line) <= 80 for line in wrapped)
    full = next(line for line in printed if line.startswith("  whole list"))
    assert len(full) < 150
    answer = full.partition("→ ")[2].partition("  (")[0].split()
    names = task.vocab.text(sample.tokens[202:].tolist()).split()
    cut = answer.index("…")
    assert answer[:cut] == names[:cut]
    assert answer[cut + 1 :] == names[cut + 1 - len(answer) :]
    assert 5 < len(answer) < 20


def test_show_ends_with_its_reader():
    command = f"{sys.executable} -m canonlm data show copying --n {10**9} | head -n 40; echo codes ${{PIPESTATUS[@]}}"
    printed = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert printed.stdout.count("sample ") > 1
    assert printed.stdout.endswith("codes 1 0\n")
    assert printed.stderr == ""


def test_show_in_colour(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["data", "show", "depo", "--n", "1"]) == 0
    printed = capsys.readouterr().out
    assert "\x1b[1;32m" in printed  # answers
    assert "\x1b[1;36m" in printed  # questions


def test_show_takes_a_difficulty_or_settings(capsys):
    assert main(["data", "show", "mano", "--difficulty", "mano-13", "task.modulus=5"]) == 0
    assert capsys.readouterr().out.startswith(f"{tasks.get('mano', L=13, modulus=5)!r}, train split")
    assert main(["data", "show", "mano", "task.L=4"]) == 0
    assert capsys.readouterr().out.startswith(f"{tasks.get('mano', L=4, modulus=7, synonyms=False)!r}, train split")


# -- dump -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize(("split", "loss_on"), [("train", "answer"), ("train", "all"), ("test", None)])
def test_a_row_is_a_sample(name, split, loss_on, workdir):
    task = tiny(name)
    options = [] if loss_on is None else ["--loss-on", loss_on]
    assert (
        main(["data", "dump", name, "--n", "30", "--out", "x.parquet", "--split", split, "--seed", "3", *options]) == 0
    )
    rows = pq.read_table("x.parquet").to_pylist()
    assert [row["index"] for row in rows] == list(range(30))
    for row in rows:
        sample = task.sample(split, 3, row["index"], loss_on=loss_on)
        assert row["tokens"] == sample.tokens.tolist()
        assert row["labels"] == sample.labels.tolist()
        answered = {at for query in sample.queries for at in range(query.start, query.stop)}
        assert {at for span in row["answers"] for at in range(span["start"], span["stop"])} == answered
        assert [span["start"] for span in row["answers"]] == sorted({query.start for query in sample.queries})
    assert files(workdir) == ["x.parquet"]


def test_types_and_metadata(depo):
    assert main(["data", "dump", *DEPO, "--n", "7", "--out", "x.parquet", "--seed", "2", "--loss-on", "all"]) == 0
    schema = pq.read_schema("x.parquet")
    span = pa.struct([pa.field("start", pa.int32(), False), pa.field("stop", pa.int32(), False)])
    assert schema.field("index").type == pa.int64()
    assert [schema.field(name).type.value_type for name in ("tokens", "labels", "answers")] == [pa.int32()] * 2 + [span]
    about = json.loads(schema.metadata[b"canonlm"])
    assert about.pop("version")
    assert about == {
        "task": "depo",
        "settings": {
            "N": 6,
            "test_lengths": None,
            "K": 3,
            "train_k": None,
            "M": 4,
            "name_vocab": 3,
            "min_name_len": 1,
            "max_name_len": 2,
        },
        "split": "train",
        "seed": 2,
        "n": 7,
        "loss_on": "all",
    }
    assert json.loads(schema.metadata[b"canonlm.vocab"]) == list(depo.vocab.names)


def test_an_existing_dump_is_not_overwritten(workdir, capsys, assert_refused):
    command = ["data", "dump", *DEPO, "--n", "5", "--out", "x.parquet"]
    assert main(command) == 0
    (workdir / "x.parquet.parts").mkdir()  # as if it had been killed between its last two steps
    written = (workdir / "x.parquet").stat().st_mtime_ns
    capsys.readouterr()
    assert main(command) == 0
    assert "(was there already)" in capsys.readouterr().out
    assert files(workdir) == ["x.parquet"]
    assert (workdir / "x.parquet").stat().st_mtime_ns == written
    for change, line in [
        (
            ["--seed", "1"],
            "--seed: expected 0, as in the dump that is already in x.parquet (choose another --out), got 1",
        ),
        (["--split", "test"], '--split: expected "train", as in the dump that is already in x.parquet'),
        (["--n", "6"], "--n: expected 5, as in the dump that is already in x.parquet"),
        (["--loss-on", "all"], '--loss-on: expected "answer", as in the dump that is already in x.parquet'),
        (["task.M=2"], "task.M: expected 4, as in the dump that is already in x.parquet"),
    ]:
        assert_refused([*command, *change], line)


def _dump(task, path, connection):
    def report(phase, done):
        connection.send(done)
        time.sleep(0.002)

    dumping.PART_TOKENS = 2000
    dumping.dump(task, path, n=900, on_progress=report)


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_killed_at_any_moment_it_resumes_to_the_same_bytes(depo, workdir, monkeypatch, start, kills):
    monkeypatch.setattr(dumping, "PART_TOKENS", 2000)
    events = []
    dumping.dump(depo, workdir / "whole" / "x.parquet", n=900, on_progress=lambda *event: events.append(event))
    full = (workdir / "whole" / "x.parquet").read_bytes()
    parts = len(events) // 2
    assert parts > 20
    rng = random.Random(1)
    moments = [rng.randint(1, parts // 2), parts - 1, parts + rng.randint(1, parts - 1)]
    for moment in moments[-kills:]:
        receiver, sender = multiprocessing.Pipe(duplex=False)
        child = start(_dump, depo, workdir / "x.parquet", sender)
        for _ in range(moment):
            receiver.recv()
        time.sleep(rng.random() * 0.004)
        child.kill()
        child.join()
        assert child.exitcode == -9
        assert not (workdir / "x.parquet").exists()
    drawn = {path: path.stat().st_mtime_ns for path in (workdir / "x.parquet.parts").glob("part-*")}
    assert len(drawn) == parts

    def nothing_is_drawn_again(phase, done):
        assert {path: path.stat().st_mtime_ns for path in drawn} == drawn

    dumping.dump(depo, workdir / "x.parquet", n=900, on_progress=nothing_is_drawn_again)
    assert (workdir / "x.parquet").read_bytes() == full
    assert files(workdir) == ["whole", "whole/x.parquet", "x.parquet"]


def test_an_unfinished_dump_of_other_settings(depo, workdir, monkeypatch, capsys, assert_refused):
    monkeypatch.setattr(dumping, "PART_TOKENS", 2000)

    def stop(phase, done):
        raise KeyboardInterrupt

    monkeypatch.setattr(status.Count, "__call__", lambda self, phase, done: stop(phase, done))
    assert main(["data", "dump", *DEPO, "--n", "500", "--out", "x.parquet"]) == 130
    assert capsys.readouterr().err == "canonlm: interrupted; the same command continues\n"
    assert "x.parquet.parts/part-000000.arrow" in files(workdir)
    message = "task.N: expected 6, as in the half-done dump in x.parquet.parts (or remove it), got 5\n"
    assert_refused(["data", "dump", *DEPO, "--n", "500", "--out", "x.parquet", "task.N=5"], message)


@pytest.fixture
def small_files(depo):
    """No file may grow past 20 kB, which simulates a full disk."""
    depo.sample("train", 0, 0)  # numba writes what it compiles to its cache
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, before)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_one_line_and_the_same_command_resumes(depo, workdir, small_files, monkeypatch, capsys):
    monkeypatch.setattr(dumping, "PART_TOKENS", 2000)
    command = ["data", "dump", *DEPO, "--n", "900", "--out", "x.parquet"]
    assert main(command) == 2
    assert capsys.readouterr().err == (
        'canonlm: --out: expected a file that can be written (File too large), got "x.parquet"\n'
    )
    assert not (workdir / "x.parquet").exists()
    assert not list(workdir.rglob("*.tmp-*"))
    small_files()
    assert main(command) == 0
    dumping.dump(depo, workdir / "y.parquet", n=900)
    assert pq.read_table("x.parquet").equals(pq.read_table("y.parquet"))


def test_two_at_a_time(depo, workdir):
    def also(phase, done):
        with pytest.raises(ValueError, match="--out: expected a file that no other process is writing"):
            dumping.dump(depo, workdir / "x.parquet", n=5)

    assert dumping.dump(depo, workdir / "x.parquet", n=5, on_progress=also)


def test_lines_show_the_progress(monkeypatch, capsys):
    monkeypatch.setattr(status, "EVERY", 0)
    monkeypatch.setattr(dumping, "PART_TOKENS", 2000)
    assert main(["data", "dump", *DEPO, "--n", "500", "--out", "x.parquet"]) == 0
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert lines[0].startswith("drawn ")
    assert any(line.startswith("drawn 500 of 500 samples") for line in lines)
    assert lines[-1].startswith("joined 500 of 500 samples")
    assert output.out.count("\n") == 1


def test_a_bar_shows_the_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert main(["data", "dump", *DEPO, "--n", "500", "--out", "x.parquet"]) == 0
    output = capsys.readouterr()
    assert "joined" in output.err
    assert "100%" in output.err
    assert output.out.startswith("x.parquet: 500 samples of depo(")


# -- verify -----------------------------------------------------------------------------------------------------------

VERIFY = ["data", "dump", *DEPO, "--n", "40", "--split", "test", "--verify"]


def oracle(task, n=40, split="test"):
    """Right answers to every sample, token ids."""
    return [
        {"index": i, "answers": [s.tokens[q.start : q.stop].tolist() for q in s.queries]}
        for i in range(n)
        for s in [task.sample(split, 0, i)]
    ]


def write_lines(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def table(printed):
    """{slice: (right, total)}"""
    rows = [line.split() for line in printed.splitlines() if line.rstrip().endswith("%")]
    return {" ".join(row[:-3]): (int(row[-3]), int(row[-2])) for row in rows}


@pytest.mark.parametrize("form", ["ids", "names", "parquet", "parquet with names"])
def test_every_form_of_answers(form, depo, workdir, capsys):
    answers = oracle(depo)
    wrong = 0
    for entry in answers[::3]:
        entry["answers"][1] = [depo.vocab.ids["q1"], *entry["answers"][1]]
        wrong += 1
    if "names" in form:
        for entry in answers:
            entry["answers"] = [depo.vocab.text(answer) for answer in entry["answers"]]
    if "parquet" in form:
        pq.write_table(pa.Table.from_pylist(answers), "answers")
    else:
        write_lines(workdir / "answers", answers)
    assert main([*VERIFY, "answers"]) == 0
    printed = capsys.readouterr().out
    counts = table(printed)
    assert list(counts) == ["1 hop", "2 hops", "3 hops"]
    expected = {k: [0, 0] for k in (1, 2, 3)}
    for i in range(40):
        for j, query in enumerate(depo.sample("test", 0, i).queries):
            expected[query.slice["k"]][0] += not (j == 1 and i % 3 == 0)
            expected[query.slice["k"]][1] += 1
    assert list(counts.values()) == [(right, total) for right, total in expected.values()]
    assert sum(total - right for right, total in counts.values()) == wrong
    assert "40 of 40 samples of depo(N=6" in printed
    whys = [line for line in printed.splitlines() if line.startswith("sample ")]
    assert len(whys) == 5
    assert whys[0].startswith("sample 0, ")
    answer = depo.sample("test", 0, 0).queries[1]
    right = depo.vocab.text(depo.sample("test", 0, 0).tokens[answer.start : answer.stop])
    assert f"expected '{right}', got 'q1" in whys[0]


@pytest.mark.parametrize("name", tasks.names())
def test_an_oracle_is_right_and_silence_is_wrong_for_every_task(name, workdir, capsys):
    assert main(["data", "dump", name, "--n", "20", "--split", "test", "--out", "x.parquet"]) == 0
    rows = pq.read_table("x.parquet").to_pylist()
    for row in rows:  # as a user does who has only the file
        row["answers"] = [row["tokens"][span["start"] : span["stop"]] for span in row["answers"]]
    write_lines(workdir / "right.jsonl", rows)
    write_lines(workdir / "silent.jsonl", [{**row, "answers": [None] * len(row["answers"])} for row in rows])
    capsys.readouterr()
    for answers, share in (("right.jsonl", 1), ("silent.jsonl", 0)):
        assert main(["data", "dump", name, "--n", "20", "--split", "test", "--verify", answers]) == 0
        counts = table(capsys.readouterr().out)
        assert counts
        assert all(right == share * total > -1 for right, total in counts.values())


def test_answers_that_touch_are_separate_in_a_dump(workdir):
    every = ["task.answers=every", "task.test_lengths=[4,5,6]"]
    assert main(["data", "dump", "state", *every, "--n", "5", "--split", "test", "--out", "x.parquet"]) == 0
    task = tasks.get("state", answers="every", test_lengths=[4, 5, 6])
    for row in pq.read_table("x.parquet").to_pylist():
        queries = task.sample("test", 0, row["index"]).queries
        assert [(span["start"], span["stop"]) for span in row["answers"]] == [(q.start, q.stop) for q in queries]


def test_answers_in_words_where_tokens_are_pieces_of_text(workdir, capsys):
    capo = ["capo", "--difficulty", "capo-50k", "task.N=3", "--n", "3", "--split", "test"]
    task = tasks.get("capo", N=3)
    samples = [task.sample("test", 0, i) for i in range(3)]
    lines = [
        {"index": i, "answers": [task.vocab.text(s.tokens[q.start : q.stop].tolist()) for q in s.queries]}
        for i, s in enumerate(samples)
    ]
    lines[1]["answers"][0] = "☃ no such place"
    lines[2]["answers"][0] = "half of a pair: \ud800"
    write_lines(workdir / "a", lines)
    assert main(["data", "dump", *capo, "--verify", "a"]) == 0
    printed = capsys.readouterr().out
    counts = table(printed)
    assert len(counts) == 6
    assert sum(total for _, total in counts.values()) == 18
    assert sum(right for right, _ in counts.values()) == 16
    assert "☃ no such place" in printed


def test_a_single_answer_needs_no_nested_list(workdir, capsys):
    task = tasks.get("copying", N=5, min_items=1)
    sample = task.sample("test", 0, 0)
    copy = sample.tokens[7:].tolist()
    same = [copy, [copy], [copy] * 4, task.vocab.text(copy), [task.vocab.text(copy)]]
    for answers in same:
        write_lines(workdir / "a", [{"index": 0, "answers": answers}])
        assert (
            main(["data", "dump", "copying", "task.N=5", "task.min_items=1", "--split", "test", "--verify", "a"]) == 0
        )
        counts = table(capsys.readouterr().out)
        assert counts == {"first item": (1, 1), "first 2 items": (1, 1), "first 4 items": (1, 1), "whole list": (1, 1)}


def test_lines_that_cannot_be_graded_are_listed(depo, workdir, capsys):
    right = oracle(depo, 12)
    lines = [
        right[0],
        "not json",  # 2
        '{"index": 1, "answers": [[1',
        '{"answers": [[1]]}',  # 4
        "[1, 2]",
        "",
        {**right[0]},  # 7: a second time
        {"index": 40, "answers": [[1]]},
        {"index": -1, "answers": [[1]]},
        {"index": 10**30, "answers": [[1]]},
        {"index": 1.0, "answers": [[1]]},  # 11
        {"index": True, "answers": [[1]]},
        {"index": "1", "answers": [[1]]},
        {"index": 1},  # 14
        {"index": 1, "answers": 7},  # 15
        {"index": 1, "answers": [[1.5]]},
        {"index": 1, "answers": [[1], [[2]], [3], [4]]},
        {"index": 1, "answers": {"a": 1}},
        {"index": 1, "answers": [[1], [2]]},  # 19: four are asked
        {"index": 1, "answers": [1, 2, 3, 4]},
        {"index": 1, "answers": []},
        "[" * 100_000,  # 22
        right[2],
    ]
    write_lines(workdir / "a.jsonl", lines)
    with (workdir / "a.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")  # 24
    assert main([*VERIFY, "a.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("not graded")] == [
        "not graded, not JSON: 4 (at 2-3, 22, 24)",
        "not graded, no index: 1 (at 4)",
        "not graded, not an object with index and answers: 1 (at 5)",
        "not graded, a repeated index: 1 (at 7)",
        "not graded, an index that is not in 0 … 39: 3 (at 8-10)",
        "not graded, an index that is not an integer: 3 (at 11-13)",
        "not graded, no answers: 1 (at 14)",
        "not graded, answers that are not lists of tokens: 4 (at 15-18)",
        "not graded, more or fewer answers than questions: 3 (at 19-21)",
    ]
    assert "2 of 40 samples of " in printed
    assert sum(total for _, total in table(printed).values()) == 8


def test_answers_of_tokens_that_do_not_exist_are_wrong(depo, workdir, capsys):
    write_lines(workdir / "a", [{"index": 0, "answers": [[10**30], [-1], ["w9"], "nonsense here"]}])
    assert main([*VERIFY, "a"]) == 0
    printed = capsys.readouterr().out
    assert sum(right for right, _ in table(printed).values()) == 0
    assert "got '<nonsense>" in printed


def test_null_is_a_wrong_answer(depo, workdir, capsys):
    write_lines(workdir / "a", [{"index": 0, "answers": None}, {"index": 1, "answers": [None] * 4}])
    assert main([*VERIFY, "a"]) == 0
    printed = capsys.readouterr().out
    assert "not graded" not in printed
    counts = table(printed).values()
    assert (sum(right for right, _ in counts), sum(total for _, total in counts)) == (0, 8)


def test_numbers_in_ranges():
    assert numbers([2, 5, 6, 7, 90, 92, 93]) == "2, 5-7, 90, 92-93"


# -- what goes wrong --------------------------------------------------------------------------------------------------

DUMP = ["data", "dump"]
MISTAKES = [
    ([*DUMP, "depoo", "--out", "x.parquet"], 'unknown task "depoo". Did you mean "depo"?'),
    ([*DUMP, "depo", "--out", "x.parquet", "--split", "tst"], 'unknown split "tst". Did you mean "test"?'),
    ([*DUMP, "depo", "--out", "x.parquet", "--loss-on", "x"], 'loss_on: expected "answer" or "all", got "x"'),
    ([*DUMP, "depo", "--out", "x.parquet", "--difficulty", "depo1"], 'unknown depo difficulty "depo1".'),
    ([*DUMP, "depo", "--out", "x.parquet", "--n", "0"], "--n: expected a number >= 1"),
    ([*DUMP, "depo", "--out", "x.parquet", "hops=2"], 'unknown setting "hops".'),
    ([*DUMP, "depo", "--out", "x.parquet", "--seed", str(2**63)], "seed: expected an integer from 0 to 2**63 - 1"),
    ([*DUMP, "depo", "--out", "x.csv"], '--out: expected a name that ends in .parquet, got "x.csv"'),
    ([*DUMP, "depo", "--out", "file/x.parquet"], "--out: expected a file that can be written (Not a directory)"),
    ([*DUMP, "depo", "--out", "other.parquet"], '--out: expected a file that does not exist yet, got "other.parquet"'),
    ([*DUMP, "depo", "--out", "text.parquet"], '--out: expected a file that does not exist yet, got "text.parquet"'),
    ([*DUMP, "depo", "--out", "folder.parquet"], '--out: expected a file that does not exist yet, got "folder.pa'),
    ([*DUMP, "depo", "--out", "y.parquet"], "--out: expected a name whose folder of parts does not exist yet"),
    ([*DUMP, "depo"], "--out is missing: the file to write (or --verify with a file of answers)"),
    ([*DUMP, "depo", "--out", "x.parquet", "--verify", "file"], "--out cannot be used with --verify"),
    ([*DUMP, "depo", "--verify", "nowhere"], "--verify: expected a readable file (No such file or directory)"),
    ([*DUMP, "depo", "--verify", "."], "--verify: expected a readable file (a folder)"),
    ([*DUMP, "depo", "--verify", "empty"], 'empty: expected lines such as {"index": 0, "answers": [[5, 7]]}, got noth'),
    ([*DUMP, "depo", "--verify", "file"], 'file: expected lines such as {"index": 0, "answers": [[5, 7]]}, got not J'),
    ([*DUMP, "depo", "--verify", "cut"], '--verify: expected a complete Parquet file, got "cut"'),
    (
        [*DUMP, "depo", "--verify", "other.parquet"],
        "other.parquet: expected the columns index and answers, got no answ",
    ),
    ([*DUMP, "depo", "--verify", "file", "--split", "tst"], 'unknown split "tst".'),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_one_line_and_nothing_written(workdir, assert_refused, arguments, start):
    (workdir / "file").write_text("mine")
    (workdir / "text.parquet").write_text("mine")
    (workdir / "empty").write_text("\n\n")
    (workdir / "folder.parquet").mkdir()
    (workdir / "y.parquet.parts").mkdir()
    (workdir / "y.parquet.parts" / "mine").write_text("mine")
    pq.write_table(pa.table({"index": [0]}), "other.parquet")
    (workdir / "cut").write_bytes((workdir / "other.parquet").read_bytes()[:60])
    assert_refused(arguments, start)
