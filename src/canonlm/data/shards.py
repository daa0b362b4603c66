"""The tokens of a prepared folder (`canonlm.data.index`), memory-mapped: however many there are, none is held."""

import mmap
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

import numpy as np

from canonlm.data import index
from canonlm.errors import unknown

OPEN_FILES = 256  # at most, of all datasets together: a mapping keeps its file open, and 1024 files are a usual limit
ENDS = np.dtype("<i8")  # written as uint64: below 2**63 the same bytes, and numpy mixes them with Python's integers
PAGE = mmap.PAGESIZE


class Dataset:
    """A folder made by `canonlm data prepare`.

    ValueError: it is none, or a file of it is missing or not as long as its index says. (Whether every byte is right
    tells `canonlm.data.index.check`, which reads them all.)
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.index = index.read(self.folder)
        self.fingerprint = index.file_sha256(self.folder / index.NAME)  # of the tokens too: their sha256 are in there
        token_size = np.dtype(self.index.dtype).itemsize
        for shards in self.index.splits.values():
            for shard in shards:
                _check_size(self.folder / shard.name, shard.tokens * token_size)
                _check_size(self.folder / shard.ends, shard.documents * ENDS.itemsize)

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
        """Of the text in UTF-8; the tokens that start and end documents count as tokens."""
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
        self._files = [str(dataset.folder / shard.name) for shard in shards]
        self._ends = [str(dataset.folder / shard.ends) for shard in shards]
        self._stops = list(accumulate(shard.tokens for shard in shards))

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def expect(self, start: int, stop: int) -> None:
        """Have the disk fetch tokens start … stop - 1, and do not wait: many windows at once come ten times sooner than
        one after the other."""
        for shard, first, here, there in self._parts(start, stop):
            size = self._dtype.itemsize
            low, high = (here - first) * size // PAGE * PAGE, (there - first) * size
            memory, _ = _mapped(self._files[shard], self._dtype, self._fingerprint)
            memory.madvise(mmap.MADV_WILLNEED, low, high - low)

    def read(self, start: int, out: np.ndarray) -> None:
        """Fill `out` (`[count]`, integers) with the tokens from `start` on."""
        for shard, first, here, there in self._parts(start, start + len(out)):
            _, tokens = _mapped(self._files[shard], self._dtype, self._fingerprint)
            out[here - start : there - start] = tokens[here - first : there - first]

    def begins(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Where in start + 1 … stop a document begins, counted from `start`: an array per shard that is touched."""
        for shard, first, here, there in self._parts(start, stop):
            _, ends = _mapped(self._ends[shard], ENDS, self._fingerprint)
            low, high = np.searchsorted(ends, (here - first, there - first), side="right")
            yield ends[low:high] + (first - start)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """(shard, its first token, from, to): tokens from … to - 1 of start … stop - 1 are in this shard."""
        shard = bisect_right(self._stops, start)
        while start < stop:
            there = min(stop, self._stops[shard])
            yield shard, self._stops[shard - 1] if shard else 0, start, there
            shard, start = shard + 1, there


@lru_cache(OPEN_FILES)
def _mapped(path: str, dtype: np.dtype, fingerprint: str) -> tuple[mmap.mmap, np.ndarray]:
    """The memory and what is in it. `fingerprint`: a folder made anew has new files under the old names."""
    try:
        with open(path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    memory.madvise(mmap.MADV_RANDOM)  # windows lie anywhere: what stands after one is not wanted next
    return memory, np.frombuffer(memory, dtype)


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    if found != size:
        raise ValueError(f"{path}: damaged: {found:,} bytes, where {index.NAME} says {size:,}")
