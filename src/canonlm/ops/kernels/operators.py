"""The kernels as operators of `torch.library`, with fake results for compilers, and gradients.

An operator's `Autograd` form is an `autograd.Function` around its other forms: cheaper per call than `custom_op`.
"""

import functools

import torch
from torch import Tensor

from canonlm.ops.derivatives import by_definition, first_only

LIBRARY = torch.library.Library("canonlm", "FRAGMENT")
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


def _conv(xs, taps, biases, state, reach, residual, act, scale):
    from canonlm.ops.kernels.conv import run_forward

    how = {"residual": residual, "act": act, "scale": scale}
    return run_forward(xs, taps, biases, state, reach, None, **how, return_state=False)


def _conv_with_state(xs, taps, biases, state, reach, last, residual, act, scale):
    from canonlm.ops.kernels.conv import run_forward

    how = {"residual": residual, "act": act, "scale": scale}
    return run_forward(xs, taps, biases, state, reach, last, **how, return_state=True)


def _conv_backward(dys, xs, taps, biases, state, reach, residual, act, scale):
    from canonlm.ops.kernels.conv import run_backward

    return run_backward(dys, xs, taps, biases, state, reach, residual=residual, act=act, scale=scale)


def _new(tensor: Tensor, *shape: int) -> Tensor:
    return tensor.new_empty(shape or tensor.shape)


def _conv_fake(xs, taps, biases, state, reach, residual, act, scale):
    return [_new(x) for x in xs]


def _conv_with_state_fake(xs, taps, biases, state, reach, last, residual, act, scale):
    batch, kernel = xs[0].shape[0], taps[0].shape[-1]
    return [*(_new(x) for x in xs), _new(xs[0], batch, sum(x.shape[2] for x in xs), kernel)]


def _conv_backward_fake(dys, xs, taps, biases, state, reach, residual, act, scale):
    return [_new(tensor) for tensor in (*xs, *taps, *biases, *([] if state is None else [state]))]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, how, reach, state, *tensors):
        ctx.save_for_backward(reach, state, *tensors)
        ctx.n, ctx.how = n, how
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.canonlm.conv(*_thirds(tensors, n), state, reach, *how))

    @staticmethod
    def backward(ctx, *dys):
        reach, state, *tensors = ctx.saved_tensors
        grads = torch.ops.canonlm.conv_backward(list(dys), *_thirds(tensors, ctx.n), state, reach, *ctx.how)
        dstate = None if state is None else grads.pop()
        return None, None, None, *first_only(dstate, *grads)


def _thirds(tensors, n):
    """xs, taps, biases (of which there may be none)"""
    return list(tensors[:n]), list(tensors[n : 2 * n]), list(tensors[2 * n :])


def _conv_autograd(xs, taps, biases, state, reach, *how):
    if _differentiates(*xs, *taps, *biases, state):
        return list(_Conv.apply(len(xs), how, reach, state, *xs, *taps, *biases))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.canonlm.conv(xs, taps, biases, state, reach, *how)


def _gated(gate, up, taps, state, reach, residual, act, scale):
    from canonlm.ops.kernels.gated import run_forward

    how = {"residual": residual, "act": act, "scale": scale}
    return run_forward(gate, up, taps, state, reach, None, **how, return_state=False)


def _gated_with_state(gate, up, taps, state, reach, last, residual, act, scale):
    from canonlm.ops.kernels.gated import run_forward

    how = {"residual": residual, "act": act, "scale": scale}
    return run_forward(gate, up, taps, state, reach, last, **how, return_state=True)


def _gated_backward(dy, gate, up, taps, state, reach, residual, act, scale):
    from canonlm.ops.kernels.gated import run_backward

    return run_backward(dy, gate, up, taps, state, reach, residual=residual, act=act, scale=scale)


def _gated_fake(gate, up, taps, state, reach, residual, act, scale):
    return [_new(gate)]


