"""The kernels of one compiled training step, by time: where Canon's cost is, and where ours differs from transformers'.

    python benchmarks/step_kernels.py [--out benchmarks/results/gpu/step-kernels.txt] [SHAPE,MODE,MODEL …]

SHAPE, MODE and MODEL as in gpu_parts/steps.py; default: the four steps of docs/gpu.md. Half a minute for each on a GPU
(with torch, triton, transformers and pydantic); without one, a rehearsal of tiny models.
"""

import argparse
import sys
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from gpu_parts.device import Device
from gpu_parts.steps import LLAMA, SHAPES, TINY, made, step_with

STEPS = ["1B,blocks,llama", "1B,blocks,llama+canon", "12x1024,whole,llama", f"12x1024,whole,{LLAMA}"]
SHOWN = 70
CUDA = torch.cuda.is_available()


def kernels_of(device: Device, shape_name: str, mode: str, model_name: str) -> list[str]:
    """Lines: a head, then the kernels, those that take the longest first."""
    shape = SHAPES[shape_name] if CUDA else TINY
    torch._dynamo.reset()
    device.empty_cache()
    input_ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["time"]), device=device.device)
    step = step_with(made(model_name, shape, device).train(), model_name, mode, device, input_ids)
    for _ in range(3):
        step()
    wall = min(device.wall(step) for _ in range(4))
    with profile(activities=[ProfilerActivity.CUDA if CUDA else ProfilerActivity.CPU]) as profiled:
        step()
        device.synchronize()
    times = defaultdict(list)
    for event in profiled.events() or []:
        if event.device_type.name == ("CUDA" if CUDA else "CPU"):
            times[event.name].append(event.time_range.elapsed_us())
    total, ordered = sum(map(sum, times.values())), sorted(times.items(), key=lambda pair: -sum(pair[1]))
    head = f"{shape_name} {mode} {model_name}: wall {1e3 * wall:.2f} ms, kernels {total / 1e3:.2f} ms"
    rows = [f"{sum(us) / 1e3:9.3f} ms {len(us):5d} x {sum(us) / len(us):9.1f} us  {name[:150]}" for name, us in ordered]
    return [f"== {head}, peak {device.peak_gib():.1f} GiB", *rows[:SHOWN]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/gpu/step-kernels.txt")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # models of one class share their code
    device, lines = Device("cuda" if CUDA else "cpu"), []
    for step in options.steps:
        head, *rows = kernels_of(device, *step.split(","))
        print(head, flush=True)
        lines += [head, *rows, ""]
    options.out.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
