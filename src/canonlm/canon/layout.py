"""What a host is told of its tokens: which are padding, which documents they belong to, what came before.

Worked out once for each forward, from the same arguments that the host takes, by the host library's own rules.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from canonlm.canon import states
from canonlm.errors import expected

CACHE_NAMES = ("past_key_values", "cache_params", "past_key_value", "layer_past")


class Layout:
    """Of the new tokens: batch, time; real, `[B, T]`, is a token no padding? None: none is; doc_ids, `[B, T]`, or None:
    one document a row. visits: how often each block has run, as some hosts repeat theirs."""

    def __init__(self, batch: int, time: int, real: Tensor | None = None, doc_ids: Tensor | None = None) -> None:
        self.batch, self.time, self.real, self.doc_ids = batch, time, real, doc_ids
        self.visits: dict[int, int] = {}

    def to(self, device: Any, non_blocking: bool = False) -> "Layout":
        """As of tensors: what moves a block's arguments to the block's device moves these."""
        if not any(t is not None and t.device != torch.device(device) for t in (self.real, self.doc_ids)):
            return self
        parts = (None if t is None else t.to(device, non_blocking=non_blocking) for t in (self.real, self.doc_ids))
        moved = Layout(self.batch, self.time, *parts)
        moved.visits = self.visits
        return moved


def layout_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> Layout | None:
    """arguments: of the forward of the module that takes `input_ids`, by name. None: they hold no tokens.

    InvalidSetting: a cache that was filled without Canon layers, a mask that leaves out tokens.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return None
    batch, time = tokens.shape[:2]
    cache = next((arguments[name] for name in CACHE_NAMES if isinstance(arguments.get(name), Cache)), None)
    past: int | Tensor = 0
    if cache is not None:
        states.adopt(cache)
        past = _length(cache)
        if not torch.compiler.is_compiling() and not cache.canon_states and _is_filled(cache, past):
            raise expected("past_key_values", "a cache that this model has filled since it has Canon layers", cache)
    mask = arguments.get("attention_mask")
    real = None if mask is None else _real(mask, cache, past, batch, time)
    if real is not None and not torch.compiler.is_compiling() and bool(real.all()):
        real = None
    return Layout(batch, time, real, _documents(model, arguments, cache, batch, time))


def _is_filled(cache: Cache, past: int | Tensor) -> bool:
    return cache.has_previous_state() if isinstance(past, int) and past < 0 else bool(past > 0)


def _length(cache: Cache) -> int | Tensor:
    try:
        return cache.get_seq_length()
    except ValueError:  # of recurrent layers alone: nobody counts
        return -1


def _real(mask: Any, cache: Cache | None, past: int | Tensor, batch: int, time: int) -> Tensor | None:
    """`[B, T]` out of a mask of tokens `[B, past + T]`, or out of prepared masks of attention `[B, 1, T, columns]`."""
    if isinstance(mask, Mapping):  # one for each kind of layer
        kinds = [kind for kind in ("full_attention", "sliding_attention", "chunked_attention") if kind in mask]
        kinds = kinds or list(mask)
        return _real(mask[kinds[0]], cache, past, batch, time) if kinds else None
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        return None
    if mask.ndim == 2:
        if isinstance(past, Tensor):
            return mask.index_select(1, past + torch.arange(time, device=mask.device)) != 0
        start = past if past >= 0 else mask.shape[1] - time
        if mask.shape[1] < start + time:
            raise expected("attention_mask", f"{start + time} columns: cached tokens and new ones", mask.shape[1])
        return mask[:, start : start + time] != 0
    # Does a token see itself? A window's columns may begin later than the row.
    first = past if isinstance(past, Tensor) else max(past, 0)
    if mask.shape[-1] < time or (not isinstance(first, Tensor) and mask.shape[-1] < first + time):
        first = mask.shape[-1] - time
    columns = (first + torch.arange(time, device=mask.device)).view(1, time, 1)
    itself = mask[:, 0].gather(2, columns.expand(mask.shape[0], time, 1))[..., 0]
    itself = itself if itself.dtype == torch.bool else itself >= 0
    return itself.expand(batch, time)


def _documents(
    model: PreTrainedModel, arguments: Mapping[str, Any], cache: Cache | None, batch: int, time: int
) -> Tensor | None:
    """Documents of packed rows, where the library keeps attention inside of them: without a mask and a cache, where
    positions do not go on by one; with flash attention also by the borders that it is given (`cu_seq_lens_q`)."""
    flash = "flash" in (model.config._attn_implementation or "")
    borders = arguments.get("cu_seq_lens_q")
    if isinstance(borders, Tensor) and flash:
        places = torch.arange(time, device=borders.device)
        return torch.searchsorted(borders[1:].contiguous(), places, right=True).expand(batch, time)
    positions = arguments.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim != 2 or time == 1 or cache is not None:
        return None
    if (
        arguments.get("attention_mask") is not None
        or (flash and batch > 1)
        or (not flash and makes_cache(model, arguments))
    ):
        return None
    starts = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1
    if not torch.compiler.is_compiling() and not starts.any():
        return None
    return starts.cumsum(-1).expand(batch, time)


def makes_cache(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Will the host make a cache of its own, where it gets none?"""
    wanted = arguments.get("use_cache")
    if wanted is None:
        wanted = getattr(model.config, "use_cache", False)
    recomputes = model.training and getattr(model, "gradient_checkpointing", False)
    return bool(wanted) and not recomputes
