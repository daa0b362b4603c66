"""Retention: linear attention whose heads forget at fixed rates, from a memory of 32 tokens to one of thousands.

    S_t = gamma_h S_{t-1} + k_t v_t^T,    o_t = (K^-1/2 q_t)^T S_t,    gamma_h = 1 - 2^(-5 - h),  h = 0, 1, …

Sun et al. 2023 (arXiv 2307.08621), Eq. 6 and 8; without the rotation of queries and keys, so that it differs from GLA
in its decay alone. docs/add-a-mixer.md shows how such a file is built.
"""

from typing import ClassVar

import torch
from torch import Tensor

from canonlm.models.cache import Layout
from canonlm.models.mixers.base import Architecture, register
from canonlm.models.mixers.mamba2 import ssd_flops
from canonlm.models.mixers.recurrent import LinearAttention, mask_out
from canonlm.models.settings import Config
from canonlm.ops.ssd import ssd


@register("retention")
class Retention(LinearAttention):
    architectures: ClassVar = {
        "retention": Architecture("linear attention with fixed decay, with short convolutions", short_conv=True)
    }
    tensor_parallel = LinearAttention.tensor_parallel

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        o = config.options_of(cls)
        return ssd_flops(o.num_heads, o.num_heads, o.key_head_dim, o.value_head_dim, seq_len)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(x_BTD.dtype, torch.float32)
        heads = self.own(torch.arange(self.options.num_heads, dtype=compute, device=x_BTD.device), dim=0)
        log_gamma_H = torch.log1p(-torch.exp2(-5 - heads))
        # One step in time for each token, none for padding, at which the state then does not change.
        steps_BTH = mask_out(torch.ones_like(q_BTHK[..., 0], dtype=compute), layout)
        q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
        return layout.on_whole_rows(ssd)(
            v_BTHV,
            steps_BTH,
            log_gamma_H,
            k_BTHK,
            q_BTHK,
            state_BHPN=state,
            documents=layout.documents,
        )
