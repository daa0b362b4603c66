"""The compiled convolution of CPUs against its definition in float64, and against PyTorch's form bit by bit."""

import os
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops import causal_conv as module
from canonlm.ops import causal_conv_cpu
from canonlm.ops.causal_conv import causal_conv


def by_matrix(x, weight, doc_ids=None, state=None):
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


def case(seed, batch, time, channels, kernel, dtype, *, docs=False, state=False):
    torch.manual_seed(seed)
    return (
        torch.randn(batch, time, channels, dtype=dtype, requires_grad=True),
        torch.randn(channels, 1, kernel, dtype=dtype, requires_grad=True),
        (torch.rand(batch, time) < 0.1).long().cumsum(1) if docs else None,
        torch.randn(batch, channels, kernel, dtype=dtype, requires_grad=True) if state else None,
    )


def results(form, x, weight, docs, state):
    """The values, and the gradients of a weighted sum of them."""
    y = form(x, weight, docs, state)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().reshape(y.shape).to(y.dtype)
    expected = [tensor for tensor in (x, weight, state) if tensor is not None]
    return [y, *torch.autograd.grad(y, expected, dy, allow_unused=True, materialize_grads=True)]


def ours(x, weight, docs, state):
    assert causal_conv_cpu.usable(x, weight[:, 0].t().to(torch.promote_types(x.dtype, torch.float32)))
    return causal_conv(x, weight, doc_ids_BT=docs, state_BCK=state)


def in_pytorch(*args):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "usable", lambda *tensors: False)
        return causal_conv(args[0], args[1], doc_ids_BT=args[2], state_BCK=args[3])


@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(0, 3),
    time=st.one_of(st.integers(2, 9), st.integers(120, 140)),
    channels=st.integers(1, 40),
    kernel=st.sampled_from([1, 3, 4, 8]),
    docs=st.booleans(),
    state=st.booleans(),
)
def test_value_and_gradients_equal_the_definition(seed, batch, time, channels, kernel, docs, state):
    inputs = case(seed, batch, time, channels, kernel, torch.float64, docs=docs, state=state)
    assert_close(results(ours, *inputs), results(by_matrix, *inputs), atol=1e-11, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_pytorch_form(dtype, docs, state):
    """Bit by bit, except for the gradient of the taps, a sum over all tokens in another order."""
    inputs = case(1, 3, 133, 37, 4, dtype, docs=docs, state=state)
    (y, dx, dweight, *rest), (y_, dx_, dweight_, *rest_) = results(ours, *inputs), results(in_pytorch, *inputs)
    assert_close([y, dx, *rest], [y_, dx_, *rest_], atol=0, rtol=0)
    size = torch.einsum("btc,btc->c", inputs[0].abs().double(), torch.ones_like(y).double()).max()
    assert (dweight - dweight_).abs().max() <= (2e-3 if dtype == torch.bfloat16 else 1e-6) * size


def test_any_strides():
    """Inputs that are slices of wider ones, or transposed; gradients of a sum, which have no strides."""
    full = torch.randn(2, 20, 12, dtype=torch.float64)
    for x in (full[..., 3:8], full[:, ::2, :5], full.transpose(1, 2)[..., :5], full[:1, :, :5].expand(3, -1, -1)):
        x = x.detach().requires_grad_()
        weight = torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True)
        for sum_up in (torch.sum, lambda y: y[:, :, :1].sum() + y[1:].sum()):
            got = torch.autograd.grad(sum_up(ours(x, weight, None, None)), (x, weight))
            assert_close(got, torch.autograd.grad(sum_up(by_matrix(x, weight)), (x, weight)), atol=1e-12, rtol=0)


def test_nan_stays_in_its_document():
    x, weight, _, _ = case(0, 1, 12, 5, 4, torch.bfloat16)
    with torch.no_grad():
        x[0, 3, 2] = torch.nan
        y = ours(x, weight, (torch.arange(12) >= 5).long()[None], None)
    assert y[0, 3:5, 2].isnan().all()
    assert y.isnan().sum() == 2


def test_results_do_not_depend_on_the_number_of_threads():
    inputs = case(0, 5, 300, 65, 4, torch.float32, docs=True)
    before = torch.get_num_threads()
    try:
        by_threads = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            by_threads.append(results(ours, *inputs))
    finally:
        torch.set_num_threads(before)
    assert_close(by_threads[1:], by_threads[:1] * 2, atol=0, rtol=0)


def test_python_threads_at_once_and_a_fork_afterwards():
    inputs = case(0, 4, 300, 65, 4, torch.float32)
    expected = results(ours, *inputs)
    wrong = []

    def work():
        torch.set_num_threads(2)
        for _ in range(10):
            if not all(map(torch.equal, results(ours, *inputs), expected)):
                wrong.append(threading.current_thread())

    before = torch.get_num_threads()
    try:
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        torch.set_num_threads(2)
        results(ours, *inputs)
        child = os.fork()
        if child == 0:  # its other threads are gone, and torch's own operators would wait for them
            y = ours(*inputs).detach().numpy()
            os._exit(0 if (y == expected[0].detach().numpy()).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
    assert not wrong


@pytest.mark.parametrize("docs", [False, True])
def test_operator_passes_opcheck(docs):
    x, weight, doc_ids, _ = case(0, 2, 9, 5, 4, torch.float32, docs=docs)
    taps = weight[:, 0].t().detach().requires_grad_()
    torch.library.opcheck(torch.ops.canonlm.cpu_conv.default, (x, taps, doc_ids, 0))


def test_fake_tensors_use_the_pytorch_form():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x, weight = torch.randn(2, 9, 5, requires_grad=True), torch.randn(5, 1, 4, requires_grad=True)
        causal_conv(x, weight).sum().backward()
        assert x.grad.shape == x.shape


@pytest.mark.parametrize(("batch", "time"), [(2, 0), (0, 3)])
def test_no_tokens(monkeypatch, batch, time):
    """An exception of a compiled kernel would only be printed."""
    printed = []
    monkeypatch.setattr("sys.unraisablehook", printed.append)
    y, *gradients = results(ours, *case(0, batch, time, 5, 4, torch.float32))
    assert (y.shape, printed) == ((batch, time, 5), [])
    assert not any(gradient.any() for gradient in gradients)
