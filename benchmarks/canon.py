"""What a Canon layer costs: implementations of its convolution, side by side.

    python benchmarks/canon.py [--quick] [--json FILE]

Times are the best of several passes, forward and backward, in milliseconds; ratios are to the fastest eager form. For
Canon's share of a training step, see `benchmarks/train.py --only canon`.
"""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import transformers
from torch import Tensor

from canonlm.ops.causal_conv import causal_conv

SHAPES = [(64, 64, 128), (8, 512, 512), (8, 512, 1365)]
KERNEL = 4


def conv1d(x_BTC: Tensor, weight_C1K: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x_BTC.transpose(1, 2), (KERNEL - 1, 0))
    return torch.nn.functional.conv1d(padded, weight_C1K, groups=x_BTC.shape[-1]).transpose(1, 2)


def pad_and_slices(x_BTC: Tensor, weight_C1K: Tensor) -> Tensor:
    padded = torch.nn.functional.pad(x_BTC, (0, 0, KERNEL - 1, 0))
    taps = [padded[:, j : j + x_BTC.shape[1]] * weight_C1K[:, 0, j] for j in range(KERNEL)]
    return sum(taps[1:], start=taps[0])


def passes_ms(
    steps: dict[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Milliseconds per pass of each step. Steps take turns, so that a busy moment of the machine affects all alike."""
    took: dict[str, list[float]] = {name: [] for name in steps}
    for round_idx in range(rounds + 1):
        for name, step in steps.items():
            start = clock()
            step()
            if round_idx:  # the first warms up
                took[name].append(1000 * (clock() - start))
    return took


def forwards_and_backwards(form: Callable, x: Tensor, weight: Tensor, dy: Tensor) -> None:
    torch.autograd.grad(form(x, weight), (x, weight), dy)


def convolutions(threads: int, rounds: int) -> list[dict]:
    torch.set_num_threads(threads)
    rows = []
    for shape in SHAPES:
        doc_ids_BT = (torch.rand(shape[:2]) < 0.02).long().cumsum(1)
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.randn(shape, dtype=dtype, requires_grad=True)
            weight = torch.randn(shape[-1], 1, KERNEL, dtype=dtype, requires_grad=True)
            dy = torch.randn(shape, dtype=dtype)
            torch._dynamo.reset()
            forms = {
                "conv1d": conv1d,
                "pad+slices": pad_and_slices,
                "ours": causal_conv,
                "ours, documents": partial(causal_conv, doc_ids_BT=doc_ids_BT),
                "ours, compiled": torch.compile(causal_conv, dynamic=False),
            }
            row: dict = {"threads": threads, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
            steps = {name: partial(forwards_and_backwards, form, x, weight, dy) for name, form in forms.items()}
            row |= {name: min(took) for name, took in passes_ms(steps, rounds).items()}
            rows.append(row)
            eager = min(row[name] for name in forms if "ours" not in name or name == "ours")
            print(f"{threads:7}  {shape!s:16} {row['dtype']:9}", end="")
            print("".join(f"{row[name]:11.2f} ({row[name] / eager:4.1f}x)" for name in forms), flush=True)
    return rows


def load() -> float:
    """The load of the machine. Above its number of cores, times are unreliable, and ratios somewhat less so."""
    return round(os.getloadavg()[0], 1)


def machine() -> dict:
    names = [
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(names),
        "load": load(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer passes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    torch.manual_seed(0)
    rounds = 7 if options.quick else 30
    result: dict = {"machine": machine(), "convolutions": []}
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))

    print("\nCausal convolution, K = 4, forward + backward, ms (ratio to the fastest plain eager form)")
    columns = ["conv1d", "pad+slices", "ours", "ours, documents", "ours, compiled"]
    print("threads  shape            dtype    " + "".join(f"{name:>19}" for name in columns))
    for threads in (1, 2):
        result["convolutions"] += convolutions(threads, rounds)
        save(result, options.json)


def save(result: dict, path: Path | None) -> None:
    """Called after every part, because all of them take minutes."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
