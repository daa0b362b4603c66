"""Causal attention within the documents of packed rows, without a mask.

    y_t = sum over the tokens s <= t of t's document of p_ts v_s,      p_t = softmax_s(E^-1/2 q_t . k_s)

Shapes: B batch, T time, H query heads, J key/value heads (query head h reads key/value head h // (H / J)), E channels.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from canonlm.ops.compiled import cached_constant
from canonlm.ops.derivatives import by_definition
from canonlm.ops.selftest import SHAPE, Inputs, Kernel, judge, normal
from canonlm.ops.varlen import Documents, documents_of

LARGEST_HEAD = 192
"""Channels of a head: some GPUs have no backward for larger heads."""


def takes(x: Tensor, head_dim: int) -> bool:
    """Whether `packed_attention` can be used for heads projected from `x`: on a GPU, in half precision (autocast's,
    where that is on), where a trial has shown that the kernel is right."""
    fits = head_dim % 8 == 0 and head_dim <= LARGEST_HEAD
    half = x.is_cuda and _dtype(x) in (torch.bfloat16, torch.float16)
    return half and fits and not by_definition() and _kernel_is_right(torch.is_grad_enabled())


def packed_attention(q_BTHE: Tensor, k_BTJE: Tensor, v_BTJE: Tensor, documents: Documents) -> Tensor:
    """The sums above, `[B, T, H, E]`, by torch's kernel for rows of unequal lengths (flash attention)."""
    from torch.nn.attention.varlen import varlen_attn  # imported here, as it takes seconds

    # Since torch 2.11 it has window_size in place of is_causal, and takes fewer key/value than query heads since 2.12.
    options: dict[str, Any] = {"window_size": (-1, 0)} if _kernel_takes("window_size") else {"is_causal": True}
    if _kernel_takes("enable_gqa"):
        options["enable_gqa"] = True
    else:
        group = q_BTHE.shape[2] // k_BTJE.shape[2]
        k_BTJE, v_BTJE = (x.repeat_interleave(group, dim=2) for x in (k_BTJE, v_BTJE))
    q, k, v = (x.to(_dtype(x)).flatten(0, 1) for x in (q_BTHE, k_BTJE, v_BTJE))
    limits, longest = documents.cu_seqlens, documents.max_length
    assert limits is not None
    y = varlen_attn(q, k, v, limits, limits, longest, longest, **options)
    return y.unflatten(0, q_BTHE.shape[:2])  # type: ignore[union-attr]


def packed_attention_by_mask(q_BTHE: Tensor, k_BTJE: Tensor, v_BTJE: Tensor, doc_ids_BT: Tensor | None) -> Tensor:
    """The definition, with all scores in memory; None: one document per row."""
    time, kv_heads = q_BTHE.shape[1], k_BTJE.shape[2]
    q_BTJRE = q_BTHE.unflatten(2, (kv_heads, -1)) * q_BTHE.shape[-1] ** -0.5
    scores_BJRTS = torch.einsum("btjre,bsje->bjrts", q_BTJRE, k_BTJE)
    sees_BTS = torch.ones(1, time, time, dtype=torch.bool, device=q_BTHE.device).tril()
    if doc_ids_BT is not None:
        sees_BTS = sees_BTS & (doc_ids_BT[:, :, None] == doc_ids_BT[:, None])
    p_BJRTS = scores_BJRTS.masked_fill(~sees_BTS[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bjrts,bsje->btjre", p_BJRTS, v_BTJE).flatten(2, 3)


@cached_constant
def _kernel_takes(name: str) -> bool:
    """Whether the installed `varlen_attn` has an argument of that name."""
    from torch.nn.attention.varlen import varlen_attn

    return name in inspect.signature(varlen_attn).parameters


def _dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _by_kernel(q, k, v, state, doc_ids):
    if doc_ids is None:
        doc_ids = torch.zeros(q.shape[:2], dtype=torch.long, device=q.device)
    return _with_state(packed_attention(q, k, v, documents_of(doc_ids)), state)


def _with_state(y_BTHE: Tensor, state_BHE: Tensor | None) -> tuple[Tensor, Tensor]:
    """Trials expect a recurrence: the last output plus the initial state stands for its final state."""
    return y_BTHE, y_BTHE[:, -1] if state_BHE is None else y_BTHE[:, -1] + state_BHE


def _trial_inputs(generator: torch.Generator, width: int) -> Inputs:
    batch, time, heads = SHAPE
    tokens = {
        name: normal(generator, batch, time, number, width) for name, number in (("q", heads), ("k", 1), ("v", 1))
    }
    return tokens, normal(generator, batch, heads, width)


KERNEL = Kernel(
    "torch varlen_attn",
    _by_kernel,
    lambda q, k, v, state, doc_ids: _with_state(packed_attention_by_mask(q, k, v, doc_ids), state),
    _trial_inputs,
)
_kernel_is_right = judge(KERNEL)
