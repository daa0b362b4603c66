"""The chunked gated delta rule and its backward against the step-by-step recurrence, and against transformers'."""

import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from canonlm.ops import chunks, fla
from canonlm.ops import gated_delta_rule as module
from canonlm.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_chunked, gated_delta_rule_recurrent

EXTREME = torch.tensor([0.0, -1e-8, -0.3, -50.0, -1000.0, -torch.inf])


def inputs(
    seed, batch=2, time=70, heads=3, keys=5, values=4, *, extreme=False, same_keys=False, docs=False, state=True
):
    """q, k, v, g, beta and the state, all double; and document ids."""
    torch.manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64)

    tokens = batch, time, heads
    q, k = (torch.nn.functional.normalize(normal(*tokens, keys), dim=-1) for _ in range(2))
    if same_keys:  # one direction and its opposite at full strength: the system to solve is densest
        k = k[:, :1].expand_as(k) * normal(*tokens, 1).sign() if time else k
    g = EXTREME.double()[torch.randint(len(EXTREME), tokens)] if extreme else -normal(*tokens).exp() / 10
    beta = (3 * normal(*tokens)).sigmoid()
    beta = torch.where(torch.rand(tokens) < 0.2, (beta > 0.5).double(), beta)  # including exactly 0 and 1
    tensors = [q, k, normal(*tokens, values), g, torch.ones_like(beta) if same_keys else beta]
    if state:
        tensors.append(normal(batch, heads, keys, values))
    doc_ids = (torch.rand(batch, time) < 0.1).long().cumsum(1) if docs else None
    return [x.requires_grad_() for x in tensors], doc_ids


def results(form, tensors, doc_ids=None, **options):
    """o, the last state, and the gradients of all inputs for fixed weights on both."""
    q, k, v, g, beta, *state = tensors
    outputs = form(q, k, v, g, beta, state_BHKV=state[0] if state else None, doc_ids_BT=doc_ids, **options)
    loss = sum((y * torch.arange(y.numel()).view(y.shape).cos()).sum() for y in outputs)
    loss = loss + sum(0 * x.sum() for x in tensors)  # so that all inputs have gradients, even without tokens
    return [*outputs, *torch.autograd.grad(loss, tensors)]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 3),
    time=st.integers(0, 150),
    values=st.sampled_from([1, 4, 9]),
    extreme=st.booleans(),
    docs=st.booleans(),
    state=st.booleans(),
    scale=st.sampled_from([None, 0.3]),
    chunk=st.sampled_from([1, 2, 7, 16, 64]),
    block=st.sampled_from([1, 500, 2**17]),
)
def test_chunked_equals_the_definition(seed, batch, time, values, extreme, docs, state, scale, chunk, block):
    tensors, doc_ids = inputs(seed, batch, time, values=values, extreme=extreme, docs=docs, state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        got = results(gated_delta_rule_chunked, tensors, doc_ids, scale=scale, chunk=chunk)
    expected = results(gated_delta_rule_recurrent, tensors, doc_ids, scale=scale)
    assert_close(got, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
def test_gradcheck(docs):
    tensors, doc_ids = inputs(0, 1, 5, 2, 3, 2, docs=docs)

    def form(q, k, v, g, beta, state):
        return gated_delta_rule_chunked(q, k, v, g, beta, state_BHKV=state, doc_ids_BT=doc_ids, chunk=2)

    assert torch.autograd.gradcheck(form, tensors)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), time=st.integers(1, 150), chunk=st.sampled_from([32, 64]), kind=st.integers(0, 2))
def test_float32_is_accurate(seed, time, chunk, kind):
    """Even after decays so strong that a running sum in float32 loses the next one's digits, and for equal keys."""
    tensors, doc_ids = inputs(seed, time=time, keys=16, extreme=kind == 1, same_keys=kind == 2, docs=True)
    tensors = [x.detach().float().requires_grad_() for x in tensors]
    got = results(gated_delta_rule_chunked, tensors, doc_ids, chunk=chunk)
    exact = results(gated_delta_rule_recurrent, [x.detach().double().requires_grad_() for x in tensors], doc_ids)
    for one, other in zip(got, exact, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-5 * other.abs().max().clamp(min=1)


@pytest.mark.parametrize("time", [1, 64, 130])
def test_equals_transformers(time):
    tensors, _ = inputs(time, time=time, keys=16, values=16, state=False)
    tensors = [x.detach().float().requires_grad_() for x in tensors]

    def theirs(form):
        def call(*args, state_BHKV, doc_ids_BT):
            return form(*args, initial_state=state_BHKV, output_final_state=True)

        return call

    got = results(gated_delta_rule, tensors)
    assert_close(got, results(theirs(qwen3_next.torch_chunk_gated_delta_rule), tensors), atol=2e-5, rtol=1e-5)
    with torch.no_grad():
        o, state = qwen3_next.torch_recurrent_gated_delta_rule(*tensors, initial_state=None, output_final_state=True)
    assert_close(got[:2], [o, state], atol=1e-5, rtol=1e-5)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), cut=st.integers(0, 70), docs=st.booleans())
