"""Windows of prepared text: in order (`TextWindows`), or a shuffled and weighted mix of sources (`TextStream`).

Window k of a split is its tokens k * T … (k + 1) * T: T inputs and, shifted by one, T targets. Documents follow each
other without gaps, and tokens that do not fill a last window are left out.

Source and position of a stream's window w are computed from w. `Mix` gives the source and the number of its earlier
windows; a keyed permutation, with a new key for every epoch, gives the position. There is no shuffle buffer and no
state: any process finds any window directly.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch

from canonlm.data.permutation import key_of, permuted
from canonlm.data.shards import Dataset, Tokens
from canonlm.data.windows import Batch
from canonlm.ops.varlen import Documents
from canonlm.tasks.packing import IGNORE


class TextWindows:
    """All windows of one split in order, as validation reads them. ValueError: the split has no window.

    `isolate_documents`: the batches have `documents`, and the first token of a document is not a target.
    """

    def __init__(self, dataset: Dataset, split: str, seq_len: int, isolate_documents: bool) -> None:
        self.seq_len, self.isolate_documents = seq_len, isolate_documents
        self.bytes_per_token = dataset.bytes_per_token(split)
        self.tokens = dataset.tokens(split)
        if not len(self):
            size = f"{len(self.tokens)} tokens in its split {split}"
            raise ValueError(f"{dataset.folder}: {size}, and one window has {seq_len + 1}")

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.seq_len

    def rows(self, first: int, count: int) -> Batch:
        """Windows first … first + count - 1, all below `len`."""
        spans = [(self.tokens, number * self.seq_len) for number in range(first, first + count)]
        return _batch(spans, self.seq_len, self.isolate_documents)


class Place(NamedTuple):
    """The origin of a window: window `position` of its source's split, in epoch `epoch` (from 0)."""

    source: str
    epoch: int
    position: int

    def __str__(self) -> str:
        return f"{self.source} epoch {self.epoch} window {self.position}"


class TextStream:
    """Windows 0, 1, 2, … of a mix of `{name: (dataset, split, weight)}`, without end.

    Of the first n windows, for every n, each source has a share proportional to its weight, to within a window or two
    (see `Mix`). Each epoch of a source has all its windows in a new order, a function of the seed, the source's name
    and the epoch: sources can join or leave and the others keep their order.
    """

    def __init__(
        self,
        sources: Mapping[str, tuple[Dataset, str, float]],
        seed: int,
        seq_len: int,
        isolate_documents: bool,
    ) -> None:
        # Heaviest first, as `Mix` needs them, and equal weights by name, so that the order in a file does not matter.
        self._names = sorted(sources, key=lambda name: (-sources[name][2], name))
        self._mix = Mix([sources[name][2] for name in self._names])
        self._windows = [
            TextWindows(dataset, split, seq_len, isolate_documents)
            for dataset, split, _ in map(sources.__getitem__, self._names)
        ]
        self.seed, self.seq_len, self.isolate_documents = seed, seq_len, isolate_documents

    def rows(self, first: int, count: int) -> Batch:
        """Windows first … first + count - 1."""
        places = [self._find(window) for window in range(first, first + count)]
        spans = [(self._windows[source].tokens, position * self.seq_len) for source, _, position in places]
        return _batch(spans, self.seq_len, self.isolate_documents)

    def describe(self, window: int) -> Place:
        """The origin of a window, for errors about it."""
        source, epoch, position = self._find(window)
        return Place(self._names[source], epoch, position)

    def _find(self, window: int) -> tuple[int, int, int]:
        source, number = self._mix.pick(window)
        size = len(self._windows[source])
        epoch, number = divmod(number, size)
        return source, epoch, permuted(number, size, key_of(self.seed, self._names[source], epoch))


class Mix:
    """The source of each of the windows 0, 1, 2, …, for sources in descending order of weight.

    The first source has round(n * weight / sum of weights) of the first n windows. Of the first n + 1 it has the same
    number or one more, and window n is from this source if it has one more. The other windows, renumbered, are divided
    in the same way among the other sources. Everything is computed exactly, in integers.

    Each rounding is off by at most 1/2. The lighter sources share the error of source j in proportion to their weights:
    source i gets at most 1 / (i - j) of it, as the i - j sources from j + 1 to i are all at least as heavy as i. With
    its own rounding the error is at most (1 + 1 + 1/2 + … + 1/(i - 1)) / 2 windows, for any weights.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        fractions = [Fraction(weight) for weight in weights]
        unit = math.lcm(*(fraction.denominator for fraction in fractions))
        self._shares: list[tuple[int, int]] = []  # of all sources but the last: (weight, sum from here on), integers
        remaining = sum(fractions)
        for fraction in fractions[:-1]:
            self._shares.append((int(fraction * unit), int(remaining * unit)))
            remaining -= fraction

    def pick(self, window: int) -> tuple[int, int]:
        """(source, number of earlier windows of that source)"""
        for source, (weight, total) in enumerate(self._shares):
            before, rest = divmod(2 * window * weight + total, 2 * total)
            if rest + 2 * weight >= 2 * total:
                return source, before
            window -= before
        return len(self._shares), window


def _batch(spans: list[tuple[Tokens, int]], length: int, isolate: bool) -> Batch:
    """The windows of `length` tokens that start at the given positions."""
    for tokens, start in spans:
        tokens.prefetch(start, start + length + 1)
    rows = np.empty((len(spans), length + 1), np.uint32)
    for row, (tokens, start) in zip(rows, spans, strict=True):
        tokens.read(start, row)
    if rows.size and rows.max() >= min(tokens.vocab_size for tokens, _ in spans):
        for tokens, start in spans:
            tokens.check_vocabulary(start, start + length + 1)
    # One block for all: from 4 MB on numpy asks for huge pages; small pages would cost more than the reading.
    block = np.empty((2 + isolate, len(spans), length), np.int64)
    block[0], block[1] = rows[:, :-1], rows[:, 1:]
    if isolate:
        block[2] = 0
        for (tokens, start), targets, doc_ids in zip(spans, *block[1:], strict=True):
            for begins in tokens.begins(start, start + length):
                # The first token of an isolated document cannot be predicted: it is not a target.
                targets[begins - 1] = IGNORE
                doc_ids[begins[begins < length]] = 1
        np.cumsum(block[2], axis=1, out=block[2])
    input_ids, targets, *doc_ids = torch.from_numpy(block)
    return Batch(input_ids, targets, Documents(doc_ids[0]) if isolate else None)
