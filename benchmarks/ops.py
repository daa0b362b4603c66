"""The recurrences, forward and backward: step by step, in chunks, and in transformers' PyTorch forms, side by side.

    python benchmarks/ops.py [--device cuda] [--op NAME] [--profile] [--quick] [--json FILE]

Tokens per second, from the median of passes that take turns, after a check that all forms give the same outputs and
gradients. On a CPU: float32, with one thread and with two. On a GPU: bfloat16, the form that the op picks (a kernel of
flash-linear-attention where one can be used) beside the chunked PyTorch form. transformers has no form of GLA; its form
of SSD is timed with its default chunk of 256 tokens and with the 64 of ours.
"""

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from canon import load, machine, save
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize, softplus
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from canonlm.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_chunked, gated_delta_rule_recurrent
from canonlm.ops.gated_linear_attention import (
    gated_linear_attention,
    gated_linear_attention_chunked,
    gated_linear_attention_recurrent,
)
from canonlm.ops.ssd import ssd, ssd_chunked, ssd_recurrent

SHAPES = [(4, 512, 4, 64), (1, 4096, 8, 128)]  # batch, time, heads, key and value channels of a head (Mamba2: state)
LENGTHS = [512, 1024, 2048, 4096, 8192]
LADDER = {"cpu": (1, 4, 64), "cuda": (4, 16, 128)}  # batch, heads, channels at each of the lengths
STEP_BY_STEP_UP_TO = 512
TOLERANCE = {"cpu": 1e-4, "cuda": 3e-2}  # max difference, relative to the largest number
SECONDS = 8  # for the passes of one shape


class Op(NamedTuple):
    inputs: Callable[..., list[Tensor]]
    picked: Callable
    chunked: Callable
    recurrent: Callable
    transformers: dict[str, Callable]


def gla_inputs(*shape: int) -> list[Tensor]:
    q, k, v, g = torch.randn(4, *shape)
    return [q, k, v, logsigmoid(g) / 16]


def delta_rule_inputs(*shape: int) -> list[Tensor]:
    q, k, v = torch.randn(3, *shape)
    g, beta = torch.randn(2, *shape[:3])
    return [normalize(q, dim=-1), normalize(k, dim=-1), v, -softplus(g - 3), beta.sigmoid()]


def by_channel(*shape: int) -> list[Tensor]:
    q, k, v, _, beta = delta_rule_inputs(*shape)
    return [q, k, v, -softplus(torch.randn(shape) - 3), beta]


def ssd_inputs(*shape: int) -> list[Tensor]:
    batch, time, heads, channels = shape
    B, C = torch.randn(2, batch, time, 1, channels) / channels**0.5
    dt, A = softplus(torch.randn(batch, time, heads) - 3), -torch.linspace(1, 16, heads)
    return [torch.randn(shape), dt, A, B, C]


OPS = {
    "GLA": Op(
        gla_inputs,
        gated_linear_attention,
        gated_linear_attention_chunked,
        gated_linear_attention_recurrent,
        {},
    ),
    "delta rule": Op(
        delta_rule_inputs,
        gated_delta_rule,
        gated_delta_rule_chunked,
        gated_delta_rule_recurrent,
        {"transformers": torch_chunk_gated_delta_rule},
    ),
    "delta rule by channel": Op(
        by_channel,
        gated_delta_rule,
        gated_delta_rule_chunked,
        gated_delta_rule_recurrent,
        {"transformers": chunk_kimi_delta_attention},
    ),
    "SSD": Op(
        ssd_inputs,
        ssd,
        ssd_chunked,
        ssd_recurrent,
        {
            "transformers": lambda *inputs: (mamba2_chunk_scan(*inputs, chunk_size=256),),  # Mamba2Config's
            "transformers, chunk 64": lambda *inputs: (mamba2_chunk_scan(*inputs, chunk_size=64),),
        },
    ),
}


def forms_of(op: Op, device: str, time: int) -> dict[str, Callable]:
    if device == "cuda":
        return {"chunked": op.chunked, "picked": op.picked}
    forms = {"chunked": op.chunked}
    if time <= STEP_BY_STEP_UP_TO:
        forms["step by step"] = op.recurrent
    return forms | op.transformers


