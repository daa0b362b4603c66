"""The speed of launches of every training kernel on this GPU, from which `ops/kernels/launches.py` has its tile sizes.

    python benchmarks/launches.py [--only forward,backward] [--out benchmarks/results/gpu/launches.json]

First many launches of each kernel with tiles of 128 tokens at one shape, then the best two with tiles of 32 to 256
tokens at all shapes: in bfloat16, K = 4, about a minute on 16 cores, which compile beforehand. It needs torch, Triton
and numpy. A launch that does not compile, or takes more memory than there is, has no time. Without a GPU, Triton's
interpreter tries the script at a tiny size (TRITON_INTERPRET=1).
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from gpu_parts.device import Device, machine

from canonlm.ops.kernels import tune
from canonlm.ops.kernels.launches import Launch

KERNEL = 4
IS_GPU = torch.cuda.is_available()
KIND = "cuda" if IS_GPU else "cpu"
Shape = tuple[int, int, int, int]  # batch, time, channels, width of the MLP (of the gated kernels)
SHAPES: list[Shape] = [(4, 4096, 2048, 5632), (1, 4096, 2048, 5632), (8, 4096, 2048, 8192), (1, 16384, 4096, 12288)]
ROWS, STAGES, TOKENS = (2, 4, 8), (1, 2, 3), (32, 64, 96, 128, 192, 256)
if not IS_GPU:
    SHAPES, ROWS, STAGES, TOKENS = [(1, 16, 32, 48)], (4,), (1,), (8, 16)
COLUMNS = ("kernel", "shape", "channels", "warps", "rows", "stages", "tokens", "registers", "us")
Job = tuple[str, Launch, Shape]


def run(job: Job, call: Callable[[], Any]) -> Any:
    """`call` with exactly this launch; norm kernels have all channels in a program, and warps for them."""
    name, launch, shape = job
    if name.startswith("normed"):
        width = max(1 << (shape[2] - 1).bit_length(), 16)
        launch = replace(launch, channels=width, warps=min(16, max(1, width // launch.channels)))
    with ExitStack() as stack:
        for module in ("conv", "gated", "normed", "rotary"):
            stack.enter_context(mock.patch(f"canonlm.ops.kernels.{module}.launch_of", return_value=launch))
        return call()


def compile_jobs(jobs: Sequence[Job]) -> None:
    """Run each once: Triton keeps what it compiles on disk."""
    torch.set_num_threads(1)
    for job in jobs:
        with suppress(Exception):  # `measure` meets it again
            run(job, tune.calls(torch.device(KIND), *job[2], KERNEL)[job[0]])


def measure(device: Device, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    processes = min(os.cpu_count() or 1, 16)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        list(pool.map(compile_jobs, [jobs[part::processes] for part in range(processes)]))
    rows = []
    for shape in dict.fromkeys(shape for *_, shape in jobs):
        calls = tune.calls(torch.device(KIND), *shape, KERNEL)
        for job in (job for job in jobs if job[2] == shape):
            call, us = calls[job[0]], None
            with suppress(Exception):  # Triton raises errors of several kinds
                us = run(job, lambda call=call: device.median_us({"": call}, seconds=0.02)[""])
            rows.append({"kernel": job[0], "shape": shape, **asdict(job[1]), "us": us})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gpu/launches.json")
    parser.add_argument("--only", default=",".join(tune.CANDIDATES), help="kernels, separated by commas")
    options = parser.parse_args()
    names, out, device = options.only.split(","), options.out, Device(KIND)
    if unknown := [name for name in names if name not in tune.CANDIDATES]:
        parser.error(f'--only: unknown kernel "{unknown[0]}"; kernels: {", ".join(tune.CANDIDATES)}')
    jobs: list[Job] = []
    for name, pairs in ((name, tune.CANDIDATES[name]) for name in names):
        limits = (None, 96) if name == "gated_backward" else (None,)
        for (channels, warps), rows, stages, registers in product(pairs if IS_GPU else pairs[:1], ROWS, STAGES, limits):
            launch = Launch(channels, warps, rows=rows, stages=stages, tokens=128, registers=registers)
            jobs.append((name, launch, SHAPES[0]))
    first = measure(device, jobs)
    jobs = []
    for name in names:
        timed = sorted((row for row in first if row["kernel"] == name and row["us"]), key=lambda row: row["us"])
        best = [Launch(**{key: row[key] for key in asdict(Launch(1, 1))}) for row in timed[:2]]
        jobs += [(name, replace(one, tokens=t), shape) for one, t, shape in product(best, TOKENS, SHAPES)]
    rows = first + measure(device, jobs)
    head = {**machine(device), "what": f"microseconds of a launch in bfloat16, K = {KERNEL}", "columns": COLUMNS}
    lines = ",\n  ".join(json.dumps([round(r[c], 2) if c == "us" and r[c] else r[c] for c in COLUMNS]) for r in rows)
    out.write_text(json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n  {lines}\n ]\n}}\n')
    for name, shape in product(names, SHAPES):
        alike = [row for row in rows if row["kernel"] == name and row["shape"] == shape and row["us"]]
        if alike:
            row = min(alike, key=lambda row: row["us"])
            print(f"{name:16}{shape!s:26}{row['us']:9.1f} us  {[row[c] for c in COLUMNS[2:-1]]}")


if __name__ == "__main__":
    main()
