"""Packing: a window is filled with instances j = 0, 1, … until it is full; the last one is cut, its labels kept.

Instance j of window w is keyed (seed, split, w, j), so any window can be made without the windows before it.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

IGNORE = -100  # the label of a token that is no target, as in torch and transformers


class Windows(NamedTuple):
    """Packed rows, each int32 [count, seq_len], C-contiguous. `doc_ids` counts the instances of a row: 0, 1, 2, …

    `labels[b, t]` is the target for `input_ids[b, t]` (the model shifts). The first token of every instance keeps its
    label under loss_on="all"; whoever isolates documents must not predict it from the document before.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    doc_ids: np.ndarray


def empty_windows(count: int, seq_len: int) -> Windows:
    return Windows(*(np.empty((count, seq_len), np.int32) for _ in range(3)))


@njit(cache=True)
def place(tokens, labels, length, doc, loss_on_all, row_ids, row_labels, row_docs, at):
    """Copy one instance into a row at position `at`, cut where the row ends. Returns where the next one starts."""
    length = min(length, len(row_ids) - at)
    for i in range(length):
        row_ids[at + i] = tokens[i]
        row_docs[at + i] = doc
    source = tokens if loss_on_all else labels
    for i in range(length):
        row_labels[at + i] = source[i]
    return at + length
