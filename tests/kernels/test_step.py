"""Decoding step by step equals one prefill, and updates the state in place."""

import definition
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EPSILON, Case, cases, near, small_tiles

from canonlm.ops.kernels import api

SOME = settings(max_examples=12, deadline=None)
EPS = 1e-6


@SOME
@given(cases(sizes=[20, 5, 7], docs=False, pads=False, time=6), st.sampled_from(["none", "silu"]), st.integers(1, 5))
def test_steps_equal_one_prefill(case, activation, prefix):
    call = {"biases": case.biases, "residual": case.residual, "activation": activation, "scale": case.scale}
    with small_tiles(case):
        ys, after = api.canon_with_state(case.xs, case.taps, state=case.past, **call)
        first = [x[:, :prefix] for x in case.xs]
        parts, state = api.canon_with_state(first, case.taps, state=case.past, **call)
        steps, place = [parts], state.data_ptr()
        for t in range(prefix, case.time):
            steps.append(api.step([x[:, t : t + 1] for x in case.xs], case.taps, state, **call))
    assert state.data_ptr() == place
    assert torch.equal(state, after)
    for y, parts in zip(ys, zip(*steps, strict=True), strict=True):
        near(torch.cat(parts, dim=1), y, case.dtype)


@SOME
@given(cases(sizes=[20, 5], docs=False, state=True, time=1))
def test_a_step_equals_the_definition_and_padding_keeps_the_state(case):
    state = case.past.clone()
    with small_tiles(case):
        ys = api.step(case.xs, case.taps, state, biases=case.biases, mask=case.mask, **case.how())
    for i, (y, x) in enumerate(zip(ys, case.xs, strict=True)):
        near(y, definition.conv(x.double(), case.taps[i].double(), **case.of(i)), case.dtype)
    assert torch.equal(state, case.final_state())


@SOME
@given(
    cases(sizes=[20, 20], docs=False, state=True, bias=False, time=1), st.sampled_from(["silu", "gelu_pytorch_tanh"])
)
def test_gated_step_equals_gated_of_one_token(case, activation):
    state, call = case.past.clone(), {"residual": case.residual, "activation": activation, "scale": case.scale}
    with small_tiles(case):
        y = api.gated_step(*case.xs, case.taps, state, mask=case.mask, **call)
        same, after = api.gated_with_state(
            *case.xs, case.taps, state=case.past, reach=case.reach, last=case.last, **call
        )
    near(y, same, case.dtype)
    assert torch.equal(state, after)


@SOME
@given(cases(docs=False, state=True, bias=False, time=1))
def test_normed_step_equals_norm_then_step(case):
    x, weight, state = case.xs[0], case.taps[0][:, 0, 0] + 1, case.past.clone()
    h = definition.rms_norm(x.double(), weight.double(), EPS)
    with small_tiles(case):
        _, y = api.normed_step(
            x, None, weight, EPS, case.taps[0], state, mask=case.mask, residual=case.residual, scale=case.scale
        )
        kept = case.past.clone()
        [same] = api.step([h.to(x.dtype)], case.taps, kept, mask=case.mask, residual=case.residual, scale=case.scale)
    # The norm in float32 may round the other way if the exact one is close to halfway between two numbers.
    assert ((state - kept).abs() <= (2 * EPSILON[case.dtype] + 1e-6) * kept.abs()).all()
    if torch.equal(state, kept):
        near(y, same, case.dtype)


def test_states_of_three_tensors_in_a_cache_with_strided_rows():
    case = Case(sizes=[20, 5, 7], state=True, time=1, batch=2)
    cache = torch.zeros(2, 40, 4)
    cache[:, 2:34] = case.past
    with small_tiles(case):
        ys = api.step(case.xs, case.taps, cache[:, 2:34])
        same = api.step(case.xs, case.taps, kept := case.past.clone())
    assert all(torch.equal(a, b) for a, b in zip(ys, same, strict=True))
    assert torch.equal(cache[:, 2:34], kept)
    assert (cache[:, :2] == 0).all()
    assert (cache[:, 34:] == 0).all()
