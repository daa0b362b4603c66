"""The layout of a forward pass's tokens, computed once for all layers: positions, padding and documents."""

import torch
from torch import Tensor
from transformers import Cache

from canonlm.core.errors import expected, unsupported
from canonlm.models.attend import needs_no_mask
from canonlm.models.cache import Layout, documents_from_positions, positions_in_documents
from canonlm.models.config import CanonLMConfig
from canonlm.models.positions import lowest_score
from canonlm.ops.compiled import is_exporting, readable
from canonlm.ops.varlen import (
    Documents,
    as_documents,
    doc_ids_of,
    document_runs,
    is_visible,
    new_columns,
    read_mask,
    token_columns,
)


def lay_out(
    config: CanonLMConfig,
    h_BTD: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    documents: Tensor | Documents | None,
    seq_idx: Tensor | None,
    borders: tuple[Tensor, int | None] | None,
    *,
    convolves: bool,
    training: bool,
) -> tuple[Layout, Tensor | None, Tensor]:
    """The layout of the new tokens, the documents of all tokens (cached ones included) or None, the positions.

    documents: of all tokens, or their ids. seq_idx, borders (`cu_seq_lens_q`, `max_length_q`): transformers' ways to
    say the same.
    """
    given = as_documents(documents)
    doc_ids = None if given is None else given.ids
    if given is not None and given.cu_seqlens is not None:
        borders = given.cu_seqlens, given.max_length
    for key, tensor in {"doc_ids": doc_ids, "seq_idx": seq_idx, "attention_mask": attention_mask}.items():
        if tensor is not None and tensor.device != h_BTD.device:
            raise expected(key, f"a tensor on {h_BTD.device}, as the tokens", str(tensor.device))
    batch, time = h_BTD.shape[:2]
    past: int | Tensor = 0 if cache is None else cache.get_seq_length()
    mask = attention_mask if attention_mask is not None and attention_mask.ndim == 2 else None
    new_mask = None if mask is None else new_columns(mask, past, time)
    # A single token shows no restart, and comparing a static cache's length would break the graph. An exported graph
    # cannot compare it at all: there the length of an empty cache is 0, and that of a filled one a tensor.
    exported = is_exporting() and isinstance(past, Tensor)
    stated = doc_ids is not None or seq_idx is not None or borders is not None
    if stated and doc_ids is None and not exported and past != 0:
        key = "seq_idx" if borders is None else "cu_seq_lens_q"
        raise expected(key, "doc_ids, of cached and new tokens, if tokens are cached", int(past))
    if doc_ids is not None:
        if doc_ids.shape != (batch, past + time):
            what = f"shape {(batch, int(past + time))}: one document per token, cached tokens included"
            raise expected("doc_ids", what, tuple(doc_ids.shape))
        doc_ids = document_runs(doc_ids, mask)
    elif borders is not None:
        doc_ids = doc_ids_of(borders[0], batch, time)
    elif seq_idx is not None:
        doc_ids = document_runs(seq_idx.expand(batch, time), mask)
    elif position_ids is not None and time > 1 and not exported:
        doc_ids = documents_from_positions(position_ids.expand(batch, -1), new_mask)
        if doc_ids is not None and past != 0:
            if readable(doc_ids):
                what = "no restart behind cached tokens (or doc_ids, of cached and new tokens)"
                raise expected("position_ids", what, position_ids.tolist())
            doc_ids = None  # a graph cannot tell whether there was one
    remembered = getattr(cache, "documents", None)
    if (doc_ids is not None or remembered is not None) and not (cache is None or torch.compiler.is_compiling()):
        if past == 0:
            cache.documents = doc_ids  # type: ignore[attr-defined]
        elif attention_mask is None or attention_mask.ndim == 2:
            check_documents(cache, doc_ids)

    if position_ids is None:
        if doc_ids is not None:
            position_ids = positions_in_documents(doc_ids, mask)[:, -time:]
        elif mask is not None:
            position_ids = new_columns((mask.long().cumsum(-1) - 1).clamp(min=0), past, time)
        else:
            position_ids = (torch.arange(time, device=h_BTD.device) + past)[None]
    # An exported step gets the causal mask of a static cache, which shows nothing else.
    if attention_mask is not None and attention_mask.ndim == 4 and not exported and time > 1:
        reads = config.is_recurrent or convolves or stated
        layout = _of_prepared(attention_mask, past, doc_ids, batch, time) if reads else Layout()
        return layout, None, position_ids
    if doc_ids is None:
        return Layout(attention_mask=new_mask), None, position_ids
    continues = None if doc_ids.shape[1] == time else doc_ids[:, :-time] == doc_ids[:, -time, None]
    full = attention_mask is None or (mask is not None and readable(mask) and bool(mask.all()))
    plain = full and bool(past == 0)
    of_new, without_mask = _for_kernels(config, h_BTD, Documents(doc_ids[:, -time:]), borders, plain, training)
    return Layout(new_mask, of_new, continues=continues, without_mask=without_mask), doc_ids, position_ids


