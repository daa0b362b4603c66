"""Gated linear attention: a matrix state in which each key channel forgets at its own, data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,    o_t = (K^-1/2 q_t)^T S_t,    g_t = logsigmoid(W_g x_t) / 16

Yang et al. 2023 (arXiv 2312.06635), Eq. 3-5. With a low-rank output gate, keys as wide and values twice as wide as
the model it is the GLA5 of Physics of Language Models, Part 4.2.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from canonlm.core.errors import expected
from canonlm.models.cache import Layout
from canonlm.models.mixers.base import CHUNK, DERIVED, Architecture, register
from canonlm.models.mixers.recurrent import HeadOptions, LinearAttention, LowRank, at_least_float32, mask_out
from canonlm.models.settings import Config
from canonlm.ops.gated_linear_attention import gated_linear_attention

GATE_RANK = 16
GATE_NORMALIZER = 16  # divides the log-decay, so that a fresh model forgets slowly


@dataclass
class GLAOptions(HeadOptions):
    """Also `num_key_value_heads`, fewer for grouped keys, values and gates (default: `num_heads`), and `clamp_min`, the
    smallest log-decay (None: no bound)."""

    num_key_value_heads: int = DERIVED
    clamp_min: float | None = None

    def complete(self, config: Config) -> None:
        super().complete(config)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_heads
        self.check_divides("num_key_value_heads", "num_heads")
        if self.clamp_min is not None and self.clamp_min > 0:
            raise expected("clamp_min", "a number <= 0, or the state grows", self.clamp_min)


@register("gla")
class GatedLinearAttention(LinearAttention):
    Options = GLAOptions
    architectures: ClassVar = {
        "gla5": Architecture("gated linear attention of Part 4.2, with its short convolutions", short_conv=True),
        "gla": Architecture(
            "gated linear attention of Part 4.1: four heads, states of 64 d numbers at d = 512, MLP 8/3 d",
            short_conv=True,
            settings=lambda hidden_size: {
                "num_heads": 4,
                "key_head_dim": hidden_size // 8,
                "value_head_dim": hidden_size // 4,
                "output_gate_rank": None,
                "intermediate_size": 8 * hidden_size // 3,
            },
        ),
    }
    tensor_parallel: ClassVar = {**LinearAttention.tensor_parallel, "gk_proj": "columns"}
    tensor_parallel_divides = ("num_heads", "num_key_value_heads")

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.gk_proj = LowRank(config, config.hidden_size, GATE_RANK, self.widths["k"])

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        return gla_flops(config.options_of(cls), seq_len)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTJK: Tensor, v_BTJV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        g = nn.functional.logsigmoid(at_least_float32(self.gk_proj(x_BTD))) / GATE_NORMALIZER
        if self.options.clamp_min is not None:
            g = g.clamp(min=self.options.clamp_min)
        g_BTJK = mask_out(g.view_as(k_BTJK), layout)
        k_BTJK = mask_out(k_BTJK, layout)
        return layout.on_whole_rows(gated_linear_attention)(
            q_BTHK, k_BTJK, v_BTJV, g_BTJK, state_BJKV=state, documents=layout.documents
        )


def gla_flops(options: HeadOptions, steps: int) -> float:
    """FLOPs of one of these steps. Writing and reading the state; the scores of a chunk, computed for earlier keys
    only, times its values."""
    key_dim, value_dim, chunk = options.key_head_dim, options.value_head_dim, min(CHUNK, steps)
    return options.num_heads * (4 * key_dim * value_dim + (chunk + 1) * key_dim + 2 * chunk * value_dim)
