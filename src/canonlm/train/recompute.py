"""Activation checkpointing of blocks: the backward pass recomputes activations, so the forward does not keep them."""

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
"""Selective activation checkpointing keeps the results of linear layers and of attention."""
KEPT_BY_NAME = {"torch_attn._varlen_attn.default"}
"""More such operators, by name, as torch only has them after an import that takes seconds."""


def recomputed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """`forward` with activation checkpointing: its backward pass recomputes the intermediate results."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs_of_forward: Any) -> Any:
        return checkpoint(forward, *args, **kwargs, **kwargs_of_forward)

    return run


def _policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in KEPT_BY_SELECTIVE or str(op) in KEPT_BY_NAME
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
