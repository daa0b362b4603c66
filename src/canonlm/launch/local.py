"""Run a grid on this machine: one process per run, several at a time, each in its own folder."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from canonlm.launch.play import PlannedRun

State = Literal["waiting", "running", "finished", "failed", "stopped"]
POLL_SECONDS = 0.3


@dataclass
class Progress:
    """What is known of a run while the grid goes on; read from its folder."""

    run: PlannedRun
    state: State = "waiting"
    step: int = 0
    train_row: dict[str, Any] | None = None
    eval_row: dict[str, Any] | None = None
    message: str = ""
    slot: int = -1
    process: subprocess.Popen | None = field(default=None, repr=False)
    _offset: int = 0

    def read(self) -> bool:
        """Take in the rows that the run has written since; True if there were any."""
        path = self.run.folder / "metrics.jsonl"
        if not path.exists():
            return False
        if path.stat().st_size < self._offset:  # cut back by a resume
            self._offset = 0
        with path.open("rb") as file:
            file.seek(self._offset)
            lines = file.readlines()
        new = False
        for line in lines:
            if not line.endswith(b"\n"):
                break
            self._offset += len(line)
            row = json.loads(line)
            self.step, new = row["step"], True
            if row["kind"] == "eval":
                self.eval_row = row
            else:
                self.train_row = row
        return new

    @property
    def seconds_left(self) -> float | None:
        """At the pace so far; evaluations and checkpoints are not counted."""
        speed = (self.train_row or {}).get("tokens_per_s")
        train = self.run.config.train
        return (
            None if not speed else (train.steps - self.step) * train.batch_size * self.run.config.data.seq_len / speed
        )


def gpus() -> list[str]:
    """The GPUs that runs can be given, as `CUDA_VISIBLE_DEVICES` names them."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def default_jobs(runs: Sequence[PlannedRun]) -> int:
    """As many runs at a time as there are GPUs, or as their threads fit the cores."""
    cores, train = os.cpu_count() or 1, runs[0].config.train
    return max(1, (len(gpus()) if train.device != "cpu" else 0) or cores // (train.num_threads or cores))


def run_grid(runs: Sequence[PlannedRun], jobs: int, show: Callable[[list[Progress]], None]) -> list[Progress]:
    """Run what is not finished yet, `jobs` at a time; calls `show` whenever something changed.

    On KeyboardInterrupt every running process saves its state before the exception goes on; the folders resume.
    """
    grid, devices = [Progress(run) for run in runs], gpus()
    for progress in grid:
        progress.read()
        if (progress.run.folder / "result.json").exists():
            progress.state = "finished"
    show(grid)
    try:
        while any(p.state in ("waiting", "running") for p in grid):
            changed = False
            running = [p for p in grid if p.state == "running"]
            free = sorted(set(range(jobs)) - {p.slot for p in running})
            for slot, progress in zip(free, [p for p in grid if p.state == "waiting"], strict=False):
                _start(progress, slot, devices)
                changed = True
            for progress in running:
                changed |= progress.read()
                if progress.process is not None and (code := progress.process.poll()) is not None:
                    progress.read()
                    progress.state = "finished" if code == 0 else "failed"
                    progress.message = "" if code == 0 else _last_line(progress)
                    changed = True
            if changed:
                show(grid)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        _stop([p for p in grid if p.state == "running"])
        raise
    return grid


def _start(progress: Progress, slot: int, devices: list[str]) -> None:
    run = progress.run
    env = {**os.environ, "OMP_NUM_THREADS": str(run.config.train.num_threads or os.cpu_count() or 1)}
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    command = [sys.executable, "-m", "canonlm", "train", str(run.folder / "config.yaml"), "--out", str(run.folder)]
    with (run.folder / "log.txt").open("a", encoding="utf-8") as log:
        # A session of its own: Ctrl-C reaches the parent only, which then asks each child once.
        progress.process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    progress.state, progress.slot = "running", slot


def _stop(running: list[Progress]) -> None:
    for progress in running:
        assert progress.process is not None
        progress.process.send_signal(signal.SIGINT)
    for progress in running:
        assert progress.process is not None
        progress.process.wait()
        progress.state = "stopped"


def _last_line(progress: Progress) -> str:
    lines = (progress.run.folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"{lines[-1] if lines else 'no message'} (whole log: {progress.run.folder / 'log.txt'})"
