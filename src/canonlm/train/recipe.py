"""A run's YAML file and `key=value` overrides: from them to a checked configuration, or to an error with its line.

A file may say `base: FILE`, relative to itself: it then changes that file's settings, group by group.
"""

import copy
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml

from canonlm import outside
from canonlm.errors import InvalidSetting, expected
from canonlm.runs import folder, words
from canonlm.train.config import RunConfig, resolve


def load(
    path: str | Path, overrides: Iterable[str] = (), check: Callable[[RunConfig], Any] = lambda run: None
) -> RunConfig:
    """Read a run's YAML file and apply `key=value` overrides (dotted keys, YAML values). Errors give file and line,
    also those of `check`: for what is only known once the model is described, say. Those that an override has a part
    in do not: whoever looked there would find nothing wrong."""
    path = Path(path)
    written, places = read_yaml(path)
    overridden = override(raw := copy.deepcopy(written), overrides)
    try:
        with outside.of_run(path.parent):
            run = resolve(raw)
            check(run)
            return run
    except InvalidSetting as error:
        if any(key in overridden for key in _up(error.key)):
            raise
        if overridden and _complaint(written, check) != str(error):
            raise
        place = next((places[key] for key in _up(error.key) if key in places), Place(path, 1))
        raise InvalidSetting(error.key, f"{error}{place}") from None


def check_folder(path: Path, run: RunConfig) -> None:
    """ValueError, naming the first difference, if the folder already holds a run that this one does not continue."""
    folder.check(path, run.model_dump(), _completed, outside_of(run))


def create_folder(path: Path, run: RunConfig) -> None:
    """Make a run's folder, or take up the one that it continues."""
    task = run.built_task
    told = words.written(task) if task is not None and outside.is_reference(task.name) else None
    folder.create(path, run.model_dump(), _completed, outside_of(run), told)


def outside_of(run: RunConfig) -> dict[str, folder.Outside]:
    """The files from outside that a run uses, by the references in its configuration."""
    task = run.task["name"] if run.task is not None and outside.is_reference(run.task["name"]) else None
    return {reference: outside.load(reference) for reference in (outside.reference_of(run.arch), task) if reference}


def _completed(path: Path) -> dict[str, Any]:
    """A `config.yaml`, with the settings that an earlier version did not have, and the architecture's complete name."""
    from canonlm.train.build import with_complete_name  # torch, which not everything that reads recipes needs

    return with_complete_name(load(path)).model_dump()


def _complaint(raw: dict[str, Any], check: Callable[[RunConfig], Any]) -> str | None:
    try:
        check(resolve(raw))
    except ValueError as error:
        return str(error)
    return None


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


WHOLE = {"sources", "validation"}
"""Groups that are replaced and not merged: names that somebody chose, not settings."""


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, group by group."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in WHOLE
        merged[key] = merge(merged[key], value) if both else value
    return merged


class Place(NamedTuple):
    """Where a key is written."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"  (in {self.file}, line {self.line})"


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> tuple[dict[str, Any], dict[str, Place]]:
    """The mapping that a file stands for, over its base, and the place of every dotted key. `above`: the files whose
    base, or base's base, this one is."""
    raw, lines = _read(path)
    places = {key: Place(path, line) for key, line in lines.items()}
    if "base" not in raw:
        return raw, places
    name, place, files = raw.pop("base"), places.pop("base"), (*above, path.resolve())
    base = path.parent / str(name)
    if not isinstance(name, str) or not base.is_file():
        wanted = "a YAML file, its path relative to this one"
    elif base.resolve() in files:
        wanted = "a file that is not itself based on this one"
    else:
        under, under_places = read_yaml(base, files)
        return merge(under, raw), {**under_places, **places}
    raise InvalidSetting("base", f"{expected('base', wanted, name)}{place}")


class _Loader(yaml.SafeLoader):
    """Reads plain values as YAML 1.2 does. By the library's rules, those of 1.1, 10:13 is 613 (minutes and seconds),
    3e-3 a text, 010 eight, `no` false and 2024-01-01 a date."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(0|[1-9][0-9]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
    ("merge", r"<<", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})$"), _first)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A file's mapping, and the line of every dotted key."""
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
    lines: dict[str, int] = {}
    for key, line in _key_lines(node, ""):
        if key in lines:
            raise ValueError(f"{path}, line {line}: {key} is there twice (first in line {lines[key]})")
        lines[key] = line
    return raw, lines


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
