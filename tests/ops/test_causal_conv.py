"""The forms of the convolution against its definition in float64, and its state against slicing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops import causal_conv as module
from canonlm.ops import causal_conv_plain
from canonlm.ops.causal_conv import causal_conv, conv_state


def by_definition(x, weight, doc_ids=None, state=None):
    """Each channel is a product with a banded matrix `[B, T, K + T]`, whose first columns multiply the state."""
    batch, time, channels = x.shape
    kernel = weight.shape[-1]
    past = x.new_zeros(batch, channels, kernel) if state is None else state
    full = torch.cat([past.transpose(1, 2), x], dim=1)
    back = (torch.arange(time)[:, None] + kernel) - torch.arange(time + kernel)
    taps = torch.where((back >= 0) & (back < kernel), weight[:, 0][:, kernel - 1 - back.clamp(0, kernel - 1)], 0)
    if doc_ids is None:
        return torch.einsum("cts,bsc->btc", taps, full)
    ids = torch.cat([doc_ids[:, :1].expand(-1, kernel), doc_ids], dim=1)
    same = (doc_ids[:, :, None] == ids[:, None]).to(x.dtype)
    return torch.einsum("cts,bts,bsc->btc", taps, same, full)


def inputs(seed, batch, time, channels, kernel, dtype=torch.float64, *, docs=False, state=False):
    torch.manual_seed(seed)
    return (
        torch.randn(batch, time, channels, dtype=dtype, requires_grad=True),
        torch.randn(channels, 1, kernel, dtype=dtype, requires_grad=True),
        (torch.rand(batch, time) < (0.3 if time < 10 else 0.1)).long().cumsum(1) if docs else None,
        torch.randn(batch, channels, kernel, dtype=dtype, requires_grad=True) if state else None,
    )


def value_and_gradients(function, x, weight, docs=None, state=None):
    """The values, and the gradients of a weighted sum of them."""
    y = function(x, weight, docs, state)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().reshape(y.shape).to(y.dtype)
    expected = [tensor for tensor in (x, weight, state) if tensor is not None]
    return [y, *torch.autograd.grad(y, expected, dy, allow_unused=True, materialize_grads=True)]


def ours(x, weight, docs=None, state=None):
    return causal_conv(x, weight, doc_ids_BT=docs, state_BCK=state)


def by_numba(x, weight, docs=None, state=None):
    """The compiled form of CPUs."""
    assert module.usable(x, weight[:, 0].t().to(torch.promote_types(x.dtype, torch.float32)))
    return ours(x, weight, docs, state)


def in_place(*case):
    """The form without numba."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "usable", lambda *_: False)
        return ours(*case)


def by_slices(x, weight, docs, state):
    """The form for compilers, called directly."""
    history, kernel = 0, weight.shape[-1]
    if state is not None and kernel > 1:
        history, x = kernel - 1, torch.cat([state[..., 1:].transpose(1, 2), x], dim=1)
    same_doc = None if docs is None else causal_conv_plain.same_document(docs, kernel).to(x.dtype)
    return causal_conv_plain.by_slices(x, weight[:, 0].t(), same_doc, history)


@pytest.mark.parametrize("form", [by_numba, in_place, by_slices])
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 4),
    time=st.one_of(st.integers(1, 9), st.integers(120, 140)),
    channels=st.integers(1, 40),
    kernel=st.sampled_from([1, 2, 3, 4, 5, 6, 8]),
    docs=st.booleans(),
    state=st.booleans(),
    block=st.sampled_from([1, 20, 300, 2**19]),
)
def test_value_and_gradients_equal_the_definition(form, seed, batch, time, channels, kernel, docs, state, block):
    case = inputs(seed, batch, time, channels, kernel, docs=docs, state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        got = value_and_gradients(form, *case)
    assert_close(got, value_and_gradients(by_definition, *case), atol=1e-11, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_dtype_of_the_input_and_gradients_their_own(dtype, weight_dtype):
    x = torch.randn(2, 5, 3, dtype=dtype, requires_grad=True)
    weight = torch.randn(3, 1, 4, dtype=weight_dtype, requires_grad=True)
    y = causal_conv(x, weight)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype, weight.grad.dtype) == (dtype, dtype, weight_dtype)


@given(
    seed=st.integers(0, 10**6),
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    kernel=st.integers(1, 6),
    pad_left=st.booleans(),
    docs=st.booleans(),
)
def test_state_is_the_last_real_inputs_of_the_last_document(seed, lengths, kernel, pad_left, docs):
    """This includes rows that are empty, or shorter than the kernel."""
    torch.manual_seed(seed)
    time = max(1, *lengths)
    x = torch.randn(len(lengths), time, 2, dtype=torch.float64)
    past = torch.randn(len(lengths), 2, kernel, dtype=torch.float64)
    mask = torch.zeros(len(lengths), time)
    doc_ids = (torch.rand(len(lengths), time) < 0.3).long().cumsum(1) if docs else None
    for row, length in enumerate(lengths):
        mask[row, time - length :] = 1
    mask = mask if pad_left else mask.flip(1)
    x = x * mask[..., None]
    got = conv_state(x, kernel, mask_BT=mask, doc_ids_BT=doc_ids, state_BCK=past)
    for row, length in enumerate(lengths):
        end = 0 if length == 0 else time if pad_left else length
        expected = torch.cat([past[row].t(), x[row, :end]])[-kernel:]
        if docs and length:
            ids = torch.cat([doc_ids[row, :1].expand(kernel), doc_ids[row, :end]])[-kernel:]
            expected = expected * (ids == ids[-1])[:, None]
        assert_close(got[row], expected.t(), atol=0, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
def test_compiles_without_graph_breaks_and_equals_eager(docs):
    """Generated code: tests/canon/test_layer.py."""
    torch._dynamo.reset()
    x, weight, doc_ids, state = inputs(1, 2, 9, 5, 4, docs=docs, state=True)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = value_and_gradients(ours, x, weight, doc_ids, state)
    assert_close(value_and_gradients(compiled, x, weight, doc_ids, state), expected, atol=1e-12, rtol=0)
    torch._dynamo.reset()


def test_leaves_its_inputs_alone():
    x, weight, doc_ids, state = inputs(2, 2, 6, 3, 4, docs=True, state=True)
    before = [tensor.clone() for tensor in (x, weight, doc_ids, state)]
    value_and_gradients(ours, x, weight, doc_ids, state)
    conv_state(x, 4, doc_ids_BT=doc_ids, state_BCK=state)
    assert_close([x, weight, doc_ids, state], before, atol=0, rtol=0)


@pytest.mark.parametrize("kernel", [1, 2, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_one_token_after_a_state_continues_the_row(kernel, masked):
    """Decoding uses a shorter form. A row whose token is padding keeps its state."""
    x_BTC, weight = torch.randn(3, 7, 5, dtype=torch.double), torch.randn(5, 1, kernel, dtype=torch.double)
    state = conv_state(x_BTC[:, :6], kernel)
    full = causal_conv(x_BTC, weight)
    assert_close(causal_conv(x_BTC[:, 6:], weight, state_BCK=state)[:, 0], full[:, 6])
    mask = torch.tensor([[1], [0], [1]]) if masked else None
    last = x_BTC[:, 6:] if mask is None else x_BTC[:, 6:] * mask[..., None]
    after = conv_state(last, kernel, mask_BT=mask, state_BCK=state)
    true = conv_state(x_BTC, kernel)
    if mask is not None:
        true[1] = state[1]
    assert_close(after, true)
