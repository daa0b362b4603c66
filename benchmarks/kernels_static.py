"""What Triton's compiler makes of every kernel for GPUs that are not here: registers, spills, widths of loads.

Run in the kernels' environment (`make test-kernels` does): .venv-kernels/bin/python benchmarks/kernels_static.py
Writes benchmarks/results/kernels-static.json, a row per kernel and architecture. Nothing is executed on a device.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

HERE = Path(__file__).resolve().parent
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Absent:
    """A driver of a card that is not here: enough to compile for it."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compiled_by(call: Callable[[], object], capability: int) -> list:
    """The kernels that `call` launches, compiled and not launched."""
    kernels, run = [], triton.JITFunction.run

    def only_compile(self, *args, grid, warmup, **kwargs):
        kernels.append(run(self, *args, grid=grid, warmup=True, **kwargs))

    driver.set_active(Absent(capability))
    triton.JITFunction.run = only_compile
    try:
        call()
    finally:
        triton.JITFunction.run = run
    return kernels


WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}
ASYNC = {"": 4, "64": 8, "128": 16}


def describe(kernel) -> dict:
    """Registers per thread, spilled bytes, and the SASS's global loads and stores in order, by width in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name], capture_output=True, text=True, check=True
        )
        sass = subprocess.run([TOOLS / "cuobjdump", "-sass", file.name], capture_output=True, text=True, check=True)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage.stdout)}
    loads, stores, order = [], [], []
    for opcode in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", sass.stdout, re.M):
        parts = opcode.split(".")
        if parts[0] in ("LDG", "LDGSTS"):
            loads.append(max([WIDTHS.get(part, 0) for part in parts[1:]] + [0]) or 4)
            order.append("L")
        elif parts[0] == "STG":
            stores.append(max([WIDTHS.get(part, 0) for part in parts[1:]] + [0]) or 4)
            order.append("S")
    return {
        "kernel": kernel.metadata.name,
        "warps": kernel.metadata.num_warps,
        "registers": numbers["REG"],
        "shared": kernel.metadata.shared,
        "spilled": len(re.findall(r"\b(?:LDL|STL)\b", sass.stdout)) + numbers["LOCAL"],
        "loads": loads,
        "stores": stores,
        "order": "".join(order),
    }
