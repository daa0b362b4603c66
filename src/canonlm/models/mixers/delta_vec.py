"""The delta rule with vectors for what is erased and what is written: Gated DeltaNet-2.

    S_t = (I - k_t (b_t * k_t)^T) diag(exp(g_t)) S_{t-1} + k_t (w_t * v_t)^T,    o_t = (K^-1/2 q_t)^T S_t
    b_t = sigmoid(W_b x_t) in (0, 1)^K,    w_t = sigmoid(W_w x_t) in (0, 1)^V

g_t, q_t, k_t and the output are those of Kimi Delta Attention, which has one beta_t in place of b_t and w_t. NVIDIA
2026 (github.com/NVlabs/GatedDeltaNet-2). flash-linear-attention calls it gdn2; here that is the release's GDN2.
"""

from typing import ClassVar

from torch import Tensor, nn

from canonlm.models.cache import Layout
from canonlm.models.mixers.base import Architecture, register
from canonlm.models.mixers.kda import KimiDeltaAttention
from canonlm.models.mixers.recurrent import at_least_float32, mask_out, unit
from canonlm.models.settings import Config
from canonlm.ops.gated_delta_rule import gated_delta_rule


@register("delta_vec")
class VectorDelta(KimiDeltaAttention):
    architectures: ClassVar = {
        "delta-vec": Architecture(
            "Gated DeltaNet-2: Kimi Delta Attention that erases and writes by channel (gdn2 in flash-linear-attention)",
            short_conv=True,
        )
    }
    tensor_parallel: ClassVar = {**KimiDeltaAttention.tensor_parallel, "w_proj": "columns"}

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.b_proj = nn.Linear(config.hidden_size, self.widths["k"], bias=False)
        self.w_proj = nn.Linear(config.hidden_size, self.widths["v"], bias=False)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g_BTHK, k_BTHK = self.decays(x_BTD), unit(k_BTHK)
        b_BTHK = self.strengths(x_BTD).view_as(k_BTHK)
        w_BTHV = at_least_float32(self.w_proj(x_BTD)).sigmoid().view_as(v_BTHV)
        return layout.on_whole_rows(gated_delta_rule)(
            unit(q_BTHK),
            k_BTHK,
            (w_BTHV * v_BTHV).to(v_BTHV.dtype),
            mask_out(g_BTHK, layout),
            mask_out(g_BTHK.new_ones(g_BTHK.shape[:3]), layout),
            b_BTHK * k_BTHK,
            state_BHKV=state,
            documents=layout.documents,
        )
