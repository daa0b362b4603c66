"""Canon layers on the tensors of one place in a layer of a model: one for A and C; q, k, v for B; gate, up for D.

Weights are only read without calling the modules where these are `untouched`.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.activations import ACT2FN

from canonlm.canon.layer import CanonLayer, kernel_size_of, on_this_device, untouched
from canonlm.ops.canon_conv import NONE, Conv, State, canon_conv, gated_conv, normed_conv, one_by_one, rotary_convs
from canonlm.ops.kernels.api import runs_on
from canonlm.ops.varlen import Layout

ACTS = {type(ACT2FN[name]): name for name in ("silu", "gelu_pytorch_tanh")}
"""Activations that a kernel can compute between gate and up, by class."""


def canon_all(
    canons: Sequence[nn.Module],
    xs: Sequence[Tensor],
    layout: Layout,
    state: State = NONE,
    mixer_input: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs of the layers for `[B, T, C]` inputs, one each, and the state after them, which they share: `[B, sum
    of C, K]`, with the largest of their kernel sizes. `mixer_input`: see `CanonLayer.forward`."""
    if convs := _convs(canons, xs):
        return canon_conv(xs, convs, layout, state)
    layers: Any = canons

    def run(i: int, own: State) -> tuple[list[Tensor], Tensor | None]:
        call = {"state": own.before, "return_state": own.is_returned, "mixer_input": mixer_input, "layout": layout}
        result = layers[i](xs[i], **call)
        return ([result[0]], result[1]) if own.is_returned else ([result], None)

    return one_by_one(run, xs, list(map(kernel_size_of, layers)), state)


def canon_gated(
    canons: Sequence[nn.Module],
    act: nn.Module,
    gate: Tensor,
    up: Tensor,
    layout: Layout,
    state: State = NONE,
) -> tuple[Tensor, Tensor | None]:
    """act(canon(gate)) * canon(up), and the state."""
    if type(act) in ACTS and runs_on(gate, up) and untouched(act) and (convs := _convs(canons, (gate, up))):
        name = ACTS[type(act)]
        if (by_kernel := gated_conv(gate, up, convs, name, layout, state)) is not None:
            return by_kernel
    [gate, up], after = canon_all(canons, (gate, up), layout, state)
    return act(gate) * up, after


def canon_rotary(
    canons: Sequence[nn.Module],
    xs: Sequence[Tensor],
    layout: Layout,
    rotary: tuple[Tensor, Tensor],
    sizes: Sequence[tuple[int, int]],
) -> list[Tensor] | None:
    """See `rotary_convs`; None also if one of the layers is not plain."""
    convs = _convs(canons, xs)
    return rotary_convs(xs, convs, layout, *rotary, sizes) if convs else None


def canon_normed(
    canon: nn.Module, norm: nn.Module, x: Tensor, branch: Tensor | None, layout: Layout, state: State = NONE
) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
    """s = x + branch (or x) and canon(norm(s)), and the state. norm: an RMSNorm, with `weight` and `eps`."""
    rms: Any = norm
    if runs_on(x) and untouched(norm) and (convs := _convs([canon], [x])):
        weight = on_this_device(rms.weight)
        if (by_kernel := normed_conv(x, branch, weight, rms.eps, convs[0], layout, state)) is not None:
            return by_kernel
    s = x if branch is None else x + branch
    [y], after = canon_all([canon], [norm(s)], layout, state)
    return (s, y), after


def _convs(canons: Sequence[nn.Module], xs: Sequence[Tensor]) -> list[Conv]:
    """The convolutions of the layers; [] if one of them has to be called."""
    layers: Any = canons
    return [canon.conv(x) for canon, x in zip(layers, xs, strict=True)] if all(map(_is_plain, layers)) else []


def _is_plain(canon: nn.Module) -> bool:
    return isinstance(canon, CanonLayer) and canon.is_plain and not canon.has_own_forward and untouched(canon)
