"""RWKV-7: a state that decays by channel and forgets what it holds under a removal key, which is not what it adds.

    S_t = diag(exp(g_t)) S_{t-1} - (a_t * c_t) (S_{t-1}^T c_t)^T + h_t v_t^T,    o_t = S_t^T r_t
    g_t = -e^-1/2 sigmoid(w_0 + W_2 tanh(W_1 x_t)),    a_t = sigmoid(a_0 + A_2 A_1 x_t),    c_t = unit(k_t * xi)
    h_t = k_t * (1 + (a_t - 1) * alpha),    y_t = W_o (G_2 sigmoid(G_1 x_t) * (norm(o_t) + (r_t . rho * h_t) v_t))

Peng et al. 2025 (arXiv 2503.14456), Section 4. Each of the six projections of x reads a mean of x_t and x_{t-1} with
weights of its own per channel (the token shift, site b; without it x_t alone). With `value_residual`, later layers
mix the values of the first one into theirs: v_t + sigmoid(n_0 + N_2 N_1 x_t) * (v_first,t - v_t), where x_t is what v_t
was made from. Initial values are those of the release (github.com/BlinkDL/RWKV-LM, RWKV-v7, 2025), but for linear maps.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.layer import on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.canon.variants import TokenShift
from canonlm.core.errors import expected
from canonlm.models.cache import Layout
from canonlm.models.initialize import Fill, add_parameters, constant, zeros
from canonlm.models.mixers.base import DERIVED, Architecture, register
from canonlm.models.mixers.gdn import delta_flops, larger_chunks
from canonlm.models.mixers.recurrent import KeyValueOptions, LowRank, RecurrentMixer, at_least_float32, mask_out, unit
from canonlm.models.settings import Config
from canonlm.ops.generalized_delta_rule import generalized_delta_rule

READERS = {"q": 0.2, "k": 0.7, "v": 0.7, "decay": 0.9, "rate": 0.9, "gate": 0.2}
"""The projections of x: q is the receptance r, rate is a. The larger its number, the more of the token before does one
read at first."""


@dataclass
class RWKV7Options(KeyValueOptions):
    """Both head dims are hidden_size / num_heads by default, and the ranks are multiples of 32 that grow as in the
    paper's models: those of decays, rates and values with the root of hidden_size, the gate's with its power of 0.8."""

    decay_rank: int = DERIVED
    rate_rank: int = DERIVED
    gate_rank: int = DERIVED
    value_residual: bool = False
    value_rank: int | None = None

    def complete(self, config: Config) -> None:
        self.derive_heads(config, key_head_dim=1, value_head_dim=1)
        root, high = config.hidden_size**0.5, 0.6 * config.hidden_size**0.8
        ranks = {"decay_rank": 1.8 * root, "rate_rank": 1.8 * root, "gate_rank": high}
        ranks |= {"value_rank": 1.3 * root} if self.value_residual else {}
        self.derive(**{key: max(32, 32 * round(rank / 32)) for key, rank in ranks.items()})
        if self.value_rank is not None and not self.value_residual:
            raise expected("value_rank", "none without value_residual", self.value_rank)


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
        **{"x_conv1d": "complete", "shifts": "complete", "o_proj": "rows"},
    }
    tensor_parallel_divides = ("num_heads",)

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, options = config.hidden_size, self.options
        key_dim, value_dim = options.key_head_dim, options.value_head_dim
        keys, values = options.num_heads * key_dim, options.num_heads * value_dim
        self.add_projections({"q": keys, "k": keys, "v": values})
        heads, layers = options.num_heads, config.num_hidden_layers
        decays = by_channel(-5.5, 6, power=1 + (layer_idx / max(layers - 1, 1)) ** 0.3, zigzag=2.5, heads=heads)
        rates = by_channel(-0.39, 0.4, zigzag=0.3, heads=heads)
        self.decay_proj = LowRank(config, hidden, options.decay_rank, keys, start=decays, between=torch.tanh)
        self.rate_proj = LowRank(config, hidden, options.rate_rank, keys, start=rates)
        self.gate_proj = LowRank(config, hidden, options.gate_rank, values, bias=False, between=torch.sigmoid)
        self.hands_on = options.value_residual
        if self.hands_on and layer_idx != config.mixers.index(self.name):
            self.value_proj = LowRank(config, hidden, options.value_rank, values, start=by_channel(0.93, -0.4))
        removal, scale = by_channel(0.76, -0.1), constant(((layer_idx + 1) / layers) ** 0.7)
        add_parameters(self, removal=(removal, keys), share=(constant(1.02), keys), bonus=(constant(-0.04), keys))
        add_parameters(self, norm_weight=(scale, values), norm_bias=(zeros, values))
        if SHORT_CONV in self.sites:
            self.x_conv1d = TokenShift(hidden)
            shifts = partial(_shifts, 1 - layer_idx / layers)
            add_parameters(self, shifts=(shifts, len(READERS), hidden))
        self.add_canons(self.widths, {"q": key_dim, "k": key_dim, "v": value_dim})
        self.o_proj = nn.Linear(values, hidden, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        """Both steps of a token."""
        return 2 * delta_flops(config.options_of(cls), 2 * seq_len, earlier_only=True)

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
        values, g = v, -(torch.e**-0.5) * at_least_float32(self.decay_proj(read["decay"])).sigmoid()
        rate = at_least_float32(self.rate_proj(read["rate"])).sigmoid()
        r, k, v, g, rate, removed = (self.by_head(x) for x in (q, k, v, g, rate, k * on_this_device(self.removal)))
        added = k * (1 + (rate - 1) * self.by_head(self.share)).to(k.dtype)
        rule = layout.on_whole_rows(generalized_delta_rule)
        g, real = mask_out(g, layout), mask_out(g.new_ones(g.shape[:3]), layout)
        o, state = rule(r, added, v, g, rate, unit(removed), real, state_BHKV=state, documents=layout.documents)
        normed = torch.layer_norm(at_least_float32(o), o.shape[-1:], eps=1e-5 * o.shape[-1]).flatten(-2).to(v.dtype)
        bonus = (r * added * self.by_head(self.bonus)).sum(-1, keepdim=True) * v
        y = normed * on_this_device(self.norm_weight) + on_this_device(self.norm_bias) + bonus.flatten(-2)
        return self.o_proj(y * self.gate_proj(read["gate"])), state, values

    def by_head(self, x: Tensor) -> Tensor:
        devices = 1 if self.group is None else self.group.size()
        return on_this_device(x).unflatten(-1, (self.options.num_heads // devices, -1))


def by_channel(first: float, rise: float, *, power: float = 1.0, zigzag: float = 0.0, heads: int = 1) -> Fill:
    """For channel i of n: first + rise (i / (n - 1))^power + zigzag z |z|, where z goes from -1 to 1 in each head."""
    return partial(_by_channel, first, rise, power, zigzag, heads)


def _by_channel(
    first: float, rise: float, power: float, zigzag: float, heads: int, x: Tensor, generator: torch.Generator
) -> None:
    line = partial(torch.linspace, dtype=x.dtype, device=x.device)
    z = line(-1, 1, len(x) // heads).repeat(heads)
    x.copy_(first + rise * line(0, 1, len(x)) ** power + zigzag * z * z.abs())


def _shifts(depth: float, x: Tensor, generator: torch.Generator) -> None:
    """Less of the token before in later channels and layers. depth: the share of layers that are left."""
    channels = torch.arange(x.shape[1], dtype=x.dtype, device=x.device) / x.shape[1]
    x.copy_(1 - torch.stack([channels ** (power * depth) for power in READERS.values()]))
