"""silu(conv(gate)) * conv(up) on a CPU, compiled by numba: one pass over the inputs in each direction.

The backward recomputes both convolutions. A block is some tokens of one row of the batch; for the gradients of its
inputs it also needs those of the convolutions at the K - 1 tokens after it, which it computes itself.

All numbers are float32. Imported when the first kernel runs; `gated_conv_cpu` calls it.
"""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numba import carray, float32, from_dtype, types
from numba.extending import intrinsic

from canonlm.core.numba_cache import cfunc
from canonlm.ops import numba_conv
from canonlm.ops.numba_conv import GROUP, TOKENS, Lanes, addresses, all_joined, at, joined, next_block, over

SIZE = 4
"""Bytes of a number."""

STRIP = 512
"""Channels that the backward processes at a time: wider rows of a few tokens would not stay in the first caches."""

# Addresses and strides are in bytes; outputs lie side by side. `weight` and `partials` hold those of gate, then of up.
Work: Any = np.dtype(
    [
        (name, np.int64)
        for name in (
            "taken",  # blocks, so far
            *("gate", "up", "dy", "out", "out_up", "weight", "partials", "doc_ids"),
            *("batch", "length", "channels"),
            *("gate_batch", "gate_time", "up_batch", "up_time", "dy_batch", "dy_time"),
        )
    ]
)

EXP = (0.00019852762, 0.0013930436, 0.008333361, 0.041666485, 0.16666667, 0.5)
"""exp(r) = 1 + r + r^2 (0.5 + 0.16666667 r + …), the highest power first, for |r| <= ln(2) / 2."""

LN2 = (0.69314575, 1.4286068e-06)
"""In two parts: n times the first is exact."""

SHIFT = 1.5 * 2.0**23
"""Added to a small number, it leaves the nearest integer in the lowest bits."""


def _one_plus_exp(lanes: Lanes, x: Any) -> Any:
    """1 + exp(-x), by the steps of SLEEF's `Sleef_expf_u10`, which torch calls: SiLU is torch's to the bit."""
    build, real, fused = lanes.builder, lanes.constant, lanes.sum_of_products
    z = build.fneg(x)
    # Beyond these bounds, the sum is 1 or so large that 1 / sum is a denormal number or 0 in any case.
    for bound, is_beyond in ((100.0, ">"), (-104.0, "<")):
        z = build.select(build.fcmp_ordered(is_beyond, z, real(bound)), real(bound), z)
    shifted = build.fadd(build.fmul(z, real(1.442695040888963407)), real(SHIFT))
    n = build.fsub(shifted, real(SHIFT))
    r = fused([(n, real(-LN2[1]))], fused([(n, real(-LN2[0]))], z))
    power = real(EXP[0])
    for coefficient in EXP[1:]:
        power = fused([(power, r)], real(coefficient))
    power = build.fadd(real(1.0), fused([(build.fmul(r, r), power)], r))
    # 2^n as two factors, because n may be beyond a float's exponent.
    half = build.ashr(build.sub(lanes.bits(shifted), lanes.integer(_bits(SHIFT))), lanes.integer(1))
    rest = build.sub(build.sub(lanes.bits(shifted), lanes.integer(_bits(SHIFT))), half)
    for exponent in (half, rest):
        factor = build.shl(build.add(exponent, lanes.integer(127)), lanes.integer(23))
        power = build.fmul(power, build.bitcast(factor, x.type))
    return build.fadd(real(1.0), power)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _convolutions(lanes: Lanes, xs: list[Any], taps: list[Any], tokens: int) -> list[Any]:
    """The convolution of `tokens` neighbouring tokens. xs: from the K - 1 tokens before the first to the last; taps:
    newest first."""
    last = len(taps) - 1
    return [lanes.sum_of_products((xs[last + token - i], tap) for i, tap in enumerate(taps)) for token in range(tokens)]


