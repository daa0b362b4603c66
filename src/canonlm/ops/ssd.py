"""Mamba-2's state-space duality: a matrix state per head that decays by one number per token.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t

Dao & Gu 2024, Transformers are SSMs (arXiv 2405.21060), Sections 2 and 6: linear attention with queries C, keys B,
values dt x and a scalar decay. (The skip D x is the mixer's.)

Shapes: B batch, T time, H heads, P channels of a head, G groups (head h reads group h // (H / G)), N state size.
`A_H` is negative (`A_BTH`: by token), `dt_BTH` at least zero; a token with dt = 0 leaves the state as it is.
"""

import torch
from torch import Tensor

from canonlm.ops import fla
from canonlm.ops.autocast import outside_autocast
from canonlm.ops.chunks import decays, derivatives, from_chunks, pad_to_chunks, save_inputs, scan, segments, to_chunks
from canonlm.ops.numba_decays import products_on_cpu, usable
from canonlm.ops.selftest import SHAPE, Inputs, Kernel, as_form, judge, log_decays, normal, states
from canonlm.ops.steps import by_steps, run_steps
from canonlm.ops.varlen import Documents, as_documents, starts


@outside_autocast
def ssd(
    x_BTHP: Tensor,
    dt_BTH: Tensor,
    A_H: Tensor,
    B_BTGN: Tensor,
    C_BTGN: Tensor,
    *,
    state_BHPN: Tensor | None = None,
    documents: Documents | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above, in the form for where the tensors live. Returns (y_BTHP in the dtype of `x`, the state
    after the last token in at least float32).

    `documents`, or their ids alone as `doc_ids_BT`, non-decreasing along a row: the state is zero before the first
    token of each. `state_BHPN` (zero unless given) is the state before the first token, of the same document.
    """
    inputs = (x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN)
    documents = documents or as_documents(doc_ids_BT)
    doc_ids_BT = None if documents is None else documents.ids
    if by_steps(x_BTHP):
        return ssd_recurrent(*inputs, state_BHPN=state_BHPN, doc_ids_BT=doc_ids_BT)
    if fla.takes(x_BTHP) and _kernel_is_right(torch.is_grad_enabled()):
        return _by_kernel(*inputs, state_BHPN, documents)
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
    y_BTHP, state = _recurrent(C, B, v_BTHP, g_BTH, starts(doc_ids_BT), state)
    return y_BTHP.to(x_BTHP.dtype), state


def _recurrent(q_BTGN, k_BTGN, v_BTHP, g_BTH, starts_BT, state_BHPN):
    group = v_BTHP.shape[2] // k_BTGN.shape[2]

    def step(state, q, k, v, decay):
        state = decay[..., None, None] * state + v[..., None] * k[:, :, None, :]
        return (state @ q[..., None])[..., 0], state

    q_BTHN, k_BTHN = q_BTGN.repeat_interleave(group, dim=2), k_BTGN.repeat_interleave(group, dim=2)
    return run_steps(step, state_BHPN, q_BTHN, k_BTHN, v_BTHP, decays(g_BTH, starts_BT))


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
    """Same result in O(T / chunk) steps of matrix products. Derivatives beyond a first backward are those of the
    definition.

    With D the decays between the tokens of a chunk, `since` those since its start and `until` those until its end:

        Y = (D * C B^T) V + since * C S,      S_next = (product of the chunk's decays) S + B^T (until * V)
    """
    v_BTHP, g_BTH, state_BHPN, (B, C) = _prepared(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN)
    time = x_BTHP.shape[1]
    chunk = max(1, min(chunk, time))
    inputs = pad_to_chunks(chunk, C, B, v_BTHP, g_BTH)
    y_BTHP, state_BHPN, *_ = _forward(*inputs, starts(doc_ids_BT, inputs[0].shape[1]), state_BHPN, chunk)
    return y_BTHP[:, :time].to(x_BTHP.dtype), state_BHPN


def _prepared(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN):
    """Values dt x, log-decays dt A, the first state, (B, C): in at least float32."""
    compute = torch.promote_types(x_BTHP.dtype, torch.float32)
    x, dt, A, B, C = (tensor.to(compute) for tensor in (x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN))
    batch, _, heads, channels = x.shape
    state = x.new_zeros(batch, heads, channels, B.shape[-1]) if state_BHPN is None else state_BHPN.to(compute)
    return x * dt[..., None], dt * A, state, (B, C)


# A custom operator, because a compiler would unroll the loop over chunks: minutes for each layer of a model.
@torch.library.custom_op("canonlm::ssd", mutates_args=())
@outside_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, starts: Tensor | None, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Full chunks of tokens: linear attention of queries q and keys k, which the R heads of a group share. Returns
    (y, the next state, and for the backward the contribution of all chunks' states to y, before `since`, and the
    states).

    Further shapes: M chunks of L tokens, Z = B G independent rows.
    """
    y, _, entering, states = _outputs(q, k, v, g, starts, state, chunk)
    states[0] = _grouped_state(state, q)
    for chunks, tokens in segments(v, chunk):
        q_, k_, v_, decay = _segment(q, k, v, g, starts, tokens, chunk)
        between, since, until = _decays_within(decay)
        borders = states[chunks.start : chunks.stop + 1]
        torch.matmul(k_.mT, (v_ * until).flatten(3), out=borders[1:].flatten(3))
        scan(borders, since[:, :, -1:])
        torch.matmul(q_, borders[:-1].flatten(3), out=entering[chunks].flatten(3))
        y_ = ((between * (q_ @ k_.mT)[:, :, None]) @ v_.transpose(2, 3)).transpose(2, 3)
        from_chunks(y_.addcmul_(entering[chunks], since).flatten(3), _grouped(y, q)[:, tokens])
    return y, _ungrouped_state(states[-1], q).clone(memory_format=torch.contiguous_format), entering, states


@_forward.register_fake
def _outputs(q, k, v, g, starts, state, chunk):
    (batch, time, heads, channels), (groups, size) = v.shape, q.shape[2:]
    chunks, rows, per_group = time // chunk, batch * groups, (heads // groups, channels)
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        v.new_empty(chunks, rows, chunk, *per_group),
        v.new_empty(chunks + 1, rows, size, *per_group),
    )


@torch.library.custom_op("canonlm::ssd_backward", mutates_args=())
@outside_autocast
def _backward(
    dy: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    starts: Tensor | None,
    entering: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and the state, whose gradient runs the same recurrence from the end. That of g_t is
    the sum over all that passes from before t to t or later: within the chunk, into it, out of it and through it.
    """
    gradients = _gradients(dy, dstate, q, k, v, g, starts, entering, states)
    chunk, dborder = entering.shape[2], _grouped_state(dstate, q)
    for chunks, tokens in reversed(segments(v, chunk)):
        q_, k_, v_, decay = _segment(q, k, v, g, starts, tokens, chunk)
        between, since, until = _decays_within(decay)
        dy_ = to_chunks(_grouped(dy, q)[:, tokens], chunk).view_as(v_)
        dy_since, v_until, dy_by_head = dy_ * since, v_ * until, dy_.transpose(2, 3).contiguous()
        borders = states[chunks.start : chunks.stop + 1]
        dborders = torch.empty_like(borders)
        dborders[-1] = dborder
        torch.matmul(q_.mT, dy_since.flatten(3), out=dborders[:-1].flatten(3))
        scan(dborders, since[:, :, -1:], backwards=True)
        dborder = dborders[0]
        leaving = (k_ @ dborders[1:].flatten(3)).view_as(v_)

        scores = (q_ @ k_.mT)[:, :, None]
        dscores = (dy_by_head @ v_.permute(0, 1, 3, 4, 2)).mul_(between)
        before = (dscores * scores).cumsum(-1).tril_(-1).sum(-2).mT + (v_until * leaving).sum(-1).cumsum(2)
        dg = (dy_since * entering[chunks]).sum(-1).flip(2).cumsum(2).flip(2)
        dg += since[:, :, -1:, :, 0] * (borders[:-1] * dborders[1:]).sum((2, 4))[:, :, None]
        dg[:, :, 1:] += before[:, :, :-1]
        dscores = dscores.sum(2)
        dq = (dy_since.flatten(3) @ borders[:-1].flatten(3).mT).add_(dscores @ k_)
        dk = (v_until.flatten(3) @ dborders[1:].flatten(3).mT).add_(dscores.mT @ q_)
        dv = ((between * scores).mT @ dy_by_head).transpose(2, 3).addcmul_(leaving, until)
        for gradient, part in zip(gradients[:-1], (dq, dk, dv.flatten(3), dg), strict=True):
            from_chunks(part, _grouped(gradient, q)[:, tokens])
    gradients[-1].copy_(_ungrouped_state(dborder, q))
    return gradients


@_backward.register_fake
def _gradients(dy, dstate, q, k, v, g, starts, entering, states):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, dstate))


_forward.register_autograd(derivatives(_backward, _recurrent), setup_context=save_inputs)


def _segment(q, k, v, g, starts, tokens: slice, chunk: int) -> tuple[Tensor, ...]:
    """Queries and keys `[M, Z, L, N]`, values `[M, Z, L, R, P]` and decays `[M, Z, L, R]` of some chunks."""
    decay = decays(g[:, tokens], None if starts is None else starts[:, tokens])
    q_, k_, v_, decay = (to_chunks(_grouped(x, q), chunk) for x in (q[:, tokens], k[:, tokens], v[:, tokens], decay))
    return q_, k_, v_.unflatten(3, (decay.shape[-1], -1)), decay


def _grouped(x_BTH: Tensor, q_BTGN: Tensor) -> Tensor:
    """`[B, T, H, …]` as a view `[B, T, G, …]`: what belongs to the heads of a group side by side."""
    return x_BTH.unflatten(2, (q_BTGN.shape[2], -1)).flatten(3)


def _grouped_state(state_BHPN: Tensor, q_BTGN: Tensor) -> Tensor:
    """`[Z, N, R, P]`: a matrix product with it serves all heads of a group."""
    return state_BHPN.unflatten(1, (q_BTGN.shape[2], -1)).permute(0, 1, 4, 2, 3).flatten(0, 1)


def _ungrouped_state(state_ZNRP: Tensor, q_BTGN: Tensor) -> Tensor:
    batch, _, groups, _ = q_BTGN.shape
    return state_ZNRP.unflatten(0, (batch, groups)).permute(0, 1, 3, 4, 2).flatten(1, 2)


def _decays_within(decay_MZLR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Products of decays: after token j up to token i `[M, Z, R, i, j]`; since the start of the chunk up to and
    including a token, and after it until the end, both `[M, Z, L, R, 1]`.

    Not exp of differences of running sums, which lose their digits after one strong decay.
    """
    decay_MZRL = decay_MZLR.mT.contiguous()
    between = products_on_cpu(decay_MZRL) if usable(decay_MZRL) else products(decay_MZRL)
    since_MZRL = between[..., 0] * decay_MZRL[..., :1]
    return between, since_MZRL.mT.contiguous()[..., None], between[..., -1, :].mT.contiguous()[..., None]


def products(decay_XL: Tensor) -> Tensor:
    """Products of decays after token j up to token i `[X, i, j]`: one for i = j, zero for i < j."""
    size = decay_XL.shape[-1]
    below = torch.ones(size, size, dtype=decay_XL.dtype, device=decay_XL.device).tril_(-1)
    return torch.addcmul(1 - below, decay_XL[..., None], below).cumprod(-2).tril_()


def _by_kernel(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN, documents):
    """fla's `chunk_simple_gla`, which needs equal numbers of groups and heads and keeps its state transposed."""
    group, dt = x_BTHP.shape[2] // B_BTGN.shape[2], dt_BTH.to(torch.float32)
    B_BTHN, C_BTHN = (x.to(x_BTHP.dtype).repeat_interleave(group, dim=2) for x in (B_BTGN, C_BTGN))
    y_BTHP, state_BHNP = fla.run(
        "simple_gla",
        "chunk_simple_gla",
        {"q": C_BTHN, "k": B_BTHN, "v": (x_BTHP * dt[..., None]).to(x_BTHP.dtype), "g": dt * A_H.to(torch.float32)},
        None if state_BHPN is None else state_BHPN.transpose(2, 3),
        documents,
        scale=1.0,
    )
    return y_BTHP, state_BHNP.transpose(2, 3)


def _trial_inputs(generator: torch.Generator, width: int) -> Inputs:
    steps = -log_decays(generator, *SHAPE)  # with A = -1 the decays are exp(-steps)
    tokens = {
        "x": normal(generator, *SHAPE, width),
        "dt": steps,
        "A": -torch.ones(SHAPE[2], dtype=torch.float64),
        "B": normal(generator, *SHAPE[:2], 1, width) / 8,
        "C": normal(generator, *SHAPE[:2], 1, width) / 8,
    }
    return tokens, states(generator, width)


KERNEL = Kernel(
    "fla chunk_simple_gla",
    lambda x, dt, A, B, C, state, doc_ids: _by_kernel(x, dt, A, B, C, state, as_documents(doc_ids)),
    as_form(ssd_recurrent, "state_BHPN"),
    _trial_inputs,
    wide=("dt", "A"),
)
_kernel_is_right = judge(KERNEL)
