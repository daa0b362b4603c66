"""The files of a run folder, read without trust, and what a run on a task and one on text have in common.

A run may be running, crashed, half-written or not a run at all. A folder without a readable `config.yaml` is refused
with a reason; a row of `metrics.jsonl` that does not parse is skipped and counted.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeGuard, TypeVar

import yaml

from ..errors import expected

DAMAGE = (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError)
"""What a row that is no row raises when read."""

_MOST_BRACKETS, _MOST_COLUMNS = 1_000, 2_000


class _Evaluated(Protocol):
    @property
    def step(self) -> int: ...

    @property
    def unusable(self) -> Sequence[str]: ...


E = TypeVar("E", bound=_Evaluated)
Evaluate = Callable[[Any, int | None], E]
"""Reads an eval row, at a step unless it says its own; raises one of `DAMAGE`."""


@dataclass(frozen=True)
class TrainRow:
    step: int
    loss: float
    tokens_per_s: float | None = None


@dataclass(frozen=True)
class Result(Generic[E]):
    """`result.json`, which exists once the run has finished."""

    steps: int
    final: E
    num_parameters: int | None = None
    tokens_per_s: float | None = None
    train_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Recorded(Generic[E]):
    """One run folder. `steps` is what was planned; `config` and `env` are the files as they are."""

    name: str
    arch: str
    lr: float
    seed: int
    steps: int | None
    config: Mapping[str, Any] = field(repr=False)
    env: Mapping[str, Any] = field(repr=False)
    evals: tuple[E, ...] = field(repr=False)
    train: tuple[TrainRow, ...] = field(repr=False)
    result: Result[E] | None = None
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


def read_config(folder: Path) -> dict[str, Any]:
    """`config.yaml`; ValueError says in one line why there is none."""
    if not folder.is_dir():
        raise ValueError("no such folder")
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError("empty folder" if not any(folder.iterdir()) else "no config.yaml: not a run folder")
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.load(text, Loader=_loader(text))
        json.dumps(config, default=str, skipkeys=True)  # a mapping that contains itself has no end
    except (yaml.YAMLError, *DAMAGE):
        raise ValueError("config.yaml is damaged: not YAML") from None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is damaged: no settings in it")
    return config


def _loader(text: str) -> Any:
    """libyaml, where there is one: it takes a tenth of the time, and 500 runs are 500 files. Where much is nested it
    overflows the stack, which ends the process, and Python's own takes minutes or raises. Nesting takes a bracket, or
    a column of a line."""
    if text.count("[") + text.count("{") > _MOST_BRACKETS:
        raise ValueError("brackets without end")
    narrow = max(map(len, text.splitlines()), default=0) < _MOST_COLUMNS
    return getattr(yaml, "CSafeLoader", yaml.SafeLoader) if narrow else yaml.SafeLoader


def read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """None where there is no such file, or, which `notes` are told, a damaged one."""
    if not path.is_file():
        return None
    try:
        value = json.loads(path.read_bytes())
    except DAMAGE:
        value = None
    if not isinstance(value, dict):
        notes.append(f"{path.name} is damaged")
        return None
    return value


def row_of(line: bytes, evaluate: Evaluate[E]) -> E | TrainRow | None:
    """A line of `metrics.jsonl`; None for kinds that are not shown. Raises one of `DAMAGE`."""
    row = json.loads(line)
    if row["kind"] == "eval":
        return evaluate(row, None)
    if row["kind"] == "train":
        speed = row.get("tokens_per_s")
        return TrainRow(int(row["step"]), float(row["loss"]), float(speed) if finite(speed) else None)
    return None


def identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Recorded` that say which run it is, without its name. ValueError: one is missing."""
    steps = _key(config, "train.steps", None)
    return {
        "arch": writable(str(_key(config, "arch"))),
        "lr": _number(config, "train.optim.lr"),
        "seed": int(_number(config, "train.seed")),
        "steps": steps if isinstance(steps, int) else None,
    }


def recorded(folder: Path, config: Mapping[str, Any], evaluate: Evaluate[E], notes: list[str]) -> dict[str, Any]:
    """The fields of `Recorded`. ValueError says in one line why there is no record."""
    env = read_json(folder / "env.json", notes)
    evals: dict[int, E] = {}  # of two rows for a step the last one holds
    train: dict[int, TrainRow] = {}
    damaged = 0
    path = folder / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        if not line.strip():
            continue
        try:
            row = row_of(line, evaluate)
        except DAMAGE:
            damaged += 1
            continue
        if isinstance(row, TrainRow):
            train[row.step] = row
        elif row is not None:
            evals[row.step] = row
    result = _result(read_json(folder / "result.json", notes), evaluate, notes)
    if result is not None:
        evals.setdefault(result.final.step, result.final)
    return {
        "name": writable(folder.absolute().name),
        **identity(config),
        "config": config,
        "env": env or {},
        "evals": tuple(evals[step] for step in sorted(evals)),
        "train": tuple(train[step] for step in sorted(train)),
        "result": result,
        "damaged_rows": damaged,
        "notes": tuple(notes),
    }


def finite(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def writable(text: str) -> str:
    """Names of folders and escapes in a file may stand for half a character, which no file can be written with."""
    return text.encode("utf-8", "replace").decode()


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
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise expected(dotted, "a number", value)
    return number


def _result(raw: Mapping[str, Any] | None, evaluate: Evaluate[E], notes: list[str]) -> Result[E] | None:
    if raw is None:
        return None
    try:
        steps = int(raw["steps"])
        final = evaluate(raw["final"], steps)
    except DAMAGE:
        notes.append("result.json is damaged")
        return None
    notes += [f"{name} of the final evaluation is no finite number" for name in final.unusable]
    size, speed, seconds = (raw.get(key) for key in ("num_parameters", "tokens_per_s", "train_seconds"))
    return Result(
        steps,
        final,
        num_parameters=size if isinstance(size, int) else None,
        tokens_per_s=speed if isinstance(speed, (int, float)) else None,
        train_seconds=seconds if isinstance(seconds, (int, float)) else None,
    )
