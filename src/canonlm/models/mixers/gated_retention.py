"""Gated retention: linear attention whose heads forget at one data-dependent rate each.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T,    o_t = (K^-1/2 q_t)^T S_t,    g_t = logsigmoid(w_h x_t) / 16

Sun et al. 2024 (arXiv 2405.05254), Section 3.2. Between retention, whose rates are fixed, and GLA, which has one per
key channel.
"""

from typing import ClassVar

from torch import Tensor, nn

from canonlm.models.cache import Layout
from canonlm.models.mixers.base import Architecture, register
from canonlm.models.mixers.gla import GATE_NORMALIZER, gla_flops
from canonlm.models.mixers.recurrent import LinearAttention, at_least_float32, mask_out
from canonlm.models.settings import Config
from canonlm.ops.gated_linear_attention import gated_linear_attention


@register("gated_retention")
class GatedRetention(LinearAttention):
    architectures: ClassVar = {
        "gated-retention": Architecture("retention whose decays depend on the data, one per head", short_conv=True)
    }
    tensor_parallel: ClassVar = {**LinearAttention.tensor_parallel, "decay_proj": "columns"}

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.decay_proj = nn.Linear(config.hidden_size, self.options.num_heads, bias=False)

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return gla_flops(config.options_of(cls), seq_len)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g_BTH = nn.functional.logsigmoid(at_least_float32(self.decay_proj(x_BTD))) / GATE_NORMALIZER
        g_BTHK = mask_out(g_BTH, layout)[..., None].expand_as(k_BTHK)
        k_BTHK = mask_out(k_BTHK, layout)
        return layout.on_whole_rows(gated_linear_attention)(
            q_BTHK, k_BTHK, v_BTHV, g_BTHK, state_BJKV=state, documents=layout.documents
        )
