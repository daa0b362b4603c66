"""Gated linear attention: a matrix state in which each key channel forgets at its own, data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,    o_t = (K^-1/2 q_t)^T S_t,    g_t = logsigmoid(W_g x_t) / 16

Yang et al. 2023 (arXiv 2312.06635), Eq. 3-5. With a low-rank output gate, keys as wide and values twice as wide as
the model it is the GLA5 of Physics of Language Models, Part 4.2.
"""

from torch import Tensor, nn

from canonlm.models.cache import Layout
from canonlm.models.config import CanonLMConfig
from canonlm.models.mixers.recurrent import LinearAttention, LowRank, at_least_float32, mask_out
from canonlm.ops.gated_linear_attention import gated_linear_attention

GATE_RANK = 16
GATE_NORMALIZER = 16  # divides the log-decay, so that a fresh model forgets slowly


class GatedLinearAttention(LinearAttention):
    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx, config.linear_num_key_value_heads)
        self.gk_proj = LowRank(config, config.hidden_size, GATE_RANK, self.widths["k"])

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTJK: Tensor, v_BTJV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g = nn.functional.logsigmoid(at_least_float32(self.gk_proj(x_BTD))) / GATE_NORMALIZER
        if self.config.clamp_min is not None:
            g = g.clamp(min=self.config.clamp_min)
        g_BTJK = mask_out(g.view_as(k_BTJK), layout)
        k_BTJK = mask_out(k_BTJK, layout)
        return gated_linear_attention(q_BTHK, k_BTJK, v_BTJV, g_BTJK, state_BJKV=state, doc_ids_BT=layout.doc_ids)
