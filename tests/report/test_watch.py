"""Runs of other processes: news is reported once, an unchanged file is not opened, and half a row waits."""

import json
import os

import pytest
from folders import evaluation, text_evaluation, write_run, write_text_run

from canonlm.report.format import in_words
from canonlm.runs import watch as watching
from canonlm.runs.rows import parse
from canonlm.runs.watch import QUIET_SECONDS, Watch

HALF = {("k", 1): (50, 100), ("k", 2): (10, 100)}


def append(folder, *rows, end="\n"):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("\n".join(map(json.dumps, rows)) + end)


def train(step, loss=2.0, speed=None):
    return {"kind": "train", "step": step, "loss": loss, "tokens_per_s": speed}


@pytest.fixture
def going(tmp_path):
    return write_run(tmp_path / "runs" / "a", evals=[evaluation(50, HALF)], finished=False, steps=900)


def now(folder):
    return (folder / "metrics.jsonl").stat().st_mtime


def test_news_is_reported_once(tmp_path, going):
    watch = Watch(tmp_path)
    assert watch.read(now(going)) == watch.runs
    (run,) = watch.runs
    assert (run.arch, run.task.name, run.lr, run.seed, run.step, run.steps) == ("llama", "depo", 0.001, 0, 50, 900)
    assert (run.state, in_words(run.task, run.evaluation)) == ("running", "1 hop 0.50  2 hops 0.10")
    assert watch.read(now(going)) == []
    append(going, train(60, 1.5, 12_345.0))
    assert watch.read(now(going)) == []
    assert (run.step, run.train.loss, run.train.tokens_per_s) == (60, 1.5, 12_345.0)
    append(going, evaluation(100, HALF, measures={"kl": 0.25}))
    assert watch.read(now(going)) == [run]
    assert in_words(run.task, run.evaluation) == "1 hop 0.50  2 hops 0.10  kl 0.25"
    assert not watch.done
    (going / "result.json").write_text(json.dumps({"steps": 900, "final": evaluation(900, HALF)}))
    assert watch.read(now(going)) == [run]
    assert (run.state, watch.done) == ("finished", True)


def test_a_file_that_has_not_changed_is_not_opened(tmp_path, going, monkeypatch):
    append(going, *(train(step) for step in range(1000)))
    watch = Watch(tmp_path)
    opened = []
    plain = watching.open_regular
    monkeypatch.setattr(watching, "open_regular", lambda path: opened.append(path.name) or plain(path))
    monkeypatch.setattr("canonlm.core.untrusted.open_regular", lambda path: opened.append(path.name) or plain(path))
    watch.read(now(going))
    assert opened.count("metrics.jsonl") == 1
    opened.clear()
    watch.read(now(going))
    assert opened == []
    append(going, train(2000))
    opened.clear()
    rows = []
    monkeypatch.setattr("canonlm.runs.watch.parse", lambda row: rows.append(row) or parse(row))
    watch.read(now(going))
    assert [row["step"] for row in rows] == [2000]  # only the new end


def test_an_incomplete_row_waits_for_its_end(tmp_path, going):
    watch = Watch(tmp_path)
    watch.read(now(going))
    (run,) = watch.runs
    row = json.dumps(evaluation(800, HALF))
    for part in (row[:30], row[30:]):
        with (going / "metrics.jsonl").open("a") as file:
            file.write(part)
        assert watch.read(now(going)) == []
    append(going, end="\n")
    assert watch.read(now(going)) == [run]
    assert run.step == 800


def test_garbage_is_skipped(tmp_path, going):
    with (going / "metrics.jsonl").open("ab") as file:
        file.write(bytes(range(256)) + b'\r{"kind": 3}\n[1]\n' + json.dumps(train(70)).encode() + b"\n\xff\r")
    watch = Watch(tmp_path)
    watch.read(now(going))
    assert watch.runs[0].step == 70
    append(going, end="\n")
    append(going, train(80))
    watch.read(now(going))
    assert watch.runs[0].step == 80


def test_a_resume_that_truncated_the_rows(tmp_path, going):
    append(going, train(300), train(310))
    watch = Watch(tmp_path)
    watch.read(now(going))
    path = going / "metrics.jsonl"
    (going / "new").write_text("".join(path.read_text().splitlines(keepends=True)[:-1]) + json.dumps(train(305)) + "\n")
    os.replace(going / "new", path)
    watch.read(now(going))
    (run,) = watch.runs
    assert (run.step, run.evaluation.step) == (305, 50)


def test_a_run_without_new_rows_is_not_running(tmp_path, going):
    watch = Watch(tmp_path)
    watch.read(now(going) + QUIET_SECONDS - 1)
    (run,) = watch.runs
    assert run.state == "running"
    assert watch.read(now(going) + 12.4 * 60) == [run]
    assert (run.state, run.state_text) == ("unfinished", "unfinished, no row for 12 min")
    assert watch.read(now(going) + 13.4 * 60) == []
    append(going, train(60))
    assert watch.read(now(going)) == [run]
    assert run.state == "running"
    assert not watch.done


def test_later_runs_and_folders_that_are_not_runs(tmp_path, going):
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "stray.txt").write_text("")
    watch = Watch(tmp_path)
    watch.read(now(going))
    assert [run.name for run in watch.runs] == ["a"]
    later = write_run(tmp_path / "runs" / "b", finished=False)
    (later / "metrics.jsonl").unlink()
    assert watch.read(now(going)) == []  # it has no news yet
    assert (watch.runs[1].name, watch.runs[1].state, watch.done) == ("b", "waiting", False)
    (later / "config.yaml").write_bytes(bytes(range(256)))
    (going / "result.json").write_text(json.dumps({"steps": 900}))
    watch.read(0.0)
    assert [run.state for run in watch.runs] == ["finished", "damaged"]
    assert watch.done  # a damaged configuration is not waited for


def test_runs_on_text_and_several_folders(tmp_path):
    rows = [text_evaluation(10, {"web": (2.25, 0.5, 10), "code": (1.0, 0.25, 10)})]
    one = write_text_run(tmp_path / "one" / "a", evals=rows, finished=False)
    write_run(tmp_path / "two" / "a", evals=[evaluation(50, HALF)])
    watch = Watch([tmp_path / "one", tmp_path / "two", one])
    watch.read(now(one))
    assert {run.name: (run.task.name, in_words(run.task, run.evaluation)) for run in watch.runs} == {
        f"{tmp_path}/one/a": ("web", "loss web 2.250, code 1.000"),
        f"{tmp_path}/two/a": ("depo", "1 hop 0.50  2 hops 0.10"),
    }
