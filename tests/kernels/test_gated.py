"""Canon-D with act(gate) * up, in one kernel, against the definition."""

import definition
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases, near, small_tiles

from canonlm.ops.kernels import api


def by_definition(case, leaves, activation, absolute=False):
    gate, up, gate_taps, up_taps, *past = leaves
    pasts = past[0].split(case.sizes, dim=1) if past else (None, None)
    outs = []
    for i, (x, taps) in enumerate([(gate, gate_taps), (up, up_taps)]):
        outs.append(definition.conv(x, taps, **case.of(i) | {"state": pasts[i], "activation": "none"}))
    return outs[0] * outs[1] if absolute else definition.ACTS[activation](outs[0]) * outs[1]


def check(case, activation):
    """Values, every gradient and the final state. (Both `sizes` are equal.)"""
    leaves = [*case.xs, *case.taps, *([] if case.past is None else [case.past])]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    gate, up, *taps = leaves[:4]
    past, dy = None if case.past is None else leaves[4], case.dys[0]
    call = {"state": past, "reach": case.reach, "residual": case.residual, "scale": case.scale}
    with small_tiles(case):
        y = api.gated(gate, up, taps, activation=activation, **call)
        grads = torch.autograd.grad(y, leaves, dy)
        with torch.no_grad():
            again, after = api.gated_with_state(gate, up, taps, last=case.last, activation=activation, **call)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    absolute = [leaf.detach().double().abs().requires_grad_() for leaf in leaves]
    true = by_definition(case, exact, activation)
    near(y, true, case.dtype, by_definition(case, absolute, activation, absolute=True))
    assert torch.equal(y, again)
    exact_grads = torch.autograd.grad(true, exact, dy.double(), allow_unused=True, materialize_grads=True)
    sums = by_definition(case, absolute, activation, absolute=True)
    sum_grads = torch.autograd.grad(sums, absolute, dy.double().abs(), allow_unused=True, materialize_grads=True)
    for leaf, grad, right, size in zip(leaves, grads, exact_grads, sum_grads, strict=True):
        assert grad.dtype == leaf.dtype
        near(grad, right, leaf.dtype, size)
    assert torch.equal(after, case.final_state())


@settings(max_examples=16, deadline=None)
@given(cases(sizes=[20, 20], bias=False), st.sampled_from(["silu", "gelu_pytorch_tanh"]))
def test_gated(case, activation):
    check(case, activation)


def test_a_plain_case():
    check(Case(time=17, sizes=[20, 20]), "silu")
