"""Softmax attention: grouped queries, QK-norm, Canon-B, rotary positions on part of each head and of the heads.

    y_th = sum_s p_ths v_s,    p_ths = exp(a_ths) / (exp(sink_h) + sum_s exp(a_ths)),    a_ths = E^-1/2 q_th . k_s
    out_t = W_o (y_t * sigmoid(W_g x_t))

The sums are over s <= t, with a window of W tokens over t - W < s <= t. The sinks (gpt-oss, arXiv 2508.10925) and the
gate (arXiv 2505.06708, elementwise) are options.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from canonlm.canon.layer import on_this_device
from canonlm.canon.sites import OF_MIXER
from canonlm.core.cache_name import CACHE
from canonlm.models.apply_canon import Slot, run_rotary, run_site
from canonlm.models.cache import Layout, keep_last
from canonlm.models.initialize import start_with, zeros
from canonlm.models.mixers.base import Architecture, Mixer, register
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import rotate
from canonlm.models.settings import Config
from canonlm.ops.context_parallel import Span, own, to_heads, to_tokens
from canonlm.ops.packed_attention import packed_attention, takes


def needs_no_mask(config: Config, x_BTD: Tensor, training: bool) -> bool:
    """Whether attention can separate documents by their borders alone, without padding and cached tokens.

    Flash attention has no other way. "sdpa", which stands for torch's own kernels, can do so on a GPU in half
    precision, without ALiBi, dropout, sinks and windows. "eager" reads a mask, "flex_attention" a mask in blocks.
    """
    kernel = config._attn_implementation or ""
    if "flash" in kernel:
        return True
    plain = config.alibi is None and not config.attention_sink and config.sliding_window is None
    plain = plain and "mla" not in config.mixers and not (training and config.attention_dropout)
    return kernel == "sdpa" and plain and takes(x_BTD, config.head_dim)


@register("attention")
class Attention(Mixer):
    """Causal attention; the kernel (sdpa, flash, flex, eager) is transformers' own, chosen by the configuration."""

    attribute = "self_attn"
    recurrent = False
    attends = True
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
        "g_proj": "columns",
        "sinks": "channels",
        "o_proj": "rows",
    }
    tensor_parallel_divides: ClassVar[tuple[str, ...]] = ("num_attention_heads", "num_key_value_heads")
    is_causal = True

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.head_dim, self.scaling = config.head_dim, config.head_dim**-0.5
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.add_options(q_size)
        if config.qk_norm:
            self.q_norm = RMSNorm(q_size, config.rms_norm_eps)
            self.k_norm = RMSNorm(kv_size, config.rms_norm_eps)
        self.state_idx = self.sites.find(OF_MIXER)
        self.add_canons({"q": q_size, "k": kv_size, "v": kv_size}, dict.fromkeys("qkv", self.head_dim))

    def add_options(self, width: int) -> None:
        """The gate on an output of `width` channels, the sinks, which start at 0, and the window."""
        # An attribute, as code that reads the layer's number would be compiled again for every layer.
        self.window: int | None = self.config.window(self.layer_idx)
        if self.config.attention_gate:
            self.g_proj = nn.Linear(self.config.hidden_size, width, bias=self.config.attention_bias)
        if self.config.attention_sink:
            self.sinks = nn.Parameter(torch.empty(self.config.num_attention_heads))
            start_with(self, sinks=zeros)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return 4 * config.num_attention_heads * config.head_dim * mean_reach(config, seq_len)

    def forward(
        self,
        x_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None,
        rotary: tuple[Tensor, Tensor] | None,
        cache: Cache | None = None,
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
            slot = Slot(layout, cache, self.layer_idx, self.state_idx)
            heads = run_rotary(canons, (q, k, v), rotary, self.head_dim, rotated, slot)
            if heads is None:
                q, k, v = run_site(canons, (q, k, v), slot, x_BTD)
        if heads is None:
            heads = [x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v)]
            if rotary is not None:
                heads = [rotate(x, *rotary, count) if count else x for x, count in zip(heads, rotated, strict=True)]
        q_BHTE, k_BHTE, v_BHTE = (x.transpose(1, 2) for x in heads)
        k_BHSE, v_BHSE = k_BHTE, v_BHTE
        if isinstance(cache, Cache):
            k_BHSE, v_BHSE = cache.update(k_BHTE, v_BHTE, self.layer_idx)
        elif cache is not None and CACHE == "cache":
            k_BHSE, v_BHSE = cache.update(k_BHTE, v_BHTE, self.layer_idx, kwargs=kwargs)
        elif cache is not None:  # before transformers 5.24, the function for the kernel updates a paged cache
            kwargs["cache"] = cache
        if layout.without_mask:
            assert layout.documents is not None
            if self.config._attn_implementation == "sdpa":
                q_BTHE, k_BTHE, v_BTHE = (to_heads(x, layout.span) for x in heads)
                y_BTHE = packed_attention(q_BTHE, k_BTHE, v_BTHE, layout.documents)
                return self.output(to_tokens(y_BTHE, layout.span), x_BTD), None
            # Nothing was cached: the new keys are all there are; a static cache has empty places after them.
            k_BHSE, v_BHSE, kwargs = k_BHTE, v_BHTE, kwargs | layout.documents.arguments()
        y_BTHE, weights = self.attend(q_BHTE, k_BHSE, v_BHSE, attention_mask, layout.span, kwargs)
        if cache is not None and layout.key_order is not None and self.window is not None:
            keep_last(cache.layers[self.layer_idx], k_BHSE, v_BHSE, layout.key_order)
        return self.output(y_BTHE, x_BTD), weights

    def attend(
        self,
        q_BHTE: Tensor,
        k_BHSE: Tensor,
        v_BHSE: Tensor,
        mask: Tensor | None,
        span: Span | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """The sums above, `[B, T, H, E]`, by transformers' function for the kernel, and any weights it returns. With a
        span, the mask is of whole rows, and weights are of this process's heads."""
        q_BHTE, k_BHSE, v_BHSE = (to_heads(x, span, time=2, heads=1) for x in (q_BHTE, k_BHSE, v_BHSE))
        mask = mask if mask is None or mask.shape[1] == 1 else own(mask, span, dim=1)
        kernel = self.config._attn_implementation
        kwargs = {**kwargs, "dropout": self.config.attention_dropout if self.training else 0.0, "scaling": self.scaling}
        if self.window is not None:
            kwargs["sliding_window"] = self.window  # flash attention has no mask to read it from
        function = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention_forward)
        if not self.config.attention_sink:
            y_BTHE, weights = function(self, q_BHTE, k_BHSE, v_BHSE, mask, **kwargs)
            return to_tokens(y_BTHE, span), weights
        sinks_H = own(on_this_device(self.sinks), span, dim=0)
        if kernel not in ("sdpa", "eager"):
            y_BTHE, weights = function(self, q_BHTE, k_BHSE, v_BHSE, mask, s_aux=sinks_H, **kwargs)
            return to_tokens(y_BTHE, span), weights
        q, k, v, mask = with_sinks(q_BHTE, k_BHSE, v_BHSE, mask, sinks_H / self.scaling)
        y_BTHE, weights = function(self, q, k, v, mask, **kwargs)
        return to_tokens(y_BTHE[:, -q_BHTE.shape[2] :, :, :-1], span), None if weights is None else weights[..., 1:]

    def output(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        y_BTF = y.reshape(*x_BTD.shape[:-1], -1)  # not flatten(-2): vLLM's kernel returns [B * T, H * E]
        if self.config.attention_gate:
            y_BTF = y_BTF * self.g_proj(x_BTD).sigmoid()
        return self.o_proj(y_BTF)


def with_sinks(
    q_BHTE: Tensor, k_BJSE: Tensor, v_BJSV: Tensor, mask: Tensor | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask for a kernel without sinks: the first key has value 0, and its product with every
    query of a head is that head's sink.

    Heads share keys, so the sinks are in one more channel of the queries: it is 1 in that key, and 0 in the others.
    A kernel that is causal without a mask gets one more query for that key; its output is the first.
    """
    q = torch.cat([q_BHTE, sinks_H.to(q_BHTE.dtype)[:, None, None].expand(*q_BHTE.shape[:3], 1)], dim=-1)
    one = nn.functional.pad(k_BJSE.new_ones(1), (k_BJSE.shape[3], 0)).expand(*k_BJSE.shape[:2], 1, -1)
    k = torch.cat([one, nn.functional.pad(k_BJSE, (0, 1))], dim=2)
    v = nn.functional.pad(v_BJSV, (0, 1, 1, 0))
    if mask is None:
        return (q if q.shape[2] == 1 else nn.functional.pad(q, (0, 0, 1, 0))), k, v, None
    return q, k, v, nn.functional.pad(mask, (1, 0), value=mask.dtype == torch.bool)


def mean_reach(config: Config, seq_len: int) -> float:
    """The number of tokens that a token attends to, on average over tokens and layers. Causal: half of them. (Counting
    all pairs gives twice that.)"""
    windows = [min(seq_len, config.window(i) or seq_len) for i in config.attending]
    return sum(window - window**2 / (2 * seq_len) for window in windows) / len(windows)
