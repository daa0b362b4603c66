"""The precision of a recurrence: its inputs decide it, wherever it is called."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def outside_autocast(op: Callable[Concatenate[Tensor, P], R]) -> Callable[Concatenate[Tensor, P], R]:
    """`op` with autocast switched off: its matrix products would round float32 decays and states to bfloat16."""

    @functools.wraps(op)
    def call(x: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            return op(x, *args, **kwargs)

    return call
