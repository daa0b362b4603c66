"""The machine of a run: names, versions, and the memory in use."""

import ctypes
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from canonlm import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """The environment of a run, for reports and for reproducing its numbers."""
    return {
        "machine": device_name(device),
        "device": str(device),
        "cores": os.cpu_count(),
        "platform": _platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "canonlm": __version__,
    }


def device_name(device: torch.device) -> str:
    """`NVIDIA H200`, or `x86_64 CPU, AMD EPYC`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{_machine()} CPU, {cpu_name()}"


def _platform() -> str:
    """`Linux-6.1.0-x86_64`. `platform.platform` starts another process, so it is only used without `os.uname`."""
    if not hasattr(os, "uname"):
        return platform.platform()
    system = os.uname()
    return f"{system.sysname}-{system.release}-{system.machine}"


def _machine() -> str:
    return os.uname().machine if hasattr(os, "uname") else platform.machine()


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown model"


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """If `wanted`: within this context, two runs on the same devices give the same bits. RuntimeError at an operator
    that cannot. To be entered before the process uses a GPU: cuBLAS reads its setting then."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    utilities: Any = torch.utils.deterministic
    fills, benchmarks = utilities.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    utilities.fill_uninitialized_memory = False  # it costs time, and only changes what faulty code reads
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        utilities.fill_uninitialized_memory = fills
        torch.backends.cudnn.benchmark = benchmarks


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, for its next allocations (does nothing without glibc).

    Training on a CPU frees and allocates the same tensors in every step. By default glibc returns large ones to the
    system, and every page of the next step is a page fault.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD, at its maximum: smaller blocks come from the heap
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the end of the heap is kept


def memory_gb(device: torch.device) -> float | None:
    """Peak memory in GB (1e9 bytes). On CUDA: of this process's tensors on `device`, since the last call. Else:
    resident memory of this process since its start; None if unknown.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    try:  # not getrusage: that starts from the peak of the parent process
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
