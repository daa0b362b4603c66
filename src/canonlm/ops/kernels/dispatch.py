"""Decides whether a kernel can be used: it supports the device, the dtypes and K, and is right on this machine.

A kernel is tried once (`ops/selftest.py`) for each dtype in use. A wrong kernel is replaced by PyTorch, with a warning.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from canonlm.ops.causal_conv import conv_state
from canonlm.ops.kernels.api import CANON, GATED, NORMED, Forms, are_assumed, reach_of, rotary, runs_on
from canonlm.ops.kernels.documents import MAX_KERNEL
from canonlm.ops.selftest import SHAPE, Inputs, Kernel, judge, normal

EPS = 1e-6
STEPS = 4
"""Last tokens of a trial, which are read one at a time."""


def usable(name: str, *tensors: Tensor, kernel: int) -> bool:
    """Whether the kernel of that name in `KERNELS` can compute on these tensors with `kernel` taps, and computes right
    (with gradients, where they are enabled)."""
    if kernel > MAX_KERNEL or not runs_on(*tensors):
        return False
    return are_assumed() or _JUDGES[name](torch.is_grad_enabled(), tensors[0].device.type, tensors[0].dtype)


def canon_by_token(
    x: Tensor,
    taps: Tensor,
    state: Tensor | None,
    doc_ids: Tensor | None,
    *,
    bias: Tensor | None = None,
    residual: bool = True,
    activation: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition: the last K inputs of a document are kept, and each is multiplied by its tap."""
    (batch, time, channels), kernel = x.shape, taps.shape[-1]
    window = x.new_zeros(batch, channels, kernel) if state is None else state
    outputs = []
    for t in range(time):
        if doc_ids is not None and t > 0:
            window = window * (doc_ids[:, t] == doc_ids[:, t - 1])[:, None, None]
        window = torch.cat([window[..., 1:], x[:, t, :, None]], dim=-1)
        y = (window * taps[:, 0]).sum(-1) + (0 if bias is None else bias)
        outputs.append((silu(y) if activation else y) + (x[:, t] if residual else 0))
    return torch.stack(outputs, dim=1), window


def _with_reference_gradient(
    forms: Forms, args: tuple, xs: Sequence[Tensor], state: Tensor, doc_ids: Tensor | None, **how
):
    """The result, and the state as a prefill returns it; its gradient is that of `conv_state` of `xs`."""
    call = {"state": state, "reach": reach_of(doc_ids), **how}
    y = forms.without_state(*args, **call)
    with torch.no_grad():
        _, after = forms.with_state(*args, **call)
    same = conv_state(torch.cat(list(xs), dim=-1), state.shape[-1], doc_ids_BT=doc_ids, state_BCK=state)
    return y, same + (after - same).detach()


@torch.no_grad()
def _steps(forms: Forms, xs: Sequence[Tensor], rest: tuple, state: Tensor, doc_ids: Tensor | None, **how):
    """All tokens but the last few at once, then these one at a time. `rest`: arguments after the inputs."""
    reach, end = reach_of(doc_ids), xs[0].shape[1] - STEPS
    reach = None if reach is None else reach[:, :end].contiguous()
    first = _arguments(forms, [x[:, :end] for x in xs], rest)
    y, state = forms.with_state(*first, state=state, reach=reach, **how)
    parts = [_joined(y)]
    for t in range(end, xs[0].shape[1]):
        y = forms.step(*_arguments(forms, [x[:, t : t + 1] for x in xs], rest), state=state, **how)
        parts.append(_joined(y))
    return torch.cat(parts, dim=1), state


def _arguments(forms: Forms, xs: list[Tensor], rest: tuple) -> tuple:
    return (xs, *rest) if forms is CANON else (*xs, *rest)


def _joined(y) -> Tensor:
    return y if isinstance(y, Tensor) else torch.cat(list(y), dim=-1)


def _conv(x, taps, state, doc_ids):
    [y], after = _with_reference_gradient(CANON, ([x], [taps]), [x], state, doc_ids)
    return y, after


def _conv_silu(x, taps, bias, state, doc_ids):
    how = {"residual": False, "activation": "silu"}
    [y], after = _with_reference_gradient(CANON, ([x], [taps]), [x], state, doc_ids, biases=[bias], **how)
    return y, after


_silu_by_token = partial(canon_by_token, residual=False, activation=True)


def _several(x, y, taps, y_taps, state, doc_ids):
    both, after = _with_reference_gradient(CANON, ([x, y], [taps, y_taps]), [x, y], state, doc_ids)
    return _joined(both), after


def _several_by_token(x, y, taps, y_taps, state, doc_ids):
    return canon_by_token(torch.cat([x, y], dim=-1), torch.cat([taps, y_taps]), state, doc_ids)


def _gated(x, y, taps, y_taps, state, doc_ids):
    return _with_reference_gradient(GATED, (x, y, [taps, y_taps]), [x, y], state, doc_ids)


def _pair_steps(forms: Forms, x, y, taps, y_taps, state, doc_ids):
    return _steps(forms, [x, y], ([taps, y_taps],), state, doc_ids)


_several_steps, _gated_steps = partial(_pair_steps, CANON), partial(_pair_steps, GATED)


def _gated_by_token(x, y, taps, y_taps, state, doc_ids):
    both, after = _several_by_token(x, y, taps, y_taps, state, doc_ids)
    gate, up = both.chunk(2, dim=-1)
    return silu(gate) * up, after


