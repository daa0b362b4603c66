"""Triton kernels of Canon-B and the rotary embedding after it, for queries, keys and values in one launch.

    z_t = scale * (sum_{i<K} w_i * x_{t-i} + residual * x_t)
    y_t = (a cos_t - b sin_t, b cos_t + a sin_t, rest)    of each rotated head (a, b, rest) of z_t;  else y_t = z_t

The rotation alone reads z and writes y; with the convolution it only reads a table that heads and layers share. A
program has the two channels of a pair in the same place of two rows, so that no thread needs another one's numbers. It
walks as `conv` does: forwards for y, and backwards for the gradients, whose rotation it undoes first.

Shapes: E channels of a head, H rotated pairs of a head, so that a and b have H channels each; BC channels of a program,
which are BC / 2 pairs. cos and sin are `[B or 1, T, 1, H]` in float32.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, float32

from canonlm.ops.kernels.host import grid_of, or_any, rowwise, strides, summed
from canonlm.ops.kernels.launches import launch_of
from canonlm.ops.kernels.primitives import (
    accumulate_gradients,
    code_at,
    combined,
    earlier,
    locate,
    pick,
    row_of,
    shifted,
    store_row,
    taps_of,
    weighted,
    zeros,
)


@triton.jit
def pairs_of(block, heads, H: tl.constexpr, E: tl.constexpr, BC: tl.constexpr):
    """The pairs of a program: their numbers, first and second channels, the number of the angle, and whether they
    rotate. What a head has beyond 2 H channels is paired, too: its first half with its second."""
    p = block * (BC // 2) + tl.arange(0, BC // 2)
    head, j = p // (E // 2), p % (E // 2)
    first = head * E + j
    second = first + E // 2
    if 2 * H < E:
        first = tl.where(j < H, first, first + H)
        second = tl.where(j < H, first + H, first + (E // 2 - H))
    return p, first, second, j, (j < H) & (head < heads)


@triton.jit(do_not_specialize=["T"])
def forward(
    xs, taps, cos, sin, reach, ys, T, sizes, rotated, strides_b, strides_t, angles_b, scale,
    K: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block, _ = locate(sizes, tl.program_id(0), BC)
    C, stride = pick(sizes, index), pick(strides_t, index).to(tl.int64)
    P, t0 = C // 2, tile * LT
    p, first, second, j, turns = pairs_of(block, pick(rotated, index), H, E, BC)
    x_tile = pick(xs, index) + b * pick(strides_b, index) + t0.to(tl.int64) * stride
    y_tile = pick(ys, index) + (b * T + t0) * C
    cos_tile, sin_tile = cos + b * angles_b + t0 * H + j, sin + b * angles_b + t0 * H + j
    codes = reach + b * T

    weights = pick(taps, index)
    v = combined(taps_of(weights, first, C, K), scale, K, RESIDUAL)
    w = combined(taps_of(weights, second, C, K), scale, K, RESIDUAL)
    firsts, seconds = (), ()
    for i in tl.static_range(1, K):
        code, mask = code_at(codes, t0 - i, T, HAS_REACH), p < tl.where(t0 >= i, P, 0)
        firsts = firsts + (row_of(x_tile - i * stride + first, mask, code, HAS_REACH),)
        seconds = seconds + (row_of(x_tile - i * stride + second, mask, code, HAS_REACH),)

    for g in tl.range(0, LT, U, num_stages=STAGES):
        first_rows, second_rows, cosines, sines, marks = (), (), (), (), ()
        for u in tl.static_range(0, U):
            n = g + u
            code, mask = code_at(codes, t0 + n, T, HAS_REACH), p < tl.where(t0 + n < T, P, 0)
            first_rows = first_rows + (row_of(x_tile + n * stride + first, mask, code, HAS_REACH),)
            second_rows = second_rows + (row_of(x_tile + n * stride + second, mask, code, HAS_REACH),)
            cosines = cosines + (tl.load(cos_tile + n * H, mask=mask & turns, other=1.0),)
            sines = sines + (tl.load(sin_tile + n * H, mask=mask & turns, other=0.0),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            n = g + u
            a = weighted(first_rows[u], firsts, v, marks[u], K, HAS_REACH)
            z = weighted(second_rows[u], seconds, w, marks[u], K, HAS_REACH)
            mask = p < tl.where(t0 + n < T, P, 0)
            store_row(y_tile + n * C + first, tl.where(turns, a * cosines[u] - z * sines[u], a), mask)
            store_row(y_tile + n * C + second, tl.where(turns, z * cosines[u] + a * sines[u], z), mask)
            firsts, seconds = shifted(first_rows[u], firsts, K), shifted(second_rows[u], seconds, K)


@triton.jit(do_not_specialize=["T"])
def backward(
    xs, dys, taps, cos, sin, reach, dxs, partials, T, sizes, rotated, strides_b, strides_t, dy_b, dy_t, angles_b, total,
    scale,
    K: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr, H: tl.constexpr, E: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    index, block, offset = locate(sizes, tl.program_id(0), BC)
    C, stride, dy_stride = pick(sizes, index), pick(strides_t, index).to(tl.int64), pick(dy_t, index).to(tl.int64)
    P, t0 = C // 2, tile * LT
    p, first, second, j, turns = pairs_of(block, pick(rotated, index), H, E, BC)
    x_tile = pick(xs, index) + b * pick(strides_b, index) + t0.to(tl.int64) * stride
    dy_tile = pick(dys, index) + b * pick(dy_b, index) + t0.to(tl.int64) * dy_stride
    dx_tile = pick(dxs, index) + (b * T + t0) * C
    cos_tile, sin_tile = cos + b * angles_b + t0 * H + j, sin + b * angles_b + t0 * H + j
    codes = reach + b * T

    weights = pick(taps, index)
    v = combined(taps_of(weights, first, C, K), scale, K, RESIDUAL)
    w = combined(taps_of(weights, second, C, K), scale, K, RESIDUAL)
    dv, dw = zeros(K, BC // 2), zeros(K, BC // 2)
    first_ahead, second_ahead = zeros(K - 1, BC // 2), zeros(K - 1, BC // 2)
    first_reaches, reaches = tile * 0, tile * 0
    for m in tl.static_range(1, K):
        n = LT + K - 1 - m
        mask, code = p < tl.where(t0 + n < T, P, 0), code_at(codes, t0 + n, T, HAS_REACH)
        one = tl.load(dy_tile + n * dy_stride + first, mask=mask, other=0.0).to(tl.float32)
        other = tl.load(dy_tile + n * dy_stride + second, mask=mask, other=0.0).to(tl.float32)
        c = tl.load(cos_tile + n * H, mask=mask & turns, other=1.0)
        s = tl.load(sin_tile + n * H, mask=mask & turns, other=0.0)
        one, other = turned_back(one, other, c, s, turns)
        first_ahead, first_reaches = earlier(one, code, first_ahead, first_reaches, K, HAS_REACH)
        second_ahead, reaches = earlier(other, code, second_ahead, reaches, K, HAS_REACH)

    for g in tl.range(0, LT, U, num_stages=STAGES):
        first_rows, second_rows, first_flows, second_flows, cosines, sines, marks = (), (), (), (), (), (), ()
        for u in tl.static_range(0, U):
            n = LT - 1 - g - u
            code, mask = code_at(codes, t0 + n, T, HAS_REACH), p < tl.where(t0 + n < T, P, 0)
            first_rows = first_rows + (row_of(x_tile + n * stride + first, mask, code, HAS_REACH),)
            second_rows = second_rows + (row_of(x_tile + n * stride + second, mask, code, HAS_REACH),)
            one = tl.load(dy_tile + n * dy_stride + first, mask=mask, other=0.0).to(tl.float32)
            other = tl.load(dy_tile + n * dy_stride + second, mask=mask, other=0.0).to(tl.float32)
            first_flows, second_flows = first_flows + (one,), second_flows + (other,)
            cosines = cosines + (tl.load(cos_tile + n * H, mask=mask & turns, other=1.0),)
            sines = sines + (tl.load(sin_tile + n * H, mask=mask & turns, other=0.0),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            n = LT - 1 - g - u
            one, other = turned_back(first_flows[u], second_flows[u], cosines[u], sines[u], turns)
            dx, dv = accumulate_gradients(one * v[0], dv, first_rows[u], one, first_ahead, v, K)
            dz, dw = accumulate_gradients(other * w[0], dw, second_rows[u], other, second_ahead, w, K)
            if HAS_REACH:
                pads = (marks[u] & 8) != 0
                dx, dz = tl.where(pads, 0.0, dx), tl.where(pads, 0.0, dz)
            mask = p < tl.where(t0 + n < T, P, 0)
            store_row(dx_tile + n * C + first, dx, mask)
            store_row(dx_tile + n * C + second, dz, mask)
            first_ahead, first_reaches = earlier(one, marks[u], first_ahead, first_reaches, K, HAS_REACH)
            second_ahead, reaches = earlier(other, marks[u], second_ahead, reaches, K, HAS_REACH)

    out = partials + ((b * tl.num_programs(1) + tile) * total + offset) * K
    for i in tl.static_range(0, K):
        tl.store(out + first * K + (K - 1 - i), dv[i] * scale, mask=p < P)
        tl.store(out + second * K + (K - 1 - i), dw[i] * scale, mask=p < P)


@triton.jit
def turned_back(one, other, c, s, turns):
    """The gradients of a pair before its rotation."""
    return tl.where(turns, one * c + other * s, one), tl.where(turns, other * c - one * s, other)


def run_forward(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    reach: Tensor | None,
    rotated: Sequence[int],
    head_dim: int,
    *,
    residual: bool,
    scale: float,
) -> list[Tensor]:
    """The results, `[B, T, C_i]`, of which the first `rotated_i` heads are rotated."""
    xs, taps = [rowwise(x) for x in xs], [tap.contiguous() for tap in taps]
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, time, _ = xs[0].shape
    kernel, sizes = taps[0].shape[-1], tuple(x.shape[2] for x in xs)
    ys = [x.new_empty(x.shape) for x in xs]
    launch = launch_of("rotary_forward", xs[0].device, kernel, batch, time, sum(sizes))
    forward[grid_of(launch, batch, time, sizes)](
        tuple(xs), tuple(taps), cos, sin, *or_any(xs[0], reach), tuple(ys), time, sizes, tuple(rotated),
        strides(xs, 0), strides(xs, 1), cos.stride(0) if cos.shape[0] > 1 else 0, scale,
        kernel, reach is not None, residual, cos.shape[-1], head_dim,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return ys


def run_backward(
    dys: Sequence[Tensor],
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    reach: Tensor | None,
    rotated: Sequence[int],
    head_dim: int,
    *,
    residual: bool,
    scale: float,
) -> list[Tensor]:
    """The gradients of `xs` and `taps`."""
    xs, taps, dys = [rowwise(x) for x in xs], [tap.contiguous() for tap in taps], [rowwise(dy) for dy in dys]
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, time, _ = xs[0].shape
    kernel, sizes, total = taps[0].shape[-1], tuple(x.shape[2] for x in xs), sum(x.shape[2] for x in xs)
    launch = launch_of("rotary_backward", xs[0].device, kernel, batch, time, total)
    grid = grid_of(launch, batch, time, sizes)
    dxs = [x.new_empty(x.shape) for x in xs]
    partials = xs[0].new_empty(batch * grid[1], total, kernel, dtype=float32)
    backward[grid](
        tuple(xs), tuple(dys), tuple(taps), cos, sin, *or_any(xs[0], reach), tuple(dxs), partials, time, sizes,
        tuple(rotated), strides(xs, 0), strides(xs, 1), strides(dys, 0), strides(dys, 1),
        cos.stride(0) if cos.shape[0] > 1 else 0, total, scale,
        kernel, reach is not None, residual, cos.shape[-1], head_dim,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    parts = partials.split(sizes, dim=1)
    return dxs + [summed(part, tap) for part, tap in zip(parts, taps, strict=True)]
