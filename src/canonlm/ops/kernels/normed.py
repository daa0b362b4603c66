"""Triton kernels of what surrounds Canon-A and Canon-C: s = x + branch, y = canon(rms_norm(s) * weight).

    h_t = s_t * r_t * weight,   r_t = 1 / sqrt(mean(s_t^2) + eps)
    y_t = scale * (sum_{i<K} w_i * h_{t-i} + residual * h_t)

The normalised stream h is never written. It is rounded to the dtype of x before the convolution, as the norm alone
returns it and a state holds it; r, `[B, T]` float32, is saved for the backward. A program has all channels of LT
tokens: norms are sums over its threads, of up to four rows at a time. `branch` is what a block adds to the residual
stream before this norm, or None. With a branch, s is also returned, and the backward gets its gradient with that of y.
"""

import triton
import triton.language as tl
from torch import Tensor, float32

from canonlm.ops.kernels.host import or_any, packed_state, rowwise, some_or_none, summed, within_limits
from canonlm.ops.kernels.launches import launch_of
from canonlm.ops.kernels.primitives import (
    accumulate_gradients,
    code_at,
    combined,
    earlier,
    row_of,
    shifted,
    store_row,
    sums_of,
    taps_of,
    weighted,
    zeros,
)


@triton.jit
def added(x, branch, mask, HAS_BRANCH: tl.constexpr):
    """A row of s, rounded as it is stored."""
    row = row_of(x, mask, 0, False)
    if HAS_BRANCH:
        row = (row + row_of(branch, mask, 0, False)).to(x.dtype.element_ty).to(tl.float32)
    return row


