"""What a step computes again instead of keeping it: activation checkpointing of blocks."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_aten = torch.ops.aten
KEPT_BY_SELECTIVE = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
}
"""What selective activation checkpointing keeps: results of linear layers and of attention."""


def recomputed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """`forward`, whose inner results backward makes again instead of finding them in memory."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _what_to_keep)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs_of_forward: Any) -> Any:
        return checkpoint(forward, *args, **kwargs, **kwargs_of_forward)

    return run


def _what_to_keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_BY_SELECTIVE else CheckpointPolicy.PREFER_RECOMPUTE
