"""The base class of mixers and their registry: a mixer is one file that registers itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, get_type_hints

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import Cache

from canonlm.canon.layer import on_this_device
from canonlm.canon.sites import OF_MIXER, SHORT_CONV, members
from canonlm.canon.variants import make_canon
from canonlm.core.distributed import sum_over
from canonlm.core.errors import expected
from canonlm.models.apply_canon import Slot, run_site
from canonlm.models.cache import Layout
from canonlm.models.settings import Config, check_divides, check_positive
from canonlm.models.show import by_projection

CHUNK = 64
"""Tokens of a recurrence's chunk on a GPU, used to count FLOPs and memory."""

DERIVED: Any = None
"""The default of a field that is derived from others."""


@dataclass(frozen=True)
class Architecture:
    """A name for a mixer with certain settings.

    about: a one-line description. short_conv: whether the name includes the short convolution (site b), which
    `NAME-conv` leaves out. settings(hidden_size): the mixer's own options, and fields of `CanonLMConfig`, that the name
    stands for.
    """

    about: str
    short_conv: bool = False
    settings: Callable[[int], dict[str, Any]] = lambda hidden_size: {}


@dataclass
class Options:
    """A mixer's own part of the configuration. A subclass adds fields; `complete` fills in what is None."""

    def complete(self, config: Config) -> None:
        """Derive and check the options, from the general fields. InvalidSetting for wrong ones."""

    def derive(self, **defaults: int) -> None:
        """Fill in those of these sizes that are None, and check them all."""
        for key, default in defaults.items():
            if getattr(self, key) is None:
                setattr(self, key, default)
        self.check_positive(*defaults)

    def derive_heads(self, config: Config, **widths: int) -> None:
        """Fill in `num_heads`, by default half of num_attention_heads, and head dims, by default `widths[key]` *
        hidden_size / num_heads."""
        options: Any = self
        options.derive(num_heads=max(1, config.num_attention_heads // 2))
        for key, times in widths.items():
            if getattr(self, key) is None and times * config.hidden_size % options.num_heads:
                what = f"a divisor of hidden_size = {config.hidden_size} (or set {key})"
                raise expected("num_heads", what, options.num_heads)
        self.derive(**{key: times * config.hidden_size // options.num_heads for key, times in widths.items()})

    check_positive = check_positive
    check_divides = check_divides


def types_of(options: type[Options]) -> dict[str, Any]:
    """The type of each option. In a file with `from __future__ import annotations`, its field has only the text."""
    try:
        types = get_type_hints(options)
    except Exception:  # a name that only type checkers import, say: these options are not checked
        types = {}
    return {key: types.get(key, field.type) for key, field in options.__dataclass_fields__.items()}


class Mixer(nn.Module):
    """A way for a layer to mix tokens. A recurrent mixer extends `RecurrentMixer` and implements its `mix`; any other
    implements `forward`, with the arguments and the result of `RecurrentMixer.forward`."""

    name: ClassVar[str]  # in `CanonLMConfig.mixers`; set by `register`
    attribute: ClassVar[str] = "mixer"  # the mixer's name in its layer: part of parameters' names
    recurrent: ClassVar[bool] = True  # keeps a state that cannot be rewound
    rope_share: ClassVar[float] = 1.0  # of `head_dim`: the default of `rope_dim`
    attends: ClassVar[bool] = False  # weighs all tokens by a softmax: reads masks, positions and `GROUPS["attention"]`
    takes_short_conv: ClassVar[bool] = True  # has a place for site b
    ignores: ClassVar[tuple[str, ...]] = ()  # fields of the configuration that others of its kind read
    has_qkv: ClassVar[bool] = True  # its projections are queries, keys and values: sites Q, K and V can differ
    Options: ClassVar[type[Options]] = Options
    architectures: ClassVar[dict[str, Architecture]] = {}
    tensor_parallel: ClassVar[dict[str, str]] = {}  # how parts are split (`models/tensor_parallel.py`); {}: not at all
    tensor_parallel_divides: ClassVar[tuple[str, ...]] = ()  # fields or options that the group's size has to divide
    hands_on = False  # its second result goes to such mixers of later layers, as `first`, until which it is None
    group: dist.ProcessGroup | None = None  # the devices that share this layer

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.sites = config, layer_idx, config.sites(layer_idx)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # torch's says that a parameter may be a module

    def add_canons(self, widths: dict[str, int], head_dims: dict[str, int] | None = None) -> None:
        """Site B: `canonB_NAME` on each projection; on "q", "k" and "v" where the layer has the site of that letter.

        widths: channels by projection. head_dims: of a head in each, which variants by head need.
        """
        canons, sites = self.config.canons(self.layer_idx), members(OF_MIXER)
        for name, width in widths.items():
            if (variant := canons.get(name.upper() if name.upper() in sites else sites[0])) is not None:
                head_dim, input_size = (head_dims or {}).get(name), self.config.hidden_size
                canon = make_canon(variant, width, head_dim=head_dim, input_size=input_size)
                self.add_module(f"canon{OF_MIXER}_{name}", canon)

    def run(
        self,
        site: str,
        inputs: dict[str, Tensor],
        layout: Layout,
        cache: Cache | None,
        mixer_input: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Apply site b or B, or another inside the mixer, to the projections that have it. `mixer_input` is what they
        were projected from."""
        if site not in self.sites:
            return inputs
        pattern = "{}_conv1d" if site == SHORT_CONV else f"canon{site}_{{}}"
        layers: list[Any] = [getattr(self, pattern.format(name), None) for name in inputs]
        slot = Slot(layout, cache, self.layer_idx, self.sites.index(site))
        outputs = run_site(layers, list(inputs.values()), slot, mixer_input)
        return dict(zip(inputs, outputs, strict=True))

    def shared(self, x: Tensor) -> Tensor:
        """`x`, which is the same on all devices of the group, for heads of this device: the gradient is summed over
        the group."""
        return on_this_device(x) if self.group is None else SumOfGradients.apply(on_this_device(x), self.group)

    def own(self, x: Tensor, dim: int) -> Tensor:
        """This device's part of a dimension of `x`, which is the same on all devices; a dimension of 1 is for all."""
        x = self.shared(x)
        return x if self.group is None or x.shape[dim] == 1 else x.chunk(self.group.size(), dim)[self.group.rank()]

    __repr__ = by_projection

    @classmethod
    def check(cls, config: Config) -> None:
        """InvalidSetting for a field of the configuration that does not go with this mixer."""

    @classmethod
    def flops(cls, config: Config, seq_len: int) -> float:
        """FLOPs of one token's forward, without projections and convolutions; a multiply-add is two operations."""
        return 0.0

    @classmethod
    def extra_memory(cls, config: Config, seq_len: int) -> float:
        """Bytes that a GPU keeps for the backward pass of a window, beyond those that a CPU keeps."""
        return 0.0


class SumOfGradients(torch.autograd.Function):
    """The identity; the gradient is summed over a group."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return sum_over(dy, ctx.group), None


MIXERS: dict[str, type[Mixer]] = {}
"""Every mixer by its name in `CanonLMConfig.mixers`."""


def register(name: str) -> Callable[[type[Mixer]], type[Mixer]]:
    """A class decorator that registers a mixer under this name."""

    def add(cls: type[Mixer]) -> type[Mixer]:
        cls.name = name
        MIXERS[name] = cls
        return cls

    return add
