"""Run folders in: small frozen records out, and a reason for everything that was left out.

Nothing here trusts a file: see `files`. A run on text is another record (`text`), with losses and no accuracies.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import expected
from .files import DAMAGE, LeftOut, Recorded, Result, TrainRow, finite, read_config, recorded, writable
from .text import TextRun, load_text

__all__ = [
    "DAMAGE",
    "Count",
    "Evaluation",
    "LeftOut",
    "Result",
    "Run",
    "TextRun",
    "TrainRow",
    "evaluation",
    "in_order",
    "is_slice",
    "load_run",
    "load_runs",
    "primary",
    "scale_of",
    "slice_key",
    "task_of",
]


@dataclass(frozen=True)
class Count:
    """Answers that were right, of how many."""

    correct: int
    total: int

    @property
    def accuracy(self) -> float:
        return self.correct / self.total


@dataclass(frozen=True)
class Evaluation:
    """One eval row: `slices` maps a slice such as `k=1` to its count, `measures` a name such as `kl` to its number.

    A row may slice the same answers by several scales (`n=70`, `depth=1`, …). The first in the row is the primary one.
    """

    step: int
    slices: Mapping[str, Count]
    loss: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    unusable: tuple[str, ...] = ()  # names of measures without a usable number, as a diverged run has them

    @property
    def accuracy(self) -> float:
        """Mean over the slices of the primary scale, each slice weighing the same."""
        shares = [self.slices[key].accuracy for key in primary(self.slices)]
        return sum(shares) / len(shares)

    def value(self, key: str) -> float | None:
        """The accuracy on a slice or the number of a measure; None where the row has it not."""
        return self.slices[key].accuracy if key in self.slices else self.measures.get(key)


@dataclass(frozen=True, kw_only=True)
class Run(Recorded[Evaluation]):
    """A run on a task. `task_label` is the task with its settings."""

    task: str
    task_label: str


def load_run(folder: str | Path) -> Run | TextRun:
    """Read one run folder; `ValueError` says in one line why it cannot be read at all."""
    folder = Path(folder)
    config = read_config(folder)
    if config.get("text") is not None:
        return load_text(folder, config)
    task, label = task_of(config)
    return Run(task=task, task_label=label, **recorded(folder, config, evaluation, []))


def load_runs(folders: Iterable[str | Path]) -> tuple[list[Run | TextRun], list[LeftOut]]:
    """Read what can be read. A folder that holds no evaluation and no training row yet is left out too."""
    runs: list[Run | TextRun] = []
    left_out: list[LeftOut] = []
    for folder in map(Path, folders):
        try:
            run = load_run(folder)
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(writable(folder.name), writable(str(error))))
            continue
        if run.evals or run.train:
            runs.append(run)
        else:
            left_out.append(LeftOut(run.name, "; ".join(("nothing recorded yet", *run.notes))))
    return runs, left_out


def task_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The name of the task, and with its settings. ValueError: it has none."""
    task = config.get("task")
    spec = dict(task) if isinstance(task, dict) else {"name": task}
    name = spec.pop("name", None)
    if not isinstance(name, str):
        raise expected("task.name", "a task's name", name)
    settings = ", ".join(f"{key}={value}" for key, value in spec.items())
    return writable(name), writable(f"{name} ({settings})" if settings else name)


def slice_key(where: Mapping[str, Any]) -> str:
    """`{"k": 1}` → `k=1`; the key of a slice everywhere in the report (and in `chance` of `play.json`)."""
    return ", ".join(f"{key}={value}" for key, value in where.items()) or "all"


def is_slice(key: str) -> bool:
    """Slices and measures share tables and charts; no measure is named like a slice."""
    return "=" in key or key == "all"


def scale_of(key: str) -> str:
    """`k=1` → `k`: what the slice is one value of."""
    return key.partition("=")[0]


def in_order(keys: Iterable[str]) -> list[str]:
    """Each slice once, scale by scale as first named; inside a scale `k=2` before `k=10`, words last and as named."""
    keys = list(dict.fromkeys(keys))
    scales = list(dict.fromkeys(map(scale_of, keys)))
    numbers = {key: [float(part) for part in re.findall(r"\d+(?:\.\d+)?", key)] or [math.inf] for key in keys}
    return sorted(keys, key=lambda key: (scales.index(scale_of(key)), numbers[key]))


def primary(slices: Iterable[str]) -> list[str]:
    """Of slices in order, those of the first scale."""
    keys = list(slices)
    return [key for key in keys if scale_of(key) == scale_of(keys[0])]


def evaluation(row: Mapping[str, Any], step: int | None = None) -> Evaluation:
    """An eval row, at `step` unless it says its own. Raises one of `DAMAGE`."""
    slices = {}
    for entry in row["slices"]:
        count = Count(int(entry["correct"]), int(entry["total"]))
        if not 0 <= count.correct <= count.total:
            raise ValueError("more correct than asked")
        if count.total:
            slices[slice_key(entry["slice"])] = count
    if not slices:
        raise ValueError("nothing was asked")
    loss, measures = row.get("loss"), _measures(row)
    return Evaluation(
        int(row.get("step", step)),
        {key: slices[key] for key in in_order(slices)},
        float(loss) if finite(loss) else None,
        {name: float(value) for name, value in measures.items() if finite(value)},
        tuple(name for name, value in measures.items() if not finite(value)),
    )


def _measures(row: Mapping[str, Any]) -> dict[str, Any]:
    found = row.get("measures")
    found = found if isinstance(found, dict) else {}
    return {name: value for name, value in found.items() if name and not is_slice(name)}
