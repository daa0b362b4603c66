"""The precision of a recurrence: its inputs decide it, wherever it is called."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast switched off on the device of x. The meta device has none, and torch refuses to name it."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def outside_autocast(op: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`op` with autocast switched off: its matrix products would round float32 decays and states to bfloat16."""

    @functools.wraps(op)
    def call(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with without_autocast(x):
            return op(x, *args, **kwargs)

    return call
