"""The layout of a host's tokens: padding, documents, and cached tokens.

Computed once per forward, from the arguments that the host takes, by the rules of the host's library.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask
from transformers import Cache, PreTrainedModel

from canonlm.canonize import canon_cache
from canonlm.core.cache_name import CACHE, CACHE_NAMES
from canonlm.core.errors import expected
from canonlm.ops.compiled import readable
from canonlm.ops.varlen import Layout, as_documents, has_gaps, new_columns, read_mask, token_columns


class HostLayout:
    """The new tokens: batch, time, and what Canon layers read about them. visits: how often each block has run, as some
    hosts repeat theirs."""

    def __init__(self, batch: int, time: int, tokens: Layout) -> None:
        self.batch, self.time, self.tokens = batch, time, tokens
        self.visits: dict[int, int] = {}

    def to(self, device: Any, non_blocking: bool = False) -> "HostLayout":
        """As `Tensor.to`, so that code that moves a block's arguments to its device also moves these."""
        real, documents = self.tokens.attention_mask, self.tokens.documents
        if all(t is None or t.device == torch.device(device) for t in (real, self.tokens.doc_ids)):
            return self
        real = None if real is None else real.to(device, non_blocking=non_blocking)
        documents = documents and documents.each(lambda t: t.to(device, non_blocking=non_blocking))
        moved = HostLayout(self.batch, self.time, Layout(real, documents, self.tokens.gaps))
        moved.visits = self.visits
        return moved

    def equals(self, other: "HostLayout") -> bool:
        mine, others = self.tokens, other.tokens
        pairs = ((mine.attention_mask, others.attention_mask), (mine.doc_ids, others.doc_ids))
        return all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def layout_of(model: PreTrainedModel, arguments: Mapping[str, Any]) -> HostLayout | None:
    """The layout of the tokens of a call; None if there are none. arguments: of the module that takes `input_ids`, by
    name.

    InvalidSetting for a cache that was filled without Canon layers, and for a mask that leaves out tokens.
    """
    tokens = arguments.get("input_ids")
    tokens = arguments.get("inputs_embeds") if tokens is None else tokens
    if not isinstance(tokens, Tensor):
        return None
    batch, time = tokens.shape[:2]
    cache = _cache(arguments)
    past: int | Tensor = 0
    if cache is not None:
        canon_cache.adopt(cache)
        past = _length(cache)
        if not torch.compiler.is_compiling() and not canon_cache.holds_any(cache) and _is_filled(cache, past):
            raise expected(CACHE, "a cache filled by this model with its Canon layers", cache)
    mask = arguments.get("attention_mask")
    if isinstance(mask, Mapping):  # one for each kind of layer
        kinds = [kind for kind in ("full_attention", "sliding_attention") if kind in mask] or list(mask)
        mask = mask[kinds[0]] if kinds else None
    if isinstance(mask, BlockMask):  # of flex attention
        mask = create_mask(mask.mask_mod, mask.shape[0], 1, time, mask.shape[-1], mask.kv_num_blocks.device)
    real = doc_ids = None
    if isinstance(mask, Tensor) and mask.ndim == 2:
        if mask.shape[0] != batch:
            raise expected("attention_mask", f"a row for each of {batch}", list(mask.shape))
        real = _real(mask, past, time)
    elif isinstance(mask, Tensor) and mask.ndim == 4:
        real, doc_ids = read_mask(mask, past, batch, time)
        doc_ids = None if _none_if_all(doc_ids == 0) is None else doc_ids
    if doc_ids is None:
        doc_ids = _documents(model, arguments, cache, batch, time)
    real = _none_if_all(real)
    filled = cache is not None and not torch.compiler.is_compiling() and _is_filled(cache, past)
    gaps = real is not None and has_gaps(real, filled)
    return HostLayout(batch, time, Layout(real, as_documents(doc_ids), gaps))


def _none_if_all(values: Tensor | None) -> Tensor | None:
    """`values`, or None if all are True; within a compiled graph that cannot be checked."""
    return None if values is None or (readable(values) and bool(values.all())) else values


def _cache(arguments: Mapping[str, Any]) -> Cache | None:
    names = (*CACHE_NAMES, "past_key_value", "layer_past", "mems")  # the last three are those of blocks and of XLNet
    for name in names:
        value = arguments.get(name)
        if value is not None and not isinstance(value, Cache):
            what = "a Cache of transformers (continuous batching has no place for the states of Canon layers)"
            raise expected(name, what, type(value).__name__)
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


def _is_filled(cache: Cache, past: int | Tensor) -> bool:
    return cache.has_previous_state() if isinstance(past, int) and past < 0 else bool(past > 0)


def _length(cache: Cache) -> int | Tensor:
    try:
        return cache.get_seq_length()
    except ValueError:  # a cache of recurrent layers alone does not count tokens
        return -1


def _real(mask: Tensor, past: int | Tensor, time: int) -> Tensor:
    """Real new tokens, from a mask of all tokens, `[B, past + T]` or longer."""
    start = mask.shape[1] - time if isinstance(past, int) and past < 0 else past
    return new_columns(token_columns(mask, start, time), start, time) != 0


def _documents(
    model: PreTrainedModel, arguments: Mapping[str, Any], cache: Cache | None, batch: int, time: int
) -> Tensor | None:
    """Documents of packed rows, if the library keeps attention within them: without a mask and a cache, they begin
    where positions do not grow by one. Flash attention takes one row, even with a cache, or borders
    (`cu_seq_lens_q`)."""
    flash = "flash" in (model.config._attn_implementation or "")
    borders, positions = arguments.get("cu_seq_lens_q"), arguments.get("position_ids")
    if isinstance(positions, Tensor) and positions.ndim == 3 and len(positions) == 4:
        positions = positions[0]  # of text, which the mask of Qwen-VL's kind reads; the others are time, height, width
    if isinstance(borders, Tensor) and flash:
        places = torch.arange(time, device=borders.device)
        return torch.searchsorted(borders[1:].contiguous(), places, right=True).expand(batch, time)
    if not isinstance(positions, Tensor) or positions.ndim != 2 or time == 1:
        for name in ("cu_seq_lens_q", "seq_idx", "cu_seqlens", "doc_ids"):
            if arguments.get(name) is not None and time > 1:
                what = "position_ids that start again at documents: this model's attention reads nothing else"
                raise expected(name, what, type(arguments[name]).__name__)
        return None
    mask = arguments.get("attention_mask")
    if flash and (batch > 1 or (isinstance(mask, Tensor) and _none_if_all(mask != 0) is not None)):
        return None
    if not flash and (mask is not None or cache is not None or makes_cache(model, arguments)):
        return None
    continues = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) == 1
    return None if _none_if_all(continues) is None else (~continues).cumsum(-1).expand(batch, time)


def makes_cache(model: PreTrainedModel, arguments: Mapping[str, Any]) -> bool:
    """Whether the host creates a cache if it gets none."""
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config, "use_cache", False)
    recomputes = model.training and getattr(model, "gradient_checkpointing", False)
    return bool(use_cache) and not recomputes
