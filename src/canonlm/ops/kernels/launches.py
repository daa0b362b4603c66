"""Launches of kernels: tile sizes per architecture, and those that `tune` measured on this machine.

The built-in ones for sm_90 and K <= 4 are the fastest of an H200, those of rotary kernels of an H100
(benchmarks/launches.py: 28 to 72 launches of each kernel, then six lengths of a tile at four shapes). Those for K > 4
and other architectures were chosen from compiler output (registers, loads in flight).
"""

import functools
import json
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from canonlm.core import user_folders


@dataclass(frozen=True)
class Launch:
    """Tile sizes. `tokens` is the largest tile; `launch_of` often takes a smaller one."""

    channels: int  # BC, of a program; for kernels with a norm, whose programs have all channels, of a warp
    warps: int
    rows: int = 4  # U, loaded before any is used
    stages: int = 2  # of the loop over rows: how many groups are under way
    tokens: int = 256  # LT
    registers: int | None = None  # of a thread, at most; None: the compiler decides
    programs: float = 7.0  # of a multiprocessor: the tile is halved, down to 32 tokens, until there are that many


# kernel -> for K <= 4, for K > 4
LAUNCHES = {
    "sm_90": {
        "forward": (Launch(256, 2, rows=8, stages=1), Launch(256, 2, rows=8)),
        "backward": (Launch(256, 2, rows=8, stages=1), Launch(256, 4)),
        "backward_act": (Launch(256, 2, rows=8, stages=3, programs=3.5), Launch(256, 4)),
        "gated_forward": (Launch(256, 2, stages=3, tokens=128, programs=5.0), Launch(256, 4)),
        "gated_backward": (
            Launch(128, 2, stages=3, registers=96, programs=5.0),
            Launch(256, 4, rows=2, stages=1, programs=5.0),
        ),
        "normed_forward": (Launch(256, 1, stages=3, programs=0.9), Launch(128, 1, rows=2, programs=0.9)),
        "normed_backward": (Launch(128, 1, rows=2, stages=3, programs=0.9), Launch(64, 1, rows=2, programs=0.9)),
        "rotary_forward": (Launch(256, 1, stages=3, tokens=128), Launch(256, 1)),
        "rotary_backward": (Launch(256, 1, rows=2, stages=3), Launch(256, 2)),
        "step": (Launch(128, 4), Launch(256, 2)),
        "gated_step": (Launch(128, 4), Launch(256, 2)),
        "normed_step": (Launch(128, 4), Launch(256, 2)),
    },
}
LAUNCHES["sm_80"] = LAUNCHES["sm_90"]
LAUNCHES["sm_100"] = LAUNCHES["sm_90"] | {"gated_backward": (Launch(256, 4, registers=128), Launch(256, 4, rows=1))}


def launch_of(kernel: str, device: torch.device, taps: int, batch: int, time: int, channels: int) -> Launch:
    """The launch for inputs `[batch, time, channels]` (`channels`: of all tensors)."""
    arch, processors = _card(device)
    launch = launch_at(arch, kernel, taps)
    if kernel in ("normed_forward", "normed_backward"):  # a program has all channels, and more warps for more of them
        width = max(1 << (channels - 1).bit_length(), 16)
        launch = replace(launch, channels=width, warps=min(16, max(1, width // launch.channels)))
    if channels % 16:  # rows are loaded in pieces of 2 bytes, which takes more registers
        launch = replace(launch, registers=None)
    blocks, tokens = batch * max(1, -(-channels // launch.channels)), launch.tokens
    while tokens > 32 and blocks * -(-time // tokens) < launch.programs * processors:
        tokens //= 2
    return replace(launch, tokens=tokens)


def launch_at(arch: str, kernel: str, taps: int) -> Launch:
    return tuned(arch).get(f"{kernel} K={taps}") or LAUNCHES[arch][kernel][taps > 4]


@functools.cache
def _card(device: torch.device) -> tuple[str, int]:
    if device.type != "cuda":
        return "sm_90", 132
    major, _ = torch.cuda.get_device_capability(device)
    known = {8: "sm_80", 9: "sm_90"}
    return known.get(major, "sm_100"), torch.cuda.get_device_properties(device).multi_processor_count


def tuned_path() -> Path:
    return (user_folders.cache() or Path(os.devnull)) / "kernels.json"


@functools.cache
def tuned(arch: str) -> dict[str, Launch]:
    """The launches that `tune` measured for this architecture; {} if the file is missing or not ours."""
    try:
        saved = json.loads(tuned_path().read_text())[arch]
        return {key: Launch(**values) for key, values in saved.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def keep(arch: str, launches: dict[str, Launch]) -> Path:
    """Save measured launches, and use them from now on."""
    path = tuned_path()
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        saved = {}
    saved[arch] = saved.get(arch, {}) | {key: asdict(launch) for key, launch in launches.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(saved, indent=2) + "\n")
    tuned.cache_clear()
    return path
