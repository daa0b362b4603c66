"""Gated DeltaProduct: Gated DeltaNet with several corrections of the state per token.

    S_t = exp(g_t) S_{t-1};   S_t += k_ti (beta_ti (v_ti - S_t^T k_ti))^T  for i = 1 … n,    o_t = (K^-1/2 q_t)^T S_t
    beta_ti = 2 sigmoid(W_i x_t),    |q_t| = |k_ti| = 1

Siems et al. 2025 (arXiv 2502.10297), Eq. 5. Each I - beta k k^T is a generalised Householder matrix; a product of two
reflections is a rotation, so states can follow groups such as S_3. g_t is that of Gated DeltaNet.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from canonlm.models.cache import Layout
from canonlm.models.mixers.base import Architecture, register
from canonlm.models.mixers.gdn import DeltaOptions, GatedDeltaNet
from canonlm.models.mixers.recurrent import mask_out, unit
from canonlm.models.settings import Config
from canonlm.ops.context_parallel import AllToAll
from canonlm.ops.gated_delta_rule import gated_delta_rule


@dataclass
class DeltaProductOptions(DeltaOptions):
    """Also `steps`: corrections per token."""

    negative_eigenvalues: bool = True
    steps: int = 2

    def complete(self, config: Config) -> None:
        super().complete(config)
        self.check_positive("steps")

    @property
    def num_key_value_heads(self) -> int:
        """Keys and values of all steps."""
        return self.steps * self.num_heads


@register("deltaproduct")
class GatedDeltaProduct(GatedDeltaNet):
    Options = DeltaProductOptions
    architectures: ClassVar = {
        "deltaproduct2": Architecture(
            "Gated DeltaProduct: two corrections of the state per token, eigenvalues in (-1, 1) (arXiv 2502.10297)",
            short_conv=True,
        )
    }
    tensor_parallel: ClassVar = GatedDeltaNet.tensor_parallel  # `by_step` brings the steps of a head together

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        steps = config.options_of(cls).steps
        return steps * super().flops(config, steps * seq_len)

    @classmethod
    def extra_memory(cls, config: Config, seq_len: int) -> float:
        return super().extra_memory(config, config.options_of(cls).steps * seq_len)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTJK: Tensor, v_BTJV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        beta_BTJ = mask_out(self.strengths(x_BTD), layout)
        k_BSHK, v_BSHV, beta_BSH = (self.by_step(x) for x in (unit(k_BTJK), v_BTJV, beta_BTJ))
        return layout.on_whole_rows(gated_delta_rule)(
            unit(q_BTHK),
            k_BSHK,
            v_BSHV,
            mask_out(self.decays(x_BTD), layout),
            beta_BSH,
            steps=self.options.steps,
            state_BHKV=state,
            documents=layout.documents,
        )

    def by_step(self, x_BTJ: Tensor) -> Tensor:
        """From `[B, T, steps x heads, …]` to `[B, T x steps, heads, …]`.

        In a tensor-parallel group, a device comes with neighbours among all steps x heads, and leaves with its heads of
        every step. Of steps x size equal parts, it comes with `steps` in order; part i leaves with device i % size.
        """
        steps = self.options.steps
        parts = x_BTJ.unflatten(2, (steps, -1))
        if self.group is not None:
            rank, size = self.group.rank(), self.group.size()
            to = [(rank * steps + i) % size for i in range(steps)]
            sent = [to.count(other) for other in range(size)]
            received = [sum((other * steps + i) % size == rank for i in range(steps)) for other in range(size)]
            by_receiver = parts.movedim(2, 0)[sorted(range(steps), key=to.__getitem__)]
            parts = AllToAll.apply(by_receiver, self.group.group_name, sent, received).movedim(0, 2)
        return parts.flatten(1, 2)
