"""The operation of a Canon layer, and the only place that chooses its form: kernels, or steps in PyTorch.

    y_t = scale * (act(sum_{i=0..K-1} w_i * x_{t-i} + bias) + residual * x_t)

Several tensors at one place of a layer (queries, keys and values, say) are computed in one launch where that is
possible. They share one state, `[B, sum of C, K]`, as long as the longest of their kernels.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from canonlm.ops.causal_conv import causal_conv, conv_state, dtype_of_sums
from canonlm.ops.kernels.api import CANON, GATED, NORMED, Forms, fits_normed, last_real, reach_of, rotary, runs_on
from canonlm.ops.kernels.dispatch import usable
from canonlm.ops.varlen import Documents, Layout, real_first


class Conv(NamedTuple):
    """One tensor's convolution, as in the equation. taps: `[C, 1, K]`, the last one for the current token."""

    taps: Tensor
    bias: Tensor | None = None
    residual: bool = True
    activation: bool = False
    scale: float = 1.0


class State(NamedTuple):
    """The inputs before these tokens, and whether they are needed after them.

    before: the last K inputs, of all tensors side by side; None: zeros. place: the tensor that keeps it in a cache; a
    kernel for one token writes the new state into it, and returns it.
    """

    before: Tensor | None = None
    is_returned: bool = False
    place: Tensor | None = None


NONE = State()


def canon_conv(
    xs: Sequence[Tensor], convs: Sequence[Conv], layout: Layout, state: State = NONE
) -> tuple[list[Tensor], Tensor | None]:
    """The outputs for `[B, T, C]` inputs, in their dtypes, and the state after the last real token of each row."""
    if has_gaps(layout, xs):
        return in_order(lambda xs, *rest: canon_conv(xs, convs, *rest), xs, layout, state)
    name = "canon silu" if convs[0].activation else "canon several" if len(xs) > 1 else "canon"
    if (how := _launch(name, xs, convs)) is not None:
        how["biases"] = [conv.bias for conv in convs if conv.bias is not None]
        how["activation"] = "silu" if convs[0].activation else "none"
        return _run(CANON, (xs,), how, xs, layout, state)
    if len(xs) > 1:
        kernels = [conv.taps.shape[-1] for conv in convs]
        return one_by_one(lambda i, own: canon_conv([xs[i]], [convs[i]], layout, own), xs, kernels, state)
    [x], [conv] = masked(xs, layout), convs
    return [_plain(x, conv, layout.doc_ids, state.before)], state_after([x], conv.taps.shape[-1], layout, state)


def gated_conv(
    gate: Tensor, up: Tensor, convs: Sequence[Conv], act: str, layout: Layout, state: State = NONE
) -> tuple[Tensor, Tensor | None] | None:
    """act(conv(gate)) * conv(up), and the state, in one pass; None: no kernel does. act: its name."""
    xs = gate, up
    if not _can_join(xs, convs, layout, state) or (how := _launch("gated", xs, convs)) is None:
        return None
    return _run(GATED, xs, how | {"activation": act}, xs, layout, state)


def rotary_convs(
    xs: Sequence[Tensor],
    convs: Sequence[Conv],
    layout: Layout,
    cos: Tensor,
    sin: Tensor,
    sizes: Sequence[tuple[int, int]],
) -> list[Tensor] | None:
    """`[B, T, heads, C / heads]`: the convolutions, and the rotary embedding of the first heads, for rows without
    past. sizes: (heads, rotated heads) of each. None: no kernel computes both."""
    head_dim = xs[0].shape[-1] // sizes[0][0]
    in_pairs = head_dim % 2 == 0 and cos.dtype == sin.dtype == torch.float32
    if not in_pairs or not _can_join(xs, convs, layout) or (how := _launch("rotary", xs, convs)) is None:
        return None
    reach = reach_of(layout.doc_ids, layout.attention_mask) if layout.reach is None else layout.reach
    ys = rotary(xs, **how, cos=cos, sin=sin, rotated=[count for _, count in sizes], head_dim=head_dim, reach=reach)
    return [y.unflatten(-1, (heads, head_dim)) for y, (heads, _) in zip(ys, sizes, strict=True)]


