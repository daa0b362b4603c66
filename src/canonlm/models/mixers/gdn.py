"""Gated DeltaNet: before it writes a value under a key, it subtracts the state's present value for that key.

    S_t = exp(g_t) S_{t-1};   S_t += k_t (beta_t (v_t - S_t^T k_t))^T,    o_t = (K^-1/2 q_t)^T S_t
    g_t = -exp(A_log) softplus(W_a x_t + dt_bias),    beta_t = sigmoid(W_b x_t),    |q_t| = |k_t| = 1

With `negative_eigenvalues`, beta_t = 2 sigmoid(W_b x_t): I - beta k k^T can then also reflect (arXiv 2411.12537).
Yang, Kautz and Hatamizadeh 2024 (arXiv 2412.06464), Eq. 10. With a low-rank output gate and values twice as wide as
keys it is the GDN2 of Physics of Language Models, Part 4.2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from canonlm.models.cache import Layout
from canonlm.models.initialize import add_parameters, bias_of_time_steps, log_of_uniform
from canonlm.models.mixers.base import CHUNK, Architecture, register
from canonlm.models.mixers.recurrent import HeadOptions, LinearAttention, at_least_float32, mask_out, unit
from canonlm.models.settings import Config
from canonlm.ops.gated_delta_rule import gated_delta_rule

CPU_CHUNK = 32
"""Tokens of a chunk on a CPU, where blocks are run to count what they keep."""


@dataclass
class DeltaOptions(HeadOptions):
    """Also `negative_eigenvalues`: strengths of corrections between 0 and 2 in place of 0 and 1."""

    negative_eigenvalues: bool = False


@register("gdn")
class GatedDeltaNet(LinearAttention):
    Options = DeltaOptions
    architectures: ClassVar = {
        "gdn2": Architecture("Gated DeltaNet of Part 4.2, with its short convolutions", short_conv=True),
        "gdn": Architecture(
            "Gated DeltaNet of Part 4.1: key and value heads of 96 and 192 channels, states of 144 d numbers (d > 127)",
            short_conv=True,
            settings=lambda hidden_size: {
                "num_heads": max(1, hidden_size // 128),
                "key_head_dim": 96,
                "value_head_dim": 192,
                "output_gate_rank": None,
            },
        ),
    }
    tensor_parallel: ClassVar = {
        **LinearAttention.tensor_parallel,
        **{"a_proj": "columns", "b_proj": "columns", "A_log": "channels", "dt_bias": "channels"},
    }

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        heads = self.options.num_heads
        self.a_proj: nn.Module = nn.Linear(config.hidden_size, heads, bias=False)
        self.b_proj = nn.Linear(config.hidden_size, self.num_key_value_heads, bias=False)
        add_parameters(self, A_log=(log_of_uniform(0, 16), heads), dt_bias=(bias_of_time_steps, heads))

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return delta_flops(config.options_of(cls), seq_len)

    @classmethod
    def extra_memory(cls, config: Config, seq_len: int) -> float:
        return larger_chunks(config.options_of(cls), seq_len)

    def decays(self, x_BTD: Tensor) -> Tensor:
        """Log-decays `[B, T, H]`."""
        A_H, dt_bias_H = at_least_float32(self.A_log).exp(), at_least_float32(self.dt_bias)
        return -A_H * nn.functional.softplus(at_least_float32(self.a_proj(x_BTD)) + dt_bias_H)

    def strengths(self, x_BTD: Tensor) -> Tensor:
        """beta, with the channels of `b_proj`."""
        beta = at_least_float32(self.b_proj(x_BTD)).sigmoid()
        return 2 * beta if self.options.negative_eigenvalues else beta

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return layout.on_whole_rows(gated_delta_rule)(
            unit(q_BTHK),
            unit(k_BTHK),
            v_BTHV,
            mask_out(self.decays(x_BTD), layout),
            mask_out(self.strengths(x_BTD), layout),
            state_BHKV=state,
            documents=layout.documents,
        )


def delta_flops(options: Any, steps: int, *, earlier_only: bool = False) -> float:
    """FLOPs of one of these steps. The state is read twice and written once; scores of queries and of keys; the
    triangular system solved for its inverse, and that times values and times keys; the scores times the errors.

    earlier_only: scores are computed for earlier keys only.
    """
    key_dim, value_dim, chunk = options.key_head_dim, options.value_head_dim, min(CHUNK, steps)
    scores = (2 * (chunk + 1) if earlier_only else 4 * chunk) * key_dim
    within = chunk + 2 * value_dim + 2 * key_dim + 2 * value_dim
    return options.num_heads * (6 * key_dim * value_dim + scores + chunk * within)


def larger_chunks(options: Any, seq_len: int) -> float:
    """Bytes beyond those of a CPU: the chunks of a GPU are larger, with larger triangles and fewer states."""
    fewer = seq_len // CPU_CHUNK - seq_len // CHUNK
    size = options.key_head_dim * options.value_head_dim
    return 4 * options.num_heads * (seq_len * (CHUNK - CPU_CHUNK) - fewer * size)
