"""Gated linear attention: a matrix state whose rows (key channels) decay, each at its own data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,      o_t = (scale q_t)^T S_t

Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635), Eq. 3.

Shapes: B batch, T time, H query heads, J key/value heads (query head h reads key/value head h // (H / J)), K key
channels, V value channels. `g_BTJK` are log-decays <= 0. A token with k = 0 and g = 0 leaves the state as it is.

Inside the chunked form: N chunks of C tokens, X = B H rows that do not see each other.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from canonlm.ops import fla
from canonlm.ops.precision import outside_autocast

BLOCK = 2**18
"""Numbers per tensor that a CPU works through at once in eager mode, so that what is made of them stays in cache."""

NEAR = 8
"""Tokens that meet one by one in the chunked form; blocks of as many, and of more, meet in matrix products."""


@outside_autocast
def gated_linear_attention(
    q_BTHK: Tensor,
    k_BTJK: Tensor,
    v_BTJV: Tensor,
    g_BTJK: Tensor,
    *,
    scale: float | None = None,
    state_BJKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above, in the form for where the tensors live. Returns (o_BTHV in the dtype of `v`, the state
    after the last token in at least float32).

    `scale` is K^-1/2 unless given. `doc_ids_BT`: integers, one value per document, non-decreasing along a row; the
    state is zero before the first token of each. `state_BJKV` (zero unless given) is the state before the first
    token, of the same document.
    """
    inputs = (q_BTHK, k_BTJK, v_BTJV, g_BTJK)
    if q_BTHK.shape[1] == 1 and not torch.is_grad_enabled():
        return gated_linear_attention_recurrent(*inputs, scale=scale, state_BJKV=state_BJKV, doc_ids_BT=doc_ids_BT)
    if fla.takes(v_BTJV):
        return _by_kernel(*inputs, scale, state_BJKV, doc_ids_BT)
    return gated_linear_attention_chunked(*inputs, scale=scale, state_BJKV=state_BJKV, doc_ids_BT=doc_ids_BT)


