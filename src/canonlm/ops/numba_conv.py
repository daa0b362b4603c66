"""The causal convolution on a CPU, compiled by numba: each pass reads its inputs and writes its result once.

Arithmetic on rows of channels is written as LLVM vectors: numba's own loops check each time whether the rows overlap,
and with this many rows they are not vectorized. A block is some tokens of one row of the batch, and its results depend
on nothing else, so threads may take blocks in any order.

Imported when the first convolution runs; `causal_conv_cpu` calls it.
"""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, float64, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from canonlm.core.numba_cache import cfunc

TOKENS = 128
"""Tokens of a block. Each block has its own sum for the gradient of the taps."""

GROUP = 4
"""Tokens that the backward processes at once: seven rows of x and of dy are then read for four rows of dx."""

VECTOR = 64
"""Bytes of a vector."""

# Addresses and strides are in bytes. A position counts from a row's first input, its history included.
Work: Any = np.dtype(
    [
        (name, np.int64)
        for name in (
            "taken",  # blocks, so far
            *("x", "dy", "out", "weight", "partials", "doc_ids"),
            *("batch", "length", "history", "channels"),
            *("x_batch", "x_time", "dy_batch", "dy_time"),
        )
    ]
)

FLOAT, DOUBLE, I16, I32, I64 = ir.FloatType(), ir.DoubleType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)


class Lanes:
    """Neighbouring channels of some rows, as one vector each; or one channel, as a number.

    stored: "float32", "float64" or "bfloat16". Sums are in at least float32.
    """

    def __init__(self, builder: Any, stored: str, first: Any, width: int) -> None:
        self.builder, self.stored, self.first, self.width = builder, stored, first, width
        self.real = DOUBLE if stored == "float64" else FLOAT

    def load(self, row: Any) -> Any:
        """Load lanes of a row of inputs."""
        if self.stored != "bfloat16":
            return self.load_sums(row)
        bits = self._load(row, I16)
        wide = self.builder.shl(self.builder.zext(bits, self._kind(I32)), self.integer(16))
        return self.builder.bitcast(wide, self._kind(FLOAT))

    def store(self, row: Any, value: Any) -> None:
        if self.stored != "bfloat16":
            return self.store_sums(row, value)
        build = self.builder
        # The upper half of its bits, rounded to nearest, and to even between two.
        bits = build.bitcast(value, self._kind(I32))
        is_odd = build.and_(build.lshr(bits, self.integer(16)), self.integer(1))
        upper = build.lshr(build.add(build.add(bits, self.integer(0x7FFF)), is_odd), self.integer(16))
        upper = build.select(build.fcmp_unordered("uno", value, value), self.integer(0x7FC0), upper)
        self._store(row, build.trunc(upper, self._kind(I16)), I16)

    def load_sums(self, row: Any) -> Any:
        """Load lanes of a row of weights, or of sums."""
        return self._load(row, self.real)

    def store_sums(self, row: Any, value: Any) -> None:
        self._store(row, value, self.real)

    def sum_of_products(self, pairs: Iterable[tuple[Any, Any]], start: Any = None) -> Any:
        """The sum from the first pair to the last, fused where the processor can: as `torch.addcmul`, bit by bit."""
        kind = self._kind(self.real)
        name = f"llvm.fmuladd.{f'v{self.width}' if self.width > 1 else ''}f{8 * _bytes(self.real)}"
        function = cgutils.get_or_insert_function(self.builder.module, ir.FunctionType(kind, [kind] * 3), name)
        for a, b in pairs:
            start = self.builder.fmul(a, b) if start is None else self.builder.call(function, (a, b, start))
        return start

    def _kind(self, scalar: Any) -> Any:
        return ir.VectorType(scalar, self.width) if self.width > 1 else scalar

    def integer(self, value: int) -> Any:
        return ir.Constant(self._kind(I32), [value] * self.width if self.width > 1 else value)

    def _load(self, row: Any, scalar: Any) -> Any:
        value = self.builder.load(self._place(row, scalar))
        value.align = _bytes(scalar)
        return value

    def _store(self, row: Any, value: Any, scalar: Any) -> None:
        self.builder.store(value, self._place(row, scalar)).align = _bytes(scalar)

    def _place(self, row: Any, scalar: Any) -> Any:
        offset = self.builder.mul(self.first, ir.Constant(I64, _bytes(scalar)))
        return self.builder.inttoptr(self.builder.add(row, offset), self._kind(scalar).as_pointer())