@intrinsic(prefer_literal=True)
def _forward_rows(typing_context, table, channels, kernel, group):
    """`group` tokens. table: addresses of their y; of gate from the K - 1 tokens before the first to the last; of up
    likewise; of the taps of gate, newest first; of those of up."""

    def build(context, builder, signature, arguments):
        taps, tokens = kernel.literal_value, group.literal_value
        span = tokens + taps - 1
        outs, gates, ups, gate_taps, up_taps = addresses(builder, arguments[0], tokens, span, span, taps, taps)
        for lanes in over(builder, arguments[1], "float32"):
            load = lanes.load
            gs = _convolutions(lanes, list(map(load, gates)), list(map(load, gate_taps)), tokens)
            us = _convolutions(lanes, list(map(load, ups)), list(map(load, up_taps)), tokens)
            for out, g, u in zip(outs, gs, us, strict=True):
                lanes.store(out, builder.fmul(builder.fdiv(g, _one_plus_exp(lanes, g)), u))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), channels, kernel, group), build


@intrinsic(prefer_literal=True)
def _backward_rows(typing_context, table, channels, kernel, group):
    """`group` tokens, which complete the gradients of `group` inputs: those K - 1 tokens before.

    table: addresses of their dy; then, for gate and after it for up: of the completed gradients; of the inputs from the
    K - 1 tokens before the first to the last; of the taps, newest first; of the sums for their gradients; of the places
    for the tokens' gradients of the convolutions; and of these gradients from the K - 1 tokens before the first to the
    last.
    """

    def build(context, builder, signature, arguments):
        taps, tokens = kernel.literal_value, group.literal_value
        span = tokens + taps - 1
        counts = tokens, span, taps, taps, tokens, span
        dys, *rest = addresses(builder, arguments[0], tokens, *counts, *counts)
        sides = rest[:6], rest[6:]
        for lanes in over(builder, arguments[1], "float32"):
            xs = [list(map(lanes.load, inputs)) for _, inputs, *_ in sides]
            ws = [list(map(lanes.load, rows)) for _, _, rows, *_ in sides]
            gs, us = (_convolutions(lanes, x, w, tokens) for x, w in zip(xs, ws, strict=True))
            flows = [], []
            for row, g, u in zip(dys, gs, us, strict=True):
                dy = lanes.load(row)
                sigmoid = builder.fdiv(lanes.constant(1.0), _one_plus_exp(lanes, g))
                complement = builder.fsub(lanes.constant(1.0), sigmoid)
                slope = builder.fmul(sigmoid, lanes.sum_of_products([(g, complement)], lanes.constant(1.0)))
                flows[0].append(builder.fmul(builder.fmul(dy, u), slope))
                flows[1].append(builder.fmul(dy, builder.fmul(g, sigmoid)))
            for (outs, _, _, sums, places, read), x, w, flow in zip(sides, xs, ws, flows, strict=True):
                for place, value in zip(places, flow, strict=True):
                    lanes.store(place, value)
                seen = list(map(lanes.load, read))
                for token, out in enumerate(outs):
                    lanes.store(out, lanes.sum_of_products((seen[token + i], w[i]) for i in range(taps)))
                for i, row in enumerate(sums):
                    pairs = ((flow[token], x[taps - 1 + token - i]) for token in range(tokens))
                    lanes.store(row, lanes.sum_of_products(pairs, lanes.load(row)))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), channels, kernel, group), build


