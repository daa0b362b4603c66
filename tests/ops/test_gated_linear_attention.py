"""Gated linear attention: the definition against a double sum, the chunked form against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops import chunks
from canonlm.ops.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_chunked,
    gated_linear_attention_recurrent,
)

EXTREMES = torch.tensor([0, -1e-8, -1, -50, -1000, -torch.inf], dtype=torch.float64)


def inputs(seed, batch, time, heads, kv_heads, *, key=4, value=3, docs=0.0, state=False, extreme=True):
    """Float64 leaves (q, k, v, g, state or None) and document ids (or None)."""
    torch.manual_seed(seed)
    q = torch.randn(batch, time, heads, key, dtype=torch.float64)
    k = torch.randn(batch, time, kv_heads, key, dtype=torch.float64)
    v = torch.randn(batch, time, kv_heads, value, dtype=torch.float64)
    g = torch.nn.functional.logsigmoid(torch.randn_like(k)) / 16
    if extreme:
        g = EXTREMES[torch.randint(0, len(EXTREMES), k.shape)]
    past = torch.randn(batch, kv_heads, key, value, dtype=torch.float64) if state else None
    doc_ids = (torch.rand(batch, time) < docs).long().cumsum(1) if docs else None
    return [x if x is None else x.requires_grad_() for x in (q, k, v, g, past)], doc_ids


def value_and_gradients(form, tensors, doc_ids, **options):
    """(o, state) and the gradients of a weighted sum of both, with respect to all inputs."""
    q, k, v, g, past = tensors
    results = form(q, k, v, g, state_BJKV=past, doc_ids_BT=doc_ids, **options)
    total = sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in results) + 0 * q.sum()
    expected = [x for x in tensors if x is not None]
    return [*results, *torch.autograd.grad(total, expected, allow_unused=True, materialize_grads=True)]


def test_the_definition_is_a_double_sum():
    """o_t is q_t times S_0 after all decays up to t, plus the k_j v_j of the same document after the decays since j."""
    (q, k, v, g, past), doc_ids = inputs(0, 2, 9, 4, 2, docs=0.2, state=True, extreme=False)
    assert len(doc_ids.unique()) > 2
    expected = torch.zeros(2, 9, 4, 3, dtype=torch.float64)
    for b in range(2):
        for t in range(9):
            for h in range(4):
                state = torch.zeros(4, 3, dtype=torch.float64)
                if doc_ids[b, t] == doc_ids[b, 0]:
                    state += g[b, : t + 1, h // 2].sum(0).exp()[:, None] * past[b, h // 2]
                for j in range(t + 1):
                    if doc_ids[b, j] == doc_ids[b, t]:
                        decay = g[b, j + 1 : t + 1, h // 2].sum(0).exp()
                        state += (decay * k[b, j, h // 2])[:, None] * v[b, j, h // 2]
                expected[b, t, h] = 0.3 * q[b, t, h] @ state
    o, _ = gated_linear_attention_recurrent(q, k, v, g, scale=0.3, state_BJKV=past, doc_ids_BT=doc_ids)
    assert_close(o, expected, atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 2),
    time=st.integers(0, 150),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    chunk=st.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    block=st.sampled_from([1, 1000, 2**18]),
    docs=st.sampled_from([0.0, 0.05, 0.7]),
    state=st.booleans(),
    extreme=st.booleans(),
)
def test_chunked_equals_the_definition(seed, batch, time, heads, chunk, block, docs, state, extreme):
    case = inputs(seed, batch, time, *heads, docs=docs, state=state, extreme=extreme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        got = value_and_gradients(gated_linear_attention_chunked, *case, chunk=chunk)
    assert_close(got, value_and_gradients(gated_linear_attention_recurrent, *case), atol=1e-9, rtol=1e-9)


def test_not_even_rounding_crosses_into_another_document():
    (q, k, v, g, _), _ = inputs(2, 1, 100, 2, 2, extreme=False)
    q, k, v, g = (x.detach().float() for x in (q, k, v, g))
    doc_ids = (torch.arange(100) >= 43).long()[None]
    alone, _ = gated_linear_attention(*(x[:, 43:] for x in (q, k, v, g)))
    k[:, :43], v[:, :43] = 1e9, 1e9
    tensors = [x.requires_grad_() for x in (q, k, v, g)]
    o, _ = gated_linear_attention(*tensors, doc_ids_BT=doc_ids)
    assert_close(o[:, 43:], alone)
    dq, dk, dv, dg = torch.autograd.grad(o[:, 43:].square().sum(), tensors)
    assert not any(x[:, :43].any() for x in (dq, dk, dv))
    assert not dg[:, 43].any()


@pytest.mark.parametrize("extreme", [False, True])
def test_float32_keeps_its_digits(extreme):
    """Strong decays beside weak ones: differences of running sums would be wrong in the third digit."""
    tensors, doc_ids = inputs(1, 1, 300, 2, 2, key=8, value=8, docs=0.01, state=True, extreme=extreme)
    exact = value_and_gradients(gated_linear_attention_recurrent, tensors, doc_ids)
    single = [x.detach().float().requires_grad_() for x in tensors]
    for got, expected in zip(value_and_gradients(gated_linear_attention_chunked, single, doc_ids), exact, strict=True):
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, atol=3e-6 * expected.abs().max().item(), rtol=0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), time=st.integers(1, 100), at=st.floats(0, 1), docs=st.sampled_from([0.0, 0.1]))
def test_a_state_continues_the_sequence(seed, time, at, docs):
    (q, k, v, g, past), doc_ids = inputs(seed, 2, time, 2, 1, docs=docs, state=True)
    cut = round(at * time)
    full = gated_linear_attention(q, k, v, g, state_BJKV=past, doc_ids_BT=doc_ids)
    outputs = []
    for part in (slice(0, cut), slice(cut, time)):
        if part.start and doc_ids is not None:  # the initial state belongs to the document of the first token
            past = past * (doc_ids[:, cut - 1] == doc_ids[:, min(cut, time - 1)])[:, None, None, None]
        ids = None if doc_ids is None else doc_ids[:, part]
        o, past = gated_linear_attention(*(x[:, part] for x in (q, k, v, g)), state_BJKV=past, doc_ids_BT=ids)
        outputs.append(o)
    assert_close((torch.cat(outputs, dim=1), past), full, atol=1e-10, rtol=0)


def test_decoding_continues_a_prefill():
    (q, k, v, g, _), _ = inputs(3, 2, 40, 4, 2, extreme=False)
    with torch.no_grad():
        full, last = gated_linear_attention(q, k, v, g)
        _, state = gated_linear_attention(*(x[:, :30] for x in (q, k, v, g)))
        for t in range(30, 40):
            o, state = gated_linear_attention(*(x[:, t : t + 1] for x in (q, k, v, g)), state_BJKV=state)
            assert_close(o[:, 0], full[:, t], atol=1e-12, rtol=0)
    assert_close(state, last, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", [gated_linear_attention_recurrent, gated_linear_attention_chunked])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_does_not_change_the_state(form, dtype):
    (q, k, v, g, past), _ = inputs(4, 2, 70, 2, 2, state=True)
    q, v, past = q.to(dtype), v.to(dtype), past.float()
    _, state = form(q, torch.zeros_like(k, dtype=dtype), v, torch.zeros_like(g, dtype=dtype), state_BJKV=past)
    assert torch.equal(state, past)


def test_bfloat16_in_bfloat16_out_with_a_float32_state():
    tensors, doc_ids = inputs(5, 2, 100, 4, 2, docs=0.05, state=True, extreme=False)
    q, k, v, g, past = (x.detach().bfloat16() for x in tensors)
    o, state = gated_linear_attention(q, k, v, g, state_BJKV=past.float(), doc_ids_BT=doc_ids)
    assert (o.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = gated_linear_attention(*(x.double() for x in (q, k, v, g)), state_BJKV=past.double(), doc_ids_BT=doc_ids)
    assert_close(state.double(), exact[1], atol=1e-5, rtol=1e-5)
    assert_close(o.double(), exact[0], atol=1e-5, rtol=2**-8)


def test_each_input_gets_its_gradient_in_its_own_dtype():
    (q, k, v, g, past), _ = inputs(6, 1, 20, 2, 1, state=True, extreme=False)
    tensors = [q.bfloat16(), k.bfloat16(), v.bfloat16(), g.float(), past.float()]
    tensors = [x.detach().requires_grad_() for x in tensors]
    gradients = value_and_gradients(gated_linear_attention, tensors, None)[2:]
    assert [x.dtype for x in gradients] == [x.dtype for x in tensors]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph(backend):
    torch.compiler.reset()
    case = inputs(7, 2, 20, 2, 1, docs=0.1, state=True)
    got = value_and_gradients(torch.compile(gated_linear_attention, fullgraph=True, backend=backend), *case)
    assert_close(got, value_and_gradients(gated_linear_attention_recurrent, *case), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("number", [0, 1])
def test_gradients_of_one_result_alone(number):
    tensors, doc_ids = inputs(9, 2, 20, 2, 1, docs=0.1, state=True)
    got, expected = (
        torch.autograd.grad(
            form(*tensors[:-1], state_BJKV=tensors[-1], doc_ids_BT=doc_ids)[number].sum(),
            tensors,
            allow_unused=True,
            materialize_grads=True,
        )
        for form in (gated_linear_attention_chunked, gated_linear_attention_recurrent)
    )
    assert_close(got, expected, atol=1e-9, rtol=1e-9)


def test_backward_under_autocast_rounds_nothing():
    tensors, _ = inputs(10, 2, 20, 2, 1, state=True)
    tensors = [x.detach().float().requires_grad_() for x in tensors]
    expected = value_and_gradients(gated_linear_attention, tensors, None)
    with torch.autocast("cpu", torch.bfloat16):
        got = value_and_gradients(gated_linear_attention, tensors, None)
    assert_close(got, expected, atol=0, rtol=0)


def test_memory_is_linear_in_length():
    def saved_bytes(time):
        (q, k, v, g, _), _ = inputs(8, 1, time, 2, 2, key=16, value=16)
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept = gated_linear_attention(q, k, v, g)
        assert kept[0].requires_grad
        return sum(sizes.values())

    assert saved_bytes(2048) < 2.05 * saved_bytes(1024)
