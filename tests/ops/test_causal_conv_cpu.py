"""The compiled convolution of CPUs against PyTorch's form bit by bit; its strides, threads and errors."""

import os
import threading

import pytest
import torch
from test_causal_conv import by_definition, by_numba, in_place, inputs, value_and_gradients
from torch.testing import assert_close

from canonlm.ops.causal_conv import causal_conv


@pytest.mark.parametrize("docs", [False, True])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_pytorch_form(dtype, docs, state):
    """Bit by bit, except for the gradient of the taps, a sum over all tokens in another order."""
    case = inputs(1, 3, 133, 37, 4, dtype, docs=docs, state=state)
    y, dx, dweight, *rest = value_and_gradients(by_numba, *case)
    y_, dx_, dweight_, *rest_ = value_and_gradients(in_place, *case)
    assert_close([y, dx, *rest], [y_, dx_, *rest_], atol=0, rtol=0)
    size = torch.einsum("btc,btc->c", case[0].abs().double(), torch.ones_like(y).double()).max()
    assert (dweight - dweight_).abs().max() <= (2e-3 if dtype == torch.bfloat16 else 1e-6) * size


def test_any_strides():
    """Inputs that are slices of wider ones, or transposed; gradients of a sum, which have no strides."""
    full = torch.randn(2, 20, 12, dtype=torch.float64)
    for x in (full[..., 3:8], full[:, ::2, :5], full.transpose(1, 2)[..., :5], full[:1, :, :5].expand(3, -1, -1)):
        x = x.detach().requires_grad_()
        weight = torch.randn(5, 1, 4, dtype=torch.float64, requires_grad=True)
        for sum_up in (torch.sum, lambda y: y[:, :, :1].sum() + y[1:].sum()):
            got = torch.autograd.grad(sum_up(by_numba(x, weight)), (x, weight))
            assert_close(got, torch.autograd.grad(sum_up(by_definition(x, weight)), (x, weight)), atol=1e-12, rtol=0)


def test_nan_stays_in_its_document():
    x, weight, _, _ = inputs(0, 1, 12, 5, 4, torch.bfloat16)
    with torch.no_grad():
        x[0, 3, 2] = torch.nan
        y = by_numba(x, weight, (torch.arange(12) >= 5).long()[None])
    assert y[0, 3:5, 2].isnan().all()
    assert y.isnan().sum() == 2


def test_results_do_not_depend_on_the_number_of_threads():
    case = inputs(0, 5, 300, 65, 4, torch.float32, docs=True)
    before = torch.get_num_threads()
    try:
        by_threads = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            by_threads.append(value_and_gradients(by_numba, *case))
    finally:
        torch.set_num_threads(before)
    assert_close(by_threads[1:], by_threads[:1] * 2, atol=0, rtol=0)


def test_python_threads_at_once_and_a_fork_afterwards():
    case = inputs(0, 4, 300, 65, 4, torch.float32)
    expected = value_and_gradients(by_numba, *case)
    wrong = []

    def work():
        torch.set_num_threads(2)
        for _ in range(10):
            if not all(map(torch.equal, value_and_gradients(by_numba, *case), expected)):
                wrong.append(threading.current_thread())

    before = torch.get_num_threads()
    try:
        workers = [threading.Thread(target=work) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        torch.set_num_threads(2)
        value_and_gradients(by_numba, *case)
        child = os.fork()
        if child == 0:  # its other threads are gone, and torch's own operators would wait for them
            y = by_numba(*case).detach().numpy()
            os._exit(0 if (y == expected[0].detach().numpy()).all() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(before)
    assert not wrong


@pytest.mark.parametrize("docs", [False, True])
def test_operator_passes_opcheck(docs):
    x, weight, doc_ids, _ = inputs(0, 2, 9, 5, 4, torch.float32, docs=docs)
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
    y, *gradients = value_and_gradients(by_numba, *inputs(0, batch, time, 5, 4, torch.float32))
    assert (y.shape, printed) == ((batch, time, 5), [])
    assert not any(gradient.any() for gradient in gradients)
