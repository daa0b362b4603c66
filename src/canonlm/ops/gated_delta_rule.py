"""The gated delta rule: a matrix state that decays and is then corrected where it mispredicts the current value.

    S_t = exp(g_t) S_{t-1},      S_t += k_t (beta_t (v_t - S_t^T r_t))^T,      o_t = (scale q_t)^T S_t

Yang, Kautz & Hatamizadeh 2024, Gated Delta Networks (arXiv 2412.06464), Eq. 10, and the rules that followed:

- r_t = k_t and one decay per head: Gated DeltaNet; beta in (0, 2) gives I - beta k k^T negative eigenvalues
  (Grazzi et al. 2024, arXiv 2411.12537);
- one decay per key channel: Kimi Delta Attention (arXiv 2510.26692);
- r_t = b_t * k_t: what is erased differs from what is written, as in Gated DeltaNet-2;
- several steps per token, which decays before the first: Gated DeltaProduct (arXiv 2502.10297).

Shapes: B batch, T time, H heads, K key channels, V value channels; I one decay per head (no dimension) or one per key
channel (K). q and k arrive normalised. `g_BTHI` are log-decays <= 0, `beta_BTH` the strengths of the corrections; a
token with beta = 0 and g = 0 leaves the state as it is. With S steps per token, k, v, beta and r have S T of them.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from canonlm.ops import fla
from canonlm.ops.autocast import outside_autocast
from canonlm.ops.channel_decays import Decayed, decay_in_blocks, scores_backward, write_scores
from canonlm.ops.chunks import decays, derivatives, from_chunks, pad_to_chunks, save_inputs, segments, to_chunks
from canonlm.ops.selftest import SHAPE, Inputs, Kernel, as_form, judge, log_decays, normal, states
from canonlm.ops.steps import by_steps, run_steps
from canonlm.ops.varlen import Documents, as_documents, starts


@outside_autocast
def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHI: Tensor,
    beta_BTH: Tensor,
    r_BTHK: Tensor | None = None,
    *,
    steps: int = 1,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    documents: Documents | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above, in the form for where the tensors live. Returns (o_BTHV in the dtype of `v`, the state
    after the last token in at least float32).

    `r` is k unless given, `scale` K^-1/2, `steps` the number of steps per token. `documents`, or their ids alone as
    `doc_ids_BT`, non-decreasing along a row: the state is zero before the first token of each. `state_BHKV` (zero
    unless given) is the state before the first token, of the same document.
    """
    documents, recurrent = documents or as_documents(doc_ids_BT), by_steps(q_BTHK)
    if steps > 1:
        q_BTHK, g_BTHI, documents = _spread(steps, q_BTHK, g_BTHI, documents)
    doc_ids_BT = None if documents is None else documents.ids
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTHI, beta_BTH)
    fits = r_BTHK is None and q_BTHK.shape[-1] <= 256  # the kernels do not support more key channels
    kernel = _kernel_is_right if g_BTHI.ndim == 3 else _channel_kernel_is_right
    if not recurrent and fits and fla.takes(v_BTHV) and kernel(torch.is_grad_enabled()):
        o_BTHV, state_BHKV = _by_kernel(*inputs, scale, state_BHKV, documents)
    else:
        form = gated_delta_rule_recurrent if recurrent else gated_delta_rule_chunked
        o_BTHV, state_BHKV = form(*inputs, r_BTHK, scale=scale, state_BHKV=state_BHKV, doc_ids_BT=doc_ids_BT)
    return o_BTHV[:, steps - 1 :: steps] if steps > 1 else o_BTHV, state_BHKV


def _spread(
    steps: int, q_BTHK: Tensor, g_BTHI: Tensor, documents: Documents | None
) -> tuple[Tensor, Tensor, Documents | None]:
    """Queries at the last of each token's steps, decays before the first, documents at all; zeros elsewhere."""
    pad = torch.nn.functional.pad
    q_BTHK = pad(q_BTHK[:, :, None], (0, 0, 0, 0, steps - 1, 0)).flatten(1, 2)
    g_BTHI = pad(g_BTHI[:, :, None], (*(0, 0) * (g_BTHI.ndim - 2), 0, steps - 1)).flatten(1, 2)
    return q_BTHK, g_BTHI, None if documents is None else documents.spread(steps)


