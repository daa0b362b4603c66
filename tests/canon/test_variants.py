"""Every variant of a Canon layer against its formula, token by token; padded, packed and in pieces."""

import itertools
import math

import pytest
import torch
from host_waits import Waits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.canon.sites import parse
from canonlm.canon.variants import make_canon

CHANNELS, HEAD_DIM, WIDTH = 16, 8, 5
TEXTS = [
    *("A", "A:k2:nores:silu:bias", "A:scaled", "A:k3:scaled:silu:bias", "A:zero", "A:k3:id", "A:avg", "A:k2:avg:nores"),
    *("A:avg:scaled", "E:smear", "K:offset", "K:dynamic", "K:dynamic:scaled:k3", "K:dynamic:zero"),
]


def make(text, seed=0):
    """The layer with random parameters, because parameters that are zero would hide errors."""
    [variant] = parse(text).values()
    layer = make_canon(variant, CHANNELS, head_dim=HEAD_DIM, input_size=WIDTH, dtype=torch.float64)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer, variant


def taps_of(layer, variant, u):
    """`[K, C]`: the factors of x_{t-i}, for i = 0, 1, ...; u is the mixer's input at t."""
    kernel = variant.kernel
    if variant.form == "avg":
        return torch.full((kernel, CHANNELS), 1 / kernel, dtype=torch.float64)
    taps = layer.weight[:, 0].t().flip(0)
    if variant.form == "dynamic":
        per_head = (layer.taps_weight @ u).view(CHANNELS // HEAD_DIM, kernel)
        taps = taps + per_head.repeat_interleave(HEAD_DIM, dim=0).t().flip(0)
    return taps


def by_formula(layer, variant, x, u):
    """One document, `[T, C]`."""
    before = torch.cat([torch.zeros(variant.kernel, CHANNELS, dtype=x.dtype), x])  # x_t is row t + K
    rows = []
    for t in range(len(x)):
        past = [before[t + variant.kernel - i] for i in range(variant.kernel)]
        if variant.form == "smear":
            gate = 1 / (1 + torch.exp(-(layer.gate * x[t][:12]).sum()))
            rows.append(x[t] + layer.strength * gate * past[1])
        elif variant.form == "offset":
            half = HEAD_DIM // 2
            old = torch.tensor([c % HEAD_DIM % half >= half // 2 for c in range(CHANNELS)])
            rows.append(torch.where(old, past[1], x[t]))
        else:
            y = sum(tap * each for tap, each in zip(taps_of(layer, variant, u[t]), past, strict=True))
            if variant.bias:
                y = y + layer.bias
            if variant.activation:
                y = y / (1 + torch.exp(-y))
            y = y + x[t] if variant.residual else y
            terms = 2 * variant.kernel + 1 if variant.form == "dynamic" else variant.kernel + 1
            rows.append(y / math.sqrt(terms) if variant.scaled else y)
    return torch.stack(rows) if rows else x


@pytest.mark.parametrize("text", TEXTS)
def test_values_and_gradients_equal_the_formula(text):
    layer, variant = make(text)
    x = torch.randn(2, 7, CHANNELS, dtype=torch.float64, requires_grad=True)
    u = torch.randn(2, 7, WIDTH, dtype=torch.float64, requires_grad=True)
    expected = torch.stack([by_formula(layer, variant, *row) for row in zip(x, u, strict=True)])
    y = layer(x, mixer_input=u)
    assert_close(y, expected, atol=1e-12, rtol=0)
    weights, tensors = torch.randn_like(y), [x, *layer.parameters(), *([u] if variant.form == "dynamic" else [])]
    got = torch.autograd.grad((y * weights).sum(), tensors)
    assert_close(got, torch.autograd.grad((expected * weights).sum(), tensors), atol=1e-11, rtol=0)


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(TEXTS),
    documents=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    pads=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    cuts=st.lists(st.integers(0, 12), max_size=4),
)
def test_padded_packed_rows_in_pieces_equal_each_document_alone(text, documents, pads, side, cuts):
    layer, variant = make(text)
    length = sum(documents)
    x, u = (torch.randn(1, length + pads, width, dtype=torch.float64) for width in (CHANNELS, WIDTH))
    real = slice(pads, None) if side == "left" else slice(0, length)
    mask, doc_ids = torch.zeros(1, length + pads), torch.zeros(1, length + pads, dtype=torch.long)
    mask[:, real] = 1
    doc_ids[:, real] = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
    if side == "right" and pads:
        doc_ids[:, length:] = doc_ids[0, length - 1]
    places = [0, *sorted(min(cut, length + pads) for cut in cuts), length + pads]
    state, parts, last = None, [], None
    for first, end in itertools.pairwise(places):
        piece = slice(first, end)
        if first == end:
            continue
        if last is not None and doc_ids[0, first] != last:
            state = torch.zeros_like(state)  # as the caller does if the state belongs to another document
        call = {"attention_mask": mask[:, piece], "doc_ids": doc_ids[:, piece], "mixer_input": u[:, piece]}
        y, state = layer(x[:, piece], state=state, return_state=True, **call)
        parts.append(y)
        last = doc_ids[0, end - 1]
    alone = zip(x[0, real].split(documents), u[0, real].split(documents), strict=True)
    expected = torch.cat([by_formula(layer, variant, *document) for document in alone])
    assert_close(torch.cat(parts, dim=1)[0, real], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("text", ["A:zero", "A:id", "A:zero:silu", "A:zero:bias", "E:smear", "K:dynamic:zero"])
def test_identity_initialisation_is_exact(text):
    [variant] = parse(text).values()
    layer = make_canon(variant, CHANNELS, head_dim=HEAD_DIM, input_size=WIDTH)
    x, u = torch.randn(2, 9, CHANNELS), torch.randn(2, 9, WIDTH)
    y = layer(x, mixer_input=u)
    assert torch.equal(y, x)
    y.square().sum().backward()
    assert any(p.grad.abs().max() > 0 for p in layer.parameters())


@pytest.mark.parametrize("text", TEXTS)
def test_a_layer_does_not_wait_for_a_gpu(text):
    layer, _ = make(text)
    x, u = torch.randn(1, 5, CHANNELS, dtype=torch.float64), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    doc_ids = torch.zeros(1, 5, dtype=torch.long)
    with Waits() as waits:
        layer(x, mixer_input=u, doc_ids=doc_ids, return_state=True)
    assert not waits.seen


@pytest.mark.parametrize("text", ["A:avg", "K:offset"])
def test_fixed_taps_are_not_parameters(text):
    [variant] = parse(text).values()
    assert not list(make_canon(variant, CHANNELS, head_dim=HEAD_DIM).parameters())


@pytest.mark.parametrize("text", TEXTS)
def test_half_precision_input_gives_half_precision_output(text):
    layer, variant = make(text)
    x, u = torch.randn(1, 5, CHANNELS, dtype=torch.float64), torch.randn(1, 5, WIDTH, dtype=torch.float64)
    y = layer.to(torch.bfloat16)(x.bfloat16(), mixer_input=u.bfloat16())
    assert y.dtype == torch.bfloat16
    expected = by_formula(layer.double(), variant, x.bfloat16().double()[0], u.bfloat16().double()[0])
    assert_close(y[0].double(), expected, atol=0.05, rtol=0.02)
