"""Finds the parts of a decoder: its blocks, their mixers, MLPs and projections.

A decoder of transformers, or one built like them, keeps its blocks in a list and names its parts in a few dozen ways.
The tables here list these names; where a name is ambiguous, the module's content decides (a `mixer` with experts is an
MLP).
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from canonlm.core.errors import InvalidSetting

MIXERS = (
    *("self_attn", "attention", "attn", "self_attention", "self_att", "multi_head_attention", "linear_attn"),
    *("mamba", "mixer", "conv", "temporal_block"),
)
MLPS = ("mlp", "mlps", "feed_forward", "ffn", "ff", "block_sparse_moe", "shared_mlp", "moe", "mixer")
INNER_BLOCKS = ("mamba_decoder",)
"""Blocks inside blocks, next to parts that several blocks share."""

ROLES = {
    "Q": ("q_proj", "query", "Wq", "q_lin", "query_proj", "project_q", "q_b_proj", "q_gate_proj"),
    "K": ("k_proj", "key", "Wk", "k_lin", "key_proj", "project_k"),
    "V": ("v_proj", "value", "Wv", "v_lin", "value_proj", "project_v"),
    "KV": ("kv_a_proj_with_mqa", "kv_proj"),
    "QKV": ("qkv_proj", "query_key_value", "c_attn", "Wqkv", "in_proj_qkv", "in_proj_qkvz"),
    "all": ("in_proj",),
}
"""Projections of a mixer. KV: of latent attention, whose keys and values come from one; all: of a recurrence."""

GATED = (("gate_proj", "up_proj"), ("w1", "w3"), ("w_0", "w_1"), ("gate_up_proj",), ("Wi",), ("input_linear",))
PLAIN = ("up_proj", "c_fc", "fc1", "fc_in", "dense_h_to_4h", "w_in", "0")
"""Projections of an MLP before its nonlinearity."""

REFUSED = {
    **dict.fromkeys(("rwkv", "xlstm", "recurrent_gemma"), "keeps its states outside of the library's caches"),
    "xlnet": "has the time axis first in its blocks",
    "xlm": "has no blocks, but lists of their parts",
    "reformer": "splits the sequence into buckets",
    "prophetnet": "runs several streams of tokens through its blocks",
    "cpmant": "lets tokens see later ones",
    **dict.fromkeys(("musicgen", "musicgen_melody"), "reads several codebooks for each token"),
}
"""Types that cannot have Canon layers, and the reason."""


@dataclass
class Mixer:
    """A block's mixer; paths start at the block. enter: the module whose input is the mixer's input. leave: the module
    whose output is the mixer's output."""

    module: nn.Module
    enter: str
    leave: str
    roles: dict[str, str] = field(default_factory=dict)
    """Paths of the projections."""

    shares_keys: bool = False
    """Whether keys and values come from another block."""


@dataclass
class Mlp:
    enter: str
    leave: str
    projections: list[str]
    reason: str = ""
    """Why Canon-D has no place, where `projections` is empty."""


@dataclass
class Block:
    path: str
    module: nn.Module
    mixers: list[Mixer]
    mlps: list[Mlp]


def find(model: PreTrainedModel) -> list[Block]:
    """The decoder's blocks. One-line InvalidSetting if there are none, or the type cannot have Canon layers."""
    config: Any = model.config.get_text_config(decoder=True)
    kind = model.config.model_type
    why = REFUSED.get(kind) or REFUSED.get(config.model_type)
    if kind == "canonlm":
        why = "takes them from its configuration: set canon_set, or train llama+canon=ABCD"
    elif model.config.is_encoder_decoder:
        why = "is an encoder with a decoder"
    elif (getattr(config, "chunk_size_feed_forward", 0) or 0) > 0:
        why = "has chunk_size_feed_forward, which splits the sequence"
    if why:
        raise InvalidSetting("model", f"model: {kind} cannot have Canon layers: it {why}")
    modules = _lists_of_blocks(model)
    count = Counter(part for module in modules.values() for part in module.modules())
    shared = {part for part, uses in count.items() if uses > 1}
    blocks = [_block(path, module, shared) for path, module in modules.items()]
    blocks = [block for block in blocks if block.mixers or block.mlps]
    if not blocks:
        what = "no list of decoder blocks with a mixer or an MLP under a name that we know"
        raise InvalidSetting("model", f"model: {type(model).__name__} has {what}")
    if getattr(config, "is_decoder", None) is False and any("intermediate" in b.module._modules for b in blocks):
        why = "is configured as an encoder: its tokens see later ones (is_decoder=True makes it a decoder)"
        raise InvalidSetting("model", f"model: {kind} cannot have Canon layers: it {why}")
    return blocks


def channels_out(module: Any) -> int:
    """The output channels of a projection, from its weight only if no attribute has them: it may be quantised."""
    return _size(module, ("out_features", "nf"), 0)


def channels_in(module: Any) -> int:
    return _size(module, ("in_features", "nx"), 1)


def _size(module: Any, names: tuple[str, str], dim: int) -> int:
    sizes = (getattr(module, name, None) for name in names)
    return next((size for size in sizes if isinstance(size, int)), 0) or module.weight.shape[dim]


