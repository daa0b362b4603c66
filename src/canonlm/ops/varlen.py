"""The documents of packed rows, and padding: made once per batch, for all layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from canonlm.core.errors import expected
from canonlm.ops.compiled import readable
from canonlm.ops.context_parallel import Op, Span, on_whole_rows, own

MIN_DOCUMENTS = 16
"""Number of documents for which there is always room."""


@dataclass(frozen=True)
class Documents:
    """The documents of packed rows, from the windows of data to the kernels.

    ids: `[B, T]` integers; a document is a run of equal ones in a row.
    cu_seqlens: int32 `[N + 1]`, from 0 to B T: with the rows laid end to end, document n ends before token
        cu_seqlens[n + 1]. None: not counted (`counted`).
    max_length: no document is longer.

    Both are rounded up, so that few different values occur and a compiler handles few cases: N is a power of two, as
    the last documents may be empty; the length is a power of two, or T.
    """

    ids: Tensor
    cu_seqlens: Tensor | None = None
    max_length: int = 0

    def counted(self) -> "Documents":
        """With their borders, for kernels that read these. On a GPU this waits for the device: call it on the CPU."""
        return self if self.cu_seqlens is not None else documents_of(self.ids)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Documents":
        """With every tensor changed (to another device, say)."""
        cu_seqlens = None if self.cu_seqlens is None else change(self.cu_seqlens)
        return Documents(change(self.ids), cu_seqlens, self.max_length)

    def spread(self, steps: int) -> "Documents":
        """Those of the steps, where a recurrence takes several per token."""
        borders = None if self.cu_seqlens is None else self.cu_seqlens * steps
        return Documents(self.ids.repeat_interleave(steps, dim=1), borders, self.max_length * steps)

    def arguments(self) -> dict[str, Any]:
        """The arguments of transformers' models and its flash attention."""
        names = {"cu_seq_lens": self.cu_seqlens, "max_length": self.max_length}
        return {f"{name}_{side}": value for name, value in names.items() for side in "qk"}


@dataclass(frozen=True)
class Layout:
    """The tokens of one forward call: made once, and read by every mixer and Canon layer.

    attention_mask: `[B, T]`, 0 at padding; None: all are real.
    documents: of these tokens; None: one per row.
    gaps: whether padding may stand between real tokens, cached ones included; see `CanonLayer.forward`.
    continues: `[B, past]`, whether the first token is of that cached token's document; None: it is.
    without_mask: whether attention separates the documents by their borders, without a mask.
    key_order: the order in which a window's cache keeps keys (`masks.make_mask`); None: as they come.
    reach, last: mask and documents as Triton kernels read them (`kernels.documents`); None: not made.
    span: the part of the rows that these tokens are; `documents` are those of whole rows. None: they are whole.
    """

    attention_mask: Tensor | None = None
    documents: Documents | None = None
    gaps: bool = False
    continues: Tensor | None = None
    without_mask: bool = False
    key_order: Tensor | None = None
    reach: Tensor | None = None
    last: Tensor | None = None
    span: Span | None = None

    @property
    def doc_ids(self) -> Tensor | None:
        """Those of these tokens."""
        return None if self.documents is None else own(self.documents.ids, self.span, dim=1)

    def on_whole_rows(self, op: Op) -> Op:
        """`op`, which mixes tokens of whole rows, for these tokens (`context_parallel.on_whole_rows`)."""
        return on_whole_rows(op, self.span)


def as_documents(doc_ids: Tensor | Documents | None) -> Documents | None:
    """Documents, where a caller may give their ids alone."""
    return Documents(doc_ids) if isinstance(doc_ids, Tensor) else doc_ids


def document_runs(doc_ids_BT: Tensor, attention_mask_BT: Tensor | None) -> Tensor:
    """Number the runs of equal ids 0, 1, 2, …: an id that recurs later in a row is a new document.

    Padding belongs to the document before it, whatever its id.
    """
    before, follows = value_before(doc_ids_BT, attention_mask_BT)
    return ((doc_ids_BT != before) & follows).cumsum(1)


