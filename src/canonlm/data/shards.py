"""The tokens of a prepared folder (`canonlm.data.index`), memory-mapped, so they take no memory of the process."""

import mmap
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from canonlm.core.errors import unknown
from canonlm.core.untrusted import open_regular
from canonlm.data import index

OPEN_FILES = 256  # at most, of all datasets together: a mapping keeps its file open, and 1024 files are a usual limit
ENDS = np.dtype("<i8")  # written as uint64: below 2**63 the same bytes, and numpy mixes them with Python's integers
PAGE = mmap.PAGESIZE
BLOCK = 2**17  # document ends that are checked together

OnOpen = Callable[[Path, index.Shard], None]


class Dataset:
    """A folder made by `canonlm data prepare`.

    ValueError: not such a folder, or a file that is missing or has another size than in the index. To check every byte,
    use `canonlm.data.index.check`, or `canonlm.data.verify` for the shards that a run reads: `on_open(folder, shard)`
    is called when tokens of a shard are first read.
    """

    def __init__(self, folder: str | Path, on_open: OnOpen = lambda folder, shard: None) -> None:
        self.folder, self.on_open = Path(folder), on_open
        self.index = index.read(self.folder)
        self.fingerprint = index.file_sha256(self.folder / index.NAME)  # of the tokens too: it contains their sha256
        index.check_sizes(self.folder, self.index)

    @property
    def vocab_size(self) -> int:
        return self.index.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self.index.bos_id

    @property
    def eos_token_id(self) -> int | None:
        return self.index.eos_id

    def num_tokens(self, split: str) -> int:
        return sum(shard.tokens for shard in self._shards(split))

    def bytes_per_token(self, split: str) -> float:
        """Bytes of the text in UTF-8 per token; tokens that start and end documents count."""
        return sum(shard.bytes for shard in self._shards(split)) / max(1, self.num_tokens(split))

    def tokens(self, split: str) -> "Tokens":
        return Tokens(self, self._shards(split))

    def _shards(self, split: str) -> tuple[index.Shard, ...]:
        if split not in self.index.splits:
            raise unknown("split", split, self.index.splits)
        return self.index.splits[split]


class Tokens:
    """The documents of one split, one after the other across its shards."""

    def __init__(self, dataset: Dataset, shards: tuple[index.Shard, ...]) -> None:
        self._dtype = np.dtype(dataset.index.dtype).newbyteorder("<")
        self._fingerprint = dataset.fingerprint
        self.vocab_size = dataset.vocab_size
        self._folder, self._shards, self._on_open = dataset.folder, shards, dataset.on_open
        self._files = [str(dataset.folder / shard.name) for shard in shards]
        self._ends = [str(dataset.folder / shard.ends) for shard in shards]
        self._stops = list(accumulate(shard.tokens for shard in shards))
        self._opened, self._checked = bytearray(len(shards)), bytearray(len(shards))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def prefetch(self, start: int, stop: int) -> None:
        """Start reading tokens start … stop - 1 from the disk, without waiting: many windows at once are ten times as
        fast as one after the other."""
        for shard, first, begin, end in self._parts(start, stop):
            size = self._dtype.itemsize
            low, high = (begin - first) * size // PAGE * PAGE, (end - first) * size
            memory, _ = self._tokens_of(shard)
            memory.madvise(mmap.MADV_WILLNEED, low, high - low)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (`[count]`, integers) with the tokens from `start` on, as in the file: see `check_vocabulary`."""
        for shard, first, begin, end in self._parts(start, start + len(out)):
            _, tokens = self._tokens_of(shard)
            out[begin - start : end - start] = tokens[begin - first : end - first]

    def check_vocabulary(self, start: int, stop: int) -> None:
        """ValueError, with shard and position, if one of the tokens start … stop - 1 is not in the vocabulary."""
        for shard, first, begin, end in self._parts(start, stop):
            tokens = self._tokens_of(shard)[1][begin - first : end - first]
            if len(wrong := np.flatnonzero(tokens >= self.vocab_size)):
                where, token = begin - first + int(wrong[0]), int(tokens[wrong[0]])
                limit = f"vocab_size of {index.NAME} is {self.vocab_size}"
                raise ValueError(f"{self._files[shard]}: damaged: token {where:,} is {token}, where {limit}")

    def begins(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """The beginnings of documents in start + 1 … stop, counted from `start`: one array per shard.
        ValueError: the ends of a shard's documents are not in order, or do not fit its tokens."""
        for shard, first, begin, end in self._parts(start, stop):
            ends = self._ends_of(shard)
            low, high = np.searchsorted(ends, (begin - first, end - first), side="right")
            yield ends[low:high] + (first - start)

    def _tokens_of(self, shard: int) -> tuple[mmap.mmap, np.ndarray]:
        if not self._opened[shard]:
            self._opened[shard] = True
            self._on_open(self._folder, self._shards[shard])
        size = self._shards[shard].tokens * self._dtype.itemsize
        return _mapped(self._files[shard], self._dtype, size, self._fingerprint)

    def _ends_of(self, shard: int) -> np.ndarray:
        size = self._shards[shard].documents * ENDS.itemsize
        memory, ends = _mapped(self._ends[shard], ENDS, size, self._fingerprint)
        if not self._checked[shard]:
            memory.madvise(mmap.MADV_WILLNEED)  # all of them are checked, once
            _check_ends(self._ends[shard], ends, self._shards[shard].tokens)
            self._checked[shard] = True
        return ends

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, its first token, begin, end): tokens begin … end - 1 of start … stop - 1 are in this shard."""
        shard = bisect_right(self._stops, start)
        while start < stop:
            end = min(stop, self._stops[shard])
            yield shard, self._stops[shard - 1] if shard else 0, start, end
            shard, start = shard + 1, end


@lru_cache(OPEN_FILES)
def _mapped(path: str, dtype: np.dtype, size: int, fingerprint: str) -> tuple[mmap.mmap, np.ndarray]:
    """The mapped memory, and an array of it. `fingerprint` is part of the cache's key: a folder that was prepared again
    has new files under the old names.

    The size is checked again: reading past the end of a file that was truncated since the dataset was opened would end
    the process with SIGBUS. (Truncating a mapped file still does.)
    """
    try:
        with open_regular(Path(path)) as file:
            if (actual := os.fstat(file.fileno()).st_size) != size:
                raise index.wrong_size(path, actual, size)
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise index.cannot_be_read(path, error) from None
    memory.madvise(mmap.MADV_RANDOM)  # windows can be anywhere: reading ahead would be useless
    return memory, np.frombuffer(memory, dtype)


def _check_ends(path: str, ends: np.ndarray, tokens: int) -> None:
    """ValueError unless ends ascend (a document without BOS and EOS may be empty) and the last is the shard's end."""
    before = 0
    for start in range(0, len(ends), BLOCK):
        block = ends[start : start + BLOCK]
        if block[0] < before or not (block[1:] >= block[:-1]).all():
            falls = np.flatnonzero(np.diff(block, prepend=before) < 0)
            where = start + int(falls[0])
            raise ValueError(f"{path}: damaged: document {where:,} ends before the one before it")
        before = int(block[-1])
    if before != tokens:
        raise ValueError(
            f"{path}: damaged: the last document ends at {before:,}, where {index.NAME} says {tokens:,} tokens"
        )
