"""Activation checkpointing of blocks: the backward pass recomputes activations, so the forward does not keep them."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_MATRIX_PRODUCTS = ("mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm")
_ATTENTION = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
KEPT = {
    *(f"aten.{name}.default" for name in _MATRIX_PRODUCTS),
    *(f"aten._scaled_dot_product_{name}.default" for name in _ATTENTION),
    *("torch_attn._varlen_attn.default", "flex_attention"),
    "aten.max.default",  # the largest weight or input, by which float8 scales
    *(f"_c10d_functional.{name}.default" for name in ("all_reduce", "reduce_scatter_tensor", "all_to_all_single")),
}
"""Operators by name, as torch only has some of them after an import that takes seconds."""


@functools.cache
def kept_by_selective(operator: Any) -> bool:
    """Selective activation checkpointing keeps the results of linear layers, also in float8 and of experts, of
    attention, and of messages between devices."""
    return str(operator) in KEPT


def kept_share(checkpointing: str | float) -> float:
    """The share of a block's activations that a compiler may keep for the backward pass: its memory budget."""
    return checkpointing if isinstance(checkpointing, float) else 1.0


def recomputed(forward: Callable[..., Any], selective: bool) -> Callable[..., Any]:
    """`forward` with activation checkpointing: its backward pass recomputes the intermediate results."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)

    @functools.wraps(forward)
    def run(*args: Any, **kwargs_of_forward: Any) -> Any:
        return checkpoint(forward, *args, **kwargs, **kwargs_of_forward)

    return run


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if kept_by_selective(operator) else CheckpointPolicy.PREFER_RECOMPUTE
