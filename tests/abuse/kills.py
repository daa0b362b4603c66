"""Kill our commands at random moments, run them again until they finish, and compare with undisturbed ones.

    python tests/abuse/kills.py --kills 200 --out benchmarks/results/kills-cpu.json     the whole matrix (`make kills`)
    python tests/abuse/kills.py --kills 10 --only train --seed 3

Of 200 kills, 100 hit `train`, 50 `play` and 50 `data prepare --workers 2`. Each is SIGKILL at a moment drawn from the
seed, to the command or, equally often, to one of the processes that it has started. The rows without timings, the last
checkpoint and the shards must be equal, bit for bit; and no temporary file and no process may be left.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from abuse import bases, forks
from abuse.oracle import untimed

PATIENCE = 1200.0  # seconds that an undisturbed command may take, on a busy machine
SETTLE = 60.0  # seconds for the processes of a killed command to end

STEPS = {"train.steps": 40, "train.checkpoint_every": 5, "train.eval_every": 10, "train.eval_size": 8}
PLAY = {
    **STEPS,  "train.batch_size": 2, "model.num_hidden_layers": 1, "model.hidden_size": 16,
    "model.num_attention_heads": 2,
}  # fmt: skip
OFTEN = {"train": 0.5, "play": 0.25, "prepare": 0.25}


@dataclass
class Row:
    """The outcomes of the kills of one command."""

    command: str
    kills: int = 0
    of_its_processes: int = 0  # kills of processes that the command had started
    finished: int = 0  # times that it finished and was compared
    differences: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # messages of repeated commands that did not continue
    seconds: float = 0.0


@dataclass(frozen=True)
class Subject:
    """A command, its input, and its results."""

    args: list[str]
    begin: Callable[[Path], None]
    result: Callable[[Path], dict[str, object]]


def _settings(values: dict[str, object]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def _documents(folder: Path) -> None:
    for number in range(6):
        bases.text(folder / f"{number}.jsonl", 400)


SUBJECTS = {
    "train": Subject(["train", "run.yaml", *_settings(STEPS), "data.workers=1", "--out", "run"], bases.recipe,
                     lambda folder: run_result(folder / "run")),
    "play": Subject(["play", "copying", *_settings(PLAY), "--seeds", "1", "--lr", "1e-3", "--jobs", "2",
                     "--out", "play"],
                    lambda folder: None,
                    lambda folder: {run.name: run_result(run) for run in sorted((folder / "play" / "runs").iterdir())}),
    "prepare": Subject(["data", "prepare", "data", *(f"--input={number}.jsonl" for number in range(6)), "--tasks", "24",
                        "--tokenizer", "bytes", "--validation", "0.1", "--workers", "2"], _documents,
                       lambda folder: digests(folder / "data")),
}  # fmt: skip


def digests(folder: Path) -> dict[str, object]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def run_result(run: Path) -> dict[str, object]:
    """The results of training, without what a kill may leave on purpose: discarded rows, and the lock."""
    rows = [untimed(json.loads(line)) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = max((run / "checkpoints").glob("step-*"))  # not the others: a stopped run has saved more
    tensors = {key: value for key, value in digests(last).items() if key.endswith(".distcp")}
    return {"rows": rows, "result": untimed(json.loads((run / "result.json").read_text())), **tensors}


class Killer:
    def __init__(self, place: Path, subject: Subject, row: Row, draw: random.Random) -> None:
        self.place, self.subject, self.row, self.draw = place, subject, row, draw
        self.notes = place / "notes"
        self.notes.mkdir()

    def kill(self, wanted: int) -> None:
        """Kill until `wanted` kills are done and the last run has finished."""
        full = self.place / "whole"
        self._begin(full)
        began = time.monotonic()
        if self._run(full, None) != 0:
            raise RuntimeError((self.notes / "err").read_text())
        usual, reference = time.monotonic() - began, self.subject.result(full)
        while self.row.kills < wanted:
            folder = self.place / "killed"
            shutil.rmtree(folder, ignore_errors=True)
            self._begin(folder)
            tries = 0
            while True:
                again = self.row.kills < wanted and tries < 25  # every folder gets finished
                code = self._run(folder, self.draw.uniform(0, usual) if again else None)
                tries += 1
                if code == 0:
                    break
                if code is not None:
                    answer = (self.notes / "err").read_text().strip()[-300:]
                    if not again:
                        raise RuntimeError(f"it does not finish: {answer}")
                    self.row.refused.append(answer)
            self.row.finished += 1
            print(
                f"{self.row.kills} of {wanted} kills, {self.row.finished} times finished", file=sys.stderr, flush=True
            )
            self._compare(folder, reference)

    def _begin(self, folder: Path) -> None:
        folder.mkdir()
        self.subject.begin(folder)

    def _run(self, folder: Path, after: float | None) -> int | None:
        """Run the command; returns its exit code, or None if it was killed `after` that number of seconds."""
        from canonlm.cli import main

        mark = f"{time.monotonic_ns()}"
        pid = forks.start(lambda: main(self.subject.args), folder, self.notes, mark)
        end = time.monotonic() + (PATIENCE if after is None else after)
        while time.monotonic() < end:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._settled(pid, mark)
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        if after is None:
            raise RuntimeError(f"it hangs: {(self.notes / 'err').read_text()[-300:]}")
        others = [process for process in forks.family(pid, mark) if process != pid]
        victim = self.draw.choice(others) if others and self.draw.random() < 0.5 else pid
        self.row.kills += 1
        self.row.of_its_processes += victim != pid
        os.kill(victim, signal.SIGKILL)
        code = None
        if victim != pid:  # the command reports it and ends, or repeats the work
            limit = time.monotonic() + PATIENCE
            while not (done := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > limit:
                    self.row.leftovers.append("the command waits for a process that was killed")
                    os.kill(pid, signal.SIGKILL)
                    done = os.waitpid(pid, 0)
                    break
                time.sleep(0.01)
            code = 0 if os.waitstatus_to_exitcode(done[1]) == 0 else None
        else:
            os.waitpid(pid, 0)
        self._settled(pid, mark)
        return code

    def _settled(self, pid: int, mark: str) -> None:
        """Wait for the processes that a command has started; those that remain are leftovers, and are killed."""
        end = time.monotonic() + SETTLE
        while (left := forks.family(pid, mark)) and time.monotonic() < end:
            time.sleep(0.05)
        for process in left:
            self.row.leftovers.append(f"a process: {forks.command_of(process)[:200]}")
            os.kill(process, signal.SIGKILL)
        while forks.family(pid, mark):
            time.sleep(0.05)

    def _compare(self, folder: Path, reference: dict[str, object]) -> None:
        result = self.subject.result(folder)
        self.row.differences += [
            key for key in reference.keys() | result.keys() if reference.get(key) != result.get(key)
        ]
        self.row.leftovers += [str(path.relative_to(folder)) for path in folder.rglob("*.tmp-*")]


def matrix(kills: int, seed: int, only: list[str], on_row: Callable[[list[Row]], None]) -> list[Row]:
    import torch

    from canonlm.cli import main  # noqa: F401  every fork has it

    torch.set_num_threads(1)
    rows = []
    for name, part in OFTEN.items():
        if only and name not in only:
            continue
        row, began = Row(" ".join(["canonlm", *SUBJECTS[name].args])), time.monotonic()
        rows.append(row)
        with tempfile.TemporaryDirectory(prefix="canonlm-kills-") as place:
            killer = Killer(Path(place), SUBJECTS[name], row, random.Random(f"{seed} {name}"))
            killer.kill(max(1, round(kills * (1 / len(only) if only else part))))
        row.seconds = round(time.monotonic() - began, 1)
        on_row(rows)
    return rows


def _machine() -> dict[str, object]:
    from canonlm.train.machine import cpu_name

    return {"processor": cpu_name(), "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1),
            "system": f"{platform.system()} {platform.machine()}", "python": platform.python_version()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="kill our commands at random moments")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"some of {', '.join(OFTEN)}, with commas between them")
    parser.add_argument("--out", type=Path, help="a JSON file for the rows")
    options = parser.parse_args()

    def write(rows: list[Row]) -> None:
        print(json.dumps(asdict(rows[-1]), indent=1), flush=True)
        if options.out:
            result = {"machine": _machine(), "seed": options.seed, "rows": [asdict(row) for row in rows]}
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    rows = matrix(options.kills, options.seed, [name for name in options.only.split(",") if name], write)
    wrong = sum(len(row.differences) + len(row.leftovers) for row in rows)
    print(f"{sum(row.kills for row in rows)} kills, {sum(row.finished for row in rows)} times finished, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
