"""Every form of an op that a device uses, with the definition it is compared with (`canonlm doctor`)."""

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import NamedTuple

import torch
from torch import Tensor

from canonlm.ops import fla, gated_delta_rule, gated_linear_attention, packed_attention, ssd
from canonlm.ops.causal_conv import causal_conv, conv_state
from canonlm.ops.causal_conv_cpu import has_numba
from canonlm.ops.gated_conv_cpu import convolve_gated
from canonlm.ops.kernels import api, dispatch
from canonlm.ops.rotary_conv_cpu import rotary_conv
from canonlm.ops.selftest import Kernel, attempt


class Form(NamedTuple):
    """dtypes: of inputs for which the device uses it. missing: why it cannot be used here ("": it can)."""

    kernel: Kernel
    used_for: str
    dtypes: tuple[torch.dtype, ...]
    missing: str = ""


def forms(device: torch.device) -> list[Form]:
    """The forms that models on `device` use; on a GPU also those that they would use if installed."""
    both = (torch.float32, torch.bfloat16)
    conv = [Form(CONV, "Canon layers, short convolutions", both)]
    if device.type == "cuda" or api.device_type() == device.type:
        why = "" if api.device_type() == device.type else "Triton is not installed (pip install triton)"
        conv += [Form(kernel, _TRITON[name], both, why) for name, kernel in dispatch.KERNELS.items()]
    if device.type != "cuda":
        if has_numba():
            conv += [Form(GATED_ON_CPU, "Canon at D of a gated MLP", both[:1])]
            conv += [Form(ROTARY_ON_CPU, "Canon at B of attention", both[:1])]
        return [*conv, *(Form(kernel, used_for, both) for kernel, used_for in _CHUNKED)]
    why = "" if fla.installed() else "flash-linear-attention cannot be imported (pip install 'canonlm[gpu]')"
    return [
        *conv,
        Form(packed_attention.KERNEL, "attention in isolated documents", (torch.bfloat16,)),
        *(Form(kernel, used_for, (torch.bfloat16,), why) for kernel, used_for in _FLA),
        *(Form(kernel, f"{used_for}, in float32", (torch.float32,)) for kernel, used_for in _CHUNKED),
    ]


def compile_all(device: torch.device) -> None:
    """Try all forms of a GPU at the same time, each in a process of its own: Triton keeps what it compiles on disk, so
    that trials take no time afterwards. There are about seventy programs, and each takes a core for a second."""
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), get_context("spawn")) as pool:
        for index, form in enumerate(forms(device)):
            for dtype in () if form.missing else form.dtypes:
                pool.submit(_try, index, device, dtype)  # what goes wrong is met again by the trial


def _try(index: int, device: torch.device, dtype: torch.dtype) -> None:
    torch.set_num_threads(1)  # the definitions run on the CPU, beside those of the other processes
    attempt(forms(device)[index].kernel, device, dtype)


_TRITON = {
    "canon": "Canon at A, C, E, M, O",
    "canon silu": "short convolutions",
    "canon several": "Canon at B and D",
    "gated": "Canon at D of a gated MLP",
    "normed": "Canon at A and C, to 2,048 channels",
    "canon step": "decoding",
    "gated step": "decoding",
    "normed step": "decoding",
}
_FLA = (
    (gated_linear_attention.KERNEL, "GLA"),
    (gated_delta_rule.KERNEL, "Gated DeltaNet, DeltaProduct"),
    (gated_delta_rule.CHANNEL_KERNEL, "Kimi Delta Attention"),
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
    ("gated delta rule by channel", _delta_rule),
    ("state-space duality", _ssd),
]
_CHUNKED = tuple(
    (Kernel(f"{name}, in chunks", fast, kernel.definition, kernel.inputs, kernel.wide), used_for)
    for (name, fast), (kernel, used_for) in zip(_PAIRS, _FLA, strict=True)
)


def _conv(x, taps, state, doc_ids):
    y = causal_conv(x, taps, doc_ids_BT=doc_ids, state_BCK=state)
    return y, conv_state(x, taps.shape[-1], doc_ids_BT=doc_ids, state_BCK=state)


def _conv_definition(x, taps, state, doc_ids):
    return dispatch.canon_by_token(x, taps, state, doc_ids, residual=False)


CONV = Kernel("causal convolution", _conv, _conv_definition, dispatch.conv_inputs)


def _as_tokens(x, state, doc_ids):
    """The operators take no state, so the state's inputs are passed as tokens."""
    if state is None:
        return x, doc_ids
    if doc_ids is not None:
        doc_ids = torch.cat([doc_ids[:, :1].expand(-1, state.shape[-1]), doc_ids], dim=1)
    return torch.cat([state.mT, x], dim=1), doc_ids


def _gated_on_cpu(x, y, taps, y_taps, state, doc_ids):
    kernel, time, both = taps.shape[-1], x.shape[1], torch.cat([x, y], dim=-1)
    after = conv_state(both, kernel, doc_ids_BT=doc_ids, state_BCK=state)
    both, doc_ids = _as_tokens(both, state, doc_ids)
    unit = torch.eye(kernel, dtype=taps.dtype)[-1]  # the residual
    weight, y_weight = ((each[:, 0] + unit).T.contiguous() for each in (taps, y_taps))
    gate, up = both.chunk(2, dim=-1)
    return convolve_gated(gate, up, weight, y_weight, doc_ids)[:, -time:], after


_GATED = dispatch.KERNELS["gated"]
GATED_ON_CPU = Kernel("gated convolution", _gated_on_cpu, _GATED.definition, _GATED.inputs, _GATED.wide)


def _angles(x: Tensor, before: int) -> Tensor:
    """`[T, 4]`, for four pairs of channels. before: the number of earlier tokens in x; the next one has position 1."""
    steps = torch.arange(1 - before, x.shape[1] - before + 1, dtype=x.dtype, device=x.device)
    return steps[:, None] / torch.arange(1, 5, dtype=x.dtype, device=x.device)


def _rotary_on_cpu(x, taps, state, doc_ids):
    """With two heads; eight channels of the first are rotated."""
    kernel, time = taps.shape[-1], x.shape[1]
    after = conv_state(x, kernel, doc_ids_BT=doc_ids, state_BCK=state)
    x, doc_ids = _as_tokens(x, state, doc_ids)
    angles = _angles(x, x.shape[1] - time)[None, :, None]
    y = rotary_conv(x, taps[:, 0].T.contiguous(), doc_ids, angles.cos(), angles.sin(), 2, 1)
    return y.flatten(-2)[:, -time:], after


def _rotary_definition(x, taps, state, doc_ids):
    y, after = _conv_definition(x, taps, state, doc_ids)
    angles = _angles(y, 0)
    rotated = torch.complex(y[..., :4], y[..., 4:8]) * torch.complex(angles.cos(), angles.sin())
    return torch.cat([rotated.real, rotated.imag, y[..., 8:]], dim=-1), after


ROTARY_ON_CPU = Kernel("convolution and rotary embedding", _rotary_on_cpu, _rotary_definition, dispatch.conv_inputs)
