"""Triton kernels of Canon-D, activation and product: y = act(canon(gate)) * canon(up), forward and backward.

    canon(x)_t = scale * (sum_{i<K} w_i * x_{t-i} + residual * x_t)

act(gate) * up alone reads gate and up and writes y; with the convolutions it reads and writes no more. The backward
recomputes both convolutions from the rows that it reads anyway; nothing is saved. It walks forwards as
`conv.backward_act` does. A state is `[B, 2 * C, K]`, the gate's channels first.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor, float32

from canonlm.ops.kernels.host import grid_of, or_any, packed_state, rowwise, some_or_none, summed
from canonlm.ops.kernels.launches import launch_of
from canonlm.ops.kernels.primitives import (
    act,
    act_and_slope,
    code_at,
    combined,
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
    gate, up, gate_taps, up_taps, state, reach, last, y, state_out, T, C, gate_b, gate_t, up_b, up_t, state_b, scale,
    K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr, HAS_LAST: tl.constexpr,
    WRITE_STATE: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t0 = tile * LT
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    gate_t, up_t = gate_t.to(tl.int64), up_t.to(tl.int64)
    gate_tile = gate + b * gate_b + t0.to(tl.int64) * gate_t
    up_tile = up + b * up_b + t0.to(tl.int64) * up_t
    y_tile = y + (b * T + t0) * C
    codes = reach + b * T
    gate_before, up_before = state + b * state_b + c * K, state + b * state_b + (C + c) * K

    v = combined(taps_of(gate_taps, c, C, K), scale, K, RESIDUAL)
    w = combined(taps_of(up_taps, c, C, K), scale, K, RESIDUAL)
    gates, ups = (), ()
    for i in tl.static_range(1, K):
        code = code_at(codes, t0 - i, T, HAS_REACH)
        gates = gates + (row_before(gate_tile, gate_t, t0, i, c, C, gate_before, code, K, HAS_STATE, HAS_REACH),)
        ups = ups + (row_before(up_tile, up_t, t0, i, c, C, up_before, code, K, HAS_STATE, HAS_REACH),)

    for g in tl.range(0, LT, U, num_stages=STAGES):
        gate_rows, up_rows, marks = (), (), ()
        for u in tl.static_range(0, U):
            j = g + u
            code, mask = code_at(codes, t0 + j, T, HAS_REACH), c < tl.where(t0 + j < T, C, 0)
            gate_rows = gate_rows + (row_of(gate_tile + j * gate_t + c, mask, code, HAS_REACH),)
            up_rows = up_rows + (row_of(up_tile + j * up_t + c, mask, code, HAS_REACH),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            z = weighted(gate_rows[u], gates, v, marks[u], K, HAS_REACH)
            r = weighted(up_rows[u], ups, w, marks[u], K, HAS_REACH)
            store_row(y_tile + (g + u) * C + c, act(z, ACT) * r, c < tl.where(t0 + g + u < T, C, 0))
            gates, ups = shifted(gate_rows[u], gates, K), shifted(up_rows[u], ups, K)

    if WRITE_STATE:  # as in conv.forward
        end = T - 1
        if HAS_LAST:
            end = tl.load(last + b)
        own = tl.where(tile == tl.num_programs(1) - 1, C, 0)
        code = 7
        if HAS_REACH:
            code = tl.load(codes + end, mask=end >= 0, other=7).to(tl.int32) & 7
        after = state_out + b * 2 * C * K + c * K
        for i in tl.static_range(0, K):
            t = end - i
            pad, mask = code_at(codes, t, T, HAS_REACH), c < tl.where(t >= 0, own, 0)
            j = (t - t0).to(tl.int64)
            gate_row = row_of(gate_tile + j * gate_t + c, mask, pad, HAS_REACH)
            up_row = row_of(up_tile + j * up_t + c, mask, pad, HAS_REACH)
            if HAS_STATE:
                mask = c < tl.where(t < 0, own, 0)
                gate_row += tl.load(gate_before + (K + t), mask=mask, other=0.0).to(tl.float32)
                up_row += tl.load(up_before + (K + t), mask=mask, other=0.0).to(tl.float32)
            store_row(after + (K - 1 - i), tl.where(code >= i, gate_row, 0.0), c < own)
            store_row(after + (C * K + K - 1 - i), tl.where(code >= i, up_row, 0.0), c < own)


@triton.jit(do_not_specialize=["T"])  # lengths vary, and one of them is 1
def backward(
    gate, up, dy, gate_taps, up_taps, state, reach, dgate, dup, dstate, partials, T, C,
    gate_b, gate_t, up_b, up_t, dy_b, dy_t, state_b, scale,
    K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr, RESIDUAL: tl.constexpr, ACT: tl.constexpr,
    LT: tl.constexpr, BC: tl.constexpr, U: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile, b = tl.program_id(1), tl.program_id(2).to(tl.int64)
    t0 = tile * LT
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    gate_tile = gate + b * gate_b + t0.to(tl.int64) * gate_t
    up_tile = up + b * up_b + t0.to(tl.int64) * up_t
    dy_tile = dy + b * dy_b + t0.to(tl.int64) * dy_t
    dgate_tile, dup_tile = dgate + (b * T + t0) * C, dup + (b * T + t0) * C
    codes = reach + b * T
    gate_before, up_before = state + b * state_b + c * K, state + b * state_b + (C + c) * K
    gate_grad, up_grad = dstate + b * 2 * C * K + c * K, dstate + (b * 2 * C + C + c) * K

    v = combined(taps_of(gate_taps, c, C, K), scale, K, RESIDUAL)
    w = combined(taps_of(up_taps, c, C, K), scale, K, RESIDUAL)
    dv, dw, gate_pending, up_pending = zeros(K, BC), zeros(K, BC), zeros(K - 1, BC), zeros(K - 1, BC)
    pads, PAST = tile * 0, 1 << (K - 1)  # a bit per token, the current one's last: was it padding?
    gates, ups = (), ()
    for i in tl.static_range(1, K):
        code = code_at(codes, t0 - i, T, HAS_REACH)
        gates = gates + (row_before(gate_tile, gate_t, t0, i, c, C, gate_before, code, K, HAS_STATE, HAS_REACH),)
        ups = ups + (row_before(up_tile, up_t, t0, i, c, C, up_before, code, K, HAS_STATE, HAS_REACH),)
    if HAS_STATE:  # of the oldest inputs, which no tap reaches
        store_row(gate_grad, tl.full([BC], 0.0, tl.float32), c < tl.where(tile == 0, C, 0))
        store_row(up_grad, tl.full([BC], 0.0, tl.float32), c < tl.where(tile == 0, C, 0))

    for g in tl.range(0, LT, U, num_stages=STAGES):
        gate_rows, up_rows, flows, marks = (), (), (), ()
        for u in tl.static_range(0, U):
            j = g + u
            code, mask = code_at(codes, t0 + j, T, HAS_REACH), c < tl.where(t0 + j < T, C, 0)
            gate_rows = gate_rows + (row_of(gate_tile + j * gate_t + c, mask, code, HAS_REACH),)
            up_rows = up_rows + (row_of(up_tile + j * up_t + c, mask, code, HAS_REACH),)
            flows = flows + (tl.load(dy_tile + j * dy_t + c, mask=mask, other=0.0).to(tl.float32),)
            marks = marks + (code,)
        for u in tl.static_range(0, U):
            z = weighted(gate_rows[u], gates, v, marks[u], K, HAS_REACH)
            r = weighted(up_rows[u], ups, w, marks[u], K, HAS_REACH)
            value, slope = act_and_slope(z, ACT)
            dz, dr = flows[u] * r * slope, flows[u] * value
            dv = weight_gradients(dv, dz, gate_rows[u], gates, marks[u], K, HAS_REACH)
            dw = weight_gradients(dw, dr, up_rows[u], ups, marks[u], K, HAS_REACH)
            gate_sums = spread(gate_pending, dz, v, marks[u], K, HAS_REACH)
            up_sums = spread(up_pending, dr, w, marks[u], K, HAS_REACH)
            gate_done, up_done = gate_sums[K - 1], up_sums[K - 1]
            if HAS_REACH:
                pads = ((pads << 1) | (marks[u] >> 3)) & 255
                gate_done = tl.where((pads & PAST) != 0, 0.0, gate_done)
                up_done = tl.where((pads & PAST) != 0, 0.0, up_done)
            s = g + u - (K - 1)
            mask = c < tl.where((s >= 0) & (t0 + s < T), C, 0)
            store_row(dgate_tile + s * C + c, gate_done, mask)
            store_row(dup_tile + s * C + c, up_done, mask)
            if HAS_STATE:
                store_row(gate_grad + (K + t0 + s), gate_done, c < tl.where(t0 + s < 0, C, 0))
                store_row(up_grad + (K + t0 + s), up_done, c < tl.where(t0 + s < 0, C, 0))
            gates, ups = shifted(gate_rows[u], gates, K), shifted(up_rows[u], ups, K)
            gate_pending = shifted(gate_sums[0], gate_sums[1:], K)
            up_pending = shifted(up_sums[0], up_sums[1:], K)

    gate_rows, up_rows, flows, marks = (), (), (), ()
    for u in tl.static_range(0, K - 1):  # the next tile's first tokens, which complete the gradients of this one's last
        j = LT + u
        code, mask = code_at(codes, t0 + j, T, HAS_REACH), c < tl.where(t0 + j < T, C, 0)
        gate_rows = gate_rows + (row_of(gate_tile + j * gate_t + c, mask, code, HAS_REACH),)
        up_rows = up_rows + (row_of(up_tile + j * up_t + c, mask, code, HAS_REACH),)
        flows = flows + (tl.load(dy_tile + j * dy_t + c, mask=mask, other=0.0).to(tl.float32),)
        marks = marks + (code,)
    for u in tl.static_range(0, K - 1):
        z = weighted(gate_rows[u], gates, v, marks[u], K, HAS_REACH)
        r = weighted(up_rows[u], ups, w, marks[u], K, HAS_REACH)
        value, slope = act_and_slope(z, ACT)
        gate_sums = spread(gate_pending, flows[u] * r * slope, v, marks[u], K, HAS_REACH)
        up_sums = spread(up_pending, flows[u] * value, w, marks[u], K, HAS_REACH)
        gate_done, up_done = gate_sums[K - 1], up_sums[K - 1]
        if HAS_REACH:
            pads = ((pads << 1) | (marks[u] >> 3)) & 255
            gate_done = tl.where((pads & PAST) != 0, 0.0, gate_done)
            up_done = tl.where((pads & PAST) != 0, 0.0, up_done)
        s = LT + u - (K - 1)
        mask = c < tl.where(t0 + s < T, C, 0)
        store_row(dgate_tile + s * C + c, gate_done, mask)
        store_row(dup_tile + s * C + c, up_done, mask)
        gates, ups = shifted(gate_rows[u], gates, K), shifted(up_rows[u], ups, K)
        gate_pending = shifted(gate_sums[0], gate_sums[1:], K)
        up_pending = shifted(up_sums[0], up_sums[1:], K)

    out = partials + ((b * tl.num_programs(1) + tile) * 2 * C + c) * K
    for i in tl.static_range(0, K):
        tl.store(out + (K - 1 - i), dv[i] * scale, mask=c < C)
        tl.store(out + (C * K + K - 1 - i), dw[i] * scale, mask=c < C)


def run_forward(
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    state: Tensor | None,
    reach: Tensor | None,
    last: Tensor | None,
    *,
    residual: bool,
    act: int,
    scale: float,
    return_state: bool,
) -> list[Tensor]:
    """y, and the final state `[B, 2 * C, K]` if `return_state`."""
    gate, up, (gate_taps, up_taps) = rowwise(gate), rowwise(up), [tap.contiguous() for tap in taps]
    batch, time, channels = gate.shape
    kernel = gate_taps.shape[-1]
    y = gate.new_empty(gate.shape)
    state = packed_state(state)
    after = [gate.new_empty(batch, 2 * channels, kernel)] if return_state else []
    launch = launch_of("gated_forward", gate.device, kernel, batch, time, channels)
    forward[grid_of(launch, batch, time, [channels])](
        gate, up, gate_taps, up_taps, *or_any(gate, state, reach, last), y, *or_any(gate, *some_or_none(after)),
        time, channels, *gate.stride()[:2], *up.stride()[:2], 0 if state is None else state.stride(0), scale,
        kernel, state is not None, reach is not None, last is not None, return_state, residual, act,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return [y, *after]


def run_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    state: Tensor | None,
    reach: Tensor | None,
    *,
    residual: bool,
    act: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of gate, up, both taps and, if there is one, the state."""
    dy, gate, up = rowwise(dy), rowwise(gate), rowwise(up)
    # Elsewhere strides are int64 in the kernel; here that would spill registers.
    dy, gate, up = (x if x.stride(1) < 2**22 else x.contiguous() for x in (dy, gate, up))
    gate_taps, up_taps = (tap.contiguous() for tap in taps)
    batch, time, channels = gate.shape
    kernel = gate_taps.shape[-1]
    launch = launch_of("gated_backward", gate.device, kernel, batch, time, channels)
    grid = grid_of(launch, batch, time, [channels])
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    state = packed_state(state)
    dstate = [] if state is None else [state.new_empty(state.shape)]
    partials = gate.new_empty(batch * grid[1], 2, channels, kernel, dtype=float32)
    backward[grid](
        gate, up, dy, gate_taps, up_taps, *or_any(gate, state, reach), dgate, dup, *or_any(gate, *some_or_none(dstate)),
        partials, time, channels, *gate.stride()[:2], *up.stride()[:2], *dy.stride()[:2],
        0 if state is None else state.stride(0), scale,
        kernel, state is not None, reach is not None, residual, act,
        launch.tokens, launch.channels, launch.rows, launch.stages, num_warps=launch.warps, maxnreg=launch.registers,
    )  # fmt: skip
    return [dgate, dup, *(summed(partials[:, i], tap) for i, tap in enumerate(taps)), *dstate]
