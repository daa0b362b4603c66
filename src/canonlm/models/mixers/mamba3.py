"""Mamba-3: a state-space layer with a second-order rule in time, states that rotate, and no convolution.

    S_t = exp(g_t) (S_{t-1} + (1 - l_t) dt_t x_{t-1} B_{t-1}^T) + l_t dt_t x_t B_t^T,    y_t = S_t C_t + D x_t
    dt_t = softplus(W_dt u_t + b_dt),    g_t = -dt_t max(softplus(W_A u_t), 1e-4),    l_t = sigmoid(W_trap u_t)
    B_t = R(phi_t) (RMSNorm(W_B u_t) + b_B),    C_t = R(phi_t) (RMSNorm(W_C u_t) + b_C)
    phi_t = phi_{t-1} + pi dt_t tanh(W_angle u_t),    out = W_out (y * silu(W_z u_t)),    x_t = W_x u_t

Lahoti et al. 2026 (arXiv 2603.15569), for an input u. R(phi) turns pairs of channels: a complex state, in the frame
that turns with it. b_dt, b_B, b_C, D, dt, g and l are per head, as is phi, whose rates the heads share. With
`mimo_rank` > 1 a token has as many B and C; each has x, z and its part of the output scaled by weights of its own.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from canonlm.canon.layer import on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.core.errors import expected
from canonlm.models.cache import Layout
from canonlm.models.initialize import add_parameters, bias_of_time_steps, constant, ones
from canonlm.models.mixers.base import DERIVED, Architecture, register
from canonlm.models.mixers.mamba2 import Mamba2Options, ssd_flops
from canonlm.models.mixers.recurrent import RecurrentMixer, at_least_float32, mask_out
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import rotate, running_angles
from canonlm.models.settings import Config
from canonlm.ops.context_parallel import own
from canonlm.ops.trapezoidal_ssd import pack, trapezoidal_ssd, unpack


@dataclass
class Mamba3Options(Mamba2Options):
    """Those of Mamba2; `num_angles`: pairs of channels of B and C that rotate (default: state_size / 4, half of the
    channels; 0: a real state); `mimo_rank`: inputs and outputs of the state per token."""

    num_angles: int = DERIVED
    mimo_rank: int = 1

    def complete(self, config: Config) -> None:
        super().complete(config)
        self.check_positive("mimo_rank")
        self.num_angles = self.state_size // 4 if self.num_angles is None else self.num_angles
        largest = self.state_size / 2
        if not 0 <= self.num_angles <= largest:
            raise expected("num_angles", f"an integer from 0 to state_size / 2 = {largest:g}", self.num_angles)


@register("mamba3")
class Mamba3(RecurrentMixer):
    Options = Mamba3Options
    has_qkv = False
    architectures: ClassVar = {
        "mamba3": Architecture("Mamba-3: trapezoidal rule, rotating states, no short convolution (arXiv 2603.15569)")
    }
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("z_proj", "x_proj", "dt_proj", "A_proj", "trap_proj"), "columns"),
        **dict.fromkeys((f"{name}_{part}" for name in "BC" for part in ("proj", "conv1d", "norm")), "complete"),
        **dict.fromkeys(("canonB_B", "canonB_C", "canonB_angle", "angle_proj"), "complete"),
        **dict.fromkeys(("dt_bias", "D"), "channels"),
        **dict.fromkeys(("B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_out"), "heads"),
        "out_proj": "rows",
    }
    tensor_parallel_divides = ("num_heads", "n_groups")

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        o = self.options
        heads, inner, rank = o.num_heads, o.num_heads * o.head_dim, o.mimo_rank
        shared = rank * o.n_groups * o.state_size
        widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads, "A": heads, "trap": heads}
        self.add_projections(widths | ({"angle": o.num_angles} if o.num_angles else {}))
        self.add_short_convs({name: self.widths[name] for name in "xBC"}, bias=True)
        self.add_canons(self.widths)
        self.B_norm, self.C_norm = (RMSNorm(o.state_size, config.rms_norm_eps) for _ in range(2))
        bias, of_heads = (ones, rank, heads, o.state_size), (rank, heads, o.head_dim)
        add_parameters(self, B_bias=bias, C_bias=bias, dt_bias=(bias_of_time_steps, heads), D=(ones, heads))
        if rank > 1:
            mean = (constant(1 / rank), *of_heads)
            add_parameters(self, mimo_x=mean, mimo_z=(ones, *of_heads), mimo_out=mean)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        """Each input of a token is a step of the SSD; besides, queries meet inputs that the SSD gives them too late."""
        o = config.options_of(cls)
        late = o.mimo_rank**2 + o.mimo_rank * (o.mimo_rank - 1) / 2
        step = ssd_flops(o.num_heads, o.num_heads, o.state_size, o.head_dim, o.mimo_rank * seq_len)
        return o.mimo_rank * step + late * 2 * o.num_heads * (o.state_size + o.head_dim)

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected = self.run(OF_MIXER, self.project(x_BTD), layout, cache)
        projected |= self.run(SHORT_CONV, {name: projected[name] for name in "xBC"}, layout, cache)
        z, x = (projected[name].unflatten(-1, (1, -1, self.options.head_dim)) for name in "zx")
        if self.options.mimo_rank > 1:
            z, x = z * on_this_device(self.mimo_z), (x * on_this_device(self.mimo_x)).to(x.dtype)
        dt, rate, share = (at_least_float32(projected[name]) for name in ("dt", "A", "trap"))
        dt, share = mask_out(softplus(dt + at_least_float32(self.dt_bias)), layout), share.sigmoid()
        sizes = self.options.head_dim, self.options.state_size, self.options.mimo_rank
        past, before = (None, None) if state is None else unpack(state, *sizes)
        angle = self.angles(projected.get("angle"), dt, before, layout)
        B, C = (self.vectors(name, projected[name], angle[:, :, None]) for name in "BC")
        g, ssd = -dt * softplus(rate).clamp(min=1e-4), layout.on_whole_rows(trapezoidal_ssd)
        real = None if layout.attention_mask is None else layout.attention_mask != 0
        y, past = ssd(x, B, C, g, (1 - share) * dt, share * dt, state=past, real_BT=real, documents=layout.documents)
        y = (y + at_least_float32(self.D)[:, None] * x) * silu(at_least_float32(z))
        y = (y * on_this_device(self.mimo_out)).sum(2) if self.options.mimo_rank > 1 else y[:, :, 0]
        last = angle[:, -1] if angle.shape[1] else angle.sum(1) if before is None else before  # rows may be empty
        state = pack(past, own(last, layout.span, dim=1))
        return self.out_proj(y.flatten(-2).to(x_BTD.dtype)), state

    def angles(self, rates_BTS: Tensor | None, dt_BTH: Tensor, before: Tensor | None, layout: Layout) -> Tensor:
        """`[B, T, H, S]`. Documents need no start from zero, as only differences of angles matter."""
        if rates_BTS is None:
            return dt_BTH.new_zeros(*dt_BTH.shape, 0)
        turns = math.pi * dt_BTH[..., None] * at_least_float32(self.shared(rates_BTS)).tanh()[:, :, None]
        return running_angles(turns, before, layout.span)

    def vectors(self, name: str, projected: Tensor, angle_BT1HS: Tensor) -> Tensor:
        """B or C, `[B, T, R, H, N]`: normalised, with biases, rotated."""
        o, norm, bias = self.options, self.get_submodule(f"{name}_norm"), getattr(self, f"{name}_bias")
        normed, bias = self.own(norm(projected.unflatten(-1, (o.mimo_rank, o.n_groups, -1))), 3), on_this_device(bias)
        by_head = normed.repeat_interleave(bias.shape[1] // normed.shape[3], dim=3) + bias
        return rotate(by_head, angle_BT1HS.cos(), angle_BT1HS.sin(), by_head.shape[2]).to(projected.dtype)
