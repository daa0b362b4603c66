"""Softmax attention: grouped queries, QK-norm, Canon-B, rotary positions on part of each head and of the heads.

    y_th = sum_s p_ths v_s,    p_ths = exp(a_ths) / (exp(sink_h) + sum_s exp(a_ths)),    a_ths = E^-1/2 q_th . k_s
    out_t = W_o (y_t * sigmoid(W_g x_t))

The sums are over s <= t, with a window of W tokens over t - W < s <= t. The sinks (gpt-oss, arXiv 2508.10925) and the
gate (arXiv 2505.06708, elementwise) are options.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar

from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.sites import OF_MIXER
from canonlm.models.apply_canon import Slot, run_rotary, run_site
from canonlm.models.attend import Outputs, attend, mean_reach, over_cached
from canonlm.models.cache import Layout
from canonlm.models.initialize import add_parameters, zeros
from canonlm.models.mixers.base import Architecture, Mixer, register
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import Rotary, rotate
from canonlm.models.settings import Config


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
            add_parameters(self, sinks=(zeros, self.config.num_attention_heads))

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return 4 * config.num_attention_heads * config.head_dim * mean_reach(config, seq_len, cls.name)

    def forward(
        self,
        x_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None,
        rotary: Rotary,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """`attention_mask` is what transformers' mask functions make for the chosen kernel; documents that it does not
        keep apart are in the layout. Returns the output `[B, T, D]` and, from eager attention, the weights."""
        q_BHTE, k_BHTE, v_BHTE = self.heads(x_BTD, layout, rotary, cache)

        def sums(k_BHSE, v_BHSE, kwargs):
            kernel = partial(attend, self, mask=attention_mask, layout=layout, kwargs=kwargs)
            return self.sums(kernel, q_BHTE, k_BHSE, v_BHSE)

        y_BTHE, weights = over_cached(self, (k_BHTE, v_BHTE), layout, cache, kwargs, sums)
        return self.output(y_BTHE, x_BTD), weights

    def heads(self, x_BTD: Tensor, layout: Layout, rotary: Rotary, cache: Cache | None) -> Sequence[Tensor]:
        """`[B, H, T, E]`: queries, and what the cache keeps of a token, keys and values."""
        q, k, v = self.q_proj(x_BTD), self.k_proj(x_BTD), self.v_proj(x_BTD)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        rotated = self.config.rope_heads, self.config.rope_heads // self.num_key_value_groups, 0
        if self.state_idx >= 0:
            canons = [getattr(self, f"canon{OF_MIXER}_{name}", None) for name in "qkv"]
            slot = Slot(layout, cache, self.layer_idx, self.state_idx)
            heads = run_rotary(canons, (q, k, v), rotary, self.head_dim, rotated, slot)
            if heads is not None:
                return [x.transpose(1, 2) for x in heads]
            q, k, v = run_site(canons, (q, k, v), slot, x_BTD)
        heads = [x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v)]
        if rotary is not None:
            heads = [rotate(x, *rotary, count) if count else x for x, count in zip(heads, rotated, strict=True)]
        return [x.transpose(1, 2) for x in heads]

    def sums(self, kernel: Callable[..., Outputs], q_BHTE: Tensor, k_BHSE: Tensor, v_BHSE: Tensor) -> Outputs:
        """The sums above over cached and new tokens, and weights if `kernel(q, k, v)` returns any."""
        return kernel(q_BHTE, k_BHSE, v_BHSE)

    def output(self, y: Tensor, x_BTD: Tensor) -> Tensor:
        # vLLM's kernel returns [B * T, H * E]. Without tokens, -1 has no meaning.
        y_BTF = y.flatten(2) if y.ndim == 4 else y.reshape(*x_BTD.shape[:-1], -1)
        if self.config.attention_gate:
            y_BTF = y_BTF * self.g_proj(x_BTD).sigmoid()
        return self.o_proj(y_BTF)