def _bytes(scalar: Any) -> int:
    return {"float": 4, "double": 8, "i16": 2}[str(scalar)]


def over(builder: Any, channels: Any, stored: str) -> Iterable[Lanes]:
    """All channels: vectors first, then the remaining channels one by one."""
    width = VECTOR // (8 if stored == "float64" else 4)
    vector_end = builder.and_(channels, ir.Constant(I64, -width))
    for lanes, first, end in ((width, ir.Constant(I64, 0), vector_end), (1, vector_end, channels)):
        with cgutils.for_range_slice(builder, first, end, ir.Constant(I64, lanes), intp=I64) as (channel, _):
            yield Lanes(builder, stored, channel, lanes)


def addresses(builder: Any, table: Any, *counts: int) -> list[list[Any]]:
    """The rows that `table` lists, in lists of these lengths."""
    rows = (builder.load(builder.gep(table, [ir.Constant(I64, place)])) for place in itertools.count())
    return [list(itertools.islice(rows, count)) for count in counts]


@intrinsic(prefer_literal=True)
def _forward_row(typing_context, table, channels, kernel, stored):
    """One token. table: addresses of y; of x at the token, at the one before it, …; of their taps."""

    def build(context, builder, signature, arguments):
        taps = kernel.literal_value
        (y,), xs, ws = addresses(builder, arguments[0], 1, taps, taps)
        for lanes in over(builder, arguments[1], stored.literal_value):
            pairs = [(lanes.load(x), lanes.load_sums(w)) for x, w in zip(xs, ws, strict=True)]
            lanes.store(y, lanes.sum_of_products(pairs))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), channels, kernel, stored), build


@intrinsic(prefer_literal=True)
def _backward_rows(typing_context, table, channels, kernel, group, stored):
    """`group` tokens. table: addresses of their dx; of x from the K - 1 tokens before the first to the last; of dy from
    the first to the K - 1 tokens after the last; of the taps, newest first; of the sums for their gradients."""

    def build(context, builder, signature, arguments):
        taps, tokens = kernel.literal_value, group.literal_value
        span = tokens + taps - 1
        outs, xs, dys, ws, sums = addresses(builder, arguments[0], tokens, span, span, taps, taps)
        for lanes in over(builder, arguments[1], stored.literal_value):
            x, dy = [lanes.load(row) for row in xs], [lanes.load(row) for row in dys]
            w = [lanes.load_sums(row) for row in ws]
            for token, out in enumerate(outs):
                lanes.store(out, lanes.sum_of_products((dy[token + i], w[i]) for i in range(taps)))
            for i, row in enumerate(sums):
                pairs = ((dy[token], x[taps - 1 + token - i]) for token in range(tokens))
                lanes.store_sums(row, lanes.sum_of_products(pairs, lanes.load_sums(row)))
        return context.get_dummy_value()

    return types.void(types.CPointer(types.int64), channels, kernel, group, stored), build


@intrinsic
def take(typing_context, counter):
    """Increment a counter that threads share; returns its old value."""

    def build(context, builder, signature, arguments):
        place = builder.bitcast(arguments[0], I64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(I64, 1), "monotonic")

    return types.int64(counter), build


