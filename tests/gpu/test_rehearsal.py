"""`benchmarks/gpu.py` on the CPU: rows are written as they come, and a group that fails does not affect others."""

import importlib.util
import json
import os
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def rehearse(out, *options):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def results(out, group):
    return json.loads((out / f"{group}.json").read_text())


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("gpu")


@pytest.fixture
def started(gpu, tmp_path):
    def start(code):
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        log = tmp_path / "log"
        log.write_text("Traceback\nValueError: what went wrong\n")
        return gpu.Worker("conv", process, log)

    return start


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="needs a group that fails without Triton")
def test_a_failing_group_is_one_line_and_the_others_run(tmp_path):
    ended = rehearse(tmp_path, "--only", "fused,tune,conv")  # tuning needs Triton, which is not here
    assert ended.returncode == 1
    assert ended.stdout.splitlines().count("  failed: missing: triton") == 1
    summary = ended.stdout.partition("rows  state")[2].split("\n\n")[0].split()
    assert [word for word in summary if word in ("conv", "tune", "fused")] == ["conv", "fused", "tune"]
    assert "Traceback" not in ended.stdout + ended.stderr
    for group in ("conv", "fused"):
        content = results(tmp_path, group)
        assert content["state"] == "done"
        assert content["versions"]["torch"]
        values = [row["value"] for row in content["rows"]]
        assert sum(value is not None and value > 0 for value in values) > 5
        assert all(row["note"] for row in content["rows"] if row["value"] is None)
    assert results(tmp_path, "tune")["state"] == "failed: missing: triton"

    before = (tmp_path / "conv.json").read_bytes()
    assert rehearse(tmp_path, "--only", "tune").returncode == 1
    assert (tmp_path / "conv.json").read_bytes() == before


def test_groups_without_remaining_time_are_not_run(gpu, tmp_path):
    ended = rehearse(tmp_path, "--minutes", "0.01")
    assert ended.returncode == 0
    assert ended.stdout.count("not run: no time left") == len(gpu.GROUPS)
    assert "go on with: --only doctor,tests,sanitizer,conv," in ended.stdout


def archived(out, group):
    with tarfile.open(out / "gpu.tar.gz") as tar, suppress(KeyError):
        return json.load(tar.extractfile(f"{group}.json"))["rows"]
    return []


@pytest.mark.slow
def test_what_was_measured_is_in_the_archive_when_the_command_is_ended(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(tmp_path), "--only", "conv"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "forward, PyTorch form" in line:
                process.terminate()
                break
        process.stdout.read()
    assert process.returncode == 143
    assert archived(tmp_path, "conv") == results(tmp_path, "conv")["rows"] != []


def test_an_unknown_group(tmp_path):
    ended = rehearse(tmp_path, "--only", "convolution")
    assert ended.returncode == 2
    assert 'unknown group "convolution"' in ended.stderr


def test_a_hanging_group_is_stopped_with_its_child_processes(started, tmp_path):
    pid = tmp_path / "pid"
    code = f"""
import pathlib, subprocess, time
pathlib.Path({str(pid)!r}).write_text(str(subprocess.Popen(["sleep", "60"]).pid) + "\\n")
time.sleep(60)
"""
    worker = started(code)
    while not (pid.exists() and pid.read_text().endswith("\n")):
        time.sleep(0.01)
    assert worker.wait(0.1) == "stopped at its limit of 0 s"
    gone, end = False, time.monotonic() + 10
    while not gone and time.monotonic() < end:
        stat = Path(f"/proc/{pid.read_text().strip()}/stat")
        gone = not stat.exists() or stat.read_text().split()[2] == "Z"
    assert gone


def test_without_the_parent_process_nothing_is_run(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(tmp_path), "--group", "tune"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert ended.returncode == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("import os; os.kill(os.getpid(), 11)", "failed: killed by SIGSEGV"),
        ("raise SystemExit(1)", "failed: ValueError: what went wrong"),
    ],
)
def test_a_group_that_dies(started, code, state):
    assert started(code).wait(20).startswith(state)


def test_rows_of_a_group_that_died_are_kept(gpu, tmp_path):
    from gpu_parts.rows import Results, Row

    results = Results(tmp_path, "conv")
    results.begin({"device": "a card"})
    results.add(Row("copy", {"shape": "1x2"}, 3.0, "us", target=">= 4"))
    Results(tmp_path, "conv").end("failed: killed by SIGSEGV", 1.0)
    assert results.read()["state"] == "failed: killed by SIGSEGV"
    [row] = results.rows
    assert (row.value, row.met) == (3.0, False)
    assert [path.name for path in tmp_path.iterdir()] == ["conv.json"]


@pytest.mark.parametrize(
    ("value", "target", "met"), [(3.0, "<= 4", True), (5.0, "<= 4", False), (4.0, ">= 4", True), (None, ">= 4", None)]
)
def test_targets(gpu, value, target, met):
    from gpu_parts.rows import Row

    assert Row("", {}, value, "", target=target).met is met


@pytest.mark.slow
def test_every_group(tmp_path):
    """Those that need no Triton, besides the two above."""
    groups = "doctor,train,generate,loss,attention,loop,memory,repeat,play"
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "gpu.py"), "--device", "cpu", "--out", str(tmp_path), "--only", groups],
        env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},  # no pool of compilers for each of these processes
        capture_output=True,
        text=True,
        timeout=560,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    for group in groups.split(","):
        content = results(tmp_path, group)
        assert content["state"] == "done", group
        assert any(row["value"] for row in content["rows"]), group
