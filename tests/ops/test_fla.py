"""The arguments of flash-linear-attention's kernels, and the use of their results, with stand-ins for the kernels."""

import sys
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from operators import Operators
from torch.testing import assert_close

from canonlm.ops import fla
from canonlm.ops import gated_linear_attention as op_of_gla
from canonlm.ops import ssd as op_of_ssd
from canonlm.ops.gated_linear_attention import gated_linear_attention, gated_linear_attention_recurrent
from canonlm.ops.ssd import ssd
from canonlm.ops.varlen import documents_of

BATCH, TIME, KEY, VALUE = 3, 12, 4, 5
ON_A_GPU = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, numel=lambda: 1)


def documents():
    """Rows with three documents, with one, and with many; the rows' ids overlap."""
    ids = torch.zeros(BATCH, TIME, dtype=torch.long)
    ids[0, 5:], ids[0, 11:] = 1, 2
    ids[2] = torch.arange(TIME) // 2
    return ids


def stand_in(calls, *, scalar):
    """A kernel called as fla 0.6.0's `chunk_gla`, or `chunk_simple_gla` where the decay is a scalar."""

    def kernel(
        q,
        k,
        v,
        g,
        scale=None,
        initial_state=None,
        output_final_state=False,
        cu_seqlens=None,
    ):
        assert q.shape == k.shape
        assert v.shape[:3] == q.shape[:3]
        assert g.shape == (q.shape[:3] if scalar else q.shape)
        assert q.dtype == k.dtype == v.dtype
        assert g.dtype == torch.float32
        assert g.isfinite().all()
        assert scale is not None or not scalar
        limits = [(b, 0, q.shape[1]) for b in range(len(q))]
        if cu_seqlens is not None:
            assert (len(q), cu_seqlens.dtype) == (1, torch.int32)
            limits = [(0, start, end) for start, end in pairwise(cu_seqlens)]
        if initial_state is not None:
            assert initial_state.dtype == torch.float32
            assert initial_state.shape == (len(limits), q.shape[2], q.shape[3], v.shape[3])
        calls.append((q, cu_seqlens))
        outputs, states = torch.zeros_like(v), []
        for n, (row, start, end) in enumerate(limits):
            part = [x[row : row + 1, start:end] for x in (q, k, v, g[..., None].expand_as(k) if scalar else g)]
            state = None if initial_state is None else initial_state[n : n + 1]
            o, state = gated_linear_attention_recurrent(*part, scale=scale, state_BJKV=state)
            outputs[row, start:end] = o[0]
            states.append(state)
        return outputs, torch.cat(states) if output_final_state else None

    return kernel


@pytest.fixture
def calls(monkeypatch):
    """Stand-ins replace the kernels and get CPU tensors; a list of the arguments of their calls."""
    calls = []
    for family, name, scalar in (("gla", "chunk_gla", False), ("simple_gla", "chunk_simple_gla", True)):
        module = ModuleType(f"fla.ops.{family}")
        setattr(module, name, stand_in(calls, scalar=scalar))
        monkeypatch.setitem(sys.modules, f"fla.ops.{family}", module)
    monkeypatch.setattr(fla, "takes", lambda *_: True)
    for module in (op_of_gla, op_of_ssd):
        monkeypatch.setattr(module, "_kernel_is_right", lambda with_gradients: True)
    return calls


def of_gla(dtype):
    tensors = [torch.randn(BATCH, TIME, heads, size, dtype=dtype) for heads, size in ((4, KEY), (2, KEY), (2, VALUE))]
    g = torch.nn.functional.logsigmoid(torch.randn(BATCH, TIME, 2, KEY, dtype=dtype))
    g[0, 3, 0, 0] = -torch.inf
    return gated_linear_attention, [*tensors, g], {"state_BJKV": torch.randn(BATCH, 2, KEY, VALUE)}


