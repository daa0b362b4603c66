"""The kernels with the launches of the card, over several tiles each, against plain loops in float64."""

import definition
import pytest
import torch
from kernel_cases import DTYPES, Case, near
from torch.nn import functional

from canonlm.ops.kernels import api

pytestmark = pytest.mark.gpu

PLAIN = {"activation": "none", "residual": True}
CASES = {
    "plain": PLAIN,
    "SiLU, bias": {"activation": "silu", "residual": False, "bias": True},
    "documents": {"docs": True} | PLAIN,
    "pads, state": {"pads": True, "state": True} | PLAIN,
    "K = 8": {"kernel": 8, "docs": True, "state": True} | PLAIN,
}


def case_of(device, **how):
    large = {"batch": 2, "time": 301, "sizes": [520, 264]} if device.type == "cuda" else {"time": 9, "sizes": [20, 12]}
    return Case(**large | how)


def there(x, device):
    return None if x is None else x.detach().to(device).requires_grad_(x.is_floating_point())


def leaves(tensors, device):
    return [there(x, device) for x in tensors]


def wide(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def compare(got, exact, dtype):
    """Gradients of weights are sums over all tokens, so errors are relative to the largest number."""
    limit = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    for index, (one, other) in enumerate(zip(got, exact, strict=True)):
        error = (one.detach().cpu().double() - other.detach()).abs().max() / other.detach().abs().max().clamp(min=1e-6)
        assert error < limit, f"result {index} is off by {error:.1e} of its largest number"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_canon_and_its_gradients(kernels, name, dtype):
    case = case_of(kernels, dtype=dtype, **CASES[name])
    given = [*case.xs, *case.taps, *case.biases, *([] if case.past is None else [case.past])]
    count = len(case.xs)

    def split(tensors):
        state = tensors[-1] if case.past is not None else None
        return tensors[:count], tensors[count : 2 * count], tensors[2 * count : 2 * count + len(case.biases)], state

    got = leaves(given, kernels)
    xs, taps, biases, state = split(got)
    ys = api.canon(xs, taps, biases=biases, state=state, reach=there(case.reach, kernels), **case.how())
    torch.autograd.backward(ys, [dy.to(kernels) for dy in case.dys])
    exact = wide(given)
    xs, taps, biases, state = split(exact)
    states = [None] * count if state is None else state.split(case.sizes, dim=1)
    expected = [
        definition.conv(x, tap, bias, past, docs=case.doc_ids, mask=case.mask, **case.how())
        for x, tap, bias, past in zip(xs, taps, biases or [None] * count, states, strict=True)
    ]
    torch.autograd.backward(expected, [dy.double() for dy in case.dys])
    for y, other in zip(ys, expected, strict=True):
        near(y.detach().cpu(), other.detach(), dtype)
    compare([x.grad for x in got], [x.grad for x in exact], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_and_its_gradients(kernels, dtype):
    case = case_of(kernels, dtype=dtype, docs=True, activation="silu")
    size = case.sizes[0]
    given = [case.xs[0], case.xs[0].flip(1), case.taps[0], case.taps[0].flip(0)]
    got, exact = leaves(given, kernels), wide(given)
    y = api.gated(*got[:2], got[2:], reach=there(case.reach, kernels))
    y.backward(case.dys[0].to(kernels))
    gate, up = (definition.conv(x, taps, docs=case.doc_ids) for x, taps in zip(exact[:2], exact[2:], strict=True))
    expected = functional.silu(gate) * up
    expected.backward(case.dys[0].double())
    assert y.shape[-1] == size
    compare([y, *(x.grad for x in got)], [expected, *(x.grad for x in exact)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_normed_and_its_gradients(kernels, dtype):
    case = case_of(kernels, dtype=dtype, docs=True)
    weight = 1 + case.taps[0][:, 0, 0] / 4
    given = [case.xs[0], case.xs[0].flip(1), weight, case.taps[0]]
    got, exact = leaves(given, kernels), wide(given)
    s, y = api.normed(got[0], got[1], got[2], 1e-5, got[3], reach=there(case.reach, kernels))
    (s + y).backward(case.dys[0].to(kernels))
    true_s = exact[0] + exact[1]
    true_y = definition.conv(definition.rms_norm(true_s, exact[2], 1e-5), exact[3], docs=case.doc_ids)
    (true_s + true_y).backward(case.dys[0].double())
    compare([s, y, *(x.grad for x in got)], [true_s, true_y, *(x.grad for x in exact)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_and_its_gradients(kernels, dtype):
    case, heads, head_dim, pairs = case_of(kernels, dtype=dtype, docs=True), (2, 1), 4, 2
    angles = torch.arange(case.time)[None, :, None, None].double() / torch.arange(1, 1 + pairs)
    got, exact = leaves([*case.xs, *case.taps], kernels), wide([*case.xs, *case.taps])
    table = (each.float().to(kernels) for each in (angles.cos(), angles.sin()))
    ys = api.rotary(got[:2], got[2:], *table, heads, head_dim, reach=there(case.reach, kernels))
    torch.autograd.backward(ys, [dy.to(kernels) for dy in case.dys])
    zs = [definition.conv(x, taps, docs=case.doc_ids) for x, taps in zip(exact[:2], exact[2:], strict=True)]
    expected = [definition.turned(z, angles, count, head_dim) for z, count in zip(zs, heads, strict=True)]
    torch.autograd.backward(expected, [dy.double() for dy in case.dys])
    compare([*ys, *(x.grad for x in got)], [*expected, *(x.grad for x in exact)], dtype)


def test_gradients_are_the_same_in_every_run(kernels):
    case = case_of(kernels, dtype=torch.bfloat16)
    xs, taps = leaves(case.xs, kernels), leaves(case.taps, kernels)
    dys = [dy.to(kernels) for dy in case.dys]
    first, second = (torch.autograd.grad(api.canon(xs, taps), [*xs, *taps], dys) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("batch", [1, 64])
def test_steps_in_a_graph_equal_one_prefill(kernels, captured, batch):
    """The interpreter cannot test the barrier between reading and updating a state; a graph repeats it often."""
    case = case_of(kernels, batch=batch if kernels.type == "cuda" else 2, time=12, state=True)
    xs, taps, past = leaves(case.xs, kernels), leaves(case.taps, kernels), case.past.to(kernels)
    full, after = api.canon_with_state(xs, taps, state=past)
    token, state = [x[:, :1].clone() for x in xs], past.clone()
    made = []
    step = captured(lambda: made.append(api.step(token, taps, state)), 1)
    state.copy_(past)  # the capture has updated it
    for t in range(case.time):
        for one, x in zip(token, xs, strict=True):
            one.copy_(x[:, t : t + 1])
        step()
        for y, expected in zip(made[-1], full, strict=True):
            torch.testing.assert_close(y, expected[:, t : t + 1], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(state, after)
