"""The device under test, and its timers. A rehearsal on a CPU runs the same code, with a clock for CUDA events."""

import gc
import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

FLUSH = 2**28
"""Bytes that are written before each measured call: several times the L2 cache of any card."""

AHEAD = 1_000_000
"""Clock cycles (half a millisecond) that the GPU waits before each measured call. Meanwhile the call is launched, so
that no gap between its kernels is the host's."""

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "flash-attn",
    "numpy",
)


class Device:
    """A kind of device, "cuda" or "cpu". Models and tensors are in bfloat16 on either."""

    dtype = torch.bfloat16

    def __init__(self, kind: str) -> None:
        self.kind, self.is_gpu = kind, kind == "cuda"
        self.device = torch.device(kind)
        if self.is_gpu:
            self._flushed = torch.empty(FLUSH, dtype=torch.int8, device=self.device)
        elif os.environ.get("TRITON_INTERPRET") == "1":
            sys.path.append(str(Path(__file__).parents[2] / "tests/kernels"))
            from interpreter import correct_the_interpreter  # which also makes it faster

            correct_the_interpreter()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name() if self.is_gpu else f"{platform.machine()} CPU, rehearsal"

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*shape, device=self.device, dtype=torch.float32).to(dtype or self.dtype)

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated_gib(self) -> float:
        return torch.cuda.memory_allocated() / 2**30 if self.is_gpu else 0.0

    def peak_gib(self) -> float:
        """Memory of tensors at the peak since `empty_cache`; of a CPU, of the process since it began."""
        from canonlm.train.machine import memory_gb

        return (memory_gb(self.device) or 0.0) * 1e9 / 2**30

    def compiled(self, function: Callable, **how: Any) -> Callable:
        """By inductor on a GPU; a rehearsal only traces, as compiling for a CPU takes minutes."""
        return torch.compile(function, **how) if self.is_gpu else torch.compile(function, backend="aot_eager")

    def captured(self, call: Callable[[], object], times: int) -> Callable[[], object]:
        """A CUDA graph of the call, `times` in a row. It keeps the call, as a graph has its tensors' addresses only."""

        def repeated() -> None:
            for _ in range(times):
                call()

        if not self.is_gpu:
            return repeated
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                call()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            repeated()
        return lambda: (call, graph.replay())

    def median_us(self, calls: Mapping[str, Callable[[], object]], seconds: float = 0.5) -> dict[str, float]:
        """The median microseconds of each call on the device, from passes that take turns, with cold caches.

        They last about `seconds` together, but there are at least 5 passes and at most 50; 3 more warm up.
        """
        if not self.is_gpu:
            return self._pass(calls)
        for call in calls.values():
            for _ in range(3):
                call()
        start = time.perf_counter()
        passes = [self._pass(calls)]
        took = time.perf_counter() - start
        count = min(50, max(5, int(seconds / took)))
        passes += [self._pass(calls) for _ in range(count - 1)]
        return {name: statistics.median(one[name] for one in passes) for name in calls}

    def _pass(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        if not self.is_gpu:
            return {name: 1e6 * self.wall(call) for name, call in calls.items()}
        events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in calls}
        for name, call in calls.items():
            self._flushed.zero_()
            torch.cuda._sleep(AHEAD)
            events[name][0].record()
            call()
            events[name][1].record()
        torch.cuda.synchronize()
        return {name: 1000 * start.elapsed_time(end) for name, (start, end) in events.items()}

    def wall(self, call: Callable[[], object]) -> float:
        """Seconds by the clock until the device has done the call."""
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def wall_in_turns(self, calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
        """Seconds by the clock of each, taking turns, after one round that warms up."""
        took: dict[str, list[float]] = {name: [] for name in calls}
        for index in range(rounds + 1):
            for name, call in calls.items():
                seconds = self.wall(call)
                if index:
                    took[name].append(seconds)
        return took


def machine(device: Device) -> dict[str, Any]:
    """For the reader of the results: card, versions, commit, date."""
    facts: dict[str, Any] = {"device": device.name, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if device.is_gpu:
        card = torch.cuda.get_device_properties(0)
        facts |= {"memory_gib": round(card.total_memory / 2**30, 1), "processors": card.multi_processor_count}
        facts["cuda"] = torch.version.cuda
    facts["cores"] = os.cpu_count()
    facts["versions"] = {"python": platform.python_version()}
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            facts["versions"][package] = importlib.metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError):
        facts["commit"] = subprocess.run(git, capture_output=True, text=True).stdout.strip() or None
    return facts
