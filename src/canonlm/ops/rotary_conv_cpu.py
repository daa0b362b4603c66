"""The causal convolution followed by the rotary embedding, as one operator of torch for float32 on a CPU.

Queries, keys and values are then read and written once. The results equal those of the two steps, bit by bit: the
kernel rounds where torch does. A self-contained model's folder has `absent` in place of this.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canonlm.ops.causal_conv_cpu import (
    LIBRARY,
    MAX_KERNEL,
    callable_from_c,
    has_numba,
    ids_of,
    launch,
    partial_sums,
    rowwise,
    total,
)
from canonlm.ops.causal_conv_plain import by_documents
from canonlm.ops.compiled import is_exporting
from canonlm.ops.derivatives import by_definition, differentiated_again, gradients

LIBRARY.define(
    "cpu_rotary_conv(Tensor x, Tensor weight, Tensor? doc_ids, Tensor cos, Tensor sin, int heads, int rotated)"
    " -> Tensor"
)
LIBRARY.define(
    "cpu_rotary_conv_backward(Tensor dy, Tensor x, Tensor weight, Tensor? doc_ids, Tensor cos, Tensor sin, int rotated)"
    " -> (Tensor, Tensor)"
)


def usable_rotary(x_BTC: Tensor, weight_KC: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the operator can be used: on a CPU with numba, also in a compiled graph. Not in an exported program,
    which may run without canonlm."""
    return (
        not is_exporting()
        and not by_definition()
        and all(type(each) is Tensor and each.device.type == "cpu" for each in (x_BTC, cos, sin))
        and all(each.dtype == torch.float32 for each in (x_BTC, weight_KC, cos, sin))
        and weight_KC.shape[0] <= MAX_KERNEL
        and has_numba()
    )


def rotary_conv(
    x_BTC: Tensor, weight_KC: Tensor, doc_ids_BT: Tensor | None, cos: Tensor, sin: Tensor, heads: int, rotated: int
) -> Tensor:
    """`[B, T, heads, C / heads]`: `causal_conv`, then a rotation by `cos` and `sin`, `[B or 1, T, 1, rope_dim / 2]`, of
    the first `rotated` heads. Differentiable in x and weight."""
    return torch.ops.canonlm.cpu_rotary_conv(x_BTC, weight_KC, doc_ids_BT, cos, sin, heads, rotated)


def _forward(
    x: Tensor, weight: Tensor, doc_ids: Tensor | None, cos: Tensor, sin: Tensor, heads: int, rotated: int
) -> Tensor:
    batch, time, channels = x.shape
    y = x.new_empty(batch, time, heads, channels // heads)
    _run("forward", x, y, weight, doc_ids, cos, sin, heads, rotated)
    return y


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, doc_ids: Tensor | None, cos: Tensor, sin: Tensor, rotated: int
) -> tuple[Tensor, Tensor]:
    batch, time, _ = x.shape
    dx = x.new_empty(x.shape)
    partials = partial_sums(weight, batch, time)
    _run("backward", x, dx, weight, doc_ids, cos, sin, dy.shape[2], rotated, dy, partials)
    return dx, total(partials)


def _run(
    direction: str,
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    doc_ids: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    rotated: int,
    dy: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    from canonlm.ops.numba_conv import TOKENS, Rotation

    batch, time, channels = x.shape
    x, weight, doc_ids = rowwise(x), weight.contiguous(), ids_of(doc_ids)
    dy = None if dy is None else rowwise(dy)
    cos, sin = cos.contiguous(), sin.contiguous()
    size = x.element_size()
    dy_strides = (0, 0, 0) if dy is None else tuple(size * dy.stride(axis) for axis in (0, 1, 2))
    work = np.zeros(1, Rotation)
    work[0] = (
        0,
        *(0 if tensor is None else tensor.data_ptr() for tensor in (x, dy, out, weight, partials, doc_ids)),
        *(batch, time, 0, channels),
        *(x.stride(0) * size, x.stride(1) * size, *dy_strides[:2]),
        *(cos.data_ptr(), sin.data_ptr(), cos.stride(0) if cos.shape[0] > 1 else 0),
        *(cos.shape[-1], heads, min(rotated, heads), dy_strides[2]),
    )
    launch(_function(direction, weight.shape[0]), work, batch * -(-time // TOKENS), x.numel())


@functools.cache
def _function(direction: str, kernel: int) -> Any:
    from canonlm.ops.numba_conv import compiled

    return callable_from_c(compiled(direction, kernel, "float32", rotates=True))


def _save(ctx, inputs, output) -> None:
    x, weight, doc_ids, cos, sin, _, ctx.rotated = inputs
    ctx.save_for_backward(x, weight, doc_ids, cos, sin)


def _definition(
    x: Tensor, weight: Tensor, doc_ids: Tensor | None, cos: Tensor, sin: Tensor, heads: int, rotated: int
) -> Tensor:
    y = by_documents(x, weight, doc_ids).unflatten(2, (heads, -1))
    a, b, rest = y[:, :, :rotated].tensor_split([cos.shape[-1], 2 * cos.shape[-1]], dim=-1)
    turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)
    return torch.cat([turned, y[:, :, rotated:]], dim=2)


def _gradients(ctx, dy: Tensor):
    if differentiated_again():
        return gradients(_definition, (*ctx.saved_tensors, dy.shape[2], ctx.rotated), [dy])
    dx, dweight = torch.ops.canonlm.cpu_rotary_conv_backward(dy, *ctx.saved_tensors, ctx.rotated)
    return dx, dweight, None, None, None, None, None


LIBRARY.impl("cpu_rotary_conv", _forward, "CPU")
LIBRARY.impl("cpu_rotary_conv_backward", _backward, "CPU")
torch.library.register_fake(
    "canonlm::cpu_rotary_conv",
    lambda x, weight, doc_ids, cos, sin, heads, rotated: x.new_empty(*x.shape[:2], heads, x.shape[2] // heads),
    lib=LIBRARY,
)
torch.library.register_fake(
    "canonlm::cpu_rotary_conv_backward",
    lambda dy, x, weight, *rest: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    lib=LIBRARY,
)
torch.library.register_autograd("canonlm::cpu_rotary_conv", _gradients, setup_context=_save, lib=LIBRARY)
