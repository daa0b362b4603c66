"""Attention residuals: a mixer or MLP reads a mean of all outputs before it, weighed by a softmax, not their sum.

    h = sum_i a_i v_i,    a = softmax_i( w . v_i / rms(v_i) )

Kimi Team 2026 (arXiv 2603.15031), the full form. v_0 is the embedding's output, v_i that of the i-th mixer or MLP; w is
a learned query of each reader, and of the final norm. It starts at zero, where h is the plain mean of the outputs. What
reads h begins with a norm, so that such a model computes what one with sums does (up to eps in the norms).

The norm of keys v_i / rms(v_i) has no weights: those of the paper's multiply w. So a key is a number per output, made
once, and a reader keeps no copy of the outputs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from canonlm.models.initialize import start_with, zeros


class Output(NamedTuple):
    """The output of a mixer, an MLP or the embedding: v `[B, T, D]`, and 1 / rms(v) `[B, T, 1]` in at least float32."""

    v: Tensor
    scale: Tensor


def output_of(v_BTD: Tensor, eps: float) -> Output:
    compute = torch.promote_types(v_BTD.dtype, torch.float32)
    norm = torch.linalg.vector_norm(v_BTD, dim=-1, keepdim=True, dtype=compute)
    return Output(v_BTD, (norm.square() / v_BTD.shape[-1] + eps).rsqrt())


class AttentionResidual(nn.Module):
    """The mean h of all outputs before a reader, `[B, T, D]` in the dtype of the embedding's."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.empty(hidden_size))
        start_with(self, query=zeros)

    def forward(self, outputs: Sequence[Output]) -> Tensor:
        scores = [(v * self.query).sum(-1, keepdim=True) * scale for v, scale in outputs]
        weights = torch.stack(scores).softmax(0)
        mean = weights[0] * outputs[0].v
        for weight, output in zip(weights[1:], outputs[1:], strict=True):
            mean = mean + weight * output.v
        return mean.to(outputs[0].v.dtype)