def starts(doc_ids_BT: Tensor | None, time: int | None = None) -> Tensor | None:
    """`[B, T]`, True at tokens whose document is not that of the token before. time: with tokens at the end, up to that
    number, which start none."""
    if doc_ids_BT is None:
        return None
    starts_BT = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    return torch.nn.functional.pad(starts_BT, (1, 0 if time is None else time - doc_ids_BT.shape[1]))


def value_before(x_BT: Tensor, attention_mask_BT: Tensor | None) -> tuple[Tensor, Tensor]:
    """The value at the real token before each; and where both exist: a real token, and a real one before it."""
    real = torch.ones_like(x_BT, dtype=torch.bool) if attention_mask_BT is None else attention_mask_BT != 0
    previous = previous_real(real)
    return x_BT.gather(1, previous.clamp(min=0)), real & (previous >= 0)


def documents_of(doc_ids_BT: Tensor) -> Documents:
    """The runs of equal ids in each row, counted."""
    starts_BT = torch.ones_like(doc_ids_BT, dtype=torch.bool)
    starts_BT[:, 1:] = doc_ids_BT[:, 1:] != doc_ids_BT[:, :-1]
    starts = starts_BT.flatten().nonzero().flatten()
    room = _power_of_two(max(MIN_DOCUMENTS, len(starts)))
    cu_seqlens = starts.new_full((room + 1,), doc_ids_BT.numel(), dtype=torch.int32)
    cu_seqlens[: len(starts)] = starts
    longest = int(cu_seqlens.diff().max())
    return Documents(doc_ids_BT, cu_seqlens, min(_power_of_two(longest), doc_ids_BT.shape[1]))


def doc_ids_of(cu_seqlens: Tensor, rows: int, time: int) -> Tensor:
    """`[rows, time]`: the number of each token's document, from borders; never waits for a GPU."""
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


def token_columns(mask_BS: Tensor, past: int | Tensor, time: int) -> Tensor:
    """A mask of cached and new tokens without the columns after them, which places of a static cache have.
    ValueError if it is narrower. In the graph of a static cache, whose length is not known, the mask itself."""
    if isinstance(past, Tensor) and torch.compiler.is_compiling():
        return mask_BS
    if mask_BS.shape[1] < (end := int(past) + time):
        raise expected("attention_mask", f"{end} columns: cached tokens and new ones", mask_BS.shape[1])
    return mask_BS[:, :end]


def new_columns(x_BS: Tensor, past: int | Tensor, time: int) -> Tensor:
    """The columns of the new tokens."""
    return (
        x_BS[:, past : past + time]
        if isinstance(past, int)
        else x_BS.index_select(1, past + torch.arange(time, device=x_BS.device))
    )


def previous_real(real_BT: Tensor) -> Tensor:
    """The position of the last real token before each, or -1."""
    steps = torch.arange(real_BT.shape[1], device=real_BT.device)
    last = torch.where(real_BT, steps, -1).cummax(1).values
    return torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]


def has_gaps(real_BT: Tensor, after: bool) -> bool:
    """Whether padding stands between real tokens, some of which came before these if `after`. On a GPU this waits for
    the device; where values cannot be read, both cases are served."""
    if real_BT.shape[1] == 1:
        return False
    if not readable(real_BT):
        return True
    some_later_BT = real_BT.flip(1).cumsum(1).flip(1) > 0
    return bool((_past_the_first(real_BT, after) & some_later_BT).any())


def has_padding_after(real_BT: Tensor, after: bool) -> bool:
    """Whether padding follows a real token: `has_gaps`, or padding on the right."""
    return bool(_past_the_first(real_BT, after).any())


def _past_the_first(real_BT: Tensor, after: bool) -> Tensor:
    return ~real_BT if after else ~real_BT & (real_BT.cumsum(1) > 0)


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
