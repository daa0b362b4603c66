"""From Canon sites, by letter, to places in the blocks of a host."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from canonlm.canon.sites import Variant
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
        where = f"{self.side} of {self.module}{some}" if self.module else "input of the block"
        return f"{self.letters:3} {self.channels:6} channels, {where}"


def place(model: PreTrainedModel, sites: dict[str, Variant], text: str) -> list[Place]:
    """The Canon layers of a model at these sites, block by block. One-line InvalidSetting for a site that no block can
    have, or a variant that it cannot have there."""
    if "b" in sites:
        what = "no b: short convolutions belong to a host's own mixers"
        raise expected("sites", what, text)
    blocks, config = find_modules.find(model), model.config.get_text_config(decoder=True)
    width: int = config.hidden_size
    kind, places, reasons = config.model_type, [], dict[str, str]()
    for index, block in enumerate(blocks):
        for letters, variant in _grouped_by_variant(sites):
            if letters == "E":
                rows = _embedding(block, width, variant, reasons) if index == 0 else []
            elif letters in ("A", "O"):
                rows = [_at_mixer(letters, block, mixer, width, variant) for mixer in block.mixers]
                reasons.setdefault(letters, "no mixer under a name that we know")
            elif letters in ("C", "M"):
                rows = [
                    Place("", letters, "", mlp.enter if letters == "C" else mlp.leave, _side(letters), width, variant)
                    for mlp in block.mlps
                ]
                reasons.setdefault(letters, "no MLP under a name that we know")
            elif letters == "D":
                rows = list(_in_mlps(block, variant, reasons))
            else:
                rows = [
                    one for mixer in block.mixers for one in _in_mixer(block, mixer, letters, variant, config, reasons)
                ]
            places += [_named(block, one, rows) for one in rows]
    for letter in sites:
        if not any(letter in one.letters for one in places):
            why = reasons.get(letter, "no such site")
            raise InvalidSetting("sites", f'sites: no {letter} in {kind}: {why}, got "{text}"')
    return places


def _grouped_by_variant(sites: dict[str, Variant]) -> Iterator[tuple[str, Variant]]:
    """The sites by letter, with Q, K and V joined if they have one variant."""
    alike = {*"QKV"} <= sites.keys() and sites["Q"] == sites["K"] == sites["V"]
    for letter, variant in sites.items():
        if not (alike and letter in "KV"):
            yield ("QKV" if alike and letter == "Q" else letter), variant


def _side(letter: str) -> str:
    return "input" if letter in "AC" else "output"


def _named(block: Block, one: Place, same_letter: list[Place]) -> Place:
    """The place with its block and name: `canon_A`, or `canon_A_mamba` if a block has several with one letter."""
    letters = "QKV" if one.letters == "QKV" else one.letters
    name = f"canon_{letters}"
    if sum(other.letters == one.letters for other in same_letter) > 1:
        names = [other.module for other in same_letter if other.letters == one.letters]
        name += "_" + _short(one.module, names).replace(".", "_").removesuffix("_proj")
    fields = {key: value for key, value in vars(one).items() if key not in ("block", "name")}
    return Place(block=block.path, name=name, **fields)


def _short(path: str, paths: list[str]) -> str:
    """The path without the beginning and end that all `paths` share."""
    parts = [p.split(".") for p in paths]
    own = path.split(".")
    while len(own) > 1 and all(len(p) > 1 and p[0] == own[0] for p in parts):
        own, parts = own[1:], [p[1:] for p in parts]
    while len(own) > 1 and all(len(p) > 1 and p[-1] == own[-1] for p in parts):
        own, parts = own[:-1], [p[:-1] for p in parts]
    return ".".join(own)


def _embedding(block: Block, width: int, variant: Variant, reasons: dict[str, str]) -> list[Place]:
    streams = {"altup", "attn_hc"} & block.module._modules.keys()
    if streams or block.path.startswith("model.L_module"):
        reasons["E"] = "its blocks take several streams at once, or run several times"
        return []
    return [Place("", "E", "", "", "input", width, variant)]


def _at_mixer(letter: str, block: Block, mixer: Mixer, width: int, variant: Variant) -> Place:
    if letter == "O":
        return Place("", letter, "", mixer.leave, "output", width, variant)
    # In latent attention, queries may be projected from a narrower input; keys never are.
    path = next((mixer.roles[role] for role in ("K", "KV", "QKV", "all") if role in mixer.roles), None)
    size = width if path is None else channels_in(block.module.get_submodule(path))
    return Place("", letter, "", mixer.enter, "input", size, variant)


def _in_mlps(block: Block, variant: Variant, reasons: dict[str, str]) -> Iterator[Place]:
    for mlp in block.mlps:
        if mlp.reason:
            reasons["D"] = mlp.reason
        for path in mlp.projections:
            yield Place("", "D", "", path, "output", channels_out(block.module.get_submodule(path)), variant)
    reasons.setdefault("D", "no projection before a nonlinearity under a name that we know")


def _in_mixer(
    block: Block, mixer: Mixer, letters: str, variant: Variant, config: Any, reasons: dict[str, str]
) -> Iterator[Place]:
    """Places on the projections of one mixer. letters: Q, K or V alone, or QKV, which is B."""
    for letter in letters:
        reasons.setdefault(letter, "no projections of queries, keys and values under names that we know")
    for role, path in mixer.roles.items():
        projection = block.module.get_submodule(path)
        if role == "all":
            if letters == "QKV":
                yield from _on_all_channels(projection, path, "QKV", variant, mixer, reasons)
            else:
                reasons[letters] = "its mixer has one projection for everything (B is Canon on all of it)"
        elif mixer.shares_keys and role in ("K", "V"):
            reasons.setdefault(role, "its keys and values are those of another block")
        elif role == "KV":
            if letters == "QKV":
                yield from _on_all_channels(projection, path, "KV", variant, mixer, reasons)
            elif letters in "KV":
                reasons[letters] = "keys and values come from one projection (B is Canon on all of it)"
        elif role == "QKV":
            yield from _fused(projection, path, letters, variant, mixer, reasons)
        elif role in letters:
            channels = channels_of(mixer.module, projection, role)
            assert channels is not None
            yield from _separate(projection, path, role, channels[role], variant, mixer, config)


def _on_all_channels(
    projection: nn.Module, path: str, letters: str, variant: Variant, mixer: Mixer, reasons: dict[str, str]
) -> Iterator[Place]:
    _refuse_by_head(variant, mixer, "its projection makes more than keys, or more than queries")
    yield Place("", letters, "", path, "output", channels_out(projection), variant)


def _fused(
    projection: nn.Module, path: str, letters: str, variant: Variant, mixer: Mixer, reasons: dict[str, str]
) -> Iterator[Place]:
    _refuse_by_head(variant, mixer, "its queries, keys and values come from one projection")
    channels, width = channels_of(mixer.module, projection, "QKV"), channels_out(projection)
    if letters == "QKV":
        parts = [] if channels is None else sorted(channels.values(), key=lambda span: span.first)
        region = Channels(parts[0].groups, parts[0].first, parts[-1].end) if parts else Channels(1, 0, width)
    elif channels is None:
        reasons[letters] = f"its channels in {path} are not known (B is Canon on all of them)"
        return
    else:
        region = channels[letters]
    part = None if region.count == width else region
    yield Place("", letters, "", path, "output", region.count, variant, part)


def _separate(
    projection: nn.Module, path: str, letter: str, channels: Channels, variant: Variant, mixer: Mixer, config: Any
) -> Iterator[Place]:
    part = None if channels.count == channels_out(projection) else channels
    head_dim = input_size = None
    if variant.form in ("dynamic", "offset"):
        names = ("head_dim", "attention_head_size", "head_k_dim")
        sizes = [getattr(mixer.module, name, None) for name in names] + [getattr(config, "head_dim", None)]
        head_dim = next((size for size in sizes if isinstance(size, int)), None)
        if head_dim is None or channels.count % head_dim:
            _refuse_by_head(variant, mixer, "its head size is not known")
        if "KV" in mixer.roles:
            _refuse_by_head(variant, mixer, "its projection does not read the mixer's input")
        input_size = channels_in(projection) if variant.form == "dynamic" else None
    yield Place("", letter, "", path, "output", channels.count, variant, part, head_dim, input_size)


def _refuse_by_head(variant: Variant, mixer: Mixer, why: str) -> None:
    if variant.form in ("dynamic", "offset"):
        kind = type(mixer.module).__name__
        raise InvalidSetting("sites", f"sites: no :{variant.form} in {kind}: {why}")
