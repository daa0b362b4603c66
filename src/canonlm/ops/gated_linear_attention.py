"""Gated linear attention: a matrix state whose rows (key channels) decay, each at its own data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,      o_t = (scale q_t)^T S_t

Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635), Section 4.1.

Shapes: B batch, T time, H query heads, J key/value heads (query head h reads key/value head h // (H / J)), K key
channels, V value channels. `g_BTJK` are log-decays <= 0. A token with k = 0 and g = 0 leaves the state as it is.

Inside the chunked form: N chunks of C tokens, X = B H independent rows.
"""

import torch
from torch import Tensor

from canonlm.ops import fla
from canonlm.ops.autocast import outside_autocast
from canonlm.ops.channel_decays import decay_in_blocks, scores_backward, write_scores
from canonlm.ops.chunks import decays, derivatives, from_chunks, pad_to_chunks, save_inputs, scan, segments, to_chunks
from canonlm.ops.selftest import SHAPE, Inputs, Kernel, as_form, judge, log_decays, normal, states
from canonlm.ops.steps import by_steps, run_steps
from canonlm.ops.varlen import Documents, as_documents, starts


@outside_autocast
def gated_linear_attention(
    q_BTHK: Tensor,
    k_BTJK: Tensor,
    v_BTJV: Tensor,
    g_BTJK: Tensor,
    *,
    scale: float | None = None,
    state_BJKV: Tensor | None = None,
    documents: Documents | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above, in the form for where the tensors live. Returns (o_BTHV in the dtype of `v`, the state
    after the last token in at least float32).

    `scale` is K^-1/2 unless given. `documents`, or their ids alone as `doc_ids_BT`, non-decreasing along a row: the
    state is zero before the first token of each. `state_BJKV` (zero unless given) is the state before the first
    token, of the same document.
    """
    documents = documents or as_documents(doc_ids_BT)
    doc_ids_BT = None if documents is None else documents.ids
    inputs = (q_BTHK, k_BTJK, v_BTJV, g_BTJK)
    if by_steps(q_BTHK):
        return gated_linear_attention_recurrent(*inputs, scale=scale, state_BJKV=state_BJKV, doc_ids_BT=doc_ids_BT)
    if fla.takes(v_BTJV) and _kernel_is_right(torch.is_grad_enabled()):
        return _by_kernel(*inputs, scale, state_BJKV, documents)
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
    (batch, _, _, channels), kv_heads = q_BTHK.shape, k_BTJK.shape[2]
    compute = torch.promote_types(v_BTJV.dtype, torch.float32)
    q, k, v = q_BTHK.to(compute).unflatten(2, (kv_heads, -1)), k_BTJK.to(compute), v_BTJV.to(compute)
    decay_BTJK = decays(g_BTJK.to(compute), starts(doc_ids_BT))
    state = v.new_zeros(batch, kv_heads, channels, v.shape[-1]) if state_BJKV is None else state_BJKV.to(compute)
    scale = channels**-0.5 if scale is None else scale

    def step(state, q, k, v, decay):
        state = decay[..., None] * state + k[..., None] * v[..., None, :]
        return q * scale @ state, state

    o_BTJRV, state = run_steps(step, state, q, k, v, decay_BTJK)
    return o_BTJRV.flatten(2, 3).to(v_BTJV.dtype), state


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
    """Same result in O(T / chunk) steps of matrix products; `chunk` is a power of two. Derivatives beyond a first
    backward are those of the definition.

    With the scores A of a chunk (decayed dot products of each token with those up to it), its queries Q decayed since
    the chunk's start, its keys K decayed until the chunk's end and d its product of decays:

        O = A V + Q S,      S_next = diag(d) S + K^T V
    """
    (batch, time, heads, channels), kv_heads = q_BTHK.shape, k_BTJK.shape[2]
    compute = torch.promote_types(v_BTJV.dtype, torch.float32)
    q, k, v, g = (x.to(compute) for x in (q_BTHK, k_BTJK, v_BTJV, g_BTJK))
    state = v.new_zeros(batch, kv_heads, channels, v.shape[-1]) if state_BJKV is None else state_BJKV.to(compute)
    q, group = q * (channels**-0.5 if scale is None else scale), heads // kv_heads
    k, v, g, state = _for_query_heads(group, k, v, g, state)
    chunk = min(chunk, 1 << max(0, time - 1).bit_length())
    inputs = pad_to_chunks(chunk, q, k, v, g)
    o_BTHV, state_BHKV, *_ = _forward(*inputs, starts(doc_ids_BT, inputs[0].shape[1]), state, chunk)
    return o_BTHV[:, :time].to(v_BTJV.dtype), state_BHKV[:, ::group]


def _for_query_heads(group, k_BTJK, v_BTJV, g_BTJK, state_BJKV):
    """Keys, values, decays and the state of a key/value head, once for each query head of its group."""
    if group == 1:
        return k_BTJK, v_BTJV, g_BTJK, state_BJKV
    k_BTHK, v_BTHV, g_BTHK = (x.repeat_interleave(group, dim=2) for x in (k_BTJK, v_BTJV, g_BTJK))
    return k_BTHK, v_BTHV, g_BTHK, None if state_BJKV is None else state_BJKV.repeat_interleave(group, dim=1)


# A custom operator, because a compiler would unroll the loop over chunks: minutes for each layer of a model.
@torch.library.custom_op("canonlm::gated_linear_attention", mutates_args=())
@outside_autocast
def _forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, starts: Tensor | None, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Full chunks of tokens. Returns (o, the next state, and for the backward scores and states of all chunks)."""
    o, _, scores, states = _outputs(q, k, v, g, starts, state, chunk)
    states[0] = state.flatten(0, 1)
    for chunks, tokens in segments(k, chunk):
        q_, k_, v_, decay = _segment(q, k, v, g, starts, tokens, chunk)
        decayed = decay_in_blocks(q_[None], k_, decay)
        write_scores(scores[None, chunks], q_[None], k_, decay, decayed)
        borders = states[chunks.start : chunks.stop + 1]
        torch.matmul(decayed.k.mT, v_, out=borders[1:])
        scan(borders, decayed.total[..., None])
        from_chunks(scores[chunks] @ v_ + decayed.q[0] @ borders[:-1], o[:, tokens])
    return o, states[-1].view_as(state).clone(), scores, states


@_forward.register_fake
def _outputs(q, k, v, g, starts, state, chunk):
    chunks, rows = k.shape[1] // chunk, k.shape[0] * k.shape[2]
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        v.new_empty(chunks, rows, chunk, chunk),
        v.new_empty(chunks + 1, rows, *state.shape[2:]),
    )


