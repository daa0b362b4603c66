"""The recurrences: their definitions, the chunked forms against them, and what every recurrence promises."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops import chunks
from canonlm.ops import gated_delta_rule as delta_module
from canonlm.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_chunked, gated_delta_rule_recurrent
from canonlm.ops.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_chunked,
    gated_linear_attention_recurrent,
)
from canonlm.ops.numba_decays import products_on_cpu
from canonlm.ops.ssd import products, ssd, ssd_chunked, ssd_recurrent

DOUBLE = torch.float64


def extremes(values, shape):
    return torch.tensor(values, dtype=DOUBLE)[torch.randint(len(values), shape)]


def of_gla(batch, time, heads, groups, size, extreme):
    q = torch.randn(batch, time, heads, size, dtype=DOUBLE)
    k, v = (torch.randn(batch, time, groups, n, dtype=DOUBLE) for n in (size, size - 1))
    g = torch.nn.functional.logsigmoid(torch.randn_like(k)) / 16
    if extreme:
        g = extremes([0, -1e-8, -1, -50, -1000, -torch.inf], k.shape)
    return q, k, v, g, torch.randn(batch, groups, size, size - 1, dtype=DOUBLE)


def of_ssd(batch, time, heads, groups, size, extreme):
    x = torch.randn(batch, time, heads, size - 1, dtype=DOUBLE)
    B, C = torch.randn(2, batch, time, groups, size, dtype=DOUBLE)
    dt = torch.nn.functional.softplus(torch.randn(batch, time, heads, dtype=DOUBLE) - 2)
    A = -torch.linspace(0.5, 16, heads, dtype=DOUBLE)
    if extreme:
        dt, A = extremes([0, 1e-11, 1e-3, 0.05, 1], dt.shape), A - 1000
    return x, dt, A, B, C, torch.randn(batch, heads, size - 1, size, dtype=DOUBLE)


def of_the_delta_rule(batch, time, heads, groups, size, extreme, same_keys=False):
    """same_keys: one direction and its opposite at full strength, where the system to solve is densest."""
    tokens = batch, time, heads
    q, k = (torch.nn.functional.normalize(torch.randn(*tokens, size, dtype=DOUBLE), dim=-1) for _ in range(2))
    if same_keys and time:
        k = k[:, :1].expand_as(k) * torch.randn(*tokens, 1).sign()
    g = -torch.randn(tokens, dtype=DOUBLE).exp() / 10
    if extreme:
        g = extremes([0, -1e-8, -0.3, -50, -1000, -torch.inf], tokens)
    beta = (3 * torch.randn(tokens, dtype=DOUBLE)).sigmoid()
    beta = torch.where(torch.rand(tokens) < 0.2, (beta > 0.5).double(), beta)  # exactly 0 and 1, too
    v, state = torch.randn(*tokens, size - 1, dtype=DOUBLE), torch.randn(batch, heads, size, size - 1, dtype=DOUBLE)
    return q, k, v, g, torch.ones_like(beta) if same_keys else beta, state


def of_the_vector_rule(*args, **more):
    """A decay per channel, some of them 1e-4 and 1 - 1e-7; strengths up to 2; read keys that are not the keys."""
    q, k, v, _, beta, state = of_the_delta_rule(*args, **more)
    values = [0, -1e-7, -9.2, -1000, -torch.inf] if args[-1] else [0, -1e-7, -0.05, -0.3, -2, -9.2]
    return q, k, v, extremes(values, k.shape), 2 * beta, torch.rand_like(k) * k, state


@dataclass(frozen=True)
class Op:
    """draw: inputs and the state. gates: the inputs that stay in single precision. silent: the inputs that are zero for
    a token that leaves the state as it is."""

    run: Callable
    chunked: Callable
    recurrent: Callable
    state: str
    draw: Callable
    gates: tuple[int, ...]
    silent: tuple[int, ...]

    def inputs(self, seed, batch=2, time=40, heads=(2, 2), size=4, *, docs=0.0, state=True, extreme=False, **more):
        """Float64 leaves (the state, or None, is the last), and document ids (or None)."""
        torch.manual_seed(seed)
        *tokens, past = self.draw(batch, time, *heads, size, extreme, **more)
        doc_ids = (torch.rand(batch, time) < docs).long().cumsum(1) if docs else None
        leaves = [x.requires_grad_() for x in (*tokens, past)]
        return leaves if state else [*leaves[:-1], None], doc_ids

    def call(self, form, tensors, doc_ids=None, **options):
        return form(*tensors[:-1], **{self.state: tensors[-1]}, doc_ids_BT=doc_ids, **options)

    def results(self, form, tensors, doc_ids=None, **options):
        """The output, the state, and the gradients of a weighted sum of both."""
        pair = self.call(form, tensors, doc_ids, **options)
        total = sum((x * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in pair) + 0 * tensors[0].sum()
        leaves = [x for x in tensors if x is not None]
        return [*pair, *torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)]

    def narrow(self, tensors):
        """In bfloat16, but for gates and the state."""
        full = {*self.gates, len(tensors) - 1}
        return [x.detach().to(torch.float32 if i in full else torch.bfloat16) for i, x in enumerate(tensors)]


OPS = {
    "gla": Op(gated_linear_attention, gated_linear_attention_chunked, gated_linear_attention_recurrent, "state_BJKV",
              of_gla, (3,), (1, 3)),
    "ssd": Op(ssd, ssd_chunked, ssd_recurrent, "state_BHPN", of_ssd, (1, 2), (1,)),
    "delta rule": Op(gated_delta_rule, gated_delta_rule_chunked, gated_delta_rule_recurrent, "state_BHKV",
                     of_the_delta_rule, (3, 4), (3, 4)),
    "vector rule": Op(gated_delta_rule, gated_delta_rule_chunked, gated_delta_rule_recurrent, "state_BHKV",
                      of_the_vector_rule, (3, 4), (3, 4)),
}  # fmt: skip
every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
single = torch.float32


def part(tensors, tokens):
    """Some of the tokens; ssd's A has none."""
    return [x if x.ndim == 1 else x[:, tokens] for x in tensors]


