"""Run a grid on this machine: one process per run, several at a time, each in its own folder."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Literal, Protocol

from filelock import Timeout

from canonlm.core.files import append, lock
from canonlm.core.untrusted import last_lines
from canonlm.launch import fork_server
from canonlm.launch.grid import PlannedRun
from canonlm.runs.follow import Followed
from canonlm.runs.rows import evaluation, one_line, text_evaluation
from canonlm.train.signals import PARENT

State = Literal["waiting", "running", "finished", "failed"]
POLL_SECONDS = 0.3
MAX_MESSAGE = 500  # letters
_ENDS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Process(Protocol):
    """The process of a run."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Progress(Followed):
    """The progress of a run in a grid, read from its folder."""

    def __init__(self, run: PlannedRun) -> None:
        super().__init__(run.folder / "metrics.jsonl", evaluation if run.config.text is None else text_evaluation)
        self.run = run
        self.state: State = "waiting"
        self.message = ""
        self.first_step = 0  # at the start of its process: above 0 if it was continued
        self.seconds: float | None = None  # its process's time; None while it runs, or if it was finished before
        self.slot = -1
        self.begin = 0.0  # of its process, by the monotonic clock
        self.process: Process | None = None

    @property
    def time_left(self) -> float | None:
        """In seconds."""
        train = self.run.config.train
        return self.seconds_left(train.steps, train.batch_size * self.run.config.data.seq_len)


def gpus() -> list[str]:
    """The GPUs for runs, as in `CUDA_VISIBLE_DEVICES`."""
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]


def default_jobs(runs: Sequence[PlannedRun]) -> int:
    """The number of runs at a time: the number of GPUs, or of runs whose threads fit the cores."""
    cores, train = os.cpu_count() or 1, runs[0].config.train
    return max(1, (len(gpus()) if train.device != "cpu" else 0) or cores // (train.num_threads or cores))


def run_grid(runs: Sequence[PlannedRun], jobs: int, show: Callable[[list[Progress]], None]) -> list[Progress]:
    """Run all unfinished runs, `jobs` at a time; calls `show` after every change.

    In any case, no run is left running: on Ctrl-C, SIGTERM or a closed terminal every running process saves its state,
    then KeyboardInterrupt is raised; the folders can be resumed. A second Ctrl-C does not wait for the saving.
    """
    grid, devices = [Progress(run) for run in runs], gpus()
    for progress in grid:
        progress.read()
        if (progress.run.folder / "result.json").exists():
            progress.state = "finished"
    show(grid)
    signals: list[int] = []  # noted, and raised below: an exception in the middle of a start would lose the process
    handled = [number for number in _ENDS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {number: signal.signal(number, lambda number, frame: signals.append(number)) for number in handled}
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
                    progress.message = "" if code == 0 else reason(progress.run.folder, code)
                    progress.seconds = time.monotonic() - progress.begin
                    changed = True
            if changed:
                show(grid)
            if signals:
                raise KeyboardInterrupt
            time.sleep(POLL_SECONDS)
    finally:
        unfinished = [p.process for p in grid if p.process is not None and p.process.poll() is None]
        for process in unfinished:
            end(process)
        for number, handler in previous.items():
            signal.signal(number, handler)
        for process in unfinished:
            process.wait()
    return grid


def _start(progress: Progress, slot: int, devices: list[str]) -> None:
    """Start a run, unless another command in the same folder has finished it since."""
    if (progress.run.folder / "result.json").exists():
        progress.read()
        progress.state = "finished"
        return
    progress.process = start_process(progress.run, slot, devices)
    progress.state, progress.slot = "running", slot
    progress.first_step, progress.begin = progress.step, time.monotonic()


def start_process(
    run: PlannedRun, slot: int, devices: Sequence[str], environment: Mapping[str, str] | None = None
) -> Process:
    """Train a run with an existing folder in a new process, which ends when this one does. Its output goes to
    `log.txt`. environment: of the new process; default: this process's."""
    threads = run.config.train.num_threads
    env = {**(os.environ if environment is None else environment), PARENT: str(os.getpid())}
    env["OMP_NUM_THREADS"] = str(threads or os.cpu_count() or 1)
    if devices:
        env["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    recipe = str(run.folder / "config.yaml")  # trusted: it has just been written from what the user typed
    arguments = ["train", recipe, "--trust", "--out", str(run.folder)]
    if can_fork(devices, threads):
        return fork_server.start(arguments, env, run.folder / "log.txt")
    with append(run.folder / "log.txt") as log:
        # A session of its own: Ctrl-C reaches the parent only, which then signals each child once.
        return subprocess.Popen(
            [sys.executable, "-m", "canonlm", *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def end(process: Process) -> None:
    """Let a process save its state and end, also one that is stopped (SIGSTOP): it gets no other signal before."""
    process.terminate()
    process.send_signal(signal.SIGCONT)


def can_fork(devices: Sequence[str], threads: int | None) -> bool:
    """Whether runs may be forks of a process with all imports: not with a GPU, whose state a fork loses, nor where
    libraries start threads for their computations while they are imported, nor outside Linux."""
    return sys.platform == "linux" and not devices and threads == 1


def reason(folder: Path, code: int) -> str:
    """One line on why a run's process ended with this exit code. A process that was killed at once has no log."""
    log = folder / "log.txt"
    lines = last_lines(log)
    if code == 2:  # it refused the run: other lines may be of another process in the same folder
        lines = [line for line in lines if line.startswith("canonlm: ")] or lines
    last = f"killed by {signal.Signals(-code).name}" if code < 0 else lines[-1] if lines else "no message"
    return f"{one_line(last.removeprefix('canonlm: '), MAX_MESSAGE)} (whole log: {log})"


def is_locked(folder: Path) -> bool:
    """Whether a process of this machine trains in the folder."""
    path = folder / ".lock"
    try:
        with lock(path, timeout=0) if path.exists() else nullcontext():
            return False
    except Timeout:
        return True