@torch.library.custom_op("canonlm::gated_linear_attention_backward", mutates_args=())
@outside_autocast
def _backward(
    do: Tensor,
    dstate: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    starts: Tensor | None,
    scores: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of q, k, v, g and the state, whose gradient runs the same recurrence from the end.

    g_t scales whatever passes from before t to t or later, so dg_t follows from the others: the sum of
    q_s dq_s - k_s dk_s over s >= t in the chunk, and of S dS at the chunk's end.
    """
    gradients = _gradients(do, dstate, q, k, v, g, starts, scores, states)
    chunk, dborder = scores.shape[-1], dstate.flatten(0, 1)
    later = scores.new_ones(chunk, chunk).triu_()
    for chunks, tokens in reversed(segments(k, chunk)):
        q_, k_, v_, decay = _segment(q, k, v, g, starts, tokens, chunk)
        do_ = to_chunks(do[:, tokens], chunk)
        decayed = decay_in_blocks(q_[None], k_, decay)
        borders = states[chunks.start : chunks.stop + 1]
        dborders = torch.empty_like(borders)
        dborders[-1] = dborder
        torch.matmul(decayed.q[0].mT, do_, out=dborders[:-1])
        scan(dborders, decayed.total[..., None], backwards=True)
        dborder = dborders[0]
        dq, dk = do_ @ borders[:-1].mT, v_ @ dborders[1:].mT
        scores_backward((do_ @ v_.mT)[None], q_[None], k_, decay, decayed, dq[None], dk)
        dv = scores[chunks].mT @ do_ + decayed.k @ dborders[1:]
        dg = q_ * dq - k_ * dk
        dg[:, :, -1] += (borders[1:] * dborders[1:]).sum(-1)
        dg = (later.expand_as(scores[chunks]) @ dg).masked_fill_(decay == 0, 0)
        for gradient, part in zip(gradients[:-1], (dq, dk, dv, dg), strict=True):
            from_chunks(part, gradient[:, tokens])
    gradients[-1].copy_(dborder.view_as(dstate))
    return gradients


@_backward.register_fake
def _gradients(do, dstate, q, k, v, g, starts, scores, states):
    return tuple(x.new_empty(x.shape) for x in (q, k, v, g, dstate))


def _definition(q, k, v, g, starts, state):
    doc_ids = None if starts is None else starts.cumsum(1)
    return gated_linear_attention_recurrent(q, k, v, g, scale=1.0, state_BJKV=state, doc_ids_BT=doc_ids)


_forward.register_autograd(derivatives(_backward, _definition), setup_context=save_inputs)


def _segment(q, k, v, g, starts, tokens: slice, chunk: int) -> tuple[Tensor, ...]:
    """Queries, keys, values and decays of some chunks, `[N, X, C, …]`."""
    decay = decays(g[:, tokens], None if starts is None else starts[:, tokens])
    return tuple(to_chunks(x, chunk) for x in (q[:, tokens], k[:, tokens], v[:, tokens], decay))


def _by_kernel(q_BTHK, k_BTJK, v_BTJV, g_BTJK, scale, state_BJKV, documents):
    """fla's `chunk_gla`, which needs equal numbers of key/value and query heads: the heads of a group share a state."""
    group = q_BTHK.shape[2] // k_BTJK.shape[2]
    k_BTHK, v_BTHV, g_BTHK, state_BHKV = _for_query_heads(group, k_BTJK, v_BTJV, g_BTJK, state_BJKV)
    inputs = {"q": q_BTHK.to(v_BTHV.dtype), "k": k_BTHK.to(v_BTHV.dtype), "v": v_BTHV, "g": g_BTHK.to(torch.float32)}
    o_BTHV, state_BHKV = fla.run("gla", "chunk_gla", inputs, state_BHKV, documents, scale=scale)
    return o_BTHV, state_BHKV[:, ::group]


def _trial_inputs(generator: torch.Generator, width: int) -> Inputs:
    tokens = {
        "q": normal(generator, *SHAPE, width),
        "k": normal(generator, *SHAPE, width),
        "v": normal(generator, *SHAPE, width),
        "g": log_decays(generator, *SHAPE, width),
    }
    return tokens, states(generator, width)


KERNEL = Kernel(
    "fla chunk_gla",
    lambda q, k, v, g, state, doc_ids: _by_kernel(q, k, v, g, None, state, as_documents(doc_ids)),
    as_form(gated_linear_attention_recurrent, "state_BJKV"),
    _trial_inputs,
    wide=("g",),
)
_kernel_is_right = judge(KERNEL)