def normed_conv(
    x: Tensor, branch: Tensor | None, weight: Tensor, eps: float, conv: Conv, layout: Layout, state: State = NONE
) -> tuple[tuple[Tensor, Tensor], Tensor | None] | None:
    """s = x + branch (or x) and conv(rms_norm(s) * weight), and the state, in one pass; None: no kernel does."""
    fits = fits_normed(x.shape[-1], conv.taps.shape[-1]) and _can_join([x], [conv], layout, state)
    if not fits or (how := _launch("normed", [x], [conv])) is None:
        return None
    [how["taps"]] = how["taps"]
    if branch is not None and torch.promote_types(x.dtype, branch.dtype) != x.dtype:
        x, branch = x + branch, None
    return _run(NORMED, (x, branch, weight, eps), how, [x], layout, state)


def for_kernels(layout: Layout, x: Tensor) -> Layout:
    """`layout` with what kernels read, if there are any for `x`: made once for all layers. A decoding step, of one
    token, only needs its mask."""
    mask = layout.attention_mask
    if x.shape[1] == 1 or (mask is None and layout.documents is None) or not runs_on(x):
        return layout
    last = None if mask is None else last_real(mask)
    return replace(layout, reach=reach_of(layout.doc_ids, mask), last=last)


def one_by_one(
    run: Callable[[int, State], tuple[list[Tensor], Tensor | None]],
    xs: Sequence[Tensor],
    kernels: Sequence[int],
    state: State,
) -> tuple[list[Tensor], Tensor | None]:
    """`run(i, its state)` for each of the tensors, which share a state."""
    kernel = max(kernels)
    ys: list[Tensor] = []
    states: list[Tensor] = []
    pasts = [None] * len(xs) if state.before is None else state.before.split([x.shape[-1] for x in xs], dim=1)
    for i, (own, past) in enumerate(zip(kernels, pasts, strict=True)):
        [y], after = run(i, State(None if past is None else past[..., -own:], state.is_returned))
        ys.append(y)
        states += [] if after is None else [pad(after, (kernel - own, 0))]
    return ys, torch.cat(states, dim=1) if states else None


def has_gaps(layout: Layout, xs: Sequence[Tensor]) -> bool:
    return layout.gaps and xs[0].shape[1] > 1


def in_order(
    run: Callable[[Sequence[Tensor], Layout, State], tuple[list[Tensor], Tensor | None]],
    xs: Sequence[Tensor],
    layout: Layout,
    state: State,
) -> tuple[list[Tensor], Tensor | None]:
    """`run`, of the tokens in an order in which the real ones come first."""
    assert layout.attention_mask is not None
    real = layout.attention_mask != 0
    order, place = real_first(real)
    documents, before = layout.documents, state.before
    if documents is not None:
        first, documents = documents.ids[:, :1], Documents(documents.ids.gather(1, order))
        if before is not None:  # the state is of the first token's
            before = before * (documents.ids[:, :1] == first)[..., None].to(before.dtype)
    ordered = Layout(attention_mask=real.gather(1, order), documents=documents)
    ys, after = run([_at(x, order) for x in xs], ordered, State(before, state.is_returned))
    return [_at(y, place) for y in ys], after


def _at(x_BTC: Tensor, places_BT: Tensor) -> Tensor:
    return x_BTC.gather(1, places_BT[..., None].expand(-1, -1, x_BTC.shape[-1]))


def masked(xs: Sequence[Tensor], layout: Layout) -> list[Tensor]:
    """The inputs with zeros at padding."""
    if layout.attention_mask is None:
        return list(xs)
    padding = (layout.attention_mask == 0)[..., None]
    return [x.masked_fill(padding, 0) for x in xs]


def state_after(xs: Sequence[Tensor], kernel: int, layout: Layout, state: State) -> Tensor | None:
    """The state after inputs that are zero at padding, if it is needed."""
    if not state.is_returned:
        return None
    x = xs[0] if len(xs) == 1 else torch.cat(list(xs), dim=-1)
    return conv_state(x, kernel, mask_BT=layout.attention_mask, doc_ids_BT=layout.doc_ids, state_BCK=state.before)


