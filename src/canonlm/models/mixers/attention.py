"""Softmax attention: grouped queries, QK-norm, Canon-B, rotary positions on part of each head and of the heads."""

from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from canonlm.canon.sites import OF_MIXER
from canonlm.models.apply_canon import Slot, run_rotary, run_site
from canonlm.models.cache import Layout
from canonlm.models.mixers.base import Architecture, Mixer, register
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import rotate
from canonlm.ops.packed_attention import packed_attention, takes

if TYPE_CHECKING:
    from canonlm.models.config import CanonLMConfig


def needs_no_mask(config: "CanonLMConfig", x_BTD: Tensor, training: bool) -> bool:
    """Whether attention can separate documents by their borders alone, without padding and cached tokens.

    Flash attention has no other way. "sdpa", which stands for torch's own kernels, can do so on a GPU in half
    precision, without ALiBi and dropout. "eager" reads a mask, "flex_attention" a mask in blocks.
    """
    kernel = config._attn_implementation or ""
    if "flash" in kernel:
        return True
    plain = config.alibi is None and not (training and config.attention_dropout)
    return kernel == "sdpa" and plain and takes(x_BTD, config.head_dim)


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
        self.state_idx = self.sites.find(OF_MIXER)
        self.add_canons({"q": q_size, "k": kv_size, "v": kv_size}, dict.fromkeys("qkv", self.head_dim))

    @classmethod
    def flops(cls, config: "CanonLMConfig", seq_len: int) -> float:
        """Causal: a token attends to half of its window on average. (Counting all pairs gives twice that.)"""
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
        """`attention_mask` is what transformers' mask functions make for the chosen kernel; documents that it does not
        keep apart are in the layout. `rotary` is (cos, sin), each `[B or 1, T, 1, rope_dim / 2]`. Returns the output
        `[B, T, D]` and, from eager attention, the weights."""
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        heads, rotated = None, (self.config.rope_heads, self.config.rope_heads // self.num_key_value_groups, 0)
        if self.state_idx >= 0:
            canons = [getattr(self, f"canon{OF_MIXER}_{name}", None) for name in "qkv"]
            slot = Slot(layout, past_key_values, self.layer_idx, self.state_idx)
            heads = run_rotary(canons, (q, k, v), rotary, self.head_dim, rotated, slot)
            if heads is None:
                q, k, v = run_site(canons, (q, k, v), slot, x_BTD)
        if heads is None:
            heads = [x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v)]
            if rotary is not None:
                heads = [rotate(x, *rotary, count) if count else x for x, count in zip(heads, rotated, strict=True)]
        q_BTHE, k_BTHE, v_BTHE = heads
        q_BHTE, k_BHTE, v_BHTE = (x.transpose(1, 2) for x in (q_BTHE, k_BTHE, v_BTHE))
        k_BHSE, v_BHSE = k_BHTE, v_BHTE
        if past_key_values is not None:
            k_BHSE, v_BHSE = past_key_values.update(k_BHTE, v_BHTE, self.layer_idx)
        if layout.without_mask:
            assert layout.documents is not None
            if self.config._attn_implementation == "sdpa":
                y_BTHE = packed_attention(q_BTHE, k_BTHE, v_BTHE, layout.documents)
                return self.o_proj(y_BTHE.flatten(-2)), None
            # Nothing was cached: the new keys are all there are; a static cache has empty places after them.
            k_BHSE, v_BHSE, kwargs = k_BHTE, v_BHTE, kwargs | layout.documents.arguments()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        dropout = self.config.attention_dropout if self.training else 0.0
        y_BTHE, weights = attend(
            self, q_BHTE, k_BHSE, v_BHSE, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        # Not flatten(-2): vLLM's kernel returns [B * T, H * E].
        return self.o_proj(y_BTHE.reshape(*x_BTD.shape[:-1], -1)), weights
