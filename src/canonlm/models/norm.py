"""Root-mean-square normalisation."""

import torch
from torch import Tensor, nn

from canonlm.canon.layer import on_this_device


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in at least float32, cast once at the end."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.of_weight(x, on_this_device(self.weight))

    def of_weight(self, x: Tensor, weight: Tensor) -> Tensor:
        """The same with another weight, in at least float32."""
        compute = torch.promote_types(x.dtype, torch.float32)
        return nn.functional.rms_norm(x.to(compute), weight.shape, weight.to(compute), self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
