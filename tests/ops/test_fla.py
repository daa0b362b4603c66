"""The contract with flash-linear-attention: what its kernels get and give, with the definitions in their place."""

import sys
from dataclasses import replace
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from operators import Operators
from test_recurrences import OPS, of_the_vector_rule
from torch.testing import assert_close

from canonlm.ops import fla, gated_delta_rule, gated_linear_attention, ssd
from canonlm.ops.varlen import documents_of

ON_A_GPU = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, numel=lambda: 1)
DOC_IDS = torch.tensor([[0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2], [0] * 12, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]])
BORDERS = [0, 5, 11, 12, 24, 26, 28, 30, 32, 34, *[36] * 7]


def of_gla(q, k, v, g, scale, state):
    return gated_linear_attention.gated_linear_attention_recurrent(q, k, v, g, scale=scale, state_BJKV=state)


def of_simple_gla(q, k, v, g, scale, state):
    assert g.shape == q.shape[:3]
    return of_gla(q, k, v, g[..., None].expand_as(k), scale, state)


def of_the_delta_rule(q, k, v, g, beta, scale, state):
    assert beta.dtype == torch.float32
    return gated_delta_rule.gated_delta_rule_recurrent(q, k, v, g, beta, scale=scale, state_BHKV=state)


KERNELS = {
    "gla": ("chunk_gla", of_gla),
    "simple_gla": ("chunk_simple_gla", of_simple_gla),
    "gated_delta_rule": ("chunk_gated_delta_rule", of_the_delta_rule),
    "kda": ("chunk_kda", of_the_delta_rule),
}


def of_kda(*args):
    *tokens, _, state = of_the_vector_rule(*args)  # without other read keys, for which there is no kernel
    return *tokens, state


OF_KERNELS = {**OPS, "vector rule": replace(OPS["vector rule"], draw=of_kda)}


@pytest.fixture
def calls(monkeypatch):
    """The kernels of fla 0.6.0, by the definitions and for CPU tensors; a list of the borders that they got."""
    calls = []

    def kernel_of(definition):
        def kernel(scale=None, initial_state=None, output_final_state=False, cu_seqlens=None, **inputs):
            q, k, v, g = (inputs[name] for name in "qkvg")
            assert output_final_state
            assert q.dtype == k.dtype == v.dtype
            assert g.dtype == torch.float32
            assert g.isfinite().all()
            assert q.shape == k.shape
            assert q.shape[:3] == v.shape[:3] == g.shape[:3]
            limits = [(b, 0, q.shape[1]) for b in range(len(q))]
            if cu_seqlens is not None:
                assert (len(q), cu_seqlens.dtype) == (1, torch.int32)
                limits = [(0, *pair) for pair in pairwise(cu_seqlens.tolist())]
            if initial_state is not None:
                assert initial_state.dtype == torch.float32
                assert initial_state.shape == (len(limits), *q.shape[2:], v.shape[3])
            calls.append(cu_seqlens)
            o, states = torch.zeros_like(v), []
            for n, (row, start, end) in enumerate(limits):
                tokens = {name: x[row : row + 1, start:end] for name, x in inputs.items()}
                past = None if initial_state is None else initial_state[n : n + 1]
                o[row, start:end], state = definition(**tokens, scale=scale, state=past)
                states.append(state)
            return o, torch.cat(states)

        return kernel

    for family, (name, definition) in KERNELS.items():
        module = ModuleType(f"fla.ops.{family}")
        setattr(module, name, kernel_of(definition))
        monkeypatch.setitem(sys.modules, f"fla.ops.{family}", module)
    monkeypatch.setattr(fla, "takes", lambda *_: True)
    for module in (gated_linear_attention, ssd, gated_delta_rule):
        monkeypatch.setattr(module, "_kernel_is_right", lambda with_gradients: True)
    monkeypatch.setattr(gated_delta_rule, "_channel_kernel_is_right", lambda with_gradients: True)
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("doc_ids", [None, DOC_IDS], ids=["rows", "documents"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("op", OF_KERNELS.values(), ids=OF_KERNELS)
def test_kernels_get_and_give_what_their_documentation_says(calls, monkeypatch, op, state, doc_ids, dtype):
    tensors, _ = op.inputs(14, 3, 12, (4, 2), 5, state=state, extreme=op is OPS["gla"])
    narrow = [None if x is None else x.detach().to(torch.float32 if i in op.gates else dtype).requires_grad_()
              for i, x in enumerate(tensors)]  # fmt: skip
    by_kernel = op.results(op.run, narrow, doc_ids)
    assert len(calls) == 1
    if doc_ids is not None:  # one long row; given borders are not computed again
        given = documents_of(DOC_IDS)
        assert calls[0].tolist() == BORDERS
        with Operators() as operators:
            op.call(op.run, narrow, doc_ids, documents=given)
        assert calls.pop() is given.cu_seqlens
        assert "aten.nonzero.default" not in operators.seen
    monkeypatch.setattr(fla, "takes", lambda *_: False)
    ours = op.results(op.run, narrow, doc_ids)
    assert len(calls) == 1
    close = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.1, "rtol": 0.03}
    assert_close(by_kernel, ours, **close)


@pytest.mark.parametrize(("name", "size"), [("delta rule", 258), ("vector rule", 4)])
def test_wide_keys_and_other_read_keys_do_not_use_the_kernels(calls, name, size):
    op = OPS[name]
    tensors, _ = op.inputs(15, time=3, size=size)
    assert_close(op.call(op.run, tensors)[0], op.call(op.chunked, tensors)[0])
    assert not calls


def test_the_kernels_are_for_half_precision_on_a_gpu(monkeypatch):
    monkeypatch.setattr(fla, "installed", lambda: True)
    assert fla.takes(ON_A_GPU)
    assert not fla.takes(SimpleNamespace(is_cuda=True, dtype=torch.float32, numel=lambda: 1))
    assert not fla.takes(SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, numel=lambda: 0))
    assert not fla.takes(torch.ones(1, dtype=torch.bfloat16))


def test_a_missing_package_warns_once_and_only_on_a_gpu(monkeypatch, recwarn):
    """The compiler treats the answer as a constant."""
    monkeypatch.setitem(sys.modules, "fla.ops", None)  # importing it raises ImportError
    monkeypatch.setattr(fla, "installed", fla.cached_constant(fla.installed.__wrapped__))
    assert not fla.takes(torch.ones(1, dtype=torch.bfloat16))
    assert not recwarn
    assert not fla.takes(ON_A_GPU)
    assert not fla.takes(ON_A_GPU)
    (warning,) = recwarn
    assert "pip install 'canonlm[gpu]'" in str(warning.message)
    double = torch.compile(lambda x: x if fla.installed() else 2 * x, fullgraph=True, backend="eager")
    assert double(torch.ones(2)).tolist() == [2, 2]
