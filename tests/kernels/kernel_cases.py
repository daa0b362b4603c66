"""Random inputs for the kernels, small tiles for the interpreter, and tolerances of results."""

from contextlib import contextmanager
from dataclasses import dataclass, field

import definition
import pytest
import torch
from hypothesis import strategies as st

from canonlm.ops.kernels import launches
from canonlm.ops.kernels.documents import last_real, reach_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = {torch.float32: 2**-24, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@dataclass
class Case:
    seed: int = 0
    batch: int = 1
    time: int = 11
    sizes: list[int] = field(default_factory=lambda: [20])
    kernel: int = 4
    dtype: torch.dtype = torch.float32
    docs: bool = False
    pads: bool = False
    state: bool = False
    bias: bool = False
    residual: bool = True
    activation: str = "none"
    scale: float = 1.0
    strides: str = "plain"
    tokens: int = 8
    rows: int = 2

    def __post_init__(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape, dtype=self.dtype):
            return torch.randn(*shape, generator=generator).to(dtype)

        def uniform(*shape):
            return torch.rand(*shape, generator=generator)

        self.xs = [self.laid_out(normal, size) for size in self.sizes]
        self.dys = [normal(1, 1, 1).expand(x.shape) if self.strides == "zero" else normal(*x.shape) for x in self.xs]
        self.taps = [normal(size, 1, self.kernel, dtype=torch.float32) / 2 for size in self.sizes]
        self.biases = [normal(size, dtype=torch.float32) for size in self.sizes] if self.bias else []
        self.past = normal(self.batch, sum(self.sizes), self.kernel) if self.state else None
        shape = self.batch, self.time
        self.doc_ids = (uniform(*shape) < 0.3).long().cumsum(1) if self.docs else None
        self.mask = (uniform(*shape) < 0.7).long() if self.pads else None
        self.reach = reach_of(self.doc_ids, self.mask)
        self.last = None if self.mask is None else last_real(self.mask)

    def laid_out(self, normal, size):
        if self.strides == "slice":  # a slice of a wider projection
            return normal(self.batch, self.time, size + 6)[..., 3 : 3 + size]
        if self.strides == "time first":
            return normal(self.time, self.batch, size).transpose(0, 1)
        if self.strides == "channels last but one":
            return normal(self.batch, size, self.time).transpose(1, 2)
        if self.strides == "zero":
            return normal(1, 1, size).expand(self.batch, self.time, size)
        return normal(self.batch, self.time, size)

    @property
    def pasts(self):
        return [None] * len(self.xs) if self.past is None else list(self.past.split(self.sizes, dim=1))

    def final_state(self):
        """By definition, `[B, sum of C, K]`."""
        pairs = zip(self.xs, self.pasts, strict=True)
        states = [definition.final_state(x, self.kernel, past, self.doc_ids, self.mask) for x, past in pairs]
        return torch.cat(states, dim=1)

    def how(self):
        return {"residual": self.residual, "activation": self.activation, "scale": self.scale}

    def of(self, index):
        """Keyword arguments of the definition for one of the tensors, without x and taps."""
        bias = self.biases[index].double() if self.biases else None
        past = None if self.past is None else self.pasts[index].double()
        return {"bias": bias, "state": past, "docs": self.doc_ids, "mask": self.mask, **self.how()}


def cases(**fixed):
    """Cases that hypothesis draws; fixed values are not drawn."""
    drawn = {
        "seed": st.integers(0, 10**6),
        "batch": st.integers(1, 2),
        "time": st.sampled_from([1, 2, 3, 5, 8, 9, 13, 17]),
        "sizes": st.sampled_from([[5], [16], [20]]),
        "kernel": st.sampled_from([4, 4, 4, 1, 2, 3, 5, 6, 7, 8]),
        "dtype": st.sampled_from(DTYPES),
        "docs": st.booleans(),
        "pads": st.booleans(),
        "state": st.booleans(),
        "bias": st.booleans(),
        "residual": st.booleans(),
        "scale": st.sampled_from([1.0, 5**-0.5]),
        "strides": st.sampled_from(["plain", "slice", "time first", "channels last but one", "zero"]),
        "tokens": st.sampled_from([8, 16]),
        "rows": st.sampled_from([1, 2, 4]),
    }
    return st.builds(Case, **drawn | {key: st.just(value) for key, value in fixed.items()})


@contextmanager
def small_tiles(case, channels=16):
    """Launches small enough for the interpreter: tiles of 8 tokens and 16 channels."""
    launch = launches.Launch(channels=channels, warps=1, rows=case.rows, stages=1, tokens=case.tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "launch_at", lambda *args: launch)
        yield


def near(value, exact, dtype, sums=None):
    """Assert that errors are within 1e-5 in float32 (relative to `sums`, the sum of a long sum's absolute terms, if
    that is larger); in half precision the rounding of one number is added."""
    exact, value = exact.double(), value.double()
    bound = 1e-5 * (exact.abs() if sums is None else sums.double()).clamp(min=1.0)
    if dtype != torch.float32:
        bound = bound + EPSILON[dtype] * exact.abs()
    assert value.shape == exact.shape
    excess = ((value - exact).abs() - bound).max().item() if value.numel() else 0.0
    assert excess <= 0, f"off by {(value - exact).abs().max().item()}, {excess} too much"
