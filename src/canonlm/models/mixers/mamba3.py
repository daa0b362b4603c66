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

import torch
from torch import Tensor, nn
from torch.nn.functional import silu, softplus
from transformers import Cache

from canonlm.canon.layer import on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.core.errors import expected
from canonlm.models.cache import Layout
from canonlm.models.initialize import constant, inverse_softplus_of_log_uniform, ones, start_with
from canonlm.models.mixers.base import CHUNK, DERIVED, Architecture, register
from canonlm.models.mixers.mamba2 import Mamba2Options, ssd_flops
from canonlm.models.mixers.recurrent import RecurrentMixer, at_least_float32, mask_out
from canonlm.models.norm import RMSNorm
from canonlm.models.positions import rotate
from canonlm.models.settings import Config
from canonlm.ops.context_parallel import Span, own
from canonlm.ops.trapezoidal_ssd import State, trapezoidal_ssd

MIN_RATE = 1e-4
"""No head forgets more slowly than exp(-1e-4 dt)."""


@dataclass
class Mamba3Options(Mamba2Options):
    """Those of Mamba2; `num_angles`: pairs of channels of B and C that rotate (default: state_size / 4, half of the
    channels; 0: a real state); `mimo_rank`: inputs and outputs of the state per token."""

    num_angles: int = DERIVED
    mimo_rank: int = 1

    def complete(self, config: Config) -> None:
        super().complete(config)
        self.check_positive("mimo_rank")
        if self.num_angles is None:
            self.num_angles = self.state_size // 4
        if not isinstance(self.num_angles, int) or not 0 <= 2 * self.num_angles <= self.state_size:
            raise expected(
                "num_angles", f"an integer from 0 to state_size / 2 = {self.state_size / 2:g}", self.num_angles
            )


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
        self.widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads, "A": heads, "trap": heads}
        self.widths |= {"angle": o.num_angles} if o.num_angles else {}
        for name, width in self.widths.items():
            self.add_module(f"{name}_proj", nn.Linear(config.hidden_size, width, bias=False))
        self.add_short_convs({name: self.widths[name] for name in "xBC"}, bias=True)
        self.add_canons(self.widths)
        self.B_norm, self.C_norm = (RMSNorm(o.state_size, config.rms_norm_eps) for _ in range(2))
        self.B_bias, self.C_bias = (nn.Parameter(torch.empty(rank, heads, o.state_size)) for _ in range(2))
        self.dt_bias, self.D = (nn.Parameter(torch.empty(heads)) for _ in range(2))
        fills = {"dt_bias": inverse_softplus_of_log_uniform(1e-3, 1e-1), "D": ones, "B_bias": ones, "C_bias": ones}
        if rank > 1:
            starts = {"mimo_x": constant(1 / rank), "mimo_z": ones, "mimo_out": constant(1 / rank)}
            for name in starts:
                self.register_parameter(name, nn.Parameter(torch.empty(rank, heads, o.head_dim)))
            fills |= starts
        start_with(self, **fills)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        """Each input of a token is a step of the SSD; besides, queries meet inputs that the SSD gives them too late."""
        o = config.options_of(cls)
        late = o.mimo_rank**2 + o.mimo_rank * (o.mimo_rank - 1) / 2
        chunk = min(CHUNK, o.mimo_rank * seq_len)
        steps = o.mimo_rank * ssd_flops(o.num_heads, o.num_heads, o.state_size, o.head_dim, chunk)
        return steps + late * 2 * o.num_heads * (o.state_size + o.head_dim)

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected = {name: self.get_submodule(f"{name}_proj")(x_BTD) for name in self.widths}
        projected = self.run(OF_MIXER, projected, layout, cache)
        projected |= self.run(SHORT_CONV, {name: projected[name] for name in "xBC"}, layout, cache)
        z, x = (projected[name].unflatten(-1, (1, -1, self.options.head_dim)) for name in "zx")
        if self.options.mimo_rank > 1:
            z, x = z * self.of_heads("mimo_z"), (x * self.of_heads("mimo_x")).to(x.dtype)
        dt, rate, share = (at_least_float32(projected[name]) for name in ("dt", "A", "trap"))
        dt = mask_out(softplus(dt + at_least_float32(self.dt_bias)), layout)
        share = share.sigmoid()
        past, angle = (None, 0.0) if state is None else self.unpacked(state)
        angle_BTHS = self.angles(projected.get("angle"), dt, angle, layout.span)
        B, C = (self.vectors(name, projected[name], angle_BTHS) for name in "BC")
        y_BTRHP, past = layout.on_whole_rows(trapezoidal_ssd)(
            x,
            B,
            C,
            -dt * softplus(rate).clamp(min=MIN_RATE),
            (1 - share) * dt,
            share * dt,
            state=past,
            real_BT=None if layout.attention_mask is None else layout.attention_mask != 0,
            documents=layout.documents,
        )
        y = (y_BTRHP + at_least_float32(self.D)[:, None] * x) * silu(at_least_float32(z))
        y = (y * self.of_heads("mimo_out")).sum(2) if self.options.mimo_rank > 1 else y[:, :, 0]
        angle = own(angle_BTHS[:, -1], layout.span, dim=1)
        return self.out_proj(y.flatten(-2).to(x_BTD.dtype)), torch.cat(
            [part.flatten(2) for part in (past[0], *(x.transpose(1, 2) for x in past[1:]), angle)], dim=-1
        )

    def angles(
        self, rates_BTS: Tensor | None, dt_BTH: Tensor, before: Tensor | float, span: Span | None = None
    ) -> Tensor:
        """`[B, T, H, S]`, summed in float64: a long sum in float32 has no digits left for the angle. Documents need no
        start from zero, as only differences of angles matter."""
        if rates_BTS is None:
            return dt_BTH.new_zeros(*dt_BTH.shape, 0)
        turns = math.pi * dt_BTH[..., None] * at_least_float32(self.shared(rates_BTS)).tanh()[:, :, None]
        if span is not None:
            before = span.sum_before(turns.double().sum(1, keepdim=True))
        return ((turns.double().cumsum(1) + before) % math.tau).to(turns.dtype)

    def vectors(self, name: str, projected: Tensor, angle_BTHS: Tensor) -> Tensor:
        """B or C, `[B, T, R, H, N]`: normalised, with biases, rotated."""
        o, norm = self.options, self.get_submodule(f"{name}_norm")
        normed = self.own(norm(projected.unflatten(-1, (o.mimo_rank, o.n_groups, -1))), dim=3)
        bias = self.of_heads(f"{name}_bias")
        by_head = normed.repeat_interleave(bias.shape[1] // normed.shape[3], dim=3) + bias
        angle = angle_BTHS[:, :, None]
        return rotate(by_head, angle.cos(), angle.sin(), by_head.shape[2]).to(projected.dtype)

    def of_heads(self, name: str) -> Tensor:
        """A parameter, of this device's heads."""
        return on_this_device(self.get_parameter(name))

    def unpacked(self, state: Tensor) -> tuple[State, Tensor]:
        """The state after a token, and its angles; in the cache all of a head is one row of numbers."""
        o = self.options
        sizes = [o.head_dim * o.state_size, o.mimo_rank * o.state_size, o.mimo_rank * o.head_dim, o.num_angles]
        S, B, x, angle = state.split(sizes, dim=-1)
        last = (part.unflatten(-1, (o.mimo_rank, -1)).transpose(1, 2) for part in (B, x))
        return (S.unflatten(-1, (o.head_dim, -1)), *last), angle[:, None]
