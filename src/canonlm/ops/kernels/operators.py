"""The kernels as operators of `torch.library`, with fake results for compilers, and gradients.

An operator's `Autograd` form is an `autograd.Function` around its other forms: cheaper per call than `custom_op`.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from canonlm.ops.derivatives import by_definition, first_only

LIBRARY = torch.library.Library("canonlm", "FRAGMENT")
OPERATORS: Any = torch.ops.canonlm
_CONV = "Tensor[] xs, Tensor[] taps, Tensor[] biases, Tensor? state, Tensor? reach"
_HOW = "bool residual, int act, float scale"
LIBRARY.define(f"conv({_CONV}, {_HOW}) -> Tensor[]")
LIBRARY.define(f"conv_with_state({_CONV}, Tensor? last, {_HOW}) -> Tensor[]")
LIBRARY.define(f"conv_backward(Tensor[] dys, {_CONV}, {_HOW}) -> Tensor[]")
_GATED = "Tensor gate, Tensor up, Tensor[] taps, Tensor? state, Tensor? reach"
LIBRARY.define(f"gated({_GATED}, {_HOW}) -> Tensor[]")
LIBRARY.define(f"gated_with_state({_GATED}, Tensor? last, {_HOW}) -> Tensor[]")
LIBRARY.define(f"gated_backward(Tensor dy, {_GATED}, {_HOW}) -> Tensor[]")
_NORMED = "Tensor x, Tensor? branch, Tensor weight, float eps, Tensor taps, Tensor? state, Tensor? reach"
LIBRARY.define(f"normed({_NORMED}, bool residual, float scale) -> Tensor[]")
LIBRARY.define(f"normed_with_state({_NORMED}, Tensor? last, bool residual, float scale) -> Tensor[]")
LIBRARY.define(
    "normed_backward(Tensor dy, Tensor? flow, Tensor x, Tensor weight, Tensor taps, Tensor rstd, Tensor? state, "
    "Tensor? reach, bool residual, float scale) -> Tensor[]"
)
_ROTARY = "Tensor[] xs, Tensor[] taps, Tensor cos, Tensor sin, Tensor? reach, int[] rotated, int head_dim"
LIBRARY.define(f"rotary({_ROTARY}, bool residual, float scale) -> Tensor[]")
LIBRARY.define(f"rotary_backward(Tensor[] dys, {_ROTARY}, bool residual, float scale) -> Tensor[]")
_STEP = "Tensor(a!) state, Tensor? mask"
LIBRARY.define(f"step(Tensor[] xs, Tensor[] taps, Tensor[] biases, {_STEP}, Tensor(b!)[] ys, {_HOW}) -> ()")
LIBRARY.define(f"gated_step(Tensor gate, Tensor up, Tensor[] taps, {_STEP}, {_HOW}) -> Tensor")
LIBRARY.define(
    f"normed_step(Tensor x, Tensor weight, float eps, Tensor taps, {_STEP}, bool residual, float scale) -> Tensor"
)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, how, reach, state, *tensors):
        ctx.save_for_backward(reach, state, *tensors)
        ctx.n, ctx.how = n, how
        return tuple(_below_autograd(OPERATORS.conv, *_thirds(tensors, n), state, reach, *how))

    @staticmethod
    def backward(ctx, *dys):
        reach, state, *tensors = ctx.saved_tensors
        grads = OPERATORS.conv_backward(list(dys), *_thirds(tensors, ctx.n), state, reach, *ctx.how)
        dstate = None if state is None else grads.pop()
        return None, None, None, *first_only(dstate, *grads)


def _thirds(tensors, n):
    """xs, taps, biases (of which there may be none)"""
    return list(tensors[:n]), list(tensors[n : 2 * n]), list(tensors[2 * n :])


def _conv_autograd(xs, taps, biases, state, reach, *how):
    if _differentiates(*xs, *taps, *biases, state):
        return list(_Conv.apply(len(xs), how, reach, state, *xs, *taps, *biases))
    return _below_autograd(OPERATORS.conv, xs, taps, biases, state, reach, *how)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, how, reach, gate, up, gate_taps, up_taps, state):
        ctx.save_for_backward(reach, gate, up, gate_taps, up_taps, state)
        ctx.how = how
        return _below_autograd(OPERATORS.gated, gate, up, [gate_taps, up_taps], state, reach, *how)[0]

    @staticmethod
    def backward(ctx, dy):
        reach, gate, up, gate_taps, up_taps, state = ctx.saved_tensors
        grads = OPERATORS.gated_backward(dy, gate, up, [gate_taps, up_taps], state, reach, *ctx.how)
        return None, None, *first_only(*grads), *([None] if state is None else [])


def _gated_autograd(gate, up, taps, state, reach, *how):
    if _differentiates(gate, up, *taps, state):
        return [_Gated.apply(how, reach, gate, up, *taps, state)]
    return _below_autograd(OPERATORS.gated, gate, up, taps, state, reach, *how)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, how, reach, x, branch, weight, taps, state):
        y, rstd, *s = _below_autograd(OPERATORS.normed, x, branch, weight, eps, taps, state, reach, *how)
        ctx.save_for_backward(reach, *(s or [x]), weight, taps, rstd, state)
        ctx.how, ctx.branch_dtype = how, None if branch is None else branch.dtype
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd, *s

    @staticmethod
    def backward(ctx, dy, _, flow=None):
        reach, s, weight, taps, rstd, state = ctx.saved_tensors
        dy = torch.zeros_like(s) if dy is None else dy
        dx, dweight, dtaps, *dstate = OPERATORS.normed_backward(dy, flow, s, weight, taps, rstd, state, reach, *ctx.how)
        dbranch = None if ctx.branch_dtype is None else dx.to(ctx.branch_dtype)
        return None, None, None, *first_only(dx, dbranch, dweight, dtaps, *(dstate or [None]))


def _normed_autograd(x, branch, weight, eps, taps, state, reach, *how):
    if _differentiates(x, branch, weight, taps, state):
        return list(_Normed.apply(eps, how, reach, x, branch, weight, taps, state))
    return _below_autograd(OPERATORS.normed, x, branch, weight, eps, taps, state, reach, *how)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, how, cos, sin, reach, *tensors):
        ctx.save_for_backward(cos, sin, reach, *tensors)
        ctx.n, ctx.how = n, how
        xs, taps = list(tensors[:n]), list(tensors[n:])
        return tuple(_below_autograd(OPERATORS.rotary, xs, taps, cos, sin, reach, *how))

    @staticmethod
    def backward(ctx, *dys):
        cos, sin, reach, *tensors = ctx.saved_tensors
        xs, taps = tensors[: ctx.n], tensors[ctx.n :]
        grads = OPERATORS.rotary_backward(list(dys), xs, taps, cos, sin, reach, *ctx.how)
        return None, None, None, None, None, *first_only(*grads)


def _rotary_autograd(xs, taps, cos, sin, reach, *how):
    if _differentiates(*xs, *taps):
        return list(_Rotary.apply(len(xs), how, cos, sin, reach, *xs, *taps))
    return _below_autograd(OPERATORS.rotary, xs, taps, cos, sin, reach, *how)


def _differentiates(*tensors: Tensor | None) -> bool:
    if by_definition():
        raise NotImplementedError("Triton kernels have no forward mode; use the layers, which then run in PyTorch")
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _below_autograd(operator, *args):
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*args)


def _register(name, path, fake, autograd=None, **fixed):
    """path: of the function that computes the operator, in this package; its parameters have the names of the
    operator's. fixed: its other arguments. Its module imports Triton, so it is imported with the first call."""
    names = [argument.name for argument in getattr(OPERATORS, name).default._schema.arguments]
    module, _, function = path.partition(".")

    def run(*args):
        run_kernel = getattr(importlib.import_module(f"canonlm.ops.kernels.{module}"), function)
        x = args[0][0] if isinstance(args[0], list | tuple) else args[0]
        with torch.cuda.device_of(x):  # a model's layers may be on several GPUs; Triton launches on the current one
            return run_kernel(**dict(zip(names, args, strict=True)), **fixed)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"canonlm::{name}", fake, lib=LIBRARY)
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")


