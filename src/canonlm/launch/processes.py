"""One run as several processes on this machine: starts them as torchrun does, and waits for their end."""

import math
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from canonlm.core.errors import writing
from canonlm.core.files import append, make_folder
from canonlm.core.untrusted import last_lines
from canonlm.runs.folder import read_json
from canonlm.train.signals import PARENT, STOPS

POLL_SECONDS = 0.1
SETTLE_SECONDS = 10.0  # after a failure: time for the others to fail for the same reason, before they are ended
SAVE_SECONDS = 600.0  # after a signal: time to save, and for the others to finish their part of the checkpoint
GRACE_SECONDS = 15.0  # from SIGTERM to SIGKILL
STOPPED = 130  # the exit code of a run that a signal stopped, and that has saved

# Signals are passed on to the processes of the run; a closed terminal (SIGHUP) becomes SIGTERM.
_PASSED_ON = {number: number for number in STOPS}
if hasattr(signal, "SIGHUP"):
    _PASSED_ON[signal.SIGHUP] = signal.SIGTERM


@dataclass
class Rank:
    """One of the processes. The first one's output is the run's; the outputs of the others go to files."""

    rank: int
    process: subprocess.Popen
    log: Path | None
    note: Path  # for the reason of a failure, written before the others can fail because of it
    log_start: int = 0  # an earlier start of the same run may have written before

    @property
    def code(self) -> int | None:
        """The exit code, as in a shell: 128 + the signal's number if it was killed."""
        code = self.process.poll()
        return 128 - code if code is not None and code < 0 else code

    @property
    def killed_by(self) -> str | None:
        code = self.process.poll()
        return signal.Signals(-code).name if code is not None and code < 0 else None

    @property
    def why(self) -> dict[str, Any] | None:
        return read_json(self.note)

    @property
    def last_line(self) -> str:
        lines = [] if self.log is None else last_lines(self.log, self.log_start)
        return lines[-1].removeprefix("canonlm: ") if lines else ""


@dataclass(frozen=True)
class Outcome:
    """The run's exit code, and a message if the first process has not printed it."""

    code: int
    message: str = ""