def gated_linear_attention_recurrent(
    q_BTHK: Tensor,
    k_BTJK: Tensor,
    v_BTJV: Tensor,
    g_BTJK: Tensor,
    *,
    scale: float | None = None,
    state_BJKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one step at a time: what every other form is tested against, and how we decode."""
    (batch, time, heads, channels), kv_heads = q_BTHK.shape, k_BTJK.shape[2]
    compute = torch.promote_types(v_BTJV.dtype, torch.float32)
    q, k, v = q_BTHK.to(compute).unflatten(2, (kv_heads, -1)), k_BTJK.to(compute), v_BTJV.to(compute)
    decay_BTJK = decays(g_BTJK.to(compute), starts(doc_ids_BT))
    state = v.new_zeros(batch, kv_heads, channels, v.shape[-1]) if state_BJKV is None else state_BJKV.to(compute)
    o_TBJRV = []
    for t in range(time):
        state = decay_BTJK[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        o_TBJRV.append(q[:, t] * (channels**-0.5 if scale is None else scale) @ state)
    o_BTHV = torch.stack(o_TBJRV, dim=1).flatten(2, 3) if time else v.new_empty(batch, 0, heads, v.shape[-1])
    return o_BTHV.to(v_BTJV.dtype), state


def gated_linear_attention_chunked(
    q_BTHK: Tensor,
    k_BTJK: Tensor,
    v_BTJV: Tensor,
    g_BTJK: Tensor,
    *,
    scale: float | None = None,
    state_BJKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Same result in O(T / chunk) steps; `chunk` is a power of two.

    Decays differ per channel, so the factor between two tokens cannot be split into one for the query and one for
    the key: exp of minus a running sum overflows. Here only products of decays are formed: numbers <= 1, which
    underflow to the right result, and which lose no digits as differences of large sums do. See `_merge`.
    """
    (batch, time, heads, channels), kv_heads = q_BTHK.shape, k_BTJK.shape[2]
    compute = torch.promote_types(v_BTJV.dtype, torch.float32)
    q, k, v, g = (x.to(compute) for x in (q_BTHK, k_BTJK, v_BTJV, g_BTJK))
    state = v.new_zeros(batch, kv_heads, channels, v.shape[-1]) if state_BJKV is None else state_BJKV.to(compute)
    if not batch * time:
        return v_BTJV.new_empty(batch, time, heads, v.shape[-1]), state
    q, group = q * (channels**-0.5 if scale is None else scale), heads // kv_heads
    if group > 1:
        k, v, g, state = (x.repeat_interleave(group, dim=-2 if x is not state else 1) for x in (k, v, g, state))
    chunk = min(chunk, 1 << (time - 1).bit_length())
    o_BTHV, state_BHKV = _Chunked.apply(q, k, v, g, state, starts(doc_ids_BT), chunk)
    return o_BTHV.to(v_BTJV.dtype), state_BHKV[:, ::group]


def starts(doc_ids_BT: Tensor | None) -> Tensor | None:
    """True at tokens whose document is not that of the token before."""
    if doc_ids_BT is None:
        return None
    return doc_ids_BT != torch.cat([doc_ids_BT[:, :1], doc_ids_BT[:, :-1]], dim=1)


def decays(g_BTX: Tensor, starts_BT: Tensor | None) -> Tensor:
    """What the state is multiplied by at each token: exp(g), and zero where a document starts.

    The product of decays over any stretch of time is then zero exactly if it crosses into another document.
    """
    decay_BTX = g_BTX.exp()
    if starts_BT is None:
        return decay_BTX
    return decay_BTX.masked_fill(starts_BT.view(*starts_BT.shape, *[1] * (g_BTX.ndim - 2)), 0)


class _Chunked(torch.autograd.Function):
    """With the scores A of a chunk (decayed dot products of each token with those up to it), its queries Q decayed
    since the chunk's start, its keys K decayed until the chunk's end and d its product of decays:

        O = A V + Q S,      S_next = diag(d) S + K^T V

    Backward, the state's gradient runs the same recurrence from the end. That of the log-decays follows from others:
    g_t scales whatever passes from before t to t or later, so dg_t is the sum of q_s dq_s - k_s dk_s over s >= t in
    the chunk, and of S dS at the chunk's end.
    """

    @staticmethod
    def forward(ctx, q_BTHK, k_BTHK, v_BTHV, g_BTHK, state_BHKV, starts_BT, chunk):
        (batch, time, heads, _), state = v_BTHV.shape, state_BHKV.flatten(0, 1)
        decay_BTHK = decays(g_BTHK, starts_BT)
        o_BNCHV, saved = empty_chunks(v_BTHV, chunk), []
        for span in segments(v_BTHV, chunk):
            q, k, v = (to_chunks(x, span, chunk) for x in (q_BTHK, k_BTHK, v_BTHV))
            decay = to_chunks(decay_BTHK, span, chunk, fill=1)
            decayed = _decayed(q, k, decay)
            scores = _scores(q, k, decay, decayed.pairs)
            states = scan(state, decayed.k.mT @ v, decayed.total[..., None])
            from_chunks(scores @ v + decayed.q @ states[:-1], o_BNCHV, span)
            state = states[-1]
            saved += [scores, states]
        ctx.chunk = chunk
        ctx.save_for_backward(q_BTHK, k_BTHK, v_BTHV, decay_BTHK, *saved)
        return o_BNCHV.flatten(1, 2)[:, :time], state.unflatten(0, (batch, heads))

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHV, dstate_BHKV):
        q_BTHK, k_BTHK, v_BTHV, decay_BTHK, *saved = ctx.saved_tensors
        chunk, (batch, time, heads, _), dstate = ctx.chunk, v_BTHV.shape, dstate_BHKV.flatten(0, 1)
        gradients = [empty_chunks(x, chunk) for x in (q_BTHK, k_BTHK, v_BTHV, decay_BTHK)]
        for span in reversed(segments(v_BTHV, chunk)):
            q, k, v, do = (to_chunks(x, span, chunk) for x in (q_BTHK, k_BTHK, v_BTHV, do_BTHV))
            decay = to_chunks(decay_BTHK, span, chunk, fill=1)
            *saved, scores, states = saved
            decayed = _decayed(q, k, decay)
            dstates = scan(dstate, decayed.q.mT @ do, decayed.total[..., None], backwards=True)
            dstate, dstates = dstates[0], dstates[1:]
            dq, dk = do @ states[:-1].mT, v @ dstates.mT
            _scores_backward(do @ v.mT, q, k, decay, decayed, dq, dk)
            dg = q * dq - k * dk
            dg[:, :, -1] += (states[1:] * dstates).sum(-1)
            later = torch.ones_like(scores[0, 0]).triu_().expand_as(scores)
            dg = (later @ dg).masked_fill_(decay == 0, 0)
            for whole, part in zip(gradients, (dq, dk, scores.mT @ do + decayed.k @ dstates, dg), strict=True):
                from_chunks(part, whole, span)
        return *(x.flatten(1, 2)[:, :time] for x in gradients), dstate.unflatten(0, (batch, heads)), None, None


