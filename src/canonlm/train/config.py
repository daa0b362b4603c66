"""A run's configuration: what a YAML file or a preset, and `key=value` overrides, resolve to. Complete and checked.

The resolved configuration is what a run folder holds; two runs differ only where their `config.yaml` differ.
"""

import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from canonlm import tasks
from canonlm.errors import InvalidSetting, expected, refused


class Settings(BaseModel):
    """Strict, as the tasks' settings are: no "3" and no true for 3."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Model(Settings):
    """Sizes; `arch` says the rest. `fields` sets any field of `CanonLMConfig` by name."""

    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    fields: dict[str, Any] = {}


class Data(Settings):
    """Windows of concatenated instances."""

    seq_len: PositiveInt
    loss_on: Literal["answer", "all"]
    isolate_documents: bool = False  # False, as in the paper: the instances of a window see each other
    workers: NonNegativeInt = 1  # threads that sample ahead; changes nothing but speed


class Optim(Settings):
    """AdamW; linear warm-up, then decay to `final_lr_ratio` of the rate."""

    lr: PositiveFloat
    betas: tuple[float, float] = Field((0.9, 0.98), strict=False)  # YAML has no tuples, only lists
    eps: PositiveFloat = 1e-6
    weight_decay: NonNegativeFloat = 0.03
    warmup_steps: NonNegativeInt = 1000
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_ratio: float = Field(0.1, ge=0, le=1)
    grad_clip: PositiveFloat | None = 1.0

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise expected("train.optim.betas", "two numbers >= 0 and < 1", betas)
        return betas


class Train(Settings):
    """The loop. Lengths of time are optimizer steps."""

    steps: PositiveInt = None  # type: ignore[assignment]  # default: all of the training stream, for a task where it ends
    batch_size: PositiveInt  # windows per step
    seed: NonNegativeInt = 0  # of the initial weights and of the data
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: autocast; the weights stay in fp32
    compile: bool = False
    device: str = "auto"  # auto: cuda where there is one, else cpu
    num_threads: PositiveInt | None = (
        None  # of the CPU; sums depend on it, so it is part of the result. None: torch's choice
    )
    log_every: PositiveInt = 10
    eval_every: PositiveInt
    eval_size: PositiveInt  # test windows, instances, sentences or people, by task
    checkpoint_every: PositiveInt
    keep_checkpoints: PositiveInt = 2
    optim: Optim


class RunConfig(Settings):
    """Everything that decides a run."""

    preset: str | None = None
    arch: str
    task: dict[str, Any]  # its name and all its settings
    model: Model
    data: Data
    train: Train

    @field_validator("task")
    @classmethod
    def _complete_task(cls, task: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(name := task.get("name"), str):
            raise expected("task.name", f"one of {', '.join(tasks.names())}", name)
        try:
            return {"name": name, **tasks.get(**task).spec.model_dump()}
        except InvalidSetting as error:  # "depo.N": to be found in a file as task.N
            raise InvalidSetting(f"task.{error.key.partition('.')[2]}", error) from None

    @model_validator(mode="after")
    def _windows_suit_the_task(self) -> "RunConfig":
        task = self.built_task
        if self.data.seq_len < task.least_seq_len:
            what = f"at least {task.least_seq_len}, for the test samples of {task}"
            raise expected("data.seq_len", what, self.data.seq_len)
        if self.data.isolate_documents and not task.can_isolate:
            what = f"false: in {task.name} the start of the next instance is what ends one, and has to be predicted"
            raise expected("data.isolate_documents", what, True)
        return self

    @model_validator(mode="after")
    def _steps_suit_the_stream(self) -> "RunConfig":
        train = self.train
        windows = self.built_task.training_windows(train.seed, self.data.seq_len)
        most = None if windows is None else -(-windows // train.batch_size)
        if train.steps is None:
            if most is None:
                raise InvalidSetting("train.steps", "train.steps: missing; expected an integer > 0")
            return self.model_copy(update={"train": train.model_copy(update={"steps": most})})
        if most is not None and train.steps > most:
            what = f"at most {most}, the whole training stream of {self.built_task}"
            raise expected("train.steps", what, train.steps)
        return self

    @cached_property
    def built_task(self) -> tasks.Task:
        return tasks.get(**self.task)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def resolve(raw: dict[str, Any]) -> RunConfig:
    """Check and complete. InvalidSetting (a ValueError) names the first key that cannot be."""
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise refused(error, RunConfig) from None


def load(
    path: str | Path, overrides: Iterable[str] = (), check: Callable[[RunConfig], Any] = lambda run: None
) -> RunConfig:
    """Read a run's YAML file and apply `key=value` overrides (dotted keys, YAML values). Errors give file and line,
    also those of `check`: for what is only known once the model is described, say."""
    path = Path(path)
    raw, lines = read_yaml(path)
    overridden = override(raw, overrides)
    try:
        run = resolve(raw)
        check(run)
        return run
    except InvalidSetting as error:
        line = next((lines[key] for key in _up(error.key) if key in lines), 1)
        where = "" if error.key in overridden else f"  (in {path}, line {line})"
        raise InvalidSetting(error.key, f"{error}{where}") from None


def override(raw: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Write `key=value` pairs into nested dicts, in place; returns the keys."""
    keys = []
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise expected("override", "key=value, such as train.steps=100", pair)
        *parents, leaf = key.split(".")
        place = raw
        for parent in parents:
            if not isinstance(place.setdefault(parent, {}), dict):
                raise expected(key, f"a key below a group of settings ({parent} is none)", value)
            place = place[parent]
        try:
            place[leaf] = yaml.load(value, _Loader)
        except yaml.YAMLError:
            raise expected(key, "a YAML value", value) from None
        keys.append(key)
    return keys


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, group by group."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


class _Loader(yaml.SafeLoader):
    """Reads 3e-3 as a number, as YAML 1.2 does; the library's own rules want 3.0e-3 and make a text of it."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The file's mapping, and the line of every dotted key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise expected(str(path), f"a readable YAML file ({getattr(error, 'strerror', error)})", path.name) from None
    try:
        raw, node = yaml.load(text, _Loader), yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ValueError(f"{path}{line}: not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(raw, dict):
        raise expected(str(path), "a YAML mapping", raw)
    return raw, dict(_key_lines(node, ""))


def _key_lines(node: Any, prefix: str):
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield prefix + str(key.value), key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def _up(key: str):
    """A key and its parents: train.optim.lr, train.optim, train."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def differences(a: RunConfig, b: RunConfig) -> list[tuple[str, Any, Any]]:
    """(dotted key, value in a, value in b) wherever two configurations differ."""
    left, right = dict(_flat(a.model_dump(), "")), dict(_flat(b.model_dump(), ""))
    keys = dict.fromkeys([*left, *right])
    return [(key, left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def _flat(group: dict[str, Any], prefix: str):
    for key, value in group.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
