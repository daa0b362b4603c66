"""flash-linear-attention's Triton kernels, for recurrences whose tensors are on a GPU.

The package `fla` is optional and never imported for CPU tensors. A kernel takes `[B, T, H, D]` inputs and an initial
state `[N, H, K, V]` in float32, one for each of N sequences: the rows of a batch, or, for packed documents, the
segments of one long row between `cu_seqlens`.
"""

import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor

from canonlm.ops.compiled import cached_constant
from canonlm.ops.derivatives import first_only
from canonlm.ops.varlen import Documents


def takes(x_BTHD: Tensor) -> bool:
    """Whether a kernel can be used on `x_BTHD`: on a GPU, in half precision.

    Not in float32, which some of the kernels refuse and others multiply in TF32. Nor in a deterministic run, as the
    fastest of several launches is taken, by a measurement.
    """
    half = x_BTHD.dtype in (torch.bfloat16, torch.float16) and not torch.are_deterministic_algorithms_enabled()
    return x_BTHD.is_cuda and half and x_BTHD.numel() > 0 and installed()


@cached_constant
def installed() -> bool:
    """Whether the package can be imported; warns once if it cannot."""
    try:
        importlib.import_module("fla.ops")
    except ImportError as error:
        warnings.warn(
            f"flash-linear-attention cannot be imported ({error}), so linear layers on this GPU run in their PyTorch "
            "form, which is slower. To use its kernels: pip install 'canonlm[gpu]'",
            stacklevel=2,
        )
        return False
    return True


@torch.compiler.disable  # as the kernels themselves are
def run(
    family: str,
    name: str,
    inputs: dict[str, Tensor],
    state_BHKV: Tensor | None,
    documents: Documents | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`fla.ops.{family}.{name}` on inputs `[B, T, …]`, from `state_BHKV` on. Returns (o_BTHV, the state after it).

    `documents` are counted once for all layers: the package computes its grids once per tensor.
    """
    kernel = getattr(importlib.import_module(f"fla.ops.{family}"), name)
    # exp(-100) is zero in half precision; kernels subtract sums of log-decays, and infinite ones would give NaN.
    inputs = inputs | {"g": inputs["g"].clamp(min=-100)}
    if torch.is_grad_enabled():
        inputs = dict(zip(inputs, _Once.apply(*inputs.values()), strict=True))
    if state_BHKV is not None:
        state_BHKV = state_BHKV.to(torch.float32)
    if documents is None:
        return kernel(**inputs, initial_state=state_BHKV, output_final_state=True, **options)
    cu_seqlens = documents.counted().cu_seqlens
    assert cu_seqlens is not None
    batch, time = documents.ids.shape
    rows = torch.arange(0, (batch + 1) * time, time, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    first_B1 = torch.searchsorted(cu_seqlens, rows)  # each row's first document, and one past the last row's last
    state_NHKV = None
    if state_BHKV is not None:
        state_NHKV = state_BHKV.new_zeros(len(cu_seqlens) - 1, *state_BHKV.shape[1:])
        state_NHKV = state_NHKV.index_copy(0, first_B1[:-1], state_BHKV)
    o_1SHV, state_NHKV = kernel(
        **{key: x.flatten(0, 1).unsqueeze(0) for key, x in inputs.items()},
        initial_state=state_NHKV,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **options,
    )
    return o_1SHV.unflatten(1, documents.ids.shape).squeeze(0), state_NHKV[first_B1[1:] - 1]


class _Once(torch.autograd.Function):
    """Its inputs. A derivative of their gradients raises an error; the kernels' own would be wrong."""

    @staticmethod
    def forward(ctx, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        return first_only(*gradients)