def _like(*tensors: Tensor | None) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors if x is not None]


def _state_of(xs: list[Tensor], taps: Tensor) -> Tensor:
    return xs[0].new_empty(xs[0].shape[0], sum(x.shape[2] for x in xs), taps.shape[-1])


def _normed_fake(x, branch, *_):
    rstd = x.new_empty(x.shape[:2], dtype=torch.float32)
    return [*_like(x), rstd, *([] if branch is None else _like(x))]


_register("conv", "conv.run_forward", lambda xs, *_: _like(*xs), _conv_autograd, last=None, return_state=False)
_register(
    "conv_with_state",
    "conv.run_forward",
    lambda xs, taps, *_: [*_like(*xs), _state_of(xs, taps[0])],
    return_state=True,
)
_register(
    "conv_backward",
    "conv.run_backward",
    lambda dys, xs, taps, biases, state, *_: _like(*xs, *taps, *biases, state),
)
_register("gated", "gated.run_forward", lambda gate, *_: _like(gate), _gated_autograd, last=None, return_state=False)
_register(
    "gated_with_state",
    "gated.run_forward",
    lambda gate, up, taps, *_: [*_like(gate), _state_of([gate, up], taps[0])],
    return_state=True,
)
_register("gated_backward", "gated.run_backward", lambda dy, gate, up, taps, state, *_: _like(gate, up, *taps, state))
_register("normed", "normed.run_forward", _normed_fake, _normed_autograd, last=None, return_state=False)
_register(
    "normed_with_state",
    "normed.run_forward",
    lambda x, branch, weight, eps, taps, *_: [*_normed_fake(x, branch), _state_of([x], taps)],
    return_state=True,
)
_register(
    "normed_backward",
    "normed.run_backward",
    lambda dy, flow, x, weight, taps, rstd, state, *_: _like(x, weight, taps, state),
)
_register("rotary", "rotary.run_forward", lambda xs, *_: _like(*xs), _rotary_autograd)
_register("rotary_backward", "rotary.run_backward", lambda dys, xs, taps, *_: _like(*xs, *taps))
_register("step", "step.run_step", lambda *_: None)
_register("gated_step", "step.run_gated_step", lambda gate, *_: _like(gate)[0])
_register("normed_step", "step.run_normed_step", lambda x, *_: _like(x)[0])