def gated_delta_rule_recurrent(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHI: Tensor,
    beta_BTH: Tensor,
    r_BTHK: Tensor | None = None,
    *,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one step at a time: what every other form is tested against, and how we decode."""
    batch, _, heads, channels = q_BTHK.shape
    compute = torch.promote_types(v_BTHV.dtype, torch.float32)
    q, k, v, g, beta = (x.to(compute) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTHI, beta_BTH))
    r = k if r_BTHK is None else r_BTHK.to(compute)
    g = g if g.ndim == 4 else g[..., None]
    q = q * (channels**-0.5 if scale is None else scale)
    state = v.new_zeros(batch, heads, channels, v.shape[-1]) if state_BHKV is None else state_BHKV.to(compute)

    def step(state, q, k, v, decay, beta, r):
        state = decay[..., None] * state
        error_BH1V = v[:, :, None] - r[:, :, None] @ state
        state = state + k[..., None] * (beta[..., None, None] * error_BH1V)
        return (q[:, :, None] @ state)[:, :, 0], state

    o_BTHV, state = run_steps(step, state, q, k, v, decays(g, starts(doc_ids_BT)), beta, r)
    return o_BTHV.to(v_BTHV.dtype), state


def gated_delta_rule_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHI: Tensor,
    beta_BTH: Tensor,
    r_BTHK: Tensor | None = None,
    *,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in O(T / chunk) steps of matrix products (Section 3.3). Derivatives beyond a first backward are those of
    the definition.

    Let b be the running sum of g in a chunk of C tokens, D_ij = exp(b_i - b_j) for j <= i in one document and else 0,
    and w_j = beta_j k_j. If the chunk starts from the state S, its errors e_i = v_i - S_i^T r_i solve a unit triangular
    system, whose inverse T (the UT transform) does not depend on S:

        e + tril(r w^T * D, -1) e = v - exp(b) r S,    so that    e = T v - (T exp(b) r) S
        o = exp(b) q S + (q w^T * D) e
        S_next = exp(b_C) S + (exp(b_C - b) w)^T e

    Only e and S_next must be computed one chunk after the other. With a decay per channel, D is inside the dot products
    (`channel_decays`), and `chunk` is a power of two.
    """
    (batch, time, heads, channels), values = q_BTHK.shape, v_BTHV.shape[-1]
    compute = torch.promote_types(v_BTHV.dtype, torch.float32)
    if state_BHKV is None:
        state_BHKV = v_BTHV.new_zeros(batch, heads, channels, values, dtype=compute)
    scale = channels**-0.5 if scale is None else scale
    if chunk is None:  # larger ones cost more arithmetic, smaller ones more launches on a GPU
        chunk = 32 if v_BTHV.device.type == "cpu" else 64
    by_channel = g_BTHI.ndim == 4
    chunk = min(chunk, 1 << max(0, time - 1).bit_length()) if by_channel else max(1, min(chunk, time))
    g = g_BTHI if by_channel else g_BTHI[..., None]
    inputs = pad_to_chunks(chunk, q_BTHK, k_BTHK, v_BTHV, g, beta_BTH[..., None])
    r = None if r_BTHK is None else pad_to_chunks(chunk, r_BTHK)[0]
    starts_BT = starts(doc_ids_BT, inputs[0].shape[1])
    o_BTHV, state, *_ = _forward(*inputs, r, starts_BT, state_BHKV.to(compute), scale, by_channel, chunk)
    return o_BTHV[:, :time], state


# A custom operator, because a compiler would unroll the loop over chunks: minutes for a layer, and slower code.
@torch.library.custom_op("canonlm::gated_delta_rule", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    r: Tensor | None,
    starts: Tensor | None,
    state: Tensor,
    scale: float,
    by_channel: bool,
    chunk: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Full chunks of tokens. Returns (o, the next state, and for the backward the inverses, errors and states).

    Further shapes: N chunks, L = B H lanes, C tokens of a chunk, S = 2 C for queries above keys.
    """
    o, _, inverses, errors, states = _outputs(q, k, v, g, beta, r, starts, state, scale, by_channel, chunk)
    identity = torch.eye(chunk, dtype=state.dtype, device=state.device)
    states[0] = state.flatten(0, 1)
    for block, tokens in segments(k, chunk):
        x = _local(q, k, g, beta, r, starts, tokens, by_channel, chunk, state.dtype)
        inverses[block] = torch.linalg.solve_triangular(
            x.scores[:, :, chunk:], identity.expand_as(inverses[block]), upper=False, unitriangular=True
        )
        errors[block] = inverses[block] @ to_chunks(v[:, tokens], chunk, state.dtype)
        reads = inverses[block] @ x.faded[:, :, chunk:]
        for i, n in enumerate(range(block.start, block.stop)):
            errors[n].baddbmm_(reads[i], states[n], alpha=-1)
            torch.baddbmm(x.through[i] * states[n], x.faded_writes[i].mT, errors[n], out=states[n + 1])
        o_NLCV = (x.scores[:, :, :chunk] @ errors[block]).add_(x.faded[:, :, :chunk] @ states[block])
        from_chunks(o_NLCV.mul_(scale), o[:, tokens])
    return o, states[-1].view_as(state).clone(), inverses, errors, states


@_forward.register_fake
def _outputs(q, k, v, g, beta, r, starts, state, scale, by_channel, chunk):
    (batch, time, heads, channels), values = q.shape, v.shape[-1]
    chunks, lanes = time // chunk, batch * heads
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        state.new_empty(chunks, lanes, chunk, chunk),
        state.new_empty(chunks, lanes, chunk, values),
        state.new_empty(chunks + 1, lanes, channels, values),
    )


@torch.library.custom_op("canonlm::gated_delta_rule_backward", mutates_args=())
@outside_autocast
def _backward(
    do: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    r: Tensor | None,
    starts: Tensor | None,
    inverses: Tensor,
    errors: Tensor,
    states: Tensor,
    scale: float,
    by_channel: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g, beta, r (without it no numbers) and the state. What does not depend on states is
    recomputed."""
    gradients = _gradients(do, dstate, q, k, v, g, beta, r, starts, inverses, errors, states, scale, by_channel)
    chunk, compute = inverses.shape[-1], states.dtype
    dstate_LKV = dstate.flatten(0, 1)
    for block, tokens in reversed(segments(k, chunk)):
        x = _local(q, k, g, beta, r, starts, tokens, by_channel, chunk, compute)
        do_NLCV = to_chunks(do[:, tokens], chunk, compute) * scale
        reads = inverses[block] @ x.faded[:, :, chunk:]
        derrors = x.scores[:, :, :chunk].mT @ do_NLCV
        dstates = torch.cat([x.faded[:, :, :chunk].mT @ do_NLCV, dstate_LKV[None]])
        for i in reversed(range(len(derrors))):
            derrors[i].baddbmm_(x.faded_writes[i], dstates[i + 1])
            dstates[i].addcmul_(x.through[i], dstates[i + 1]).baddbmm_(reads[i].mT, derrors[i], alpha=-1)
        dstate_LKV = dstates[0]

        dv = inverses[block].mT @ derrors
        dreads = torch.cat([do_NLCV, -dv], dim=2)  # the gradients of what q and k read
        dscores = dreads @ errors[block].mT
        dqr, dwrites = dreads @ states[block].mT, errors[block] @ dstates[1:].mT
        x.through_scores(dscores, dqr, dwrites)
        dbeta = (x.keys * dwrites).sum(-1, keepdim=True)
        # exp(b_i) always comes with q_i or r_i, and exp(-b_j) with w_j, so that their gradients contain that of b;
        # exp(b_C) comes with all of the next state.
        db = x.qr * dqr
        dstate_of_b = dstates[1:] * states[block.start + 1 : block.stop + 1]
        if by_channel:
            db = db.unflatten(2, (2, chunk)).sum(2) - x.writes * dwrites
            db[:, :, -1] += dstate_of_b.sum(3)
        else:
            db = db.sum(-1, keepdim=True).unflatten(2, (2, chunk)).sum(2) - x.beta * dbeta
            db[:, :, -1, 0] += dstate_of_b.sum((2, 3))
        dg = db.flip(2).cumsum(2).flip(2)
        dg.masked_fill_((x.decay if by_channel else to_chunks(g[:, tokens], chunk, compute).exp()) == 0, 0)
        dk, dr = x.beta * dwrites, dqr[:, :, chunk:]
        parts = [dqr[:, :, :chunk], dr + dk if r is None else dk, dv, dg, dbeta, *([] if r is None else [dr])]
        for gradient, part in zip(gradients, parts, strict=False):  # the state's is last, and r may have none
            from_chunks(part, gradient[:, tokens])
    gradients[-1].copy_(dstate_LKV.view_as(dstate))
    return gradients


@_backward.register_fake
def _gradients(do, dstate, q, k, v, g, beta, r, starts, inverses, errors, states, scale, by_channel):
    return tuple(q.new_empty(0) if x is None else x.new_empty(x.shape) for x in (q, k, v, g, beta, r, dstate))


def _definition(q, k, v, g, beta, r, starts, state, scale, by_channel):
    g = g if by_channel else g[..., 0]
    doc_ids = None if starts is None else starts.cumsum(1)
    return gated_delta_rule_recurrent(q, k, v, g, beta[..., 0], r, scale=scale, state_BHKV=state, doc_ids_BT=doc_ids)


_forward.register_autograd(derivatives(_backward, _definition), setup_context=save_inputs)


class _Local(NamedTuple):
    """The results of a block of chunks that do not depend on states. I is 1, or K with a decay per channel."""

    qr: Tensor  # queries above read keys: [N, L, S, K]
    keys: Tensor  # [N, L, C, K]
    writes: Tensor  # w: [N, L, C, K]
    beta: Tensor  # [N, L, C, 1]
    decay: Tensor  # D: [N, L, C, C]; with a decay per channel the tokens' decays, [N, L, C, K]
    start: Tensor  # exp(b), since the chunk's start: [N, L, S, 1], zero where the state's document has ended
    end: Tensor  # exp(b_C - b), until its end: [N, L, C, 1], zero before the last token's document
    through: Tensor  # exp(b_C): [N, L, I, 1]
    faded: Tensor  # exp(b) q above exp(b) r: [N, L, S, K]
    faded_writes: Tensor  # exp(b_C - b) w: [N, L, C, K]
    scores: Tensor  # (q w^T * D) above (r w^T * D): [N, L, S, C]
    decayed: Decayed | None = None  # with a decay per channel, in place of start and end

    def through_scores(self, dscores: Tensor, dqr: Tensor, dwrites: Tensor) -> None:
        """`dqr` and `dwrites` come as gradients of `faded` and `faded_writes` and become those of `qr` and `writes` (in
        place). `dscores` is overwritten."""
        two = (2, self.keys.shape[2])
        if self.decayed is None:
            dscores.unflatten(2, two).mul_(self.decay[:, :, None])[:, :, 1].tril_(-1)
            dqr.mul_(self.start).add_(dscores @ self.writes)
            dwrites.mul_(self.end).add_(dscores.mT @ self.qr)
        else:
            dscores.unflatten(2, two)[:, :, 1].tril_(-1)
            dscores, dqr, qr = (x.unflatten(2, two).movedim(2, 0) for x in (dscores, dqr, self.qr))
            scores_backward(dscores, qr, self.writes, self.decay, self.decayed, dqr, dwrites)


def _local(q, k, g, beta, r, starts, tokens: slice, by_channel: bool, chunk: int, compute: torch.dtype) -> _Local:
    qr = torch.cat([to_chunks(x[:, tokens], chunk, compute) for x in (q, k if r is None else r)], dim=2)
    keys = qr[:, :, chunk:] if r is None else to_chunks(k[:, tokens], chunk, compute)
    beta = to_chunks(beta[:, tokens], chunk, compute)
    writes = beta * keys
    starts = None if starts is None else starts[:, tokens]
    if by_channel:
        decay = to_chunks(decays(g[:, tokens].to(compute), starts), chunk)
        kinds = qr.unflatten(2, (2, chunk)).movedim(2, 0)
        decayed = decay_in_blocks(kinds, writes, decay)
        scores = qr.new_empty(*decay.shape[:2], 2, chunk, chunk)
        write_scores(scores.movedim(2, 0), kinds, writes, decay, decayed)
        faded, through = decayed.q.movedim(0, 2).flatten(2, 3), decayed.total[..., None]
        none = decay.new_empty(0)
        return _Local(
            qr, keys, writes, beta, decay, none, none, through, faded, decayed.k, scores.flatten(2, 3), decayed
        )
    # In float64: after a token that erases the state (g = -1000) float32 would lose digits of the next ones.
    # exp(-1000) is already 0; larger sums would lose digits, too, and differences of infinite ones are not numbers.
    b = to_chunks(g[:, tokens], chunk, torch.float64).clamp(min=-1000).cumsum(2)
    starts = torch.zeros_like(g[:, tokens, 0, 0], dtype=torch.bool) if starts is None else starts
    # The number of a token's document in its chunk: 0 for that of the token before the chunk, and of the state.
    docs = starts.unflatten(1, (-1, chunk)).cumsum(2).transpose(0, 1)[:, :, None, :, None]

    def fade(exponent: Tensor, same: Tensor) -> Tensor:
        by_head = exponent.to(compute).exp().unflatten(1, (-1, q.shape[2]))
        return by_head.mul_(same.to(compute)).flatten(1, 2)

    decay = fade((b - b.mT).tril_(), (docs == docs.mT).tril_())
    start = fade(b, docs == 0).repeat(1, 1, 2, 1)
    end = fade(b[:, :, -1:] - b, docs == docs[:, :, :, -1:])
    scores = qr @ writes.mT
    scores.unflatten(2, (2, chunk)).mul_(decay[:, :, None])
    return _Local(qr, keys, writes, beta, decay, start, end, start[:, :, -1:], start * qr, end * writes, scores)


def _by_kernel(q_BTHK, k_BTHK, v_BTHV, g_BTHI, beta_BTH, scale, state_BHKV, documents):
    """fla's `chunk_gated_delta_rule`; with a decay per channel, `chunk_kda`."""
    inputs = {"q": q_BTHK.to(v_BTHV.dtype), "k": k_BTHK.to(v_BTHV.dtype), "v": v_BTHV}
    inputs |= {"g": g_BTHI.to(torch.float32), "beta": beta_BTH.to(torch.float32)}
    names = ("gated_delta_rule", "chunk_gated_delta_rule") if g_BTHI.ndim == 3 else ("kda", "chunk_kda")
    return fla.run(*names, inputs, state_BHKV, documents, scale=scale)


def _trial(name: str, by_channel: bool) -> Kernel:
    def inputs(generator: torch.Generator, width: int) -> Inputs:
        q, k = (normal(generator, *SHAPE, width) for _ in range(2))
        tokens = {
            "q": torch.nn.functional.normalize(q, dim=-1),
            "k": torch.nn.functional.normalize(k, dim=-1),
            "v": normal(generator, *SHAPE, width),
            "g": log_decays(generator, *SHAPE, *([width] if by_channel else [])),
            "beta": normal(generator, *SHAPE).mul(3).sigmoid(),
        }
        return tokens, states(generator, width)

    return Kernel(
        f"fla {name}",
        lambda q, k, v, g, beta, state, doc_ids: _by_kernel(q, k, v, g, beta, None, state, as_documents(doc_ids)),
        as_form(gated_delta_rule_recurrent, "state_BHKV"),
        inputs,
        wide=("g", "beta"),
    )


KERNEL = _trial("chunk_gated_delta_rule", by_channel=False)
CHANNEL_KERNEL = _trial("chunk_kda", by_channel=True)
_kernel_is_right, _channel_kernel_is_right = judge(KERNEL), judge(CHANNEL_KERNEL)
