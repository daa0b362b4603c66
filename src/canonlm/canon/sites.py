"""Where Canon layers go, and how each of them works: `ABCD`, `KVOM:scaled`, `A:zero,D:k3`, `E:smear,K:offset`.

Letters are places in a block, in the order of computation:

    E        the embedding's output, once for all blocks
    A        the mixer's input, after its norm
    b        the short convolutions that recurrent mixers are published with
    Q K V    queries, keys, values; B is all three (of a mixer without them: all its projections)
    O        the mixer's output, before it joins the residual stream
    C        the MLP's input, after its norm
    D        the MLP's projections (gate and up) before the nonlinearity
    M        the MLP's output, before it joins the residual stream

Commas (or semicolons) separate groups of letters; colons put variants behind a group (`VARIANTS` below; docs/canon.md
defines each).
A, B, C, D and b: Physics of Language Models, Part 4.1 (arXiv 2512.17351). K, V, O, M: Inkling.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from canonlm.core.errors import InvalidSetting, expected, unknown

LETTERS = "EAbQKVOCDM"
PLACES = "EAbBOCDM"
"""One cache state each: Q, K and V share that of B."""

MAX_KERNEL = 64

VARIANTS = {
    "nores": "y = conv(x), without adding x",
    "silu": "SiLU of the convolution, before x is added",
    "bias": "a learned bias per channel",
    "frozen": "the taps keep their random initial values",
    "avg": "fixed equal taps: the mean of the last K tokens is added",
    "zero": "taps start at zero: the layer starts as the identity",
    "id": "no x is added; taps start at 0, ..., 0, 1: the layer starts as the identity",
    "scaled": "(x + conv(x)) / sqrt(K + 1); with :dynamic / sqrt(2 K + 1)",
    "dynamic": "on Q, K, V: taps per head, computed from each token, are added to the learned ones",
    "smear": "x_t + g_t x_(t-1), with a gate g_t computed from 12 channels of x_t",
    "offset": "on K: half of the channels of each head come from the token before",
}
"""Variants behind a colon, besides the kernel size: `:k2` to `:k8` and beyond; four tokens by default."""

Form = Literal["conv", "avg", "dynamic", "smear", "offset"]


@dataclass(frozen=True)
class Variant:
    """How a Canon layer works. `start`: initial taps, "uniform" in +-1/sqrt(K), "zero", or "id", the identity."""

    kernel: int = 4
    residual: bool = True
    activation: bool = False
    bias: bool = False
    frozen: bool = False
    scaled: bool = False
    start: Literal["uniform", "zero", "id"] = "uniform"
    form: Form = "conv"


def parse(text: str, *, key: str = "sites", default: Variant = Variant()) -> dict[str, Variant]:
    """The sites in a text, by letter, in the order of `LETTERS`; B becomes Q, K and V.

    default: the variant that a group's flags modify. InvalidSetting names `key` and the problem: an unknown or repeated
    letter or variant, or variants that exclude each other.
    """
    if not isinstance(text, str):
        raise expected(key, 'letters such as "ABCD"', text)
    sites: dict[str, Variant] = {}
    for group in re.split("[,;]", text) if text else []:
        letters, *flags = group.strip().split(":")
        if not letters or set(letters) - {*LETTERS, "B"}:
            raise expected(key, f'letters out of {", ".join("AbBCDQKVOME")} (such as "ABCD" or "KVOM:scaled")', text)
        if "b" in letters and flags:
            raise expected(key, "no variant of b (its kernel is conv_kernel)", text)
        variant = _variant(key, text, flags, default)
        for letter in letters.replace("B", "QKV"):
            if letter in sites:
                raise expected(key, f"{letter} once" + " (B is QKV)" * (letter in "QKV"), text)
            sites[letter] = Variant() if letter == "b" else variant
            _check_place(key, letter, variant, text)
    return {letter: sites[letter] for letter in LETTERS if letter in sites}


def write(sites: Mapping[str, Variant], *, default: Variant = Variant()) -> str:
    """The canonical text of these sites, the inverse of `parse`."""
    sites = dict(sites)
    if {*"QKV"} <= sites.keys() and sites["Q"] == sites["K"] == sites["V"]:
        sites["B"] = sites["Q"]
        for letter in "QKV":
            del sites[letter]
    groups: dict[str, str] = {}
    for letter in "EAbBQKVOCDM":
        if letter in sites:
            flags = "" if letter == "b" else _flags(sites[letter], default)
            groups[flags] = groups.get(flags, "") + letter
    return ",".join(letters + flags for flags, letters in groups.items())


def places(sites: Iterable[str]) -> str:
    """The places of letters, in the order of `PLACES`: a block keeps one state for each."""
    present = {"B" if letter in "QKV" else letter for letter in sites}
    return "".join(place for place in PLACES if place in present)


def _variant(key: str, text: str, flags: list[str], default: Variant) -> Variant:
    fields: dict[str, Any] = {}

    def add(field: str, value: object, flag: str) -> None:
        if field in fields:
            raise expected(key, f"one {field}, not also :{flag}", text)
        fields[field] = value

    for flag in flags:
        if match := re.fullmatch(r"k(\d{1,9})", flag):
            if not 1 <= int(match[1]) <= MAX_KERNEL:
                raise expected(key, f"a kernel from :k1 to :k{MAX_KERNEL}", text)
            add("kernel", int(match[1]), flag)
        elif flag in ("zero", "id"):
            add("start", flag, flag)
        elif flag in ("avg", "dynamic", "smear", "offset"):
            add("form", flag, flag)
        elif flag in _FIELDS:
            add(_FIELDS[flag], flag != "nores", flag)
        else:
            raise InvalidSetting(key, f"{key}: {unknown('variant', f':{flag}', _SPELLED, 'Variants')}")
    if fields.get("form") in ("smear", "offset"):
        if len(fields) > 1:
            raise expected(key, f"no other variant beside :{fields['form']}", text)
        return Variant(kernel=2, form=fields["form"])
    variant = replace(default, **fields)
    if variant.start == "id":
        variant = replace(variant, residual=False)
    _check(key, text, variant)
    return variant


_FIELDS = {"nores": "residual", "silu": "activation", "bias": "bias", "frozen": "frozen", "scaled": "scaled"}
_SPELLED = [":k2", ":k3", *(f":{name}" for name in VARIANTS)]


def _check(key: str, text: str, variant: Variant) -> None:
    """InvalidSetting for variants that exclude each other."""
    learned = variant.form == "conv"
    wrong = {
        ":scaled without :nores and :id": variant.scaled and not variant.residual,
        ":zero without :nores (without the residual, :id starts as the identity)": variant.start == "zero"
        and not variant.residual,
        ":frozen without :zero and :id": variant.start != "uniform" and variant.frozen,
        ":id without :silu": variant.start == "id" and variant.activation,
        f":{variant.form} without :silu, :bias, :frozen and :id": not learned
        and (variant.activation or variant.bias or variant.frozen or variant.start == "id"),
        ":avg without :zero": variant.form == "avg" and variant.start == "zero",
        ":dynamic without :nores": variant.form == "dynamic" and not variant.residual,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise expected(key, what, text)


def _check_place(key: str, letter: str, variant: Variant, text: str) -> None:
    where = {"dynamic": "QKV", "smear": "EACOM", "offset": "K"}.get(variant.form, LETTERS)
    if letter not in where:
        raise expected(key, f":{variant.form} at {', '.join(where)} only", text)


def _flags(variant: Variant, default: Variant) -> str:
    if variant.form in ("smear", "offset"):
        return f":{variant.form}"
    flags = [variant.form] * (variant.form != "conv") + [f"k{variant.kernel}"] * (variant.kernel != default.kernel)
    flags += [variant.start] * (variant.start != "uniform")
    for flag, field in _FIELDS.items():
        if getattr(variant, field) != getattr(default, field) and not (flag == "nores" and variant.start == "id"):
            flags.append(flag)
    return "".join(f":{flag}" for flag in flags)
