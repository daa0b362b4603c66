"""Where Canon layers go, and how each of them works: `ABCD`, `KVOM:scaled`, `A:zero,D:k3`, `E:smear,K:offset`.

Letters are sites: the rows of `SITES` below, in the order of computation. B is Q, K and V (of a mixer without them: all
its projections). Commas (or semicolons) separate groups of letters; colons put variants behind a group (`VARIANTS`;
docs/canon.md defines each).
A, B, C, D and b: Physics of Language Models, Part 4.1 (arXiv 2512.17351). K, V, O, M: Inkling.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from canonlm.core.errors import InvalidSetting, expected, unknown

Form = Literal["conv", "avg", "dynamic", "smear", "offset"]


@dataclass(frozen=True)
class Site:
    """A place for Canon layers: a row of `SITES`, which the decoder, `canonize` and the names of architectures read.

    letter: in texts. about: what the layer reads. part, side: the input or the output of the model's blocks together
    (the input alone), of a block, of its mixer (after the norm) or of its MLP. There a layer has hidden_size channels
    and is complete on every device of a tensor-parallel group. Inside a mixer or an MLP it has those of a projection
    and is split with them; the part's own code applies it.
    group: a letter for several sites with one variant; they share one state in the cache, others have their own.
    forms: of the variants that it takes; () for a convolution that belongs to mixers and takes none.
    usual: whether `+canon` alone has it.
    """

    letter: str
    about: str
    part: Literal["model", "block", "mixer", "mlp"]
    side: Literal["input", "inside", "output"]
    group: str = ""
    forms: tuple[Form, ...] = ("conv", "avg", "smear")
    usual: bool = False

    def __post_init__(self) -> None:
        if self.side not in _SIDES.get(self.part, ()):
            places = "; ".join(f"{part}: {', '.join(sides)}" for part, sides in _SIDES.items())
            raise expected(f"site {self.letter}", f"a part and one of its sides ({places})", (self.part, self.side))

    @property
    def slot(self) -> str:
        """The name of its state in the cache."""
        return self.group or self.letter

    def is_in(self, mlp: str) -> bool:
        """Whether blocks with that kind of MLP have it: neighbouring tokens of experts are not those of the text."""
        return self.part != "mlp" or (mlp != "none" and (mlp != "moe" or self.side != "inside"))


_SIDES = {
    "model": ["input"],
    "block": ["input", "output"],
    "mixer": ["input", "inside", "output"],
    "mlp": ["input", "inside", "output"],
}
_BY_HEAD: tuple[Form, ...] = ("conv", "avg", "dynamic")
SITES = {
    site.letter: site
    for site in (
        Site("E", "the embedding's output, once for all blocks", "model", "input"),
        Site("A", "the mixer's input, after its norm", "mixer", "input", usual=True),
        Site("b", "the short convolutions that recurrent mixers are published with", "mixer", "inside", forms=()),
        Site("Q", "queries", "mixer", "inside", group="B", forms=_BY_HEAD, usual=True),
        Site("K", "keys", "mixer", "inside", group="B", forms=(*_BY_HEAD, "offset"), usual=True),
        Site("V", "values", "mixer", "inside", group="B", forms=_BY_HEAD, usual=True),
        Site("O", "the mixer's output, before it joins the residual stream", "mixer", "output"),
        Site("C", "the MLP's input, after its norm", "mlp", "input", usual=True),
        Site("D", "the MLP's projections before the nonlinearity", "mlp", "inside", forms=("conv", "avg"), usual=True),
        Site("M", "the MLP's output, before it joins the residual stream", "mlp", "output"),
    )
}
"""Every site by its letter, in the order of computation (docs/add-a-site.md)."""

_OF_PACKAGE = dict(SITES)
"""Without the rows that users add."""

[SHORT_CONV] = [site.letter for site in SITES.values() if not site.forms]
"""b, the convolutions that belong to recurrent mixers."""

[OF_MIXER] = {site.slot for site in SITES.values() if site.part == "mixer" and site.side == "inside" and site.usual}
[OF_MLP] = {site.slot for site in SITES.values() if site.part == "mlp" and site.side == "inside" and site.usual}
"""B and D, on the projections of a mixer and of an MLP."""

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


def letters() -> list[str]:
    """The letters of a text, in the order of `SITES`; that of a group comes before those of its sites."""
    return list(dict.fromkeys(letter for site in SITES.values() for letter in (site.slot, site.letter)))


def members(letter: str) -> str:
    """The sites that a letter stands for: `QKV` for B, else the letter itself."""
    return "".join(site.letter for site in SITES.values() if letter in (site.slot, site.letter))


def parse(text: str, *, key: str = "sites", default: Variant = Variant()) -> dict[str, Variant]:
    """The sites in a text, by letter, in the order of `SITES`; B becomes Q, K and V.

    default: the variant that a group's flags modify. InvalidSetting names `key` and the problem: an unknown or repeated
    letter or variant, or variants that exclude each other.
    """
    if not isinstance(text, str):
        raise expected(key, 'letters such as "ABCD"', text)
    known = letters()
    variants: dict[str, Variant] = {}
    for group in re.split("[,;]", text) if text else []:
        chosen, *flags = group.strip().split(":")
        if not chosen or set(chosen) - {*known}:
            raise expected(key, f'letters out of {", ".join(known)} (such as "ABCD" or "KVOM:scaled")', text)
        variant = _variant(key, text, flags, default)
        for site in (SITES[each] for letter in chosen for each in members(letter)):
            if site.letter in variants:
                same = f" ({site.group} is {members(site.group)})" if site.group else ""
                raise expected(key, f"{site.letter} once{same}", text)
            if not site.forms and flags:
                raise expected(key, f"no variant of {site.letter} (its kernel is conv_kernel)", text)
            if site.forms and variant.form not in site.forms:
                fitting = [other.letter for other in SITES.values() if variant.form in other.forms]
                raise expected(key, f":{variant.form} at {', '.join(fitting)} only", text)
            variants[site.letter] = variant if site.forms else Variant()
    return {letter: variants[letter] for letter in SITES if letter in variants}


def joined(sites: Mapping[str, Variant]) -> Iterator[tuple[str, Variant]]:
    """Letters and variants in the order of `letters`; sites of a group with one variant have that of the group."""
    left = dict(sites)
    for letter in letters():
        variants = [left.get(each) for each in members(letter)]
        if (variant := variants[0]) is not None and variants.count(variant) == len(variants):
            for each in members(letter):
                del left[each]
            yield letter, variant


def write(sites: Mapping[str, Variant], *, default: Variant = Variant()) -> str:
    """The canonical text of these sites, the inverse of `parse`."""
    groups: dict[str, str] = {}
    for letter, variant in joined(sites):
        flags = _flags(variant, default) if SITES[members(letter)[0]].forms else ""
        groups[flags] = groups.get(flags, "") + letter
    return ",".join(chosen + flags for flags, chosen in groups.items())


def slots(sites: Iterable[str]) -> str:
    """The states that a block with these sites keeps, such as "AbBCD" (B: for any of Q, K, V)."""
    used = {SITES[letter].slot for letter in sites}
    return "".join(letter for letter in letters() if letter in used)


def of_modifier(
    value: str | None, *, recurrent: bool = False, mlp: str = "gated", default: Variant = Variant()
) -> dict[str, Variant]:
    """The sites of `+canon=VALUE`, or of `+canon` (None) and `+canon:VARIANTS` (a value that begins with a colon): the
    usual ones that a block with this mixer and MLP has. In recurrent mixers, site b already does what B would do."""
    text = (value or "").rstrip(":")
    if value is None or text.startswith(":"):
        usual = [site for site in SITES.values() if site.usual and site.is_in(mlp)]
        text = slots(site.letter for site in usual if not (recurrent and site.group)) + text
    sites = parse(text, key="+canon", default=default)
    if not sites or not all(SITES[letter].forms for letter in sites):
        raise expected("+canon", "sites such as +canon=AC (not b, which NAME-conv leaves out)", text)
    return sites


def check_saved_with_code(sites: Iterable[str]) -> None:
    """InvalidSetting for a user's own site, which the copy of this file in a folder would lack."""
    if own := [letter for letter in dict.fromkeys(sites) if SITES[letter] != _OF_PACKAGE.get(letter)]:
        raise expected("self_contained", f"False with site {', '.join(own)}, which only your own code has", True)


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


def _flags(variant: Variant, default: Variant) -> str:
    if variant.form in ("smear", "offset"):
        return f":{variant.form}"
    flags = [variant.form] * (variant.form != "conv") + [f"k{variant.kernel}"] * (variant.kernel != default.kernel)
    flags += [variant.start] * (variant.start != "uniform")
    for flag, field in _FIELDS.items():
        if getattr(variant, field) != getattr(default, field) and not (flag == "nores" and variant.start == "id"):
            flags.append(flag)
    return "".join(f":{flag}" for flag in flags)
