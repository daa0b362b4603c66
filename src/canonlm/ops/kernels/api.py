"""The kernels as functions of tensors: differentiable, traced by compilers as single operators, the same on any device.

Triton is imported when the first kernel runs. Every function takes `[B, T, C]` inputs in bfloat16, float16 or float32
with contiguous channels, sums in float32 and rounds a result once. Several tensors are computed in one launch.

Arguments of all functions:
    taps: `[C, 1, K]` or `[C, K]`, K <= 8, without the residual; the last one multiplies the current token.
    state: `[B, sum of C, K]`, the last K inputs before these, of all tensors side by side, or None for zeros.
    reach, last: see `documents`; made once per batch. None: one document a row; no padding.
    activation: one of ACTIVATIONS.
"""

import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from canonlm.ops.compiled import is_exporting
from canonlm.ops.derivatives import by_definition
from canonlm.ops.kernels import operators as operators  # registers them
from canonlm.ops.kernels.documents import last_real as last_real
from canonlm.ops.kernels.documents import reach_of as reach_of

ACTIVATIONS = {"none": 0, "silu": 1, "gelu_pytorch_tanh": 2}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def runs_on(*tensors: Tensor) -> bool:
    """Whether there are kernels for such inputs: on a GPU with Triton, or on a CPU in Triton's interpreter. An exported
    program has none, as it may run anywhere; nor have forward mode and torch.func's transforms."""
    if not all(tensor.dtype in DTYPES for tensor in tensors) or is_exporting() or by_definition():
        return False
    return tensors[0].device.type == device_type()


def fits_normed(channels: int, kernel: int) -> bool:
    """Whether a program of `normed` has registers for all channels of a token: C * K <= 8192 numbers' worth."""
    return channels * max(kernel, 4) <= 8192


_ASSUMED: list[str] = []


@contextmanager
def assumed(device_type: str) -> Iterator[None]:
    """All kernels exist for this type of device and are right: on fake tensors, which stand for those of a GPU that
    this machine need not have."""
    _ASSUMED.append(device_type)
    try:
        yield
    finally:
        _ASSUMED.pop()


@torch.compiler.assume_constant_result
def are_assumed() -> bool:
    return bool(_ASSUMED)


@torch.compiler.assume_constant_result
def device_type() -> str:
    """The type of the devices that have kernels."""
    return _ASSUMED[-1] if _ASSUMED else _look_for_triton()


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
    """s and canon(rms_norm(s) * weight), where s = x + branch in the dtype of x, or x itself without a branch.

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
) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """`normed`, and the state after these inputs, through which no gradient flows (a prefill)."""
    args = x, branch, weight, eps, taps, state, reach, last, residual, scale
    y, _, *s, after = torch.ops.canonlm.normed_with_state(*args)
    return (s[0] if s else x, y), after


def rotary(
    xs: Sequence[Tensor],
    taps: Sequence[Tensor],
    cos: Tensor,
    sin: Tensor,
    rotated: Sequence[int],
    head_dim: int,
    *,
    reach: Tensor | None = None,
    residual: bool = True,
    scale: float = 1.0,
) -> list[Tensor]:
    """scale * (conv(x) + residual * x) for each of the tensors, then a rotation of its first `rotated` heads.

    cos, sin: `[B or 1, T, 1, H]` in float32, without gradients. Channel i < H of a head is paired with channel i + H.
    """
    return torch.ops.canonlm.rotary(list(xs), list(taps), cos, sin, reach, list(rotated), head_dim, residual, scale)


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
    """`canon` of one new token, `[B, 1, C]` each, without gradients. `state` is updated in place and must be contiguous
    within a row. Rows whose `mask`, `[B, 1]`, is 0 keep their state."""
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
    branch: Tensor | None,
    weight: Tensor,
    eps: float,
    taps: Tensor,
    state: Tensor,
    *,
    mask: Tensor | None = None,
    residual: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """`normed` of one new token; see `step`. The sum is a separate operation."""
    s = x if branch is None else x + branch
    return s, torch.ops.canonlm.normed_step(s, weight, eps, taps, _in_place(state), mask, residual, scale)


def _in_place(state: Tensor) -> Tensor:
    assert state.stride()[1:] == (state.shape[2], 1), "a state is contiguous within a row"
    return state


class Forms(NamedTuple):
    """A kernel for an input, for an input whose state is needed, and for one token. They take the same arguments,
    except for `reach`, `last` and `mask`; the second returns (what the others return, state)."""

    name: str
    without_state: Callable[..., Any]
    with_state: Callable[..., tuple[Any, Tensor]]
    step: Callable[..., Any]


CANON = Forms("canon", canon, canon_with_state, step)
GATED = Forms("gated", gated, gated_with_state, gated_step)
NORMED = Forms("normed", normed, normed_with_state, normed_step)
