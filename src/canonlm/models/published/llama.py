"""The release's Llama, in the style of transformers: our names, except for the two fused Canons."""

from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import PositiveFloat, PositiveInt, model_validator
from torch import Tensor

from canonlm.core.errors import expected
from canonlm.models.config import CanonLMConfig
from canonlm.models.published.format import Release, as_named
from canonlm.models.published.rename import Names


class LlamaCanon(Release):
    mixer = "attention"
    same: ClassVar[dict[str, str]] = {
        **Release.same,
        **as_named("canon_set", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
        **as_named("hidden_act", "rms_norm_eps", "rope_theta", "rope_dim", "qk_norm", "attention_bias", "mlp_bias"),
        **as_named("attention_dropout", "max_position_embeddings"),
    }

    model_type: Literal["LlamaCanon"] = "LlamaCanon"
    hidden_size: PositiveInt = 4096
    num_hidden_layers: PositiveInt = 32
    num_attention_heads: PositiveInt = 32
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    intermediate_size: PositiveInt | None = 11008
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    qk_norm: bool = False
    rope_version: Literal["lingua", "huggingface"]
    rope_theta: PositiveFloat = 10000.0
    rope_dim: PositiveInt | None = None
    partial_rotary_factor: float = 1.0
    attention_bias: bool = False
    attention_dropout: float = 0.0
    mlp_bias: bool = False
    max_position_embeddings: PositiveInt = 2048

    rope_scaling: None = None
    pretraining_tp: Literal[1] = 1

    @model_validator(mode="after")
    def _has_rope_dim(self) -> Self:
        if self.rope_dim is None and self.partial_rotary_factor != 1.0:
            raise expected("params.partial_rotary_factor", "rope_dim to go with it", self.partial_rotary_factor)
        return self

    @classmethod
    def of(cls, config: CanonLMConfig) -> dict[str, Any]:
        share = {"partial_rotary_factor": config.rope_dim / config.head_dim}
        return {**super().of(config), **share, "rope_version": "huggingface"}

    def names(self) -> Names:
        return Names(
            top=as_named("model.embed_tokens", "model.norm", "lm_head"),
            layers="model.layers",
            layer={
                **as_named(*(f"self_attn.{x}_proj" for x in "qkvo"), "self_attn.q_norm", "self_attn.k_norm"),
                "self_attn.canonB": "self_attn.canonB_q self_attn.canonB_k self_attn.canonB_v",
                **as_named("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
                "mlp.canonD": "mlp.canonD_gate mlp.canonD_up",
                **as_named("input_layernorm", "post_attention_layernorm", "canonA", "canonC"),
            },
            orders=pairs_to_halves(self.config()) if self.rope_version == "lingua" else {},
        )


def pairs_to_halves(config: CanonLMConfig) -> dict[str, Tensor]:
    """The order of rows of queries and keys with which rotating channels (i, i + rope_dim / 2) does what rotating
    (2i, 2i + 1) did. The norms and Canons on them come before the rotation, so they have the same order."""
    channels = torch.arange(config.head_dim)
    rotated, rest = channels[: config.rope_dim], channels[config.rope_dim :]
    head = torch.cat([rotated[0::2], rotated[1::2], rest])
    orders: dict[str, Tensor] = {}
    for x, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        order = (torch.arange(heads)[:, None] * config.head_dim + head).flatten()
        orders |= {f"self_attn.{name}": order for name in (f"{x}_proj", f"{x}_norm", f"canonB_{x}")}
    return orders
