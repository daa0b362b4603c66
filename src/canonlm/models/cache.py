"""Links our layers to transformers' caches: real tokens and padding, documents, and the places of states.

The library keeps a layer's convolution states as `conv_states[i]`, `[batch, channels, kernel]`, time last; every
Canon site of a layer has one such index. We define no cache class.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer, StaticLayer

from canonlm.core.cache_name import CACHE
from canonlm.core.errors import expected, unsupported
from canonlm.ops.canon_conv import for_kernels
from canonlm.ops.compiled import readable
from canonlm.ops.varlen import Layout as Layout
from canonlm.ops.varlen import has_gaps, value_before


def for_canon(layout: Layout, h_BTD: Tensor, cache: Cache | None) -> Layout:
    """`layout` with what Canon layers read about these tokens besides, computed once for all layers."""
    mask = layout.attention_mask
    if mask is not None:
        filled = cache is not None and not torch.compiler.is_compiling() and bool(cache.get_seq_length())
        if has_gaps(mask != 0, filled):
            return replace(layout, gaps=True)
    return for_kernels(layout, h_BTD)


def keep_last(layer: Any, keys_BHSE: Tensor, values_BHSE: Tensor, order_BL: Tensor) -> None:
    """Replace what a layer with a window has kept of these columns, its last ones, by the last ones in this order.

    Padding comes first in it, so that no padding takes the place of a token. keys, values: what `update` returned; a
    static cache that is not full has empty places after the first L columns.
    """
    for name, x in (("keys", keys_BHSE), ("values", values_BHSE)):
        places = order_BL[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
        old = getattr(layer, name)
        last = x.gather(2, places)[:, :, -old.shape[2] :]
        if isinstance(layer, StaticLayer):  # compiled steps know its tensors by address
            old[:, :, : last.shape[2]].copy_(last)
        else:
            setattr(layer, name, last)


def records_past(layer: Any) -> bool:
    """Whether a cache's layer keeps all inputs until it is cropped (transformers 5.17 cannot ask the cache)."""
    return getattr(layer, "record_past", False)


