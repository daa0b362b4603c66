"""Causal depthwise convolution over time, the operation behind Canon layers and short convolutions.

    y_t = sum_{j=0..K-1} w_j * x_{t-K+1+j}          (the last tap multiplies the current token; zero history)

Physics of Language Models, Part 4.1 (arXiv 2512.17351), Canon layers: K = 4.

Shapes: B batch, T time, C channels, K kernel size. Weights are `[C, 1, K]`, as in `torch.nn.Conv1d(groups=C)`.
A *state* is the last K inputs of a row, `[B, C, K]`, time last and zero-filled: the layout of transformers' caches.
"""

import functools

import torch
from torch import Tensor

from canonlm.ops.causal_conv_cpu import convolve, usable
from canonlm.ops.causal_conv_plain import by_slices, same_document
from canonlm.ops.compiled import is_exporting, materialize
from canonlm.ops.derivatives import by_definition, differentiated_again, gradients

BLOCK = 2**19
"""Numbers that a thread processes at once in eager mode on a CPU: 2 MiB of float32, about its cache."""


def causal_conv(
    x_BTC: Tensor, weight_C1K: Tensor, *, doc_ids_BT: Tensor | None = None, state_BCK: Tensor | None = None
) -> Tensor:
    """The convolution above, for any K >= 1, in at least float32 and returned in the dtype of `x_BTC`.

    `doc_ids_BT`: integers, one value per document; taps never reach into another document. `state_BCK`: the inputs
    that came before `x_BTC`; they belong to the document of its first token (zero them where they do not).

    On a CPU with numba, its kernels are used. Otherwise there are two forms of one sum: slices under autograd where a
    compiler fuses them, and a hand-written backward in eager mode, where autograd writes a full tensor of zeros for
    every tap (`benchmarks/canon.py` has the numbers). Derivatives beyond a first backward are those of the slices.
    """
    kernel = weight_C1K.shape[-1]
    compute = dtype_of_sums(x_BTC, weight_C1K)
    if state_BCK is not None and x_BTC.shape[1] == 1:  # decoding: nothing to shift, no documents to separate
        window_BCK = torch.cat([state_BCK[..., 1:].to(x_BTC.dtype), x_BTC.transpose(1, 2)], dim=-1)
        return (window_BCK.to(compute) * weight_C1K[:, 0]).sum(-1).to(x_BTC.dtype)[:, None]
    history = 0
    if state_BCK is not None and kernel > 1:
        history = kernel - 1
        x_BTC = torch.cat([state_BCK[..., 1:].transpose(1, 2).to(x_BTC.dtype), x_BTC], dim=1)
    weight_KC = weight_C1K[:, 0].t().to(compute)
    if usable(x_BTC, weight_KC):
        if doc_ids_BT is not None and history:
            doc_ids_BT = torch.cat([doc_ids_BT[:, :1].expand(-1, history), doc_ids_BT], dim=1)
        return convolve(x_BTC, weight_KC, doc_ids_BT, history)
    same_doc = None if doc_ids_BT is None else same_document(doc_ids_BT, kernel).to(compute)
    if by_definition():
        return by_slices(x_BTC, weight_KC, same_doc, history)
    if not torch.compiler.is_compiling():
        return _InPlace.apply(x_BTC, weight_KC.contiguous(), same_doc, history)
    # A compiler would remove `contiguous` and read weights K numbers apart, without vector instructions in the whole
    # loop that it fuses the convolution into: three times slower next to an exponential.
    return by_slices(x_BTC, materialize(weight_KC), same_doc, history)


