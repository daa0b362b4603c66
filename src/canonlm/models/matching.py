"""`--match`: sizes at which a model has as many parameters, or bytes of state, as another one."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NoReturn

from canonlm.core.errors import InvalidSetting, expected, readable
from canonlm.models.build import on_meta
from canonlm.models.interface import LanguageModel, Sizes

KINDS = {"parameters": 0.01, "state": 0.05}
"""Kinds of sizes, with the max relative difference. States are coarse: heads and their sizes are integers."""

STEPS = (16, 8, 4, 2, 1)
"""A size of the state becomes a multiple of the first of these that is close enough, as kernels like such sizes."""

Changes = dict[str, list[int]]
"""Fields of the configuration: [before, after]."""


def kinds_of(match: str | None) -> tuple[str, ...]:
    """The kinds in `--match`: `parameters`, `state`, or both with a comma between. ValueError for anything else."""
    names = dict.fromkeys(match.split(",")) if match is not None else {}
    if set(names) - set(KINDS):
        raise expected("--match", "parameters, state or state,parameters", match)
    return tuple(names)


def match_to(reference: LanguageModel, arch: str, sizes: Sizes, kinds: Collection[str]) -> Changes:
    """The fields to change for the model to have what the reference has, the state in windows of `sizes.seq_len`; empty
    if it already has. InvalidSetting if no change of one field (of all widths of the MLP) gives it."""
    changes: Changes = {}
    if "state" in kinds:
        changes |= _match_state(reference, arch, sizes)
        sizes = replace(sizes, fields=sizes.fields | {key: after for key, (_, after) in changes.items()})
    if "parameters" in kinds:  # an MLP has no state, so both stay equal
        changes |= _match_parameters(reference, arch, sizes)
    return changes


def _match_parameters(reference: LanguageModel, arch: str, sizes: Sizes) -> Changes:
    before = on_meta(arch, sizes)
    widths, count, target = before.mlp_widths, before.num_parameters, reference.num_parameters
    if _is_close("parameters", count, target):
        return {}

    def scaled(factor: float) -> dict[str, int]:
        return {key: max(1, round(width * factor)) for key, width in widths.items()}

    def count_at(factor: float) -> int:
        return on_meta(arch, replace(sizes, fields={**sizes.fields, **scaled(factor)})).num_parameters

    if widths:
        # Parameters are linear in the widths: two points determine the factor, up to rounding.
        factor = 1 + (target - count) / max(1, count_at(2) - count)
        if factor > 0 and _is_close("parameters", count_at(factor), target):
            return {key: [widths[key], width] for key, width in scaled(factor).items()}
    first = "it has no MLP whose width could change: name it first, and those of the others change"
    why = "no width of its MLP makes up the difference" if widths else first
    _refuse(arch, f"{count:,} parameters", f"{target:,}", why)


def _match_state(reference: LanguageModel, arch: str, sizes: Sizes) -> Changes:
    before, num_tokens = on_meta(arch, sizes), sizes.seq_len

    def state_at(fields: dict[str, int]) -> int | None:
        try:
            state = on_meta(arch, replace(sizes, fields={**sizes.fields, **fields})).state(num_tokens)
        except InvalidSetting:  # such as heads that do not divide
            return None
        return None if state is None else state.total

    goal, has = reference.state(num_tokens), state_at({})
    if goal is None or has is None:
        raise InvalidSetting("--match", f"--match: {arch if goal else reference.arch} has no state to count")
    target = goal.total
    if _is_close("state", has, target):
        return {}
    for key, value in before.state_sizes.items():
        for size in _candidates(key, value, has, target, state_at):
            if (found := state_at({key: size})) is not None and _is_close("state", found, target):
                return {key: [value, size]}
    keys = ", ".join(before.state_sizes)
    why = f"no value of {keys} makes up the difference" if keys else "none of its settings is known to change it"
    _refuse(arch, f"{readable(has)} of state after {num_tokens:,} tokens", readable(target), why)


def _candidates(
    key: str, value: int, has: int, target: int, state_at: Callable[[dict[str, int]], int | None]
) -> Iterator[int]:
    """Sizes at which the state may have `target` bytes. States are linear in each size: two points determine it."""
    for other in (2 * value, 1):  # heads have a limit
        if other != value and (there := state_at({key: other})) not in (None, has):
            exact = value + (target - has) * (other - value) / (there - has)
            sizes = (max(1, round(exact / step)) * step for step in STEPS)
            yield from (size for size in dict.fromkeys(sizes) if size != value)
            return


def _is_close(kind: str, value: int, target: int) -> bool:
    return abs(value - target) <= KINDS[kind] * target


def _refuse(arch: str, has: str, target: str, why: str) -> NoReturn:
    raise InvalidSetting("--match", f"--match: {arch} has {has} and the first {target}, and {why}")
