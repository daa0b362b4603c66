"""Shared by the recurrences: decays that end at documents, and time split into chunks.

Shapes: B batch, T time, H heads, D channels; N chunks of C tokens.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from canonlm.ops.derivatives import differentiated_again, gradients

BLOCK = 2**17
"""Numbers of a tensor that a CPU thread processes at once, so that intermediate results stay in its caches."""


def decays(g_BTX: Tensor, starts_BT: Tensor | None) -> Tensor:
    """The factor of the state at each token: exp(g), and zero where a document starts.

    The product of decays over any stretch of time is then zero exactly if it crosses into another document.
    """
    decay_BTX = g_BTX.exp()
    if starts_BT is None:
        return decay_BTX
    return decay_BTX.masked_fill(starts_BT.view(*starts_BT.shape, *[1] * (g_BTX.ndim - 2)), 0)


def segments(x_BTHD: Tensor, chunk: int) -> list[tuple[slice, slice]]:
    """The blocks that are computed at once, as slices (chunks, tokens)."""
    chunks = x_BTHD.shape[1] // chunk
    step = max(1, chunks)
    if x_BTHD.device.type == "cpu":
        step = max(1, torch.get_num_threads() * BLOCK // max(1, x_BTHD[:, :chunk].numel()))
    edges = pairwise([*range(0, chunks, step), chunks])
    return [(slice(first, last), slice(first * chunk, last * chunk)) for first, last in edges]


def pad_to_chunks(chunk: int, *tensors: Tensor) -> list[Tensor]:
    """`[B, T, …]` with zeros at the end, up to a multiple of `chunk`."""
    pad = -tensors[0].shape[1] % chunk
    return [torch.nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, pad)) if pad else x for x in tensors]


def to_chunks(x_BTHD: Tensor, chunk: int, dtype: torch.dtype | None = None) -> Tensor:
    """`[N, B H, C, D]`, contiguous, in its own or another dtype."""
    x_NBHCD = _chunks(x_BTHD, chunk)
    return x_NBHCD.to(dtype or x_BTHD.dtype, memory_format=torch.contiguous_format).flatten(1, 2)


def from_chunks(x_NXCD: Tensor, out_BTHD: Tensor) -> None:
    """The inverse of `to_chunks`, into `out` and its dtype."""
    out_NBHCD = _chunks(out_BTHD, x_NXCD.shape[2])
    out_NBHCD.copy_(x_NXCD.view(out_NBHCD.shape))


def _chunks(x_BTHD: Tensor, chunk: int) -> Tensor:
    return x_BTHD.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)


def scan(borders: Tensor, decay: Tensor, *, backwards: bool = False) -> None:
    """States at the N + 1 borders of N chunks, in place: the decayed state of the border before is added to each.

    `backwards`: from the last border to the first.
    """
    before, after = (borders[1:], borders[:-1]) if backwards else (borders[:-1], borders[1:])
    for n in reversed(range(len(decay))) if backwards else range(len(decay)):
        after[n].addcmul_(decay[n], before[n])


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    """Save in the forward all that `derivatives` reads."""
    ctx.count = sum(x is None or isinstance(x, Tensor) for x in inputs)
    ctx.numbers = inputs[ctx.count : -1]
    ctx.save_for_backward(*inputs[: ctx.count], *output[2:])
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # those of the states would be large tensors of zeros


def derivatives(
    backward: Callable[..., tuple[Tensor, ...]], definition: Callable[..., Any]
) -> Callable[..., tuple[Tensor | None, ...]]:
    """The backward of the custom operator of a recurrence in chunks, for `register_autograd` with `save_inputs`.

    The operator forward(q, k, v, …, borders, state, *numbers, chunk) returns the output, the next state, and tensors
    for backward(doutput, dstate, q, k, v, …, borders, *tensors, *numbers), which returns the gradients of q, k, v, …
    and the state; of an input that is None, a tensor that is not read. definition(q, k, v, …, borders, state,
    *numbers): the recurrence, for derivatives of derivatives.
    """

    def differentiate(ctx: Any, doutput: Tensor | None, dstate: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing allows it only once
        inputs, tensors = saved[: ctx.count], saved[ctx.count :]
        if differentiated_again():
            return *gradients(definition, (*inputs, *ctx.numbers), (doutput, dstate)), None
        doutput = torch.zeros_like(inputs[2]) if doutput is None else doutput
        dstate = torch.zeros_like(inputs[-1]) if dstate is None else dstate
        *dinputs, dstate = backward(doutput, dstate, *inputs[:-1], *tensors, *ctx.numbers)
        pairs = zip(inputs[:-2], dinputs, strict=True)
        return *(None if x is None else dx for x, dx in pairs), None, dstate, *(None for _ in ctx.numbers), None

    return differentiate
