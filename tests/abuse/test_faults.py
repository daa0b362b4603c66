"""Kills and faults while commands run: one kill of each in `make test-all`, the whole matrix with `make kills`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from canonlm.cli import main

ABUSE = Path(__file__).parent


def outcome(name, *arguments):
    """The output of a program of this folder. It runs outside pytest, whose threads would break its forks."""
    command = [sys.executable, str(ABUSE / name), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    done = outcome("kills.py", "--kills", 2, "--out", tmp_path / "kills.json")
    assert (tmp_path / "kills.json").exists(), done.stdout + done.stderr
    rows = json.loads((tmp_path / "kills.json").read_text())["rows"]
    assert [row["kills"] for row in rows] == [1, 1, 1], done.stderr  # train, play, data prepare
    assert all(row["differences"] == row["leftovers"] == row["refused"] == [] for row in rows)


@pytest.fixture(scope="module")
def faults():
    done = outcome("faults.py", "--every", 4)
    assert done.stdout.startswith("{"), done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_fault_and_every_command(faults):
    """Each is refused in one line, and the result afterwards is the undisturbed one, to the bit."""
    wrong = {name: lines for name, lines in faults.items() if lines and not lines[0].startswith("skipped")}
    assert wrong == {}
    assert len(faults) > 25


def _play(folder):
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    settings = ["train.steps=100000", "train.batch_size=2", "model.hidden_size=16", "model.num_attention_heads=2"]
    main(["play", "copying", *settings, "--arch", "llama", "--out", "play"])


@pytest.mark.slow
def test_a_play_that_is_killed_leaves_no_process(tmp_path, start):
    """Its training would hold the run's lock, so that the same command could not resume."""
    play = start(_play, tmp_path)
    try:
        end = time.monotonic() + 600
        while not list(tmp_path.glob("play/runs/*/metrics.jsonl")):
            assert play.is_alive()
            assert time.monotonic() < end
            time.sleep(0.05)
        play.kill()
        play.join()
        end = time.monotonic() + 120
        while _trains(tmp_path) and time.monotonic() < end:
            time.sleep(0.1)
        assert _trains(tmp_path) == []
    finally:
        play.kill()
        for process in _trains(tmp_path):
            os.kill(process, signal.SIGKILL)


def _trains(folder):
    """The processes whose current folder this is."""
    collected = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if place.joinpath("cwd").readlink() == folder and place.joinpath("cmdline").read_bytes():
                collected.append(int(place.name))
        except OSError:
            continue
    return collected
