"""Canon-D, activation and product of a gated MLP, act(canon(gate)) * canon(up), in one kernel."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from canonlm.canon.layer import plain_taps, untouched
from canonlm.ops.gated_conv_cpu import convolve_gated, usable_gated

ACTS = {type(ACT2FN[name]): name for name in ("silu", "gelu_pytorch_tanh")}
"""Activations that a kernel can compute between gate and up, by class."""


def gated_on_cpu(
    canons: Sequence[Any],
    gate: Tensor,
    up: Tensor,
    act: nn.Module,
    *,
    attention_mask: Tensor | None,
    doc_ids: Tensor | None,
    exact: bool = False,
) -> Tensor | None:
    """The result for `[B, T, C]` inputs without cached tokens; None: the kernel cannot be used. exact: use it only if
    its results equal those of PyTorch's SiLU and product bit by bit."""
    if ACTS.get(type(act)) != "silu" or attention_mask is not None or not untouched(act):
        return None
    if (taps := plain_taps(canons, (gate, up))) is None:
        return None
    gate_taps, up_taps = taps
    if not usable_gated(gate, up, gate_taps, up_taps, exact=exact):
        return None
    return convolve_gated(gate, up, gate_taps, up_taps, doc_ids)
