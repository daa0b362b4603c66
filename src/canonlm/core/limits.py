"""Limits of the machine, checked before anything is allocated: a size may be a mistake, or come from somebody's
file."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook

from canonlm.core.errors import InvalidSetting, readable

MAX_MODULES = 50_000
"""Modules of a model. A thousand layers have some 20,000; building 50,000 takes some 10 seconds."""

_CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@contextmanager
def few_modules(limit: int = MAX_MODULES) -> Iterator[None]:
    """InvalidSetting if this thread builds more modules than `limit` within the context."""
    count, thread = 0, threading.get_ident()

    def hook(module: Any, name: str, submodule: Any) -> None:
        nonlocal count
        count += threading.get_ident() == thread
        if count > limit:
            raise InvalidSetting("model", f"model: expected at most {limit:,} modules; these sizes make more")

    handle = register_module_module_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def check_memory(key: str, num_bytes: float, device: str = "cpu") -> None:
    """InvalidSetting if a device has less memory than `num_bytes`."""
    available = memory_of(device)
    if num_bytes > available:
        place = "this machine" if torch.device(device).type == "cpu" else device
        raise InvalidSetting(key, f"{key}: needs at least {readable(num_bytes)}, {place} has {readable(available)}")


def memory_of(device: str = "cpu") -> int:
    """The memory in bytes: of an accelerator, or of the machine, or the limit of its container."""
    if (kind := torch.device(device)).type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(kind).total_memory
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    sizes = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemTotal:")]
    for path in map(Path, _CGROUPS):
        if path.is_file() and (limit := path.read_text().strip()).isdigit():
            sizes.append(int(limit))
    return min(sizes, default=2**62)