def forward_and_backward(form: Callable, inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    y = form(*inputs)[0]
    return [y, *torch.autograd.grad(y, inputs, dy)]


def check_agreement(steps: dict[str, Callable[[], list[Tensor]]], tolerance: float) -> None:
    first, *others = steps
    expected = [x.float() for x in steps[first]()]
    for name in others:
        for number, (x, y) in enumerate(zip(steps[name](), expected, strict=True)):
            difference = ((x.float() - y).abs().max() / y.abs().max()).item()
            if difference > tolerance:
                raise RuntimeError(f"{name} is not {first}: result {number} is off by {difference:.1e} of its largest")


def median_seconds(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The median pass of each step. Steps take turns, so that a busy moment of the machine affects all alike."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while len(times[next(iter(steps))]) < 3 or time.perf_counter() < end:
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(passes) for name, passes in times.items()}


def measure(name: str, shape: tuple[int, ...], device: str, seconds: float) -> dict:
    op, dtype = OPS[name], torch.float32 if device == "cpu" else torch.bfloat16
    torch.manual_seed(0)
    inputs = [x.to(device, dtype if x.ndim == 4 else torch.float32).requires_grad_() for x in op.inputs(*shape)]
    dy = torch.randn(shape).to(device, dtype)
    forms = forms_of(op, device, shape[1])
    steps = {form: partial(forward_and_backward, forms[form], inputs, dy) for form in forms}
    check_agreement(steps, TOLERANCE[device])
    medians = median_seconds(steps, seconds)
    tokens_per_s = {form: round(shape[0] * shape[1] / medians[form]) for form in forms}
    return {
        "op": name,
        "threads": torch.get_num_threads(),
        "shape": shape,
        "tokens_per_s": tokens_per_s,
        "load": load(),
    }


def profile(name: str, shape: tuple[int, ...]) -> None:
    """Print where the time of the chunked form goes, in five passes on a CPU."""
    inputs, dy = [x.requires_grad_() for x in OPS[name].inputs(*shape)], torch.randn(shape)
    forward_and_backward(OPS[name].chunked, inputs, dy)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(5):
            forward_and_backward(OPS[name].chunked, inputs, dy)
    print(f"{name}  {torch.get_num_threads()} threads  {shape}")
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=8, max_name_column_width=40))


def show(row: dict) -> None:
    speeds = row["tokens_per_s"]
    chunked = speeds["chunked"]
    cells = [f"{form} {speed:9,} ({chunked / speed:.2f}x)" for form, speed in speeds.items() if form != "chunked"]
    print(f"{row['op']:10}  {row['threads']} threads  {row['shape']!s:18}  chunked {chunked:9,}   ", end="")
    print("   ".join(cells), flush=True)


def show_growth(rows: list[dict]) -> None:
    """Print time per token in the longest row over that in the shortest. The cost is linear if the ratio is 1."""
    first, last = rows[0], rows[-1]
    for form, speed in last["tokens_per_s"].items():
        ratio = first["tokens_per_s"][form] / speed
        print(f"{'':10}  {form}: time per token at {last['shape'][1]} / at {first['shape'][1]} tokens: {ratio:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--op", choices=OPS, help="this op only")
    parser.add_argument("--profile", action="store_true", help="instead show where the time goes at the larger shape")
    parser.add_argument("--quick", action="store_true", help="short rows, few passes")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    result: dict = {"machine": machine(), "rows": []}
    if options.device == "cuda":
        result["machine"] |= {"gpu": torch.cuda.get_device_name()}
        result["machine"] |= {p: importlib.metadata.version(p) for p in ("flash-linear-attention", "triton")}
    print(", ".join(f"{key} {value}" for key, value in result["machine"].items()))
    print("Forward + backward, tokens/s (and how many times as fast the chunked form is)")
    batch, heads, channels = LADDER[options.device]
    ladder = [(batch, length, heads, channels) for length in LENGTHS]
    shapes = [(2, 128, 2, 64)] if options.quick else SHAPES
    seconds = 0.2 if options.quick else SECONDS
    for threads in (1, 2) if options.device == "cpu" else (1,):
        torch.set_num_threads(threads)
        for name in [options.op] if options.op else OPS:
            if options.profile:
                profile(name, SHAPES[-1])
                continue
            rows = []
            for shape in [*shapes, *(ladder[:2] if options.quick else ladder)]:
                rows.append(measure(name, shape, options.device, seconds))
                show(rows[-1])
                save({**result, "rows": result["rows"] + rows}, options.json)
            show_growth(rows[len(shapes) :])
            result["rows"] += rows


if __name__ == "__main__":
    main()