class _Decayed(NamedTuple):
    """What `_decayed` returns."""

    q: Tensor  # queries, decayed since the start of their chunk
    k: Tensor  # keys, decayed until the end of their chunk
    total: Tensor  # N X K, the product of a chunk's decays
    since: Tensor  # decay since the start of the block of NEAR tokens, this token included
    until: Tensor  # decay until its end, this token excluded
    pairs: list[tuple[Tensor, Tensor, Tensor]]  # for each size of blocks: left keys, right queries, total of both


def _decayed(q_NXCK: Tensor, k_NXCK: Tensor, decay_NXCK: Tensor) -> _Decayed:
    """Decay queries since the start and keys until the end of their block, for blocks of NEAR, 2 NEAR, … C tokens.

    When two neighbouring blocks become one, only the queries of the right and the keys of the left change. Before
    they do, their dot products are the scores between the two blocks: the decay from a left token to a right one is
    that until the end of the left block, times that since the start of the right.
    """
    near, pairs = min(NEAR, q_NXCK.shape[2]), []
    decay = decay_NXCK.unflatten(2, (-1, near)).unbind(3)
    since = torch.stack(list(accumulate(decay, torch.mul)), dim=3)
    until = torch.stack([*accumulate(decay[:0:-1], torch.mul, initial=torch.ones_like(decay[0]))][::-1], dim=3)
    q, k = q_NXCK * since.flatten(2, 3), k_NXCK * until.flatten(2, 3)
    total = since[..., -1:, :]  # N X blocks 1 K
    while total.shape[2] > 1:
        total_left, total_right = total[:, :, ::2], total[:, :, 1::2]
        q_right, k_left = (x.unflatten(2, (total_left.shape[2], 2, -1))[:, :, :, i] for x, i in ((q, 1), (k, 0)))
        pairs.append((k_left.clone(), q_right.clone(), total))
        q_right.mul_(total_left)
        k_left.mul_(total_right)
        total = total_left * total_right
    return _Decayed(q, k, total[:, :, 0, 0], since, until, pairs)


def _scores(q_NXCK: Tensor, k_NXCK: Tensor, decay_NXCK: Tensor, pairs: list) -> Tensor:
    """Dot products of each query with its own and earlier keys of the chunk, decayed: `[N, X, C, C]`."""
    scores = q_NXCK.new_zeros(*q_NXCK.shape[:3], q_NXCK.shape[2])
    near = min(NEAR, q_NXCK.shape[2])
    blocks = _diagonal_blocks(scores, near)
    q, k, decay = (x.unflatten(2, (-1, near)) for x in (q_NXCK, k_NXCK, decay_NXCK))
    blocks.diagonal(0, -2, -1).copy_((q * k).sum(-1))
    for back in range(1, near):
        q = q[..., 1:, :] * decay[..., 1 : near - back + 1, :]
        blocks.diagonal(-back, -2, -1).copy_((q * k[..., :-back, :]).sum(-1))
    for k_left, q_right, _ in pairs:
        size = k_left.shape[-2]
        _diagonal_blocks(scores, 2 * size)[..., size:, :size] = q_right @ k_left.mT
    return scores


def _scores_backward(dscores, q_NXCK, k_NXCK, decay_NXCK, decayed: _Decayed, dq_NXCK: Tensor, dk_NXCK: Tensor) -> None:
    """`dq`, `dk` come as gradients of `decayed.q`, `decayed.k` and become those of `q`, `k` (in place)."""
    for k_left, q_right, total in reversed(decayed.pairs):
        blocks, size = k_left.shape[-3:-1]
        dblock = _diagonal_blocks(dscores, 2 * size)[..., size:, :size].contiguous()
        dq_right, dk_left = (x.unflatten(2, (blocks, 2, size))[:, :, :, i] for x, i in ((dq_NXCK, 1), (dk_NXCK, 0)))
        dq_right.mul_(total[:, :, ::2]).add_(dblock @ k_left)
        dk_left.mul_(total[:, :, 1::2]).add_(dblock.mT @ q_right)
    near = decayed.since.shape[-2]
    dblocks = _diagonal_blocks(dscores, near)
    q, k, decay, dq, dk = (x.unflatten(2, (-1, near)) for x in (q_NXCK, k_NXCK, decay_NXCK, dq_NXCK, dk_NXCK))
    dscore = dblocks.diagonal(0, -2, -1)[..., None]
    dq.mul_(decayed.since).addcmul_(dscore, k)
    dk.mul_(decayed.until).addcmul_(dscore, q)
    between = torch.ones_like(decay)
    for back in range(1, near):
        between = between[..., 1:, :] * decay[..., 1 : near - back + 1, :]
        dscore = dblocks.diagonal(-back, -2, -1)[..., None] * between
        dq[..., back:, :].addcmul_(dscore, k[..., :-back, :])
        dk[..., :-back, :].addcmul_(dscore, q[..., back:, :])