@triton.jit
def normalised(row, r, weight, code, dtype: tl.constexpr, HAS_REACH: tl.constexpr):
    h = (row * r * weight).to(dtype).to(tl.float32)
    if HAS_REACH:
        h = tl.where((code & 8) != 0, 0.0, h)
    return h


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def forward(
    x, branch, weight, taps, state, reach, last, y, rstd, added_out, state_out, T, C, x_b, x_t, branch_b, branch_t,
    state_b, eps, scale,
    K: tl.constexpr, HAS_BRANCH: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr,
    HAS_LAST: tl.constexpr, WRITE_STATE: tl.constexpr, RESIDUAL: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    t0 = tile * LT
    c = tl.arange(0, BC)
    x_t, branch_t = x_t.to(tl.int64), branch_t.to(tl.int64)
    x_tile = x + b * x_b + t0.to(tl.int64) * x_t
    branch_tile = branch + b * branch_b + t0.to(tl.int64) * branch_t
    y_tile, added_tile = y + (b * T + t0) * C, added_out + (b * T + t0) * C
    codes, before = reach + b * T, state + b * state_b + c * K

    w = combined(taps_of(taps, c, C, K), scale, K, RESIDUAL)
    g = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    past = ()
    for i in tl.static_range(1, K):
        mask = c < tl.where(t0 >= i, C, 0)
        row = added(x_tile - i * x_t + c, branch_tile - i * branch_t + c, mask, HAS_BRANCH)
        r = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / C + eps)
        h = normalised(row, r, g, code_at(codes, t0 - i, T, HAS_REACH), dtype, HAS_REACH)
        if HAS_STATE:
            kept = tl.load(before + (K + t0 - i), mask=c < tl.where(t0 < i, C, 0), other=0.0)
            h += kept.to(dtype).to(tl.float32)
        past = past + (h,)

    for n in tl.range(0, LT, U, num_stages=STAGES):
        rows, squares, marks = (), (), ()
        for u in tl.static_range(0, U):
            j = n + u
            mask = c < tl.where(t0 + j < T, C, 0)
            row = added(x_tile + j * x_t + c, branch_tile + j * branch_t + c, mask, HAS_BRANCH)
            rows, squares = rows + (row,), squares + (row * row,)
            marks = marks + (code_at(codes, t0 + j, T, HAS_REACH),)
        sums = sums_of(squares, U)
        for u in tl.static_range(0, U):
            j = n + u
            mask = c < tl.where(t0 + j < T, C, 0)
            r = 1.0 / tl.sqrt(sums[u] / C + eps)
            h = normalised(rows[u], r, g, marks[u], dtype, HAS_REACH)
            store_row(y_tile + j * C + c, weighted(h, past, w, marks[u], K, HAS_REACH), mask)
            if HAS_BRANCH:
                store_row(added_tile + j * C + c, rows[u], mask)
            tl.store(rstd + b * T + t0 + j, r, mask=t0 + j < T)
            past = shifted(h, past, K)

    if WRITE_STATE:  # as in conv.forward
        end = T - 1
        if HAS_LAST:
            end = tl.load(last + b)
        own = tl.where(tile == tl.num_programs(0) - 1, C, 0)
        code = 7
        if HAS_REACH:
            code = tl.load(codes + end, mask=end >= 0, other=7).to(tl.int32) & 7
        after = state_out + (b * C + c) * K
        for i in tl.static_range(0, K):
            t = end - i
            j, mask = (t - t0).to(tl.int64), c < tl.where(t >= 0, own, 0)
            row = added(x_tile + j * x_t + c, branch_tile + j * branch_t + c, mask, HAS_BRANCH)
            r = 1.0 / tl.sqrt(tl.sum(row * row, axis=0) / C + eps)
            h = normalised(row, r, g, code_at(codes, t, T, HAS_REACH), dtype, HAS_REACH)
            if HAS_STATE:
                h += tl.load(before + (K + t), mask=c < tl.where(t < 0, own, 0), other=0.0).to(tl.float32)
            store_row(after + (K - 1 - i), tl.where(code >= i, h, 0.0), c < own)


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def backward(
    x, dy, flow, weight, taps, rstd, state, reach, dx, dstate, partials, T, C, x_b, x_t, dy_b, dy_t, flow_b, flow_t,
    state_b, scale,
    K: tl.constexpr, HAS_FLOW: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """It walks backwards, as `conv.backward`. `x` is s; `flow` is the gradient of s from its other readers."""
    tile, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    dtype: tl.constexpr = x.dtype.element_ty
    t0 = tile * LT
    c = tl.arange(0, BC)
    x_t, dy_t, flow_t = x_t.to(tl.int64), dy_t.to(tl.int64), flow_t.to(tl.int64)
    x_tile = x + b * x_b + t0.to(tl.int64) * x_t
    dy_tile = dy + b * dy_b + t0.to(tl.int64) * dy_t
    flow_tile = flow + b * flow_b + t0.to(tl.int64) * flow_t
    dx_tile = dx + (b * T + t0) * C
    codes = reach + b * T

    w, dw, dg = combined(taps_of(taps, c, C, K), scale, K, RESIDUAL), zeros(K, BC), tl.full([BC], 0.0, tl.float32)
    g = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    ahead, reaches = zeros(K - 1, BC), tile * 0
    for m in tl.static_range(1, K):
        i = K - 1 - m
        t = t0 + LT + i
        row = tl.load(dy_tile + (LT + i) * dy_t + c, mask=c < tl.where(t < T, C, 0), other=0.0).to(tl.float32)
        ahead, reaches = earlier(row, code_at(codes, t, T, HAS_REACH), ahead, reaches, K, HAS_REACH)

    for n in tl.range(0, LT, U, num_stages=STAGES):
        rows, dys, flows, marks, rs = (), (), (), (), ()
        for u in tl.static_range(0, U):
            j = LT - 1 - n - u
            mask = c < tl.where(t0 + j < T, C, 0)
            code = code_at(codes, t0 + j, T, HAS_REACH)
            rows = rows + (row_of(x_tile + j * x_t + c, mask, code, HAS_REACH),)
            dys = dys + (row_of(dy_tile + j * dy_t + c, mask, 0, False),)
            if HAS_FLOW:
                flows = flows + (row_of(flow_tile + j * flow_t + c, mask, 0, False),)
            r = tl.load(rstd + b * T + t0 + j, mask=t0 + j < T, other=0.0)
            if HAS_REACH:
                r = tl.where((code & 8) != 0, 0.0, r)
            marks, rs = marks + (code,), rs + (r,)
        dhs, products = (), ()
        for u in tl.static_range(0, U):
            unit = rows[u] * rs[u]
            h = normalised(rows[u], rs[u], g, 0, dtype, False)
            dh, dw = accumulate_gradients(dys[u] * w[0], dw, h, dys[u], ahead, w, K)
            dg += dh * unit
            dh *= g
            dhs, products = dhs + (dh,), products + (dh * unit,)
            ahead, reaches = earlier(dys[u], marks[u], ahead, reaches, K, HAS_REACH)
        sums = sums_of(products, U)
        for u in tl.static_range(0, U):
            j = LT - 1 - n - u
            row = rs[u] * (dhs[u] - rows[u] * (rs[u] * sums[u] / C))
            if HAS_FLOW:
                row += flows[u]
            store_row(dx_tile + j * C + c, row, c < tl.where(t0 + j < T, C, 0))

    if HAS_STATE:  # the tokens before the first: already normalised
        first = tl.where(tile == 0, C, 0)
        before, grad = state + b * state_b + c * K, dstate + (b * C + c) * K
        zero_row = tl.full([BC], 0.0, tl.float32)
        store_row(grad, zero_row, c < first)
        for m in tl.static_range(1, K):
            row = tl.load(before + (K - m), mask=c < first, other=0.0).to(dtype).to(tl.float32)
            dh, dw = accumulate_gradients(zero_row, dw, row, zero_row, ahead, w, K)
            store_row(grad + (K - m), dh, c < first)
            ahead, reaches = earlier(zero_row, 7, ahead, reaches, K, HAS_REACH)

    out = partials + ((b * tl.num_programs(0) + tile) * C + c) * (K + 1)
    for i in tl.static_range(0, K):
        tl.store(out + (K - 1 - i), dw[i] * scale, mask=c < C)
    tl.store(out + K, dg, mask=c < C)


def run_forward(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    state: Tensor | None,
    reach: Tensor | None,
    last: Tensor | None,
    *,
    residual: bool,
    scale: float,
    return_state: bool,
) -> list[Tensor]:
    """y, r, the sum if there is a branch, and the final state if `return_state`."""
    x, taps = rowwise(x), taps.contiguous()
    branch = branch if branch is None else rowwise(branch)
    batch, time, channels = x.shape
    kernel = taps.shape[-1]
    y, r = x.new_empty(x.shape), x.new_empty(batch, time, dtype=float32)
    s = [] if branch is None else [x.new_empty(x.shape)]
    state = packed_state(state)
    after = [x.new_empty(batch, channels, kernel)] if return_state else []
    launch = launch_of("normed_forward", x.device, kernel, batch, time, channels)
    forward[within_limits(max(1, -(-time // launch.tokens)), batch)](
        x, *or_any(x, branch), weight, taps, *or_any(x, state, reach, last), y, r, *or_any(x, *some_or_none(s)),
        *or_any(x, *some_or_none(after)), time, channels, *x.stride()[:2],
        *(x if branch is None else branch).stride()[:2],
        0 if state is None else state.stride(0), eps, scale,
        kernel, branch is not None, state is not None, reach is not None, last is not None, return_state, residual,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return [y, r, *s, *after]


def run_backward(
    dy: Tensor,
    flow: Tensor | None,
    x: Tensor,
    weight: Tensor,
    taps: Tensor,
    rstd: Tensor,
    state: Tensor | None,
    reach: Tensor | None,
    *,
    residual: bool,
    scale: float,
) -> list[Tensor]:
    """The gradients of x, the norm's weight, the taps and, if there is one, the state."""
    x, dy, taps = rowwise(x), rowwise(dy), taps.contiguous()
    flow = flow if flow is None else rowwise(flow)
    batch, time, channels = x.shape
    kernel = taps.shape[-1]
    launch = launch_of("normed_backward", x.device, kernel, batch, time, channels)
    tiles = max(1, -(-time // launch.tokens))
    dx = x.new_empty(x.shape)
    state = packed_state(state)
    dstate = [] if state is None else [state.new_empty(state.shape)]
    partials = x.new_empty(batch * tiles, channels, kernel + 1, dtype=float32)
    backward[within_limits(tiles, batch)](
        x, dy, *or_any(x, flow), weight, taps, rstd, *or_any(x, state, reach), dx, *or_any(x, *some_or_none(dstate)),
        partials, time, channels, *x.stride()[:2], *dy.stride()[:2], *(x if flow is None else flow).stride()[:2],
        0 if state is None else state.stride(0), scale,
        kernel, flow is not None, state is not None, reach is not None, residual,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return [dx, summed(partials[..., kernel], weight), summed(partials[..., :kernel], taps), *dstate]