def singles(tensors):
    return [x.detach().float().requires_grad_() for x in tensors]


# -- the definitions --------------------------------------------------------------------------------------------------


def test_gated_linear_attention_is_a_double_sum():
    """o_t is q_t times S_0 after all decays up to t, plus the k_j v_j of the same document after the decays since j."""
    (q, k, v, g, past), doc_ids = OPS["gla"].inputs(0, 2, 9, (4, 2), docs=0.2)
    assert len(doc_ids.unique()) > 2
    expected = torch.zeros(2, 9, 4, 3, dtype=DOUBLE)
    for b, t, h in torch.cartesian_prod(*map(torch.arange, (2, 9, 4))).tolist():
        state = torch.zeros(4, 3, dtype=DOUBLE)
        if doc_ids[b, t] == doc_ids[b, 0]:
            state += g[b, : t + 1, h // 2].sum(0).exp()[:, None] * past[b, h // 2]
        for j in range(t + 1):
            if doc_ids[b, j] == doc_ids[b, t]:
                decay = g[b, j + 1 : t + 1, h // 2].sum(0).exp()
                state += (decay * k[b, j, h // 2])[:, None] * v[b, j, h // 2]
        expected[b, t, h] = 0.3 * q[b, t, h] @ state
    o, _ = gated_linear_attention_recurrent(q, k, v, g, scale=0.3, state_BJKV=past, doc_ids_BT=doc_ids)
    assert_close(o, expected, atol=1e-12, rtol=0)


def test_ssd_is_a_lower_triangular_matrix():
    """y = M x plus the decayed initial state, with M_ij = C_i . B_j exp(A (dt_{j+1} + … + dt_i)) dt_j where i and j
    share a document."""
    (x, dt, A, B, C, past), doc_ids = OPS["ssd"].inputs(0, 2, 9, (4, 2), docs=0.2)
    assert len(doc_ids.unique()) > 2
    expected = torch.zeros_like(x)
    for b, h, i in torch.cartesian_prod(*map(torch.arange, (2, 4, 9))).tolist():
        if doc_ids[b, i] == doc_ids[b, 0]:
            expected[b, i, h] += (A[h] * dt[b, : i + 1, h].sum()).exp() * past[b, h] @ C[b, i, h // 2]
        for j in range(i + 1):
            if doc_ids[b, i] == doc_ids[b, j]:
                decay = (A[h] * dt[b, j + 1 : i + 1, h].sum()).exp()
                expected[b, i, h] += C[b, i, h // 2] @ B[b, j, h // 2] * decay * dt[b, j, h] * x[b, j, h]
    y, _ = ssd_recurrent(x, dt, A, B, C, state_BHPN=past, doc_ids_BT=doc_ids)
    assert_close(y, expected, atol=1e-12, rtol=0)


def of_each_token(state, q, k, v, g, beta, r):
    """The rule as a product of matrices: S = (I - k (beta r)^T) diag(exp(g)) S + k (beta v)^T."""
    eye = torch.eye(len(k), dtype=DOUBLE)
    state = (eye - torch.outer(k, beta * r)) @ (g.exp().expand(len(k))[:, None] * state) + torch.outer(k, beta * v)
    return state, len(k) ** -0.5 * q @ state


@pytest.mark.parametrize("kind", ["per head", "per channel", "vectors", "two steps"])
def test_the_delta_rules_are_products_of_matrices(kind):
    """Several tokens of several documents; with two steps per token, the decay is before the first."""
    name, steps = "delta rule" if kind in ("per head", "two steps") else "vector rule", 1 + (kind == "two steps")
    (q, k, v, g, beta, *r, past), doc_ids = OPS[name].inputs(0, 2, 12, (2, 2), docs=0.2)
    q, g, doc_ids = q[:, ::steps], g[:, ::steps], doc_ids[:, ::steps]
    assert len(doc_ids.unique()) > 2
    r = r if kind == "vectors" else []
    got = gated_delta_rule(q, k, v, g, beta, *r, steps=steps, state_BHKV=past, doc_ids_BT=doc_ids)
    reads, still = r[0] if r else k, torch.zeros((), dtype=DOUBLE)
    for b, h in torch.cartesian_prod(torch.arange(2), torch.arange(2)).tolist():
        state = past[b, h]
        for t in range(12 // steps):
            if t and doc_ids[b, t] != doc_ids[b, t - 1]:
                state = torch.zeros_like(state)
            for i in range(t * steps, (t + 1) * steps):
                decay = still if i % steps else g[b, t, h]
                state, o = of_each_token(state, q[b, t, h], *(x[b, i, h] for x in (k, v)), decay, beta[b, i, h],
                                         reads[b, i, h])  # fmt: skip
            assert_close(got[0][b, t, h], o, atol=1e-10, rtol=0)
        assert_close(got[1][b, h], state, atol=1e-10, rtol=0)


# -- the chunked forms ------------------------------------------------------------------------------------------------


@every_op
@settings(max_examples=25)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 3),
    time=st.integers(0, 150),
    heads=st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]),
    size=st.sampled_from([2, 4, 9]),
    chunk=st.sampled_from([1, 2, 16, 64]),
    block=st.sampled_from([1, 1000, 2**18]),
    docs=st.sampled_from([0.0, 0.05, 0.7]),
    state=st.booleans(),
    extreme=st.booleans(),
)
def test_chunked_equals_the_definition(op, seed, batch, time, heads, size, chunk, block, docs, state, extreme):
    case = op.inputs(seed, batch, time, heads, size, docs=docs, state=state, extreme=extreme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "BLOCK", block)
        got = op.results(op.chunked, *case, chunk=chunk)
    assert_close(got, op.results(op.recurrent, *case), atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_scale_of_the_delta_rule(scale):
    op = OPS["delta rule"]
    case = op.inputs(1, time=70, docs=0.1)
    got, expected = (op.results(form, *case, scale=scale) for form in (op.chunked, op.recurrent))
    assert_close(got, expected, atol=1e-9, rtol=0)
    assert (got[0] == op.results(op.chunked, *case)[0]).all() == (scale is None)


@pytest.mark.parametrize("kind", ["usual", "extreme", "same_keys"])
@every_op
def test_float32_keeps_its_digits(op, kind):
    """Strong decays beside weak ones: differences of running sums would be wrong in the third digit."""
    if kind == "same_keys" and op is not OPS["delta rule"]:
        pytest.skip("only the delta rule solves a system of keys; the vector rule draws it with strengths up to 2")
    how = {} if kind == "usual" else {kind: True}
    tensors, doc_ids = op.inputs(1, 2, 300, size=9, docs=0.01, **how)
    exact = op.results(op.recurrent, tensors, doc_ids)
    for got, expected in zip(op.results(op.chunked, singles(tensors), doc_ids), exact, strict=True):
        assert got.dtype == single
        assert_close(got.double(), expected, atol=1e-5 * max(1, expected.abs().max().item()), rtol=0)


@every_op
def test_not_even_rounding_crosses_into_another_document(op):
    tensors, _ = op.inputs(2, 1, 100, state=False)
    tensors = [x.detach().float() for x in tensors[:-1]]
    doc_ids = (torch.arange(100) >= 43).long()[None]
    alone, _ = op.run(*part(tensors, slice(43, None)))
    of_op = {"gla": (1, 2), "ssd": (0, 3), "delta rule": (2,), "vector rule": (2,)}
    for at in of_op[next(n for n, o in OPS.items() if o is op)]:
        tensors[at][:, :43] = 1e9
    tensors = [x.requires_grad_() for x in tensors]
    o, _ = op.run(*tensors, doc_ids_BT=doc_ids)
    assert_close(o[:, 43:], alone)
    for at, gradient in enumerate(torch.autograd.grad(o[:, 43:].square().sum(), tensors)):
        if gradient.ndim > 1 and at not in op.gates:
            assert not gradient[:, :43].any()


# -- states -----------------------------------------------------------------------------------------------------------


@every_op
@settings(max_examples=20)
@given(seed=st.integers(0, 10**6), time=st.integers(1, 100), at=st.floats(0, 1), docs=st.sampled_from([0.0, 0.1]))
def test_a_state_continues_the_sequence(op, seed, time, at, docs):
    (*tokens, past), doc_ids = op.inputs(seed, 2, time, docs=docs)
    cut = round(at * time)
    full = op.call(op.run, [*tokens, past], doc_ids)
    outputs = []
    for now in (slice(0, cut), slice(cut, time)):
        if now.start and doc_ids is not None:  # the initial state belongs to the document of the first token
            past = past * (doc_ids[:, cut - 1] == doc_ids[:, min(cut, time - 1)])[:, None, None, None]
        ids = None if doc_ids is None else doc_ids[:, now]
        o, past = op.call(op.run, [*part(tokens, now), past], ids)
        outputs.append(o)
    assert_close((torch.cat(outputs, dim=1), past), full, atol=1e-10, rtol=1e-10)


@every_op
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_padding_does_not_change_the_state(op, dtype):
    """Alone, and after other tokens in their chunk."""
    tensors, _ = op.inputs(4, time=110)
    tensors = op.narrow(tensors) if dtype == torch.bfloat16 else singles(tensors)
    for at in op.silent:
        tensors[at].data[:, 40:] = 0
    *tokens, past = tensors
    for form in (op.chunked, op.recurrent):
        assert torch.equal(op.call(form, [*part(tokens, slice(40, None)), past])[1], past)
        plain = op.call(form, [*part(tokens, slice(0, 40)), past])[1]
        assert_close(op.call(form, tensors)[1], plain, atol=1e-5, rtol=1e-5)


# -- precision and gradients ------------------------------------------------------------------------------------------


@every_op
def test_bfloat16_in_bfloat16_out_with_a_float32_state(op):
    """And every input gets its gradient in its own dtype."""
    tensors, doc_ids = op.inputs(5, time=100, size=9, docs=0.05)
    narrow = [x.requires_grad_() for x in op.narrow(tensors)]
    got = op.results(op.run, narrow, doc_ids)
    exact = op.call(op.recurrent, [x.detach().double() for x in narrow], doc_ids)
    assert [x.dtype for x in got] == [torch.bfloat16, single, *(x.dtype for x in narrow)]
    assert_close(got[1].double(), exact[1], atol=1e-5, rtol=1e-5)
    assert_close(got[0].double(), exact[0], atol=1e-5, rtol=2**-8)


@pytest.mark.parametrize("dtype", [single, torch.bfloat16])
@every_op
def test_autocast_is_for_projections(op, dtype):
    """The dtypes of the inputs decide, of a step of decoding, too."""
    tensors, _ = op.inputs(10)
    tensors = [x.requires_grad_() for x in (op.narrow(tensors) if dtype == torch.bfloat16 else singles(tensors))]
    expected = op.results(op.run, tensors)
    with torch.autocast("cpu", torch.bfloat16):
        got = op.results(op.run, tensors)
        with torch.no_grad():
            one, state = op.call(op.run, [*part(tensors[:-1], slice(0, 1)), tensors[-1]])
    assert_close(got, expected, atol=0, rtol=0)
    assert (one.dtype, state.dtype) == (dtype, single)


@pytest.mark.parametrize("name", ["gla", "delta rule", "vector rule"])
def test_a_decay_to_nothing_has_no_gradient(name):
    """Not one of rounding either: g may be a large number times a parameter, whose gradient it multiplies."""
    tensors = singles(OPS[name].inputs(5, time=100, extreme=True)[0])
    gradient = OPS[name].results(OPS[name].chunked, tensors)[2 + 3]
    assert (erased := tensors[3].exp() == 0).any()
    assert gradient.any()
    assert not gradient[erased].any()


def test_strided_inputs_are_read_and_left_alone():
    op = OPS["delta rule"]
    tensors, doc_ids = op.inputs(9, time=70, docs=0.1)
    strided = [x.detach().transpose(0, -1).clone().transpose(0, -1).requires_grad_() for x in tensors]
    before = [x.clone() for x in (*strided, doc_ids)]
    assert_close(
        op.results(op.chunked, strided, doc_ids), op.results(op.recurrent, tensors, doc_ids), atol=1e-10, rtol=0
    )
    assert_close([*strided, doc_ids], before, atol=0, rtol=0)


@every_op
def test_memory_for_the_backward_is_linear_in_time(op):
    def saved(time):
        sizes = {}

        def note(x):
            sizes[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        tensors, _ = op.inputs(8, 1, time, size=17, state=False)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            kept = op.call(op.run, tensors)
        assert kept[0].requires_grad
        return sum(sizes.values())

    assert saved(2048) < 2.05 * saved(1024)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("size", [1, 64])
def test_products_of_decays_are_the_same_in_both_forms(dtype, size):
    decays = torch.stack([torch.rand(3, size), extremes([0, 1e-30, 1e-4, 1 - 1e-7, 1], (3, size))]).to(dtype)
    assert torch.equal(products_on_cpu(decays), products(decays))
    single = torch.tensor([[0.5, 0.25, 3.0]], dtype=dtype)
    assert products(single).tolist() == [[[1, 0, 0], [0.25, 1, 0], [0.75, 3, 1]]]


# -- the compiler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@every_op
def test_compiles_as_one_graph(op, backend):
    torch.compiler.reset()
    any_length = True if backend == "inductor" else None  # generated code is slow to compile: one for both lengths
    compiled = torch.compile(op.run, fullgraph=True, backend=backend, dynamic=any_length)
    for time in (20, 33):  # the second with a dynamic length
        case = op.inputs(7, 2, time, docs=0.1)
        assert_close(op.results(compiled, *case), op.results(op.recurrent, *case), atol=1e-9, rtol=1e-9)
    torch.compiler.reset()


@pytest.mark.parametrize("docs", [False, True])
def test_operator_of_the_delta_rule_passes_opcheck(docs):
    """Shapes, strides and gradients of fake tensors equal the real ones; nothing is changed in place."""
    *tokens, state = singles(OPS["delta rule"].inputs(11, time=8)[0])
    tokens = [x if x.ndim == 4 else x[..., None] for x in tokens]
    starts = (torch.arange(8) == torch.tensor([[3], [8]])) if docs else None
    torch.library.opcheck(delta_module._forward, (*tokens, None, starts, state, 0.5, False, 4))
    *tokens, state = singles(OPS["vector rule"].inputs(11, time=8)[0])
    tokens[4] = tokens[4][..., None]
    torch.library.opcheck(delta_module._forward, (*tokens, starts, state, 0.5, True, 4))
