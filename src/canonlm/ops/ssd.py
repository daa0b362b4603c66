"""Mamba-2's state-space duality: a matrix state per head that decays by one number per token.

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,      y_t = S_t C_t

Dao & Gu 2024, Transformers are SSMs (arXiv 2405.21060), Sections 2 and 6: linear attention with queries C, keys B,
values dt x and a scalar decay. (The skip D x is the mixer's.)

Shapes: B batch, T time, H heads, P channels of a head, G groups (head h reads group h // (H / G)), N state size.
`A_H` is negative, `dt_BTH` positive; a token with dt = 0 leaves the state as it is.
"""

import torch
from torch import Tensor

from canonlm.ops import fla
from canonlm.ops.gated_linear_attention import decays
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
    if fla.takes(x_BTHP, (torch.float32, torch.bfloat16, torch.float16)):
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
    (batch, time, heads, channels), groups = x_BTHP.shape, B_BTGN.shape[2]
    compute = torch.promote_types(x_BTHP.dtype, torch.float32)
    dt = dt_BTH.to(compute)
    v_BTHP = x_BTHP.to(compute) * dt[..., None]
    B_BTHN, C_BTHN = (x.to(compute).repeat_interleave(heads // groups, dim=2) for x in (B_BTGN, C_BTGN))
    decay_BTH = decays(dt * A_H.to(compute), doc_ids_BT)
    state = dt.new_zeros(batch, heads, channels, B_BTGN.shape[-1]) if state_BHPN is None else state_BHPN.to(compute)
    outputs = [v_BTHP[:, :0]]
    for t in range(time):
        state = decay_BTH[:, t, :, None, None] * state + v_BTHP[:, t, :, :, None] * B_BTHN[:, t, :, None, :]
        outputs.append((state @ C_BTHN[:, t, :, :, None])[None, ..., 0].transpose(0, 1))
    return torch.cat(outputs, dim=1).to(x_BTHP.dtype), state


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
    return ssd_recurrent(x_BTHP, dt_BTH, A_H, B_BTGN, C_BTGN, state_BHPN=state_BHPN, doc_ids_BT=doc_ids_BT)


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