def dtype_of_sums(x: Tensor, weight: Tensor) -> torch.dtype:
    """That of inputs and weights, and at least float32."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


def causal_conv_per_token(
    x_BTC: Tensor, taps_BTHK: Tensor, *, doc_ids_BT: Tensor | None = None, state_BCK: Tensor | None = None
) -> Tensor:
    """The convolution with a set of taps per token and head, for the head's C / H channels:

        y_t = sum_{j=0..K-1} w_{t,j} * x_{t-K+1+j}

    In the dtype of `taps_BTHK`, which is at least float32; the rest as in `causal_conv`.
    """
    kernel, time = taps_BTHK.shape[-1], x_BTC.shape[1]
    past = x_BTC.new_zeros(x_BTC.shape[0], kernel, x_BTC.shape[2]) if state_BCK is None else state_BCK.transpose(1, 2)
    full = torch.cat([past[:, 1:].to(x_BTC.dtype), x_BTC], dim=1).unflatten(-1, (taps_BTHK.shape[2], -1))
    if doc_ids_BT is not None and time > 0:
        same_doc = same_document(doc_ids_BT, kernel)
        taps_BTHK = taps_BTHK * same_doc.flip(0).permute(1, 2, 0)[:, :, None].to(taps_BTHK.dtype)
    parts = (full[:, j : j + time] * taps_BTHK[..., j, None] for j in range(kernel))
    return sum(parts, torch.zeros((), dtype=taps_BTHK.dtype, device=x_BTC.device)).flatten(-2)


def conv_state(
    x_BTC: Tensor,
    kernel: int,
    *,
    mask_BT: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    state_BCK: Tensor | None = None,
) -> Tensor:
    """The state after `x_BTC`: the K inputs that end at each row's last real token, `[B, C, K]`.

    `mask_BT` is 1 at real tokens; a row without any keeps its state. Inputs of a document other than the last
    real token's are zero, so that what follows needs no document ids to continue it. `x_BTC` must already be zero
    at padding.
    """
    batch, time, channels = x_BTC.shape
    if time == 1 and state_BCK is not None:
        state_BCK = state_BCK.to(x_BTC.dtype)
        after_BCK = torch.cat([state_BCK[..., 1:], x_BTC.transpose(1, 2)], dim=-1)
        return after_BCK if mask_BT is None else torch.where(mask_BT[..., None] != 0, after_BCK, state_BCK)
    past_BKC = x_BTC.new_zeros(batch, kernel, channels) if state_BCK is None else state_BCK.transpose(1, 2)
    if (mask_BT is None and doc_ids_BT is None) or time == 0:
        # An exported program would only take inputs for which this slice does the same.
        recent = x_BTC if is_exporting() else x_BTC[:, -kernel:]
        return torch.cat([past_BKC.to(x_BTC.dtype), recent], dim=1)[:, -kernel:].transpose(1, 2)
    full = torch.cat([past_BKC.to(x_BTC.dtype), x_BTC], dim=1)
    steps = torch.arange(1, time + 1, device=x_BTC.device)
    end_B1 = steps[-1:].expand(batch, 1) if mask_BT is None else ((mask_BT != 0) * steps).amax(1, keepdim=True)
    window_BK = end_B1 + torch.arange(kernel, device=x_BTC.device)  # in `full`, x_t sits at kernel + t
    window = full.gather(1, window_BK[..., None].expand(-1, -1, channels))
    if doc_ids_BT is not None:
        doc_full = torch.cat([doc_ids_BT[:, :1].expand(-1, kernel), doc_ids_BT], dim=1)
        doc_window = doc_full.gather(1, window_BK)
        window = window * (doc_window == doc_window[:, -1:]).to(window.dtype)[..., None]
    return window.transpose(1, 2)


class _InPlace(torch.autograd.Function):
    """The same, as multiply-adds into one result, a few rows at a time.

    Small blocks stay in a CPU's cache over all taps, and their buffers are reused; a new large tensor costs more, in
    page faults, than the arithmetic on it.
    """

    @staticmethod
    def forward(ctx, x_BSC: Tensor, weight_KC: Tensor, same_doc: Tensor | None, history: int) -> Tensor:
        ctx.save_for_backward(x_BSC, weight_KC, same_doc)
        ctx.history = history
        taps, (batch, length, channels) = weight_KC.shape[0], x_BSC.shape
        y_BTC = x_BSC.new_empty(batch, length - history, channels)
        for rows in _row_blocks(x_BSC):
            x, y = x_BSC[rows].to(weight_KC.dtype), _accumulator(y_BTC[rows], weight_KC.dtype)
            torch.mul(x[:, history:], weight_KC[-1], out=y)
            for i, now, then in _shifts(taps, length, history):
                past = x[:, then] if same_doc is None else x[:, then] * same_doc[i, rows, now, None]
                y[:, now].addcmul_(past, weight_KC[taps - 1 - i])
            if y.dtype != y_BTC.dtype:
                y_BTC[rows] = y
        return y_BTC

    @staticmethod
    def backward(ctx, dy_BTC: Tensor):
        x_BSC, weight_KC, same_doc = ctx.saved_tensors
        if differentiated_again():
            definition = functools.partial(by_slices, history=ctx.history)
            return *gradients(definition, (x_BSC, weight_KC, same_doc), [dy_BTC]), None
        history, taps = ctx.history, weight_KC.shape[0]
        dx_BSC, dweight_KC = x_BSC.new_empty(x_BSC.shape), torch.zeros_like(weight_KC)
        for rows in _row_blocks(x_BSC):
            x, dy = x_BSC[rows].to(weight_KC.dtype), dy_BTC[rows].to(weight_KC.dtype)
            dx = _accumulator(dx_BSC[rows], weight_KC.dtype)
            dx[:, :history] = 0
            torch.mul(dy, weight_KC[-1], out=dx[:, history:])
            product = dy.new_empty(dy.shape)
            torch.mul(dy, x[:, history:], out=product)
            dweight_KC[-1] += product.flatten(0, 1).sum(0)
            for i, now, then in _shifts(taps, x.shape[1], history):
                flow = dy[:, now] if same_doc is None else dy[:, now] * same_doc[i, rows, now, None]
                dx[:, then].addcmul_(flow, weight_KC[taps - 1 - i])
                torch.mul(flow, x[:, then], out=product[:, now])
                product[:, : now.start] = 0  # and sum all of it: a sum over a slice in time takes twenty times as long
                dweight_KC[taps - 1 - i] += product.flatten(0, 1).sum(0)
            if dx.dtype != dx_BSC.dtype:
                dx_BSC[rows] = dx
        return dx_BSC, dweight_KC, None, None


def _row_blocks(x_BSC: Tensor) -> list[slice]:
    batch, step = x_BSC.shape[0], x_BSC.shape[0]
    if x_BSC.device.type == "cpu":
        step = torch.get_num_threads() * BLOCK // max(1, x_BSC[:1].numel())
    return [slice(first, first + max(1, step)) for first in range(0, batch, max(1, step))]


def _accumulator(out: Tensor, dtype: torch.dtype) -> Tensor:
    """The buffer in which to accumulate `out`: itself, unless its precision is too low."""
    return out if out.dtype == dtype else torch.empty_like(out, dtype=dtype)


def _shifts(taps: int, length: int, history: int):
    """For each tap i >= 1: the output positions it reaches, and the input positions it reads for them."""
    time = length - history
    for i in range(1, min(taps, length)):
        first = max(0, i - history)
        if first < time:
            yield i, slice(first, time), slice(history + first - i, length - i)
