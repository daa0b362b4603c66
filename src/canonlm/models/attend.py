"""Softmax attention over cached and new tokens, by the kernel that the configuration chooses (sdpa, flash, …).

All kernels but torch's own for packed rows are transformers' functions; masks come from `models/masks.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from canonlm.canon.layer import on_this_device
from canonlm.core.cache_name import CACHE
from canonlm.models.cache import Layout, keep_last
from canonlm.models.settings import Config
from canonlm.ops.context_parallel import own, to_heads, to_tokens
from canonlm.ops.packed_attention import packed_attention, takes

if TYPE_CHECKING:
    from canonlm.models.mixers.attention import Attention

Outputs = tuple[Tensor, Tensor | None]
"""`[B, T, H, E]`, and the weights if the kernel returns them."""


def needs_no_mask(config: Config, x_BTD: Tensor, training: bool) -> bool:
    """Whether attention can separate documents by their borders alone, without padding and cached tokens.

    Flash attention has no other way. "sdpa", which stands for torch's own kernels, can do so on a GPU in half
    precision, without ALiBi, dropout, sinks and windows. "eager" reads a mask, "flex_attention" a mask in blocks.
    """
    kernel = config._attn_implementation or ""
    if "flash" in kernel:
        return True
    plain = config.alibi is None and not config.attention_sink and config.sliding_window is None
    plain = plain and "mla" not in config.mixers and not (training and config.attention_dropout)
    return kernel == "sdpa" and plain and takes(x_BTD, config.head_dim)


def over_cached(
    mixer: "Attention",
    kept: tuple[Tensor, Tensor],
    layout: Layout,
    cache: Cache | None,
    kwargs: dict[str, Any],
    sums: Callable[[Tensor, Tensor, dict[str, Any]], Outputs],
) -> Outputs:
    """`sums(keys, values, kwargs)` over cached tokens and these, whose keys and values the cache then keeps, too.

    kept: theirs, `[B, H, T, E]`. kwargs: for the kernel.
    """
    k_BHSE, v_BHSE = kept
    if isinstance(cache, Cache):
        k_BHSE, v_BHSE = cache.update(*kept, mixer.layer_idx)
    elif cache is not None and CACHE == "cache":
        k_BHSE, v_BHSE = cache.update(*kept, mixer.layer_idx, kwargs=kwargs)
    elif cache is not None:  # before transformers 5.24, the function for the kernel updates a paged cache
        kwargs = kwargs | {"cache": cache}
    if layout.without_mask:
        assert layout.documents is not None
        # Nothing was cached: the new keys are all there are; a static cache has empty places after them.
        outputs = sums(*kept, kwargs | layout.documents.arguments())
    else:
        outputs = sums(k_BHSE, v_BHSE, kwargs)
    if cache is not None and layout.key_order is not None and mixer.window is not None:
        keep_last(cache.layers[mixer.layer_idx], k_BHSE, v_BHSE, layout.key_order)
    return outputs


def attend(
    mixer: "Attention",
    q_BHTE: Tensor,
    k_BHSE: Tensor,
    v_BHSE: Tensor,
    mask: Tensor | None,
    layout: Layout,
    kwargs: dict[str, Any],
) -> Outputs:
    """The sums of `mixers/attention.py`. With a span, the mask is of whole rows, and weights are of this process's
    heads."""
    config, span = mixer.config, layout.span
    q_BHTE, k_BHSE, v_BHSE = (to_heads(x, span, time=2, heads=1) for x in (q_BHTE, k_BHSE, v_BHSE))
    kernel = config._attn_implementation
    if not q_BHTE.numel():  # of rows without tokens, the functions below find no shape of the output
        y_BHTE = nn.functional.scaled_dot_product_attention(q_BHTE, k_BHSE, v_BHSE, enable_gqa=True)
        return to_tokens(y_BHTE.transpose(1, 2), span), None
    if layout.without_mask and kernel == "sdpa":
        assert layout.documents is not None
        q_BTHE, k_BTHE, v_BTHE = (x.transpose(1, 2) for x in (q_BHTE, k_BHSE, v_BHSE))
        return to_tokens(packed_attention(q_BTHE, k_BTHE, v_BTHE, layout.documents), span), None
    mask = mask if mask is None or mask.shape[1] == 1 else own(mask, span, dim=1)
    kwargs = {**kwargs, "dropout": config.attention_dropout if mixer.training else 0.0, "scaling": mixer.scaling}
    if mixer.window is not None:
        kwargs["sliding_window"] = mixer.window  # flash attention has no mask to read it from
    function = ALL_ATTENTION_FUNCTIONS.get_interface(kernel, eager_attention_forward)
    sinks_H = own(on_this_device(mixer.sinks), span, dim=0) if config.attention_sink else None
    if sinks_H is None or kernel not in ("sdpa", "eager"):
        kwargs |= {} if sinks_H is None else {"s_aux": sinks_H}
        y_BTHE, weights = function(mixer, q_BHTE, k_BHSE, v_BHSE, mask, **kwargs)
        return to_tokens(y_BTHE, span), weights
    q, k, v, mask = _with_sinks(q_BHTE, k_BHSE, v_BHSE, mask, sinks_H / mixer.scaling)
    y_BTHE, weights = function(mixer, q, k, v, mask, **kwargs)
    return to_tokens(y_BTHE[:, -q_BHTE.shape[2] :, :, :-1], span), None if weights is None else weights[..., 1:]


def _with_sinks(
    q_BHTE: Tensor, k_BJSE: Tensor, v_BJSV: Tensor, mask: Tensor | None, sinks_H: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, values and mask for a kernel without sinks: the first key has value 0, and its product with every
    query of a head is that head's sink.

    Heads share keys, so the sinks are in one more channel of the queries: it is 1 in that key, and 0 in the others.
    A kernel that is causal without a mask gets one more query for that key; its output is the first.
    """
    q = torch.cat([q_BHTE, sinks_H.to(q_BHTE.dtype)[:, None, None].expand(*q_BHTE.shape[:3], 1)], dim=-1)
    one = nn.functional.pad(k_BJSE.new_ones(1), (k_BJSE.shape[3], 0)).expand(*k_BJSE.shape[:2], 1, -1)
    k = torch.cat([one, nn.functional.pad(k_BJSE, (0, 1))], dim=2)
    v = nn.functional.pad(v_BJSV, (0, 1, 1, 0))
    if mask is None:
        return (q if q.shape[2] == 1 else nn.functional.pad(q, (0, 0, 1, 0))), k, v, None
    return q, k, v, nn.functional.pad(mask, (1, 0), value=mask.dtype == torch.bool)


def mean_reach(config: Config, seq_len: int, mixer: str) -> float:
    """The number of tokens that a token attends to, on average over tokens and the layers of a mixer."""
    windows = [config.window(i) for i in config.attending if config.mixers[i] == mixer]
    return sum(reach(seq_len, window) for window in windows) / len(windows)


def reach(seq_len: int, window: int | None) -> float:
    """The number of tokens that a token attends to, on average over tokens. Causal: half of them. (Counting all pairs
    gives twice that.)"""
    window = min(seq_len, window or seq_len)
    return window - window**2 / (2 * seq_len)
