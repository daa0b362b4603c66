"""From torch's tensors to the kernels' arguments."""

from collections.abc import Sequence

from torch import Tensor

from canonlm.ops.kernels.launches import Launch


def rowwise(x_BTC: Tensor) -> Tensor:
    """`x` with contiguous channels; its batch and time may have any strides, even 0 (as in a sum's gradient)."""
    return x_BTC if x_BTC.stride(-1) == 1 or x_BTC.shape[-1] == 1 else x_BTC.contiguous()


def packed_state(state_BCK: Tensor | None) -> Tensor | None:
    """`state`, contiguous within each row; rows may have any stride."""
    if state_BCK is None:
        return None
    is_packed = state_BCK.stride(2) == 1 and state_BCK.stride(1) == state_BCK.shape[2]
    return state_BCK if is_packed else state_BCK.contiguous()


def strides(tensors: Sequence[Tensor], dim: int) -> tuple[int, ...]:
    return tuple(tensor.stride(dim) for tensor in tensors)


def or_any(stand_in: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors, with a stand-in for None, which a kernel cannot take: any tensor, as it is not read."""
    return [stand_in if tensor is None else tensor for tensor in tensors]


def some_or_none(tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
    return tensors or [None]


def grid_of(launch: Launch, batch: int, time: int, sizes: Sequence[int]) -> tuple[int, ...]:
    blocks = sum(-(-size // launch.channels) for size in sizes)
    return within_limits(blocks, max(1, -(-time // launch.tokens)), batch)


def within_limits(*grid: int) -> tuple[int, ...]:
    """`grid`, if a GPU can launch it."""
    if max(grid[1:]) > 65535:
        raise ValueError(f"canonlm: a kernel takes at most 65,535 rows and tiles of a row, got a grid of {grid}")
    return grid


def summed(partials: Tensor, like: Tensor) -> Tensor:
    """The sum over programs, in a fixed order, so that gradients of weights are the same in every run. A new tensor, as
    results of an operator must not share memory."""
    return partials.sum(0).to(like.dtype).view_as(like)
