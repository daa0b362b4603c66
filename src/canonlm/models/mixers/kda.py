"""Kimi Delta Attention: Gated DeltaNet in which each key channel forgets at its own, data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1};   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,    o_t = (K^-1/2 q_t)^T S_t
    g_t = -exp(A_log) softplus(W_2 W_1 x_t + dt_bias),    beta_t = sigmoid(W_b x_t),    |q_t| = |k_t| = 1

Kimi Team 2025 (arXiv 2510.26692), Eq. 1 and 10. W_2 W_1 and the output gate, a sigmoid, have the rank of a head; keys
are as wide as values.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from canonlm.models.initialize import add_parameters, bias_of_time_steps, log_of_uniform, start_with
from canonlm.models.mixers.base import DERIVED, Architecture, register
from canonlm.models.mixers.gdn import DeltaOptions, GatedDeltaNet, delta_flops
from canonlm.models.mixers.recurrent import LowRank, at_least_float32
from canonlm.models.settings import Config


@dataclass
class KDAOptions(DeltaOptions):
    """Also `decay_rank`: of the projection to the decays. Defaults: `value_head_dim` is hidden_size / num_heads, both
    ranks are `value_head_dim`."""

    output_gate_rank: int | None = DERIVED
    decay_rank: int = DERIVED

    def complete(self, config: Config) -> None:
        self.derive_heads(config, key_head_dim=1, value_head_dim=1)
        self.derive(output_gate_rank=self.value_head_dim, decay_rank=self.value_head_dim)


@register("kda")
class KimiDeltaAttention(GatedDeltaNet):
    Options = KDAOptions
    architectures: ClassVar = {
        "kda": Architecture(
            "Kimi Delta Attention: Gated DeltaNet with a decay per key channel (arXiv 2510.26692)", short_conv=True
        )
    }
    tensor_parallel = GatedDeltaNet.tensor_parallel

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        hidden, options = config.hidden_size, self.options
        self.a_proj = LowRank(config, hidden, options.decay_rank, self.widths["q"], bias=False)
        if self.g_proj is not None:
            self.g_proj = LowRank(config, hidden, options.output_gate_rank, self.widths["v"], bias=False)
        add_parameters(self, dt_bias=(bias_of_time_steps, self.widths["q"]))
        start_with(self, A_log=log_of_uniform(1, 16))

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return delta_flops(config.options_of(cls), seq_len, earlier_only=True)

    def activate(self, gate: Tensor) -> Tensor:
        return gate.sigmoid()

    def decays(self, x_BTD: Tensor) -> Tensor:
        """Log-decays `[B, T, H, K]`."""
        A_H1 = at_least_float32(self.A_log).exp()[:, None]
        steps = nn.functional.softplus(at_least_float32(self.a_proj(x_BTD)) + at_least_float32(self.dt_bias))
        return -A_H1 * steps.unflatten(-1, (-1, self.options.key_head_dim))
