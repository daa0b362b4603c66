"""Derivatives that a hand-written backward does not give: forward mode, torch.func's transforms, second derivatives.

Autograd passes over an operator of ours in forward mode, and over the operators of its backward, as if they were
constants: the derivative would be zero, without an error. There its definition in plain PyTorch is used instead.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


@torch.compiler.assume_constant_result  # compiled code is guarded by both
def by_definition() -> bool:
    """Whether forward mode or a transform of torch.func (jvp, grad, vmap, …) is active."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def differentiated_again() -> bool:
    """In a backward: whether its results are differentiated, too (`create_graph=True`, forward mode)."""
    return torch.is_grad_enabled() or by_definition()


def gradients(
    definition: Callable[..., Any], inputs: Sequence[Any], doutputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """The gradients of `definition(*inputs)`, by autograd; None for inputs that need none.

    doutputs: the gradients of its output or outputs, None for zeros.
    """
    needed = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    with torch.enable_grad(), torch.autocast(needed[0].device.type, enabled=False):
        outputs = definition(*inputs)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    pairs = [(y, dy) for y, dy in zip(outputs, doutputs, strict=True) if dy is not None and y.requires_grad]
    options: Any = {"create_graph": torch.is_grad_enabled(), "allow_unused": True}
    results = iter(torch.autograd.grad([y for y, _ in pairs], needed, [dy for _, dy in pairs], **options))
    return tuple(next(results) if isinstance(x, Tensor) and x.requires_grad else None for x in inputs)


def first_only(*gradients: Tensor | None) -> tuple[Tensor | None, ...]:
    """In a backward: its results, of which a derivative raises an error. torch's `once_differentiable` overlooks that
    they depend on the inputs, and gives zeros, where the gradients of the outputs need no gradient."""
    return _FirstOnly.apply(torch.zeros((), requires_grad=True), *gradients) if torch.is_grad_enabled() else gradients


class _FirstOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, _: Tensor, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in gradients)

    @staticmethod
    def backward(ctx, *_: Tensor):
        raise NotImplementedError(
            "gradients of kernels and of a sharded loss cannot be differentiated: use torch.func (jvp of grad) instead"
        )
