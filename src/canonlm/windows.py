"""A task's windows as tensors. A batch is a function of its index: no loader state, any number of workers."""

from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from canonlm.tasks import Task

AHEAD = 2  # batches that each worker keeps ready


@dataclass(frozen=True)
class Batch:
    """`[batch, seq_len]` int64 tensors; `doc_ids` is None where instances may see each other."""

    input_ids: Tensor
    labels: Tensor
    doc_ids: Tensor | None

    def to(self, device: torch.device) -> "Batch":
        doc_ids = None if self.doc_ids is None else self.doc_ids.to(device, non_blocking=True)
        return Batch(self.input_ids.to(device, non_blocking=True), self.labels.to(device, non_blocking=True), doc_ids)


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
        labels = torch.from_numpy(windows.labels).long()
        doc_ids = None
        if self.isolate_documents:
            doc_ids = torch.from_numpy(windows.doc_ids).long()
            # Nothing before it may tell the first token of an isolated document: it is no target.
            labels[:, 1:][doc_ids[:, 1:] != doc_ids[:, :-1]] = -100
        return Batch(torch.from_numpy(windows.input_ids).long(), labels, doc_ids)

    def batches(self, first: int, stop: int, size: int, workers: int) -> Generator[Batch]:
        """Batch i holds windows i * size … (i + 1) * size - 1. Batches first … stop - 1, sampled ahead by threads (the
        samplers release the interpreter lock)."""
        if workers == 0:
            yield from (self.rows(index * size, size) for index in range(first, stop))
            return
        with ThreadPoolExecutor(workers, thread_name_prefix="sampler") as pool:
            pending: deque[Future[Batch]] = deque()
            try:
                for index in range(first, stop):
                    pending.append(pool.submit(self.rows, index * size, size))
                    if len(pending) > workers * AHEAD:
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for future in pending:
                    future.cancel()