def compiled(direction: str, kernel: int) -> Any:
    """As `cpu_rows.compiled`, for a `Work` of this module."""
    # numba's cache only notices edits of this file, but it also compares the values that a function closes over.
    rows_sha256 = hashlib.sha256(Path(numba_conv.__file__).read_bytes()).hexdigest()

    def forward(pointer):
        rows_sha256  # noqa: B018
        work = carray(pointer, 1)[0]
        channels, length = work.channels, work.length
        row_size = channels * SIZE
        zeros, table = np.zeros(channels, float32), np.empty(3 * GROUP + 4 * kernel, np.int64)
        while True:
            block, row, start, doc_ids = next_block(pointer, work)
            if block < 0:
                return
            gate, up = work.gate + row * work.gate_batch, work.up + row * work.up_batch
            p, end = start, min(length, start + TOKENS)
            while p < end:
                first = p - kernel + 1
                is_full = p + GROUP <= end and first >= 0 and all_joined(doc_ids, first, p + GROUP)
                group = GROUP if is_full else 1
                span = group + kernel - 1
                for k in range(group):
                    table[k] = work.out + (row * length + p + k) * row_size
                for k in range(span):
                    reads = is_full or joined(doc_ids, p, first + k, 0, length)
                    table[group + k] = gate + (first + k) * work.gate_time if reads else zeros.ctypes.data
                    table[group + span + k] = up + (first + k) * work.up_time if reads else zeros.ctypes.data
                for i in range(2 * kernel):
                    tap = kernel - 1 - i if i < kernel else 3 * kernel - 1 - i
                    table[group + 2 * span + i] = work.weight + tap * row_size
                if is_full:
                    _forward_rows(table.ctypes, channels, kernel, GROUP)
                else:
                    _forward_rows(table.ctypes, channels, kernel, 1)
                p += group

    def backward(pointer):
        rows_sha256  # noqa: B018
        work = carray(pointer, 1)[0]
        channels, length = work.channels, work.length
        row_size = channels * SIZE
        ring_size = GROUP + kernel - 1
        # The gradients of the convolutions at the last tokens, for gate and for up; and a row for unused results.
        ring, unused = np.zeros((2 * ring_size, STRIP), float32), np.zeros(STRIP, float32)
        zeros, table = np.zeros(STRIP, float32), np.empty(7 * GROUP + 8 * kernel, np.int64)
        while True:
            block, row, start, doc_ids = next_block(pointer, work)
            if block < 0:
                return
            all_sums = work.partials + block * 2 * kernel * row_size
            carray(at(all_sums, float32), 2 * kernel * channels)[:] = 0
            for first_channel in range(0, channels, STRIP):
                strip, width = first_channel * SIZE, min(STRIP, channels - first_channel)
                dy = work.dy + row * work.dy_batch + strip
                ring[:] = 0
                p, end = start, min(length, start + TOKENS)
                while p < end + kernel - 1:
                    first = p - kernel + 1
                    is_full = p + GROUP <= end and first >= 0 and all_joined(doc_ids, first, p + GROUP)
                    group = GROUP if is_full else 1
                    span = group + kernel - 1
                    for k in range(group):
                        table[k] = dy + (p + k) * work.dy_time if p + k < length else zeros.ctypes.data
                    place = group
                    for side in range(2):
                        x = (work.up + row * work.up_batch if side else work.gate + row * work.gate_batch) + strip
                        x_time = work.up_time if side else work.gate_time
                        out = (work.out_up if side else work.out) + row * length * row_size + strip
                        ring_start = ring.ctypes.data + side * ring_size * STRIP * SIZE
                        for k in range(group):
                            is_own = first + k >= start
                            table[place + k] = out + (first + k) * row_size if is_own else unused.ctypes.data
                        place += group
                        for k in range(span):
                            reads = is_full or (p < length and joined(doc_ids, p, first + k, 0, length))
                            table[place + k] = x + (first + k) * x_time if reads else zeros.ctypes.data
                        place += span
                        for i in range(kernel):
                            offset = (side * kernel + kernel - 1 - i) * row_size + strip
                            table[place + i] = work.weight + offset
                            table[place + kernel + i] = all_sums + offset if p < end else unused.ctypes.data
                        place += 2 * kernel
                        for k in range(group):
                            table[place + k] = ring_start + (p + k) % ring_size * STRIP * SIZE
                        place += group
                        for k in range(span):
                            q = first + k
                            reads = is_full or (first >= start and joined(doc_ids, first, q, 0, length))
                            table[place + k] = ring_start + q % ring_size * STRIP * SIZE if reads else zeros.ctypes.data
                        place += span
                    if is_full:
                        _backward_rows(table.ctypes, width, kernel, GROUP)
                    else:
                        _backward_rows(table.ctypes, width, kernel, 1)
                    p += group

    signature = types.void(types.CPointer(from_dtype(Work)))
    function = {"forward": forward, "backward": backward}[direction]
    return cfunc(signature, nopython=True)(function)