def combined(taps_C1K: Tensor, conv: Conv) -> Tensor:
    """Taps, the residual and the scale as one convolution."""
    if conv.residual:
        unit = torch.zeros(taps_C1K.shape[-1], device=taps_C1K.device, dtype=taps_C1K.dtype)
        unit[-1] = 1
        taps_C1K = taps_C1K + unit
    return taps_C1K if conv.scale == 1 else taps_C1K * conv.scale


def _plain(x_BTC: Tensor, conv: Conv, doc_ids_BT: Tensor | None, state_BCK: Tensor | None) -> Tensor:
    """In at least float32, by `causal_conv`."""
    compute = dtype_of_sums(x_BTC, conv.taps)
    taps, context = conv.taps.to(compute), {"doc_ids_BT": doc_ids_BT, "state_BCK": state_BCK}
    if not conv.activation and conv.bias is None:
        # x + conv(x) is one convolution whose last tap is larger by one: one pass and one rounding less.
        return causal_conv(x_BTC, combined(taps, conv), **context)
    y_BTC = causal_conv(x_BTC.to(compute), taps, **context)
    if conv.bias is not None:
        y_BTC = y_BTC + conv.bias.to(compute)
    if conv.activation:
        y_BTC = silu(y_BTC)
    if conv.residual:
        y_BTC = y_BTC + x_BTC
    return (y_BTC if conv.scale == 1 else y_BTC * conv.scale).to(x_BTC.dtype)


def _can_join(xs: Sequence[Tensor], convs: Sequence[Conv], layout: Layout, state: State = NONE) -> bool:
    """Whether one kernel can compute the convolutions and what surrounds them. It has no bias, no activation of a
    convolution's own, and no gradient of the state after these tokens."""
    only_convolve = all(conv.bias is None and not conv.activation for conv in convs)
    needs_gradient = state.is_returned and torch.is_grad_enabled()
    return only_convolve and not needs_gradient and not has_gaps(layout, xs)


def _launch(name: str, xs: Sequence[Tensor], convs: Sequence[Conv]) -> dict[str, Any] | None:
    """The arguments for one launch of the kernel of that name. None: it cannot be used here, or the convolutions differ
    in kind."""
    if not runs_on(*xs):
        return None
    kinds = {(c.taps.shape[-1], c.residual, c.activation, c.scale, c.bias is None) for c in convs}
    taps, biases = [c.taps for c in convs], [c.bias for c in convs if c.bias is not None]
    alike = len(kinds) == 1 and all(len({x.dtype for x in tensors}) <= 1 for tensors in (xs, taps, biases))
    if not alike or not usable(name, *xs, *taps, *biases, kernel=taps[0].shape[-1]):
        return None
    return {"taps": taps, "residual": convs[0].residual, "scale": convs[0].scale}


def _run(
    forms: Forms, args: tuple[Any, ...], how: dict[str, Any], xs: Sequence[Tensor], layout: Layout, state: State
) -> tuple[Any, Tensor | None]:
    """The results of a kernel for the inputs `xs`, and the state."""
    mask, kernel = layout.attention_mask, how["taps"][0].shape[-1]
    before, place = state.before, state.place
    is_step = xs[0].shape[1] == 1 and not torch.is_grad_enabled() and usable(f"{forms.name} step", xs[0], kernel=kernel)
    if is_step and before is not None and place is not None:
        # In place: its address does not change, and the library need not update it.
        if before is not place:
            place.copy_(before)
        return forms.step(*args, **how, state=place, mask=mask), place
    how["reach"] = reach_of(layout.doc_ids, mask) if layout.reach is None else layout.reach
    if not state.is_returned or torch.is_grad_enabled():
        ys = forms.without_state(*args, **how, state=before)
        return ys, state_after(masked(xs, layout), kernel, layout, state) if state.is_returned else None
    last = last_real(mask) if layout.last is None and mask is not None else layout.last
    return forms.with_state(*args, **how, state=before, last=last)