def documents_from_positions(position_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor | None:
    """Documents of a packed row, by transformers' convention that positions restart; None if they never do.

    Positions that padding repeats are not restarts: only real tokens are compared.
    """
    before, follows = value_before(position_ids_BT, attention_mask_BT)
    restarts = (position_ids_BT <= before) & follows
    if readable(restarts) and not restarts.any():
        return None
    return restarts.cumsum(1)


def positions_in_documents(doc_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """0, 1, 2, … from the start of each document, counting real tokens."""
    real_BT = torch.ones_like(doc_ids_BT) if attention_mask_BT is None else (attention_mask_BT != 0).long()
    steps = (real_BT.cumsum(1) - 1).clamp(min=0)
    starts = torch.where(doc_ids_BT != doc_ids_BT.roll(1, dims=1), steps, 0)  # 0 in the first column: steps are
    return steps - starts.cummax(1).values


def check_cache(cache: Cache, config: PreTrainedConfig) -> None:
    """ValueError for a cache made without our configuration, which has no place for convolution states, and which
    would keep all keys of a window."""
    if not hasattr(cache, "layers"):
        raise expected(CACHE, "a cache of a decoder: DynamicCache(config=model.config)", type(cache).__name__)
    holders = [(hasattr(layer, "conv_states"), getattr(layer, "is_sliding", False)) for layer in cache.layers]
    kinds = [(kind not in ("full_attention", "sliding_attention"), "sliding" in kind) for kind in config.layer_types]
    if any(map(any, kinds)) and holders != kinds:
        raise expected(CACHE, f"a cache made with config=model.config ({len(kinds)} layers)", cache)
    has_states = any(has for has, _ in kinds)
    if has_states and cache.offloading:  # the library moves states away before all of a layer's were used
        raise expected(CACHE, "a cache without offloading: the model has Canon or recurrent states", cache)


def _of_all_states(method: str, rows: Callable[[Tensor, Any], Tensor]) -> Callable[[Any, Any], None]:
    """A method that the library's layers with states lack: the one inherited from attention moves keys alone."""

    def of_layer(layer: Any, argument: Any) -> None:
        inherited = getattr(super(LinearAttentionLayer, layer), method, None)
        if inherited is not None:
            inherited(argument)
        elif isinstance(layer, CacheLayerMixin):
            raise expected(CACHE, f"a dynamic cache for {method}", layer)
        for states in (layer.conv_states, layer.recurrent_states):
            states |= {index: rows(state, argument) for index, state in states.items() if state is not None}

    return of_layer


_repeat = _of_all_states("batch_repeat_interleave", lambda state, repeats: state.repeat_interleave(repeats, dim=0))
_select = _of_all_states("batch_select_indices", lambda state, indices: state[indices, ...])
_library: Any = LinearAttentionLayer
_library.batch_repeat_interleave = getattr(_library, "batch_repeat_interleave", _repeat)
_library.batch_select_indices = getattr(_library, "batch_select_indices", _select)


def read_conv_state(layer: Any, state_idx: int, kernel: int, layout: Layout) -> Tensor | None:
    """The state of a layer of the cache, `[B, C, kernel]`, that the first new token continues; None: there is none."""
    state = layer.conv_states[state_idx]
    if state is None:
        return None
    if not layer.record_past:  # a state holds inputs of the row's last document only
        if layout.continues is None and state.shape[-1] == kernel and not torch.is_grad_enabled():
            return state
        state = _padded(state, kernel)[..., -kernel:]
        return state if layout.continues is None else state * layout.continues[:, -1:, None].to(state.dtype)
    # A recorded past holds all of them, column by column, and NaN at padding: see `write_recorded`.
    state = _padded(state, kernel)
    kept = ~state[:, 0].isnan()
    order = kept.int().argsort(dim=-1, stable=True)[:, -kernel:]
    if layout.continues is not None:
        kept = kept & _padded(layout.continues, kept.shape[1])[:, -kept.shape[1] :]
    state = state.gather(2, order[:, None].expand(-1, state.shape[1], -1))
    return state.masked_fill(~kept.gather(1, order)[:, None], 0)


def _padded(x: Tensor, length: int) -> Tensor:
    """`x` with at least that many columns, of zeros at the start."""
    return torch.nn.functional.pad(x, (max(0, length - x.shape[-1]), 0))


def write_recorded(layer: Any, state_idx: int, kernel: int, inputs_BTC: Tensor, mask_BT: Tensor | None) -> None:
    """Append inputs to the past that a layer of the cache records. Padding has a column, too: drafts may contain the
    padding token, which the library then masks."""
    columns = inputs_BTC.transpose(1, 2)
    if mask_BT is None:
        layer.update_conv_state(columns, state_idx=state_idx, conv_kernel_size=kernel)
        return
    padding = mask_BT == 0
    layer.update_conv_state(
        columns.masked_fill(padding[:, None], torch.nan), state_idx=state_idx, conv_kernel_size=kernel
    )
    layer.conv_kernel_size[state_idx] += int(padding.sum(1).max())  # the columns that the library's `crop` keeps


def fill_unused_states(cache: Cache | None, layer_idx: int, used: int, x_BTC: Tensor) -> None:
    """Write the states that a layer has but does not use: the library cannot crop states that were never written."""
    if cache is None or used == 0:
        return
    layer: Any = cache.layers[layer_idx]
    for state_idx in range(used, layer.number_of_states):
        zeros = x_BTC.new_zeros(x_BTC.shape[0], 1, x_BTC.shape[1])
        layer.update_conv_state(zeros, state_idx=state_idx, conv_kernel_size=1)


def read_recurrence(cache: Cache | None, layer_idx: int, layout: Layout) -> Tensor | None:
    """The recurrent state that the first new token starts from, `[B, ...]`; None: from zeros."""
    if cache is None:
        return None
    layer: Any = cache.layers[layer_idx]
    if layer.record_past:
        what = "a model without recurrent layers: their state cannot be rewound (prompt lookup, crop)"
        raise unsupported(CACHE, what, f"recorded past of layer {layer_idx}")
    state = layer.recurrent_states[0]
    if state is not None and layout.continues is not None:
        return state * layout.continues[:, -1].view(-1, *[1] * (state.ndim - 1)).to(state.dtype)
    # The cache writes the next state into this tensor, which gradients may need.
    return state.clone() if state is not None and torch.is_grad_enabled() else state


def write_recurrence(cache: Cache | None, layer_idx: int, state: Tensor) -> None:
    if cache is not None:
        layer: Any = cache.layers[layer_idx]
        layer.update_recurrent_state(state)


def count_tokens(cache: Cache | None, config: PreTrainedConfig, x_BTD: Tensor) -> None:
    """Give the first layer of a cache of recurrent layers keys of one channel, so that the cache has a length."""
    if cache is not None and not config.attends:
        marks = x_BTD.new_zeros(x_BTD.shape[0], 1, x_BTD.shape[1], 1)
        cache.update(marks, marks, 0)
