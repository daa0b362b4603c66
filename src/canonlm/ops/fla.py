"""flash-linear-attention's Triton kernels, for recurrences whose tensors are on a GPU.

The package `fla` is optional and never imported for CPU tensors. A kernel takes `[B, T, H, D]` inputs and an initial
state `[N, H, K, V]` in float32, one for each of N sequences: the rows of a batch, or, for packed documents, the
stretches of one long row whose limits are `cu_seqlens`.
"""

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def asked_once(answer: Callable[[], bool]) -> Callable[[], bool]:
    """The answer is kept, and to a compiler it is a constant: it would look into a bare `functools.cache`."""
    kept = functools.cache(answer)

    @torch.compiler.assume_constant_result
    @functools.wraps(answer)
    def ask() -> bool:
        return kept()

    return ask


def takes(x_BTHD: Tensor) -> bool:
    """Whether a kernel can be used on `x_BTHD`: on a GPU, in half precision.

    Not in float32, which some of the kernels refuse and others multiply in TF32.
    """
    half = x_BTHD.dtype in (torch.bfloat16, torch.float16)
    return x_BTHD.is_cuda and half and x_BTHD.numel() > 0 and installed()


@asked_once
def installed() -> bool:
    """Whether the package can be imported; said once where it cannot."""
    try:
        importlib.import_module("fla.ops")
    except ImportError as error:
        warnings.warn(
            f"flash-linear-attention cannot be imported ({error}), so linear layers on this GPU run in their PyTorch "
            "form, which is slower. To have its kernels: pip install 'canonlm[gpu]'",
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
    doc_ids_BT: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`fla.ops.{family}.{name}` on inputs `[B, T, …]`, from `state_BHKV` on. Returns (o_BTHV, the state after it)."""
    kernel = getattr(importlib.import_module(f"fla.ops.{family}"), name)
    if state_BHKV is not None:
        state_BHKV = state_BHKV.to(torch.float32)
    if doc_ids_BT is None:
        return kernel(**inputs, initial_state=state_BHKV, output_final_state=True, **options)
    cu_seqlens, first_B, last_B = packed(doc_ids_BT)
    state_NHKV = None
    if state_BHKV is not None:
        documents = len(cu_seqlens) - 1
        state_NHKV = state_BHKV.new_zeros(documents, *state_BHKV.shape[1:]).index_copy(0, first_B, state_BHKV)
    o_1SHV, state_NHKV = kernel(
        **{key: x.flatten(0, 1).unsqueeze(0) for key, x in inputs.items()},
        initial_state=state_NHKV,
        output_final_state=True,
        cu_seqlens=cu_seqlens,
        **options,
    )
    return o_1SHV.unflatten(1, doc_ids_BT.shape).squeeze(0), state_NHKV[last_B]


def packed(doc_ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The documents of all rows, one row after the other: (where each starts and the last ends, int64 `[N + 1]`;
    each row's first document `[B]`; each row's last `[B]`)."""
    starts_BT = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    document_BT = starts_BT.flatten().cumsum(0).view_as(doc_ids_BT) - 1
    end = torch.full((1,), doc_ids_BT.numel(), device=doc_ids_BT.device)
    cu_seqlens = torch.cat([starts_BT.flatten().nonzero().flatten(), end])
    return cu_seqlens, document_BT[:, 0], document_BT[:, -1]
