"""`canonlm report`: its output files, and how it follows running runs."""

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from folders import evaluation, write_run
from rich.console import Console

from canonlm.cli import live, main
from canonlm.runs.watch import Watch

NASTY = "<img src=x onerror=alert(1)>[red]"


def row(step, correct=75):
    return evaluation(step, {("k", 1): (correct, 100)})


def write(folder, arch="llama", seed=0, steps=20):
    options = {"task": {"name": "depo", "N": 8}, "losses": [(5, 2.5)], "speed": 1234.5, "steps": 20}
    write_run(folder, arch=arch, seed=seed, evals=[row(10)], finished=False, **options)
    if steps == 20:
        finish(folder)
    return folder


def finish(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row(20, 93)) + "\n")
    (folder / "result.json").write_text(json.dumps({"steps": 20, "num_parameters": 1000, "final": row(20, 93)}))


def test_location_of_the_page(tmp_path, capsys, monkeypatch):
    one, two = write(tmp_path / "one" / "a"), write(tmp_path / "two" / "a", arch="llama+canon")
    assert main(["report", str(one.parent)]) == 0
    assert "report: " in capsys.readouterr().out
    assert (one.parent / "report.html").is_file()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert main(["report", str(one.parent), str(two.parent)]) == 0
    output = capsys.readouterr().out
    assert "llama+canon" in output
    assert "report: report.html" in output
    assert "depo (N=8)" in output or "depo" in output
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["report.html"]
    assert main(["report", str(one), "--out", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").is_file()
    assert not (one / "report.html").exists()


def test_a_home_folder_that_bash_leaves_as_it_is(tmp_path, monkeypatch):
    """bash puts it in for ~/page.html, but not after an equals sign."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert main(["report", str(write(tmp_path / "a")), "--out=~/page.html"]) == 0
    assert (tmp_path / "home" / "page.html").is_file()
    assert not (tmp_path / "~").exists()


def test_table_only_writes_no_page(tmp_path, capsys):
    folder = write(tmp_path / "runs" / "a")
    assert main(["report", str(tmp_path), "--table"]) == 0
    output = capsys.readouterr().out
    assert "93.0%" in output
    assert "report:" not in output
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["nowhere", "--watch"],
            "folder: expected a folder with runs or results of `canonlm eval` in it (No such file or directory), got "
            '"nowhere"',
        ),
        (["runs", "--out", "file/x.html"], '--out: expected a file in a folder that exists, got "file/x.html"'),
        (["nowhere", "--table", "--out", "x"], "--out cannot be used with --table, which writes no page"),
    ],
)
def test_refused(arguments, message, assert_refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "runs" / "a")
    (tmp_path / "file").write_text("mine")
    assert_refused(["report", *arguments], f"{message}\n")


def test_a_log_of_unfinished_runs(tmp_path, capsys, monkeypatch):
    write(tmp_path / "runs" / "done")
    going = write(tmp_path / "runs" / "going", seed=1, steps=10)
    monkeypatch.setattr(live.time, "sleep", lambda seconds: finish(going))
    assert main(["report", str(tmp_path), "--watch"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = [line for line in lines if re.match(r"(done|going): ", line)]
    assert facts[:2] == [
        "done: finished, step 20/20  loss 2.500  1 hop 0.93",
        "going: running, step 10/20  loss 2.500  1,234 tokens/s  1 hop 0.75",
    ]
    assert facts[2:] == ["going: finished, step 20/20  loss 2.500  1 hop 0.93"]
    assert lines[-1].startswith("report: ")
    assert (tmp_path / "report.html").is_file()


def test_following_what_has_finished_ends_at_once(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(live.time, "sleep", None)
    write(tmp_path / "runs" / "a")
    assert main(["report", str(tmp_path), "--watch", "--table"]) == 0
    assert not (tmp_path / "report.html").exists()
    assert "a: finished" in capsys.readouterr().out


def test_a_line_names_the_step_of_the_evaluation(tmp_path):
    folder = write(tmp_path / "runs" / "a", steps=10)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 15, "loss": 2.0, "tokens_per_s": None}) + "\n")
    (run,) = Watch(tmp_path).read((folder / "metrics.jsonl").stat().st_mtime)
    assert live.watched_line(run) == "a: running, step 15/20  loss 2.000  at step 10: 1 hop 0.75"


def shown(runs, width=140, height=40):
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(live.watched_table(runs, height))
    return console.file.getvalue()


def test_the_table(tmp_path):
    write(tmp_path / "runs" / "done")
    going = write(tmp_path / "runs" / "going", seed=1, steps=10)
    following = Watch(tmp_path)
    following.read((going / "metrics.jsonl").stat().st_mtime)
    lines = [line.split() for line in shown(following.runs).splitlines()]
    assert lines[0] == ["architecture", "task", "lr", "seed", "step", "tokens/s", "loss", "on", "the", "test", "state"]
    assert lines[1] == ["llama", "depo", "0.001", "1", "10/20", "1,234", "2.500", "1", "hop", "0.75", "running"]
    assert lines[2] == ["llama", "depo", "0.001", "0", "20/20", "2.500", "1", "hop", "0.93", "finished"]
    assert lines[3][:4] == ["1", "of", "2", "finished."]


def test_a_truncated_table_counts_hidden_runs_and_names_equal_ones(tmp_path):
    for place in range(30):
        write(tmp_path / "runs" / f"run{place:02}", arch=NASTY, steps=10 if place == 29 else 20)
    following = Watch(tmp_path)
    following.read(time.time())
    text = shown(following.runs, width=200, height=14)
    assert "29 of 30 finished, 20 more not shown." in text
    assert text.splitlines()[1].split()[0] == "run29"  # running runs come first
    assert text.count("\n") <= 13
    assert NASTY in text


def read_until(source, wanted, seconds=300):
    text = b""
    while wanted not in text:
        assert select.select([source], [], [], seconds)[0], f"nothing came after {text!r}"
        more = os.read(source, 4096)
        assert more, f"it ended with {text!r}"
        text += more
    return text


@pytest.mark.slow
@pytest.mark.parametrize("terminal", [False, True])
def test_ctrl_c_stops_watching_and_writes_the_report_so_far(tmp_path, terminal):
    write(tmp_path / "runs" / "going", steps=10)
    leader, follower = os.openpty()
    command = [sys.executable, "-m", "canonlm", "report", str(tmp_path), "--watch"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}
    with subprocess.Popen(command, stdout=follower if terminal else subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True, env=environment,
                          preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)) as process:  # fmt: skip
        # (A test run in the background has SIGINT ignored, and its children would ignore it too.)
        os.close(follower)
        source = leader if terminal else process.stdout.fileno()
        text = read_until(source, b"1 hop 0.75")
        process.send_signal(signal.SIGINT)
        text += read_until(source, b"report: ")
        assert process.wait(timeout=300) == 130
        assert process.stderr.read() == b""
    os.close(leader)
    assert (tmp_path / "report.html").is_file()
    assert b"Traceback" not in text
    if terminal:
        assert text.count(b"\x1b[?25l") == text.count(b"\x1b[?25h") == 1  # the cursor is back