def of_ssd(dtype):
    x, dt = torch.randn(BATCH, TIME, 4, VALUE, dtype=dtype), torch.rand(BATCH, TIME, 4)
    B, C = torch.randn(2, BATCH, TIME, 2, KEY, dtype=dtype)
    return ssd, [x, dt, -torch.rand(4), B, C], {"state_BHPN": torch.randn(BATCH, 4, VALUE, KEY)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("docs", [None, documents()], ids=["rows", "documents"])
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("case", [of_gla, of_ssd])
def test_kernels_and_our_implementation_agree(calls, monkeypatch, case, with_state, docs, dtype):
    torch.manual_seed(0)
    op, tensors, state = case(dtype)
    if not with_state:
        state = dict.fromkeys(state)

    def value_and_gradients():
        results = op(*tensors, **state, doc_ids_BT=docs)
        total = sum((x.double() * torch.arange(x.numel()).view(x.shape).cos()).sum() for x in results)
        return [*results, *torch.autograd.grad(total, leaves)]

    leaves = [x.requires_grad_() for x in (*tensors, *state.values()) if x is not None]
    by_kernel = value_and_gradients()
    assert len(calls) == 1
    monkeypatch.setattr(fla, "takes", lambda *_: False)
    ours = value_and_gradients()
    assert len(calls) == 1
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.03}
    assert_close(by_kernel, ours, **close)


def test_documents_become_one_long_row(calls):
    op, tensors, state = of_gla(torch.float32)
    op(*tensors, **state, doc_ids_BT=documents())
    ((q, cu_seqlens),) = calls
    assert q.shape == (1, BATCH * TIME, 4, KEY)
    assert torch.equal(q[0, TIME : 2 * TIME], tensors[0][1])
    assert cu_seqlens.tolist() == [0, 5, 11, 12, 24, 26, 28, 30, 32, 34, *[36] * 7]


def test_given_document_ids_are_not_searched(calls):
    given = documents_of(documents())
    for op, tensors, state in (of_gla(torch.float32), of_ssd(torch.float32)):
        expected = op(*tensors, **state, doc_ids_BT=documents())
        with Operators() as operators:
            got = op(*tensors, **state, doc_ids_BT=documents(), documents=given)
        assert calls[-1][1] is given.cu_seqlens
        assert "aten.nonzero.default" not in operators.seen
        assert_close(got, expected, atol=0, rtol=0)


def test_the_kernels_are_for_half_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: True)
    assert fla.takes(ON_A_GPU)
    assert not fla.takes(SimpleNamespace(is_cuda=True, dtype=torch.float32, numel=lambda: 1))
    assert not fla.takes(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, numel=lambda: 0))
    assert not fla.takes(torch.ones(1, dtype=torch.bfloat16))


@pytest.fixture
def nothing_asked_yet(monkeypatch):
    monkeypatch.setitem(sys.modules, "fla.ops", None)  # importing it raises ImportError
    monkeypatch.setattr(fla, "installed", fla.cached_constant(fla.installed.__wrapped__))


@pytest.mark.usefixtures("nothing_asked_yet")
def test_a_missing_package_warns_once_and_only_on_a_gpu(recwarn):
    assert not fla.takes(torch.ones(1, dtype=torch.bfloat16))
    assert not recwarn
    assert not fla.takes(ON_A_GPU)
    assert not fla.takes(ON_A_GPU)
    (warning,) = recwarn
    assert "pip install 'canonlm[gpu]'" in str(warning.message)


@pytest.mark.usefixtures("nothing_asked_yet")
def test_the_compiler_treats_the_import_check_as_a_constant():
    def double_without_kernels(x):
        return x if fla.installed() else 2 * x

    with pytest.warns(UserWarning, match="cannot be imported"):
        doubled = torch.compile(double_without_kernels, fullgraph=True, backend="eager")(torch.ones(2))
    assert doubled.tolist() == [2, 2]
