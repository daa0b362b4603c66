"""Mamba-2's state-space duality: a matrix state per head that decays by one number per token.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t

Dao & Gu 2024, Transformers are SSMs (arXiv 2405.21060), Sections 2 and 6: linear attention with queries C, keys B,
values dt x and a scalar decay. (The skip D x is the mixer's.)

Shapes: B batch, T time, H heads, P channels of a head, G groups (head h reads group h // (H / G)), N state size.
`A_H` is negative, `dt_BTH` at least zero; a token with dt = 0 leaves the state as it is.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from canonlm.ops import fla
from canonlm.ops.gated_linear_attention import decays, empty_chunks, from_chunks, scan, segments, starts, to_chunks
from canonlm.ops.precision import outside_autocast


@outside_autocast
def ssd(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above, in the form for where the tensors live. Returns (y_BTHP in the dtype of `x`, the state
    after the last token in at least float32).

    `doc_ids_BT`: integers, one value per document, non-decreasing along a row; the state is zero before the first
    token of each. `state_BHPN` (zero unless given) is the state before the first token, of the same document.
    """
    inputs = (x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN)
    if x_BTHP.shape[1] == 1 and not torch.is_grad_enabled():
        return ssd_recurrent(*inputs, state_BHPN=state_BHPN, doc_ids_BT=doc_ids_BT)
    if fla.takes(x_BTHP, scalar_decay=True):
        return _by_kernel(*inputs, state_BHPN, doc_ids_BT)
    return ssd_chunked(*inputs, state_BHPN=state_BHPN, doc_ids_BT=doc_ids_BT)


