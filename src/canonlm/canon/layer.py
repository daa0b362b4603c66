"""The Canon layer: every token also reads its three predecessors, channel by channel.

    y_t = x_t + sum_{i=0..K-1} w_i * x_{t-i}        Physics of Language Models, Part 4.1 (arXiv 2512.17351), K = 4

The decoder, its mixers, its MLPs and `canonize` all use this layer. Variants whose taps are not plain parameters are
in `canonlm.canon.variants`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canonlm.core.errors import expected
from canonlm.ops.causal_conv import causal_conv, conv_state
from canonlm.ops.kernels.api import canon, canon_with_state, last_real, reach_of, runs_on
from canonlm.ops.kernels.dispatch import usable
from canonlm.ops.varlen import has_gaps, real_first


class CanonLayer(nn.Module):
    """A causal depthwise convolution over the last `kernel_size` tokens, added to its input.

    Args:
        hidden_size: number of channels C.
        kernel_size: number of tokens it sees, the current one included (>= 1; the paper: 4).
        residual: add the input (the paper's choice: more stable, faster to train).
        activation: apply SiLU to the convolution (never to the residual).
        bias: add a learned bias to the convolution.
        scaled: divide the output by sqrt(K + 1), so that with the residual its variance stays that of x.
        start: initial taps: "uniform" in +-1/sqrt(K), as in `torch.nn.Conv1d`; "zero", with the residual the identity;
            "id", 1 for the current token and 0 for the others, without the residual the identity.

    InvalidSetting (a ValueError) for any other value.

    `weight` is `[C, 1, K]`; its last tap multiplies the current token. The layer is not a `Conv1d`, so that a host
    model's own weight initialisation skips it.
    """

    frozen = False
    """Whether the parameters keep their initial values. The owner freezes them, after loading."""

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        *,
        residual: bool = True,
        activation: bool = False,
        bias: bool = False,
        scaled: bool = False,
        start: str = "uniform",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for key, value in (("hidden_size", hidden_size), ("kernel_size", kernel_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise expected(key, "an integer >= 1", value)
        if start not in ("uniform", "zero", "id"):
            raise expected("start", '"uniform", "zero" or "id"', start)
        self.hidden_size, self.kernel_size = hidden_size, kernel_size
        self.residual, self.activation, self.scaled, self.start = residual, activation, scaled, start
        self.add_parameters(bias, device, dtype)
        self.reset_parameters()

    def add_parameters(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> None:
        shape = (self.hidden_size, 1, self.kernel_size)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(self.hidden_size, device=device, dtype=dtype)) if bias else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            self.fill(name, parameter)

    def fill(self, name: str, values: Tensor, generator: torch.Generator | None = None) -> None:
        """Write the initial values of the parameter `name` into a tensor of its shape.

        "uniform" is Kaiming uniform with a = sqrt(5) and fan-in K, for weight and bias.
        """
        if self.start == "uniform":
            bound = self.kernel_size**-0.5
            values.uniform_(-bound, bound, generator=generator)
        else:
            values.zero_()
            if self.start == "id" and name == "weight":
                values[..., -1] = 1

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
        mixer_input: Tensor | None = None,
        gaps: bool | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args:
            x: `[batch, time, channels]`, any floating dtype; the result has the same shape and dtype.
            attention_mask: `[batch, time]` for the tokens of `x` alone (a cache has its own), 1 at real tokens, 0 at
                padding, which is skipped: a token sees the last K real ones. `x` is not modified.
            doc_ids: `[batch, time]` integers, one value per document of a packed row; nothing crosses a boundary.
                Padding belongs to the document before it.
            state: `[batch, channels, kernel_size]`, as returned for the tokens before; it belongs to the document of
                the first token.
            return_state: also return the state after this input, taken at each row's last real token, in the dtype of
                `x`.
            mixer_input: `[batch, time, width]`, what x was projected from; only `DynamicCanon` reads it.
            gaps: whether padding may stand between real tokens, those of the state included. None: `attention_mask` is
                searched, for which a GPU is waited for.

        Prefill in chunks and one-token decoding, each call with the state of the last one, equal a single call.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise expected("x", f"a tensor [batch, time, {self.hidden_size}]", tuple(x.shape))
        if attention_mask is not None:
            real = attention_mask != 0
            if has_gaps(real, state is not None) if gaps is None else gaps and x.shape[1] > 1:
                return self._without_gaps(x, real, doc_ids, state, return_state, mixer_input)
        kernel = one_launch([self], [x])
        if kernel is not None and return_state and not torch.is_grad_enabled():
            last = None if attention_mask is None else last_real(attention_mask)
            reach = reach_of(doc_ids, attention_mask)
            [y], after = canon_with_state([x], **kernel, state=state, reach=reach, last=last)
            return y, after
        if kernel is not None:
            [y] = canon([x], **kernel, state=state, reach=reach_of(doc_ids, attention_mask))
        if attention_mask is not None:
            x = x.masked_fill((attention_mask == 0)[..., None], 0)
        if kernel is None:
            y = self.convolve(x, doc_ids, state, mixer_input)
        if not return_state:
            return y
        return y, conv_state(x, self.kernel_size, mask_BT=attention_mask, doc_ids_BT=doc_ids, state_BCK=state)

    def _without_gaps(
        self,
        x: Tensor,
        real_BT: Tensor,
        doc_ids: Tensor | None,
        state: Tensor | None,
        return_state: bool,
        mixer_input: Tensor | None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """`forward`, of the tokens in an order in which the real ones come first."""
        order, place = real_first(real_BT)
        ordered = None if doc_ids is None else doc_ids.gather(1, order)
        if state is not None and ordered is not None and doc_ids is not None:  # the state is of the first token's
            state = state * (ordered[:, :1] == doc_ids[:, :1])[..., None].to(state.dtype)
        result = CanonLayer.forward(
            self,
            _at(x, order),
            attention_mask=real_BT.gather(1, order),
            doc_ids=ordered,
            state=state,
            return_state=return_state,
            mixer_input=None if mixer_input is None else _at(mixer_input, order),
            gaps=False,
        )
        return (_at(result[0], place), result[1]) if isinstance(result, tuple) else _at(result, place)

    def taps(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """`[C, 1, K]`, without the residual and the scale."""
        return on_this_device(self.weight).to(dtype)

    def convolve(
        self, x_BTC: Tensor, doc_ids_BT: Tensor | None, state_BCK: Tensor | None, mixer_input: Tensor | None
    ) -> Tensor:
        """The layer's output for `x_BTC`, which is zero at padding."""
        taps = self.taps_for(x_BTC)
        if not self.activation and self.bias is None:
            # x + conv(x) is one convolution whose last tap is larger by one: one pass and one rounding less.
            return causal_conv(x_BTC, self.combined(taps), doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        compute = taps.dtype
        y_BTC = causal_conv(x_BTC.to(compute), taps, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        if self.bias is not None:
            y_BTC = y_BTC + on_this_device(self.bias).to(compute)
        if self.activation:
            y_BTC = nn.functional.silu(y_BTC)
        if self.residual:
            y_BTC = y_BTC + x_BTC
        return (y_BTC * self.scale).to(x_BTC.dtype) if self.scaled else y_BTC.to(x_BTC.dtype)

    def taps_for(self, x_BTC: Tensor) -> Tensor:
        """The taps in the dtype that the layer computes in: at least float32."""
        compute = torch.promote_types(x_BTC.dtype, torch.float32)
        compute = torch.promote_types(compute, next(self.parameters(), x_BTC).dtype)
        return self.taps(x_BTC.device, compute)

    def combined(self, taps: Tensor) -> Tensor:
        """Taps, the residual and the scale as one convolution."""
        if self.residual:
            taps = taps + unit_tap(self.kernel_size, taps.device, taps.dtype)
        return taps * self.scale if self.scaled else taps

    @property
    def scale(self) -> float:
        return (self.kernel_size + 1) ** -0.5

    def extra_repr(self) -> str:
        named: dict[str, object] = {
            "kernel_size": self.kernel_size,
            "residual": self.residual,
            "activation": self.activation,
        }
        named |= {"bias": getattr(self, "bias", None) is not None, "scaled": self.scaled, "start": self.start}
        return f"{self.hidden_size}, " + ", ".join(f"{key}={value}" for key, value in named.items())


def _at(x_BTC: Tensor, places_BT: Tensor) -> Tensor:
    return x_BTC.gather(1, places_BT[..., None].expand(-1, -1, x_BTC.shape[-1]))


def one_launch(layers: Sequence[nn.Module], xs: Sequence[Tensor], name: str = "") -> dict[str, Any] | None:
    """The layers' arguments for one launch of the kernel of that name (default: that of Canon alone) on `xs`. None: it
    cannot be used here, or the layers differ in kind, or one is not a plain `CanonLayer`."""
    canons: Any = layers
    first = canons[0]
    if not runs_on(*xs) or any(type(canon) is not CanonLayer for canon in canons):
        return None
    kinds = {(c.kernel_size, c.residual, c.activation, c.scaled, c.bias is None) for c in canons}
    taps = [on_this_device(c.weight) for c in canons]
    biases = [on_this_device(c.bias) for c in canons if c.bias is not None]
    alike = len(kinds) == 1 and all(len({x.dtype for x in tensors}) <= 1 for tensors in (xs, taps, biases))
    name = name or ("canon silu" if first.activation else "canon several" if len(xs) > 1 else "canon")
    if not alike or not usable(name, *xs, *taps, *biases, kernel=first.kernel_size):
        return None
    return {
        "taps": taps,
        "biases": biases,
        "residual": first.residual,
        "activation": "silu" if first.activation else "none",
        "scale": first.scale if first.scaled else 1.0,
    }


def plain_taps(layers: Sequence[Any], xs: Sequence[Tensor]) -> list[Tensor] | None:
    """The taps of each layer, `[K, C]`, if every layer only convolves its x with them; else None."""
    if any(type(canon) is not CanonLayer or canon.activation or canon.bias is not None for canon in layers):
        return None
    if not all(map(untouched, layers)):
        return None
    return [canon.combined(canon.taps_for(x))[:, 0].t() for canon, x in zip(layers, xs, strict=True)]


def untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward and nothing else. Only then may its weights be read without
    a call: hooks (offloading, inspection) would not run."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(hooks)


def on_this_device(weight: Tensor) -> Tensor:
    """`weight`, or this device's part of a DTensor."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def unit_tap(kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """`[K]`: 0, …, 0, 1."""
    tap = torch.zeros(kernel, device=device, dtype=dtype)
    tap[-1] = 1
    return tap
