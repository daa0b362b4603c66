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


def _power_of_two(minimum: int) -> int:
    return 1 << max(0, minimum - 1).bit_length()
