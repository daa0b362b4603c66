"""From Canon sites, by letter, to places in the blocks of a host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from canonlm.canon.sites import SITES, Site, Variant, joined, members
from canonlm.canonize import find_modules
from canonlm.canonize.find_modules import Block, Mixer, channels_in, channels_out
from canonlm.canonize.fused_projections import Channels, channels_of
from canonlm.core.errors import InvalidSetting, expected


@dataclass(frozen=True)
class Place:
    """One Canon layer. block, module: paths in the model and in the block; side: "input" or "output" of the module.

    channels: their number; part: which ones, if not all of the module's. head_dim, input_size: what `:dynamic` and
    `:offset` need. name: of the layer in the block.
    """

    block: str
    letters: str
    name: str
    module: str
    side: str
    channels: int
    variant: Variant
    part: Channels | None = None
    head_dim: int | None = None
    input_size: int | None = None

    def __str__(self) -> str:
        some = "" if self.part is None else " (some of its channels)"
        where = f"{self.side} of {self.module or 'the block'}{some}"
        return f"{self.letters:3} {self.channels:6} channels, {where}"


class Spot(NamedTuple):
    """A `Place` in some block: its fields that differ from layer to layer."""

    letters: str
    module: str
    channels: int
    part: Channels | None = None
    head_dim: int | None = None
    input_size: int | None = None


def place(model: PreTrainedModel, sites: dict[str, Variant], text: str) -> list[Place]:
    """The Canon layers of a model at these sites, block by block. One-line InvalidSetting for a site that no block can
    have, or a variant that it cannot have there."""
    if own := [letter for letter in sites if not SITES[letter].forms]:
        raise expected("sites", f"no {own[0]}: short convolutions belong to a host's own mixers", text)
    blocks, config = find_modules.find(model), model.config.get_text_config(decoder=True)
    places, reasons = [], dict[str, str]()
    for index, block in enumerate(blocks):
        for letter, variant in joined(sites):
            letters = members(letter)
            site = SITES[letters[0]]
            if site.part == "model" and index > 0:
                continue
            spots = list(_spots(block, site, letters, variant, config, reasons))
            side = "input" if site.side == "input" else "output"
            for spot in spots:
                fields = spot._asdict() | {"block": block.path, "name": _name(spot, spots)}
                places.append(Place(**fields, side=side, variant=variant))
    for letter in sites:
        if not any(letter in one.letters for one in places):
            why = reasons.get(letter, "no such site")
            raise InvalidSetting("sites", f'sites: no {letter} in {config.model_type}: {why}, got "{text}"')
    return places


def _name(spot: Spot, spots: list[Spot]) -> str:
    """The layer's name: `canon_A`, or `canon_A_mamba` if a block has several with these letters."""
    modules = [other.module for other in spots if other.letters == spot.letters]
    ending = "_" + _short(spot.module, modules).replace(".", "_").removesuffix("_proj") if len(modules) > 1 else ""
    return f"canon_{spot.letters}{ending}"


def _short(path: str, paths: list[str]) -> str:
    """The path without the beginning and end that all `paths` share."""
    parts = [p.split(".") for p in paths]
    own = path.split(".")
    while len(own) > 1 and all(len(p) > 1 and p[0] == own[0] for p in parts):
        own, parts = own[1:], [p[1:] for p in parts]
    while len(own) > 1 and all(len(p) > 1 and p[-1] == own[-1] for p in parts):
        own, parts = own[:-1], [p[:-1] for p in parts]
    return ".".join(own)


