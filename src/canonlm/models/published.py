"""Checkpoints of the original Canon release, read into our decoder and written back.

A format is two tables: how its configuration names what ours names, and which rows of its tensors are which of ours.
Its layers fuse what we keep apart (one Canon over [q, k, v], one over [gate, up]) and may rotate neighbouring channels
where we rotate halves; both are rearrangements of rows, so one table serves reading and writing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canonlm.errors import expected, unknown
from canonlm.models.config import CanonLMConfig
from canonlm.models.modeling import CanonLMForCausalLM


@dataclass(frozen=True)
class Move:
    """One tensor of theirs: its rows, taken in `order`, are those of `ours`, one after the other."""

    theirs: str
    ours: tuple[str, ...]
    order: Tensor | None = None  # None: as they are
    tied_to: str | None = None  # another name for that tensor of theirs: may be missing, and must be equal

    def read(self, theirs: Tensor, rows: list[int]) -> list[Tensor]:
        return list((theirs if self.order is None else theirs[self.order]).split(rows))

    def write(self, ours: list[Tensor]) -> Tensor:
        tensor = torch.cat(ours)
        return tensor if self.order is None else tensor[self.order.argsort()]


@dataclass(frozen=True)
class Format:
    config: Callable[[dict[str, Any]], CanonLMConfig]
    params: Callable[[CanonLMConfig], dict[str, Any]]
    moves: Callable[[CanonLMConfig, dict[str, Any]], Iterator[Move]]


def build(params: dict[str, Any], state: dict[str, Tensor]) -> CanonLMForCausalLM:
    """Our model for a published checkpoint: `params` is its configuration, `state` its tensors under their own names.

    All or nothing: any key that is missing, unknown or of another shape is a ValueError that lists them all.
    """
    layout = _format(params)
    config = layout.config(params)
    with torch.device("meta"):
        model = CanonLMForCausalLM(config)
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    moves = list(layout.moves(config, params))
    _check_state(moves, state, shapes)
    ours: dict[str, Tensor] = {}
    for move in moves:
        tensor = state[move.theirs] if move.theirs in state else state[str(move.tied_to)]
        rows = [shapes[name][0] for name in move.ours]
        ours.update(zip(move.ours, move.read(tensor, rows), strict=True))
    model.load_state_dict({name: tensor.clone() for name, tensor in ours.items()}, assign=True)
    model.tie_weights()
    return model.eval()


def export(
    model: CanonLMForCausalLM, tensors: dict[str, Tensor] | None = None, **params: Any
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The inverse: `(params, state)` in a published format, `model_type` of `params` says which.

    Other `params` are the format's own choices, such as `rope_version`. `tensors`, by our names, are written instead
    of the weights (gradients, say).
    """
    params = {"model_type": "LlamaCanon", **params}
    layout = _format(params)
    params = {**layout.params(model.config), **params}
    tensors = model.state_dict() if tensors is None else tensors
    moves = layout.moves(model.config, params)
    return params, {move.theirs: move.write([tensors[name] for name in move.ours]) for move in moves}


def _format(params: dict[str, Any]) -> Format:
    name = params.get("model_type")
    if name not in FORMATS:
        raise unknown("model_type", name, FORMATS)
    return FORMATS[name]


def _check_state(moves: list[Move], state: dict[str, Tensor], shapes: dict[str, torch.Size]) -> None:
    wrong = [f"unknown {name}" for name in sorted(state.keys() - {move.theirs for move in moves})]
    for move in moves:
        if move.theirs not in state:
            wrong += [] if move.tied_to in state else [f"missing {move.theirs}"]
            continue
        first = shapes[move.ours[0]]
        wanted = (sum(shapes[name][0] for name in move.ours), *first[1:])
        if tuple(state[move.theirs].shape) != wanted:
            wrong.append(f"{move.theirs} is {tuple(state[move.theirs].shape)}, not {wanted}")
        elif move.tied_to in state and not torch.equal(state[move.theirs], state[move.tied_to]):
            wrong.append(f"{move.theirs} differs from {move.tied_to}, although tied")
    if wrong:
        raise ValueError(f"state: {'; '.join(wrong)}")


# The Llama of the release, in the style of transformers -----------------------------------------------------------

_SAME_IN_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "canon_set": "",
    "canon_kernel": 4,
    "canon_residual": True,
    "canon_activation": False,
    "qk_norm": False,
    "rope_dim": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 2048,
    "initializer_range": 0.02,
    "use_cache": True,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "intermediate_size": 11008,
}
"""Fields with our name and meaning, and what the release takes when they are not given."""

_FIXED_IN_LLAMA = {"canon_bias": False, "rope_scaling": None, "pretraining_tp": 1}
"""Fields that the release never sets otherwise; another value would be another model."""

