"""SSD: the definition against the paper's matrix form, the chunked form against the definition."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops import chunks
from canonlm.ops.ssd import ssd, ssd_chunked, ssd_recurrent

EXTREMES = torch.tensor([0, 1e-11, 1e-3, 0.05, 1], dtype=torch.float64)  # with A ~ -1000


def inputs(seed, batch, time, heads, groups, *, channels=3, size=4, docs=0.0, state=False, extreme=True):
    """Float64 leaves (x, dt, A, B, C, state or None) and document ids (or None)."""
    torch.manual_seed(seed)
    x = torch.randn(batch, time, heads, channels, dtype=torch.float64)
    B, C = torch.randn(2, batch, time, groups, size, dtype=torch.float64).unbind(0)
    dt = torch.nn.functional.softplus(torch.randn(batch, time, heads, dtype=torch.float64) - 2)
    A = -torch.linspace(0.5, 16, heads, dtype=torch.float64)
    if extreme:
        dt, A = EXTREMES[torch.randint(0, len(EXTREMES), dt.shape)], A - 1000
    past = torch.randn(batch, heads, channels, size, dtype=torch.float64) if state else None
    doc_ids = (torch.rand(batch, time) < docs).long().cumsum(1) if docs else None
    return [t if t is None else t.requires_grad_() for t in (x, dt, A, B, C, past)], doc_ids


def value_and_gradients(form, tensors, doc_ids, **options):
    """(y, state) and the gradients of a weighted sum of both, with respect to all inputs."""
    *tokens, past = tensors
    results = form(*tokens, state_BHPN=past, doc_ids_BT=doc_ids, **options)
    total = sum((t * torch.arange(t.numel()).view(t.shape).cos()).sum() for t in results) + 0 * tokens[0].sum()
    expected = [t for t in tensors if t is not None]
    return [*results, *torch.autograd.grad(total, expected, allow_unused=True, materialize_grads=True)]


def test_the_definition_is_a_lower_triangular_matrix():
    """y = M x plus the decayed initial state, with M_ij = C_i . B_j exp(A (dt_{j+1} + … + dt_i)) dt_j where i and j
    share a document."""
    (x, dt, A, B, C, past), doc_ids = inputs(0, 2, 9, 4, 2, docs=0.2, state=True, extreme=False)
    assert len(doc_ids.unique()) > 2
    expected = torch.zeros_like(x)
    for b in range(2):
        for h in range(4):
            for i in range(9):
                if doc_ids[b, i] == doc_ids[b, 0]:
                    expected[b, i, h] += (A[h] * dt[b, : i + 1, h].sum()).exp() * past[b, h] @ C[b, i, h // 2]
                for j in range(i + 1):
                    if doc_ids[b, i] == doc_ids[b, j]:
                        decay = (A[h] * dt[b, j + 1 : i + 1, h].sum()).exp()
                        expected[b, i, h] += C[b, i, h // 2] @ B[b, j, h // 2] * decay * dt[b, j, h] * x[b, j, h]
    y, _ = ssd_recurrent(x, dt, A, B, C, state_BHPN=past, doc_ids_BT=doc_ids)
    assert_close(y, expected, atol=1e-12, rtol=0)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 2),
    time=st.integers(0, 150),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    chunk=st.sampled_from([1, 3, 16, 50, 64, 200]),
    block=st.sampled_from([1, 1000, 2**18]),
    docs=st.sampled_from([0.0, 0.05, 0.7]),
    state=st.booleans(),
    extreme=st.booleans(),
)
def test_chunked_equals_the_definition(seed, batch, time, heads, chunk, block, docs, state, extreme):
    case = inputs(seed, batch, time, *heads, docs=docs, state=state, extreme=extreme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        got = value_and_gradients(ssd_chunked, *case, chunk=chunk)
    assert_close(got, value_and_gradients(ssd_recurrent, *case), atol=1e-9, rtol=1e-9)


def test_not_even_rounding_crosses_into_another_document():
    (x, dt, A, B, C, _), _ = inputs(2, 1, 100, 2, 1, extreme=False)
    x, dt, A, B, C = (t.detach().float() for t in (x, dt, A, B, C))
    doc_ids = (torch.arange(100) >= 43).long()[None]
    alone, _ = ssd(x[:, 43:], dt[:, 43:], A, B[:, 43:], C[:, 43:])
    x[:, :43], B[:, :43] = 1e9, 1e9
    tensors = [t.requires_grad_() for t in (x, dt, B, C)]
    y, _ = ssd(tensors[0], tensors[1], A, *tensors[2:], doc_ids_BT=doc_ids)
    assert_close(y[:, 43:], alone)
    for gradient in torch.autograd.grad(y[:, 43:].square().sum(), tensors):
        assert not gradient[:, :43].any()


@pytest.mark.parametrize("extreme", [False, True])
def test_float32_keeps_its_digits(extreme):
    """Strong decays beside weak ones: differences of running sums would be wrong in the third digit."""
    tensors, doc_ids = inputs(1, 1, 300, 2, 2, channels=8, size=8, docs=0.01, state=True, extreme=extreme)
    exact = value_and_gradients(ssd_recurrent, tensors, doc_ids)
    single = [t.detach().float().requires_grad_() for t in tensors]
    for got, expected in zip(value_and_gradients(ssd_chunked, single, doc_ids), exact, strict=True):
        assert got.dtype == torch.float32
        assert_close(got.double(), expected, atol=1e-5 * expected.abs().max().item(), rtol=0)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), time=st.integers(1, 100), at=st.floats(0, 1), docs=st.sampled_from([0.0, 0.1]))
def test_a_state_continues_the_sequence(seed, time, at, docs):
    (x, dt, A, B, C, past), doc_ids = inputs(seed, 2, time, 2, 1, docs=docs, state=True)
    cut = round(at * time)
    full = ssd(x, dt, A, B, C, state_BHPN=past, doc_ids_BT=doc_ids)
    outputs = []
    for part in (slice(0, cut), slice(cut, time)):
        if part.start and doc_ids is not None:  # the initial state belongs to the document of the first token
            past = past * (doc_ids[:, cut - 1] == doc_ids[:, min(cut, time - 1)])[:, None, None, None]
        ids = None if doc_ids is None else doc_ids[:, part]
        y, past = ssd(x[:, part], dt[:, part], A, B[:, part], C[:, part], state_BHPN=past, doc_ids_BT=ids)
        outputs.append(y)
    assert_close((torch.cat(outputs, dim=1), past), full, atol=1e-10, rtol=1e-10)


def test_decoding_continues_a_prefill():
    (x, dt, A, B, C, _), _ = inputs(3, 2, 40, 4, 2, extreme=False)
    with torch.no_grad():
        full, last = ssd(x, dt, A, B, C)
        _, state = ssd(x[:, :30], dt[:, :30], A, B[:, :30], C[:, :30])
        for t in range(30, 40):
            now = slice(t, t + 1)
            y, state = ssd(x[:, now], dt[:, now], A, B[:, now], C[:, now], state_BHPN=state)
            assert_close(y[:, 0], full[:, t], atol=1e-12, rtol=0)
    assert_close(state, last, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", [ssd_recurrent, ssd_chunked])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padding_does_not_change_the_state(form, dtype):
    (x, dt, A, B, C, past), _ = inputs(4, 2, 70, 2, 2, state=True)
    x, A, B, C, past = x.to(dtype), A.float(), B.to(dtype), C.to(dtype), past.float()
    _, state = form(x, torch.zeros_like(dt, dtype=torch.float32), A, B, C, state_BHPN=past)
    assert torch.equal(state, past)


def test_bfloat16_in_bfloat16_out_with_a_float32_state():
    tensors, doc_ids = inputs(5, 2, 100, 4, 2, docs=0.05, state=True, extreme=False)
    x, dt, A, B, C, past = (t.detach().bfloat16() for t in tensors)
    dt, A, past = dt.float(), A.float(), past.float()
    y, state = ssd(x, dt, A, B, C, state_BHPN=past, doc_ids_BT=doc_ids)
    assert (y.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    exact = ssd(*(t.double() for t in (x, dt, A, B, C)), state_BHPN=past.double(), doc_ids_BT=doc_ids)
    assert_close(state.double(), exact[1], atol=1e-5, rtol=1e-5)
    assert_close(y.double(), exact[0], atol=1e-5, rtol=2**-8)


def test_each_input_gets_its_gradient_in_its_own_dtype():
    (x, dt, A, B, C, past), _ = inputs(6, 1, 20, 2, 1, state=True, extreme=False)
    tensors = [x.bfloat16(), dt.float(), A.float(), B.bfloat16(), C.bfloat16(), past.float()]
    tensors = [t.detach().requires_grad_() for t in tensors]
    gradients = value_and_gradients(ssd, tensors, None)[2:]
    assert [t.dtype for t in gradients] == [t.dtype for t in tensors]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_as_one_graph(backend):
    torch.compiler.reset()
    case = inputs(7, 2, 20, 4, 2, docs=0.1, state=True)
    got = value_and_gradients(torch.compile(ssd, fullgraph=True, backend=backend), *case)
    assert_close(got, value_and_gradients(ssd_recurrent, *case), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("number", [0, 1])
def test_gradients_of_one_result_alone(number):
    tensors, doc_ids = inputs(9, 2, 20, 4, 2, docs=0.1, state=True)
    got, expected = (
        torch.autograd.grad(
            form(*tensors[:-1], state_BHPN=tensors[-1], doc_ids_BT=doc_ids)[number].sum(),
            tensors,
            allow_unused=True,
            materialize_grads=True,
        )
        for form in (ssd_chunked, ssd_recurrent)
    )
    assert_close(got, expected, atol=1e-9, rtol=1e-9)


def test_backward_under_autocast_rounds_nothing():
    tensors, _ = inputs(10, 2, 20, 4, 2, state=True)
    tensors = [x.detach().float().requires_grad_() for x in tensors]
    expected = value_and_gradients(ssd, tensors, None)
    with torch.autocast("cpu", torch.bfloat16):
        got = value_and_gradients(ssd, tensors, None)
    assert_close(got, expected, atol=0, rtol=0)


def test_memory_is_linear_in_length():
    def saved_bytes(time):
        (x, dt, A, B, C, _), _ = inputs(8, 1, time, 2, 1, channels=16, size=16)
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept = ssd(x, dt, A, B, C)
        assert kept[0].requires_grad
        return sum(sizes.values())

    assert saved_bytes(2048) < 2.05 * saved_bytes(1024)