def test_two_parts_equal_the_whole(seed, cut, docs):
    (*tensors, state), doc_ids = inputs(seed, docs=docs)
    outputs = []
    with torch.no_grad():
        full = gated_delta_rule(*tensors, state_BHKV=state, doc_ids_BT=doc_ids)
        for part in (slice(0, cut), slice(cut, 70)):
            if docs and part.start:
                state = state * (doc_ids[:, cut - 1 : cut + 1].diff().sum(1) == 0)[:, None, None, None]
            ids = doc_ids[:, part] if docs else None
            o, state = gated_delta_rule(*(x[:, part] for x in tensors), state_BHKV=state, doc_ids_BT=ids)
            outputs.append(o)
    assert_close((torch.cat(outputs, 1), state), full, atol=1e-10, rtol=0)


def test_token_by_token_equals_the_whole():
    (*tensors, state), _ = inputs(4, time=20)
    with torch.no_grad():
        full = gated_delta_rule(*tensors, state_BHKV=state)
        outputs = []
        for t in range(20):
            o, state = gated_delta_rule(*(x[:, t : t + 1] for x in tensors), state_BHKV=state)
            outputs.append(o)
    assert_close((torch.cat(outputs, 1), state), full, atol=1e-10, rtol=0)


@pytest.mark.parametrize("form", [gated_delta_rule_chunked, gated_delta_rule_recurrent])
@pytest.mark.parametrize("pads", [1, 70])
def test_padding_does_not_change_the_state(form, pads):
    """A token with beta = 0 and g = 0 and any key, even if it follows others in their chunk."""
    (q, k, v, g, beta, state), _ = inputs(5, time=40 + pads)
    at_end = torch.arange(40 + pads)[:, None] >= 40
    g, beta = g.masked_fill(at_end, 0), beta.masked_fill(at_end, 0)
    with torch.no_grad():
        after = form(*(x[:, 40:] for x in (q, k, v, g, beta)), state_BHKV=state)[1]
        assert_close(after, state, atol=0, rtol=0)
        padded = form(q, k, v, g, beta, state_BHKV=state)[1]
        plain = form(*(x[:, :40] for x in (q, k, v, g, beta)), state_BHKV=state)[1]
    assert_close(padded, plain, atol=1e-12, rtol=0)


@pytest.mark.parametrize("form", [gated_delta_rule_chunked, gated_delta_rule_recurrent])
def test_bfloat16_is_rounded_once(form):
    tensors, _ = inputs(6, keys=16, values=16)
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in tensors[:3])
    g, beta, state = (x.detach().float().requires_grad_() for x in tensors[3:])
    narrow = [q, k, v, g, beta, state]
    got = results(form, narrow)
    exact = results(gated_delta_rule_recurrent, [x.detach().double().requires_grad_() for x in narrow])
    # Summed in float32, a result halfway between two bfloat16 numbers may round the other way: one in thousands.
    assert got[0].dtype == torch.bfloat16
    assert (got[0] != exact[0].bfloat16()).float().mean() < 0.003
    assert got[1].dtype == torch.float32
    assert_close(got[1], exact[1].float(), atol=1e-5, rtol=1e-5)
    assert [x.dtype for x in got[2:]] == [x.dtype for x in narrow]


