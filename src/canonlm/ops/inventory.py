"""Every form of an op that a device uses, with the definition that it is tried against (`canonlm doctor`)."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from canonlm.ops import fla, gated_delta_rule, gated_linear_attention, ssd, trials
from canonlm.ops.causal_conv import causal_conv, conv_state
from canonlm.ops.trials import Kernel


class Form(NamedTuple):
    """dtypes: of inputs for which the device uses it. missing: why it cannot be used here ("": it can)."""

    kernel: Kernel
    used_for: str
    dtypes: tuple[torch.dtype, ...]
    missing: str = ""


def forms(device: torch.device) -> list[Form]:
    """Those that models on `device` use; on a GPU also those that would be used if they were there."""
    conv = Form(CONV, "Canon layers, short convolutions", (torch.float32, torch.bfloat16))
    if device.type != "cuda":
        return [conv, *(Form(kernel, used_for, (torch.float32, torch.bfloat16)) for kernel, used_for in _CHUNKED)]
    why = "" if fla.installed() else "flash-linear-attention cannot be imported (pip install 'canonlm[gpu]')"
    return [
        conv,
        *(Form(kernel, used_for, (torch.bfloat16,), why) for kernel, used_for in _FLA),
        *(Form(kernel, f"{used_for}, in float32", (torch.float32,)) for kernel, used_for in _CHUNKED),
    ]


_FLA = (
    (gated_linear_attention.KERNEL, "GLA"),
    (gated_delta_rule.KERNEL, "Gated DeltaNet"),
    (ssd.KERNEL, "Mamba2, retention"),
)


def _gla(q, k, v, g, state, doc_ids):
    return gated_linear_attention.gated_linear_attention_chunked(q, k, v, g, state_BJKV=state, doc_ids_BT=doc_ids)


def _delta_rule(q, k, v, g, beta, state, doc_ids):
    return gated_delta_rule.gated_delta_rule_chunked(q, k, v, g, beta, state_BHKV=state, doc_ids_BT=doc_ids)


def _ssd(x, dt, A, B, C, state, doc_ids):
    return ssd.ssd_chunked(x, dt, A, B, C, state_BHPN=state, doc_ids_BT=doc_ids)


_PAIRS: list[tuple[str, Callable[..., tuple[Tensor, Tensor]]]] = [
    ("gated linear attention", _gla),
    ("gated delta rule", _delta_rule),
    ("state-space duality", _ssd),
]
_CHUNKED = tuple(
    (Kernel(f"{name}, in chunks", fast, kernel.definition, kernel.inputs, kernel.wide), used_for)
    for (name, fast), (kernel, used_for) in zip(_PAIRS, _FLA, strict=True)
)


def _conv(x, taps, state, doc_ids):
    y = causal_conv(x, taps, doc_ids_BT=doc_ids, state_BCK=state)
    return y, conv_state(x, taps.shape[-1], doc_ids_BT=doc_ids, state_BCK=state)


def _conv_definition(x: Tensor, taps: Tensor, state: Tensor | None, doc_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Token by token: the last K inputs of a document are kept, and each meets its tap."""
    (batch, time, channels), kernel = x.shape, taps.shape[-1]
    window = x.new_zeros(batch, channels, kernel) if state is None else state
    outputs = []
    for t in range(time):
        if doc_ids is not None and t > 0:
            window = window * (doc_ids[:, t] == doc_ids[:, t - 1])[:, None, None]
        window = torch.cat([window[..., 1:], x[:, t, :, None]], dim=-1)
        outputs.append((window * taps[:, 0]).sum(-1))
    return torch.stack(outputs, dim=1), window


def _conv_inputs(generator: torch.Generator, width: int) -> trials.Inputs:
    batch, time, channels = *trials.SHAPE[:2], trials.SHAPE[2] * width
    taps = trials.normal(generator, channels, 1, 4) / 2
    return {"x": trials.normal(generator, batch, time, channels), "taps": taps}, trials.normal(
        generator, batch, channels, 4
    )


CONV = Kernel("causal convolution", _conv, _conv_definition, _conv_inputs)
