"""Run folders in: small frozen records out, and a reason for everything that was left out.

Nothing here trusts a file: a run may be running, crashed, half-written or not a run at all. A folder without a readable
`config.yaml` is left out with a reason; a row of `metrics.jsonl` that does not parse is skipped and counted.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import yaml

from ..errors import expected

DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError)  # what a row that is no row raises when read


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

    @property
    def accuracy(self) -> float:
        """Mean over the slices of the primary scale, each slice weighing the same."""
        shares = [self.slices[key].accuracy for key in primary(self.slices)]
        return sum(shares) / len(shares)

    def value(self, key: str) -> float | None:
        """The accuracy on a slice or the number of a measure; None where the row has it not."""
        return self.slices[key].accuracy if key in self.slices else self.measures.get(key)


@dataclass(frozen=True)
class TrainRow:
    step: int
    loss: float


@dataclass(frozen=True)
class Result:
    """`result.json`, which exists once the run has finished."""

    steps: int
    final: Evaluation
    num_parameters: int | None = None
    tokens_per_s: float | None = None
    train_seconds: float | None = None


@dataclass(frozen=True)
class Run:
    """One run folder. `steps` is what was planned; `config` and `env` are the files as they are."""

    name: str
    arch: str
    lr: float
    seed: int
    task: str
    task_label: str
    steps: int | None
    config: Mapping[str, Any] = field(repr=False)
    env: Mapping[str, Any] = field(repr=False)
    evals: tuple[Evaluation, ...] = field(repr=False)
    train: tuple[TrainRow, ...] = field(repr=False)
    result: Result | None = None
    damaged_rows: int = 0
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def last_step(self) -> int:
        return max([row.step for row in self.train] + [row.step for row in self.evals], default=0)

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        planned = f" of {self.steps}" if self.steps is not None else ""
        return f"unfinished at step {self.last_step}{planned}"


@dataclass(frozen=True)
class LeftOut:
    """Something that is not in the report's numbers, and why."""

    name: str
    reason: str


def load_run(folder: str | Path) -> Run:
    """Read one run folder; `ValueError` says in one line why it cannot be read at all."""
    folder = Path(folder)
    config = _config(folder)
    task = config.get("task")
    spec = dict(task) if isinstance(task, dict) else {"name": task}
    name = spec.pop("name", None)
    if config.get("text") is not None:
        raise expected("text", "a playground task instead: runs on text are not compared here", "text")
    if not isinstance(name, str):
        raise expected("task.name", "a task's name", name)
    settings = ", ".join(f"{key}={value}" for key, value in spec.items())
    notes: list[str] = []
    env = _json(folder / "env.json", notes)
    rows, damaged = _rows(folder / "metrics.jsonl")
    evals = {row.step: row for row in rows if isinstance(row, Evaluation)}  # of two rows for a step the last one holds
    train = {row.step: row for row in rows if isinstance(row, TrainRow)}
    result = _result(_json(folder / "result.json", notes), notes)
    if result is not None:
        evals.setdefault(result.final.step, result.final)
    steps = _key(config, "train.steps", None)
    return Run(
        name=folder.name,
        arch=str(_key(config, "arch")),
        lr=_number(config, "train.optim.lr"),
        seed=int(_number(config, "train.seed")),
        task=name,
        task_label=f"{name} ({settings})" if settings else name,
        steps=steps if isinstance(steps, int) else None,
        config=config,
        env=env or {},
        evals=tuple(evals[step] for step in sorted(evals)),
        train=tuple(train[step] for step in sorted(train)),
        result=result,
        damaged_rows=damaged,
        notes=tuple(notes),
    )


def load_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[LeftOut]]:
    """Read what can be read. A folder that holds no evaluation and no training row yet is left out too."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for folder in map(Path, folders):
        try:
            run = load_run(folder)
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(folder.name, str(error)))
            continue
        if run.evals or run.train:
            runs.append(run)
        else:
            left_out.append(LeftOut(run.name, "; ".join(("nothing recorded yet", *run.notes))))
    return runs, left_out


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


def _config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError("no such folder")
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError("empty folder" if not any(folder.iterdir()) else "no config.yaml: not a run folder")
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        raise ValueError("config.yaml is damaged: not YAML") from None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is damaged: no settings in it")
    return config


_REQUIRED = object()


def _key(config: Mapping[str, Any], dotted: str, default: Any = _REQUIRED) -> Any:
    value: Any = config
    for part in dotted.split("."):
        if not isinstance(value, dict) or part not in value:
            if default is _REQUIRED:
                raise ValueError(f"config.yaml has no {dotted}")
            return default
        value = value[part]
    return value


def _number(config: Mapping[str, Any], dotted: str) -> float:
    value = _key(config, dotted)
    try:
        number = float(value)  # PyYAML reads 3e-3 as text
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise expected(dotted, "a number", value)
    return number


def _json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError:
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is damaged")
        return None
    return value


def _rows(path: Path) -> tuple[list[Evaluation | TrainRow], int]:
    rows: list[Evaluation | TrainRow] = []
    damaged = 0
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if row["kind"] == "eval":
                rows.append(_evaluation(row))
            elif row["kind"] == "train":
                rows.append(TrainRow(int(row["step"]), float(row["loss"])))
        except DAMAGE:
            damaged += 1
    return rows, damaged


def _evaluation(row: Mapping[str, Any], step: int | None = None) -> Evaluation:
    slices = {}
    for entry in row["slices"]:
        count = Count(int(entry["correct"]), int(entry["total"]))
        if not 0 <= count.correct <= count.total:
            raise ValueError("more correct than asked")
        if count.total:
            slices[slice_key(entry["slice"])] = count
    if not slices:
        raise ValueError("nothing was asked")
    loss = row.get("loss")
    return Evaluation(
        int(row.get("step", step)),
        {key: slices[key] for key in in_order(slices)},
        float(loss) if _finite(loss) else None,
        {name: float(value) for name, value in _measures(row).items() if _finite(value)},
    )


def _measures(row: Mapping[str, Any]) -> dict[str, Any]:
    found = row.get("measures")
    return (
        {name: value for name, value in found.items() if name and not is_slice(name)} if isinstance(found, dict) else {}
    )


def _unusable(row: Mapping[str, Any]) -> list[str]:
    """Measures without a usable number: a diverged run has them, and its absence from a mean must not go unsaid."""
    return [name for name, value in _measures(row).items() if not _finite(value)]


def _finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _result(raw: Mapping[str, Any] | None, notes: list[str]) -> Result | None:
    if raw is None:
        return None
    try:
        steps = int(raw["steps"])
        final = _evaluation(raw["final"], steps)
    except DAMAGE:
        notes.append("result.json is damaged")
        return None
    notes += [f"{name} of the final evaluation is no finite number" for name in _unusable(raw["final"])]
    size, speed, seconds = (raw.get(key) for key in ("num_parameters", "tokens_per_s", "train_seconds"))
    return Result(
        steps,
        final,
        num_parameters=size if isinstance(size, int) else None,
        tokens_per_s=speed if isinstance(speed, (int, float)) else None,
        train_seconds=seconds if isinstance(seconds, (int, float)) else None,
    )
