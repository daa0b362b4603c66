"""RWKV-7: a state that decays by channel and forgets what it holds under a removal key, which is not what it adds.

    S_t = diag(exp(g_t)) S_{t-1} - (a_t * c_t) (S_{t-1}^T c_t)^T + h_t v_t^T,    o_t = S_t^T r_t
    g_t = -e^-1/2 sigmoid(w_0 + W_2 tanh(W_1 x_t)),    a_t = sigmoid(a_0 + A_2 A_1 x_t),    c_t = unit(k_t * xi)
    h_t = k_t * (1 + (a_t - 1) * alpha),    y_t = W_o (G_2 sigmoid(G_1 x_t) * (norm(o_t) + (r_t . rho * h_t) v_t))

Peng et al. 2025 (arXiv 2503.14456), Section 4. Each of the six projections of x reads a mean of x_t and x_{t-1} with
weights of its own per channel (the token shift, site b; without it x_t alone). With `value_residual`, later layers
mix the values of the first one into theirs: v_t + sigmoid(n_0 + N_2 N_1 x_t) * (v_first,t - v_t), where x_t is what v_t
was made from. Left out: initial values that depend on the layer.

The delta rule (`ops/gated_delta_rule`) computes this as two steps per token: one decays and removes, the other adds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm
from transformers import Cache

from canonlm.canon.layer import CanonLayer, on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.core.errors import expected
from canonlm.models.cache import Layout
from canonlm.models.initialize import constant, ones, ramp, start_with, uniform, zeros
from canonlm.models.mixers.base import CHUNK, DERIVED, Architecture, Options, register
from canonlm.models.mixers.gdn import delta_flops, larger_chunks
from canonlm.models.mixers.recurrent import LowRank, RecurrentMixer, at_least_float32, derive_heads, mask_out, unit
from canonlm.models.settings import Config
from canonlm.ops.gated_delta_rule import gated_delta_rule

READERS = ("q", "k", "v", "decay", "rate", "gate")
"""The projections of x. q is the receptance r, rate is a."""


@dataclass
class RWKV7Options(Options):
    """`num_heads` (default: half of num_attention_heads, at least 1), `key_head_dim` and `value_head_dim` (default:
    hidden_size / num_heads; in the paper they are equal). The ranks grow as in the paper's models: with the root of
    hidden_size those of decays, rates and `value_residual`, with its power of 0.8 that of the gate, in multiples of
    32."""

    num_heads: int = DERIVED
    key_head_dim: int = DERIVED
    value_head_dim: int = DERIVED
    decay_rank: int = DERIVED
    rate_rank: int = DERIVED
    gate_rank: int = DERIVED
    value_residual: bool = False
    value_rank: int | None = None

    def complete(self, config: Config) -> None:
        derive_heads(self, config, key_head_dim=1, value_head_dim=1)
        root, high = config.hidden_size**0.5, 0.6 * config.hidden_size**0.8
        ranks = {"decay_rank": 1.8 * root, "rate_rank": 1.8 * root, "gate_rank": high}
        ranks |= {"value_rank": 1.3 * root} if self.value_residual else {}
        for key, rank in ranks.items():
            if getattr(self, key) is None:
                setattr(self, key, max(32, 32 * round(rank / 32)))
        self.check_positive(*ranks)
        if self.value_rank is not None and not self.value_residual:
            raise expected("value_rank", "none without value_residual", self.value_rank)


class TokenShift(CanonLayer):
    """The token before, zero at the first one of a document."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 2, residual=False)

    def add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.bias = None

    def taps(self, x: Tensor) -> Tensor:
        ones = x.new_ones(x.shape[-1], 1, 1, dtype=torch.promote_types(x.dtype, torch.float32))
        return nn.functional.pad(ones, (0, 1))  # made on the device: a copy from the host would wait


