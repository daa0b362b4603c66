"""`canonlm play` from nothing to a report, with real processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

import canonlm
from canonlm.cli import main
from canonlm.launch.grid import plan
from canonlm.launch.recipes import load_preset
from canonlm.runs.rows import TIMINGS
from canonlm.train.load_config import load
from canonlm.train.loop import train

SMALL = [
    "task.N=8", "task.min_items=2", "data.seq_len=18", "model.hidden_size=16", "train.batch_size=4",
    "train.eval_size=8", "train.log_every=5", "train.eval_every=10", "train.checkpoint_every=1000",
]  # fmt: skip


def names(*overrides, archs=("llama", "llama+canon=A"), lrs=(3e-3,)):
    """The names of the runs of `command`."""
    runs = plan(load_preset("copying", "tiny"), Path(), archs=archs, lrs=lrs, overrides=[*SMALL, *overrides])
    return [run.name for run in runs]


def command(out, *more, archs="llama,llama+canon=A"):
    return ["play", "copying", "--arch", archs, "--out", str(out), *SMALL, *more]


def started(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "canonlm", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1"},
    )


def results(out):
    return {path.parent.name: path.stat().st_mtime_ns for path in sorted((out / "runs").glob("*/result.json"))}


def rows(folder):
    result = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMINGS} for row in result]


def test_from_nothing_to_a_report_and_again(tmp_path, capsys, monkeypatch):
    """One test for several commands, because the runs take seconds."""
    monkeypatch.setattr(sys, "argv", ["canonlm", *command(tmp_path, "train.steps=30")])
    assert main(command(tmp_path, "train.steps=30")) == 0
    stdout, stderr = capsys.readouterr()
    assert stderr == ""
    _is_reported(tmp_path, stdout)

    # The same command with one more run, which fails. The finished run is not started again; the other is named, with
    # exit code 1, and the report is written. (The message of a training that diverges: tests/train/test_loop.py.)
    before = results(tmp_path)
    assert sorted(from_python(tmp_path)["arch"]) == ["llama", "llama+canon=A"]
    (tmp_path / "report.html").unlink()
    (tmp_path / "fail.sh").write_text("#!/bin/sh\necho 'canonlm: stopped at step 5' >&2\nexit 1\n")
    (tmp_path / "fail.sh").chmod(0o755)
    monkeypatch.setattr("canonlm.launch.local.sys.executable", str(tmp_path / "fail.sh"))
    monkeypatch.setattr("canonlm.launch.local.can_fork", lambda *_: False)
    assert main(command(tmp_path, "train.steps=30", "--lr", "3e-3,1e30", archs="llama")) == 1
    (name,) = names("train.steps=30", archs=["llama"], lrs=[1e30])
    log = tmp_path / "runs" / name / "log.txt"
    assert capsys.readouterr().err == f"canonlm: {name} failed: stopped at step 5 (whole log: {log})\n"
    with pytest.raises(RuntimeError, match=f"^1 of 2 runs failed; {re.escape(name)}: stopped at step 5 "):
        from_python(tmp_path, archs="llama", lrs=[3e-3, 1e30])
    assert results(tmp_path) == before
    assert (tmp_path / "report.html").exists()


def from_python(out, **changes):
    """The final accuracies that `canonlm.play` returns, called with the settings of `command`."""
    settings = {key: int(value) for key, _, value in (pair.partition("=") for pair in [*SMALL, "train.steps=30"])}
    options = {"archs": ["llama", "llama+canon=A"], "lrs": [3e-3], "seeds": 1, "out": out, "settings": settings}
    frame = canonlm.play("copying", **options | changes)
    return frame.filter(pl.col("kind") == "final", pl.col("metric") == "accuracy", pl.col("slice") == "all")


def _is_reported(out, stdout):
    expected = names("train.steps=30")
    for name in expected:
        assert f"{name}: finished, step 30/30  first item " in stdout
    assert "whole list" in stdout
    assert "architecture" in stdout
    assert stdout.rstrip().splitlines()[-1] == f"report: {out / 'report.html'}"
    play = json.loads((out / "play.json").read_text())
    assert [section["runs"] for section in play["sections"]] == [expected]
    assert play["command"].startswith("canonlm play copying --arch llama,llama+canon=A ")
    page = (out / "report.html").read_text()
    assert all(name in page for name in expected)
    for name in expected:
        files = {path.name for path in (out / "runs" / name).iterdir()}
        assert files >= {"config.yaml", "env.json", "metrics.jsonl", "result.json", "checkpoints", "log.txt"}


@pytest.mark.slow
def test_interrupted_and_resumed(tmp_path):
    """Ctrl-C to the parent only: both runs save, and no process is left; then the same command completes both."""
    arguments = command(tmp_path, "train.steps=150", "--jobs", "2")
    folders = [tmp_path / "runs" / name for name in names("train.steps=150")]
    with started(*arguments) as process:
        while not all((folder / "metrics.jsonl").exists() and rows_so_far(folder) for folder in folders):
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, stderr = process.communicate()
    assert process.returncode == 130
    assert stderr == f"canonlm: interrupted; every run is saved in {tmp_path}. The same command continues.\n"
    assert training_in(tmp_path) == []
    stopped = [int(next(iter((folder / "checkpoints").iterdir())).name[-8:]) for folder in folders]
    # On a busy machine the first run may end before the second has begun.
    cut = [folder for folder, step in zip(folders, stopped, strict=True) if step < 150]
    assert cut
    assert all(step > 0 for step in stopped)
    assert not any((folder / "result.json").exists() for folder in cut)

    assert main(arguments) == 0
    for folder in folders:
        reference = tmp_path / "reference" / folder.name
        train(load(folder / "config.yaml"), reference)
        assert rows(folder) == rows(reference)
        if folder in cut:
            assert f"stopped after step {stopped[folders.index(folder)]} of 150" in (folder / "log.txt").read_text()


def rows_so_far(folder):
    return (folder / "metrics.jsonl").read_text().count("\n")


def training_in(out):
    """Processes whose output goes to a file in the folder."""
    collected = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            output = (process / "fd" / "1").readlink()
        except OSError:
            continue
        if output.is_relative_to(out):
            collected.append(output)
    return collected
