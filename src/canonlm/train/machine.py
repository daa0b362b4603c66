"""What a run runs on: names, versions, and the memory in use."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from canonlm import __version__


def environment(device: torch.device) -> dict[str, Any]:
    """What the run ran on: for the reader of a report, and for whoever wants the same numbers."""
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
    """Of `platform.platform`, which asks another process, only where the system call is missing."""
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


def memory_gb(device: torch.device) -> float | None:
    """The most memory that was in use, in GB (1e9 bytes). On CUDA: by tensors of this process on `device`, since the
    last call. Else: resident memory of this process, since it began; None where the system does not say.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak / 1e9
    try:  # not getrusage: that starts from the peak of whoever started this process
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return None
