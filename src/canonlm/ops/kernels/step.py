"""Triton kernels of one decoding step: y_t of the newest token, and the state updated in place.

A state is `[B, sum of C, K]`: the last K inputs of every channel. It loses the oldest, and x is written to its end; a
row whose `real` is 0 (padding) keeps its state. For K = 4 a thread has one channel, and reads and writes its four
inputs at once (8 bytes in bfloat16), as it reads its taps. A program reads its part of the state before it writes
there. That takes a barrier, as several threads may read the same channel.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from canonlm.ops.kernels.host import or_any, rowwise, strides, within_limits
from canonlm.ops.kernels.launches import launch_of
from canonlm.ops.kernels.primitives import act, locate, pick, row_of, store_row


@triton.jit
def columns_of(rows, c, C, K: tl.constexpr):
    """The K columns of `[C, K]`; `rows` points to the rows of channels c."""
    if K == 4:
        tile = tl.load(rows[:, None] + tl.arange(0, 4)[None, :], mask=(c < C)[:, None], other=0.0)
        even, odd = tl.split(tl.reshape(tile, [c.shape[0], 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth
    else:
        columns = ()
        for j in tl.static_range(0, K):
            columns = columns + (tl.load(rows + j, mask=c < C, other=0.0),)
        return columns


@triton.jit
def store_columns(rows, columns, c, C, K: tl.constexpr):
    if K == 4:
        pairs = tl.join(tl.join(columns[0], columns[2]), tl.join(columns[1], columns[3]))
        tile = tl.reshape(pairs, [c.shape[0], 4])
        tl.store(rows[:, None] + tl.arange(0, 4)[None, :], tile, mask=(c < C)[:, None])
    else:
        for j in tl.static_range(0, K):
            tl.store(rows + j, columns[j], mask=c < C)


@triton.jit
def convolved(x, columns, taps, c, C, K: tl.constexpr):
    """sum_j w_j * (the K inputs that end with x)"""
    w = columns_of(taps + c * K, c, C, K)
    z = x * w[K - 1].to(tl.float32)
    for i in tl.static_range(1, K):
        z += columns[K - i].to(tl.float32) * w[K - 1 - i].to(tl.float32)
    return z


@triton.jit
def update_state(state, columns, x, c, C, keep, K: tl.constexpr):
    """Write the K inputs that end with x to the state, or its old content where `keep`."""
    after = ()
    for j in tl.static_range(0, K - 1):
        after = after + (tl.where(keep, columns[j], columns[j + 1]),)
    after = after + (tl.where(keep, columns[K - 1], x.to(columns[0].dtype)),)
    store_columns(state, after, c, C, K)


@triton.jit
def step(
    xs, taps, biases, state, real, ys, sizes, strides_b, state_b, real_b, scale,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_REAL: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """One to a few tensors, whose channels lie one after another in the state."""
    b = tl.program_id(1).to(tl.int64)
    index, block, offset = locate(sizes, tl.program_id(0), BC)
    C = pick(sizes, index)
    c = block * BC + tl.arange(0, BC)
    keep = is_padding(real, b, real_b, HAS_REAL)
    x = row_of(pick(xs, index) + b * pick(strides_b, index) + c, c < C, keep * 8, HAS_REAL)
    before = state + b * state_b + (offset + c) * K
    columns = columns_of(before, c, C, K)
    z = convolved(x, columns, pick(taps, index), c, C, K)
    if HAS_BIAS:
        z += tl.load(pick(biases, index) + c, mask=c < C, other=0.0).to(tl.float32)
    z = act(z, ACT)
    if RESIDUAL:
        z += x
    tl.debug_barrier()
    update_state(before, columns, x, c, C, keep != 0, K)
    store_row(pick(ys, index) + b * C + c, z * scale, c < C)


@triton.jit
def gated_step(
    gate, up, gate_taps, up_taps, state, real, y, C, gate_b, up_b, state_b, real_b, scale,
    K: tl.constexpr, HAS_REAL: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """act(canon(gate)) * canon(up)"""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    keep = is_padding(real, b, real_b, HAS_REAL)
    before = state + b * state_b + c * K
    gate_row = row_of(gate + b * gate_b + c, c < C, keep * 8, HAS_REAL)
    up_row = row_of(up + b * up_b + c, c < C, keep * 8, HAS_REAL)
    gates, ups = columns_of(before, c, C, K), columns_of(before + C * K, c, C, K)
    z, r = convolved(gate_row, gates, gate_taps, c, C, K), convolved(up_row, ups, up_taps, c, C, K)
    if RESIDUAL:
        z += gate_row
        r += up_row
    tl.debug_barrier()
    update_state(before, gates, gate_row, c, C, keep != 0, K)
    update_state(before + C * K, ups, up_row, c, C, keep != 0, K)
    store_row(y + b * C + c, act(z * scale, ACT) * (r * scale), c < C)


@triton.jit
def normed_step(
    x, weight, taps, state, real, y, C, x_b, state_b, real_b, eps, scale,
    K: tl.constexpr, HAS_REAL: tl.constexpr, RESIDUAL: tl.constexpr, BC: tl.constexpr, ALL: tl.constexpr,
):  # fmt: skip
    """canon(rms_norm(x) * weight) for a block of channels; each program reads the whole row for its norm."""
    b = tl.program_id(1).to(tl.int64)
    c, every = tl.program_id(0) * BC + tl.arange(0, BC), tl.arange(0, ALL)
    keep = is_padding(real, b, real_b, HAS_REAL)
    before = state + b * state_b + c * K
    columns = columns_of(before, c, C, K)
    g = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    row = tl.load(x + b * x_b + every, mask=every < C, other=0.0).to(tl.float32)
    own = tl.load(x + b * x_b + c, mask=c < C, other=0.0).to(tl.float32)
    h = own * (1.0 / tl.sqrt(tl.sum(row * row, axis=0) / C + eps)) * g
    h = h.to(x.dtype.element_ty).to(tl.float32)  # what the state holds, and what the norm alone returns
    if HAS_REAL:
        h = tl.where(keep != 0, 0.0, h)
    z = convolved(h, columns, taps, c, C, K)
    if RESIDUAL:
        z += h
    tl.debug_barrier()
    update_state(before, columns, h, c, C, keep != 0, K)
    store_row(y + b * C + c, z * scale, c < C)


@triton.jit
def is_padding(real, b, real_b, HAS_REAL: tl.constexpr):
    if HAS_REAL:
        return (tl.load(real + b * real_b) == 0).to(tl.int32)
    else:
        return 0


def run_step(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    biases: Sequence[Tensor],
    state: Tensor,
    mask: Tensor | None,
    ys: Sequence[Tensor],
    *,
    residual: bool,
    act: int,
    scale: float,
) -> None:
    """Results go into `ys`: compilers refuse an operator that changes an argument and returns a list."""
    xs, taps = [rowwise(x) for x in xs], [tap.contiguous() for tap in taps]
    kernel, batch, sizes = taps[0].shape[-1], xs[0].shape[0], tuple(x.shape[-1] for x in xs)
    launch = launch_of("step", xs[0].device, kernel, batch, 1, sum(sizes))
    step[within_limits(sum(-(-size // launch.channels) for size in sizes), batch)](
        tuple(xs), tuple(taps), tuple(biases) or tuple(taps), state, *or_any(state, mask), tuple(ys), sizes,
        strides(xs, 0), state.stride(0), 0 if mask is None else mask.stride(0), scale,
        kernel, bool(biases), mask is not None, residual, act, launch.channels, num_warps=launch.warps,
    )  # fmt: skip


def run_gated_step(
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    state: Tensor,
    mask: Tensor | None,
    *,
    residual: bool,
    act: int,
    scale: float,
) -> Tensor:
    gate, up, (gate_taps, up_taps) = rowwise(gate), rowwise(up), [tap.contiguous() for tap in taps]
    kernel, (batch, _, channels) = gate_taps.shape[-1], gate.shape
    y = gate.new_empty(gate.shape)
    launch = launch_of("gated_step", gate.device, kernel, batch, 1, channels)
    gated_step[within_limits(-(-channels // launch.channels), batch)](
        gate, up, gate_taps, up_taps, state, *or_any(state, mask), y, channels, gate.stride(0), up.stride(0),
        state.stride(0), 0 if mask is None else mask.stride(0), scale,
        kernel, mask is not None, residual, act, launch.channels, num_warps=launch.warps,
    )  # fmt: skip
    return y


def run_normed_step(
    x: Tensor,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    state: Tensor,
    mask: Tensor | None,
    *,
    residual: bool,
    scale: float,
) -> Tensor:
    x, taps = rowwise(x), taps.contiguous()
    kernel, (batch, _, channels) = taps.shape[-1], x.shape
    y = x.new_empty(x.shape)
    launch = launch_of("normed_step", x.device, kernel, batch, 1, channels)
    normed_step[within_limits(-(-channels // launch.channels), batch)](
        x, weight, taps, state, *or_any(state, mask), y, channels, x.stride(0), state.stride(0),
        0 if mask is None else mask.stride(0), eps, scale,
        kernel, mask is not None, residual, launch.channels, 1 << (channels - 1).bit_length(), num_warps=launch.warps,
    )  # fmt: skip
    return y
