"""Triton kernels of the causal depthwise convolution, for one to a few tensors in one launch.

    z_t = sum_{i<K} w_i * x_{t-i} + bias,   y_t = scale * (act(z_t) + residual * x_t)

A program walks over LT tokens of BC channels and keeps the last K - 1 rows in registers, so every row is read once,
except for K - 1 rows at the edge of a tile. It loads U rows, then computes and stores: for the compiler, a store
between two loads might be to the same address, and would delay the second one.

Shapes: B batch, T time, C channels of a tensor, K taps. Taps are `[C, K]`, the last one for the current token. A state
is `[B, sum of C, K]`. `reach` is `[B, T]` int8: see `documents`.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, float32

from canonlm.ops.kernels.host import grid_of, or_any, packed_state, rowwise, some_or_none, strides, summed
from canonlm.ops.kernels.launches import launch_of
from canonlm.ops.kernels.primitives import (
    accumulate_gradients,
    act,
    act_and_slope,
    code_at,
    earlier,
    locate,
    pick,
    row_before,
    row_of,
    shifted,
    spread,
    store_row,
    taps_of,
    weight_gradients,
    weighted,
    zeros,
)


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def forward(
    xs, taps, biases, state, reach, last, ys, state_out, T, sizes, strides_b, strides_t, state_b, out_b, scale,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr,
    HAS_LAST: tl.constexpr, WRITE_STATE: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block, offset = locate(sizes, tl.program_id(0), BC)
    C, stride = pick(sizes, index), pick(strides_t, index).to(tl.int64)
    t0 = tile * LT
    c = block * BC + tl.arange(0, BC)
    x = pick(xs, index) + b * pick(strides_b, index)
    x_tile = x + t0.to(tl.int64) * stride
    y_tile = pick(ys, index) + (b * T + t0) * C
    codes = reach + b * T
    before = state + b * state_b + (offset + c) * K

    w = taps_of(pick(taps, index), c, C, K)
    if HAS_BIAS:
        bias = tl.load(pick(biases, index) + c, mask=c < C, other=0.0).to(tl.float32)
    past = ()
    for i in tl.static_range(1, K):
        code = code_at(codes, t0 - i, T, HAS_REACH)
        past = past + (row_before(x_tile, stride, t0, i, c, C, before, code, K, HAS_STATE, HAS_REACH),)

    for g in tl.range(0, LT, U, num_stages=STAGES):
        rows, marks = (), ()
        for u in tl.static_range(0, U):
            t = t0 + g + u
            code = code_at(codes, t, T, HAS_REACH)
            rows = rows + (row_of(x_tile + (g + u) * stride + c, c < tl.where(t < T, C, 0), code, HAS_REACH),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            z = weighted(rows[u], past, w, marks[u], K, HAS_REACH)
            if HAS_BIAS:
                z += bias
            z = act(z, ACT)
            if RESIDUAL:
                z += rows[u]
            store_row(y_tile + (g + u) * C + c, z * scale, c < tl.where(t0 + g + u < T, C, 0))
            past = shifted(rows[u], past, K)

    if WRITE_STATE:
        # The K inputs that end at the last real token, by the program that has the last tile; read again.
        end = T - 1
        if HAS_LAST:
            end = tl.load(last + b)
        own = tl.where(tile == tl.num_programs(1) - 1, C, 0)
        code = 7
        if HAS_REACH:
            code = tl.load(codes + end, mask=end >= 0, other=7).to(tl.int32) & 7
        after = state_out + b * out_b + (offset + c) * K
        for i in tl.static_range(0, K):
            t = end - i
            pad = code_at(codes, t, T, HAS_REACH)
            row = row_of(x + t.to(tl.int64) * stride + c, c < tl.where(t >= 0, own, 0), pad, HAS_REACH)
            if HAS_STATE:  # a row without any real token keeps it
                row += tl.load(before + (K + t), mask=c < tl.where(t < 0, own, 0), other=0.0).to(tl.float32)
            store_row(after + (K - 1 - i), tl.where(code >= i, row, 0.0), c < own)


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def backward(
    xs, dys, taps, state, reach, dxs, dstate, partials, T, sizes, strides_b, strides_t, dy_b, dy_t, state_b, total,
    scale,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Without an activation. It walks backwards: at token t the last K - 1 rows of dy are those at t + 1 … t + K - 1,
    which is all that dx_t = sum_i w_i * dy_{t+i} and x_t's share of dw_i = sum_t x_t * dy_{t+i} need."""
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block, offset = locate(sizes, tl.program_id(0), BC)
    C, stride, dy_stride = pick(sizes, index), pick(strides_t, index).to(tl.int64), pick(dy_t, index).to(tl.int64)
    t0 = tile * LT
    c = block * BC + tl.arange(0, BC)
    x_tile = pick(xs, index) + b * pick(strides_b, index) + t0.to(tl.int64) * stride
    dy_tile = pick(dys, index) + b * pick(dy_b, index) + t0.to(tl.int64) * dy_stride
    dx_tile = pick(dxs, index) + (b * T + t0) * C
    codes = reach + b * T

    w, dw, dbias = taps_of(pick(taps, index), c, C, K), zeros(K, BC), tl.full([BC], 0.0, tl.float32)
    ahead, reaches = zeros(K - 1, BC), tile * 0
    for m in tl.static_range(1, K):
        i = K - 1 - m
        t = t0 + LT + i
        row = tl.load(dy_tile + (LT + i) * dy_stride + c, mask=c < tl.where(t < T, C, 0), other=0.0).to(tl.float32)
        ahead, reaches = earlier(row, code_at(codes, t, T, HAS_REACH), ahead, reaches, K, HAS_REACH)

    for g in tl.range(0, LT, U, num_stages=STAGES):
        rows, flows, marks = (), (), ()
        for u in tl.static_range(0, U):
            j = LT - 1 - g - u
            code, mask = code_at(codes, t0 + j, T, HAS_REACH), c < tl.where(t0 + j < T, C, 0)
            rows = rows + (row_of(x_tile + j * stride + c, mask, code, HAS_REACH),)
            flows = flows + (tl.load(dy_tile + j * dy_stride + c, mask=mask, other=0.0).to(tl.float32),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            j = LT - 1 - g - u
            dx, dw = accumulate_gradients(flows[u] * w[0], dw, rows[u], flows[u], ahead, w, K)
            if HAS_BIAS:
                dbias += flows[u]
            if RESIDUAL:
                dx += flows[u]
            if HAS_REACH:
                dx = tl.where((marks[u] & 8) != 0, 0.0, dx)
            store_row(dx_tile + j * C + c, dx * scale, c < tl.where(t0 + j < T, C, 0))
            ahead, reaches = earlier(flows[u], marks[u], ahead, reaches, K, HAS_REACH)

    if HAS_STATE:  # the tokens before the first, in programs of the first tile
        first = tl.where(tile == 0, C, 0)
        before, grad = state + b * state_b + (offset + c) * K, dstate + (b * total + offset + c) * K
        zero_row = tl.full([BC], 0.0, tl.float32)
        store_row(grad, zero_row, c < first)  # of the oldest input, which no tap reaches
        for m in tl.static_range(1, K):
            row = tl.load(before + (K - m), mask=c < first, other=0.0).to(x_tile.dtype.element_ty).to(tl.float32)
            dx, dw = accumulate_gradients(zero_row, dw, row, zero_row, ahead, w, K)
            store_row(grad + (K - m), dx * scale, c < first)
            ahead, reaches = earlier(zero_row, 7, ahead, reaches, K, HAS_REACH)

    out = partials + ((b * tl.num_programs(1) + tile) * total + offset + c) * (K + HAS_BIAS)
    for i in tl.static_range(0, K):
        tl.store(out + (K - 1 - i), dw[i] * scale, mask=c < C)
    if HAS_BIAS:
        tl.store(out + K, dbias * scale, mask=c < C)


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def backward_act(
    xs, dys, taps, biases, state, reach, dxs, dstate, partials, T, sizes, strides_b, strides_t, dy_b, dy_t, state_b,
    total, scale,
    K: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr,
    ACT: tl.constexpr, LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """With an activation: z is recomputed. It walks forwards with the last K - 1 rows of x, spreads dz_t over
    dx_{t-K+1} … dx_t, of which the first is then complete, and goes on for K - 1 tokens past its tile."""
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block, offset = locate(sizes, tl.program_id(0), BC)
    C, stride, dy_stride = pick(sizes, index), pick(strides_t, index).to(tl.int64), pick(dy_t, index).to(tl.int64)
    t0 = tile * LT
    c = block * BC + tl.arange(0, BC)
    x_tile = pick(xs, index) + b * pick(strides_b, index) + t0.to(tl.int64) * stride
    dy_tile = pick(dys, index) + b * pick(dy_b, index) + t0.to(tl.int64) * dy_stride
    dx_tile = pick(dxs, index) + (b * T + t0) * C
    codes = reach + b * T
    before, grad = state + b * state_b + (offset + c) * K, dstate + (b * total + offset + c) * K

    w, dw, dbias = taps_of(pick(taps, index), c, C, K), zeros(K, BC), tl.full([BC], 0.0, tl.float32)
    bias = tl.full([BC], 0.0, tl.float32)
    if HAS_BIAS:
        bias = tl.load(pick(biases, index) + c, mask=c < C, other=0.0).to(tl.float32)
    past, pending = (), zeros(K - 1, BC)
    pads, PAST = tile * 0, 1 << (K - 1)  # a bit per token, the current one's last: was it padding?
    for i in tl.static_range(1, K):
        code = code_at(codes, t0 - i, T, HAS_REACH)
        past = past + (row_before(x_tile, stride, t0, i, c, C, before, code, K, HAS_STATE, HAS_REACH),)
    if HAS_STATE:
        store_row(grad, tl.full([BC], 0.0, tl.float32), c < tl.where(tile == 0, C, 0))

    for g in tl.range(0, LT, U, num_stages=STAGES):
        rows, flows, marks = (), (), ()
        for u in tl.static_range(0, U):
            t = t0 + g + u
            code, mask = code_at(codes, t, T, HAS_REACH), c < tl.where(t < T, C, 0)
            rows = rows + (row_of(x_tile + (g + u) * stride + c, mask, code, HAS_REACH),)
            flows = flows + (tl.load(dy_tile + (g + u) * dy_stride + c, mask=mask, other=0.0).to(tl.float32),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            z = weighted(rows[u], past, w, marks[u], K, HAS_REACH) + bias
            _, slope = act_and_slope(z, ACT)
            dz = flows[u] * slope
            dbias += dz
            dw = weight_gradients(dw, dz, rows[u], past, marks[u], K, HAS_REACH)
            sums = with_residual(spread(pending, dz, w, marks[u], K, HAS_REACH), flows[u], K, RESIDUAL)
            s = g + u - (K - 1)
            done = sums[K - 1] * scale
            if HAS_REACH:
                pads = ((pads << 1) | (marks[u] >> 3)) & 255
                done = tl.where((pads & PAST) != 0, 0.0, done)
            store_row(dx_tile + s * C + c, done, c < tl.where((s >= 0) & (t0 + s < T), C, 0))
            if HAS_STATE:
                store_row(grad + (K + t0 + s), done, c < tl.where(t0 + s < 0, C, 0))
            past, pending = shifted(rows[u], past, K), shifted(sums[0], sums[1:], K)

    rows, flows, marks = (), (), ()
    for u in tl.static_range(0, K - 1):
        t = t0 + LT + u
        code, mask = code_at(codes, t, T, HAS_REACH), c < tl.where(t < T, C, 0)
        rows = rows + (row_of(x_tile + (LT + u) * stride + c, mask, code, HAS_REACH),)
        flows = flows + (tl.load(dy_tile + (LT + u) * dy_stride + c, mask=mask, other=0.0).to(tl.float32),)
        marks = marks + (code,)
    for u in tl.static_range(0, K - 1):
        z = weighted(rows[u], past, w, marks[u], K, HAS_REACH) + bias
        _, slope = act_and_slope(z, ACT)
        sums = spread(pending, flows[u] * slope, w, marks[u], K, HAS_REACH)
        s = LT + u - (K - 1)
        done = sums[K - 1] * scale
        if HAS_REACH:
            pads = ((pads << 1) | (marks[u] >> 3)) & 255
            done = tl.where((pads & PAST) != 0, 0.0, done)
        store_row(dx_tile + s * C + c, done, c < tl.where(t0 + s < T, C, 0))
        past, pending = shifted(rows[u], past, K), shifted(sums[0], sums[1:], K)

    out = partials + ((b * tl.num_programs(1) + tile) * total + offset + c) * (K + HAS_BIAS)
    for i in tl.static_range(0, K):
        tl.store(out + (K - 1 - i), dw[i] * scale, mask=c < C)
    if HAS_BIAS:
        tl.store(out + K, dbias * scale, mask=c < C)


@triton.jit
def with_residual(sums, flow, K: tl.constexpr, RESIDUAL: tl.constexpr):
    """The current token's gradient has the residual's share too."""
    if RESIDUAL:
        sums = (sums[0] + flow,) + sums[1:]
    return sums


def run_forward(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    biases: Sequence[Tensor],
    state: Tensor | None,
    reach: Tensor | None,
    last: Tensor | None,
    *,
    residual: bool,
    act: int,
    scale: float,
    return_state: bool,
) -> list[Tensor]:
    """The results, `[B, T, C_i]`, and the final state `[B, sum of C_i, K]` if `return_state`."""
    xs, taps = [rowwise(x) for x in xs], [tap.contiguous() for tap in taps]
    batch, time, _ = xs[0].shape
    kernel, sizes = taps[0].shape[-1], tuple(x.shape[2] for x in xs)
    ys = [x.new_empty(x.shape) for x in xs]
    state = packed_state(state)
    after = [xs[0].new_empty(batch, sum(sizes), kernel)] if return_state else []
    launch = launch_of("forward", xs[0].device, kernel, batch, time, sum(sizes))
    if ys[0].numel() or after:
        forward[grid_of(launch, batch, time, sizes)](
            tuple(xs), tuple(taps), tuple(biases) or tuple(taps), *or_any(xs[0], state, reach, last), tuple(ys),
            *or_any(xs[0], *some_or_none(after)), time, sizes, strides(xs, 0), strides(xs, 1),
            0 if state is None else state.stride(0), sum(sizes) * kernel, scale,
            kernel, bool(biases), state is not None, reach is not None, last is not None, return_state, residual, act,
            launch.tokens, launch.channels, launch.rows, launch.stages,
            num_warps=launch.warps, maxnreg=launch.registers,
        )  # fmt: skip
    return ys + after


def run_backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    biases: Sequence[Tensor],
    state: Tensor | None,
    reach: Tensor | None,
    *,
    residual: bool,
    act: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of `xs`, `taps`, `biases` and, if there is one, `state`."""
    xs, taps, dys = [rowwise(x) for x in xs], [tap.contiguous() for tap in taps], [rowwise(dy) for dy in dys]
    batch, time, _ = xs[0].shape
    kernel, sizes, total = taps[0].shape[-1], tuple(x.shape[2] for x in xs), sum(x.shape[2] for x in xs)
    name = "backward_act" if act else "backward"
    launch = launch_of(name, xs[0].device, kernel, batch, time, total)
    grid = grid_of(launch, batch, time, sizes)
    dxs = [x.new_empty(x.shape) for x in xs]
    state = packed_state(state)
    dstate = [] if state is None else [state.new_empty(batch, total, kernel)]
    partials = xs[0].new_empty(batch * grid[1], total, kernel + bool(biases), dtype=float32)
    function, extra = (backward_act, (tuple(biases) or tuple(taps),)) if act else (backward, ())
    function[grid](
        tuple(xs), tuple(dys), tuple(taps), *extra, *or_any(xs[0], state, reach), tuple(dxs),
        *or_any(xs[0], *some_or_none(dstate)), partials, time, sizes, strides(xs, 0), strides(xs, 1),
        strides(dys, 0), strides(dys, 1), 0 if state is None else state.stride(0), total, scale,
        kernel, bool(biases), state is not None, reach is not None, residual, *([act] if act else []),
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    parts = partials.split(sizes, dim=1)
    dtaps = [summed(part[..., :kernel], tap) for part, tap in zip(parts, taps, strict=True)]
    dbiases = [summed(part[..., kernel], bias) for part, bias in zip(parts, biases, strict=False)]
    return dxs + dtaps + dbiases + dstate
