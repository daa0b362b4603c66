"""The borders of documents in packed rows, for kernels: made once per batch, for all layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_DOCUMENTS = 16
"""Number of documents for which there is always room."""


class Documents(NamedTuple):
    """The documents of a batch whose rows are laid end to end: document n ends before token cu_seqlens[n + 1].

    Both fields are rounded up, so that few different values occur and a compiler handles few cases. Kernels accept
    empty documents and a length that no document reaches.
    """

    cu_seqlens: Tensor  # int32 [N + 1], from 0 to B T; N is a power of two, the last documents may be empty
    max_length: int  # no document is longer; a power of two, or T

    def arguments(self) -> dict[str, Any]:
        """The arguments of transformers' models and its flash attention."""
        names = {"cu_seq_lens": self.cu_seqlens, "max_length": self.max_length}
        return {f"{name}_{side}": value for name, value in names.items() for side in "qk"}


def documents_of(doc_ids_BT: Tensor) -> Documents:
    """The runs of equal ids in each row. On a GPU this waits for the device, so call it with ids on the CPU."""
    starts_BT = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    starts = starts_BT.flatten().nonzero().flatten()
    room = _power_of_two(max(MIN_DOCUMENTS, len(starts)))
    cu_seqlens = starts.new_full((room + 1,), doc_ids_BT.numel(), dtype=torch.int32)
    cu_seqlens[: len(starts)] = starts
    longest = int(cu_seqlens.diff().max())
    return Documents(cu_seqlens, min(_power_of_two(longest), doc_ids_BT.shape[1]))


def doc_ids_of(cu_seqlens: Tensor, rows: int, time: int) -> Tensor:
    """`[rows, time]`: the number of each token's document. The inverse of `documents_of`; never waits for a GPU."""
    tokens = torch.arange(rows * time, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True).view(rows, time)


def read_mask(mask_BHTS: Tensor, past: int | Tensor, batch: int, time: int) -> tuple[Tensor, Tensor]:
    """Real tokens and documents, `[batch, time]`, from a prepared attention mask (True or False, or numbers to add),
    `[B, 1, T, columns]`: padding does not see itself, and the first token of a document not the real
    token before it."""
    latest = mask_BHTS.shape[-1] - time  # of a sliding window, whose columns begin later than the row
    first = past.clamp(max=latest) if isinstance(past, Tensor) else min(max(past, 0), latest)
    visible = is_visible(mask_BHTS)
    visible_BTS = visible[:, 0].expand(batch, -1, -1)
    columns = first + torch.arange(time, device=visible.device).expand(batch, time)
    real = visible_BTS.gather(2, columns[..., None])[..., 0]
    if time == 1:
        return real, torch.zeros_like(real, dtype=torch.long)
    previous = previous_real(real)
    before = visible_BTS.gather(2, (first + previous.clamp(min=0))[..., None])[..., 0]
    return real, (real & (previous >= 0) & ~before).cumsum(-1)


def previous_real(real_BT: Tensor) -> Tensor:
    """The position of the last real token before each, or -1."""
    steps = torch.arange(real_BT.shape[1], device=real_BT.device)
    last = torch.where(real_BT, steps, -1).cummax(1).values
    return torch.nn.functional.pad(last[:, :-1], (1, 0), value=-1)


def has_gaps(real_BT: Tensor, after: bool) -> bool:
    """Whether padding stands between real tokens, some of which came before these if `after`. On a GPU this waits for
    the device; a graph that is compiled serves both cases."""
    if real_BT.shape[1] == 1:
        return False
    return torch.compiler.is_compiling() or bool((_past_the_first(real_BT, after) & _some_later(real_BT)).any())


def has_padding_after(real_BT: Tensor, after: bool) -> bool:
    """Whether padding follows a real token: `has_gaps`, or padding on the right."""
    return bool(_past_the_first(real_BT, after).any())


def _past_the_first(real_BT: Tensor, after: bool) -> Tensor:
    return ~real_BT if after else ~real_BT & (real_BT.cumsum(1) > 0)


def _some_later(real_BT: Tensor) -> Tensor:
    return real_BT.flip(1).cumsum(1).flip(1) > 0


def real_first(real_BT: Tensor) -> tuple[Tensor, Tensor]:
    """`[B, T]` each: the tokens in an order in which the real ones come first, and the place of each token there."""
    place = torch.where(real_BT, real_BT.cumsum(1), real_BT.sum(1, keepdim=True) + (~real_BT).cumsum(1)) - 1
    steps = torch.arange(real_BT.shape[1], device=real_BT.device).expand_as(place)
    return torch.empty_like(place).scatter_(1, place, steps), place


def is_visible(mask: Tensor) -> Tensor:
    """True where a mask adds no number like -1e9, a common stand-in for minus infinity."""
    return mask if mask.dtype == torch.bool else mask > max(torch.finfo(mask.dtype).min / 2, -1e8)


def _power_of_two(minimum: int) -> int:
    return 1 << max(0, minimum - 1).bit_length()
