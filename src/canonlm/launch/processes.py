"""One run as several processes on this machine: start them as torchrun does, and see them to their end."""

import math
import os
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from canonlm.errors import writing
from canonlm.files import append
from canonlm.runs.folder import read_json
from canonlm.train.signals import PARENT, STOPS

POLL_SECONDS = 0.1
SETTLE_SECONDS = 10.0  # when one fails: for the others to fail of the same, before they are ended
SAVE_SECONDS = 600.0  # when one stopped as asked: for the others to finish their part of the checkpoint
GRACE_SECONDS = 15.0  # from SIGTERM to SIGKILL
STOPPED = 130  # the exit code of a run that was asked to stop and has saved

# What this process is told, it tells the others; of a closed terminal a run knows nothing.
_PASSED_ON = {number: number for number in STOPS}
if hasattr(signal, "SIGHUP"):
    _PASSED_ON[signal.SIGHUP] = signal.SIGTERM


@dataclass
class Rank:
    """One of the processes. The first one's output is the run's own; those of the others go into files."""

    rank: int
    process: subprocess.Popen
    log: Path | None
    note: Path  # where it says why it fails, before the others can fail of that
    log_start: int = 0  # an earlier start of the same run may have written before

    @property
    def code(self) -> int | None:
        """The exit code, as a shell gives it: 128 + the signal's number for one that was killed."""
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
        if self.log is None:
            return ""
        with self.log.open("rb") as file:
            file.seek(self.log_start)
            lines = file.read().decode(errors="replace").strip().splitlines()
        return lines[-1].removeprefix("canonlm: ") if lines else ""


@dataclass(frozen=True)
class Outcome:
    """The run's exit code, and what to say of it that the first process has not said."""

    code: int
    message: str = ""


def run(command: Sequence[str], count: int, logs: Path) -> Outcome:
    """Run `command` as `count` processes; the outputs of all but the first go to `logs/rank-1.txt` and so on.

    When one fails, the others are ended. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 are passed on, each once, and the
    run is waited for while it saves; a second Ctrl-C does not wait. However this ends, no process is left.
    """
    cores = os.cpu_count() or 1
    environment = {"OMP_NUM_THREADS": str(max(1, cores // count)), **os.environ}
    environment |= {PARENT: str(os.getpid()), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    asked: list[int] = []  # noted, and passed on below: an exception in the middle of a start would lose the process
    handled = [number for number in _PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores SIGHUP
    previous = {number: signal.signal(number, lambda number, frame: asked.append(number)) for number in handled}
    ranks: list[Rank] = []
    with TemporaryDirectory() as notes:
        try:
            for rank in range(count):
                ranks.append(_start(command, rank, environment, logs, Path(notes)))
            return _outcome(ranks, _wait(ranks, asked), asked)
        finally:
            _end(ranks)
            for number, handler in previous.items():
                signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def _start(command: Sequence[str], rank: int, environment: dict[str, str], logs: Path, notes: Path) -> Rank:
    note = notes / f"rank-{rank}.json"
    environment = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(note)}
    with _open(logs / f"rank-{rank}.txt") if rank else nullcontext() as log:
        # A session of its own: Ctrl-C reaches this process only, which then tells each of them once.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        return Rank(rank, process, None if log is None else Path(log.name), note, 0 if log is None else log.tell())


def _open(log: Path) -> IO[bytes]:
    with writing("--out", log.parents[1]):
        log.parent.mkdir(parents=True, exist_ok=True)
        return append(log)


def _wait(ranks: list[Rank], asked: list[int]) -> Rank | None:
    """Until all have ended, or one has failed and the others had their time. Returns the one that failed first."""
    first, deadline, told = None, math.inf, 0
    while time.monotonic() < deadline and any(rank.code is None for rank in ranks):
        time.sleep(POLL_SECONDS)
        while told < len(asked):
            number = signal.Signals(asked[told])
            if number == signal.SIGINT and told:
                _tell(ranks, signal.SIGKILL)
            elif number not in asked[:told]:
                _tell(ranks, _PASSED_ON[number])
            told += 1
        failed = [rank for rank in ranks if rank.code]
        if failed and (first is None or first.code == STOPPED):
            # To stop as asked is no failure; and of two in the same moment one was killed, the other lost its partner.
            worst = min(failed, key=lambda rank: (rank.code == STOPPED, rank.killed_by is None, rank.rank))
            if worst is not first:
                first, patience = worst, SAVE_SECONDS if worst.code == STOPPED else SETTLE_SECONDS
                deadline = time.monotonic() + patience
    return first


def _outcome(ranks: list[Rank], first: Rank | None, asked: list[int]) -> Outcome:
    if first is None:
        return Outcome(0)
    code = first.code or 0
    # Who is told before the training has begun dies of the signal, with nothing to save.
    fatal = {_PASSED_ON[signal.Signals(number)].name for number in asked}
    if signal.SIGINT in asked[1:]:
        fatal.add("SIGKILL")
    if asked and (code == STOPPED or first.killed_by in fatal):
        return Outcome(STOPPED)
    if first.killed_by is None and (noted := [rank for rank in ranks if rank.why]):
        return _outcome_of_the_first_to_fail(noted, code)
    # Where all fail of the same, the first process says so for all.
    of_the_same = code == ranks[0].code and (code == 2 or not first.last_line)
    if first.killed_by is None and (first.rank == 0 or of_the_same):
        return Outcome(code)
    how = f"was killed by {first.killed_by}" if first.killed_by else f"ended with exit code {code}"
    said = f": {first.last_line or 'no message'} (whole log: {first.log})" if first.log else ""
    return Outcome(code, f"rank {first.rank} {how}, so the run was ended{said}")


def _outcome_of_the_first_to_fail(noted: list[Rank], code: int) -> Outcome:
    """Who fails leaves the others without a partner, and they fail of that, each with a traceback of its own."""
    whys = {rank.rank: rank.why or {} for rank in noted}
    first = min(noted, key=lambda rank: whys[rank.rank]["time"])
    message = whys[first.rank]["message"]
    if whys.get(0, {}).get("message") == message:  # all fail of the same
        first = noted[0]
        if whys[0]["told"]:
            return Outcome(first.code or code)
    code = first.code or code
    log = f" (whole log: {first.log})" if first.log else ""
    lines = message.splitlines() or [""]
    return Outcome(code, f"rank {first.rank} ended with exit code {code}, so the run was ended: {lines[0]}{log}")


def _tell(ranks: list[Rank], number: signal.Signals) -> None:
    for rank in ranks:
        if rank.code is None:
            rank.process.send_signal(number)


def _end(ranks: list[Rank]) -> None:
    _tell(ranks, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < deadline and any(rank.code is None for rank in ranks):
        time.sleep(POLL_SECONDS)
    _tell(ranks, signal.SIGKILL)
    for rank in ranks:
        rank.process.wait()
