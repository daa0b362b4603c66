"""The processes that train one model: this process's rank, and communication with the others."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """This process among all of them. Its methods communicate over the CPU, and neither use the device nor wait for it;
    `sum_on_device` alone communicates there."""

    device: torch.device
    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine
    tp: int = 1
    mesh: DeviceMesh | None = None  # dp_replicate x dp_shard x tp; None in most single processes (train.mesh)
    cp: int = 1
    cp_group: str = ""  # the name of the group of processes that share this one's windows

    @property
    def main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    @property
    def dp_rank(self) -> int:
        """The number of this process's share of a batch: neighbours form a tensor-parallel group with the same share,
        neighbouring groups a context-parallel one."""
        return self.rank // (self.cp * self.tp)

    @property
    def dp_size(self) -> int:
        return self.size // (self.cp * self.tp)

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def cp_rank(self) -> int:
        return self.rank // self.tp % self.cp

    def sum(self, numbers: list[float]) -> list[float]:
        """Each number's sum (in float64) over the shares of a batch; processes with the same share have equal
        numbers."""
        if self.size == 1:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64) * (self.tp_rank == self.cp_rank == 0)
        dist.all_reduce(total)
        return total.tolist()

    def sum_on_device(self, number: float) -> float | Tensor:
        """The same of one number, as a float32 tensor on the device: nothing waits for it. In a single process the
        number itself."""
        if self.size == 1:
            return number
        share = number * (self.tp_rank == self.cp_rank == 0)
        total = torch.full((), share, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.float()

    def max(self, numbers: list[float]) -> list[float]:
        """Each number's maximum over all processes."""
        if self.size == 1:
            return numbers
        largest = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return largest.tolist()

    def by_rank(self, numbers: list[float]) -> list[list[float]]:
        """The numbers of every process (all >= 0, as many in each), by one exchange."""
        size = len(numbers)
        slots = [0.0] * (size * self.size)
        slots[size * self.rank : size * (self.rank + 1)] = numbers
        slots = self.max(slots)
        return [slots[start : start + size] for start in range(0, len(slots), size)]

    def any(self, flag: bool) -> bool:
        return bool(self.max([float(flag)])[0])

    def broadcast(self, value: Any) -> Any:
        """The main process's value, in every process; anything that can be pickled."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; anything that can be pickled."""
        values = [value] * self.size
        if self.size > 1:
            dist.all_gather_object(values, value)
        return values

    def raise_on_any_rank(self, error: BaseException | None) -> None:
        """Raise in all processes if one has failed: its own error, else one of the same class and message."""
        errors = self.gather(None if error is None else (type(error), str(error)))
        if error is not None:
            raise error
        for kind, message in filter(None, errors):
            same = kind.__new__(kind)  # not kind(message): some take more than a message
            same.args = (message,)
            raise same

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """All processes complete this block, or all raise."""
        error = None
        try:
            yield
        except Exception as raised:
            error = raised
        self.raise_on_any_rank(error)


class Votes:
    """Whether any process wants something, such as to stop. All ask at every step; they exchange it about once in
    VOTE_SECONDS, but at least every MAX_STEPS steps: messages between all machines would cost more in short steps."""

    VOTE_SECONDS = 1.0
    MAX_STEPS = 100

    def __init__(self, world: World, step: int) -> None:
        self._world, self._last, self._next, self._since = world, step, step, time.monotonic()

    def any(self, flag: bool, step: int) -> bool:
        """False at steps without an exchange. In a single process, the flag."""
        if self._world.size == 1:
            return flag
        if step < self._next:
            return False
        seconds = (time.monotonic() - self._since) / max(1, step - self._last)
        wanted, slowest = self._world.max([float(flag), seconds])
        steps = min(max(1, int(self.VOTE_SECONDS / max(slowest, 1e-6))), self.MAX_STEPS)
        self._last, self._next, self._since = step, step + steps, time.monotonic()
        return bool(wanted)


def sum_over(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group, in a new tensor: torch 2.11 leaves a sum in place out of a compiled backward pass."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(x.contiguous(), "sum", group.group_name))
