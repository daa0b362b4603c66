"""Gated DeltaNet: before it writes a value under a key, it takes away what the state already answers to that key.

    S_t = exp(g_t) S_{t-1};   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,    o_t = (K^-1/2 q_t)^T S_t
    g_t = -exp(A_log) softplus(W_a x_t + dt_bias),    beta_t = sigmoid(W_b x_t),    |q_t| = |k_t| = 1

Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), Eq. 10. With a low-rank output gate and values twice as wide as
keys it is the GDN2 of Physics of Language Models, Part 4.2.
"""

import torch
from torch import Tensor, nn

from canonlm.models.cache import Layout
from canonlm.models.config import CanonLMConfig
from canonlm.models.initialize import inverse_softplus_of_log_uniform, log_of_uniform, start_with
from canonlm.models.mixers.recurrent import LinearAttention, at_least_float32, mask_out
from canonlm.ops.gated_delta_rule import gated_delta_rule


class GatedDeltaNet(LinearAttention):
    def __init__(self, config: CanonLMConfig, layer_idx: int) -> None:
        heads = config.linear_num_heads
        super().__init__(config, layer_idx, heads)
        self.a_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        start_with(self, A_log=log_of_uniform(0, 16), dt_bias=inverse_softplus_of_log_uniform(1e-3, 1e-1))

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        A_H, dt_bias_H = at_least_float32(self.A_log).exp(), at_least_float32(self.dt_bias)
        g_BTH = -A_H * nn.functional.softplus(at_least_float32(self.a_proj(x_BTD)) + dt_bias_H)
        beta_BTH = at_least_float32(self.b_proj(x_BTD)).sigmoid()
        return gated_delta_rule(
            _unit(q_BTHK),
            _unit(k_BTHK),
            v_BTHV,
            mask_out(g_BTH, layout),
            mask_out(beta_BTH, layout),
            state_BHKV=state,
            doc_ids_BT=layout.doc_ids,
        )


def _unit(x: Tensor) -> Tensor:
    """Divided by its norm; the constant keeps a vector of zeros at zero."""
    wide = at_least_float32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
