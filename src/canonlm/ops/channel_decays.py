"""Dot products of queries with earlier keys of a chunk, where every channel of the state has its own decay.

The factor between two tokens differs per channel, so it cannot be taken out of their dot product, and it cannot be
split into one for the query and one for the key: exp of minus a running sum overflows. Here only products of decays
are formed: numbers <= 1, which underflow to the right result, and which lose no digits as differences of large sums do.

Shapes: P kinds of queries for the same keys, N chunks of C tokens (a power of two), X independent rows, K channels.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

NEAR = 8
"""Scores within a block of that many tokens are computed pair by pair, others by matrix products."""


class Decayed(NamedTuple):
    """The result of `decay_in_blocks`."""

    q: Tensor  # queries, decayed since the start of their chunk
    k: Tensor  # keys, decayed until the end of their chunk
    total: Tensor  # N X K, the product of a chunk's decays
    since: Tensor  # decay since the start of the block of NEAR tokens, this token included
    until: Tensor  # decay until its end, this token excluded
    pairs: list[tuple[Tensor, Tensor, Tensor]]  # for each size of blocks: left keys, right queries, total of both


def decay_in_blocks(q_PNXCK: Tensor, k_NXCK: Tensor, decay_NXCK: Tensor) -> Decayed:
    """Decay queries since the start and keys until the end of their block, for blocks of NEAR, 2 NEAR, … C tokens.

    When two neighbouring blocks become one, only the queries of the right and the keys of the left change. Before
    they do, their dot products are the scores between the two blocks: the decay from a left token to a right one is
    that until the end of the left block, times that since the start of the right.
    """
    near, pairs = min(NEAR, k_NXCK.shape[2]), []
    decay = decay_NXCK.unflatten(2, (-1, near)).unbind(3)
    since = torch.stack(list(accumulate(decay, torch.mul)), dim=3)
    until = torch.stack([*accumulate(decay[:0:-1], torch.mul, initial=torch.ones_like(decay[0]))][::-1], dim=3)
    q, k = q_PNXCK * since.flatten(2, 3), k_NXCK * until.flatten(2, 3)
    total = since[..., -1:, :]  # N X blocks 1 K
    while total.shape[2] > 1:
        total_left, total_right = total[:, :, ::2], total[:, :, 1::2]
        q_right, k_left = (x.unflatten(-2, (total_left.shape[2], 2, -1))[..., i, :, :] for x, i in ((q, 1), (k, 0)))
        pairs.append((k_left.clone(), q_right.clone(), total))
        q_right.mul_(total_left)
        k_left.mul_(total_right)
        total = total_left * total_right
    return Decayed(q, k, total[:, :, 0, 0], since, until, pairs)


def write_scores(scores_PNXCC: Tensor, q_PNXCK: Tensor, k_NXCK: Tensor, decay_NXCK: Tensor, decayed: Decayed) -> None:
    """Dot products of each query with its own and earlier keys of the chunk, decayed."""
    near = min(NEAR, k_NXCK.shape[2])
    blocks = _diagonal_blocks(scores_PNXCC.zero_(), near)
    q, k, decay = (x.unflatten(-2, (-1, near)) for x in (q_PNXCK, k_NXCK, decay_NXCK))
    blocks.diagonal(0, -2, -1).copy_((q * k).sum(-1))
    for back in range(1, near):
        q = q[..., 1:, :] * decay[..., 1 : near - back + 1, :]
        blocks.diagonal(-back, -2, -1).copy_((q * k[..., :-back, :]).sum(-1))
    for k_left, q_right, _ in decayed.pairs:
        size = k_left.shape[-2]
        _diagonal_blocks(scores_PNXCC, 2 * size)[..., size:, :size] = q_right @ k_left.mT


def scores_backward(
    dscores_PNXCC: Tensor,
    q_PNXCK: Tensor,
    k_NXCK: Tensor,
    decay_NXCK: Tensor,
    decayed: Decayed,
    dq_PNXCK: Tensor,
    dk_NXCK: Tensor,
) -> None:
    """`dq`, `dk` come as gradients of `decayed.q`, `decayed.k` and become those of `q`, `k` (in place)."""
    for k_left, q_right, total in reversed(decayed.pairs):
        blocks, size = k_left.shape[-3:-1]
        dblock = _diagonal_blocks(dscores_PNXCC, 2 * size)[..., size:, :size].contiguous()
        pairs = ((dq_PNXCK, 1), (dk_NXCK, 0))
        dq_right, dk_left = (x.unflatten(-2, (blocks, 2, size))[..., i, :, :] for x, i in pairs)
        dq_right.mul_(total[:, :, ::2]).add_(dblock @ k_left)
        dk_left.mul_(total[:, :, 1::2])
        for each in dblock.mT @ q_right:
            dk_left.add_(each)
    near = decayed.since.shape[-2]
    dblocks = _diagonal_blocks(dscores_PNXCC, near)
    q, k, decay, dq, dk = (x.unflatten(-2, (-1, near)) for x in (q_PNXCK, k_NXCK, decay_NXCK, dq_PNXCK, dk_NXCK))
    dscore = dblocks.diagonal(0, -2, -1)[..., None]
    dq.mul_(decayed.since).addcmul_(dscore, k)
    dk.mul_(decayed.until)
    for one, other in zip(dscore, q, strict=True):
        dk.addcmul_(one, other)
    between = torch.ones_like(decay)
    for back in range(1, near):
        between = between[..., 1:, :] * decay[..., 1 : near - back + 1, :]
        dscore = dblocks.diagonal(-back, -2, -1)[..., None] * between
        dq[..., back:, :].addcmul_(dscore, k[..., :-back, :])
        for one, other in zip(dscore, q[..., back:, :], strict=True):
            dk[..., :-back, :].addcmul_(one, other)


def _diagonal_blocks(square: Tensor, size: int) -> Tensor:
    """The blocks of `size` on the diagonal of `[…, C, C]`, as a view `[…, C / size, size, size]`."""
    grid = square.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
