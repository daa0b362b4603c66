"""Commands on a machine with faults: a full disk, no permission, a second process, a clock that jumps.

    python tests/abuse/faults.py [--only "full disk"]      every fault for every command; prints failures as JSON
    python tests/abuse/faults.py --every 3                 every third of these pairs, with all faults and commands

A line of `FAULTS` is a fault, a line of `COMMANDS` a command. Under the fault a command gives its result or a one-line
error. Afterwards the same command gives its undisturbed result, to the bit, and nothing is left over.
"""

import argparse
import ctypes
import json
import os
import random
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from abuse import forks, oracle
from abuse.cases import CASES, Case
from abuse.damage import Damage
from abuse.workshop import Workshop, command_in_fork

_CASES = {case.name: case for case in CASES}
_RUN = ("run/metrics.jsonl", "run/result.json", "run/checkpoints/*06/*.distcp")

COMMANDS = [
    Case("train", "recipe", "", "train run.yaml --out run", _RUN, reported=False),
    replace(_CASES["train, stopped"], result=_RUN),
    _CASES["export"],
    _CASES["eval"],
    _CASES["probe"],
    _CASES["report, page"],
    _CASES["results"],
    _CASES["convert, hf"],
    _CASES["data prepare"],
    Case("data dump", "recipe", "", "data dump copying --n 50 --out a.parquet", ("a.parquet",), reported=False),
    Case("report, play", "play", "", "report play", reported=False),
]


@dataclass(frozen=True)
class Fault:
    """around: a context manager that changes the folder. inside: runs in the process of the command, before it."""

    around: Callable[[Path], Iterator[None]]
    inside: Callable[[], None] = lambda: None


def _nothing(folder: Path) -> Iterator[None]:
    yield


def _modes(folders: int, files: int) -> Callable[[Path], Iterator[None]]:
    def around(folder: Path) -> Iterator[None]:
        places = [folder, *folder.rglob("*")]
        modes = {place: place.stat().st_mode for place in places}
        for place in reversed(places):
            place.chmod(folders if place.is_dir() else files)
        folder.chmod(0o755 if folders == 0 else folders)  # the current folder stays usable
        yield
        for place in places:
            place.chmod(modes[place])

    return around


def _full(room: int) -> Callable[[Path], Iterator[None]]:
    """A separate disk with little free space, filled."""

    def around(folder: Path) -> Iterator[None]:
        size = sum(path.stat().st_blocks * 512 for path in folder.rglob("*")) + 2**20
        aside = folder.with_name("aside")
        folder.rename(aside)
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
        try:
            subprocess.run(["cp", "-a", f"{aside}/.", folder], check=True)
            free = os.statvfs(folder)
            with folder.joinpath("filling").open("wb") as file:
                file.write(bytes(max(0, free.f_bavail * free.f_frsize - room)))
            yield
            subprocess.run(["rm", "-rf", aside], check=True)
            folder.joinpath("filling").unlink()
            subprocess.run(["cp", "-a", f"{folder}/.", aside], check=True)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
            folder.rmdir()
            aside.rename(folder)

    return around