def _gated_with_state_fake(gate, up, taps, state, reach, last, residual, act, scale):
    return [_new(gate), _new(gate, gate.shape[0], 2 * gate.shape[2], taps[0].shape[-1])]


def _gated_backward_fake(dy, gate, up, taps, state, reach, residual, act, scale):
    return [_new(tensor) for tensor in (gate, up, *taps, *([] if state is None else [state]))]


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, how, reach, gate, up, gate_taps, up_taps, state):
        ctx.save_for_backward(reach, gate, up, gate_taps, up_taps, state)
        ctx.how = how
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.canonlm.gated(gate, up, [gate_taps, up_taps], state, reach, *how)[0]

    @staticmethod
    def backward(ctx, dy):
        reach, gate, up, gate_taps, up_taps, state = ctx.saved_tensors
        grads = torch.ops.canonlm.gated_backward(dy, gate, up, [gate_taps, up_taps], state, reach, *ctx.how)
        return None, None, *first_only(*grads), *([None] if state is None else [])


def _gated_autograd(gate, up, taps, state, reach, *how):
    if _differentiates(gate, up, *taps, state):
        return [_Gated.apply(how, reach, gate, up, *taps, state)]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.canonlm.gated(gate, up, taps, state, reach, *how)


def _normed(x, branch, weight, eps, taps, state, reach, residual, scale):
    from canonlm.ops.kernels.normed import run_forward

    how = {"residual": residual, "scale": scale}
    return run_forward(x, branch, weight, eps, taps, state, reach, None, **how, return_state=False)


def _normed_with_state(x, branch, weight, eps, taps, state, reach, last, residual, scale):
    from canonlm.ops.kernels.normed import run_forward

    how = {"residual": residual, "scale": scale}
    return run_forward(x, branch, weight, eps, taps, state, reach, last, **how, return_state=True)


def _normed_backward(dy, flow, x, weight, taps, rstd, state, reach, residual, scale):
    from canonlm.ops.kernels.normed import run_backward

    return run_backward(dy, flow, x, weight, taps, rstd, state, reach, residual=residual, scale=scale)


def _normed_fake(x, branch, *_):
    rstd = x.new_empty(x.shape[:2], dtype=torch.float32)
    return [_new(x), rstd, *([] if branch is None else [_new(x)])]


def _normed_with_state_fake(x, branch, weight, eps, taps, *_):
    return [*_normed_fake(x, branch), _new(x, x.shape[0], x.shape[2], taps.shape[-1])]


def _normed_backward_fake(dy, flow, x, weight, taps, rstd, state, *_):
    return [_new(tensor) for tensor in (x, weight, taps, *([] if state is None else [state]))]


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, eps, how, reach, x, branch, weight, taps, state):
        with torch._C._AutoDispatchBelowAutograd():
            y, rstd, *s = torch.ops.canonlm.normed(x, branch, weight, eps, taps, state, reach, *how)
        ctx.save_for_backward(reach, *(s or [x]), weight, taps, rstd, state)
        ctx.how, ctx.branch_dtype = how, None if branch is None else branch.dtype
        ctx.mark_non_differentiable(rstd)
        ctx.set_materialize_grads(False)
        return y, rstd, *s

    @staticmethod
    def backward(ctx, dy, _, flow=None):
        reach, s, weight, taps, rstd, state = ctx.saved_tensors
        dy = torch.zeros_like(s) if dy is None else dy
        dx, dweight, dtaps, *dstate = torch.ops.canonlm.normed_backward(
            dy, flow, s, weight, taps, rstd, state, reach, *ctx.how
        )
        dbranch = None if ctx.branch_dtype is None else dx.to(ctx.branch_dtype)
        return None, None, None, *first_only(dx, dbranch, dweight, dtaps, *(dstate or [None]))


def _normed_autograd(x, branch, weight, eps, taps, state, reach, *how):
    if _differentiates(x, branch, weight, taps, state):
        return list(_Normed.apply(eps, how, reach, x, branch, weight, taps, state))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.canonlm.normed(x, branch, weight, eps, taps, state, reach, *how)


