"""What asks a run to stop, what SLURM has to be told so that it goes on later, and what is told of a failure.

Outside SLURM every signal means: save and stop. On SLURM it depends on who sends it:

SIGUSR1, SIGUSR2   the time limit comes (`sbatch --signal=USR2@120`): SLURM would end the job for good, so we have it
                   requeued.
SIGTERM            a preemption or `scancel`. SLURM itself requeues a preempted job, whatever its exit code, but only if
                   it is still there when the partition's grace time is over: one that has saved and left before
                   counts as completed. So within the grace time we ask, too. A cancelled job stays cancelled.
SIGINT             a person at a terminal.

A process that `canonlm play` or `launch` started also stops, as on SIGTERM, when that one was killed: PARENT.
"""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from canonlm.files import write_json

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
AGAIN = "run it again to continue"
LATE_SECONDS = 10.0
PARENT = "CANONLM_PARENT"
"""The environment variable with the id of the process that must not end before this one."""

PARENT_SECONDS = 1.0  # between two looks at it
SCONTROL_SECONDS = 60.0  # a busy controller takes its time


class Interrupted(Exception):
    """The run was asked to stop, and has saved its state."""


@contextmanager
def noting_why() -> Iterator[None]:
    """If this process fails, say so at once in the file that torchrun or `canonlm.launch.processes` has named: the
    others lose it and fail in their turn, and one of them may be the first to end."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            told = isinstance(error, (ValueError, FloatingPointError, OSError))  # by the first process, in one line
            message = str(error) if told else f"{type(error).__name__}: {error}"
            now = time.time()  # torchrun takes whole seconds
            with suppress(OSError):
                write_json(Path(path), {"message": message, "told": told, "timestamp": int(now), "time": now})
        raise


def follow_parent() -> None:
    """From now on this process gets SIGTERM when the one that PARENT names has ended: before the training begins that
    ends it, later it saves first."""
    if not (parent := os.environ.get(PARENT, "")).isdigit():
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent", daemon=True).start()


class Signals:
    """Within the block these signals do nothing but set `asked`, the number of the first one; then the former
    handlers are back (submitit has some). For the main thread."""

    def __init__(self) -> None:
        self.asked: int | None = None

    def __enter__(self) -> "Signals":
        self._previous = {number: signal.signal(number, self._ask) for number in STOPS}
        return self

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: Any) -> None:
        self.asked = self.asked or number

    def next_step(self, main: bool) -> str:
        """What happens to the run now that its state is saved, in words; `main` (rank 0) sees to it.

        The other processes have to wait for it: where one of them ends, whoever started them may end this one.
        """
        job = os.environ.get("SLURM_JOB_ID")
        if job is None or not main:
            return AGAIN
        deadline = time.monotonic() + LATE_SECONDS  # another rank may have been told first
        while self.asked is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.asked in (None, signal.SIGINT):
            return AGAIN
        try:
            if self.asked == signal.SIGTERM and not _in_grace_time(job):
                return f"SLURM starts job {job} again if it preempted it"
            _scontrol("requeue", job)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            return f"job {job} could not be requeued ({error}); submit it again to continue"
        return f"job {job} is requeued and will continue"


def _in_grace_time(job: str) -> bool:
    said = _scontrol("show", "job", job)
    return "JobState=RUNNING" in said and re.search(r"\bPreemptTime=(?!None)\S", said) is not None


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(" ".join(done.stderr.split()) or f"scontrol ended with exit code {done.returncode}")
    return done.stdout
