"""This process among all those that train one model: who it is, and what it tells the others."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """This process among all of them. Its methods talk through the CPU: they neither use the device nor wait for it."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    tp: int = 1
    mesh: DeviceMesh | None = None  # dp_replicate x dp_shard x tp; None in a single process

    @property
    def main(self) -> bool:
        """The one that writes and speaks."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """Which share of a batch is read here: neighbours form a tensor-parallel group and read the same."""
        return self.rank // self.tp

    @property
    def dp_size(self) -> int:
        return self.size // self.tp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number's sum (in float64) over the data-parallel processes, whose tensor-parallel ones are alike."""
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64) * (self.tp_rank == 0)
        dist.all_reduce(total)
        return total.tolist()

    def any(self, flag: bool) -> bool:
        if self.size == 1:
            return flag
        flags = torch.tensor(int(flag))
        dist.all_reduce(flags, dist.ReduceOp.MAX)
        return bool(flags)

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process; anything that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def raise_on_any_rank(self, error: BaseException | None) -> None:
        """Raise in all processes if one has failed: its own error here, else the first one's kind and message."""
        errors: list[Any] = [None if error is None else (type(error), str(error))]
        if self.size > 1:
            errors *= self.size
            dist.all_gather_object(errors, errors[self.rank])
        if error is not None:
            raise error
        for kind, message in filter(None, errors):
            twin = kind.__new__(kind)  # not kind(message): some take more than a message
            twin.args = (message,)
            raise twin

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """All processes get past this block or none does."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_on_any_rank(error)
