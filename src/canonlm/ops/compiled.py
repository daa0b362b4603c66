"""Functions that restrict what a compiler may do."""

import functools
from collections.abc import Callable
from typing import ParamSpec

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

P = ParamSpec("P")


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether a program is exported. In torch 2.11, `torch.compiler.is_exporting()` is True in all compiled code."""
    return torch.compiler.is_exporting()


def readable(x: Tensor) -> bool:
    """Whether values of `x` can be read: not in a graph that is compiled, nor of meta and fake tensors."""
    return not (torch.compiler.is_compiling() or x.is_meta or isinstance(x, FakeTensor))


def materialize(x: Tensor) -> Tensor:
    """`x`, computed once into contiguous memory: a compiler for a CPU can neither recompute it in every loop that
    reads it nor read it in its old layout. In eager mode, and on a GPU, `x` itself."""
    return materialize_on_any_device(x) if x.device.type == "cpu" else x


def materialize_on_any_device(x: Tensor) -> Tensor:
    """As `materialize`, on every device: for numbers that are cheap to compute and that many kernels read."""
    compiling = torch.compiler.is_compiling() and not is_exporting()
    return _materialize(x) if compiling else x


# A compiler does not look into custom operators.
@torch.library.custom_op("canonlm::materialize", mutates_args=())
def _materialize(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


_materialize.register_fake(lambda x: x.new_empty(x.shape))
_materialize.register_autograd(lambda ctx, dx: dx)


def cached_constant(function: Callable[P, bool]) -> Callable[P, bool]:
    """A cached function whose results are constants to compilers, which would trace into a bare `functools.cache`."""
    cached: Callable[..., bool] = functools.cache(function)

    @torch.compiler.assume_constant_result
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> bool:
        return cached(*args, **kwargs)

    return call