def _spots(
    block: Block, site: Site, letters: str, variant: Variant, config: Any, reasons: dict[str, str]
) -> Iterator[Spot]:
    """Where the block has the sites of these letters, which are one or a group; `reasons`: why it has not."""
    width, letter = config.hidden_size, site.letter
    match site.part, site.side:
        case "model" | "block", _:
            if {"altup", "attn_hc"} & block.module._modules.keys() or block.path.startswith("model.L_module"):
                reasons[letter] = "its blocks take several streams at once, or run several times"
            else:
                yield Spot(letter, "", width)
        case "mixer", "inside":
            for mixer in block.mixers:
                yield from _in_mixer(block, mixer, letters, variant, config, reasons)
        case "mixer", side:
            reasons.setdefault(letter, "no mixer under a name that we know")
            for mixer in block.mixers:
                # In latent attention, queries may be projected from a narrower input; keys never are.
                read = next((mixer.roles[role] for role in ("K", "KV", "QKV", "all") if role in mixer.roles), None)
                if side == "output":
                    yield Spot(letter, mixer.leave, width)
                elif read is None:
                    yield Spot(letter, mixer.enter, width)
                else:
                    yield Spot(letter, mixer.enter, channels_in(block.module.get_submodule(read)))
        case "mlp", "inside":
            reasons.setdefault(letter, "no projection before a nonlinearity under a name that we know")
            for mlp in block.mlps:
                if mlp.reason:
                    reasons[letter] = mlp.reason
                for path in mlp.projections:
                    yield Spot(letter, path, channels_out(block.module.get_submodule(path)))
        case _, side:
            reasons.setdefault(letter, "no MLP under a name that we know")
            for mlp in block.mlps:
                yield Spot(letter, mlp.enter if side == "input" else mlp.leave, width)


def _in_mixer(
    block: Block, mixer: Mixer, letters: str, variant: Variant, config: Any, reasons: dict[str, str]
) -> Iterator[Spot]:
    """On the projections of one mixer. letters: Q, K or V alone, or QKV, which is B."""
    for letter in letters:
        reasons.setdefault(letter, "no projections of queries, keys and values under names that we know")
    together = len(letters) > 1
    for role, path in mixer.roles.items():
        projection = block.module.get_submodule(path)
        if role in ("all", "KV"):
            if together:
                _refuse_by_head(variant, mixer, "its projection makes more than keys, or more than queries")
                yield Spot(letters if role == "all" else role, path, channels_out(projection))
            elif role == "all":
                reasons[letters] = "its mixer has one projection for everything (B is Canon on all of it)"
            elif letters in role:
                reasons[letters] = "keys and values come from one projection (B is Canon on all of it)"
        elif mixer.shares_keys and role in ("K", "V"):
            reasons.setdefault(role, "its keys and values are those of another block")
        elif role == "QKV":
            _refuse_by_head(variant, mixer, "its queries, keys and values come from one projection")
            channels, width = channels_of(mixer.module, projection, role), channels_out(projection)
            if together:
                parts = [] if channels is None else sorted(channels.values(), key=lambda span: span.first)
                region = Channels(parts[0].groups, parts[0].first, parts[-1].end) if parts else Channels(1, 0, width)
            elif channels is None:
                reasons[letters] = f"its channels in {path} are not known (B is Canon on all of them)"
                continue
            else:
                region = channels[letters]
            yield Spot(letters, path, region.count, None if region.count == width else region)
        elif role in letters:
            yield _on_one(projection, path, role, variant, mixer, config)


def _on_one(projection: nn.Module, path: str, letter: str, variant: Variant, mixer: Mixer, config: Any) -> Spot:
    """On a projection that makes only queries, only keys or only values."""
    known = channels_of(mixer.module, projection, letter)
    assert known is not None
    channels, head_dim, input_size = known[letter], None, None
    if variant.form in ("dynamic", "offset"):
        names = ("head_dim", "attention_head_size", "head_k_dim")
        sizes = [getattr(mixer.module, name, None) for name in names] + [getattr(config, "head_dim", None)]
        head_dim = next((size for size in sizes if isinstance(size, int)), None)
        if head_dim is None or channels.count % head_dim:
            _refuse_by_head(variant, mixer, "its head size is not known")
        if "KV" in mixer.roles:
            _refuse_by_head(variant, mixer, "its projection does not read the mixer's input")
        input_size = channels_in(projection) if variant.form == "dynamic" else None
    part = None if channels.count == channels_out(projection) else channels
    return Spot(letter, path, channels.count, part, head_dim, input_size)


def _refuse_by_head(variant: Variant, mixer: Mixer, why: str) -> None:
    if variant.form in ("dynamic", "offset"):
        kind = type(mixer.module).__name__
        raise InvalidSetting("sites", f"sites: no :{variant.form} in {kind}: {why}")
