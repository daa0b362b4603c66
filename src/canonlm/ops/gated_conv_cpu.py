"""The kernels of `cpu_gated` as an operator of torch: silu(conv(gate)) * conv(up) of plain float32 tensors on a CPU.

Only the inputs are saved for the backward. The results depend on the shape alone, not on the number of threads.
A self-contained model's folder has `absent` in place of this.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from canonlm.ops.causal_conv_cpu import (
    LIBRARY,
    MAX_KERNEL,
    callable_from_c,
    has_numba,
    ids_of,
    launch,
    partial_sums,
    rowwise,
    total,
)
from canonlm.ops.causal_conv_plain import by_documents
from canonlm.ops.compiled import is_exporting
from canonlm.ops.derivatives import by_definition, differentiated_again, gradients

LIBRARY.define("cpu_gated(Tensor gate, Tensor up, Tensor gate_taps, Tensor up_taps, Tensor? doc_ids) -> Tensor")
LIBRARY.define(
    "cpu_gated_backward(Tensor dy, Tensor gate, Tensor up, Tensor gate_taps, Tensor up_taps, Tensor? doc_ids)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)


def usable_gated(
    gate_BTC: Tensor, up_BTC: Tensor, gate_taps_KC: Tensor, up_taps_KC: Tensor, *, exact: bool = False
) -> bool:
    """Whether the operator can be used: on a CPU with numba, also in a compiled graph, where inductor's loops take
    longer. Not in an exported program, which may run without canonlm.

    exact: only if the kernel's SiLU is torch's, bit by bit. It is where torch uses vectors (AVX2, AVX512).
    """
    return (
        not is_exporting()
        and not by_definition()
        and all(type(x) is Tensor and x.device.type == "cpu" for x in (gate_BTC, up_BTC))
        and all(x.dtype == torch.float32 for x in (gate_BTC, up_BTC, gate_taps_KC, up_taps_KC))
        and gate_taps_KC.shape == up_taps_KC.shape
        and gate_taps_KC.shape[0] <= MAX_KERNEL
        and has_numba()
        and (not exact or _silu_equals_torch())
    )


@torch.compiler.assume_constant_result
def _silu_equals_torch() -> bool:
    return _compare_silu()


@functools.cache
def _compare_silu() -> bool:
    with torch.no_grad():
        gate = torch.linspace(-110, 110, 2**14)[None, None]
        one = torch.ones(1, gate.shape[-1])
        return torch.equal(_forward(gate, one.expand_as(gate), one, one, None), torch.nn.functional.silu(gate))


def convolve_gated(
    gate_BTC: Tensor, up_BTC: Tensor, gate_taps_KC: Tensor, up_taps_KC: Tensor, doc_ids_BT: Tensor | None
) -> Tensor:
    """silu(conv(gate)) * conv(up), `[B, T, C]`, with `causal_conv`'s convolution."""
    return torch.ops.canonlm.cpu_gated(gate_BTC, up_BTC, gate_taps_KC, up_taps_KC, doc_ids_BT)


def _forward(gate: Tensor, up: Tensor, gate_taps: Tensor, up_taps: Tensor, doc_ids: Tensor | None) -> Tensor:
    y = gate.new_empty(gate.shape)
    _run("forward", gate, up, torch.stack([gate_taps, up_taps]), doc_ids, [y])
    return y


def _backward(dy: Tensor, gate: Tensor, up: Tensor, gate_taps: Tensor, up_taps: Tensor, doc_ids: Tensor | None):
    batch, length, _ = gate.shape
    outs = [gate.new_empty(gate.shape), up.new_empty(up.shape)]
    taps = torch.stack([gate_taps, up_taps])
    partials = partial_sums(taps, batch, length)
    _run("backward", gate, up, taps, doc_ids, outs, dy, partials)
    gate_sums, up_sums = total(partials)
    return *outs, gate_sums.clone(), up_sums.clone()  # outputs of an operator must not share memory


def _run(
    direction: str,
    gate: Tensor,
    up: Tensor,
    taps: Tensor,
    doc_ids: Tensor | None,
    outs: list[Tensor],
    dy: Tensor | None = None,
    partials: Tensor | None = None,
) -> None:
    from canonlm.ops.cpu_gated import SIZE, Work
    from canonlm.ops.numba_conv import TOKENS

    batch, length, channels = gate.shape
    gate, up, doc_ids = rowwise(gate), rowwise(up), ids_of(doc_ids)
    dy = None if dy is None else rowwise(dy)
    out, out_up = outs if len(outs) == 2 else (*outs, None)
    strides = [(0, 0) if x is None else (x.stride(0) * SIZE, x.stride(1) * SIZE) for x in (gate, up, dy)]
    work = np.zeros(1, Work)
    work[0] = (
        0,
        *(0 if x is None else x.data_ptr() for x in (gate, up, dy, out, out_up, taps, partials, doc_ids)),
        *(batch, length, channels),
        *(stride for pair in strides for stride in pair),
    )
    launch(_function(direction, taps.shape[1]), work, batch * -(-length // TOKENS), gate.numel())


@functools.cache
def _function(direction: str, kernel: int) -> Any:
    from canonlm.ops.cpu_gated import compiled

    return callable_from_c(compiled(direction, kernel))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _definition(gate: Tensor, up: Tensor, gate_taps: Tensor, up_taps: Tensor, doc_ids: Tensor | None) -> Tensor:
    gate, up = by_documents(gate, gate_taps, doc_ids), by_documents(up, up_taps, doc_ids)
    return torch.nn.functional.silu(gate) * up


def _gradients(ctx, dy: Tensor):
    if differentiated_again():
        return gradients(_definition, ctx.saved_tensors, [dy])
    return *torch.ops.canonlm.cpu_gated_backward(dy, *ctx.saved_tensors), None


LIBRARY.impl("cpu_gated", _forward, "CPU")
LIBRARY.impl("cpu_gated_backward", _backward, "CPU")
torch.library.register_fake("canonlm::cpu_gated", lambda gate, *rest: gate.new_empty(gate.shape), lib=LIBRARY)
torch.library.register_fake(
    "canonlm::cpu_gated_backward",
    lambda dy, *inputs: tuple(x.new_empty(x.shape) for x in inputs[:4]),
    lib=LIBRARY,
)
torch.library.register_autograd("canonlm::cpu_gated", _gradients, setup_context=_save, lib=LIBRARY)