def _rotary(xs, taps, cos, sin, reach, rotated, head_dim, residual, scale):
    from canonlm.ops.kernels.rotary import run_forward

    return run_forward(xs, taps, cos, sin, reach, rotated, head_dim, residual=residual, scale=scale)


def _rotary_backward(dys, xs, taps, cos, sin, reach, rotated, head_dim, residual, scale):
    from canonlm.ops.kernels.rotary import run_backward

    return run_backward(dys, xs, taps, cos, sin, reach, rotated, head_dim, residual=residual, scale=scale)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, how, cos, sin, reach, *tensors):
        ctx.save_for_backward(cos, sin, reach, *tensors)
        ctx.n, ctx.how = n, how
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.canonlm.rotary(list(tensors[:n]), list(tensors[n:]), cos, sin, reach, *how))

    @staticmethod
    def backward(ctx, *dys):
        cos, sin, reach, *tensors = ctx.saved_tensors
        xs, taps = tensors[: ctx.n], tensors[ctx.n :]
        grads = torch.ops.canonlm.rotary_backward(list(dys), xs, taps, cos, sin, reach, *ctx.how)
        return None, None, None, None, None, *first_only(*grads)


def _rotary_autograd(xs, taps, cos, sin, reach, *how):
    if _differentiates(*xs, *taps):
        return list(_Rotary.apply(len(xs), how, cos, sin, reach, *xs, *taps))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.canonlm.rotary(xs, taps, cos, sin, reach, *how)


def _step(xs, taps, biases, state, mask, ys, residual, act, scale):
    from canonlm.ops.kernels.step import run_step

    run_step(xs, taps, biases, state, mask, ys, residual=residual, act=act, scale=scale)


def _gated_step(gate, up, taps, state, mask, residual, act, scale):
    from canonlm.ops.kernels.step import run_gated_step

    return run_gated_step(gate, up, taps, state, mask, residual=residual, act=act, scale=scale)


def _normed_step(x, weight, eps, taps, state, mask, residual, scale):
    from canonlm.ops.kernels.step import run_normed_step

    return run_normed_step(x, weight, eps, taps, state, mask, residual=residual, scale=scale)


def _differentiates(*tensors: Tensor | None) -> bool:
    if by_definition():
        raise NotImplementedError("Triton kernels have no forward mode; use the layers, which then run in PyTorch")
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _register(name, implementation, fake, autograd=None):
    @functools.wraps(implementation)
    def run(first, *rest):
        x = first[0] if isinstance(first, list | tuple) else first
        if not x.is_cuda:
            return implementation(first, *rest)
        with torch.cuda.device_of(x):  # a model's layers may be on several GPUs; Triton launches on the current one
            return implementation(first, *rest)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"canonlm::{name}", fake, lib=LIBRARY)
    if autograd is not None:
        LIBRARY.impl(name, autograd, "Autograd")


_register("conv", _conv, _conv_fake, _conv_autograd)
_register("conv_with_state", _conv_with_state, _conv_with_state_fake)
_register("conv_backward", _conv_backward, _conv_backward_fake)
_register("gated", _gated, _gated_fake, _gated_autograd)
_register("gated_with_state", _gated_with_state, _gated_with_state_fake)
_register("gated_backward", _gated_backward, _gated_backward_fake)
_register("normed", _normed, _normed_fake, _normed_autograd)
_register("normed_with_state", _normed_with_state, _normed_with_state_fake)
_register("normed_backward", _normed_backward, _normed_backward_fake)
_register("rotary", _rotary, lambda xs, *_: [_new(x) for x in xs], _rotary_autograd)
_register("rotary_backward", _rotary_backward, lambda dys, xs, taps, *_: [_new(tensor) for tensor in (*xs, *taps)])
_register("step", _step, lambda *_: None)
_register("gated_step", _gated_step, lambda gate, *_: _new(gate))
_register("normed_step", _normed_step, lambda x, *_: _new(x))
