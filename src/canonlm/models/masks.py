"""Masks of all pairs of tokens for attention: causal, without padding, within documents and windows, with ALiBi."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from transformers import Cache
from transformers.masking_utils import causal_mask_function, create_causal_mask, create_sliding_window_causal_mask

from canonlm.core.errors import unsupported
from canonlm.models.cache import records_past
from canonlm.models.config import CanonLMConfig
from canonlm.models.positions import alibi_mask, lowest_score
from canonlm.ops.compiled import readable
from canonlm.ops.varlen import has_padding_after


def make_mask(
    config: CanonLMConfig,
    window: int | None,
    h_BTD: Tensor,
    attention_mask: Tensor | None,
    cache: Cache | None,
    doc_ids: Tensor | None,
) -> tuple[Any, Tensor | None]:
    """The mask of layers with this window (None: without one), in the form that the chosen kernel reads: what
    transformers' functions make; None if it needs none. And with a window, the order in which the cache has to keep
    these keys (`cache.keep_last`); None: as they come.

    attention_mask: of cached and new tokens, `[B, S]`; one of all pairs, `[B, 1, T, S]`, is returned as it is, or with
    ALiBi. doc_ids: of cached and new tokens.
    """
    order = None
    if cache is not None and config.sliding_layers is not None:
        # With Canon states in a static cache, the library would take a layer with a window for one without.
        cache = Cache(layers=[cache.layers[i] for i in config.attending if config.window(i) == window])
    options: dict[str, Any] = {}
    if window is not None and attention_mask is not None and attention_mask.ndim == 2:
        real, new = attention_mask != 0, h_BTD.shape[1]
        if not readable(real) or has_padding_after(real, after=False):
            # The library's caches and windows count columns. Ours count tokens: caches keep the last, after padding.
            if cache is not None:
                if any(map(records_past, cache.layers)):
                    what = "padding at the start of rows only, while the cache of a window records its past (crop)"
                    raise unsupported("attention_mask", what, "a mask with padding after tokens")
                places = padding_first(real[:, :-new])
                real = torch.cat([real[:, :-new].gather(1, places), real[:, -new:]], dim=1)
                if doc_ids is not None:
                    doc_ids = torch.cat([doc_ids[:, :-new].gather(1, places), doc_ids[:, -new:]], dim=1)
                order = padding_first(real[:, -new - window + 1 :])
            attention_mask = real
            options["or_mask_function"] = causal_mask_function
            options["and_mask_function"] = _within(window, real, doc_ids)
    if doc_ids is not None and not options:
        options["and_mask_function"] = same_document(doc_ids)
    make = create_causal_mask if window is None else create_sliding_window_causal_mask
    # The cache by its place: its name is `past_key_values` before transformers 5.24, and `cache` since.
    skip = config.alibi is None and not h_BTD.is_meta  # if nothing is padded, which the library looks up
    mask = make(config, h_BTD, attention_mask, cache, allow_is_causal_skip=skip, **options)
    if isinstance(mask, Tensor) and mask.dtype == torch.float64:
        mask = mask.clamp(min=lowest_score(mask.dtype))
    if config.alibi is not None:
        pairs = cast(Tensor, mask)
        if attention_mask is None and doc_ids is None:
            pairs = pairs[:1]  # rows are equal: kernels need to read only one
        mask = alibi_mask(config, pairs, attention_mask, cache, h_BTD.dtype)
    return mask, order


def padding_first(real: Tensor) -> Tensor:
    """`[B, S]`: the columns in an order in which padding comes first and tokens stay in order."""
    return real.int().argsort(dim=1, stable=True)


def same_document(doc_ids: Tensor) -> Callable[..., Tensor]:
    """A mask function for transformers: whether key and query share a document. `doc_ids`: of cached and new tokens."""
    last = doc_ids.shape[1] - 1  # a static cache also has places that are not written yet: causality hides them

    def same(batch_idx, head_idx, q_idx, kv_idx):
        return doc_ids[batch_idx, q_idx.clamp(max=last)] == doc_ids[batch_idx, kv_idx.clamp(max=last)]

    return same


def _within(window: int, real: Tensor, doc_ids: Tensor | None) -> Callable[..., Tensor]:
    """A mask function: whether fewer than `window` tokens are after the key up to the query, and they share a
    document."""
    places, last = real.cumsum(1), real.shape[1] - 1
    same = None if doc_ids is None else same_document(doc_ids)

    def near(batch_idx, head_idx, q_idx, kv_idx):
        steps = places[batch_idx, q_idx.clamp(max=last)] - places[batch_idx, kv_idx.clamp(max=last)]
        return steps < window if same is None else (steps < window) & same(batch_idx, head_idx, q_idx, kv_idx)

    return near
