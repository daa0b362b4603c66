"""Signals that stop a run, requests to SLURM to start it again, and reports of failures.

Outside SLURM every signal means: save and stop. On SLURM it depends on the signal:

SIGUSR1, SIGUSR2   the time limit is near (`sbatch --signal=USR2@120`): SLURM would end the job for good, so we requeue
                   it.
SIGTERM            a preemption or `scancel`. SLURM itself requeues a preempted job, whatever its exit code, but only if
                   it still runs when the partition's grace time is over: one that has saved and exited before counts as
                   completed. So within the grace time we requeue it, too. A cancelled job stays cancelled.
SIGINT             a person at a terminal.

A process that `canonlm play` or `launch` started also stops, as on SIGTERM, if its parent is killed (see PARENT).
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

from canonlm.core.errors import about
from canonlm.core.files import write_json

STOPS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
AGAIN = "run it again to continue"
LATE_SECONDS = 10.0
PARENT = "CANONLM_PARENT"
"""The environment variable with the id of the process that must not end before this one."""

PARENT_SECONDS = 1.0  # between two checks of it
SCONTROL_SECONDS = 60.0  # a busy controller answers slowly


class Interrupted(Exception):
    """A signal stopped the run, and its state is saved."""


class Superseded(Interrupted):
    """Another worker has taken the run over (`canonlm.runs.leases`), or another process trains in the folder of this
    worker's run: this process writes nothing more."""


@contextmanager
def recording_failure() -> Iterator[None]:
    """If this process fails, write the reason to the file that torchrun or `canonlm.launch.processes` has named. The
    other processes then fail too, and one of them may be the first to end."""
    try:
        yield
    except Interrupted:
        raise
    except Exception as error:
        one_line = isinstance(error, (ValueError, FloatingPointError, OSError))  # printed in one line by rank 0
        message = about(error) if isinstance(error, OSError) else str(error)
        note_failure(message if one_line else f"{type(error).__name__}: {error}", printed=one_line)
        raise


def note_failure(message: str, printed: bool) -> None:
    """Write why this process fails to the file that the launcher has named, if it has. printed: by the first one."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        now = time.time()  # torchrun expects whole seconds
        with suppress(OSError):
            write_json(Path(path), {"message": message, "printed": printed, "timestamp": int(now), "time": now})


def follow_parent() -> None:
    """From now on, send this process SIGTERM once the process in PARENT has ended. Before training begins, that ends
    this process; during training it saves first."""
    if not (parent := os.environ.get(PARENT, "")).isdigit():
        return

    def poll() -> None:
        while os.getppid() == int(parent):
            time.sleep(PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=poll, name="parent", daemon=True).start()


class Signals:
    """Within this context, the signals in STOPS only set `received`, the number of the first one. The previous handlers
    are restored afterwards (submitit has some). For the main thread. hangup: a closed terminal (SIGHUP) is such a
    signal, too, unless it is ignored (nohup)."""

    def __init__(self, *, hangup: bool = False) -> None:
        self.received: int | None = None
        self.numbers = list(STOPS)
        if hangup and hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            self.numbers.append(signal.SIGHUP)

    def __enter__(self) -> "Signals":
        self._previous = {number: signal.signal(number, self._receive) for number in self.numbers}
        return self

    def let_interrupt(self) -> None:
        """From now on, Ctrl-C interrupts as it did before this context."""
        signal.signal(signal.SIGINT, self._previous[signal.SIGINT])

    def __exit__(self, *_: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: Any) -> None:
        self.received = self.received or number

    def next_step(self, main: bool) -> str:
        """Requeue a saved run, if possible, and return in words how it continues. Only `main` (rank 0) calls SLURM.

        The other processes must wait for it: if one of them ends, the launcher may end this one.
        """
        job = os.environ.get("SLURM_JOB_ID")
        if job is None or not main:
            return AGAIN
        deadline = time.monotonic() + LATE_SECONDS  # another rank may have got the signal first
        while self.received is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.received in (None, signal.SIGINT):
            return AGAIN
        try:
            if self.received == signal.SIGTERM and not _in_grace_time(job):
                return f"SLURM starts job {job} again if it preempted it"
            _scontrol("requeue", job)
        except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
            return f"job {job} could not be requeued ({error}); submit it again to continue"
        return f"job {job} is requeued and will continue"


def _in_grace_time(job: str) -> bool:
    output = _scontrol("show", "job", job)
    return "JobState=RUNNING" in output and re.search(r"\bPreemptTime=(?!None)\S", output) is not None


def _scontrol(*arguments: str) -> str:
    done = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=SCONTROL_SECONDS)
    if done.returncode != 0:
        raise RuntimeError(" ".join(done.stderr.split()) or f"scontrol ended with exit code {done.returncode}")
    return done.stdout
