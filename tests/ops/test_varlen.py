"""The document borders that kernels take, against counting by hand; attention with them, against a loop."""

from itertools import groupby, pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing import assert_close

from canonlm.ops import packed_attention as op
from canonlm.ops.packed_attention import packed_attention, packed_attention_by_mask
from canonlm.ops.selftest import attempt
from canonlm.ops.varlen import doc_ids_of, documents_of

BATCH, TIME, HEADS, KV_HEADS, HEAD_DIM = 2, 13, 4, 2, 8


def document_ids():
    ids = torch.zeros(BATCH, TIME, dtype=torch.long)
    ids[0, 5:], ids[0, 6:], ids[1, 3:] = 1, 2, 1
    return ids


def by_document(q, k, v, limits, scale):
    """Causal attention of each document alone, token by token. `[tokens, heads, channels]`"""
    rows, group = [], q.shape[1] // k.shape[1]
    for start, end in pairwise(limits):
        for t in range(start, end):
            for head in range(q.shape[1]):
                keys, values = (x[start : t + 1, head // group] for x in (k, v))
                weights = (keys @ q[t, head] * scale).softmax(0)
                rows.append(weights @ values)
    return torch.stack(rows).view(q.shape)


def varlen_of_2_13(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
                   enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):  # fmt: skip
    assert window_size == (-1, 0)
    assert enable_gqa
    return varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen_of_2_11(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1)):
    assert window_size == (-1, 0)
    assert q.shape == k.shape
    return varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen_of_2_10(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, is_causal=False, return_aux=None):
    assert is_causal
    assert q.shape == k.shape
    return varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)


def varlen(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k):
    assert cu_seq_q is cu_seq_k
    assert cu_seq_q.dtype == torch.int32
    assert max_q == max_k >= cu_seq_q.diff().max()
    return by_document(q, k, v, cu_seq_q.tolist(), q.shape[-1] ** -0.5)


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, TIME, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]


rows_of_ids = st.integers(1, 40).flatmap(
    lambda time: st.lists(st.lists(st.integers(0, 2), min_size=time, max_size=time), min_size=1, max_size=4)
)


@given(rows_of_ids)
def test_borders_are_where_ids_change(rows):
    documents = documents_of(torch.tensor(rows))
    lengths = [len(list(run)) for row in rows for _, run in groupby(row)]
    borders = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    limits = documents.cu_seqlens.tolist()
    assert limits[: len(borders)] == borders
    assert set(limits[len(borders) :]) <= {borders[-1]}
    room = len(limits) - 1
    assert room >= 16
    assert room & (room - 1) == 0
    assert room == 16 or room < 2 * len(lengths)
    assert max(lengths) <= documents.max_length <= min(2 * max(lengths), len(rows[0]))
    ids = doc_ids_of(documents.cu_seqlens, len(rows), len(rows[0])).flatten().tolist()
    assert ids == [n for n, length in enumerate(lengths) for _ in range(length)]


@pytest.mark.parametrize("kernel", [varlen_of_2_13, varlen_of_2_11, varlen_of_2_10])
def test_arguments_of_the_kernel_for_each_torch_version(kernel, monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    takes = op._kernel_takes.__wrapped__  # without the answers cached for the installed one
    monkeypatch.setattr(op, "_kernel_takes", takes)
    got = packed_attention(*inputs(), documents_of(document_ids()))
    expected = [
        by_document(*(x[row] for x in inputs()), limits, HEAD_DIM**-0.5)
        for row, limits in enumerate([[0, 5, 6, 13], [0, 3, 13]])
    ]
    assert_close(got, torch.stack(expected), atol=1e-12, rtol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_the_definition(packed):
    ids = document_ids() if packed else None
    got = packed_attention_by_mask(*inputs(), ids)
    limits = [[0, 5, 6, 13], [0, 3, 13]] if packed else [[0, 13]] * 2
    expected = [by_document(*(x[row] for x in inputs()), limits[row], HEAD_DIM**-0.5) for row in range(BATCH)]
    assert_close(got, torch.stack(expected), atol=1e-12, rtol=0)


def test_the_installed_kernel_takes_these_arguments():
    given, mode = documents_of(document_ids()), FakeTensorMode()
    with mode:
        q, k, v = (mode.from_tensor(x) for x in inputs(torch.bfloat16))
        y = packed_attention(q, k, v, given.each(mode.from_tensor))
        assert y.shape == q.shape
        gradients = torch.autograd.grad(y.sum(), [q, k, v])
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]


def cache_the_answers_about_the_installed_kernel():
    for name in ("window_size", "enable_gqa"):
        op._kernel_takes(name)


def test_autocast_decides_the_precision(monkeypatch):
    cache_the_answers_about_the_installed_kernel()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda q, *_, **__: seen.append(q.dtype) or q)
    seen = []
    with torch.autocast("cpu", torch.bfloat16):
        packed_attention(*inputs(torch.float32), documents_of(document_ids()))
    assert seen == [torch.bfloat16]


@pytest.mark.parametrize("damage", [0, 1])
def test_a_trial_compares_the_kernel_with_the_definition(monkeypatch, damage):
    def attend(q, k, v, limits, *_, **__):
        borders = [*range(0, len(q) + 1, len(q))] if damage else limits.unique().tolist()
        ids = torch.repeat_interleave(torch.tensor(borders).diff())[None]
        return packed_attention_by_mask(q[None], k[None], v[None], ids)[0]

    cache_the_answers_about_the_installed_kernel()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend)
    errors = attempt(op.KERNEL, torch.device("cpu"), torch.bfloat16)
    assert (max(errors.values, errors.gradients) <= 1) == (not damage), errors


def test_on_a_gpu_in_half_precision(monkeypatch):
    def on_gpu(dtype):
        return SimpleNamespace(device=torch.device("cuda"), dtype=dtype, is_cuda=True)

    right = []
    monkeypatch.setattr(op, "_kernel_is_right", lambda with_gradients: right.append(with_gradients) or True)
    assert op.takes(on_gpu(torch.bfloat16), 64)
    assert not op.takes(on_gpu(torch.float32), 64)
    assert not op.takes(on_gpu(torch.bfloat16), 60)
    assert not op.takes(on_gpu(torch.bfloat16), 256)
    assert not op.takes(torch.ones(1, dtype=torch.bfloat16), 64)
    assert not op.takes(torch.ones(1, dtype=torch.bfloat16, device="meta"), 64)
    with torch.no_grad():
        assert op.takes(on_gpu(torch.float16), 64)
    assert right == [True, False]
