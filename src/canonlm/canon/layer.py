"""The Canon layer: every token also reads its three predecessors, channel by channel.

    y_t = x_t + sum_{i=0..K-1} w_i * x_{t-i}        Physics of Language Models, Part 4.1 (arXiv 2512.17351), K = 4

The decoder, its mixers, its MLPs and `canonize` all use this layer. Variants whose taps are not plain parameters are
in `canonlm.canon.variants`.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _has_any_global_hook

from canonlm.core.errors import expected
from canonlm.ops.canon_conv import Conv, State, canon_conv, has_gaps, in_order, masked, state_after
from canonlm.ops.varlen import Layout, as_documents, document_runs
from canonlm.ops.varlen import has_gaps as search_gaps


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

    is_plain = True
    """Whether `conv` is all that it computes. A subclass of which this is not true has its own `convolve`."""

    has_own_forward = False
    """Whether a subclass has another forward, which then has to be called."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_own_forward = cls.has_own_forward or "forward" in vars(cls)

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
        self.flops = 2 * hidden_size * kernel_size  # of one token, on all devices together
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
        layout: Layout | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args:
            x: `[batch, time, channels]`, any floating dtype; the result has the same shape and dtype.
            attention_mask: `[batch, time]` for the tokens of `x` alone (a cache has its own), 1 at real tokens, 0 at
                padding, which is skipped: a token sees the last K real ones. `x` is not modified.
            doc_ids: `[batch, time]` integers; a document is a run of equal ones, and nothing crosses a boundary.
                Padding belongs to the document before it.
            state: `[batch, channels, kernel_size]`, as returned for the tokens before; it belongs to the document of
                the first token.
            return_state: also return the state after this input, taken at each row's last real token, in the dtype of
                `x`.
            mixer_input: `[batch, time, width]`, what x was projected from; only `DynamicCanon` reads it.
            gaps: whether padding may stand between real tokens, those of the state included. None: `attention_mask` is
                searched, for which a GPU is waited for.
            layout: in place of `attention_mask`, `doc_ids` and `gaps`, made once for all layers.

        Prefill in chunks and one-token decoding, each call with the state of the last one, equal a single call.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise expected("x", f"a tensor [batch, time, {self.hidden_size}]", tuple(x.shape))
        if not x.is_floating_point():
            raise expected("x", "a tensor of floating-point numbers", str(x.dtype))
        if state is not None and state.shape != (x.shape[0], self.hidden_size, self.kernel_size):
            what = f"a tensor [{x.shape[0]}, {self.hidden_size}, {self.kernel_size}], as returned for the tokens before"
            raise expected("state", what, tuple(state.shape))
        if layout is None:
            for key, each in (("attention_mask", attention_mask), ("doc_ids", doc_ids)):
                if isinstance(each, Tensor) and each.shape != x.shape[:2]:  # one row for all would be read as the first
                    raise expected(
                        key, f"a tensor [{x.shape[0]}, {x.shape[1]}], a value for each token", tuple(each.shape)
                    )
            if gaps is None:
                gaps = attention_mask is not None and search_gaps(attention_mask != 0, state is not None)
            if isinstance(doc_ids, Tensor):
                real = None if attention_mask is None else attention_mask != 0
                if real is not None:
                    real[:, :1] = True  # the state is of the first token's document, also if that is padding
                doc_ids = document_runs(doc_ids, real) if x.shape[1] > 1 else None  # a token alone crosses nothing
            layout = Layout(attention_mask, as_documents(doc_ids), gaps)
        [y], after = self._run(x, mixer_input, layout, State(state, return_state))
        return y if after is None else (y, after)

    def _run(
        self, x: Tensor, mixer_input: Tensor | None, layout: Layout, state: State
    ) -> tuple[list[Tensor], Tensor | None]:
        if self.is_plain:
            return canon_conv([x], [self.conv(x)], layout, state)
        if has_gaps(layout, [x]):
            xs = [x] if mixer_input is None else [x, mixer_input]
            return in_order(lambda xs, *rest: self._run(xs[0], xs[-1], *rest), xs, layout, state)
        [x] = masked([x], layout)
        y = self.convolve(x, layout.doc_ids, state.before, mixer_input)
        return [y], state_after([x], self.kernel_size, layout, state)

    def conv(self, x: Tensor) -> Conv:
        """The convolution that a plain layer applies to `x`."""
        bias = None if self.bias is None else on_this_device(self.bias)
        scale = self.scale if self.scaled else 1.0
        return Conv(self.taps(x), bias, self.residual, self.activation, scale)

    def taps(self, x: Tensor) -> Tensor:
        """`[C, 1, K]`, without the residual and the scale."""
        return on_this_device(self.weight)

    def convolve(
        self, x_BTC: Tensor, doc_ids_BT: Tensor | None, state_BCK: Tensor | None, mixer_input: Tensor | None
    ) -> Tensor:
        """The output of a layer that is not plain, for `x_BTC`, which is zero at padding."""
        raise NotImplementedError

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


def untouched(module: nn.Module) -> bool:
    """Whether a call of the module runs its class's forward and nothing else. Only then may its weights be read without
    a call: hooks (offloading, inspection), those of all modules included, would not run."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return "forward" not in module.__dict__ and not any(hooks) and not _has_any_global_hook()


def kernel_size_of(canon: Any) -> int:
    """The kernel size of a Canon layer, also of one that an adapter for its parameters wraps (PEFT's
    `target_parameters`)."""
    while not hasattr(canon, "kernel_size"):
        canon = canon.base_layer
    return int(canon.kernel_size)


def on_this_device(weight: Tensor) -> Tensor:
    """`weight`, or this device's part of a DTensor."""
    return weight.to_local() if isinstance(weight, DTensor) else weight
