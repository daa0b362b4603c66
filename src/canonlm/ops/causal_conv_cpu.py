"""The kernels of `numba_conv` as operators of torch: for plain tensors on a CPU if numba can be imported.

The results equal those of the PyTorch form bit by bit, as both add taps in one order with fused multiply-adds; the
gradient of the taps differs in the last bits, and depends on the shape alone, not on the number of threads.
A self-contained model's folder has `kernels.stub` in place of this.
"""

import ctypes
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canonlm.ops.causal_conv_plain import by_documents
from canonlm.ops.compiled import cached_constant, is_exporting
from canonlm.ops.derivatives import by_definition, differentiated_again, gradients

MAX_KERNEL = 8
COMPUTE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.bfloat16: torch.float32}
"""The dtype of weights and sums, by the dtype of the inputs."""

GRAIN = 2**15
"""For fewer numbers a second thread costs more than it saves: torch's own limit."""

LIBRARY = torch.library.Library("canonlm", "FRAGMENT")
LIBRARY.define("cpu_conv(Tensor x, Tensor weight, Tensor? doc_ids, int history) -> Tensor")
LIBRARY.define(
    "cpu_conv_backward(Tensor dy, Tensor x, Tensor weight, Tensor? doc_ids, int history) -> (Tensor, Tensor)"
)


def usable(x_BSC: Tensor, weight_KC: Tensor) -> bool:
    """Whether the kernels can be used. They are also used in a compiled graph, where inductor's loops take longer; not
    in an exported program, which may run without canonlm, nor for wrapped tensors (DTensor, fake
    ones) and other dtypes."""
    return (
        x_BSC.device.type == "cpu"
        and not is_exporting()
        and not by_definition()
        and type(x_BSC) in (Tensor, torch.nn.Parameter)
        and COMPUTE.get(x_BSC.dtype) == weight_KC.dtype
        and weight_KC.shape[0] <= MAX_KERNEL
        and has_numba()
    )


def convolve(x_BSC: Tensor, weight_KC: Tensor, doc_ids_BS: Tensor | None, history: int) -> Tensor:
    """`[B, S - history, C]`. doc_ids_BS: of all S positions, of which the first `history` have no output."""
    return torch.ops.canonlm.cpu_conv(x_BSC, weight_KC, doc_ids_BS, history)


def _forward(x_BSC: Tensor, weight_KC: Tensor, doc_ids_BS: Tensor | None, history: int) -> Tensor:
    batch, length, channels = x_BSC.shape
    x, weight, doc_ids = rowwise(x_BSC), weight_KC.contiguous(), ids_of(doc_ids_BS)
    y = x.new_empty(batch, length - history, channels)
    _run("forward", x, y, weight, doc_ids, history)
    return y


def _backward(dy_BTC: Tensor, x_BSC: Tensor, weight_KC: Tensor, doc_ids_BS: Tensor | None, history: int):
    from canonlm.ops.numba_conv import TOKENS

    batch, length, _ = x_BSC.shape
    x, dy, weight, doc_ids = rowwise(x_BSC), rowwise(dy_BTC), weight_KC.contiguous(), ids_of(doc_ids_BS)
    dx = x.new_empty(x.shape)
    partials = weight.new_empty(batch * -(-length // TOKENS), *weight.shape)  # by blocks of tokens
    _run("backward", x, dx, weight, doc_ids, history, dy, partials)
    # One after the other: torch's sum adds in an order that depends on the number of threads.
    return dx, torch.from_numpy(partials.numpy().sum(axis=0))


def _run(
    direction: str,
    x: Tensor,
    out: Tensor,
    weight: Tensor,
    doc_ids: Tensor | None,
    history: int,
    dy: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    from canonlm.ops.numba_conv import TOKENS, Work

    batch, length, channels = x.shape
    size = x.element_size()
    work = np.zeros(1, Work)
    work[0] = (
        0,
        *(0 if tensor is None else tensor.data_ptr() for tensor in (x, dy, out, weight, partials, doc_ids)),
        *(batch, length, history, channels),
        *(x.stride(0) * size, x.stride(1) * size),
        *((0, 0) if dy is None else (dy.stride(0) * size, dy.stride(1) * size)),
    )
    if blocks := batch * -(-length // TOKENS):
        _launch(_function(direction, weight.shape[0], x.dtype), work, blocks, x.numel())


def _launch(function: Any, work: np.ndarray, blocks: int, numbers: int) -> None:
    """Run the C function on `work`, in torch's number of threads unless there are few `numbers` or blocks."""
    threads = min(torch.get_num_threads(), blocks)
    in_threads = _parallel() if threads > 1 and numbers > GRAIN else None
    if in_threads is None:
        function(work.ctypes.data)
    else:
        in_threads(function, work.ctypes.data, threads, 0)


@functools.cache
def _function(direction: str, kernel: int, dtype: torch.dtype) -> Any:
    """The compiled kernel. The first call compiles it in a second or two, or reads it from numba's cache."""
    from canonlm.ops.numba_conv import compiled

    code = compiled(direction, kernel, str(dtype).removeprefix("torch."))
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address)
    function.code = code  # which it must not outlive
    return function


@functools.cache
def _parallel() -> Callable | None:
    """OpenMP's function that runs a C function in several threads, from the library that torch itself uses: its threads
    are awake when torch has just finished an operator, and threads of our own would compete with them. None: torch has
    no such library here (macOS), or this process is a fork, which does not have the threads."""
    if _forked:
        return None
    try:
        parallel = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    _parallel.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


@cached_constant
def has_numba() -> bool:
    try:
        import canonlm.ops.numba_conv  # noqa: F401
    except ImportError:
        return False
    return True


def rowwise(x: Tensor) -> Tensor:
    """`x` with contiguous channels; its batch and time may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def ids_of(doc_ids: Tensor | None) -> Tensor | None:
    return None if doc_ids is None else doc_ids.to(torch.int64).contiguous()


def _save(ctx, inputs, output) -> None:
    x, weight, doc_ids, ctx.history = inputs
    ctx.save_for_backward(x, weight, doc_ids)


def _gradients(ctx, dy: Tensor):
    x, weight, doc_ids = ctx.saved_tensors
    if differentiated_again():
        definition = functools.partial(by_documents, history=ctx.history)
        return *gradients(definition, (x, weight, doc_ids), [dy]), None
    return *torch.ops.canonlm.cpu_conv_backward(dy, x, weight, doc_ids, ctx.history), None, None


LIBRARY.impl("cpu_conv", _forward, "CPU")
LIBRARY.impl("cpu_conv_backward", _backward, "CPU")
torch.library.register_fake(
    "canonlm::cpu_conv",
    lambda x, weight, doc_ids, history: x.new_empty(x.shape[0], x.shape[1] - history, x.shape[2]),
    lib=LIBRARY,
)
torch.library.register_fake(
    "canonlm::cpu_conv_backward",
    lambda dy, x, weight, doc_ids, history: (x.new_empty(x.shape), weight.new_empty(weight.shape)),
    lib=LIBRARY,
)
torch.library.register_autograd("canonlm::cpu_conv", _gradients, setup_context=_save, lib=LIBRARY)
