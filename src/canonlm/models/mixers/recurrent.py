"""Base classes of recurrent mixers: states between calls, convolution sites, gates."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.layer import CanonLayer, on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV
from canonlm.models.cache import Layout, read_recurrence, write_recurrence
from canonlm.models.initialize import Fill, normal, start_with, zeros
from canonlm.models.mixers.base import DERIVED, Mixer, Options
from canonlm.models.norm import RMSNorm
from canonlm.models.settings import Config


@dataclass
class KeyValueOptions(Options):
    """Options of mixers whose heads have keys and values: `num_heads` (default: half of num_attention_heads, at least
    1), `key_head_dim` and `value_head_dim`."""

    num_heads: int = DERIVED
    key_head_dim: int = DERIVED
    value_head_dim: int = DERIVED


@dataclass
class HeadOptions(KeyValueOptions):
    """Also `output_gate`: gate the output by a projection of rank `output_gate_rank` (None: of full rank). By default
    `key_head_dim` is hidden_size / num_heads, and `value_head_dim` twice that."""

    output_gate: bool = True
    output_gate_rank: int | None = 16

    def complete(self, config: Config) -> None:
        self.derive_heads(config, key_head_dim=1, value_head_dim=2)
        if self.output_gate_rank is not None:
            self.check_positive("output_gate_rank")


def derive_heads(options: Options, config: Config, **widths: int) -> None:
    """Deprecated: `options.derive_heads(config, …)`."""
    warnings.warn("derive_heads(self, config, …) goes: use self.derive_heads(config, …)", FutureWarning, stacklevel=2)
    options.derive_heads(config, **widths)


class RecurrentMixer(Mixer):
    """A mixer with one recurrent state per row. A subclass implements `mix`."""

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.options: Any = config.options(layer_idx)

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output `[B, T, D]` and the state after the last token; padding must leave the state as it was."""
        raise NotImplementedError

    def forward(
        self,
        x_BTD: Tensor,
        layout: Layout,
        attention_mask: Tensor | None = None,
        rotary: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        **kwargs,
    ) -> tuple[Tensor, Tensor | None]:
        """The output `[B, T, D]`, and None (in place of attention weights) or what the mixer hands on.

        Args:
            x_BTD: the layer's input, after its norm.
            layout: documents and padding of the batch.
            attention_mask, rotary: the mask of all pairs, and the tables of rotary positions; only attention uses them.
            cache: the cache, which is read and updated; None: there is none.
        """
        state = read_recurrence(cache, self.layer_idx, layout)
        handed = {"first": kwargs["first"]} if self.hands_on else {}
        mixed: tuple[Tensor, ...] = self.mix(x_BTD, layout, cache, state, **handed)
        write_recurrence(cache, self.layer_idx, mixed[1])
        return mixed[0], mixed[2] if self.hands_on else None

    def add_projections(self, widths: dict[str, int]) -> None:
        """`NAME_proj`, from the mixer's input to this many channels each."""
        self.widths = widths
        for name, width in widths.items():
            self.add_module(f"{name}_proj", nn.Linear(self.config.hidden_size, width, bias=False))

    def project(self, x_BTD: Tensor) -> dict[str, Tensor]:
        return {name: self.get_submodule(f"{name}_proj")(x_BTD) for name in self.widths}

    def add_short_convs(self, widths: dict[str, int], *, bias: bool = False, fill: Fill | None = None) -> None:
        """Site b: a short convolution with SiLU and without residual on each projection."""
        if SHORT_CONV not in self.sites:
            return
        for name, width in widths.items():
            conv = CanonLayer(width, self.config.conv_kernel, residual=False, activation=True, bias=bias)
            if fill is not None:
                start_with(conv, weight=fill)
            self.add_module(f"{name}_conv1d", conv)


