"""Measure launches on the card at hand, on request: `tune(…)`; the results are kept for this user (`launches.keep`).

Nothing else here runs a kernel to find out how fast it is.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch

from canonlm.ops.kernels import launches
from canonlm.ops.kernels.launches import Launch

CANDIDATES = {
    "forward": [(256, 2), (256, 4), (512, 4)],
    "backward": [(256, 2), (256, 4), (128, 2)],
    "backward_act": [(256, 4), (256, 2), (128, 2)],
    "gated_forward": [(256, 4), (256, 2), (512, 4)],
    "gated_backward": [(256, 4), (128, 2), (256, 8)],
    "normed_forward": [(256, 1), (128, 1)],
    "normed_backward": [(128, 1), (64, 1)],
}
"""(channels, warps) of a program."""


def tune(batch: int = 8, time: int = 4096, hidden: int = 2048, width: int = 8192, kernel: int = 4) -> dict[str, Launch]:
    """The fastest launch of every kernel for inputs `[batch, time, hidden]` (MLP: `width`) in bfloat16, written to the
    user's cache and used from now on. Minutes, on a GPU."""
    from triton.testing import do_bench

    device = torch.device("cuda")
    calls = _calls(device, batch, time, hidden, width, kernel)
    return fastest(calls, kernel, launches._card(device)[0], lambda call: float(do_bench(call)))


def fastest(
    calls: dict[str, Callable[[], object]], kernel: int, arch: str, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, Launch]:
    """Of each kernel's candidates the one for which `seconds` of its call is smallest; kept for `arch`."""
    best, use = {}, launches.launch_at
    try:
        for name, call in calls.items():
            measured = []
            for launch in candidates(name, kernel):
                launches.launch_at = lambda *_, launch=launch: launch
                measured.append((seconds(call), launch))
            best[f"{name} K={kernel}"] = min(measured, key=lambda pair: pair[0])[1]
    finally:
        launches.launch_at = use
    launches.keep(arch, best)
    return best


def candidates(name: str, kernel: int) -> list[Launch]:
    """Few: the built-in launch, and tile sizes around it."""
    usual = launches.LAUNCHES["sm_90"][name][kernel > 4]
    sizes = product(
        CANDIDATES[name], ((4, 2), (4, 3), (8, 2)) if name == "forward" else ((4, 2), (2, 2)), (64, 128, 256)
    )
    tiles = [Launch(*channels, *rows, tokens=tokens) for channels, rows, tokens in sizes]
    return [usual, *(tile for tile in tiles if tile != usual)]


def _calls(
    device: torch.device, batch: int, time: int, hidden: int, width: int, kernel: int
) -> dict[str, Callable[[], object]]:
    from canonlm.ops.kernels import conv, gated, normed

    def row(channels: int) -> torch.Tensor:
        return torch.randn(batch, time, channels, device=device, dtype=torch.bfloat16)

    def taps(channels: int) -> torch.Tensor:
        return torch.randn(channels, kernel, device=device)

    x, dy, w, weight = row(hidden), row(hidden), taps(hidden), torch.ones(hidden, device=device)
    gate, up, dh, pair = row(width), row(width), row(width), [taps(width), taps(width)]
    bare: dict[str, Any] = {"residual": True, "scale": 1.0}
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
    }
