"""Windows of tokens as tensors. A batch is a function of its index: no loader state, any number of workers."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from canonlm.ops.varlen import Documents
from canonlm.tasks import Task

AHEAD = 2  # batches that each worker keeps ready


@dataclass(frozen=True)
class Batch:
    """`[batch, seq_len]` int64 tensors. `targets[b, t]` is the token after `input_ids[b, t]`, or -100 outside the loss;
    `documents` is None if the documents of a window may see each other."""

    input_ids: Tensor
    targets: Tensor
    documents: Documents | None = None

    def to(self, device: torch.device) -> "Batch":
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """A copy in pinned memory, from which copies to a GPU are asynchronous."""
        return self._each(Tensor.pin_memory)

    def counted(self) -> "Batch":
        """With the borders of its documents, for GPU kernels. Counted on the CPU: the GPU need not wait."""
        return Batch(self.input_ids, self.targets, self.documents and self.documents.counted())

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        documents = self.documents and self.documents.each(change)
        return Batch(change(self.input_ids), change(self.targets), documents)

    def split(self, size: int) -> "list[Batch]":
        """Parts of `size` rows."""
        ids = None if self.documents is None else self.documents.ids
        cut = [slice(start, start + size) for start in range(0, len(self.input_ids), size)]
        return [Batch(self.input_ids[s], self.targets[s], None if ids is None else Documents(ids[s])) for s in cut]


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
        documents = None
        if self.isolate_documents:
            doc_ids = torch.from_numpy(windows.doc_ids).long()
            # The first token of an isolated document cannot be predicted: it is not a target.
            targets[:, :-1][doc_ids[:, 1:] != doc_ids[:, :-1]] = -100
            documents = Documents(doc_ids)
        return Batch(torch.from_numpy(windows.input_ids).long(), targets, documents)


def batches(
    stream: Stream,
    first: int,
    stop: int,
    size: int,
    workers: int,
    *,
    rank: int = 0,
    ranks: int = 1,
    prepare: Callable[[Batch], Any] = lambda batch: batch,
) -> Generator[Any]:
    """Batches first … stop - 1, each passed through `prepare` and made ahead of time by threads (samplers and readers
    release the interpreter lock). Batch i has windows i * size … (i + 1) * size - 1; `rank` gets the rank-th of `ranks`
    equal parts."""
    share = size // ranks

    def ready(index: int) -> Any:
        return prepare(stream.rows(index * size + rank * share, share))

    if workers == 0:
        yield from map(ready, range(first, stop))
        return
    with ThreadPoolExecutor(workers, thread_name_prefix="sampler") as pool:
        pending: deque[Future[Any]] = deque()
        try:
            for index in range(first, stop):
                pending.append(pool.submit(ready, index))
                if len(pending) > workers * AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
