"""`canonlm work`: a folder of runs, from unfinished to finished."""

import json
import os
import re
import shutil
import socket
from pathlib import Path

import pytest

from canonlm.cli import main
from canonlm.runs.leases import Leases
from canonlm.train.load_config import create_folder
from canonlm.train.loop import train


@pytest.fixture(scope="module")
def planned(tiny, tmp_path_factory):
    """A folder of three runs, of which one is finished."""
    root = tmp_path_factory.mktemp("planned") / "many"
    for seed in range(3):
        create_folder(root / f"seed{seed}", tiny(train={"seed": seed, "steps": 20}))
    train(tiny(train={"seed": 0, "steps": 20}), root / "seed0")
    return root


@pytest.fixture
def runs(planned, tmp_path):
    return shutil.copytree(planned, tmp_path / "many")


def test_remaining_runs_and_their_progress(runs, capsys):
    lease = Leases(runs / "leases", 20.0)
    (runs / "leases").mkdir()
    held = lease.claim("seed1")
    assert main(["work", str(runs), "--status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed0: done, step 20/20"
    who = re.escape(f"{socket.gethostname()} (process {os.getpid()})")
    assert re.fullmatch(rf"seed1: running, step 0/20, on {who}, last heartbeat \d+ s ago", lines[1])
    assert lines[2:] == ["seed2: waiting, step 0/20", "1 waiting, 1 running, 1 done"]
    held.release()

    assert main(["work", str(runs), "--dry-run", "--gpu", "h100"]) == 0
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert rows["runs"] == "3, of which 1 are finished"
    assert rows["tokens"] == f"{3 * 20 * 4 * 18:.3e}, left {2 * 20 * 4 * 18:.3e}"
    assert rows["hours"] == "0.0 on one h100 at 40% of its peak, for what is left"
    assert main(["work", str(runs), "--dry-run"]) == 0
    assert re.search(
        r"hours +0\.0 on this machine, a run at a time \([\d.,]+ GFLOP/s measured\)", capsys.readouterr().out
    )


MISTAKES = [
    (["."], "DIR: expected a folder of runs, each with its config.yaml, got"),
    (["many", "array=2"], "array=2: settings of a job only work with --slurm"),
    (["many", "--jobs", "0", "--slurm", "time=5", "tasks=1"], '--jobs: expected a number >= 1, got "0"'),
    (["many", "--slurm", "--status", "time=5", "tasks=1"], "--status cannot be used with --slurm"),
    (
        ["many", "--slurm", "time=5", "tasks=1", "array=x"],
        'array: expected one integer >= 1, the number of jobs, got "array=x"',
    ),
    (["many", "--dry-run", "--gpu", "h10"], 'unknown GPU "h10". Did you mean "h100"?'),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES)
def test_invalid_arguments(runs, tmp_path, monkeypatch, assert_refused, arguments, start):
    monkeypatch.chdir(tmp_path)
    assert_refused(["work", *arguments], start)


@pytest.mark.slow
def test_all_are_finished(runs, tiny, tmp_path, capsys):
    """One command, with a run that fails; then again, with nothing left to do."""
    shutil.copytree(runs / "seed1", runs / "damaged")
    (runs / "damaged" / "checkpoints").write_text("not a folder")
    command = ["work", str(runs), "--jobs", "2"]
    assert main(command) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "all 4 runs are settled: 2 finished here, 1 failed"
    assert printed.out.splitlines().count("damaged: started") == 3
    assert printed.err.startswith("canonlm: damaged failed: ")
    for seed in range(3):
        train(tiny(train={"seed": seed, "steps": 20}), reference := tmp_path / f"reference{seed}")
        tiny.same(runs / f"seed{seed}", reference)
    main(command)
    assert capsys.readouterr().out == "all 4 runs are settled: 0 finished here, 1 failed\n"
    assert json.loads((runs / "leases" / "damaged.failures.json").read_text())[0]["host"] == socket.gethostname()
    assert Path(runs / "damaged" / "log.txt").exists()
