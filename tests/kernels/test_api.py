"""The kernels as operators: torch's requirements, its compiler, and activation checkpointing."""

import pytest
import torch
from kernel_cases import Case, small_tiles

from canonlm.ops.kernels import api

OPS = torch.ops.canonlm


def leaves(tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def samples():
    """Pairs of an operator and its arguments."""
    case = Case(time=9, sizes=[12, 12], state=True, docs=True, bias=True, batch=2)
    xs, taps, biases, past = leaves(case.xs), leaves(case.taps), leaves(case.biases), case.past.clone().requires_grad_()
    weight, one = leaves([case.biases[0]])[0], [x[:, :1].detach() for x in case.xs]
    fixed = [tap.detach() for tap in case.taps]
    r = torch.rand(2, 9)
    yield OPS.conv.default, (xs, taps, biases, past, case.reach, True, 1, 1.0)
    yield OPS.conv.default, (xs[:1], taps[:1], [], None, None, True, 0, 1.0)
    yield OPS.conv_backward.default, (case.dys, case.xs, fixed, [], case.past, None, True, 0, 1.0)
    yield OPS.conv_with_state.default, (case.xs, fixed, [], case.past, None, None, True, 0, 1.0)
    yield OPS.gated.default, (*xs, taps, past, case.reach, True, 1, 1.0)
    yield OPS.gated_backward.default, (case.dys[0], *case.xs, fixed, None, None, True, 1, 1.0)
    yield OPS.gated_with_state.default, (*case.xs, fixed, case.past, None, None, True, 1, 1.0)
    yield OPS.normed.default, (xs[0], None, weight, 1e-5, taps[0], None, case.reach, True, 1.0)
    yield OPS.normed.default, (xs[0], xs[1], weight, 1e-5, taps[0], None, None, True, 1.0)
    args = case.dys[0], case.dys[1], case.xs[0], case.biases[0], fixed[0], r, None, None, True, 1.0
    yield OPS.normed_backward.default, args
    args = case.xs[0], case.xs[1], case.biases[0], 1e-5, fixed[0], None, None, None, True, 1.0
    yield OPS.normed_with_state.default, args
    table = [torch.rand(1, 9, 1, 3)] * 2
    yield OPS.rotary.default, (xs, taps, *table, case.reach, [2, 1], 6, True, 1.0)
    yield OPS.rotary_backward.default, (case.dys, case.xs, fixed, *table, None, [2, 1], 6, True, 1.0)
    yield OPS.step.default, (one, fixed, [], case.past.clone(), None, [x.clone() for x in one], True, 0, 1.0)
    yield OPS.gated_step.default, (*one, fixed, case.past.clone(), None, True, 1, 1.0)
    yield OPS.normed_step.default, (one[0], case.biases[0], 1e-5, fixed[0], case.past[:, :12].clone(), None, True, 1.0)


@pytest.mark.parametrize("index", range(16))
def test_opcheck(index):
    op, args = list(samples())[index]
    with small_tiles(Case()):
        torch.library.opcheck(op, args)


def block_inputs():
    case = Case(time=9, sizes=[12, 12, 12], docs=True)
    return leaves([*case.xs[:2], case.taps[0][:, 0, 0] + 1, *case.taps]), case.reach


OPERATORS = {
    "canon": lambda x, taps, *_: api.canon([x], [taps])[0],
    "gated": lambda x, taps, up, _: api.gated(x, up, [taps, taps.detach()]),
    "normed": lambda x, taps, branch, weight: api.normed(x, branch, weight, 1e-5, taps)[1],
    "rotary": lambda x, taps, *_: api.rotary([x], [taps], *[torch.ones(1, 9, 1, 3)] * 2, [2], 6)[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_second_derivatives_and_forward_mode_are_refused(name):
    """They would be zeros, of every input."""
    [x, other, weight, *_, taps], _ = block_inputs()

    def operator(x, taps):
        return OPERATORS[name](x, taps, other.detach(), weight.detach())

    with small_tiles(Case()):
        for gradient in torch.autograd.grad(operator(x, taps).sum(), [x, taps], create_graph=True):
            with pytest.raises(NotImplementedError, match=r"^gradients of kernels .* cannot be differentiated: .*$"):
                gradient.sum().backward()
        with pytest.raises(NotImplementedError, match=r"^Triton kernels have no forward mode; .*$"):
            torch.func.jvp(operator, (x, taps), (x, taps))


def test_a_compiled_step_moves_the_state_in_place():
    case = Case(time=1, sizes=[12, 12], state=True)

    def token(x, y, state):
        a, b = api.step([x, y], case.taps, state)
        return api.gated_step(a, b, case.taps, state)

    state, same = case.past.clone(), case.past.clone()
    with small_tiles(Case()), torch.no_grad():
        compiled = torch.compile(token, fullgraph=True)(*case.xs, state)
        torch.testing.assert_close(compiled, token(*case.xs, same))
    assert torch.equal(state, same)


def test_compiled_for_any_length():
    taps = Case(sizes=[12]).taps
    compiled = torch.compile(lambda x: api.canon([x], taps)[0], fullgraph=True, dynamic=True)
    with small_tiles(Case()), torch.no_grad():
        for time in (5, 7, 1, 12):
            x = Case(time=time, sizes=[12]).xs[0]
            torch.testing.assert_close(compiled(x), api.canon([x], taps)[0])


def test_nothing_but_inputs_is_saved_for_the_backward():
    case, saved = Case(time=9, sizes=[12, 12]), []

    def pack(tensor):
        saved.append(tensor.data_ptr())
        return tensor

    xs, taps, table = leaves(case.xs), leaves(case.taps), [torch.ones(1, 9, 1, 6)] * 2
    with small_tiles(Case()), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        api.canon(xs, taps)
        api.gated(*xs, taps)
        api.rotary(xs, taps, *table, [1, 0], 12)
    assert set(saved) <= {tensor.data_ptr() for tensor in (*xs, *taps, *table)}


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
def test_under_autocast_and_with_parameters_of_another_dtype(weights):
    case = Case(time=9, sizes=[12], dtype=torch.bfloat16)
    [x], [taps] = leaves(case.xs), leaves([tap.to(weights) for tap in case.taps])
    with small_tiles(Case()), torch.autocast("cpu", dtype=torch.bfloat16):
        [y] = api.canon([x], [taps])
        y.sum().backward()
    assert (y.dtype, x.grad.dtype, taps.grad.dtype) == (torch.bfloat16, torch.bfloat16, weights)


def test_empty_inputs():
    with small_tiles(Case()):
        [y] = api.canon([torch.zeros(0, 5, 12)], [torch.zeros(12, 1, 4)])
    assert y.shape == (0, 5, 12)


def test_inputs_that_the_kernels_accept():
    x = torch.zeros(1, 2, 4)
    assert api.runs_on(x, x.bfloat16())
    assert not api.runs_on(x, x.double())
    assert api.fits_normed(2048, 4)
    assert not api.fits_normed(4096, 4)
    assert not api.fits_normed(2048, 8)
