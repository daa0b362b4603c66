"""The Canon layers of one place in a layer of the decoder, with their state in the cache, in one kernel if possible.

Kernels read weights without calling the modules, so they are only used for `untouched` ones.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.gated import ACTS, gated_on_cpu
from canonlm.canon.layer import CanonLayer, on_this_device, one_launch, plain_taps, untouched
from canonlm.models.cache import Layout, read_conv_state
from canonlm.models.norm import RMSNorm
from canonlm.ops.kernels.api import CANON, GATED, NORMED, Forms, fits_normed, runs_on
from canonlm.ops.kernels.dispatch import usable
from canonlm.ops.rotary_conv_cpu import rotary_conv, usable_rotary


class Slot(NamedTuple):
    """The state of a layer's Canon layers of one place in a running forward."""

    layout: Layout
    cache: Cache | None
    layer_idx: int
    state_idx: int


def run_site(
    canons: Sequence[nn.Module | None], inputs: Sequence[Tensor], slot: Slot, mixer_input: Tensor | None = None
) -> list[Tensor]:
    """Apply the Canon layers of one place (one for A and C; q, k, v for B; gate, up for D) to `[B, T, C_i]` inputs.

    An input without a layer (None) does not change. With a cache, the state before is read and updated; the layers
    share one state, which is as long as the largest of their kernels. `mixer_input`: see `CanonLayer.forward`.
    """
    layout, cache, layer_idx, state_idx = slot
    outputs = list(inputs)
    present: list[tuple[int, Any, Tensor]] = [
        (index, canon, inputs[index]) for index, canon in enumerate(canons) if canon is not None
    ]
    layers, xs = [canon for _, canon, _ in present], [x for _, _, x in present]
    if (how := one_launch(layers, xs)) is not None and all(map(untouched, layers)):
        ys = _run_kernel(CANON, (xs,), how, slot)
        if ys is not None:
            for (index, _, _), y in zip(present, ys, strict=True):
                outputs[index] = y
            return outputs
    call: dict[str, Any] = {"attention_mask": layout.attention_mask, "doc_ids": layout.doc_ids}
    call |= {"mixer_input": mixer_input, "gaps": layout.gaps}
    if cache is None:
        for index, canon, x in present:
            outputs[index] = canon(x, **call)
        return outputs
    kernel = max(canon.kernel_size for canon in layers)
    layer: Any = cache.layers[layer_idx]
    past = read_conv_state(layer, state_idx, kernel, layout)
    pasts = [None] * len(present) if past is None else past.split([x.shape[-1] for x in xs], dim=1)
    states = []
    for (index, canon, x), state in zip(present, pasts, strict=True):
        own = None if state is None else state[..., -canon.kernel_size :]
        outputs[index], state = canon(x, state=own, return_state=True, **call)
        states.append(torch.nn.functional.pad(state, (kernel - canon.kernel_size, 0)))
    state = torch.cat(states, dim=1)
    if layer.record_past:
        # The cache may be rewound (prompt lookup): the library then needs every input, and cuts the state itself.
        state = torch.cat(xs, dim=-1).transpose(1, 2)
        if layout.attention_mask is not None:
            state = state.masked_fill((layout.attention_mask == 0)[:, None], 0)
    layer.update_conv_state(state, state_idx=state_idx, conv_kernel_size=kernel)
    return outputs


def run_rotary(
    canons: Sequence[CanonLayer | None],
    inputs: Sequence[Tensor],
    rotary: tuple[Tensor, Tensor] | None,
    head_dim: int,
    rotated: Sequence[int],
    slot: Slot,
) -> list[Tensor] | None:
    """Canon-B and the rotary embedding of its outputs in one kernel, `[B, T, heads, head_dim]` each; None if the kernel
    cannot be used. rotated: the number of heads to rotate in each input."""
    if rotary is None or slot.cache is not None or slot.layout.attention_mask is not None or runs_on(*inputs):
        return None
    taps = plain_taps(canons, inputs)
    if taps is None or not all(usable_rotary(x, each, *rotary) for x, each in zip(inputs, taps, strict=True)):
        return None
    return [
        rotary_conv(x, each, slot.layout.doc_ids, *rotary, x.shape[-1] // head_dim, heads)
        for x, each, heads in zip(inputs, taps, rotated, strict=True)
    ]


def run_gated(canons: Sequence[nn.Module], gate: Tensor, up: Tensor, act: nn.Module, slot: Slot) -> Tensor | None:
    """act(canon(gate)) * canon(up) in one kernel; None if the kernel cannot be used."""
    how = one_launch(canons, (gate, up), "gated")
    if how is None and slot.cache is None:
        mask, doc_ids = slot.layout.attention_mask, slot.layout.doc_ids
        return gated_on_cpu(canons, gate, up, act, attention_mask=mask, doc_ids=doc_ids)
    if how is None or type(act) not in ACTS or not all(map(untouched, (*canons, act))):
        return None
    if how.pop("biases") or how["activation"] != "none":
        return None
    how["activation"] = ACTS[type(act)]
    return _run_kernel(GATED, (gate, up), how, slot)


def run_normed(
    canon: nn.Module, norm: nn.Module, x: Tensor, branch: Tensor | None, slot: Slot
) -> tuple[Tensor, Tensor] | None:
    """s = x + branch (or x), and canon(norm(s)), in one kernel; None if the kernel cannot be used."""
    how = one_launch([canon], [x], "normed")
    if how is None or how.pop("biases") or how.pop("activation") != "none":
        return None
    if type(norm) is not RMSNorm or not untouched(norm) or not untouched(canon):
        return None
    [how["taps"]] = how["taps"]
    if not fits_normed(x.shape[-1], how["taps"].shape[-1]):
        return None
    if branch is not None and torch.promote_types(x.dtype, branch.dtype) != x.dtype:
        x, branch = x + branch, None
    args = x, branch, on_this_device(norm.weight), norm.eps
    return _run_kernel(NORMED, args, how, slot)


def _run_kernel(forms: Forms, args: tuple[Any, ...], how: dict[str, Any], slot: Slot) -> Any:
    """The result of a kernel on these arguments, with the state in the cache updated. None if it does not apply: with a
    recorded past, with gradients through states, or if the layout lacks what kernels read."""
    layout, cache, layer_idx, state_idx = slot
    x: Tensor = args[0][0] if forms is CANON else args[0]
    has_layout = layout.reach is not None or (layout.attention_mask is None and layout.doc_ids is None)
    if cache is None:
        return forms.without_state(*args, **how, reach=layout.reach) if has_layout else None
    layer: Any = cache.layers[layer_idx]
    if layer.record_past or torch.is_grad_enabled():
        return None
    kernel = how["taps"][0].shape[-1]
    is_step = x.shape[1] == 1 and layer.has_previous_state[state_idx]
    if is_step and usable(f"{forms.name} step", x, kernel=kernel):
        # In place: its address does not change, and the library need not update it.
        state = layer.conv_states[state_idx]
        if layout.continues is not None:  # zeros, where the token begins a document
            state.mul_(layout.continues[:, -1:, None].to(state.dtype))
        return forms.step(*args, **how, state=state, mask=layout.attention_mask)
    if not has_layout:
        return None
    past = read_conv_state(layer, state_idx, kernel, layout)
    result, after = forms.with_state(*args, **how, state=past, reach=layout.reach, last=layout.last)
    layer.update_conv_state(after, state_idx=state_idx, conv_kernel_size=kernel)
    return result
