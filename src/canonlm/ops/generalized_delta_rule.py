"""The generalised delta rule of RWKV-7: a state decays by channel, and forgets what it holds under a removal key.

    S_t = diag(exp(g_t)) S_{t-1} - (a_t * c_t) (S_{t-1}^T c_t)^T + k_t v_t^T,      o_t = S_t^T q_t

Peng et al. 2025 (arXiv 2503.14456), Section 4. The gated delta rule computes this in two steps per token: one decays
and removes, the other adds. What is removed is read before the state decays, so by a key divided by the decay.

Shapes: B batch, T time, H heads, K key channels, V value channels.
"""

import torch
from torch import Tensor

from canonlm.ops.gated_delta_rule import gated_delta_rule
from canonlm.ops.varlen import Documents


def generalized_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    a_BTHK: Tensor,
    c_BTHK: Tensor,
    real_BTH: Tensor,
    *,
    state_BHKV: Tensor | None = None,
    documents: Documents | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence above. Returns (o_BTHV in the dtype of `v`, the state after the last token in at least float32).

    `g` is at most zero, and zero at padding; c has norm 1; `real` is 1, and 0 at padding. `documents`: the state is
    zero before the first token of each. `state_BHKV` (zero unless given): before the first token.
    """

    def steps(first: Tensor, second: Tensor) -> Tensor:
        return torch.stack([first, second], dim=2).flatten(1, 2)

    return gated_delta_rule(
        q_BTHK,
        steps((a_BTHK * c_BTHK).to(v_BTHV.dtype), k_BTHK),
        steps(torch.zeros_like(v_BTHV), v_BTHV),
        g_BTHK,
        steps(real_BTH, real_BTH),
        steps((c_BTHK * (-g_BTHK).exp()).to(g_BTHK.dtype), torch.zeros_like(g_BTHK)),
        steps=2,
        scale=1.0,
        state_BHKV=state_BHKV,
        documents=documents,
    )
