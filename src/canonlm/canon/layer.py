"""The Canon layer: every token looks at its three predecessors, channel by channel, before anything else happens.

    y_t = x_t + sum_{i=0..K-1} w_i * x_{t-i}        Physics of Language Models, Part 4.1 (arXiv 2512.17351), K = 4

This is the only Canon in the package: the decoder, its mixers and its MLPs all use it.
"""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from canonlm.errors import expected
from canonlm.ops.causal_conv import causal_conv, conv_state


class CanonLayer(nn.Module):
    """A causal depthwise convolution over the last `kernel_size` tokens, added to its input.

    Args:
        hidden_size: number of channels C.
        kernel_size: how many tokens it sees, the current one included (>= 1; the paper: 4).
        residual: add the input (the paper's choice: more stable, faster to train).
        activation: apply SiLU to the convolution (never to the residual).
        bias: add a learned bias to the convolution.

    `weight` is `[C, 1, K]`; its last tap multiplies the current token. It starts as `torch.nn.Conv1d`'s default
    does, uniform in +-1/sqrt(K), and is no `Conv1d`, so that a host model's own weight initialisation passes it by.
    """

    def __init__(
        self,
        hidden_size: int,
        kernel_size: int = 4,
        *,
        residual: bool = True,
        activation: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for key, value in (("hidden_size", hidden_size), ("kernel_size", kernel_size)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise expected(key, "an integer >= 1", value)
        self.hidden_size, self.kernel_size = hidden_size, kernel_size
        self.residual, self.activation = residual, activation
        self.weight = nn.Parameter(torch.empty(hidden_size, 1, kernel_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -self.init_bound, self.init_bound)

    @property
    def init_bound(self) -> float:
        """Weights and bias start uniform in [-bound, bound]: Kaiming uniform with a = sqrt(5), fan-in K."""
        return self.kernel_size**-0.5

    def forward(
        self,
        x: Tensor,
        *,
        attention_mask: Tensor | None = None,
        doc_ids: Tensor | None = None,
        state: Tensor | None = None,
        return_state: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Args:
            x: `[batch, time, channels]`, any floating dtype; the result has the same.
            attention_mask: `[batch, time]`, 1 at real tokens, 0 at padding, which counts as zeros. `x` is not modified.
            doc_ids: `[batch, time]` integers, one value per document of a packed row; nothing crosses a boundary.
            state: `[batch, channels, kernel_size]`, as returned for what came before; it continues the document of
                the first token.
            return_state: also return the state after this input, taken at each row's last real token.

        Prefill in chunks and one-token decoding, each with the state of the last, equal one call on the whole.
        """
        if x.ndim != 3 or x.shape[-1] != self.hidden_size:
            raise expected("x", f"a tensor [batch, time, {self.hidden_size}]", tuple(x.shape))
        if attention_mask is not None:
            x = x.masked_fill((attention_mask == 0)[..., None], 0)
        y = self._convolve(x, doc_ids, state)
        if not return_state:
            return y
        return y, conv_state(x, self.kernel_size, mask_BT=attention_mask, doc_ids_BT=doc_ids, state_BCK=state)

    def _convolve(self, x_BTC: Tensor, doc_ids_BT: Tensor | None, state_BCK: Tensor | None) -> Tensor:
        compute = torch.promote_types(torch.promote_types(x_BTC.dtype, self.weight.dtype), torch.float32)
        weight = on_this_device(self.weight).to(compute)
        if not self.activation and self.bias is None:
            if self.residual:
                # x + conv(x) is one convolution whose last tap is larger by one: a pass less, and a rounding less.
                weight = weight + _unit_tap(self.kernel_size, weight.device, compute)
            return causal_conv(x_BTC, weight, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        y_BTC = causal_conv(x_BTC.to(compute), weight, doc_ids_BT=doc_ids_BT, state_BCK=state_BCK)
        if self.bias is not None:
            y_BTC = y_BTC + on_this_device(self.bias).to(compute)
        if self.activation:
            y_BTC = nn.functional.silu(y_BTC)
        if self.residual:
            y_BTC = y_BTC + x_BTC
        return y_BTC.to(x_BTC.dtype)

    def extra_repr(self) -> str:
        how = f"residual={self.residual}, activation={self.activation}, bias={self.bias is not None}"
        return f"{self.hidden_size}, kernel_size={self.kernel_size}, {how}"


def on_this_device(weight: Tensor) -> Tensor:
    """`weight`, or the part that is here of one spread over devices (a DTensor)."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _unit_tap(kernel: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    tap = torch.zeros(kernel, device=device, dtype=dtype)
    tap[-1] = 1
    return tap