def _diagonal_blocks(square: Tensor, size: int) -> Tensor:
    """The blocks of `size` on the diagonal of `[…, C, C]`, as a view `[…, C / size, size, size]`."""
    grid = square.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return grid.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def scan(state: Tensor, added: Tensor, decay: Tensor, *, backwards: bool = False) -> Tensor:
    """States at the N + 1 borders of N chunks: `state`, then decay_n times it plus added_n, and so on.

    `backwards`: from the last border to the first. The result is in the order of time in any case.
    """
    borders = [state]
    for n in reversed(range(len(added))) if backwards else range(len(added)):
        borders.append(torch.addcmul(added[n], decay[n], borders[-1]))
    return torch.stack(borders[::-1] if backwards else borders)


def segments(x_BTHD: Tensor, chunk: int) -> list[slice]:
    """The parts to work through one after the other, in chunks: all at once where no cache is to be kept warm."""
    chunks = step = -(-x_BTHD.shape[1] // chunk)
    if x_BTHD.device.type == "cpu" and not torch.compiler.is_compiling():
        step = max(1, BLOCK // max(1, chunk * x_BTHD[:, 0].numel()))
    return [slice(first, min(first + step, chunks)) for first in range(0, chunks, step)]


def to_chunks(x_BTHD: Tensor, span: slice, chunk: int, fill: float = 0) -> Tensor:
    """Chunks `span` of `x`, as a new tensor `[N, B H, C, D]`; what the last one lacks is `fill`."""
    x_BTHD = x_BTHD[:, span.start * chunk : span.stop * chunk]
    if x_BTHD.shape[1] % chunk:
        x_BTHD = torch.nn.functional.pad(x_BTHD, (0, 0, 0, 0, 0, -x_BTHD.shape[1] % chunk), value=fill)
    x_NBHCD = x_BTHD.unflatten(1, (-1, chunk)).permute(1, 0, 3, 2, 4)
    return x_NBHCD.contiguous().flatten(1, 2)


def empty_chunks(like_BTHD: Tensor, chunk: int) -> Tensor:
    """`[B, N, C, H, D]`, to be written by `from_chunks`."""
    batch, time, *rest = like_BTHD.shape
    return like_BTHD.new_empty(batch, -(-time // chunk), chunk, *rest)


def from_chunks(x_NXCD: Tensor, whole_BNCHD: Tensor, span: slice) -> None:
    """Write chunks `span` where they belong."""
    whole_BNCHD[:, span] = x_NXCD.unflatten(1, (len(whole_BNCHD), -1)).permute(1, 0, 3, 2, 4)


def _by_kernel(q_BTHK, k_BTJK, v_BTJV, g_BTJK, scale, state_BJKV, doc_ids_BT):
    """fla's `chunk_gla`, which wants as many key/value heads as query heads: the heads of a group share a state."""
    group = q_BTHK.shape[2] // k_BTJK.shape[2]
    k_BTHK, v_BTHV, g_BTHK = (x.repeat_interleave(group, dim=2) for x in (k_BTJK, v_BTJV, g_BTJK))
    o_BTHV, state_BHKV = fla.run(
        "gla",
        "chunk_gla",
        {"q": q_BTHK.to(v_BTHV.dtype), "k": k_BTHK.to(v_BTHV.dtype), "v": v_BTHV, "g": g_BTHK.to(torch.float32)},
        None if state_BJKV is None else state_BJKV.repeat_interleave(group, dim=1),
        doc_ids_BT,
        scale=scale,
    )
    return o_BTHV, state_BHKV[:, ::group]
