"""Context parallelism: the processes of a group have equal parts of the tokens of every row, in order.

What acts on single tokens needs no communication. A convolution gets the last inputs of the part before its own
(`tail_before`). Attention and recurrences get all tokens of some heads in place of some tokens of all heads, and give
their outputs back (DeepSpeed-Ulysses, arXiv 2309.14509). So kernels and documents are those of whole rows, and all
processes have the same work.

Shapes: B batch, T time, H heads, K kernel size, C channels.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Span:
    """The part of every row that this process has: the `rank`-th of `size`. group: the name of the process group."""

    rank: int
    size: int
    group: str

    def cut(self, x_BT: Tensor) -> Tensor:
        """This process's tokens of whole rows."""
        return own(x_BT, self, dim=1)

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes. Every process's loss depends on it, so its gradient is also summed."""
        return self._all(x).sum(0)

    def sum_before(self, x: Tensor) -> Tensor:
        """The sum over the processes that have earlier tokens."""
        return self._all(x)[: self.rank].sum(0)

    def tail_before(self, xs: Sequence[Tensor], kernel: int, doc_ids_BT: Tensor | None) -> Tensor | None:
        """The state of convolutions before this process's tokens, `[B, sum of C, K]`; None: none is needed. Inputs of
        other documents than the first token's are zero, and so is the first input, which no token reads. doc_ids: of
        whole rows."""
        if kernel == 1:
            return None
        batch, time = xs[0].shape[:2]
        sent, received = [0] * self.size, [0] * self.size
        sent[(self.rank + 1) % self.size] = received[self.rank - 1] = batch
        x_BKC = torch.cat([x[:, 1 - kernel :] for x in xs], dim=-1)
        x_BKC = AllToAll.apply(x_BKC, self.group, sent, received)
        if self.rank == 0:  # not left out: the others wait for it, in the backward pass too
            x_BKC = x_BKC.masked_fill(torch.ones((), dtype=torch.bool, device=x_BKC.device), 0)
        elif doc_ids_BT is not None:
            first = self.rank * time
            other_BK = doc_ids_BT[:, first + 1 - kernel : first] != doc_ids_BT[:, first, None]
            x_BKC = x_BKC.masked_fill(other_BK[..., None], 0)
        return pad(x_BKC.transpose(1, 2), (1, 0))

    def _all(self, x: Tensor) -> Tensor:
        """The tensors of all processes."""
        return self.exchange(x.expand(self.size, *x.shape))

    def exchange(self, x: Tensor) -> Tensor:
        """Sends x[i] to process i; returns what came from each."""
        ones = [1] * self.size
        return AllToAll.apply(x, self.group, ones, ones)


def own(x: Tensor, span: Span | None, dim: int) -> Tensor:
    """This process's part of a dimension."""
    return x if span is None else x.unflatten(dim, (span.size, -1)).select(dim, span.rank)


def to_heads(x: Tensor, span: Span | None, time: int = 1, heads: int = 2) -> Tensor:
    """From part of the tokens of all heads to all tokens of part of the heads. Keys or values that heads share go to
    every process that has some of these heads."""
    if span is None:
        return x
    repeats = math.lcm(x.shape[heads], span.size) // x.shape[heads]
    x = x if repeats == 1 else x.repeat_interleave(repeats, dim=heads)
    return span.exchange(x.unflatten(heads, (span.size, -1)).movedim(heads, 0)).movedim(0, time).flatten(time, time + 1)


def to_tokens(x: Tensor, span: Span | None, heads: int = 2) -> Tensor:
    """The reverse, with time in dimension 1."""
    if span is None:
        return x
    return span.exchange(x.unflatten(1, (span.size, -1)).movedim(1, 0)).movedim(0, heads).flatten(heads, heads + 1)


Op = Callable[..., tuple[Tensor, Any]]


def on_whole_rows(op: Op, span: Span | None) -> Op:
    """`op`, a recurrence, for this process's tokens. It reads tensors `[B, T, H, …]`, `[B, T, R, H, …]` (R inputs per
    token) and `[H]`, and returns another of the first two kinds and the state, which here is of some heads."""
    if span is None:
        return op

    def run(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Any]:
        inputs = (
            x if x is None else own(x, span, dim=0) if x.ndim == 1 else to_heads(x, span, heads=max(2, x.ndim - 2))
            for x in tensors
        )
        y, state = op(*inputs, **options)
        return to_tokens(y, span, heads=y.ndim - 2), state

    return run


class AllToAll(torch.autograd.Function):
    """Sends sent[i] rows of `x`, in order, to process i of a group; returns the received[i] rows from each."""

    @staticmethod
    def forward(ctx, x: Tensor, group: str, sent: list[int], received: list[int]) -> Tensor:
        ctx.back = group, received, sent
        ops = torch.ops._c10d_functional  # which compilers know
        return ops.wait_tensor(ops.all_to_all_single(x.contiguous(), received, sent, group))

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return AllToAll.apply(dy, *ctx.back), None, None, None
