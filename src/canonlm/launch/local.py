"""The process of a run on this machine: how it is started and ended, and why it has ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from filelock import Timeout

from canonlm.core.files import append, lock
from canonlm.core.untrusted import last_lines
from canonlm.launch import fork_server
from canonlm.launch.grid import PlannedRun
from canonlm.runs.rows import one_line
from canonlm.train.load_config import create_folder
from canonlm.train.signals import PARENT

MAX_MESSAGE = 500  # letters


class Process(Protocol):
    """The process of a run."""

    def poll(self) -> int | None: ...
    def send_signal(self, number: int, /) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def gpus() -> list[str]:
    """The GPUs for runs, as in `CUDA_VISIBLE_DEVICES`."""
    import torch

    count = torch.cuda.device_count()  # CUDA ignores what follows an index that it does not have, such as -1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(i) for i in range(count)]


def start_process(run: PlannedRun, slot: int, devices: Sequence[str], environment: Mapping[str, str]) -> Process:
    """Train a run in a new process with this environment, which ends when this process does. Its output goes to
    `log.txt`."""
    create_folder(run.folder, run.config)
    threads = run.config.train.num_threads
    env = {**environment, PARENT: str(os.getpid()), "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1)}
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
