"""Triton functions that the kernels share; imported only if Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def pick(values, index):
    """`values[index]` of a few arguments: a chain of selects, so that the kernel's body exists once."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def locate(sizes, pid, BC: tl.constexpr):
    """The tensor that a program works on, its block of channels, and the channels of the tensors before it."""
    index = pid * 0
    first = pid * 0
    offset = pid * 0
    blocks = pid * 0
    channels = pid * 0
    for i in tl.static_range(0, len(sizes) - 1):
        blocks += tl.cdiv(sizes[i], BC)
        channels += sizes[i]
        past = pid >= blocks
        index = tl.where(past, i + 1, index)
        first = tl.where(past, blocks, first)
        offset = tl.where(past, channels, offset)
    return index, pid - first, offset


@triton.jit
def code_at(codes, t, T, HAS_REACH: tl.constexpr):
    """The byte of `reach` at a token (see `documents`); 0 outside of the row, 7 if there is no `reach`."""
    if HAS_REACH:
        return tl.load(codes + t, mask=(t >= 0) & (t < T), other=0).to(tl.int32)
    else:
        return 7


@triton.jit
def row_of(pointer, mask, code, HAS_REACH: tl.constexpr):
    """A row of the input in float32, zero where it is masked or padding."""
    row = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if HAS_REACH:
        row = tl.where((code & 8) != 0, 0.0, row)
    return row


@triton.jit
def row_before(
    x_tile, stride, t0, i, c, C, state, code, K: tl.constexpr, HAS_STATE: tl.constexpr, HAS_REACH: tl.constexpr
):
    """The row i tokens before a tile that begins at t0: of the input, or of `state`, which points to these channels."""
    row = row_of(x_tile - i * stride + c, c < tl.where(t0 >= i, C, 0), code, HAS_REACH)
    if HAS_STATE:
        kept = tl.load(state + (K + t0 - i), mask=c < tl.where(t0 < i, C, 0), other=0.0)
        row += kept.to(x_tile.dtype.element_ty).to(tl.float32)
    return row


@triton.jit
def taps_of(taps, c, C, K: tl.constexpr):
    """The tap for i tokens back, for i = 0 … K - 1."""
    w = ()
    for i in tl.static_range(0, K):
        w = w + (tl.load(taps + c * K + (K - 1 - i), mask=c < C, other=0.0).to(tl.float32),)
    return w


@triton.jit
def combined(w, scale, K: tl.constexpr, RESIDUAL: tl.constexpr):
    """Taps, the residual and the scale as one convolution."""
    taps = ()
    for i in tl.static_range(0, K):
        tap = w[i]
        if RESIDUAL:
            if i == 0:
                tap += 1.0
        taps = taps + (tap * scale,)
    return taps


@triton.jit
def zeros(n: tl.constexpr, BC: tl.constexpr):
    rows = ()
    for _ in tl.static_range(0, n):
        rows = rows + (tl.full([BC], 0.0, tl.float32),)
    return rows


@triton.jit
def weighted(row, past, w, mark, K: tl.constexpr, HAS_REACH: tl.constexpr):
    """sum_i w_i * x_{t-i} over the taps within the token's reach."""
    z = row * w[0]
    for i in tl.static_range(1, K):
        if HAS_REACH:
            z += tl.where((mark & 7) >= i, w[i], 0.0) * past[i - 1]
        else:
            z += w[i] * past[i - 1]
    return z


@triton.jit
def accumulate_gradients(dx, dw, row, flow, ahead, w, K: tl.constexpr):
    """dx + sum_{i>0} w_i * dy_{t+i}, and dw_i + x_t * dy_{t+i}, with the rows of `earlier`."""
    sums = (dw[0] + row * flow,)
    for i in tl.static_range(1, K):
        dx += ahead[i - 1] * w[i]
        sums = sums + (dw[i] + row * ahead[i - 1],)
    return dx, sums


@triton.jit
def earlier(flow, mark, ahead, reaches, K: tl.constexpr, HAS_REACH: tl.constexpr):
    """dy_{t+1} … dy_{t+K-1} for the token before: `flow` comes in, the last leaves, and a row becomes zero when its
    token does not reach back so far. `reaches` has four bits for the reach of each."""
    if HAS_REACH:
        reaches = (reaches << 4) | (mark & 7)
    rows = shifted(flow, ahead, K)
    near = ()
    for i in tl.static_range(0, K - 1):
        row = rows[i]
        if HAS_REACH:
            row = tl.where(((reaches >> (4 * i)) & 7) > i, row, 0.0)
        near = near + (row,)
    return near, reaches


@triton.jit
def weight_gradients(dw, dz, row, past, mark, K: tl.constexpr, HAS_REACH: tl.constexpr):
    """dw_i + dz_t * x_{t-i}"""
    sums = (dw[0] + dz * row,)
    for i in tl.static_range(1, K):
        flow = dz
        if HAS_REACH:
            flow = tl.where((mark & 7) >= i, dz, 0.0)
        sums = sums + (dw[i] + flow * past[i - 1],)
    return sums


@triton.jit
def spread(pending, dz, w, mark, K: tl.constexpr, HAS_REACH: tl.constexpr):
    """dx_{t-i} + w_i * dz_t for i = 0 … K - 1, of which the last is then complete."""
    sums = (dz * w[0],)
    for i in tl.static_range(1, K):
        flow = dz
        if HAS_REACH:
            flow = tl.where((mark & 7) >= i, dz, 0.0)
        sums = sums + (pending[i - 1] + flow * w[i],)
    return sums


@triton.jit
def shifted(row, past, K: tl.constexpr):
    """`past` one token later: `row` comes in, the oldest leaves.

    The casts do nothing on a GPU. Without them a loop hands some rows on as they came in, and Triton does not load a
    loop's rows ahead of time if a value lives for longer than to the next round.
    """
    rows = ()
    if K > 1:
        rows = (row,)
        for i in tl.static_range(0, K - 2):
            rows = rows + (past[i].to(tl.int32, bitcast=True).to(tl.float32, bitcast=True),)
    return rows


@triton.jit
def sums_of(rows, U: tl.constexpr):
    """The sums of one, two or four rows in one reduction, which waits for all warps only once."""
    if U == 4:
        pairs = tl.join(tl.join(rows[0], rows[1]), tl.join(rows[2], rows[3]))
        first, second = tl.split(tl.sum(pairs, axis=0))
        a, b = tl.split(first)
        c, d = tl.split(second)
        return a, b, c, d
    elif U == 2:
        a, b = tl.split(tl.sum(tl.join(rows[0], rows[1]), axis=0))
        return a, b
    else:
        return (tl.sum(rows[0], axis=0),)


@triton.jit
def store_row(pointer, row, mask):
    tl.store(pointer, row.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x, ACT: tl.constexpr):
    """An activation, by its number in `ACTIVATIONS` (api.py)."""
    if ACT == 1:
        return x * sigmoid(x)
    elif ACT == 2:
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        return x


@triton.jit
def act_and_slope(x, ACT: tl.constexpr):
    """The activation and its derivative."""
    if ACT == 1:
        s = sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    elif ACT == 2:
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        return x, x * 0.0 + 1.0
