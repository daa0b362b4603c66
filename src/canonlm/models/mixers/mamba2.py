"""Mamba2: a state-space layer whose state forgets at one data-dependent rate per head, in its dual, matrix form.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t,    out = W_out RMSNorm(y * silu(z))

Dao and Gu 2024 (arXiv 2405.21060), Sections 6-7. z, x, B, C and dt are projections of the input; x, B and C pass
through the short convolution (site b), which has a bias here. Canon-B is on all five, before it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.models.cache import Layout
from canonlm.models.initialize import add_parameters, bias_of_time_steps, log_of_uniform, ones
from canonlm.models.mixers.base import CHUNK, DERIVED, Architecture, Options, register
from canonlm.models.mixers.recurrent import RecurrentMixer, at_least_float32, mask_out
from canonlm.models.norm import RMSNorm
from canonlm.models.settings import Config
from canonlm.ops.ssd import ssd


@dataclass
class Mamba2Options(Options):
    """`num_heads` (default: half of num_attention_heads, at least 1), `head_dim` (default: 2 hidden_size / num_heads);
    `state_size`: width of B and C; `n_groups`: how many of them the heads share."""

    num_heads: int = DERIVED
    head_dim: int = DERIVED
    state_size: int = 128
    n_groups: int = 1

    def complete(self, config: Config) -> None:
        self.derive_heads(config, head_dim=2)
        self.check_positive("state_size")
        self.check_divides("n_groups", "num_heads")


@register("mamba2")
class Mamba2(RecurrentMixer):
    Options = Mamba2Options
    has_qkv = False
    architectures: ClassVar = {
        "mamba2": Architecture("Mamba2 of Part 4.2 with a gated MLP, with its short convolutions", short_conv=True),
        "mamba2-4.1": Architecture(
            "Mamba2 of Part 4.1 with a gated MLP: 16 heads, states of 128 d numbers",
            short_conv=True,
            settings=lambda hidden_size: {
                "num_heads": 16,
                "head_dim": hidden_size // 8,
                "state_size": 64,
            },
        ),
    }
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("z_proj", "x_proj", "dt_proj"), "columns"),
        **dict.fromkeys(("B_proj", "C_proj", "B_conv1d", "C_conv1d", "canonB_B", "canonB_C"), "complete"),
        **dict.fromkeys(("A_log", "D", "dt_bias"), "channels"),
        "norm": "norm",
        "out_proj": "rows",
    }
    tensor_parallel_divides = ("num_heads", "n_groups")

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, inner = self.options.num_heads, self.options.num_heads * self.options.head_dim
        shared = self.options.n_groups * self.options.state_size
        self.add_projections({"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads})
        self.add_short_convs({name: self.widths[name] for name in "xBC"}, bias=True)
        self.add_canons(self.widths)
        add_parameters(self, A_log=(log_of_uniform(1, 16), heads), D=(ones, heads), dt_bias=(bias_of_time_steps, heads))
        self.norm = RMSNorm(inner, config.rms_norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        o = config.options_of(cls)
        return ssd_flops(o.num_heads, o.n_groups, o.state_size, o.head_dim, seq_len)

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected = self.run(OF_MIXER, self.project(x_BTD), layout, cache)
        z, dt = projected.pop("z"), projected.pop("dt")
        x, B, C = self.run(SHORT_CONV, projected, layout, cache).values()
        x_BTHP = x.unflatten(-1, (-1, self.options.head_dim))
        B_BTGN, C_BTGN = (self.own(part.unflatten(-1, (self.options.n_groups, -1)), dim=2) for part in (B, C))
        dt_BTH = nn.functional.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
        A_H = -at_least_float32(self.A_log).exp()
        y_BTHP, state = layout.on_whole_rows(ssd)(
            x_BTHP,
            mask_out(dt_BTH, layout),
            A_H,
            B_BTGN,
            C_BTGN,
            state_BHPN=state,
            documents=layout.documents,
        )
        y = (y_BTHP + at_least_float32(self.D)[:, None] * x_BTHP).flatten(-2)
        y = self.norm(y * nn.functional.silu(at_least_float32(z)))
        return self.out_proj(y.to(x_BTD.dtype)), state


def ssd_flops(heads: int, groups: int, state_size: int, head_dim: int, steps: int) -> float:
    """FLOPs of one of these steps. Writing and reading the state; the scores of a chunk, which the heads of a group
    share, times its values."""
    chunk = min(CHUNK, steps)
    return 4 * heads * state_size * head_dim + 2 * chunk * (groups * state_size + heads * head_dim)
