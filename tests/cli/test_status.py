"""A line that is shown while a command has no output yet, and output that nobody reads."""

import gc
import io
import os
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest

from canonlm.cli import main
from canonlm.cli import status as module
from canonlm.cli.status import doing, load_torch


class Terminal(io.StringIO):
    def isatty(self):
        return True


def replaced(monkeypatch, stderr, patience):
    """Called in the test itself, because pytest restores its own stream after the fixtures."""
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(module, "PATIENCE", patience)
    return stderr


def slow(stderr, error=None):
    with doing("reading the runs"):
        deadline = time.monotonic() + 10
        while not stderr.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
        if error:
            raise error


@pytest.mark.parametrize("error", [None, ValueError("no")])
def test_a_slow_block_shows_its_line_and_clears_it(monkeypatch, error):
    stderr = replaced(monkeypatch, Terminal(), 0.01)
    with pytest.raises(ValueError, match="no") if error else nullcontext():
        slow(stderr, error)
    assert stderr.getvalue() == "reading the runs …\r\x1b[2K"


def test_a_quick_block_shows_nothing(monkeypatch):
    stderr = replaced(monkeypatch, Terminal(), 60)
    with doing("reading the runs"):
        pass
    assert stderr.getvalue() == ""


def test_logs_get_nothing(monkeypatch):
    stderr = replaced(monkeypatch, io.StringIO(), 0)
    with doing("reading the runs"):
        time.sleep(0.05)
    assert stderr.getvalue() == ""


def without_a_reader():
    """A pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    return write


def complaints(stderr):
    return [line for line in stderr.splitlines() if "canonlm:" in line or "Error" in line]


def test_a_command_that_only_prints_ends_quietly_without_a_reader():
    command = [sys.executable, "-m", "canonlm", "--version"]
    done = subprocess.run(command, stdout=without_a_reader(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, complaints(done.stderr)) == (1, [])


def _train(folder):
    os.chdir(folder)
    os.dup2(without_a_reader(), 1)
    os.dup2(os.open("stderr.txt", os.O_WRONLY | os.O_CREAT), 2)
    raise SystemExit(main(["train", "run.yaml"]))


def test_training_goes_on_without_a_reader(tiny, tmp_path, start):
    tiny.yaml(tmp_path / "run.yaml", train={"steps": 2})
    process = start(_train, tmp_path)
    process.join()
    assert (process.exitcode, complaints((tmp_path / "stderr.txt").read_text())) == (0, [])
    assert (tmp_path / "runs/run/result.json").exists()


@pytest.mark.parametrize("had_torch", [False, True])
def test_what_a_command_imports_is_kept_out_of_collections(had_torch, monkeypatch):
    """Objects of a program that calls a command are not, as they may be garbage later."""
    import canonlm.models.build  # noqa: F401

    frozen = []
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    if not had_torch:
        monkeypatch.delitem(sys.modules, "torch")
    load_torch()
    assert bool(frozen) != had_torch
