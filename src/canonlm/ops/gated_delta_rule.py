"""The gated delta rule: a fast-weight memory that forgets by a gate and corrects what it predicts wrongly.

    S_t = exp(g_t) S_{t-1},     S_t += k_t (beta_t (v_t - S_t^T k_t))^T,     o_t = (scale q_t)^T S_t

Yang, Kautz, Hatamizadeh, Gated Delta Networks (arXiv 2412.06464), Eq. 10; the chunked form is their Section 3.3.

Shapes: B batch, T time, H heads, K key dimension, V value dimension; N chunks of C tokens. `g_BTH` <= 0 are
log-decays, `beta_BTH` the strengths of the writes. The state S is `[B, H, K, V]`. q and k arrive normalised.
"""

import torch
from torch import Tensor

CHUNK = 64


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick the form for where the tensors live. Returns (o_BTHV in the dtype of v, the state in at least float32)."""
    inputs = (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    one_step = q_BTHK.shape[1] == 1 and not torch.is_grad_enabled()
    form = gated_delta_rule_recurrent if one_step else gated_delta_rule_chunked
    return form(*inputs, scale=scale, state_BHKV=state_BHKV, doc_ids_BT=doc_ids_BT)


def gated_delta_rule_recurrent(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, one step at a time: what every other form is tested against, and how we decode."""
    compute = torch.promote_types(v_BTHV.dtype, torch.float32)
    q, k, v, g, beta = (x.to(compute) for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH))
    batch, time, heads, key_dim = q.shape
    q = q * (key_dim**-0.5 if scale is None else scale)
    state = v.new_zeros(batch, heads, key_dim, v.shape[-1]) if state_BHKV is None else state_BHKV.to(compute)
    outputs = []
    for t in range(time):
        decay = g[:, t].exp()
        if doc_ids_BT is not None and t > 0:
            decay = decay * (doc_ids_BT[:, t] == doc_ids_BT[:, t - 1])[:, None]
        state = state * decay[..., None, None]
        error = v[:, t] - (state * k[:, t, :, :, None]).sum(-2)
        state = state + k[:, t, :, :, None] * (beta[:, t, :, None] * error)[..., None, :]
        outputs.append((state * q[:, t, :, :, None]).sum(-2))
    return torch.stack(outputs, 1).to(v_BTHV.dtype) if outputs else torch.empty_like(v_BTHV), state


def gated_delta_rule_chunked(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    state_BHKV: Tensor | None = None,
    doc_ids_BT: Tensor | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Same result in O(T/chunk) steps."""
    compute = torch.promote_types(v_BTHV.dtype, torch.float32)
    batch, time, heads, key_dim = q_BTHK.shape
    value_dim = v_BTHV.shape[-1]
    state = v_BTHV.new_zeros(batch, heads, key_dim, value_dim, dtype=compute) if state_BHKV is None else state_BHKV.to(compute)
    if time == 0:
        return torch.empty_like(v_BTHV), state
    pad = -time % chunk
    q, k, v, g, beta = (
        torch.nn.functional.pad(x.to(compute), (0,) * (2 * (x.ndim - 2)) + (0, pad)).unflatten(1, (-1, chunk)).transpose(2, 3).transpose(1, 2)
        for x in (q_BTHK, k_BTHK, v_BTHV, g_BTH[..., None], beta_BTH[..., None])
    )  # [B, H, N, C, .]
    q = q * (key_dim**-0.5 if scale is None else scale)
    b = g[..., 0].double().cumsum(-1)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    if doc_ids_BT is None:
        same = lower
        enters = leaves = torch.ones((), dtype=torch.bool, device=q.device)
    else:
        docs = torch.cat([doc_ids_BT[:, :1], doc_ids_BT, doc_ids_BT[:, -1:].expand(-1, pad)], 1)
        before = docs[:, :-1:chunk][:, None, :, None]
        docs = docs[:, 1:].unflatten(1, (-1, chunk))[:, None]
        same = (docs[..., :, None] == docs[..., None, :]) & lower
        enters, leaves = docs == before, docs == docs[..., -1:]
    decay = (b[..., :, None] - b[..., None, :]).masked_fill(~same, -torch.inf).to(compute).exp()
    start = b.masked_fill(~enters, -torch.inf).to(compute).exp()[..., None]
    end = (b[..., -1:] - b).masked_fill(~leaves, -torch.inf).to(compute).exp()[..., None]
    scores = (q @ k.mT) * decay
    system = (k * beta @ k.mT) * decay
    solution = torch.linalg.solve_triangular(system, torch.cat([v, k * start], -1) * beta, upper=False, unitriangular=True)
    u0, w = solution.split([value_dim, key_dim], -1)
    q, k, through = q * start, (k * end).mT, start[..., -1:, :]
    states, updates = [], []
    for n in range(b.shape[2]):
        states.append(state)
        u = u0[:, :, n] - w[:, :, n] @ state
        state = state * through[:, :, n] + k[:, :, n] @ u
        updates.append(u)
    o = q @ torch.stack(states, 2) + scores @ torch.stack(updates, 2)
    o = o.transpose(1, 2).transpose(2, 3).flatten(1, 2)[:, :time]
    return o.to(v_BTHV.dtype), state