@register("rwkv7")
class RWKV7(RecurrentMixer):
    Options = RWKV7Options
    ignores = ("conv_kernel",)  # a token shift has two taps
    architectures: ClassVar = {
        "rwkv7": Architecture(
            "RWKV-7: a generalised delta rule with decays by channel and a token shift (arXiv 2503.14456)",
            short_conv=True,
        )
    }
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "columns"),
        **dict.fromkeys(("removal", "share", "bonus", "norm_weight", "norm_bias"), "channels"),
        **dict.fromkeys(("x_conv1d", "shifts"), "complete"),
        "o_proj": "rows",
    }
    tensor_parallel_divides = ("num_heads",)

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, options = config.hidden_size, self.options
        key_dim, value_dim = options.key_head_dim, options.value_head_dim
        keys, values = options.num_heads * key_dim, options.num_heads * value_dim
        widths = {"q": keys, "k": keys, "v": values}
        for name, width in widths.items():
            self.add_module(f"{name}_proj", nn.Linear(hidden, width, bias=False))
        self.decay_proj = LowRank(config, hidden, options.decay_rank, keys, start=ramp(-6.5, -1.5))
        self.rate_proj = LowRank(config, hidden, options.rate_rank, keys)
        self.gate_proj = LowRank(config, hidden, options.gate_rank, values, bias=False)
        self.hands_on = options.value_residual
        if self.hands_on and layer_idx != config.mixers.index(self.name):
            self.value_proj = LowRank(config, hidden, options.value_rank, values, start=ones)
        self.removal, self.share, self.bonus = (nn.Parameter(torch.empty(keys)) for _ in range(3))
        self.norm_weight, self.norm_bias = (nn.Parameter(torch.empty(values)) for _ in range(2))
        fills = {"removal": constant(0.85), "share": ones, "bonus": zeros, "norm_weight": ones, "norm_bias": zeros}
        if SHORT_CONV in self.sites:
            self.x_conv1d = TokenShift(hidden)
            self.shifts = nn.Parameter(torch.empty(len(READERS), hidden))
            fills["shifts"] = uniform(0, 1)
        start_with(self, **fills)
        self.add_canons(widths, {"q": key_dim, "k": key_dim, "v": value_dim})
        self.o_proj = nn.Linear(values, hidden, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        """Both steps of a token."""
        o, chunk = config.options_of(cls), min(CHUNK, 2 * seq_len)
        return 2 * delta_flops(o, chunk, scores=2 * (chunk + 1) * o.key_head_dim)

    @classmethod
    def extra_memory(cls, config: Config, seq_len: int) -> float:
        return larger_chunks(config.options_of(cls), 2 * seq_len)

    def mix(  # type: ignore[override]
        self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None, first: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Also returns its values, `[B, T, channels]`."""
        read = dict.fromkeys(READERS, x_BTD)
        if SHORT_CONV in self.sites:
            x, shifts = on_this_device(x_BTD), on_this_device(self.shifts)
            change = self.run(SHORT_CONV, {"x": x}, layout, cache)["x"] - x
            read = {name: x + change * share for name, share in zip(READERS, shifts, strict=True)}
        qkv = {name: self.get_submodule(f"{name}_proj")(read[name]) for name in "qkv"}
        q, k, v = self.run(OF_MIXER, qkv, layout, cache, x_BTD).values()
        if first is not None:
            v = v + self.value_proj(read["v"]).sigmoid() * (first - v)
        values = v
        down, up = self.decay_proj
        g = -(math.e**-0.5) * at_least_float32(up(down(read["decay"]).tanh())).sigmoid()
        rate = at_least_float32(self.rate_proj(read["rate"])).sigmoid()
        r, k, v, g, rate, removed = (self.by_head(x) for x in (q, k, v, g, rate, k * on_this_device(self.removal)))
        removed = unit(removed)
        added = k * (1 + (rate - 1) * self.by_head(self.share)).to(k.dtype)
        o_BTHV, state = self.recur(r, removed, rate, added, v, g, layout, state)
        width = o_BTHV.shape[-1]
        normed = layer_norm(at_least_float32(o_BTHV), (width,), eps=1e-5 * width).flatten(-2).to(v.dtype)
        bonus = (r * added * self.by_head(self.bonus)).sum(-1, keepdim=True) * v
        y = normed * on_this_device(self.norm_weight) + on_this_device(self.norm_bias) + bonus.flatten(-2)
        down, up = self.gate_proj
        return self.o_proj(y * up(down(read["gate"]).sigmoid())), state, values

    def by_head(self, x: Tensor) -> Tensor:
        devices = 1 if self.group is None else self.group.size()
        return on_this_device(x).unflatten(-1, (self.options.num_heads // devices, -1))

    def recur(
        self,
        r: Tensor,
        removed: Tensor,
        rate: Tensor,
        added: Tensor,
        v: Tensor,
        g: Tensor,
        layout: Layout,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The recurrence, on `[B, T, H, K]` and `[B, T, H, V]`. What is removed is read before the state decays, by a
        key that is divided by the decay."""

        def steps(first: Tensor, second: Tensor) -> Tensor:
            return torch.stack([first, second], dim=2).flatten(1, 2)

        one_BTH = mask_out(g.new_ones(g.shape[:3]), layout)
        zero = torch.zeros_like(v)
        return layout.on_whole_rows(gated_delta_rule)(
            r,
            steps((rate * removed).to(v.dtype), added),
            steps(zero, v),
            mask_out(g, layout),
            steps(one_BTH, one_BTH),
            steps((removed * (-g).exp()).to(g.dtype), torch.zeros_like(g)),
            steps=2,
            scale=1.0,
            state_BHKV=state,
            documents=layout.documents,
        )