def check_documents(cache: Cache, doc_ids: Tensor | None) -> None:
    """ValueError if the cache was filled with packed documents, and those of these tokens are not given."""
    first = getattr(cache, "documents", None)
    if first is not None and doc_ids is None and readable(first) and bool((first != 0).any()):
        raise expected("doc_ids", "those of cached and new tokens, as several documents are cached", None)


def check_mask(
    config: CanonLMConfig, mask: Tensor | None, dtype: torch.dtype, cache: Cache | None, batch: int, time: int
) -> Tensor | None:
    """The attention mask: of cached and new tokens, `[B, columns]`; one of all pairs, `[B, 1, T, columns]`, in the form
    that the kernel of attention reads."""
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        if mask is not None:
            raise expected("attention_mask", "a tensor [batch, tokens] or [batch, 1, new tokens, tokens]", mask)
        return None
    if mask.ndim == 2:
        if mask.shape[0] != batch:
            raise expected("attention_mask", f"a row for each of {batch}", list(mask.shape))
        return token_columns(mask, 0 if cache is None else cache.get_seq_length(), time)
    kernel = config._attn_implementation or ""
    if "flash" in kernel or (
        config.sliding_window is not None and (mask.shape[2] > 1 or config.sliding_layers is not None)
    ):
        other = "sliding_window" if "flash" not in kernel else kernel
        raise expected("attention_mask", f"a tensor [batch, tokens] with {other}", list(mask.shape))
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise expected("attention_mask", "True or False, or numbers to add, for all pairs of tokens", mask.dtype)
    if mask.dtype == torch.bool and kernel != "sdpa" and config.alibi != "alibi":  # which makes numbers of it
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest_score(dtype))
    return mask


def _of_prepared(mask: Tensor, past: int | Tensor, doc_ids: Tensor | None, batch: int, time: int) -> Layout:
    """The layout that a mask of all pairs shows. InvalidSetting if Canon layers and recurrences cannot follow it."""
    if mask.shape[-1] < past + time or mask.shape[-2] != time:
        raise expected("attention_mask", f"a mask of {time} new tokens and {past} cached ones", list(mask.shape))
    real, of_mask = read_mask(mask, past, batch, time)
    doc_ids = of_mask if doc_ids is None else doc_ids[:, -time:]
    visible = is_visible(mask).expand(batch, -1, -1, -1)
    rows = torch.arange(batch, device=mask.device)
    seen = visible[rows, 0, real.int().argmax(1), : int(past)]  # cached tokens, by the first new one
    # Padding after the first of them is of the same document.
    continues = seen.cummax(1).values if seen.shape[1] else None
    if readable(mask):
        causal = torch.ones(time, time, dtype=torch.bool, device=mask.device).tril()
        usual = causal & (doc_ids[:, :, None] == doc_ids[:, None]) & real[:, None]
        if bool(((visible[..., int(past) : int(past) + time] != usual[:, None]) & real[:, None, :, None]).any()):
            what = "causal attention within documents: Canon layers and recurrences read the tokens before, in order"
            raise expected("attention_mask", what, "a mask [batch, heads, new tokens, tokens] that differs")
    return Layout(real.long(), Documents(doc_ids), continues=continues)


def _for_kernels(
    config: CanonLMConfig,
    h_BTD: Tensor,
    documents: Documents,
    borders: tuple[Tensor, int | None] | None,
    plain: bool,
    training: bool,
) -> tuple[Documents, bool]:
    """The documents, with borders if a kernel of this model reads them, and whether attention works without a mask.
    `plain`: nothing is padded, and nothing is cached."""
    attends, flash = config.attends, "flash" in (config._attn_implementation or "")
    if attends and flash and not plain:
        what = '"sdpa", "eager" or "flex_attention" with packed documents beside padding or cached tokens'
        raise unsupported("attn_implementation", what, config._attn_implementation)
    without_mask = attends and plain and needs_no_mask(config, h_BTD, training)
    if plain and borders is not None:
        cu_seqlens, longest = borders
        longest = int(cu_seqlens.diff().max()) if longest is None else longest
        return Documents(documents.ids, cu_seqlens, longest), without_mask
    if torch.compiler.is_compiling() and not flash:
        return documents, False  # their number would not be a constant of the graph
    needed = without_mask or (h_BTD.is_cuda and config.is_recurrent)
    return documents.counted() if needed else documents, without_mask
