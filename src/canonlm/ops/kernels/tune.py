"""Measures launches on the GPU in use, on request: `tune(…)`. The results are saved for this user (`launches.keep`).

No other module here measures the speed of kernels.
"""

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any, TypeVar

import torch

from canonlm.ops.kernels import launches
from canonlm.ops.kernels.launches import Launch

T = TypeVar("T")

CANDIDATES = {
    "forward": [(256, 2), (256, 4), (512, 4)],
    "backward": [(256, 2), (256, 4), (128, 2)],
    "backward_act": [(256, 4), (256, 2), (128, 2)],
    "gated_forward": [(256, 4), (256, 2), (512, 4)],
    "gated_backward": [(256, 4), (128, 2), (256, 8)],
    "normed_forward": [(256, 1), (128, 1)],
    "normed_backward": [(128, 1), (64, 1)],
    "rotary_forward": [(256, 2), (256, 1), (512, 2), (128, 1)],
    "rotary_backward": [(256, 2), (256, 1), (512, 4), (128, 1)],
}
"""(channels, warps) of a program."""


Measure = Callable[[Callable[[], object]], float]
"""Returns the seconds (or another unit) that a call takes."""


def tune(
    batch: int = 8,
    time: int = 4096,
    hidden: int = 2048,
    width: int = 8192,
    kernel: int = 4,
    *,
    names: Sequence[str] = tuple(CANDIDATES),
    measure: Measure | None = None,
) -> dict[str, Launch]:
    """The fastest launch of every kernel in `names` for inputs `[batch, time, hidden]` (MLP: `width`) in bfloat16, each
    written to the user's cache as soon as it is known, and used from now on. Takes a minute on a GPU.

    Compiling takes most of it, so all cores do it beforehand. `measure` replaces Triton's `do_bench`.
    """
    if measure is None:
        from triton.testing import do_bench

        measure = do_bench
    sizes, device = (batch, time, hidden, width, kernel), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    all_calls, best = calls(device, *sizes), {}
    processes = min(os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for name in names:
            parts = [(name, device, sizes, part, processes) for part in range(processes)]
            list(pool.map(_compile, *zip(*parts, strict=True)))
            best |= fastest({name: all_calls[name]}, kernel, launches._card(device)[0], measure)
    return best


def _compile(name: str, device: torch.device, sizes: tuple[int, ...], part: int, parts: int) -> None:
    """Run every `parts`-th candidate once: Triton keeps what it compiles on disk."""
    call = calls(device, *sizes)[name]
    for launch in candidates(name, sizes[-1])[part::parts]:
        with suppress(Exception):  # `fastest` handles it
            _with(launch, call)


def fastest(
    calls: dict[str, Callable[[], list[torch.Tensor]]], kernel: int, arch: str, measure: Measure
) -> dict[str, Launch]:
    """The candidate of each kernel with the smallest `measure` of its call, among those whose results are those of the
    built-in launch, the first; saved for `arch`."""
    best = {}
    for name, call in calls.items():
        measured, built_in = [], candidates(name, kernel)[0]
        right = _with(built_in, call)
        for launch in candidates(name, kernel):
            took = math.inf  # if a tile is too large for this GPU: Triton raises errors of several kinds
            with suppress(Exception):
                if launch == built_in or _agree(_with(launch, call), right):
                    took = _with(launch, partial(measure, call))
            measured.append((took, launch))
        best[f"{name} K={kernel}"] = min(measured, key=lambda pair: pair[0])[1]
        launches.keep(arch, best)
    return best


def _agree(results: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether no number is off by more than a few roundings of the largest."""
    pairs = zip(results, right, strict=True)
    return all(bool((one - other).abs().max() <= 0.02 * other.abs().max()) for one, other in pairs)


def _with(launch: Launch, call: Callable[[], T]) -> T:
    """The result of the call, with the same launch for every kernel."""
    use = launches.launch_at
    launches.launch_at = lambda *_: launch
    try:
        return call()
    finally:
        launches.launch_at = use


def candidates(name: str, kernel: int) -> list[Launch]:
    """The built-in launch, and a few tile sizes around it."""
    usual = launches.LAUNCHES["sm_90"][name][kernel > 4]
    sizes = product(
        CANDIDATES[name], ((4, 2), (4, 3), (8, 2)) if name == "forward" else ((4, 2), (2, 2), (2, 3)), (64, 128, 256)
    )
    tiles = [
        replace(usual, channels=channels, warps=warps, rows=rows, stages=stages, tokens=tokens, registers=None)
        for (channels, warps), (rows, stages), tokens in sizes
    ]
    return [usual, *(tile for tile in tiles if tile != usual)]


def calls(
    device: torch.device, batch: int, time: int, hidden: int, width: int, kernel: int
) -> dict[str, Callable[[], list[torch.Tensor]]]:
    from canonlm.ops.kernels import conv, gated, normed, rotary

    def row(channels: int) -> torch.Tensor:
        return torch.randn(batch, time, channels, device=device, dtype=torch.bfloat16)

    def taps(channels: int) -> torch.Tensor:
        return torch.randn(channels, kernel, device=device)

    x, dy, w, weight = row(hidden), row(hidden), taps(hidden), torch.ones(hidden, device=device)
    gate, up, dh, pair = row(width), row(width), row(width), [taps(width), taps(width)]
    bare: dict[str, Any] = {"residual": True, "scale": 1.0}
    head_dim = min(hidden, 64)
    table = [torch.ones(1, time, 1, head_dim // 2, device=device)] * 2
    turns: tuple[Any, ...] = (*table, None, [hidden // head_dim] * 2 + [0], head_dim)
    plain, silu, rstd = bare | {"act": 0}, bare | {"act": 1}, torch.ones(batch, time, device=device)
    return {
        "forward": lambda: conv.run_forward([x], [w], [], None, None, None, **plain, return_state=False),
        "backward": lambda: conv.run_backward([dy], [x], [w], [], None, None, **plain),
        "backward_act": lambda: conv.run_backward([dy], [x], [w], [], None, None, **silu),
        "gated_forward": lambda: gated.run_forward(gate, up, pair, None, None, None, **silu, return_state=False),
        "gated_backward": lambda: gated.run_backward(dh, gate, up, pair, None, None, **silu),
        "normed_forward": lambda: normed.run_forward(
            x, dy, weight, 1e-6, w, None, None, None, **bare, return_state=False
        ),
        "normed_backward": lambda: normed.run_backward(dy, dy, x, weight, w, rstd, None, None, **bare),
        "rotary_forward": lambda: rotary.run_forward([x, dy, x], [w] * 3, *turns, **bare),
        "rotary_backward": lambda: rotary.run_backward([dy, x, dy], [x, dy, x], [w] * 3, *turns, **bare),
    }
