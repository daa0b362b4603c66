"""Groups of runs that repeat one experiment, and their names on a page.

A group is `canonlm.runs.identity.group`: all runs of one configuration, except for learning rate and seed. Its name is
that of the architecture. If several groups have one architecture, their names add what differs between them.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from canonlm.runs.identity import NOT_IN_GROUP, NOT_IN_IDENTITY, group, leaf, settings, short, what_differs, write
from canonlm.runs.load import Run


@dataclass(frozen=True)
class Group:
    """`family`: the name without the size. `parameters`: of the finished runs, or None."""

    name: str
    family: str
    runs: tuple[Run, ...]

    @property
    def parameters(self) -> int | None:
        return next((run.result.num_parameters for run in self.runs if run.result), None)

    @property
    def state_bytes(self) -> int | None:
        """The bytes of state of one window; None if the finished runs have not recorded it."""
        return next((run.result.state_bytes for run in self.runs if run.result), None)

    @property
    def matched(self) -> str:
        """`intermediate_size 341 → 352`: what `--match` adjusted."""
        model = self.runs[0].config.get("model")
        return write_changes(model.get("matched") if isinstance(model, Mapping) else None)


def write_changes(adjusted: Any) -> str:
    """Fields with their values before and after; "" for anything else."""
    pairs = adjusted.items() if isinstance(adjusted, Mapping) else ()
    return ", ".join(f"{key} {' → '.join(map(write, pair))}" for key, pair in pairs if isinstance(pair, list))


def grouped(runs: Sequence[Run]) -> list[Group]:
    """The groups, architectures in order of appearance, the smaller size first."""
    archs: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        archs.setdefault(run.arch, {}).setdefault(group(run.config), []).append(run)
    return [one for arch, groups in archs.items() for one in _named(arch, groups)]


def by_run(groups: Iterable[Group]) -> dict[str, Group]:
    """The group of every run, by its name."""
    return {run.name: one for one in groups for run in one.runs}


def _named(arch: str, groups: Mapping[str, list[Run]]) -> list[Group]:
    plain = [Group(arch, arch, tuple(runs)) for runs in groups.values()]
    if len(plain) == 1:
        return plain
    flat = [settings(one.runs[0].config, (*NOT_IN_IDENTITY, *NOT_IN_GROUP, "arch", "task")) for one in plain]
    matched = {leaf(key) for one in flat for key in one if key.startswith("model.matched.")}
    sizes = [{key: one[key] for key in one if _is_size(key, matched)} for one in flat]
    others = [{key: one[key] for key in one if not _is_size(key, matched)} for one in flat]
    named = [
        Group(_with(arch, other, size), _with(arch, other), one.runs)
        for one, other, size in zip(plain, what_differs(others), _sizes(plain, sizes), strict=True)
    ]
    return sorted(named, key=lambda one: math.inf if one.parameters is None else one.parameters)


def _is_size(key: str, matched: Collection[str]) -> bool:
    """Whether a setting is part of the size, as fields are that `--match` adjusted."""
    return key.startswith("model.") and not (key.startswith("model.fields.") and leaf(key) not in matched)


def _sizes(groups: Sequence[Group], sizes: Sequence[Mapping[str, Any]]) -> list[str]:
    """The shortest texts that tell the sizes apart: `4L 256d`, parameters, or all that differs; empty if equal."""
    distinct = len({write(size) for size in sizes})
    if distinct == 1:
        return [""] * len(groups)
    layers, width = "model.num_hidden_layers", "model.hidden_size"
    ways: list[Callable[[Group, Mapping[str, Any]], str]] = [
        lambda one, size: f"{write(size[layers])}L {write(size[width])}d" if {layers, width} <= size.keys() else "",
        lambda one, size: "size unknown" if one.parameters is None else short(one.parameters),
        lambda one, size: "size unknown" if one.parameters is None else f"{one.parameters:,}",
    ]
    for way in ways:
        texts = [way(one, size) for one, size in zip(groups, sizes, strict=True)]
        if len({*texts}) == distinct and all(texts):
            return texts
    return what_differs(sizes)


def _with(arch: str, *parts: str) -> str:
    text = ", ".join(filter(None, parts))
    return f"{arch} ({text})" if text else arch
