"""The convolution's kernels against the definition: values, gradients, states."""

import definition
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases, near, small_tiles

from canonlm.ops.causal_conv import causal_conv, conv_state
from canonlm.ops.kernels import api

FEW = settings(max_examples=20, deadline=None)


def check(case):
    """Values, every gradient and the final state of one case."""
    leaves = [*case.xs, *case.taps, *case.biases, *([] if case.past is None else [case.past])]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    n = len(case.xs)
    xs, taps, biases = leaves[:n], leaves[n : 2 * n], leaves[2 * n : 2 * n + len(case.biases)]
    past = None if case.past is None else leaves[-1]
    with small_tiles(case):
        call = {"biases": biases, "state": past, "reach": case.reach, **case.how()}
        ys = api.canon(xs, taps, **call)
        grads = torch.autograd.grad(ys, leaves, case.dys)
        with torch.no_grad():
            again, after = api.canon_with_state(xs, taps, last=case.last, **call)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    absolute = [leaf.detach().double().abs().requires_grad_() for leaf in leaves]
    exact, sums = [], []
    for i in range(n):
        for given_leaves, outs in ((exact_leaves, exact), (absolute, sums)):
            own = case.of(i)
            own["bias"] = given_leaves[2 * n + i] if biases else None
            own["state"] = None if past is None else given_leaves[-1].split(case.sizes, dim=1)[i]
            if outs is sums:
                own["activation"] = "none"
            outs.append(definition.conv(given_leaves[i], given_leaves[n + i], **own))
    exact_grads = torch.autograd.grad(exact, exact_leaves, [dy.double() for dy in case.dys], allow_unused=True)
    sum_grads = torch.autograd.grad(sums, absolute, [dy.double().abs() for dy in case.dys], allow_unused=True)
    for y, same, true in zip(ys, again, exact, strict=True):
        near(y, true, case.dtype)
        assert torch.equal(y, same)
    for leaf, grad, true, size in zip(leaves, grads, exact_grads, sum_grads, strict=True):
        assert grad.dtype == leaf.dtype
        near(grad, torch.zeros_like(leaf) if true is None else true, leaf.dtype, size)
    assert torch.equal(after, case.final_state())


@FEW
@given(cases(bias=False))
def test_convolution(case):
    check(case)


@FEW
@given(cases(activation="silu"))
def test_with_an_activation(case):
    check(case)


@settings(max_examples=5, deadline=None)
@given(cases(sizes=[20, 5, 7], time=9, bias=False), st.sampled_from(["none", "silu"]))
def test_three_tensors_in_one_launch(case, activation):
    case.activation = activation
    check(case)


def test_a_plain_case_of_every_kernel_size():
    for kernel in range(1, 9):
        check(Case(kernel=kernel, time=17, state=True, docs=True, batch=1, sizes=[5]))


@FEW
@given(cases(bias=False, dtype=torch.float32, scale=1.0, residual=False))
def test_equals_the_cpu_implementation(case):
    """Layers may use either form."""
    [x], [taps] = case.xs, case.taps
    if case.mask is not None:
        x = x.masked_fill((case.mask == 0)[..., None], 0)
    with small_tiles(case):
        [y], after = api.canon_with_state(
            case.xs, case.taps, state=case.past, reach=case.reach, last=case.last, residual=False
        )
    near(y, causal_conv(x, taps, doc_ids_BT=case.doc_ids, state_BCK=case.past), torch.float32)
    state = conv_state(x, case.kernel, mask_BT=case.mask, doc_ids_BT=case.doc_ids, state_BCK=case.past)
    assert torch.equal(after, state)


def test_gradient_of_a_sum_has_no_strides():
    case = Case()
    x, taps = case.xs[0].requires_grad_(), case.taps[0].requires_grad_()
    with small_tiles(case):
        [y] = api.canon([x], [taps])
        grads = torch.autograd.grad(y.sum(), [x, taps])
    exact = [x.detach().double().requires_grad_(), taps.detach().double().requires_grad_()]
    for grad, true in zip(grads, torch.autograd.grad(definition.conv(*exact).sum(), exact), strict=True):
        near(grad, true, torch.float32, true.abs() + 20)


def test_bfloat16_is_rounded_once_to_the_nearest():
    case = Case(time=40, sizes=[64], dtype=torch.bfloat16, tokens=16)
    with small_tiles(case, channels=64):
        [y] = api.canon(case.xs, case.taps)
    assert (y != definition.conv(case.xs[0].double(), case.taps[0].double()).bfloat16()).double().mean() < 0.002


def test_weight_gradients_are_the_same_in_every_run():
    case = Case(time=40, batch=2)
    with small_tiles(case):
        runs = [
            torch.ops.canonlm.conv_backward(case.dys, case.xs, case.taps, [], None, None, True, 0, 1.0) for _ in "ab"
        ]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
