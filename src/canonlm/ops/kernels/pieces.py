"""What the kernels have in common. Triton functions; imported only where Triton is."""

import triton
import triton.language as tl

SILU = 1
GELU_TANH = 2


@triton.jit
def pick(values, index):
    """`values[index]` of a few arguments: a chain of selects, so that the kernel's body exists once."""
    chosen = values[0]
    for i in tl.static_range(1, len(values)):
        chosen = tl.where(index == i, values[i], chosen)
    return chosen


@triton.jit
def locate(sizes, pid, BC: tl.constexpr):
    """Which tensor a program works on, which block of its channels, and the channels of the tensors before it."""
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
def row_of(pointer, mask, code, HAS_REACH: tl.constexpr):
    """A row of the input in float32, zero where it is masked or padding."""
    row = tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    if HAS_REACH:
        row = tl.where((code & 8) != 0, 0.0, row)
    return row


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def act(x, ACT: tl.constexpr):
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
