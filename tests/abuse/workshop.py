"""Undamaged folders, the results of commands on them, and a process with all imports that these commands need."""

import importlib
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from abuse import bases, oracle
from abuse.cases import Case
from abuse.damage import Damage
from abuse.forks import SECONDS, Outcome, run

ROOMS = {"canonlm", "torch", "transformers", "polars", "pyarrow", "datatrove", "safetensors", "plotly", "rich", "yaml",
         "numba", "tokenizers"}  # fmt: skip
FIRST = ["canonlm.cli", "canonlm.train.loop", "canonlm.suites.load_model", "canonlm.report.page"]


class Workshop:
    """`place` gets a folder for each base; `folder` is the copy in which commands work, `notes` has their output."""

    def __init__(self, place: Path, cases: Sequence[Case]) -> None:
        import torch

        torch.set_num_threads(1)
        self.place, self.folder, self.notes = place, place / "case", place / "notes"
        self.before: dict[str, dict[str, str]] = {}
        self.notes.mkdir(parents=True)
        _load(FIRST)
        self.add(cases)

    def add(self, cases: Sequence[Case]) -> None:
        """Make the bases that these cases need, and run their commands undamaged."""
        for name in sorted({"recipe", *(case.base for case in cases)}):
            if (self.place / name).exists():
                continue
            (self.place / name).mkdir()
            work = _and_tell(lambda name=name: bases.BASES[name](Path.cwd()) or 0)
            outcome = run(work, self.place / name, self.notes, limit=1200)  # it may compile samplers first
            if outcome.code != 0:
                raise RuntimeError(f"base {name}: {outcome.err} {outcome}")
            self._load_as_it_did()
        problems = [problem for case in cases for problem in self._first(case)]
        if problems:
            raise RuntimeError("\n".join(problems))
        threads = [path.joinpath("comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
        if len(threads) > 1:
            print(f"{len(threads)} threads, a fork may hang: {threads}", file=sys.stderr)

    def copy(self, base: str) -> Path:
        """A fresh copy of a base."""
        shutil.rmtree(self.folder, ignore_errors=True)
        return Path(shutil.copytree(self.place / base, self.folder))

    def run(self, command: Sequence[str], first: Callable[[], None] = lambda: None, limit: float = SECONDS) -> Outcome:
        """A command of ours in a fork, in `folder`. `first` is called in the fork."""
        return run(lambda: first() or command_in_fork(command), self.folder, self.notes, limit)

    def _first(self, case: Case) -> list[str]:
        """Run a case undamaged and keep its result."""
        self.copy(case.base)
        work = _and_tell(lambda: command_in_fork(shlex.split(case.command)))
        outcome = run(work, self.folder, self.notes, limit=600)
        self.before[case.name] = oracle.result(case, outcome, self.folder)
        self._load_as_it_did()
        wrong = list(oracle.complaints(case, outcome, self.folder, Damage(), None))
        return [f"undamaged {case.name}: {wrong} {outcome}"] if wrong or outcome.code != 0 else []

    def _load_as_it_did(self) -> None:
        _load((self.notes / "modules").read_text().split())


def command_in_fork(command: Sequence[str]) -> int:
    from canonlm.cli import main

    sys.argv = ["canonlm", *command]
    return main(command)


def _and_tell(work: Callable[[], int]) -> Callable[[], int]:
    """The same work, after which it records the modules that it has imported."""

    def working() -> int:
        code = work()
        (Path(os.environ["TMPDIR"]).parent / "modules").write_text("\n".join(sys.modules))
        return code

    return working


def _load(names: Iterable[str]) -> None:
    """Import modules, so that forks need not: our subpackages and their dependencies only."""
    for name in names:
        if name.split(".")[0] in ROOMS:
            try:
                importlib.import_module(name)
            except Exception:  # a module created at run time
                continue
