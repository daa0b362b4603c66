"""Between our layers and transformers' caches: which tokens are real, which belong together, where states are kept.

The library keeps a layer's convolution states as `conv_states[i]`, `[batch, channels, kernel]`, time last; every
Canon site of a layer is one such index. No cache class is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from canonlm.canon.layer import CanonLayer
from canonlm.errors import expected


@dataclass(frozen=True)
class Layout:
    """The tokens of one forward call: worked out once by the model, used by every mixer and Canon layer."""

    attention_mask: Tensor | None = None  # [B, T], 1 = real token; None: all are
    doc_ids: Tensor | None = None  # [B, T], numbers of the documents; None: one document per row
    continues: Tensor | None = None  # [B, past], does the first token continue that cached token? None: it does


def document_runs(doc_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """Number the runs of equal ids 0, 1, 2, …: an id that comes back later in a row is another document.

    Padding counts with what precedes it, whatever its id.
    """
    before, follows = _before(doc_ids_BT, attention_mask_BT)
    return ((doc_ids_BT != before) & follows).cumsum(1)


def documents_from_positions(position_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor | None:
    """Documents of a packed row, by transformers' convention that positions start again; None if they never do.

    Positions that padding repeats are no restarts: only real tokens are compared.
    """
    before, follows = _before(position_ids_BT, attention_mask_BT)
    restarts = (position_ids_BT <= before) & follows
    if not torch.compiler.is_compiling() and not restarts.any():
        return None
    return restarts.cumsum(1)


def positions_in_documents(doc_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """0, 1, 2, … from the start of each document, counting real tokens."""
    real_BT = torch.ones_like(doc_ids_BT) if attention_mask_BT is None else (attention_mask_BT != 0).long()
    steps = (real_BT.cumsum(1) - 1).clamp(min=0)
    starts = torch.where(doc_ids_BT != doc_ids_BT.roll(1, dims=1), steps, 0)
    return steps - starts.index_fill(1, steps.new_zeros(1), 0).cummax(1).values


def _before(x_BT: Tensor, attention_mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value at the real token before each; and where both exist: a real token, and a real one before it."""
    steps = torch.arange(x_BT.shape[1], device=x_BT.device).expand_as(x_BT)
    real = torch.ones_like(x_BT, dtype=torch.bool) if attention_mask_BT is None else attention_mask_BT != 0
    last = torch.where(real, steps, -1).cummax(1).values
    previous = torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)
    return x_BT.gather(1, previous.clamp(min=0)), real & (previous >= 0)


def check_cache(cache: Cache, config: PreTrainedConfig) -> None:
    """A cache made without our configuration has no place for convolution states: say so before it is used."""
    holders = ["full_attention" if not hasattr(layer, "conv_states") else "state" for layer in cache.layers]
    wanted = ["full_attention" if kind == "full_attention" else "state" for kind in config.layer_types]
    if "state" in wanted and holders != wanted:
        raise expected("past_key_values", f"a cache made with config=model.config ({len(wanted)} layers)", cache)


def run_site(
    canons: Sequence[CanonLayer | None],
    inputs: Sequence[Tensor],
    layout: Layout,
    cache: Cache | None,
    layer_idx: int,
    state_idx: int,
    mixer_input: Tensor | None = None,
) -> list[Tensor]:
    """Apply the Canon layers of one place (one for A and C; q, k, v for B; gate, up for D) to `[B, T, C_i]` inputs.

    An input without a layer (None) stays as it is. With a cache, the state continues what came before and is moved on;
    the layers share one, which is as long as the largest of their kernels. `mixer_input`: see `CanonLayer.forward`.
    """
    outputs = list(inputs)
    taken = [(index, canon, inputs[index]) for index, canon in enumerate(canons) if canon is not None]
    call: dict[str, Any] = {"attention_mask": layout.attention_mask, "doc_ids": layout.doc_ids}
    call["mixer_input"] = mixer_input
    if cache is None:
        for index, canon, x in taken:
            outputs[index] = canon(x, **call)
        return outputs
    kernel = max(canon.kernel_size for _, canon, _ in taken)
    layer: Any = cache.layers[layer_idx]
    past = _read_state(layer, state_idx, kernel)
    if past is not None and layout.continues is not None:
        # A state holds inputs of the row's last document only; a recorded past holds them all, column by column.
        keep = layout.continues[:, -kernel:] if layer.record_past else layout.continues[:, -1:].expand(-1, kernel)
        past = past * torch.nn.functional.pad(keep, (kernel - keep.shape[1], 0))[:, None].to(past.dtype)
    pasts = [None] * len(taken) if past is None else past.split([x.shape[-1] for _, _, x in taken], dim=1)
    states = []
    for (index, canon, x), state in zip(taken, pasts, strict=True):
        own = None if state is None else state[..., -canon.kernel_size :]
        outputs[index], state = canon(x, state=own, return_state=True, **call)
        states.append(torch.nn.functional.pad(state, (kernel - canon.kernel_size, 0)))
    state = torch.cat(states, dim=1)
    if layer.record_past:
        # Someone may rewind (prompt lookup): the library then wants every input, and cuts the state itself.
        state = torch.cat([x for _, _, x in taken], dim=-1).transpose(1, 2)
        if layout.attention_mask is not None:
            state = state.masked_fill((layout.attention_mask == 0)[:, None], 0)
    layer.update_conv_state(state, state_idx=state_idx, conv_kernel_size=kernel)
    return outputs


def fill_unused_states(cache: Cache | None, layer_idx: int, used: int, x_BTC: Tensor) -> None:
    """Every layer holds as many states as the model's fullest one, and the library cannot crop one never written."""
    if cache is None or used == 0:
        return
    layer: Any = cache.layers[layer_idx]
    for state_idx in range(used, layer.number_of_states):
        nothing = x_BTC.new_zeros(x_BTC.shape[0], 1, x_BTC.shape[1])
        layer.update_conv_state(nothing, state_idx=state_idx, conv_kernel_size=1)


def read_recurrence(cache: Cache | None, layer_idx: int, layout: Layout) -> Tensor | None:
    """The recurrent state that the first new token starts from, `[B, ...]`; None: from nothing."""
    if cache is None:
        return None
    layer: Any = cache.layers[layer_idx]
    if layer.record_past:
        what = "a model without recurrent layers: their state cannot be taken back (prompt lookup, crop)"
        raise expected("past_key_values", what, f"recorded past of layer {layer_idx}")
    state = layer.recurrent_states[0]
    if state is not None and layout.continues is not None:
        state = state * layout.continues[:, -1].view(-1, *[1] * (state.ndim - 1)).to(state.dtype)
    return state


def write_recurrence(cache: Cache | None, layer_idx: int, state: Tensor) -> None:
    if cache is not None:
        layer: Any = cache.layers[layer_idx]
        layer.update_recurrent_state(state)


def count_tokens(cache: Cache | None, config: PreTrainedConfig, x_BTD: Tensor) -> None:
    """A cache of recurrent layers alone could not tell its length: its first layer is given keys, of one channel."""
    if cache is not None and "attention" not in config.mixers:
        marks = x_BTD.new_zeros(x_BTD.shape[0], 1, x_BTD.shape[1], 1)
        cache.update(marks, marks, 0)


def _read_state(layer: Any, state_idx: int, kernel: int) -> Tensor | None:
    state = layer.conv_states[state_idx]
    if state is None:
        return None
    state = state[..., -kernel:]  # longer while the past is recorded
    return torch.nn.functional.pad(state, (kernel - state.shape[-1], 0))
