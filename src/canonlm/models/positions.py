"""Positions in attention: rotations (RoPE) or penalties for distance (ALiBi)."""

import math

import torch
from torch import Tensor
from transformers import Cache

from canonlm.models.settings import Config
from canonlm.ops.compiled import materialize_on_any_device
from canonlm.ops.context_parallel import Span

Rotary = tuple[Tensor, Tensor] | None
"""(cos, sin), each `[B or 1, T, 1, rope_dim / 2]`; None: no rotary positions."""


def rotary_table(position_ids_BT: Tensor, rope_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of p * theta^(-2i / rope_dim), `[B, T, 1, rope_dim / 2]`, in at least float32 (RoFormer, Eq. 15)."""
    compute = torch.promote_types(dtype, torch.float32)
    exponents = torch.arange(0, rope_dim, 2, dtype=compute, device=position_ids_BT.device) / rope_dim
    angles = position_ids_BT[..., None, None].to(compute) * (1.0 / theta**exponents)
    # Compilers recompute a power and a cosine, as if they were cheap: on a GPU two of each for every channel of every
    # head in every layer, forward and backward; on a CPU, in the backward pass of Canon-B, a cosine per tap.
    return materialize_on_any_device(angles.cos()), materialize_on_any_device(angles.sin())


def rotate(x_BTHE: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """Rotate the pairs (i, i + rope_dim / 2) of the first rope_dim channels, in the first heads, and nothing else."""
    if heads < x_BTHE.shape[2]:
        return torch.cat([rotate(x_BTHE[:, :, :heads], cos, sin, heads), x_BTHE[:, :, heads:]], dim=2)
    half = cos.shape[-1]
    a, b, rest = x_BTHE[..., :half], x_BTHE[..., half : 2 * half], x_BTHE[..., 2 * half :]
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BTHE.dtype)
    return rotated if rest.shape[-1] == 0 else torch.cat([rotated, rest], dim=-1)


def running_angles(turns_BTHS: Tensor, before_BHS: Tensor | None, span: Span | None = None) -> Tensor:
    """The sum of all turns up to each token, from an angle `before` (None: 0), summed in float64: a long sum in float32
    has no digits left for the angle. With a span, the turns of the processes before come first."""
    turns = turns_BTHS.double()
    start = 0.0 if before_BHS is None else before_BHS[:, None]
    if span is not None:
        start = span.sum_before(turns.sum(1, keepdim=True))
    return ((turns.cumsum(1) + start) % math.tau).to(turns_BTHS.dtype)


def lowest_score(dtype: torch.dtype) -> float:
    """The number by which a mask hides a key. Eager attention's softmax is in float32, where lower numbers are -inf,
    and a row of padding alone is NaN."""
    return torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min


def alibi_mask(
    config: Config, mask: Tensor, attention_mask: Tensor | None, cache: Cache | None, dtype: torch.dtype
) -> Tensor:
    """`mask` with each head's penalty for distance: from `[B, 1, T, S]` to `[B, H, T, S]`, heads h = 1 … H.

    alibi = "alibi" (arXiv 2108.12409): 2^(-8h/H) * distance is subtracted from the scores. "hard" (arXiv 2402.01032):
    head h of the first half sees only the nearest h tokens, the current one included; the other heads see all.

    `mask` is what `create_causal_mask` makes: True at visible keys, or the number to add to their scores; so is the
    result, numbers with "alibi". `attention_mask` covers cached and new tokens.
    """
    columns = torch.arange(mask.shape[3], device=mask.device)
    places_BS = columns[None]
    if attention_mask is not None and attention_mask.ndim == 2:
        # Padding takes no place. A static cache has columns without tokens, which `mask` hides.
        places_BS = (attention_mask != 0).cumsum(1)
        places_BS = torch.nn.functional.pad(places_BS, (0, columns.shape[0] - places_BS.shape[1]))
    past = 0 if cache is None else cache.get_seq_length()
    now = past + columns[: mask.shape[2]]
    places_BT = places_BS.index_select(1, now)
    distance_B1TS = (places_BT[:, :, None] - places_BS[:, None])[:, None]
    num_heads = config.num_attention_heads
    heads_H11 = torch.arange(1, num_heads + 1, device=mask.device)[:, None, None]
    lowest = lowest_score(dtype)
    if config.alibi == "hard":
        seen_BHTS = (distance_B1TS < heads_H11) | (heads_H11 > num_heads // 2)
        return torch.where(seen_BHTS, mask, False if mask.dtype == torch.bool else lowest)
    # Not the keys' places, which differ from distances by a constant only: in bfloat16 2000 and 2001 are one number.
    slopes_H11 = torch.exp2(-8 / num_heads * heads_H11.to(torch.promote_types(dtype, torch.float32)))
    bias_BHTS = (-slopes_H11 * distance_B1TS).to(dtype)
    if mask.dtype != torch.bool:
        return (bias_BHTS + mask).clamp(min=lowest)
    # Padding sees no key: with one number everywhere it would see all of them, later ones included.
    hidden_TS = bias_BHTS.new_full((), lowest / 2).where(columns <= now[:, None], lowest)
    return torch.where(mask, bias_BHTS, hidden_TS)
