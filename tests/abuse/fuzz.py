"""Damage folders and files, run our commands on them, and report what went wrong (`make fuzz`).

    python tests/abuse/fuzz.py --seconds 600 --failures runs/fuzz              all commands
    python tests/abuse/fuzz.py --seconds 60 --only "export*;plan" --seed 7     some of them, other damages

The same seed tries the same cases in the same order. A failure is kept as a folder: the damaged input, the command in
`command.txt`, and what it printed.
"""

import argparse
import json
import math
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatch
from itertools import count
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from abuse import bases, damage, faults, oracle  # before torch: forks sets the number of threads
from abuse.cases import CASES, SETTINGS, Case
from abuse.forks import Outcome
from abuse.workshop import Workshop

ROUND = 12  # damages that hypothesis draws from one seed, for one command


class Fuzzer:
    """Runs cases; counts attempts and collects failures."""

    def __init__(self, place: Path, failures: Path | None, only: list[str]) -> None:
        self.cases = [case for case in CASES if not only or any(fnmatch(case.name, name) for name in only)]
        self.settings = SETTINGS if not only or "settings" in only else {}
        self.workshop, self.failures = Workshop(place, self.cases), failures
        self.folder, self.kept = self.workshop.folder, place / "kept"
        self.tried: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.found: dict[tuple[str, str, str], str] = {}
        self.damageable: dict[str, list[str]] = {}
        for case in self.cases:
            names = bases.describe(place / case.base)
            self.damageable[case.name] = [name for name in names if fnmatch(name, case.damaged)]
            if not self.damageable[case.name]:
                raise RuntimeError(f"{case.name}: no file is {case.damaged}")

    def attempt(self, case: Case | None, draw: damage.Draw, end: float) -> None:
        """Run one command on one damage, or (None) with junk in its settings. After `end` it only draws, since
        hypothesis requires the same draws every time."""
        self.workshop.copy("recipe" if case is None else case.base)
        if case is None:
            junk = draw(st.sampled_from(damage.JUNK + damage.JUNK_YAML))
            start, names = draw(st.sampled_from(sorted(self.settings.items())))
            command = [*shlex.split(start), f"{draw(st.sampled_from(names))}={junk}"]
            case = Case("settings", "", "", shlex.join(command), large=command[0] == "data")
            done = damage.Damage("value", f"{' '.join(command)[:120]}")
        else:
            file = draw(st.sampled_from(self.damageable[case.name]))
            others = [name for name in self.damageable[case.name] if name != file]
            done = damage.apply(self.folder, file, others, draw)
            command = shlex.split(case.command)
        if time.monotonic() > end:
            return
        kept = self._keep(command)
        outcome = self.workshop.run(command)
        self.tried[case.name] += 1
        self.ended["ended" if outcome.ended else f"exit code {outcome.code}"] += 1
        before = self.workshop.before.get(case.name)
        for complaint in oracle.complaints(case, outcome, self.folder, done, before):
            self._note(case, done, complaint, outcome, kept)
        shutil.rmtree(kept, ignore_errors=True)

    def _keep(self, command: list[str]) -> Path:
        """Copy the command's input; links and FIFOs are recreated by name."""
        kept = self.kept
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(self.folder, kept, symlinks=True, ignore=lambda folder, names: [
            name for name in names if not _ordinary(Path(folder, name))])  # fmt: skip
        (kept / "command.txt").write_text(shlex.join(["canonlm", *command]) + "\n", errors="replace")
        return kept

    def _note(self, case: Case, done: damage.Damage, complaint: str, outcome: Outcome, kept: Path) -> None:
        key = case.name, complaint[:60], _where(outcome)
        if key in self.found:
            return
        self.found[key] = f"{case.name}: {' '.join(done.files)}: {done.words}\n    {complaint}\n    {_where(outcome)}"
        print(self.found[key], flush=True)
        if self.failures is not None and kept.exists():
            place = self.failures / f"{len(self.found):03}-{case.name.replace(' ', '-').replace(',', '')}"
            shutil.rmtree(place, ignore_errors=True)
            shutil.copytree(kept, place, symlinks=True)
            printed = ["--- standard output", outcome.out, "--- standard error", outcome.err, outcome.stack]
            text = "\n".join([*done.files, done.words, complaint, *outcome.events, *printed])
            (place / "printed.txt").write_text(text, errors="replace")


def _ordinary(path: Path) -> bool:
    return path.is_symlink() or path.is_dir() or (path.is_file() and path.stat().st_size < 2**26)


def _where(outcome: Outcome) -> str:
    """The innermost line of our code in a traceback, or in the stack of a process that hung."""
    lines = [line.strip() for line in (outcome.err + outcome.stack).splitlines() if "/src/canonlm/" in line]
    return (lines[0] if outcome.stack else lines[-1]).replace(str(Path.cwd()), "")[:160] if lines else ""


def fuzz(
    seconds: float, first: int, failures: Path | None, only: list[str], each: int | None = None, every: int = 0
) -> dict:
    """Try cases for `seconds`, or `each` damages for every command; then every `every`-th fault. Returns the counts and
    the failures."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="canonlm-fuzz-", dir=shared if shared.is_dir() else None) as place:
        fuzzer = Fuzzer(Path(place) / "fuzz", failures, only)
        print(f"undamaged folders and results are made; {len(fuzzer.cases)} commands", flush=True)
        end = math.inf if each else time.monotonic() + seconds
        rota = [*fuzzer.cases, *([None] if fuzzer.settings else [])]
        for number in range(len(rota)) if each else count():
            if time.monotonic() > end:
                break
            _round(fuzzer, rota[number % len(rota)], first * 1_000_000 + number, end, each or ROUND)()
        met = faults.everything(fuzzer.workshop, "*", every) if every else {}
    return {
        "cases": fuzzer.tried.total(),
        "by command": dict(fuzzer.tried.most_common()),
        "outcomes": dict(fuzzer.ended.most_common()),
        "failures": list(fuzzer.found.values()),
        "faults": met,
    }


def _round(fuzzer: Fuzzer, case: Case | None, number: int, end: float, size: int) -> Callable[[], None]:
    @seed(number)
    @settings(max_examples=size, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(st.data())
    def attempts(data: st.DataObject) -> None:
        fuzzer.attempt(case, data.draw, end)

    return attempts


def main() -> int:
    parser = argparse.ArgumentParser(description="damage files, run our commands on them")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--each", type=int, help="damages for every command, however long that takes")
    parser.add_argument("--faults", type=int, default=0, help="N: then every N-th pair of a fault and a command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="names of commands in cases.py, with semicolons between them")
    parser.add_argument("--failures", type=Path, help="a folder for what went wrong, to look at")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    options = parser.parse_args()
    if options.failures is not None:
        options.failures = options.failures.absolute()
        options.failures.mkdir(parents=True, exist_ok=True)
    only = [name for name in options.only.split(";") if name]
    result = fuzz(options.seconds, options.seed, options.failures, only, options.each, options.faults)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    for name, number in result["by command"].items():
        print(f"{number:6,}  {name}")
    print(f"{result['cases']:6,}  cases: {result['outcomes']}; {len(result['failures'])} distinct failures")
    return 1 if result["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
