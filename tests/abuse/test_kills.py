"""Kills while commands run: one of each in `make test-all`, the whole matrix with `make kills`."""

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


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    """By a program outside pytest, whose threads would break its forks."""
    command = [sys.executable, ABUSE / "kills.py", "--kills", "2", "--out", tmp_path / "kills.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=1200)
    assert (tmp_path / "kills.json").exists(), done.stdout + done.stderr
    rows = json.loads((tmp_path / "kills.json").read_text())["rows"]
    assert [row["kills"] for row in rows] == [1, 1, 1], done.stderr  # train, play, data prepare
    assert all(row["differences"] == row["leftovers"] == row["refused"] == [] for row in rows)


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