def test_backward_under_autocast_rounds_nothing():
    tensors, _ = inputs(7)
    tensors = [x.detach().float().requires_grad_() for x in tensors]
    expected = results(gated_delta_rule, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        got = results(gated_delta_rule, tensors)
    assert_close(got, expected, atol=0, rtol=0)


def test_gradient_of_one_result_alone():
    tensors, _ = inputs(8)
    for number in (0, 1):
        got, expected = (
            torch.autograd.grad(
                form(*tensors[:5], state_BHKV=tensors[5])[number].sum(),
                tensors,
                allow_unused=True,
                materialize_grads=True,
            )
            for form in (gated_delta_rule_chunked, gated_delta_rule_recurrent)
        )
        assert_close(got, expected, atol=1e-10, rtol=0)


def test_strided_inputs_are_read_and_left_alone():
    tensors, doc_ids = inputs(9, docs=True)
    strided = [x.detach().transpose(0, -1).clone().transpose(0, -1).requires_grad_() for x in tensors]
    before = [x.clone() for x in (*strided, doc_ids)]
    got = results(gated_delta_rule_chunked, strided, doc_ids)
    assert_close(got, results(gated_delta_rule_recurrent, tensors, doc_ids), atol=1e-10, rtol=0)
    assert_close([*strided, doc_ids], before, atol=0, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
def test_operator_passes_opcheck(docs):
    """Shapes, strides and gradients of fake tensors equal the real ones; nothing is changed in place."""
    tensors, _ = inputs(11, time=8)
    *tokens, state = [x.detach().float().requires_grad_() for x in tensors]
    tokens = [x if x.ndim == 4 else x[..., None] for x in tokens]
    doc_ids = torch.zeros(2, 9, dtype=torch.long)
    if docs:
        doc_ids[0, 3:] = 1
    torch.library.opcheck(module._forward, (*tokens, doc_ids, state, 0.5, 4))


@pytest.mark.every(2)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("docs", [False, True])
def test_compiles_without_graph_breaks_and_equals_eager(docs, backend):
    torch._dynamo.reset()
    compiled = torch.compile(gated_delta_rule, fullgraph=True, backend=backend)
    for time in (70, 33):  # the second with a dynamic length
        tensors, doc_ids = inputs(12, time=time, docs=docs)
        expected = results(gated_delta_rule, tensors, doc_ids)
        assert_close(results(compiled, tensors, doc_ids), expected, atol=1e-12, rtol=0)
    torch._dynamo.reset()


def test_memory_for_the_backward_is_linear_in_time():
    def saved(time):
        sizes = {}

        def pack(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tensors, _ = inputs(13, 1, time, 2, 32, 32, state=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            gated_delta_rule(*tensors)
        return sum(sizes.values())

    short, long = saved(512), saved(1024)
    assert 1.9 * short < long < 2.1 * short
    assert long < 8 * sum(x.nbytes for x in inputs(13, 1, 1024, 2, 32, 32, state=False)[0])


def fake_kernel(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens=None):
    """fla's documented behaviour, by the definition: `cu_seqlens` cut one long row; each part has its own state."""
    assert output_final_state
    assert q.dtype == k.dtype == v.dtype == torch.bfloat16
    assert g.dtype == beta.dtype == torch.float32
    assert initial_state is None or initial_state.dtype == torch.float32
    if cu_seqlens is None:
        return gated_delta_rule_recurrent(q, k, v, g, beta, scale=scale, state_BHKV=initial_state)
    assert (len(q), cu_seqlens.dtype, cu_seqlens[0], cu_seqlens[-1]) == (1, torch.int32, 0, q.shape[1])
    parts = []
    for i, (start, end) in enumerate(cu_seqlens.unfold(0, 2, 1).tolist()):
        state = None if initial_state is None else initial_state[i : i + 1]
        tokens = (x[:, start:end] for x in (q, k, v, g, beta))
        parts.append(gated_delta_rule_recurrent(*tokens, scale=scale, state_BHKV=state))
    outputs, states = zip(*parts, strict=True)
    return torch.cat(outputs, 1), torch.cat(states)


@pytest.mark.parametrize("scale", [None, 0.2])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("docs", [False, True])
def test_kernel_is_called_with_the_expected_arguments(docs, state, scale, monkeypatch):
    fake = ModuleType("fla.ops.gated_delta_rule")
    fake.chunk_gated_delta_rule = fake_kernel
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", fake)
    monkeypatch.setitem(sys.modules, "fla.ops", ModuleType("fla.ops"))
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setattr(fla, "takes", lambda x: x.dtype == torch.bfloat16)
    monkeypatch.setattr(module, "_kernel_is_right", lambda with_gradients: True)  # it is a stand-in
    tensors, doc_ids = inputs(14, docs=docs, state=state)
    tensors = [x.detach().to(torch.bfloat16 if i in (0, 2) else torch.float32) for i, x in enumerate(tensors)]
    q, k, v, g, beta, *initial = tensors
    options = {"scale": scale, "state_BHKV": initial[0] if state else None, "doc_ids_BT": doc_ids}
    o, last = gated_delta_rule(q, k, v, g, beta, **options)
    expected_o, expected_last = gated_delta_rule_chunked(q, k.bfloat16(), v, g, beta, **options)
    assert (o.dtype, last.dtype) == (torch.bfloat16, torch.float32)
    assert_close(o, expected_o, atol=1e-3, rtol=1e-2)
    assert_close(last, expected_last, atol=1e-5, rtol=1e-5)


def test_wide_keys_do_not_use_the_kernel(monkeypatch):
    monkeypatch.setattr(fla, "takes", lambda *_: True)
    monkeypatch.setattr(module, "_kernel_is_right", lambda with_gradients: True)
    monkeypatch.setattr(fla, "run", lambda *_, **__: pytest.fail("called the kernel"))
    tensors, _ = inputs(15, time=3, keys=257)
    assert_close(gated_delta_rule(*tensors[:5])[0], gated_delta_rule_chunked(*tensors[:5])[0])
