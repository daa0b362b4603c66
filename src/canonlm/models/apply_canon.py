"""The Canon layers of one place in a layer of the decoder, with their state in the cache."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.apply import canon_all, canon_gated, canon_normed, canon_rotary
from canonlm.canon.layer import kernel_size_of
from canonlm.models.cache import Layout, read_conv_state, records_past, write_recorded
from canonlm.models.norm import RMSNorm
from canonlm.ops.canon_conv import NONE, State

Result = TypeVar("Result")


class Slot(NamedTuple):
    """The state of a layer's Canon layers of one place in a running forward."""

    layout: Layout
    cache: Cache | None
    layer_idx: int
    state_idx: int


def run_site(
    canons: Sequence[nn.Module | None], inputs: Sequence[Tensor], slot: Slot, mixer_input: Tensor | None = None
) -> list[Tensor]:
    """Apply the Canon layers of one place (one for A and C; q, k, v for B; gate, up for D) to `[B, T, C_i]` inputs.

    An input without a layer (None) does not change. With a cache, the state before is read and updated.
    `mixer_input`: see `CanonLayer.forward`.
    """
    present = [(canon, x) for canon, x in zip(canons, inputs, strict=True) if canon is not None]
    layers, xs = [canon for canon, _ in present], [x for _, x in present]
    outputs = iter(_run(slot, lambda state: canon_all(layers, xs, slot.layout, state, mixer_input), xs, layers))
    return [x if canon is None else next(outputs) for canon, x in zip(canons, inputs, strict=True)]


def run_rotary(
    canons: Sequence[nn.Module | None],
    inputs: Sequence[Tensor],
    rotary: tuple[Tensor, Tensor] | None,
    head_dim: int,
    rotated: Sequence[int],
    slot: Slot,
) -> list[Tensor] | None:
    """The Canon layers and the rotary embedding of their outputs in one step, `[B, T, heads, head_dim]` each; None if
    there is none for both. rotated: the number of heads to rotate in each input."""
    layers = [canon for canon in canons if canon is not None]
    if rotary is None or slot.cache is not None or slot.layout.span is not None or len(layers) < len(inputs):
        return None
    sizes = [(x.shape[-1] // head_dim, count) for x, count in zip(inputs, rotated, strict=True)]
    return canon_rotary(layers, inputs, slot.layout, rotary, sizes)


def run_gated(canons: Sequence[nn.Module], act: nn.Module, gate: Tensor, up: Tensor, slot: Slot) -> Tensor:
    """act(canon(gate)) * canon(up)"""
    return _run(slot, lambda state: canon_gated(canons, act, gate, up, slot.layout, state), (gate, up), canons)


def run_normed(canon: nn.Module, norm: RMSNorm, x: Tensor, branch: Tensor | None, slot: Slot) -> tuple[Tensor, Tensor]:
    """s = x + branch (or x), and canon(norm(s))."""
    if _is_recorded(slot) or slot.layout.span is not None or type(norm) is not RMSNorm:
        s = x if branch is None else x + branch
        return s, run_site([canon], [norm(s)], slot)[0]
    return _run(slot, lambda state: canon_normed(canon, norm, x, branch, slot.layout, state), (), [canon])


def _run(
    slot: Slot, form: Callable[[State], tuple[Result, Tensor | None]], xs: Sequence[Tensor], canons: Sequence[Any]
) -> Result:
    """`form(state)`, which returns (result, state after it). xs: the layers' inputs, if they may be recorded, or if
    other processes have the tokens before."""
    kernel = max(map(kernel_size_of, canons))
    if (span := slot.layout.span) is not None:
        documents = slot.layout.documents
        return form(State(span.tail_before(xs, kernel, None if documents is None else documents.ids)))[0]
    if slot.cache is None:
        return form(NONE)[0]
    layer: Any = slot.cache.layers[slot.layer_idx]
    place = layer.conv_states[slot.state_idx] if layer.has_previous_state[slot.state_idx] else None
    before = read_conv_state(layer, slot.state_idx, kernel, slot.layout)
    if layer.record_past:
        result, _ = form(State(before, True))
        write_recorded(layer, slot.state_idx, kernel, torch.cat(list(xs), dim=-1), slot.layout.attention_mask)
        return result
    result, after = form(State(before, True, place))
    if after is not place:
        layer.update_conv_state(after, state_idx=slot.state_idx, conv_kernel_size=kernel)
    return result


def _is_recorded(slot: Slot) -> bool:
    """Whether the cache keeps all inputs, as it may be rewound (prompt lookup)."""
    return slot.cache is not None and records_past(slot.cache.layers[slot.layer_idx])
