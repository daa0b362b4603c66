"""Gated linear attention: a matrix state whose rows (key channels) decay, each at its own data-dependent rate.

    S_t = diag(exp(g_t)) S_{t-1} + k_t v_t^T,      o_t = (scale q_t)^T S_t

Yang et al. 2023, Gated Linear Attention Transformers with Hardware-Efficient Training (arXiv 2312.06635), Eq. 3.

Shapes: B batch, T time, H query heads, J key/value heads (query head h reads key/value head h // (H / J)), K key
channels, V value channels. `g_BTJK` are log-decays <= 0. A token with k = 0 and g = 0 leaves the state as it is.
"""

import torch
from torch import Tensor

from canonlm.ops import fla
from canonlm.ops.precision import outside_autocast


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
    if fla.takes(v_BTJV, (torch.float32, torch.bfloat16, torch.float16)):
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
    q_BTJRK = q_BTHK.to(compute).unflatten(2, (kv_heads, heads // kv_heads))
    q_BTJRK = q_BTJRK * (channels**-0.5 if scale is None else scale)
    k_BTJK, v = k_BTJK.to(compute), v_BTJV.to(compute)
    decay_BTJK = decays(g_BTJK.to(compute), doc_ids_BT)
    state = v.new_zeros(batch, kv_heads, channels, v.shape[-1]) if state_BJKV is None else state_BJKV.to(compute)
    outputs = [v.new_empty(batch, 0, kv_heads, heads // kv_heads, v.shape[-1])]
    for t in range(time):
        state = decay_BTJK[:, t, :, :, None] * state + k_BTJK[:, t, :, :, None] * v[:, t, :, None, :]
        outputs.append((q_BTJRK[:, t] @ state)[:, None])
    return torch.cat(outputs, dim=1).flatten(2, 3).to(v_BTJV.dtype), state


def decays(g_BTX: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
    """What the state is multiplied by at each token: exp(g), and zero where a document starts.

    A product of decays over a stretch of time is then exactly zero if the stretch crosses into another document.
    """
    decay_BTX = g_BTX.exp()
    if doc_ids_BT is None:
        return decay_BTX
    starts_BT = doc_ids_BT != torch.cat([doc_ids_BT[:, :1], doc_ids_BT[:, :-1]], dim=1)
    return decay_BTX.masked_fill(starts_BT.view(*starts_BT.shape, *(1,) * (g_BTX.ndim - 2)), 0)


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
    return gated_linear_attention_recurrent(
        q_BTHK, k_BTJK, v_BTJV, g_BTJK, scale=scale, state_BJKV=state_BJKV, doc_ids_BT=doc_ids_BT
    )


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
