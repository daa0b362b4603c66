"""Canon-B and the rotary embedding, in one kernel, against the definition of the one and complex products."""

import definition
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import Case, cases, near, small_tiles

from canonlm.ops.kernels import api


def check(case, rotated, pairs, by_row, channels=16):
    """Values and gradients of two tensors with heads of 8 channels."""
    leaves = [leaf.detach().requires_grad_() for leaf in (*case.xs, *case.taps)]
    rows = torch.arange(case.batch if by_row else 1)
    positions = torch.arange(case.time) + 3 * rows[:, None] + 1
    angles = positions[..., None, None].double() / torch.arange(1, pairs + 1)
    cos, sin = angles.cos().float(), angles.sin().float()
    call = {"reach": case.reach, "residual": case.residual, "scale": case.scale}
    with small_tiles(case, channels):
        ys = api.rotary(leaves[:2], leaves[2:], cos, sin, rotated, 8, **call)
        grads = torch.autograd.grad(ys, leaves, case.dys)

    def by_definition(leaves, absolute=False):
        zs = [
            definition.conv(x, taps, **case.of(i))
            for i, (x, taps) in enumerate(zip(leaves[:2], leaves[2:], strict=True))
        ]
        return [definition.turned(z, angles, heads, 8, absolute) for z, heads in zip(zs, rotated, strict=True)]

    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    sums = [leaf.detach().double().abs().requires_grad_() for leaf in leaves]
    true, bounds = by_definition(exact), by_definition(sums, absolute=True)
    for y, right, bound in zip(ys, true, bounds, strict=True):
        near(y, right, case.dtype, bound)
    exact_grads = torch.autograd.grad(true, exact, [dy.double() for dy in case.dys])
    bounds = torch.autograd.grad(bounds, sums, [dy.double().abs() for dy in case.dys])
    for leaf, grad, right, bound in zip(leaves, grads, exact_grads, bounds, strict=True):
        assert grad.dtype == leaf.dtype
        near(grad, right, leaf.dtype, bound)


@settings(max_examples=16, deadline=None)
@given(
    cases(sizes=[24, 16], bias=False, state=False),
    st.sampled_from([(3, 2), (2, 0), (1, 1)]),
    st.sampled_from([4, 3, 1]),
    st.booleans(),
)
def test_rotary(case, rotated, pairs, by_row):
    check(case, rotated, pairs, by_row)


def test_heads_wider_than_a_program():
    check(Case(time=17, sizes=[24, 16], batch=2), (3, 2), 4, by_row=True, channels=4)


def test_infinite_numbers_of_other_heads_stay():
    x = torch.zeros(1, 2, 8)
    x[0, 1, 5] = torch.inf
    with small_tiles(Case()):
        [y] = api.rotary([x], [torch.zeros(8, 1, 4)], torch.ones(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), [0], 8)
    assert torch.equal(y, x)
