"""Every form of an op that a device uses, with the definition it is compared with (`canonlm doctor`)."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch

from canonlm.ops import fla, gated_delta_rule, gated_linear_attention, packed_attention, ssd
from canonlm.ops.causal_conv import causal_conv, conv_state
from canonlm.ops.kernels import api, dispatch
from canonlm.ops.selftest import LIMITS, Errors, Kernel, as_form, attempt, record, recorded


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
        return [*conv, *(Form(kernel, used_for, both) for kernel, used_for in _CHUNKED)]
    why = "" if fla.installed() else "flash-linear-attention cannot be imported (pip install 'canonlm[gpu]')"
    return [
        *conv,
        Form(packed_attention.KERNEL, "attention in isolated documents", (torch.bfloat16,)),
        *(Form(kernel, used_for, (torch.bfloat16,), why) for kernel, used_for in _FLA),
        *(Form(kernel, f"{used_for}, in float32", (torch.float32,)) for kernel, used_for in _CHUNKED),
    ]


def trials(device: torch.device, *, again: bool = False) -> Iterator[tuple[int, dict[str, Any]]]:
    """The outcome for every form and dtype, with its place in their order, as soon as it is known: from the user's
    cache, or (if it is not there, or `again`) by a trial. On a GPU, trials run at the same time, each in a process of
    its own: there are about seventy programs to compile, and each takes a core for a second."""
    waiting: list[_Place] = []
    for place, (index, form, dtype) in enumerate((i, f, d) for i, f in enumerate(forms(device)) for d in f.dtypes):
        row = {"kernel": form.kernel.name, "used_for": form.used_for, "dtype": str(dtype).removeprefix("torch.")}
        if form.missing:
            yield place, row | {"state": "missing", "detail": form.missing}
        elif not again and (errors := recorded(form.kernel, device, dtype)):
            yield place, row | _outcome(errors, dtype)
        else:
            waiting.append(_Place(place, index, form, dtype, row))
    for one, result in _at_once(waiting, device) if device.type == "cuda" else _one_by_one(waiting, device):
        try:
            outcome = _outcome(record(one.form.kernel, device, one.dtype, result()), one.dtype)
        except (OSError, BrokenProcessPool) as error:  # a compiler's cache that cannot be written, say
            outcome = {"state": "not tried", "detail": str(error)}
        yield one.place, one.row | outcome


class _Place(NamedTuple):
    place: int
    number: int  # in `forms`
    form: Form
    dtype: torch.dtype
    row: dict[str, Any]


_Results = Iterator[tuple[_Place, Callable[[], Errors]]]


def _one_by_one(waiting: list[_Place], device: torch.device) -> _Results:
    for one in waiting:
        yield one, partial(attempt, one.form.kernel, device, one.dtype)


def _at_once(waiting: list[_Place], device: torch.device) -> _Results:
    """As they end. The definitions run on the CPU, beside those of the other processes."""
    context = get_context("spawn")
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 16), context, torch.set_num_threads, (1,)) as pool:
        running = {pool.submit(_try, one.number, device, one.dtype): one for one in waiting}
        for future in as_completed(running):
            yield running[future], future.result


def _try(index: int, device: torch.device, dtype: torch.dtype) -> Errors:
    return attempt(forms(device)[index].kernel, device, dtype)


def _outcome(errors: Errors, dtype: torch.dtype) -> dict[str, Any]:
    values, gradients = (LIMITS[dtype] * share for share in errors[:2])
    state = "right" if max(errors[:2]) <= 1 else "wrong"
    return {"state": state, "values": values, "gradients": gradients, "detail": errors.detail}


_TRITON = {
    "canon": "Canon at A, C, E, M, O",
    "canon silu": "short convolutions",
    "canon several": "Canon at B and D",
    "rotary": "Canon at B of attention",
    "gated": "Canon at D of a gated MLP",
    "normed": "Canon at A and C, to 2,048 channels",
    "canon step": "decoding",
    "gated step": "decoding",
    "normed step": "decoding",
}
_GLA = as_form(gated_linear_attention.gated_linear_attention_chunked, "state_BJKV")
_DELTA_RULE = as_form(gated_delta_rule.gated_delta_rule_chunked, "state_BHKV")
_SSD = as_form(ssd.ssd_chunked, "state_BHPN")
_RECURRENCES = (  # fla's kernel, who uses it, and our form in chunks
    (gated_linear_attention.KERNEL, "GLA", "gated linear attention", _GLA),
    (gated_delta_rule.KERNEL, "Gated DeltaNet, DeltaProduct", "gated delta rule", _DELTA_RULE),
    (gated_delta_rule.CHANNEL_KERNEL, "Kimi Delta Attention", "gated delta rule by channel", _DELTA_RULE),
    (ssd.KERNEL, "Mamba2, retention", "state-space duality", _SSD),
)
_FLA = [(kernel, used_for) for kernel, used_for, *_ in _RECURRENCES]
_CHUNKED = [
    (replace(kernel, name=f"{name}, in chunks", fast=fast), used_for) for kernel, used_for, name, fast in _RECURRENCES
]


def _conv(x, taps, state, doc_ids):
    y = causal_conv(x, taps, doc_ids_BT=doc_ids, state_BCK=state)
    return y, conv_state(x, taps.shape[-1], doc_ids_BT=doc_ids, state_BCK=state)


CONV = Kernel("causal convolution", _conv, partial(dispatch.canon_by_token, residual=False), dispatch.conv_inputs)
