"""Windows of tokens as tensors. A batch is a function of its index: no loader state, any number of workers."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from canonlm.tasks import Task

AHEAD = 2  # batches that each worker keeps ready


@dataclass(frozen=True)
class Batch:
    """`[batch, seq_len]` int64 tensors. `targets[b, t]` is what follows `input_ids[b, t]`, or -100 where nothing is
    asked; `doc_ids` is None where what shares a window may see each other."""

    input_ids: Tensor
    targets: Tensor
    doc_ids: Tensor | None

    def to(self, device: torch.device) -> "Batch":
        doc_ids = None if self.doc_ids is None else self.doc_ids.to(device, non_blocking=True)
        return Batch(self.input_ids.to(device, non_blocking=True), self.targets.to(device, non_blocking=True), doc_ids)

    def split(self, size: int) -> "list[Batch]":
        """Parts of `size` rows."""
        parts = range(0, len(self.input_ids), size)
        cut = [slice(start, start + size) for start in parts]
        return [
            Batch(self.input_ids[s], self.targets[s], None if self.doc_ids is None else self.doc_ids[s]) for s in cut
        ]


class Stream(Protocol):
    """Windows 0, 1, 2, …: each a pure function of its number."""

    def rows(self, first: int, count: int) -> Batch:
        """Windows first … first + count - 1."""
        ...


@dataclass(frozen=True)
class WindowStream:
    """The windows (seed, split, 0), (seed, split, 1), … of a task."""

    task: Task
    split: str
    seed: int
    seq_len: int
    loss_on: str
    isolate_documents: bool

    def rows(self, first: int, count: int) -> Batch:
        """Windows first … first + count - 1."""
        windows = self.task.windows(self.split, self.seed, first, count, seq_len=self.seq_len, loss_on=self.loss_on)
        targets = torch.nn.functional.pad(torch.from_numpy(windows.labels).long()[:, 1:], (0, 1), value=-100)
        doc_ids = None
        if self.isolate_documents:
            doc_ids = torch.from_numpy(windows.doc_ids).long()
            # Nothing before it may tell the first token of an isolated document: it is no target.
            targets[:, :-1][doc_ids[:, 1:] != doc_ids[:, :-1]] = -100
        return Batch(torch.from_numpy(windows.input_ids).long(), targets, doc_ids)


def batches(
    stream: Stream, first: int, stop: int, size: int, workers: int, *, rank: int = 0, ranks: int = 1
) -> Generator[Batch]:
    """Batch i holds windows i * size … (i + 1) * size - 1, of which `rank` gets its share, the rank-th of `ranks` equal
    parts. Batches first … stop - 1, made ahead by threads (samplers and readers release the interpreter lock)."""
    share = size // ranks

    def rows(index: int) -> Batch:
        return stream.rows(index * size + rank * share, share)

    if workers == 0:
        yield from map(rows, range(first, stop))
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="sampler") as pool:
        pending: deque[Future[Batch]] = deque()
        try:
            for index in range(first, stop):
                pending.append(pool.submit(rows, index))
                if len(pending) > workers * AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