@intrinsic
def at(typing_context, address, scalar):
    def build(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(scalar.dtype)(address, scalar), build


@njit
def joined(doc_ids, p, q, first, end):
    """Whether position q exists, `first` <= q < `end`, and is in the document of position p."""
    return first <= q < end and (doc_ids.size == 0 or doc_ids[p] == doc_ids[q])


@njit
def all_joined(doc_ids, first, end):
    if doc_ids.size:
        for p in range(first + 1, end):
            if doc_ids[p] != doc_ids[first]:
                return False
    return True


@njit
def next_block(pointer, work):
    """A block that no thread has taken: (its number, its row, its first token, the row's document ids or an empty
    array). The number is -1 when all are taken."""
    blocks = -(-work.length // TOKENS)
    block = take(pointer)
    is_left = block < work.batch * blocks
    row = block // blocks
    doc_ids = carray(at(work.doc_ids + 8 * row * work.length, np.int64), work.length if work.doc_ids and is_left else 0)
    return block if is_left else -1, row, block % blocks * TOKENS, doc_ids


def compiled(direction: str, kernel: int, stored: str) -> Any:
    """The "forward" or the "backward" for K = `kernel` taps: a C function that takes the address of one `Work`, in any
    number of threads. Arrays have the dtype `stored`; weights and partial sums at least float32.

    Tokens outside the row, or in another document, count as zeros.
    """
    real = float64 if stored == "float64" else float32
    size, wide = {"bfloat16": 2, "float32": 4, "float64": 8}[stored], 8 if stored == "float64" else 4

    def forward(pointer):
        work = carray(pointer, 1)[0]
        channels, length, history = work.channels, work.length, work.history
        zeros, table = np.zeros(channels, real), np.empty(1 + 2 * kernel, np.int64)
        for i in range(kernel):
            table[1 + kernel + i] = work.weight + (kernel - 1 - i) * channels * wide
        while True:
            block, row, start, doc_ids = next_block(pointer, work)
            if block < 0:
                return
            for p in range(max(history, start), min(length, start + TOKENS)):
                table[0] = work.out + (row * (length - history) + p - history) * channels * size
                for i in range(kernel):
                    address = work.x + row * work.x_batch + (p - i) * work.x_time
                    table[1 + i] = address if joined(doc_ids, p, p - i, 0, length) else zeros.ctypes.data
                _forward_row(table.ctypes, channels, kernel, stored)

    def backward(pointer):
        work = carray(pointer, 1)[0]
        channels, length, history = work.channels, work.length, work.history
        zeros, table = np.zeros(channels, real), np.empty(3 * GROUP + 4 * kernel, np.int64)
        while True:
            block, row, start, doc_ids = next_block(pointer, work)
            if block < 0:
                return
            x, dy_time = work.x + row * work.x_batch, work.dy_time
            dy = work.dy + row * work.dy_batch - history * dy_time
            sums = work.partials + block * kernel * channels * wide
            carray(at(sums, real), kernel * channels)[:] = 0
            p, end = start, min(length, start + TOKENS)
            while p < end:
                first, last = p - kernel + 1, p + GROUP + kernel - 1
                is_inside = p + GROUP <= end and first >= 0 and p >= history and last <= length
                is_full = is_inside and all_joined(doc_ids, first, last)
                group = GROUP if is_full else 1
                span = group + kernel - 1
                for k in range(group):
                    table[k] = work.out + (row * length + p + k) * channels * size
                for k in range(span):
                    q = first + k
                    reads = is_full or (p >= history and joined(doc_ids, p, q, 0, length))
                    table[group + k] = x + q * work.x_time if reads else zeros.ctypes.data
                    reads = is_full or joined(doc_ids, p, p + k, history, length)
                    table[group + span + k] = dy + (p + k) * dy_time if reads else zeros.ctypes.data
                for i in range(kernel):
                    offset = (kernel - 1 - i) * channels * wide
                    table[group + 2 * span + i] = work.weight + offset
                    table[group + 2 * span + kernel + i] = sums + offset
                if is_full:
                    _backward_rows(table.ctypes, channels, kernel, GROUP, stored)
                else:
                    _backward_rows(table.ctypes, channels, kernel, 1, stored)
                p += group

    signature = types.void(types.CPointer(from_dtype(Work)))
    function = {"forward": forward, "backward": backward}[direction]
    return cfunc(signature, nopython=True)(function)
