"""Softmax attention: grouped queries, QK-norm, Canon-B, rotary positions on part of each head and of the heads."""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from canonlm.models.cache import Layout, run_site
from canonlm.models.mixers.base import Architecture, Mixer, register
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import rotate

if TYPE_CHECKING:
    from canonlm.models.config import CanonLMConfig


@register("attention")
class Attention(Mixer):
    """Causal attention; the kernel (sdpa, flash, flex, eager) is transformers' own, chosen by the configuration."""

    attribute = "self_attn"
    recurrent = False
    takes_short_conv = False
    architectures: ClassVar = {
        "llama": Architecture("Transformer: attention with rotary positions (RoPE), gated MLP"),
        "llama-nope": Architecture(
            "the same without any positions (NoPE)", settings=lambda hidden_size: {"rope_dim": 0}
        ),
    }
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "columns"),
        **dict.fromkeys(("canonB_q", "canonB_k", "canonB_v"), "channels"),
        **dict.fromkeys(("q_norm", "k_norm"), "norm"),
        "o_proj": "rows",
    }
    tensor_parallel_divides = ("num_attention_heads", "num_key_value_heads")
    is_causal = True

    def __init__(self, config: "CanonLMConfig", layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        if config.qk_norm:
            self.q_norm = RMSNorm(q_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(kv_size, config.rms_norm_eps)
        self.state_idx = self.sites.find("B")
        self.add_canons({"q": q_size, "k": kv_size, "v": kv_size}, dict.fromkeys("qkv", self.head_dim))

    @classmethod
    def flops(cls, config: "CanonLMConfig", seq_len: int) -> float:
        """Causal: a token meets half of its window on average. (A count of the whole square has twice that.)"""
        return 4 * config.num_attention_heads * config.head_dim * seq_len / 2

    def forward(
        self,
        x_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """`attention_mask` is what transformers' mask functions make for the chosen kernel; `rotary` is (cos, sin),
        each `[B or 1, T, 1, rope_dim / 2]`. Returns the output `[B, T, D]` and, from eager attention, the weights."""
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.state_idx >= 0:
            canons = [getattr(self, f"canonB_{name}", None) for name in "qkv"]
            q, k, v = run_site(canons, (q, k, v), layout, past_key_values, self.layer_idx, self.state_idx, x_BTD)
        q_BTHE, k_BTHE, v_BTHE = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if rotary is not None:
            q_BTHE = rotate(q_BTHE, *rotary, self.config.rope_heads)
            k_BTHE = rotate(k_BTHE, *rotary, self.config.rope_heads // self.num_key_value_groups)
        q_BHTE, k_BHTE, v_BHTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
        if past_key_values is not None:
            k_BHTE, v_BHTE = past_key_values.update(k_BHTE, v_BHTE, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        y_BTHE, weights = attend(
            self, q_BHTE, k_BHTE, v_BHTE, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(y_BTHE.flatten(-2)), weights
