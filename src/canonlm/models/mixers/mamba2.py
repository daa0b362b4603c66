"""Mamba2: a state-space layer whose state forgets at one data-dependent rate per head, in its dual, matrix form.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t,    out = W_out RMSNorm(y * silu(z))

Dao and Gu 2024 (arXiv 2405.21060), Sections 6-7. z, x, B, C and dt are projections of the input; x, B and C pass
through the short convolution (site b), which has a bias here. Canon-B is on all five, before it.
"""

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.models.cache import Layout
from canonlm.models.config import CanonLMConfig
from canonlm.models.initialize import inverse_softplus_of_log_uniform, log_of_uniform, ones, start_with
from canonlm.models.mixers.recurrent import RecurrentMixer, at_least_float32, mask_out
from canonlm.models.norm import RMSNorm
from canonlm.ops.ssd import ssd


class Mamba2(RecurrentMixer):
    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads, inner = config.linear_num_heads, config.linear_num_heads * config.linear_value_head_dim
        shared = config.mamba_n_groups * config.mamba_state_size
        self.widths = {"z": inner, "x": inner, "B": shared, "C": shared, "dt": heads}
        for name, width in self.widths.items():
            self.add_module(f"{name}_proj", nn.Linear(config.hidden_size, width, bias=False))
        self.add_short_convs({name: self.widths[name] for name in "xBC"}, bias=True)
        self.add_canons(self.widths)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        start_with(self, A_log=log_of_uniform(1, 16), D=ones, dt_bias=inverse_softplus_of_log_uniform(1e-3, 1e-1))
        self.norm = RMSNorm(inner, config.rms_norm_eps)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected = {name: self.get_submodule(f"{name}_proj")(x_BTD) for name in self.widths}
        projected = self.run("B", projected, layout, cache)
        z, dt = projected.pop("z"), projected.pop("dt")
        x, B, C = self.run("b", projected, layout, cache).values()
        x_BTHP = x.unflatten(-1, (self.config.linear_num_heads, -1))
        B_BTGN, C_BTGN = (part.unflatten(-1, (self.config.mamba_n_groups, -1)) for part in (B, C))
        dt_BTH = nn.functional.softplus(at_least_float32(dt) + at_least_float32(self.dt_bias))
        A_H = -at_least_float32(self.A_log).exp()
        y_BTHP, state = ssd(
            x_BTHP, mask_out(dt_BTH, layout), A_H, B_BTGN, C_BTGN, state_BHPN=state, doc_ids_BT=layout.doc_ids
        )
        y = (y_BTHP + at_least_float32(self.D)[:, None] * x_BTHP).flatten(-2)
        y = self.norm(y * nn.functional.silu(at_least_float32(z)))
        return self.out_proj(y.to(x_BTD.dtype)), state
