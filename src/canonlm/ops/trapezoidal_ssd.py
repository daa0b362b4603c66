"""Mamba-3's recurrence: state-space duality whose token adds a mean of its input and of the one before, R of each.

    S_t = exp(g_t) (S_{t-1} + before_t X_{t-1} K_{t-1}^T) + now_t X_t K_t^T,      Y_t = S_t Q_t

Lahoti et al. 2026 (arXiv 2603.15569): with g = dt A, before = (1 - lambda) dt and now = lambda dt it is the
exponential-trapezoidal rule. The columns of X_t (P x R), K_t and Q_t (N x R) are the inputs, keys and queries of a
token: R = 1 is SISO, R > 1 MIMO.

One SSD (`ops/ssd`) computes it, of the state that a token meets, M_t = S_t - now_t X_t K_t^T:

    M_t = exp(g_t) (M_{t-1} + (now_{t-1} + before_t) X_{t-1} K_{t-1}^T),      Y_t = M_t Q_t + now_t X_t K_t^T Q_t

No term is subtracted from a larger one. The SSD takes the R inputs of a token one after the other.

Shapes: B batch, T time, R inputs of a token, H heads, P channels of a head, N state size.
"""

from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from canonlm.ops.autocast import outside_autocast
from canonlm.ops.ssd import ssd
from canonlm.ops.varlen import Documents, previous_real, starts

State = tuple[Tensor, Tensor, Tensor]
"""After a token: S `[B, H, P, N]`, its keys `[B, R, H, N]` and its inputs `[B, R, H, P]`, in at least float32."""


@outside_autocast
def trapezoidal_ssd(
    x_BTRHP: Tensor,
    k_BTRHN: Tensor,
    q_BTRHN: Tensor,
    g_BTH: Tensor,
    before_BTH: Tensor,
    now_BTH: Tensor,
    *,
    state: State | None = None,
    real_BT: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, State]:
    """The recurrence above. Returns (y_BTRHP in at least float32, the state after the last real token).

    `g` is at most zero, `before` and `now` at least zero; all three are zero at padding. `real_BT`: False at padding
    (None: there is none), which is not the token before another. `documents`: the state and the token before are zero
    at the first token of each. `state` (zeros unless given): before the first token, of the same document.
    """
    (batch, time, rank, heads, channels), size = x_BTRHP.shape, k_BTRHN.shape[-1]
    compute = torch.promote_types(x_BTRHP.dtype, torch.float32)
    state_BHPN, k_BRHN, x_BRHP = state or (
        g_BTH.new_zeros(shape, dtype=compute)
        for shape in ((batch, heads, channels, size), (batch, rank, heads, size), (batch, rank, heads, channels))
    )
    latest = None if real_BT is None else previous_real(pad(real_BT, (0, 1))) + 1  # of each token and of the end
    k_before, k_last = _shift(k_BTRHN, k_BRHN, latest)
    x_before, x_last = _shift(x_BTRHP, x_BRHP, latest)
    now_before, now_last = _shift(now_BTH, now_BTH.new_zeros(batch, heads), latest)
    weight_BTH = g_BTH.exp() * (now_before + before_BTH)
    first_BT = starts(None if documents is None else documents.ids)
    for nothing_BT in (None if real_BT is None else ~real_BT, first_BT):
        if nothing_BT is not None:
            weight_BTH = weight_BTH.masked_fill(nothing_BT[..., None], 0)
    v_BTRHP = (weight_BTH[:, :, None, :, None] * x_before).to(x_BTRHP.dtype)
    g_BSH = pad(g_BTH[:, :, None], (0, 0, 0, rank - 1)).flatten(1, 2)  # a token decays before its first input
    y_BSHP, state_BHPN = ssd(
        v_BTRHP.flatten(1, 2),
        torch.ones_like(g_BSH),
        g_BSH,
        k_before.flatten(1, 2),
        q_BTRHN.flatten(1, 2),
        state_BHPN=state_BHPN,
        documents=documents if documents is None or rank == 1 else documents.spread(rank),
    )
    y_BTRHP, outputs = y_BSHP.unflatten(1, (time, rank)), []
    x, k, q, v, k_before = (part.to(compute) for part in (x_BTRHP, k_BTRHN, q_BTRHN, v_BTRHP, k_before))
    for r in range(rank):
        q_r = q[:, :, r : r + 1]
        y_r = y_BTRHP[:, :, r] + now_BTH[..., None] * _read(q_r, k, x)
        if r + 1 < rank:  # the SSD gave this query the inputs up to its own
            y_r = y_r + _read(q_r, k_before[:, :, r + 1 :], v[:, :, r + 1 :])
        outputs.append(y_r)
    x_last, k_last = x_last.to(compute), k_last.to(compute)
    own = now_last[:, None, :, None, None] * x_last[..., None] * k_last[..., None, :]
    return torch.stack(outputs, dim=2), (state_BHPN + own.sum(1), k_last, x_last)


def _read(q_BT1HN: Tensor, k_BTRHN: Tensor, x_BTRHP: Tensor) -> Tensor:
    """`[B, T, H, P]`: what a query reads from a token's own inputs."""
    return ((q_BT1HN * k_BTRHN).sum(-1, keepdim=True) * x_BTRHP).sum(2)


def _shift(x_BTX: Tensor, last_BX: Tensor, latest: Tensor | None) -> tuple[Tensor, Tensor]:
    """`x` of the real token before each, and of the last one. last: that of the token before all."""
    x = torch.cat([last_BX[:, None].to(x_BTX.dtype), x_BTX], dim=1)
    if latest is not None:
        x = x.gather(1, latest.view(*latest.shape, *[1] * (x.ndim - 2)).expand(-1, -1, *x.shape[2:]))
    return x[:, :-1], x[:, -1]


def pack(state: State, angle_BHS: Tensor) -> Tensor:
    """`[B, H, …]`, as a cache keeps it: all numbers of a head, with its angles."""
    S, k_BRHN, x_BRHP = state
    return torch.cat(
        [part.flatten(2) for part in (S, k_BRHN.transpose(1, 2), x_BRHP.transpose(1, 2), angle_BHS)], dim=-1
    )


def unpack(packed: Tensor, channels: int, size: int, rank: int) -> tuple[State, Tensor]:
    """The state, and the angles `[B, H, S]`."""
    S, k, x, angle = packed.tensor_split(list(accumulate((channels * size, rank * size, rank * channels))), dim=-1)
    k_BRHN, x_BRHP = (part.unflatten(-1, (rank, -1)).transpose(1, 2) for part in (k, x))
    return (S.unflatten(-1, (channels, size)), k_BRHN, x_BRHP), angle
