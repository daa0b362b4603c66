"""Canon layers whose taps are fixed or computed from the tokens, and `make_canon`, which builds a variant's layer.

Padding, packing and caching work as for `CanonLayer`: the state is the last K inputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canonlm.canon.layer import CanonLayer, on_this_device
from canonlm.canon.sites import Variant
from canonlm.ops.canon_conv import combined
from canonlm.ops.causal_conv import causal_conv, causal_conv_per_token, dtype_of_sums

GATE_CHANNELS = 12
"""Channels that the gate of a smear reads."""


class AverageCanon(CanonLayer):
    """`:avg`: y_t = x_t + (x_t + … + x_{t-K+1}) / K, tokens before the document counting as zeros. No parameters."""

    def add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.bias = None

    def taps(self, x: Tensor) -> Tensor:
        shape = self.hidden_size, 1, self.kernel_size
        return torch.full(shape, 1 / self.kernel_size, device=x.device, dtype=_at_least_float32(x))


class TokenShift(AverageCanon):
    """y_t = x_{t-1}, zero at the first token of a document. No parameters."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 2, residual=False)
        self.flops = 0

    def taps(self, x: Tensor) -> Tensor:
        return _token_before(x, _at_least_float32(x))


class KeyOffset(AverageCanon):
    """`:offset`: in each head of D channels, channel c comes from the token before if c mod D/2 >= D/4.

    So half of the channels are one token old, in complete rotary pairs (c, c + D/2), with which one layer of attention
    can do induction (modded-nanogpt). Zero at the first token of a document. No parameters.
    """

    def __init__(self, hidden_size: int, head_dim: int) -> None:
        super().__init__(hidden_size, 2, residual=False)
        self.head_dim, self.flops = head_dim, 0

    def taps(self, x: Tensor) -> Tensor:
        channel = torch.arange(self.hidden_size, device=x.device)
        # Times 4, as D / 4 may not be an integer.
        is_old = 4 * (channel % self.head_dim % max(1, self.head_dim // 2)) >= self.head_dim
        return torch.stack([is_old, ~is_old], dim=-1)[:, None].to(_at_least_float32(x))


class Smear(CanonLayer):
    """`:smear`: y_t = x_t + s * sigmoid(w · x_t[:12]) * x_{t-1}; s and w are learned and start at zero, so that the
    layer starts as the identity (nanochat, modded-nanogpt: once, after the embedding)."""

    is_plain = False

    def __init__(
        self, hidden_size: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(hidden_size, 2, start="zero", device=device, dtype=dtype)
        self.flops = 2 * (hidden_size + len(self.gate))

    def add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        self.gate = nn.Parameter(torch.empty(min(GATE_CHANNELS, self.hidden_size), device=device, dtype=dtype))
        self.strength = nn.Parameter(torch.empty(1, device=device, dtype=dtype))

    def convolve(
        self, x_BTC: Tensor, doc_ids_BT: Tensor | None, state_BCK: Tensor | None, mixer_input: Tensor | None
    ) -> Tensor:
        compute = dtype_of_sums(x_BTC, self.gate)
        taps_C1K = _token_before(x_BTC, compute)
        past_BTC = causal_conv(x_BTC.to(compute), taps_C1K, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        weight, strength = (on_this_device(part).to(compute) for part in (self.gate, self.strength))
        gate_BT1 = (x_BTC[..., : len(weight)].to(compute) * weight).sum(-1, keepdim=True).sigmoid()
        return (x_BTC + strength * gate_BT1 * past_BTC).to(x_BTC.dtype)


class DynamicCanon(CanonLayer):
    """`:dynamic`: y_t = x_t + sum_i (w_i + p_{t,i}) * x_{t-i}, where p_t = W u_t are K taps per head, computed from the
    mixer's input u_t and shared by the channels of the head (Inkling2, on keys and values).

    `weight` starts at zero, `taps_weight` (W, `[heads * K, width]`, a head's taps in the order of `weight`'s) normally
    distributed with standard deviation 0.02, or at zero. `scaled`: divided by sqrt(2 K + 1).
    """

    is_plain = False

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        input_size: int,
        kernel_size: int = 4,
        *,
        scaled: bool = False,
        start: str = "uniform",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.head_dim, self.input_size = head_dim, input_size
        super().__init__(hidden_size, kernel_size, scaled=scaled, start=start, device=device, dtype=dtype)
        self.flops = 2 * (self.flops + self.taps_weight.numel())  # shared taps, own taps and what makes these

    def add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        super().add_parameters(False, device, dtype)
        shape = (self.hidden_size // self.head_dim * self.kernel_size, self.input_size)
        self.taps_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

    def fill(self, name: str, values: Tensor, generator: torch.Generator | None = None) -> None:
        values.zero_()
        if name == "taps_weight" and self.start != "zero":
            values.normal_(0.0, 0.02, generator=generator)

    def convolve(
        self, x_BTC: Tensor, doc_ids_BT: Tensor | None, state_BCK: Tensor | None, mixer_input: Tensor | None
    ) -> Tensor:
        assert mixer_input is not None
        compute = dtype_of_sums(x_BTC, self.weight)
        made = nn.functional.linear(mixer_input, self.taps_weight.to(mixer_input.dtype))
        made = (made.to_local() if isinstance(made, DTensor) else made).to(compute)
        own_BTHK = made.unflatten(-1, (-1, self.kernel_size)) * (self.scale if self.scaled else 1.0)
        conv = self.conv(x_BTC)
        shared = combined(conv.taps.to(compute), conv)
        y_BTC = causal_conv(x_BTC.to(compute), shared, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        own = causal_conv_per_token(x_BTC.to(compute), own_BTHK, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        return (y_BTC + own).to(x_BTC.dtype)

    @property
    def scale(self) -> float:
        return (2 * self.kernel_size + 1) ** -0.5


def _token_before(x_BTC: Tensor, dtype: torch.dtype) -> Tensor:
    """The taps of y_t = x_{t-1}. Made on the device: a copy from the host would wait."""
    return nn.functional.pad(x_BTC.new_ones(x_BTC.shape[-1], 1, 1, dtype=dtype), (0, 1))


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def make_canon(
    variant: Variant,
    hidden_size: int,
    *,
    head_dim: int | None = None,
    input_size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> CanonLayer:
    """The layer of a variant on `hidden_size` channels.

    `:dynamic` and `:offset` need `head_dim`, `:dynamic` also the width of the mixer's input (`input_size`).
    """
    place: Any = {"device": device, "dtype": dtype}
    layer: CanonLayer
    match variant.form:
        case "avg":
            layer = AverageCanon(hidden_size, variant.kernel, residual=variant.residual, scaled=variant.scaled)
        case "smear":
            layer = Smear(hidden_size, **place)
        case "offset":
            assert head_dim is not None
            layer = KeyOffset(hidden_size, head_dim)
        case "dynamic":
            assert head_dim is not None
            assert input_size is not None
            sizes = (hidden_size, head_dim, input_size, variant.kernel)
            layer = DynamicCanon(*sizes, scaled=variant.scaled, start=variant.start, **place)
        case "conv":
            layer = CanonLayer(
                hidden_size,
                variant.kernel,
                residual=variant.residual,
                activation=variant.activation,
                bias=variant.bias,
                scaled=variant.scaled,
                start=variant.start,
                **place,
            )
    layer.frozen = variant.frozen
    return layer
