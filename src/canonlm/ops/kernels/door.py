"""The kernels as functions of tensors: differentiable, traced by compilers as single operators, the same on any device.

Triton is imported when the first kernel runs. Every function takes `[B, T, C]` inputs in bfloat16, float16 or float32
whose channels lie side by side, sums in float32 and rounds a result once. Several tensors are computed in one launch.

What the arguments are, everywhere:
    taps: `[C, 1, K]` or `[C, K]`, K <= 8, without the residual; the last one multiplies the current token.
    state: `[B, sum of C, K]`, the last K inputs before these, of all tensors side by side, or None for zeros.
    reach, last: see `documents`; made once per batch. None: one document a row; no padding.
    activation: one of ACTIVATIONS.
"""

import functools
import importlib.util
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from canonlm.ops.kernels import operators as operators  # registers them
from canonlm.ops.kernels.documents import MAX_KERNEL

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_pytorch_tanh": 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def usable(*tensors: Tensor, kernel: int) -> bool:
    """Whether the kernels can compute on these inputs: on a GPU with Triton, or on a CPU in Triton's interpreter."""
    if kernel > MAX_KERNEL or not all(tensor.dtype in DTYPES for tensor in tensors):
        return False
    return tensors[0].device.type == _device_type()


def normed_usable(*tensors: Tensor, channels: int, kernel: int) -> bool:
    """Whether `normed` can be used: a program has all channels, and registers for C * K <= 8192 numbers' worth."""
    return channels * max(kernel, 4) <= 8192 and usable(*tensors, kernel=kernel)


@torch.compiler.assume_constant_result
def _device_type() -> str:
    return _look_for_triton()


@functools.cache
def _look_for_triton() -> str:
    if importlib.util.find_spec("triton") is None:
        return "none: Triton is not installed"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def canon(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    *,
    biases: Sequence[Tensor] = (),
    state: Tensor | None = None,
    reach: Tensor | None = None,
    residual: bool = True,
    activation: str = "none",
    scale: float = 1.0,
) -> list[Tensor]:
    """scale * (act(conv(x) + bias) + residual * x), for each of the tensors."""
    args = list(xs), list(taps), list(biases), state, reach, residual, ACTIVATIONS[activation], scale
    return torch.ops.canonlm.conv(*args)


def canon_with_state(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    *,
    biases: Sequence[Tensor] = (),
    state: Tensor | None = None,
    reach: Tensor | None = None,
    last: Tensor | None = None,
    residual: bool = True,
    activation: str = "none",
    scale: float = 1.0,
) -> tuple[list[Tensor], Tensor]:
    """`canon`, and the state after these inputs, through which no gradient flows (a prefill)."""
    args = list(xs), list(taps), list(biases), state, reach, last, residual, ACTIVATIONS[activation], scale
    *ys, after = torch.ops.canonlm.conv_with_state(*args)
    return ys, after


def gated(
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    *,
    state: Tensor | None = None,
    reach: Tensor | None = None,
    residual: bool = True,
    activation: str = "silu",
    scale: float = 1.0,
) -> Tensor:
    """act(canon(gate)) * canon(up) in one pass; the canons have no bias and no activation of their own."""
    [y] = torch.ops.canonlm.gated(gate, up, list(taps), state, reach, residual, ACTIVATIONS[activation], scale)
    return y


def gated_with_state(
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    *,
    state: Tensor | None = None,
    reach: Tensor | None = None,
    last: Tensor | None = None,
    residual: bool = True,
    activation: str = "silu",
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`gated`, and the state after these inputs, through which no gradient flows (a prefill)."""
    how = residual, ACTIVATIONS[activation], scale
    y, after = torch.ops.canonlm.gated_with_state(gate, up, list(taps), state, reach, last, *how)
    return y, after


def normed(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    *,
    state: Tensor | None = None,
    reach: Tensor | None = None,
    residual: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """s and canon(rms_norm(s) * weight), where s = x + branch, or x itself without a branch.

    The normalised s is rounded to its dtype before the convolution, as the norm alone returns it.
    """
    y, _, *s = torch.ops.canonlm.normed(x, branch, weight, eps, taps, state, reach, residual, scale)
    return s[0] if s else x, y


def normed_with_state(
    x: Tensor,
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    *,
    state: Tensor | None = None,
    reach: Tensor | None = None,
    last: Tensor | None = None,
    residual: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """`normed`, and the state after these inputs, through which no gradient flows (a prefill)."""
    args = x, branch, weight, eps, taps, state, reach, last, residual, scale
    y, _, *s, after = torch.ops.canonlm.normed_with_state(*args)
    return s[0] if s else x, y, after


def step(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    state: Tensor,
    *,
    biases: Sequence[Tensor] = (),
    mask: Tensor | None = None,
    residual: bool = True,
    activation: str = "none",
    scale: float = 1.0,
) -> list[Tensor]:
    """`canon` of one new token, `[B, 1, C]` each, without gradients. `state` is moved on in place; its channels must
    lie side by side, K numbers each. Rows whose `mask`, `[B, 1]`, is 0 keep their state."""
    how = residual, ACTIVATIONS[activation], scale
    ys = [x.new_empty(x.shape) for x in xs]
    torch.ops.canonlm.step(list(xs), list(taps), list(biases), _in_place(state), mask, ys, *how)
    return ys


def gated_step(
    gate: Tensor,
    up: Tensor,
    taps: Sequence[Tensor],
    state: Tensor,
    *,
    mask: Tensor | None = None,
    residual: bool = True,
    activation: str = "silu",
    scale: float = 1.0,
) -> Tensor:
    """`gated` of one new token; see `step`."""
    how = residual, ACTIVATIONS[activation], scale
    return torch.ops.canonlm.gated_step(gate, up, list(taps), _in_place(state), mask, *how)


def normed_step(
    x: Tensor,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None = None,
    residual: bool = True,
    scale: float = 1.0,
) -> Tensor:
    """`normed` of one new token; see `step`."""
    return torch.ops.canonlm.normed_step(x, weight, eps, taps, _in_place(state), mask, residual, scale)


def _in_place(state: Tensor) -> Tensor:
    assert state.stride()[1:] == (state.shape[2], 1), "a state's channels lie side by side"
    return state
