"""Architecture names: a base and what is added to it, such as `llama+canon`, `llama-nope+canon=AC+rope=0.25`.

A name says how a model differs; sizes (layers, width, heads) come from elsewhere. The result is keyword arguments of
`CanonLMConfig`, so a name can never do what a configuration could not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from canonlm.errors import expected, unknown


@dataclass(frozen=True)
class Base:
    """A base architecture: what it is, the configuration fields it sets, the sites that a bare `+canon` means."""

    about: str
    fields: dict[str, Any]
    full_canon: str


@dataclass(frozen=True)
class Modifier:
    """`+name` or `+name=value`: `apply(fields, value, base, head_dim)` changes the fields."""

    about: str
    apply: Callable[[dict[str, Any], str | None, Base, int], None]


BASES = {
    "llama": Base("Transformer: attention with rotary positions (RoPE), gated MLP", {}, "ABCD"),
    "llama-nope": Base("the same without any positions (NoPE)", {"rope_dim": 0}, "ABCD"),
}


def _canon(fields: dict[str, Any], value: str | None, base: Base, head_dim: int) -> None:
    sites = base.full_canon if value is None else value
    if not sites or set(sites) - set("ABCD"):
        raise expected("+canon", "letters out of A, B, C, D, such as +canon=AC", value)
    fields["canon_set"] = "".join(sorted(set(sites) | (set(base.full_canon) & {"b"})))


def _rope(fields: dict[str, Any], value: str | None, base: Base, head_dim: int) -> None:
    what = f"a share from 0 to 1 of each head that leaves an even number of its {head_dim} channels, such as +rope=0.25"
    try:
        channels = head_dim * float(value or "")
    except ValueError:
        raise expected("+rope", what, value) from None
    if not 0 <= channels <= head_dim or channels % 2:
        raise expected("+rope", what, value)
    fields["rope_dim"] = int(channels)


def _qknorm(fields: dict[str, Any], value: str | None, base: Base, head_dim: int) -> None:
    if value is not None:
        raise expected("+qknorm", "no value", value)
    fields["qk_norm"] = True


MODIFIERS = {
    "canon": Modifier("Canon layers at every point of a block (A, B, C, D); +canon=AC at some", _canon),
    "rope": Modifier("rotary positions on a share of each head: +rope=0.25", _rope),
    "qknorm": Modifier("RMSNorm on queries and keys", _qknorm),
}


def resolve(arch: str, *, head_dim: int) -> dict[str, Any]:
    """The configuration fields that a name stands for: `resolve("llama+canon=AC", head_dim=64)`.

    ValueError names an unknown base or modifier, a repeated one, or a value that cannot be.
    """
    base_name, *parts = arch.split("+")
    if base_name not in BASES:
        raise unknown("architecture", base_name, BASES)
    base = BASES[base_name]
    fields = dict(base.fields)
    seen: set[str] = set()
    for part in parts:
        name, equals, value = part.partition("=")
        if name not in MODIFIERS:
            raise unknown("architecture modifier", f"+{name}", [f"+{known}" for known in MODIFIERS])
        if name in seen:
            raise expected("arch", f"+{name} at most once", arch)
        seen.add(name)
        MODIFIERS[name].apply(fields, value if equals else None, base, head_dim)
    return fields