def _angles(x: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """cos and sin, `[1, T, 1, 4]`. before: the number of earlier tokens in x; the next one has position 1."""
    wide: Any = {"dtype": torch.promote_types(x.dtype, torch.float32), "device": x.device}
    steps = torch.arange(1 - before, x.shape[1] - before + 1, **wide)
    each = (steps[:, None] / torch.arange(1, 5, **wide))[None, :, None]
    return each.cos(), each.sin()


def _turned(y: Tensor) -> Tensor:
    """`[B, T, C]`, of which the first eight channels are rotated as four pairs."""
    turns = torch.complex(*(each[:, :, 0] for each in _angles(y, 0)))
    rotated = torch.complex(y[..., :4], y[..., 4:8]) * turns
    return torch.cat([rotated.real, rotated.imag, y[..., 8:]], dim=-1)


def _rotary(x, y, taps, y_taps, state, doc_ids):
    """Two heads of each; the first one of `x` is rotated."""
    both, kernel = torch.cat([x, y], dim=-1), taps.shape[-1]
    after = conv_state(both, kernel, doc_ids_BT=doc_ids, state_BCK=state)
    both = torch.cat([state.mT.to(x), both], dim=1)  # a form without a state: these are tokens, too
    if doc_ids is not None:
        doc_ids = torch.cat([doc_ids[:, :1].expand(-1, kernel), doc_ids], dim=1)
    table, reach = _angles(both, kernel), reach_of(doc_ids)
    ys = rotary(both.chunk(2, dim=-1), [taps, y_taps], *table, [1, 0], x.shape[-1] // 2, reach=reach)
    return _joined(ys)[:, kernel:], after


def _rotary_by_token(x, y, taps, y_taps, state, doc_ids):
    both, after = _several_by_token(x, y, taps, y_taps, state, doc_ids)
    return _turned(both), after


def _normed(x, branch, weight, taps, state, doc_ids):
    both, after = _with_reference_gradient(
        NORMED, (x, branch, weight, EPS, taps), [_norm(x + branch, weight)], state, doc_ids
    )
    return _joined(both), after


def _normed_steps(x, branch, weight, taps, state, doc_ids):
    return _steps(NORMED, [x, branch], (weight, EPS, taps), state, doc_ids)


def _normed_by_token(x, branch, weight, taps, state, doc_ids):
    s = x + branch
    y, after = canon_by_token(_norm(s, weight), taps, state, doc_ids)
    return torch.cat([s, y], dim=-1), after


def _norm(s: Tensor, weight: Tensor) -> Tensor:
    wide = s.to(torch.promote_types(s.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS) * weight).to(s.dtype)


def conv_inputs(generator: torch.Generator, width: int) -> Inputs:
    x, taps, state = _tokens(generator, 2 * width)
    return {"x": x, "taps": taps}, state


def _conv_silu_inputs(generator: torch.Generator, width: int) -> Inputs:
    inputs, state = conv_inputs(generator, width)
    return inputs | {"bias": normal(generator, 2 * width)}, state


def _pair_inputs(generator: torch.Generator, width: int, other: int | None = None) -> Inputs:
    (x, taps, state), (y, y_taps, y_state) = _tokens(generator, width), _tokens(generator, other or width)
    return {"x": x, "y": y, "taps": taps, "y_taps": y_taps}, torch.cat([state, y_state], dim=1)


def _several_inputs(generator: torch.Generator, width: int) -> Inputs:
    return _pair_inputs(generator, width, width // 2)


def _normed_inputs(generator: torch.Generator, width: int) -> Inputs:
    x, taps, state = _tokens(generator, 2 * width)
    weight = 1 + normal(generator, 2 * width) / 4
    return {"x": x, "branch": normal(generator, *x.shape), "weight": weight, "taps": taps}, state


def _tokens(generator: torch.Generator, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """x, taps, state"""
    batch, time, _ = SHAPE
    taps = normal(generator, channels, 1, 4) / 2
    return normal(generator, batch, time, channels), taps, normal(generator, batch, channels, 4)


WIDE = ("taps", "y_taps", "bias", "weight")
KERNELS = {
    "canon": Kernel("Triton Canon", _conv, canon_by_token, conv_inputs, WIDE),
    "canon silu": Kernel("Triton Canon with SiLU", _conv_silu, _silu_by_token, _conv_silu_inputs, WIDE),
    "canon several": Kernel("Triton Canon of several tensors", _several, _several_by_token, _several_inputs, WIDE),
    "gated": Kernel("Triton Canon, act(gate) * up", _gated, _gated_by_token, _pair_inputs, WIDE),
    "rotary": Kernel("Triton Canon, rotary embedding", _rotary, _rotary_by_token, _pair_inputs, WIDE),
    "normed": Kernel("Triton norm, Canon", _normed, _normed_by_token, _normed_inputs, WIDE),
    "canon step": Kernel(
        "Triton Canon, one token", _several_steps, _several_by_token, _several_inputs, WIDE, differentiable=False
    ),
    "gated step": Kernel(
        "Triton Canon, act(gate) * up, one token",
        _gated_steps,
        _gated_by_token,
        _pair_inputs,
        WIDE,
        differentiable=False,
    ),
    "normed step": Kernel(
        "Triton norm, Canon, one token", _normed_steps, _normed_by_token, _normed_inputs, WIDE, differentiable=False
    ),
}
"""By name: that of a form (`api.Forms`), with a suffix for variants that are compiled separately."""

_JUDGES = {name: judge(kernel) for name, kernel in KERNELS.items()}
