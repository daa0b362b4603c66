"""Linear attention whose heads forget at learned rates."""

import torch

from canonlm.models.initialize import add_parameters, log_of_uniform
from canonlm.models.mixers.recurrent import LinearAttention, mask_out
from canonlm.ops.ssd import ssd


class Fading(LinearAttention):
    """S_t = exp(-rate_h) S_{t-1} + k_t v_t^T,    o_t = (K^-1/2 q_t)^T S_t,    one learned rate per head"""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)  # projections to q, k and v, the output's norm and gate
        add_parameters(self, log_rate=(log_of_uniform(1e-3, 1e-1), self.options.num_heads))

    def recur(self, x_BTD, q_BTHK, k_BTHK, v_BTHV, layout, state):
        """What happens between the projections: the output [B, T, H, V], and the state after the last token."""
        steps_BTH = mask_out(torch.ones_like(q_BTHK[..., 0]), layout)  # padding takes no step
        q_BTHK = q_BTHK * q_BTHK.shape[-1] ** -0.5
        rates_H = -self.log_rate.exp()
        return ssd(v_BTHV, steps_BTH, rates_H, k_BTHK, q_BTHK, state_BHPN=state, documents=layout.documents)