def ssd_recurrent(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one step at a time: what every other form is tested against, and how we decode."""
    v_BTHP, g_BTH, state, (B, C) = _prepared(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN)
    group = x_BTHP.shape[2] // B.shape[2]
    B_BTHN, C_BTHN = B.repeat_interleave(group, dim=2), C.repeat_interleave(group, dim=2)
    decay_BTH = decays(g_BTH, starts(doc_ids_BT))
    y_TBHP = []
    for t in range(x_BTHP.shape[1]):
        state = decay_BTH[:, t, :, None, None] * state + v_BTHP[:, t, :, :, None] * B_BTHN[:, t, :, None, :]
        y_TBHP.append((state @ C_BTHN[:, t, :, :, None])[..., 0])
    y_BTHP = torch.stack(y_TBHP, dim=1) if y_TBHP else v_BTHP
    return y_BTHP.to(x_BTHP.dtype), state


def ssd_chunked(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    chunk: int = 64,
) -> tuple[Tensor, Tensor]:
    """Same result in O(T / chunk) steps, for any `chunk` >= 1."""
    v_BTHP, g_BTH, state_BHPN, (B, C) = _prepared(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN)
    if not x_BTHP.numel():
        return x_BTHP.clone(), state_BHPN
    chunk = min(chunk, x_BTHP.shape[1])
    y_BTHP, state_BHPN = _Chunked.apply(C, B, v_BTHP, g_BTH, state_BHPN, starts(doc_ids_BT), chunk)
    return y_BTHP.to(x_BTHP.dtype), state_BHPN


def _prepared(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN):
    """Values dt x, log-decays dt A, the first state, (B, C): in at least float32."""
    compute = torch.promote_types(x_BTHP.dtype, torch.float32)
    x, dt, A, B, C = (tensor.to(compute) for tensor in (x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN))
    batch, _, heads, channels = x.shape
    state = x.new_zeros(batch, heads, channels, B.shape[-1]) if state_BHPN is None else state_BHPN.to(compute)
    return x * dt[..., None], dt * A, state, (B, C)


class _Chunked(torch.autograd.Function):
    """Linear attention of queries q and keys k, which the R heads of a group share, with a decay per head; M chunks
    of L tokens, Z = B G rows that do not see each other, X = R P.

    With D the decays between the tokens of a chunk, `since` those since its start and `until` those until its end:

        Y = (D * Q K^T) V + since * Q S,      S_next = (product of the chunk's decays) S + K^T (until * V)

    Backward, the state's gradient runs the same recurrence from the end. The gradient of a log-decay g_t is the sum
    over all that passes from before t to t or later: inside the chunk, into it, out of it, and all the way through.
    """

    @staticmethod
    def forward(ctx, q_BTGN, k_BTGN, v_BTHP, g_BTH, state_BHPN, starts_BT, chunk):
        (batch, time, heads, channels), groups = v_BTHP.shape, q_BTGN.shape[2]
        per_group = (heads // groups, channels)
        v_BTGX, decay_BTGR = (x.reshape(batch, time, groups, -1) for x in (v_BTHP, decays(g_BTH, starts_BT)))
        y_BMLGX, saved = empty_chunks(v_BTGX, chunk), []
        state_ZNRP = state_BHPN.unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).flatten(0, 1)
        for span in segments(v_BTGX, chunk):
            q, k, v = (to_chunks(x, span, chunk) for x in (q_BTGN, k_BTGN, v_BTGX))
            between, since, until = _decays_within(to_chunks(decay_BTGR, span, chunk, fill=1))
            v = v.unflatten(3, per_group)
            added = (k.mT @ (v * until).flatten(3)).unflatten(3, per_group)
            states = scan(state_ZNRP, added, since[:, :, -1:])
            state_ZNRP = states[-1]
            entering = (q @ states[:-1].flatten(3)).unflatten(3, per_group)
            y = ((between * (q @ k.mT)[:, :, None]) @ v.transpose(2, 3)).transpose(2, 3)
            from_chunks(torch.addcmul(y, entering, since).flatten(3), y_BMLGX, span)
            saved += [states, entering]
        ctx.chunk = chunk
        ctx.save_for_backward(q_BTGN, k_BTGN, v_BTHP, decay_BTGR, *saved)
        y_BTHP = y_BMLGX.flatten(1, 2)[:, :time].reshape(v_BTHP.shape)
        return y_BTHP, state_ZNRP.unflatten(0, (batch, groups)).permute(0, 1, 3, 4, 2).flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_BTHP, dstate_BHPN):
        q_BTGN, k_BTGN, v_BTHP, decay_BTGR, *saved = ctx.saved_tensors
        chunk, (batch, time, heads, channels), groups = ctx.chunk, v_BTHP.shape, q_BTGN.shape[2]
        per_group = (heads // groups, channels)
        v_BTGX, dy_BTGX = (x.reshape(batch, time, groups, -1) for x in (v_BTHP, dy_BTHP))
        gradients = [empty_chunks(x, chunk) for x in (q_BTGN, k_BTGN, v_BTGX, decay_BTGR)]
        dstate_ZNRP = dstate_BHPN.unflatten(1, (groups, -1)).permute(0, 1, 4, 2, 3).flatten(0, 1)
        for span in reversed(segments(v_BTGX, chunk)):
            *saved, states, entering = saved
            q, k, v, dy = (to_chunks(x, span, chunk) for x in (q_BTGN, k_BTGN, v_BTGX, dy_BTGX))
            between, since, until = _decays_within(to_chunks(decay_BTGR, span, chunk, fill=1))
            v, dy = v.unflatten(3, per_group), dy.unflatten(3, per_group)
            dy_since, v_until, dy_by_head = dy * since, v * until, dy.transpose(2, 3)
            added = (q.mT @ dy_since.flatten(3)).unflatten(3, per_group)
            dstates = scan(dstate_ZNRP, added, since[:, :, -1:], backwards=True)
            dstate_ZNRP, dstates = dstates[0], dstates[1:]
            leaving = (k @ dstates.flatten(3)).unflatten(3, per_group)

            scores = (q @ k.mT)[:, :, None]
            dscores = (dy_by_head @ v.permute(0, 1, 3, 4, 2)).mul_(between)
            inside = (dscores * scores).cumsum(-1).tril_(-1).sum(-2).mT + (v_until * leaving).sum(-1).cumsum(2)
            dg = (dy_since * entering).sum(-1).flip(2).cumsum(2).flip(2)
            dg += since[:, :, -1:, :, 0] * (states[:-1] * dstates).sum((2, 4))[:, :, None]
            dg[:, :, 1:] += inside[:, :, :-1]
            dscores = dscores.sum(2)
            dq = (dy_since.flatten(3) @ states[:-1].flatten(3).mT).add_(dscores @ k)
            dk = (v_until.flatten(3) @ dstates.flatten(3).mT).add_(dscores.mT @ q)
            dv = torch.addcmul(((between * scores).mT @ dy_by_head).transpose(2, 3), leaving, until)
            for whole, part in zip(gradients, (dq, dk, dv.flatten(3), dg), strict=True):
                from_chunks(part, whole, span)
        dq_BTGN, dk_BTGN, dv_BTGX, dg_BTGR = (x.flatten(1, 2)[:, :time] for x in gradients)
        dstate_BHPN = dstate_ZNRP.unflatten(0, (batch, groups)).permute(0, 1, 3, 4, 2).flatten(1, 2)
        return dq_BTGN, dk_BTGN, dv_BTGX.reshape(v_BTHP.shape), dg_BTGR.flatten(2), dstate_BHPN, None, None


def _decays_within(decay_MZLR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products of decays: after token j up to token i `[M, Z, R, i, j]`; since the start of the chunk up to and with
    a token, and after it until the end, both `[M, Z, L, R, 1]`.

    Not exp of differences of running sums, which lose their digits after one strong decay.
    """
    decay_MZRL, size = decay_MZLR.mT, decay_MZLR.shape[2]
    below = torch.ones(size, size, dtype=decay_MZRL.dtype, device=decay_MZRL.device).tril_(-1)
    between = torch.addcmul(1 - below, decay_MZRL[..., None], below).cumprod(-2).tril_()
    since_MZRL = between[..., 0] * decay_MZRL[..., :1]
    return between, since_MZRL.mT.contiguous()[..., None], between[..., -1, :].mT.contiguous()[..., None]


def _by_kernel(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN, doc_ids_BT):
    """fla's `chunk_simple_gla`, which wants as many groups as heads and keeps its state transposed."""
    group, dt = x_BTHP.shape[2] // B_BTGN.shape[2], dt_BTH.to(torch.float32)
    B_BTHN, C_BTHN = (x.to(x_BTHP.dtype).repeat_interleave(group, dim=2) for x in (B_BTGN, C_BTGN))
    y_BTHP, state_BHNP = fla.run(
        "simple_gla",
        "chunk_simple_gla",
        {"q": C_BTHN, "k": B_BTHN, "v": (x_BTHP * dt[..., None]).to(x_BTHP.dtype), "g": dt * A_H.to(torch.float32)},
        None if state_BHPN is None else state_BHPN.transpose(2, 3),
        doc_ids_BT,
        scale=1.0,
    )
    return y_BTHP, state_BHNP.transpose(2, 3)
