"""Canon-A and -C with the addition and the norm before them, in one kernel, against the definition."""

import definition
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EPSILON, Case, cases, near, small_tiles

from canonlm.ops.kernels import api

EPS = 1e-5


class Rounded(torch.autograd.Function):
    """Rounds to the nearest number of a dtype; gradients pass unchanged."""

    @staticmethod
    def forward(ctx, x, dtype):
        return x.to(dtype).double()

    @staticmethod
    def backward(ctx, dx):
        return dx, None


def by_definition(case, leaves, branched):
    x, branch, weight, taps, *past = leaves
    s = Rounded.apply(x + branch, case.dtype) if branched else x
    h = Rounded.apply(definition.rms_norm(s, weight, EPS), case.dtype)
    own = case.of(0) | {"state": past[0] if past else None}
    return s, h, definition.conv(h, taps, **own)


def check(case, branched):
    leaves = [case.xs[0], case.xs[1], case.taps[1][:, 0, 0] + 1, case.taps[0]]
    leaves += [] if case.past is None else [case.past[:, : case.sizes[0]]]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    x, branch, weight, taps, *past = leaves
    call = {"state": past[0] if past else None, "reach": case.reach, "residual": case.residual, "scale": case.scale}
    args = x, branch if branched else None, weight, EPS, taps
    dy, flow = case.dys
    with small_tiles(case, channels=32):
        s, y = api.normed(*args, **call)
        grads = torch.autograd.grad([y, s * 1], leaves, [dy, flow], allow_unused=True)
        with torch.no_grad():
            (_, again), after = api.normed_with_state(*args, last=case.last, **call)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    true_s, h, true_y = by_definition(case, exact, branched)
    # h in float32 may round the other way if it is close to halfway between two numbers: one more rounding of h.
    size = definition.conv(
        h.detach().abs(), taps.detach().double().abs(), **case.of(0) | {"state": None, "scale": 1.0, "residual": True}
    )
    assert torch.equal(s.double(), true_s)
    rounding = 1 if case.dtype == torch.float32 else 1 + 2e5 * EPSILON[case.dtype]
    near(y, true_y, case.dtype, size * rounding)
    assert (near_share(y, true_y, case.dtype) > 0.8) if y.numel() > 50 else True
    assert torch.equal(y, again)
    true = torch.autograd.grad([true_y, true_s], exact, [dy.double(), flow.double()], allow_unused=True)
    for leaf, grad, right in zip(leaves, grads, true, strict=True):
        assert (grad is None) == (right is None) or not grad.any()
        if right is None:
            continue
        assert grad.dtype == leaf.dtype
        norm = right.abs().max().clamp(min=1).expand_as(right) * 20
        near(grad, right, leaf.dtype, norm * rounding)
    state = definition.final_state(h.detach(), case.kernel, case.pasts[0], case.doc_ids, case.mask)
    off = (after[:, : case.sizes[0]].double() - state.double()).abs()
    assert (off <= 1e-5 * rounding * state.abs().clamp(min=1e-3)).all()


def near_share(value, exact, dtype):
    """The share of results that equal the rounded exact one."""
    return (value == exact.to(dtype)).double().mean() if dtype != torch.float32 else 1.0


@settings(max_examples=24, deadline=None)
@given(cases(sizes=[20, 20], bias=False), st.booleans())
def test_normed(case, branched):
    check(case, branched)


def test_plain_cases():
    for rows in (1, 2, 4):
        check(Case(time=17, sizes=[20, 20], rows=rows), branched=rows > 1)