def run(command: Sequence[str], count: int, logs: Path) -> Outcome:
    """Run `command` as `count` processes; the outputs of all but the first go to `logs/rank-1.txt` and so on.

    When one fails, the others are ended. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on, each once, and
    this function waits while the run saves; a second Ctrl-C does not wait. In any case, no process is left.
    """
    cores = os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ}
    environment |= {PARENT: str(os.getpid()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    received: list[int] = []  # noted, and passed on below: an exception in the middle of a start would lose the process
    handled = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {number: signal.signal(number, lambda number, frame: received.append(number)) for number in handled}
    ranks: list[Rank] = []
    with TemporaryDirectory() as notes:
        try:
            for rank in range(count):
                ranks.append(_start(command, rank, environment, logs, Path(notes)))
            first = _wait(ranks, received)
            if hung := [rank.rank for rank in ranks if rank.code is None] if first is None else []:
                what = f"rank {hung[0]} did not end within {SAVE_SECONDS:g} s after the signal, so the run was ended"
                return Outcome(1, f"{what}; run it again to continue from the newest checkpoint")
            return _outcome(ranks, first, received)
        finally:
            _end(ranks)
            for number, handler in previous.items():
                signal.signal(number, handler)


def free_port() -> int:
    """A port for the first process of a run, which listens on it some seconds later. Not one of those that systems give
    to connections (32,768 and above on Linux): any process, even one of the run, may have it by then."""
    for port in random.SystemRandom().sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.socket() as taken:
            taken.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port found between 20,000 and 30,000")


def _start(command: Sequence[str], rank: int, environment: dict[str, str], logs: Path, notes: Path) -> Rank:
    note = notes / f"rank-{rank}.json"
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(note)}
    with _open(logs / f"rank-{rank}.txt") if rank else nullcontext() as log:
        start = 0 if log is None else log.tell()  # before the process, whose writes move it
        # A session of its own: Ctrl-C reaches this process only, which then signals each of them once.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return Rank(rank, process, None if log is None else Path(log.name), note, start)


def _open(log: Path) -> IO[bytes]:
    with writing("--out", log.parents[1]):
        make_folder(log.parents[1], log.parent.name)
        return append(log)


def _wait(ranks: list[Rank], received: list[int]) -> Rank | None:
    """Wait until all have ended, or one has failed and the others had time to end. Returns the first that failed."""
    first, deadline, sent = None, math.inf, 0
    while time.monotonic() < deadline and any(rank.code is None for rank in ranks):
        time.sleep(POLL_SECONDS)
        while sent < len(received):
            number = signal.Signals(received[sent])
            if number == signal.SIGINT and sent:
                _send(ranks, signal.SIGKILL)
            elif number not in received[:sent]:
                _send(ranks, _PASSED_ON[number])
                _send(ranks, signal.SIGCONT)  # a stopped process gets no other signal, and the others wait for it
                deadline = min(deadline, time.monotonic() + SAVE_SECONDS)
            sent += 1
        failed = [rank for rank in ranks if rank.code]
        if failed and (first is None or first.code == STOPPED):
            # A stop by a signal is not a failure. Of two at the same moment, the killed one comes first: the other
            # only lost its partner.
            worst = min(failed, key=lambda rank: (rank.code == STOPPED, rank.killed_by is None, rank.rank))
            if worst is not first:
                first, patience = worst, SAVE_SECONDS if worst.code == STOPPED else SETTLE_SECONDS
                deadline = time.monotonic() + patience
    return first


def _outcome(ranks: list[Rank], first: Rank | None, received: list[int]) -> Outcome:
    if first is None:
        return Outcome(0)
    code = first.code or 0
    # Before training has begun, a signal kills a process: there is nothing to save.
    fatal = {_PASSED_ON[signal.Signals(number)].name for number in received}
    if signal.SIGINT in received[1:]:
        fatal.add("SIGKILL")
    if received and (code == STOPPED or first.killed_by in fatal):
        return Outcome(STOPPED)
    if first.killed_by is None and (noted := [rank for rank in ranks if rank.why]):
        return _outcome_of_the_first_to_fail(noted, code)
    # If all fail for the same reason, the first process has printed it.
    of_the_same = code == ranks[0].code and (code == 2 or not first.last_line)
    if first.killed_by is None and (first.rank == 0 or of_the_same):
        return Outcome(code)
    how = f"was killed by {first.killed_by}" if first.killed_by else f"ended with exit code {code}"
    reason = f": {first.last_line or 'no message'} (whole log: {first.log})" if first.log else ""
    return Outcome(code, f"rank {first.rank} {how}, so the run was ended{reason}")


def _outcome_of_the_first_to_fail(noted: list[Rank], code: int) -> Outcome:
    """The reason of the first failure: processes that lose a partner fail too, each with a traceback of its own."""
    notes = {rank.rank: rank.why or {} for rank in noted}
    first = min(noted, key=lambda rank: notes[rank.rank]["time"])
    message = notes[first.rank]["message"]
    if notes.get(0, {}).get("message") == message:  # all fail for the same reason
        first = noted[0]
        if notes[0]["printed"]:
            return Outcome(first.code or code)
    code = first.code or code
    log = f" (whole log: {first.log})" if first.log else ""
    lines = message.splitlines() or [""]
    return Outcome(code, f"rank {first.rank} ended with exit code {code}, so the run was ended: {lines[0]}{log}")


def _send(ranks: list[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.code is None:
            rank.process.send_signal(number)


def _end(ranks: list[Rank]) -> None:
    _send(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(rank.code is None for rank in ranks):
        time.sleep(POLL_SECONDS)
    _send(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
