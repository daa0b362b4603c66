"""Architecture names: a base and what is added to it, such as `llama+canon`, `gla5-conv`, `llama-nope+canon=AC`.

A name says how a model differs; sizes (layers, width, heads) come from elsewhere. The result is keyword arguments of
`CanonLMConfig`, so a name can never do what a configuration could not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from canonlm.errors import expected, unknown

if TYPE_CHECKING:
    from canonlm.models import CanonLMConfig


@dataclass(frozen=True)
class Base:
    """A base architecture: what it is, its mixer, the configuration fields it sets, whether it carries the short
    convolution (site b), which `-conv` takes away."""

    about: str
    mixer: str = "attention"
    fields: dict[str, Any] = field(default_factory=dict)
    short_conv: bool = False

    @property
    def full_canon(self) -> str:
        """What a bare `+canon` means. A short convolution already does what Canon-B would."""
        return "ACD" if self.mixer != "attention" else "ABCD"


@dataclass(frozen=True)
class Modifier:
    """`+name` or `+name=value`: `apply(value, head_dim, num_heads)` gives the fields that it sets."""

    about: str
    apply: Callable[[str | None, int, int], dict[str, Any]]


BASES = {
    "llama": Base("Transformer: attention with rotary positions (RoPE), gated MLP"),
    "llama-nope": Base("the same without any positions (NoPE)", fields={"rope_dim": 0}),
    "gla5": Base("gated linear attention, with its short convolutions", "gla", short_conv=True),
    "gdn2": Base("Gated DeltaNet, with its short convolutions", "gdn", short_conv=True),
    "mamba2": Base("Mamba2 with a gated MLP, with its short convolutions", "mamba2", short_conv=True),
    "retention": Base("linear attention with fixed decay, with short convolutions", "retention", short_conv=True),
}


def _rope(value: str | None, head_dim: int, num_heads: int) -> dict[str, Any]:
    what = f"a share from 0 to 1 of each head that leaves an even number of its {head_dim} channels, such as +rope=0.25"
    heads, times, share = (value or "").rpartition("x")
    channels = _share(share, head_dim)
    if channels is None or channels % 2:
        raise expected("+rope", what, value)
    if not times:
        return {"rope_dim": channels}
    some = _share(heads, num_heads)
    if not some:
        raise expected("+rope", f"a share of the {num_heads} heads before the x, such as +rope=0.5x0.5", value)
    return {"rope_dim": channels, "rope_heads": some}


def _share(text: str, whole: int) -> int | None:
    """So many of `whole`, or None where the share is no number from 0 to 1 or leaves a fraction."""
    try:
        part = whole * float(text)
        return int(part) if 0 <= part <= whole and part == int(part) else None
    except (ValueError, OverflowError):
        return None


def _one_of(name: str, key: str, meanings: dict[str | None, Any]) -> Callable[[str | None, int, int], dict[str, Any]]:
    """A modifier that sets one field; None is how a bare one is written."""

    def apply(value: str | None, head_dim: int, num_heads: int) -> dict[str, Any]:
        if value not in meanings:
            what = " or ".join("no value" if choice is None else f"+{name}={choice}" for choice in meanings)
            raise expected(f"+{name}", what, value)
        return {key: meanings[value]}

    return apply


MODIFIERS = {
    "canon": Modifier("Canon layers at every point of a block (A, B, C, D); +canon=AC at some", lambda *_: {}),
    "frozen": Modifier("Canon weights stay as they were drawn", _one_of("frozen", "canon_frozen", {None: True})),
    "rope": Modifier("rotary positions on a share of each head, +rope=0.25; in half the heads, +rope=0.5x0.5", _rope),
    "alibi": Modifier(
        "attention fades with distance; +alibi=hard: half of the heads see their neighbourhood only",
        _one_of("alibi", "alibi", {None: "alibi", "hard": "hard"}),
    ),
    "qknorm": Modifier("RMSNorm on queries and keys", _one_of("qknorm", "qk_norm", {None: True})),
    "mlp": Modifier(
        "another MLP: +mlp=standard (no gate), +mlp=moe (32 experts), +mlp=none",
        _one_of("mlp", "mlp", {"standard": "standard", "moe": "moe", "none": "none"}),
    ),
    "relu2": Modifier("squared ReLU in the MLP, in place of SiLU", _one_of("relu2", "hidden_act", {None: "relu2"})),
}


def resolve(arch: str, *, head_dim: int, num_heads: int) -> dict[str, Any]:
    """The configuration fields that a name stands for: `resolve("llama+canon=AC", head_dim=64, num_heads=8)`.

    `gdn2.gdn2.gdn2.llama` is a hybrid whose layers take turns. ValueError names an unknown base or modifier, a repeated
    one, or a value that cannot be.
    """
    name, *parts = arch.split("+")
    layers = [_base(part) for part in name.split(".")]
    fields: dict[str, Any] = {}
    for base in layers:
        if base.mixer == "attention" and base.fields != next(b.fields for b in layers if b.mixer == "attention"):
            raise expected("arch", "one kind of attention in all layers", arch)
        fields |= base.fields
    added: dict[str, str | None] = {}
    for part in parts:
        modifier, equals, value = part.partition("=")
        if modifier not in MODIFIERS:
            raise unknown("architecture modifier", f"+{modifier}", [f"+{known}" for known in MODIFIERS])
        if modifier in added:
            raise expected("arch", f"+{modifier} at most once", arch)
        added[modifier] = value if equals else None
        fields |= MODIFIERS[modifier].apply(added[modifier], head_dim, num_heads)
    mixers = [base.mixer for base in layers]
    if mixers != ["attention"]:
        fields["mixers"] = mixers
    without = {"moe": "D", "none": "CD"}.get(fields.get("mlp", ""), "")
    sites = [_sites(base, added, without) for base in layers]
    if len(set(sites)) > 1:
        fields["canon_sets"] = sites
    elif sites[0]:
        fields["canon_set"] = sites[0]
    return fields


def _base(name: str) -> Base:
    base = BASES.get(name.removesuffix("-conv"))
    if base is None or (name.endswith("-conv") and not base.short_conv):
        raise unknown("architecture", name, [*BASES, *(f"{known}-conv" for known in BASES if BASES[known].short_conv)])
    if name.endswith("-conv"):
        return replace(base, short_conv=False)
    return base


def _sites(base: Base, added: dict[str, str | None], without: str) -> str:
    """`+canon` is about A, B, C and D; the short convolution comes and goes with the base alone."""
    sites = ""
    if "canon" in added:
        value = added["canon"]
        if value is not None and (not value or set(value) - set("ABCD")):
            raise expected("+canon", "letters out of A, B, C, D, such as +canon=AC", value)
        sites = "".join(site for site in base.full_canon if site not in without) if value is None else value
    return "".join(sorted({*sites, *("b" if base.short_conv else "")}, key="AbBCD".index))


def name_of(config: "CanonLMConfig") -> str:
    """`gla5+canon=ACD`: the bases and the Canon sites, as in `canonlm archs`; other options stay unsaid."""
    bases = {base.mixer: (name, base.short_conv) for name, base in reversed(BASES.items())}
    layers = []
    for layer_idx in range(config.num_hidden_layers):
        name, short_conv = bases[config.mixer(layer_idx)]
        layers.append(f"{name}-conv" if short_conv and "b" not in config.sites(layer_idx) else name)
    canon = config.sites(0).replace("b", "")
    return ".".join(dict.fromkeys(layers)) + (f"+canon={canon}" if canon else "")