_IGNORED = {"model_type", "architectures", "auto_map", "torch_dtype", "dtype", "transformers_version", "_name_or_path"}


def _llama_config(params: dict[str, Any]) -> CanonLMConfig:
    known = {*_SAME_IN_LLAMA, *_FIXED_IN_LLAMA, *_IGNORED, "rope_version", "partial_rotary_factor"}
    if strange := sorted(params.keys() - known):
        raise ValueError(f"params: unknown {', '.join(strange)}")
    for key, value in _FIXED_IN_LLAMA.items():
        if params.get(key, value) != value:
            raise expected(f"params.{key}", repr(value), params[key])
    if params.get("rope_version") not in ("lingua", "huggingface"):
        raise expected("params.rope_version", '"lingua" or "huggingface"', params.get("rope_version"))
    fields: dict[str, Any] = {key: params.get(key, default) for key, default in _SAME_IN_LLAMA.items()}
    config = CanonLMConfig(**fields)
    share = params.get("partial_rotary_factor", 1.0)  # the width of the rotation once more: rope_dim / head_dim
    if params.get("rope_dim") is None and share != 1.0:
        raise expected("params.partial_rotary_factor", "rope_dim to go with it", share)
    return config


def _llama_params(config: CanonLMConfig) -> dict[str, Any]:
    if config.canon_sets is not None or config.canon_bias or config.mixers != ["attention"] * config.num_hidden_layers:
        raise ValueError("the LlamaCanon format has attention and the same Canon sites in all layers, without bias")
    params = {key: getattr(config, key) for key in _SAME_IN_LLAMA}
    return {**params, **_FIXED_IN_LLAMA, "rope_version": "huggingface"}


def _llama_moves(config: CanonLMConfig, params: dict[str, Any]) -> Iterator[Move]:
    """The published names are ours but for the two fused Canons."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    order_q = order_k = order_qkv = None
    if params["rope_version"] == "lingua":
        order_q, order_k = _pairs_to_halves(config, heads), _pairs_to_halves(config, kv_heads)
        as_is = torch.arange(kv_heads * config.head_dim)
        order_qkv = torch.cat([order_q, len(order_q) + order_k, len(order_q) + len(order_k) + as_is])

    def one(name: str, order: Tensor | None = None, tied_to: str | None = None) -> Move:
        return Move(name, (name,), order, tied_to)

    yield one("model.embed_tokens.weight")
    for layer_idx in range(config.num_hidden_layers):
        layer, sites = f"model.layers.{layer_idx}", config.sites(layer_idx)
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        for leaf in ("weight", "bias") if config.attention_bias else ("weight",):
            yield one(f"{attn}.q_proj.{leaf}", order_q)
            yield one(f"{attn}.k_proj.{leaf}", order_k)
            yield one(f"{attn}.v_proj.{leaf}")
            yield one(f"{attn}.o_proj.{leaf}")
        if config.qk_norm:
            yield one(f"{attn}.q_norm.weight", order_q)
            yield one(f"{attn}.k_norm.weight", order_k)
        if "B" in sites:
            yield Move(f"{attn}.canonB.weight", tuple(f"{attn}.canonB_{x}.weight" for x in "qkv"), order_qkv)
        for leaf in ("weight", "bias") if config.mlp_bias else ("weight",):
            for projection in ("gate", "up", "down"):
                yield one(f"{mlp}.{projection}_proj.{leaf}")
        if "D" in sites:
            yield Move(f"{mlp}.canonD.weight", (f"{mlp}.canonD_gate.weight", f"{mlp}.canonD_up.weight"))
        yield one(f"{layer}.input_layernorm.weight")
        yield one(f"{layer}.post_attention_layernorm.weight")
        for site in "AC":
            if site in sites:
                yield one(f"{layer}.canon{site}.weight")
    yield one("model.norm.weight")
    yield one("lm_head.weight", tied_to="model.embed_tokens.weight" if config.tie_word_embeddings else None)


def _pairs_to_halves(config: CanonLMConfig, heads: int) -> Tensor:
    """Rows of a projection, so that rotating pairs (i, i + rope_dim / 2) does what rotating (2i, 2i + 1) did."""
    channels = torch.arange(config.head_dim)
    rotated, rest = channels[: config.rope_dim], channels[config.rope_dim :]
    head = torch.cat([rotated[0::2], rotated[1::2], rest])
    return (torch.arange(heads)[:, None] * config.head_dim + head).flatten()


FORMATS = {"LlamaCanon": Format(_llama_config, _llama_params, _llama_moves)}
"""By the `model_type` of the published configuration."""