def blocks_in(model: nn.Module, lists: dict[str, nn.ModuleList], size: Callable[[str], Any]) -> dict[str, nn.Module]:
    """The modules in those lists that the library does not split (`_no_split_modules`), else in the largest list."""
    models = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    unsplit = {name for part in models for name in getattr(part, "_no_split_modules", None) or []}
    named = {name: part for name, part in lists.items() if {type(block).__name__ for block in part} <= unsplit}
    if not named and lists:
        largest = max(lists, key=size)
        named = {largest: lists[largest]}
    outermost = [name for name in named if not any(name.startswith(f"{other}.") for other in named)]
    return {f"{name}.{index}": block for name in outermost for index, block in enumerate(named[name])}


def _lists_of_blocks(model: PreTrainedModel) -> dict[str, nn.Module]:
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not any(isinstance(part, nn.ModuleList) for part in decoder.modules()):
        decoder = model  # some models call their head the decoder
    prefix = next(name for name, part in model.named_modules() if part is decoder)
    prefix = f"{prefix}." if prefix else ""
    lists = {
        f"{prefix}{name}": part
        for name, part in decoder.named_modules()
        if isinstance(part, nn.ModuleList) and len(part)
    }
    blocks = blocks_in(model, lists, lambda name: sum(p.numel() for p in lists[name].parameters()))
    inner = {
        path: next((name for name in INNER_BLOCKS if name in block._modules), "") for path, block in blocks.items()
    }
    return {f"{path}.{inner[path]}".rstrip("."): block.get_submodule(inner[path]) for path, block in blocks.items()}


def _block(path: str, block: nn.Module, shared: set[nn.Module]) -> Block:
    mixers, mlps = [], []
    if "cross_attn" not in block._modules:  # for images; text alone skips the block
        for name, part in _parts(block):
            first = name.rpartition(".")[2] if not name.rpartition(".")[2].isdigit() else name.split(".")[-2]
            if part in shared:
                continue
            if first in MIXERS and (mixer := _mixer(name, part)):
                mixers.append(mixer)
            elif first in MLPS and (mlp := _mlp(name, part)):
                mlps.append(mlp)
    mlps += _inline_mlp(block)
    return Block(path, block, mixers, mlps)


def _parts(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, child in block.named_children():
        if isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{index}", part) for index, part in enumerate(child))
        else:
            yield name, child


def _mixer(path: str, module: nn.Module) -> Mixer | None:
    enter, holder = path, module
    for _ in range(3):  # projections may be one or two modules deeper, in a module that has the mixer's input
        if roles := _roles(holder):
            break
        inner = [(name, child) for name, child in holder.named_children() if any(map(_roles, child.modules()))]
        if not inner:
            return Mixer(module, path, path) if "Attention" in type(module).__name__ else None
        enter, holder = f"{enter}.{inner[0][0]}", inner[0][1]
    else:
        return None
    output = getattr(module, "output", None)
    leave = f"{path}.output.dense" if holder is not module and hasattr(output, "dense") else enter
    shares = bool(getattr(holder, "is_kv_shared_layer", False))
    return Mixer(holder, enter, leave, {role: f"{enter}.{name}" for role, name in roles.items()}, shares)


def _roles(holder: nn.Module) -> dict[str, str]:
    children = holder._modules
    roles: dict[str, str] = {}
    for role, names in ROLES.items():
        # If a role has two projections, the later name is closer to attention: q_b_proj reads q_a_proj's output.
        name = next((name for name in reversed(names) if children.get(name) is not None), None)
        if name is not None and _is_projection(children[name]):
            roles[role] = name
    if {"Q", "K", "V"} <= roles.keys():
        return {role: roles[role] for role in "QKV"}
    if {"Q", "KV"} <= roles.keys():
        return {role: roles[role] for role in ("Q", "KV")}
    return next(({role: roles[role]} for role in ("QKV", "all") if role in roles), {})


def _is_projection(module: Any) -> bool:
    """A linear layer of any kind, not a module made of several."""
    if any(isinstance(getattr(module, name, None), int) for name in ("out_features", "nf")):
        return True
    weight = getattr(module, "weight", None)
    return isinstance(weight, Tensor) and weight.ndim == 2


def _mlp(path: str, module: nn.Module) -> Mlp | None:
    named = any(name.rpartition(".")[2] == "experts" for name, _ in module.named_modules())
    if named or any(parameter.ndim == 3 for parameter in module.parameters()):
        return Mlp(path, path, [], "routed experts have no time axis")
    enter, holder = path, module
    for _ in range(3):
        if names := _nonlinear_inputs(holder):
            leave = path if path == enter else enter.rpartition(".")[0] or path
            return Mlp(enter, leave, [f"{enter}.{name}" for name in names])
        inner = [(name, child) for name, child in holder.named_children() if any(_nonlinear_inputs(child))]
        inner = inner or [(name, child) for name, child in holder.named_children() if list(child.children())]
        if not inner:
            return None
        enter, holder = f"{enter}.{inner[0][0]}", inner[0][1]
    return None


def _nonlinear_inputs(holder: nn.Module) -> list[str]:
    children = holder._modules
    for names in GATED:
        if all(_is_projection(children.get(name)) for name in names):
            return list(names)
    return [name for name in PLAIN if _is_projection(children.get(name))][:1]


def _inline_mlp(block: nn.Module) -> list[Mlp]:
    """The MLP of blocks that hold its two projections directly, or in two modules."""
    if all(_is_projection(block._modules.get(name)) for name in ("fc1", "fc2")):
        return [Mlp("fc1", "fc2", ["fc1"])]
    halves = [getattr(block._modules.get(name), "dense", None) for name in ("intermediate", "output")]
    if all(isinstance(half, nn.Module) for half in halves):
        return [Mlp("intermediate.dense", "output.dense", ["intermediate.dense"])]
    return []