def _ordinary() -> None:
    """Give up root's rights over files, as in an ordinary user's process."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3; this process
    if ctypes.CDLL(None, use_errno=True).capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), "capset")


def _small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_096, 4_096))


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 6,) * 2)


def _jumping_clock() -> None:
    """The wall clock jumps by years, back and forth; monotonic clocks do not."""
    draw, real = random.Random(0), time.time

    def jumping() -> float:
        return real() + draw.choice([0.0, 0.0, -(10**8), 10**8, -3600.0])

    time.time = jumping


FAULTS = {
    "a folder that may only be read": Fault(_modes(0o555, 0o444), _ordinary),
    "files that may not be read": Fault(_modes(0o755, 0o000), _ordinary),
    "folders that may not be entered": Fault(_modes(0o000, 0o644), _ordinary),
    "full disk": Fault(_full(0)),
    "a disk with a little room": Fault(_full(12_000)),
    "a disk that is full soon": Fault(_full(60_000)),
    "files may not grow": Fault(_nothing, _small_files),
    "few open files": Fault(_nothing, _few_files),
    "a jumping clock": Fault(_nothing, _jumping_clock),
}


def meet(workshop: Workshop, case: Case, fault: Fault) -> list[str]:
    """Problems when a command runs with a fault, and when it runs again without."""
    folder, command = workshop.copy(case.base), shlex.split(case.command)
    done = Damage("fault", "", (folder.name,))
    with contextmanager(fault.around)(folder):
        outcome = workshop.run(command, fault.inside)
        wrong = list(oracle.complaints(case, outcome, folder, done, None))
        wrong += [f"time: {row}" for row in _impossible(folder)]
    if outcome.code == 0 and oracle.result(case, outcome, folder) == workshop.before[case.name]:
        return wrong
    again = workshop.run(command)
    wrong += [f"again: {line}" for line in oracle.complaints(case, again, folder, done, None)]
    if again.code != 0:
        wrong.append(f"again: exit code {again.code}: {again.err[:300]}")
    elif oracle.result(case, again, folder) != workshop.before[case.name]:
        wrong.append("difference: another result")
    return wrong


def _impossible(folder: Path) -> Iterator[str]:
    """Rows with impossible times."""
    for path in folder.glob("run/metrics.jsonl"):
        if os.access(path, os.R_OK):
            elapsed = [
                json.loads(line).get("elapsed_s") for line in path.read_text().splitlines() if line.endswith("}")
            ]
            times = [value for value in elapsed if value is not None]
            if times != sorted(times) or not all(0 <= value < 10_000 for value in times):
                yield f"elapsed_s: {times}"


def twice(workshop: Workshop, case: Case) -> list[str]:
    """Problems when two processes run one command in one folder; one may report that the other is running."""
    folder, command = workshop.copy(case.base), shlex.split(case.command)
    notes = [workshop.place / f"notes-{number}" for number in range(2)]
    for place in notes:
        place.mkdir(exist_ok=True)
    mark = str(time.monotonic_ns())
    pids = [forks.start(lambda: command_in_fork(command), folder, place, mark) for place in notes]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    texts = [[(place / name).read_text(errors="replace") for name in ("out", "err")] for place in notes]
    done, wrong = Damage("fault", "", (folder.name,)), []
    outcomes = [forks.Outcome(code, *text) for code, text in zip(codes, texts, strict=True)]
    for outcome in outcomes:
        wrong += oracle.complaints(case, outcome, folder, done, None)
    good = [outcome for outcome in outcomes if outcome.code == 0]
    if not good:
        wrong.append(f"nobody did it: {[outcome.err[:200] for outcome in outcomes]}")
    elif any(oracle.result(case, outcome, folder) != workshop.before[case.name] for outcome in good):
        wrong.append("difference: another result")
    return wrong


def everything(workshop: Workshop, only: str, every: int) -> dict[str, list[str]]:
    """Problems by fault and command."""
    result = {}
    names = [name for name in (*FAULTS, "two processes") if fnmatch(name, only)]
    pairs = [(name, case) for i, name in enumerate(names) for j, case in enumerate(COMMANDS) if (i + j) % every == 0]
    workshop.add(COMMANDS)
    for name, case in pairs:
        try:
            wrong = meet(workshop, case, FAULTS[name]) if name in FAULTS else twice(workshop, case)
        except subprocess.CalledProcessError:
            wrong = ["skipped: nothing can be mounted here"]
        result[f"{name}: {case.name}"] = wrong
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="run commands while the machine fails them")
    parser.add_argument("--only", default="*", help="a fault, or a pattern of faults")
    parser.add_argument("--every", type=int, default=1, help="N: every N-th pair of a fault and a command")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="canonlm-faults-") as place:
        parsed = everything(Workshop(Path(place) / "faults", []), given.only, given.every)
    print(json.dumps(parsed, indent=1))
    return 1 if any(line for wrong in parsed.values() for line in wrong if not line.startswith("skipped")) else 0


if __name__ == "__main__":
    sys.exit(main())
