"""A task's windows as a map-style torch dataset, for training loops that are not ours (`Task.dataset`)."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.data import Dataset

from canonlm.core.errors import expected

if TYPE_CHECKING:
    from canonlm.tasks import Task

IGNORE = -100


class WindowDataset(Dataset[dict[str, Tensor]]):
    """Windows 0 … count - 1 of the stream (seed, split) of a task. See `Task.dataset`."""

    def __init__(
        self,
        task: "Task",
        split: str,
        seed: int,
        seq_len: int,
        count: int,
        *,
        loss_on: str | None = None,
        shifted: bool = False,
        isolate_documents: bool = False,
    ) -> None:
        if isolate_documents and not task.can_isolate:
            raise expected("isolate_documents", f"False, as in {task.name} the next document is predicted", True)
        task.windows(split, seed, 0, 0, seq_len=seq_len, loss_on=loss_on)  # raises for a wrong argument
        if count < 1 or (split == "train" and not task.has_windows(seed, seq_len, count)):
            available = task.training_windows(seed, seq_len) if split == "train" else None
            what = "an integer >= 1" if available is None else f"1 to {available}, the whole training stream"
            raise expected("count", what, count)
        self.task, self.split, self.seed, self.seq_len, self.count = task, split, seed, seq_len, count
        self.loss_on, self.shifted, self.isolate_documents = loss_on, shifted, isolate_documents

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(f"index: expected {-self.count} to {self.count - 1}, got {index}")
        windows = self.task.windows(
            self.split, self.seed, index % self.count, 1, seq_len=self.seq_len, loss_on=self.loss_on
        )
        input_ids, labels, doc_ids = (torch.from_numpy(rows[0]).long() for rows in windows)
        item = {"input_ids": input_ids}
        if self.isolate_documents:
            starts = torch.nn.functional.pad(doc_ids[1:] != doc_ids[:-1], (1, 0), value=True)
            labels[starts] = IGNORE  # the first token of an isolated document cannot be predicted
            at = torch.arange(self.seq_len)
            item["position_ids"] = at - torch.where(starts, at, 0).cummax(0).values
        item["labels"] = torch.nn.functional.pad(labels[1:], (0, 1), value=IGNORE) if self.shifted else labels
        return item