class LinearAttention(RecurrentMixer):
    """Projects to queries, keys and values; normalises and gates each head's output and projects it back. A subclass
    implements `recur`, the recurrence between."""

    Options = HeadOptions
    tensor_parallel: ClassVar = {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), "columns"),
        "o_norm": "head_norm",
        "o_proj": "rows",
    }
    tensor_parallel_divides: ClassVar[tuple[str, ...]] = ("num_heads",)

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        options, hidden = self.options, config.hidden_size
        heads, value_dim = options.num_heads, options.value_head_dim
        self.num_key_value_heads = getattr(options, "num_key_value_heads", heads)
        self.head_dims = {"q": options.key_head_dim, "k": options.key_head_dim, "v": value_dim}
        counts = {"q": heads, "k": self.num_key_value_heads, "v": self.num_key_value_heads}
        self.add_projections({name: counts[name] * size for name, size in self.head_dims.items()})
        self.add_short_convs(self.widths, fill=normal(config.initializer_range))
        self.add_canons(self.widths, self.head_dims)
        self.g_proj: nn.Module | None = None
        if options.output_gate:
            rank, width = options.output_gate_rank, heads * value_dim
            self.g_proj = nn.Linear(hidden, width, bias=False) if rank is None else LowRank(config, hidden, rank, width)
        self.o_norm = RMSNorm(value_dim, config.rms_norm_eps)
        self.o_proj = nn.Linear(heads * value_dim, hidden, bias=False)

    def activate(self, gate: Tensor) -> Tensor:
        """The activation of the output gate."""
        return nn.functional.silu(gate)

    def recur(
        self, x_BTD: Tensor, q_BTHK: Tensor, k_BTJK: Tensor, v_BTJV: Tensor, layout: Layout, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`o_BTHV` and the state; gates are made from `x_BTD`, the mixer's input."""
        raise NotImplementedError

    def mix(self, x_BTD: Tensor, layout: Layout, cache: Cache | None, state: Tensor | None) -> tuple[Tensor, Tensor]:
        projected = self.project(x_BTD)
        if SHORT_CONV in self.sites:
            projected = self.run(SHORT_CONV, projected, layout, cache)
        else:
            projected = {name: nn.functional.silu(x) for name, x in projected.items()}
        projected = self.run(OF_MIXER, projected, layout, cache, x_BTD)
        q_BTHK, k_BTJK, v_BTJV = (x.unflatten(-1, (-1, self.head_dims[name])) for name, x in projected.items())
        o_BTHV, state = self.recur(x_BTD, q_BTHK, k_BTJK, v_BTJV, layout, state)
        o = self.o_norm(o_BTHV).flatten(-2)
        if self.g_proj is not None:
            o = o * self.activate(self.g_proj(x_BTD))
        return self.o_proj(o), state


class LowRank(nn.Sequential):
    """A linear map of low rank, with a function between its factors if one is given. Both factors start so that their
    product has the usual variance. start: the bias's initial values."""

    def __init__(
        self,
        config: Config,
        in_features: int,
        rank: int,
        out_features: int,
        *,
        bias: bool = True,
        start: Fill = zeros,
        between: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(nn.Linear(in_features, rank, bias=False), nn.Linear(rank, out_features, bias=bias))
        for linear in self:
            start_with(linear, weight=normal(config.initializer_range**0.5 / rank**0.25), bias=start)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        down, up = self
        return up(down(x) if self.between is None else self.between(down(x)))


def mask_out(x: Tensor, layout: Layout) -> Tensor:
    """`x`, `[B, T, ...]`, with zeros at padding."""
    if layout.attention_mask is None:
        return x
    padding_BT = layout.attention_mask == 0
    return x.masked_fill(padding_BT.view(*padding_BT.shape, *[1] * (x.ndim - 2)), 0)


def at_least_float32(x: Tensor) -> Tensor:
    """`x`, or this device's part of a parameter."""
    x = on_this_device(x)
    return x.to(torch.promote_types(x.dtype, torch.float32))


def unit(x: Tensor) -> Tensor:
    """Divided by its norm; the constant keeps a vector of zeros at zero."""
    wide = at_least_float32(x)
    return (wide * (wide.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).to(x.dtype)
