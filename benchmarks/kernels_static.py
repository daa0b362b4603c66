"""Every kernel as Triton compiles it for GPUs that are not present: registers, spills, widths of loads.

Run in the kernels' environment (`make test-kernels` does): .venv-kernels/bin/python benchmarks/kernels_static.py
Writes benchmarks/results/kernels-static.json, a row per kernel and architecture. The exit code is 1 if a kernel spills
registers, has narrow loads, stores between its loads, does not load rows ahead of time, or if fewer of its programs fit
into a multiprocessor than its launch assumes. Nothing is executed on a device.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

HERE = Path(__file__).resolve().parent
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


class Absent:
    """A driver for a card that is not present, enough to compile for it."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return self.target.arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target


def compiled_by(call: Callable[[], object], capability: int) -> list:
    """The kernels that `call` launches, compiled but not launched."""
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


def describe(kernel) -> dict:
    """Registers per thread, spilled instructions, and the SASS's global loads and stores in order, in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage, sass = (
            subprocess.run([TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True).stdout
            for what in ("-res-usage", "-sass")
        )
    numbers = {key: int(value) for key, value in re.findall(r"(REG|LOCAL):(\d+)", usage)}
    loads, order = [], ""
    for opcode in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9_.]+)", sass, re.M):
        name, *modifiers = opcode.split(".")
        if name in ("LDG", "LDGSTS"):
            loads.append(max((WIDTHS.get(modifier, 0) for modifier in modifiers), default=0) or 4)
            order += "L"
        elif name == "STG":
            order += "S"
    registers, warps = numbers["REG"], kernel.metadata.num_warps
    blocks = 65536 // (-(-registers // 8) * 8 * 32 * warps)  # per multiprocessor, limited by its registers
    blocks = min(blocks, 32, 233472 // (kernel.metadata.shared + 1024))  # and by an H100's shared memory
    return {
        "registers": registers,
        "warps": warps,
        "warps_per_sm": min(64, blocks * warps),
        "shared_bytes": kernel.metadata.shared,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)) + numbers["LOCAL"],
        "asynchronous": len(re.findall(r"\bLDGSTS\b", sass)),
        "loads": {str(width): loads.count(width) for width in sorted(set(loads))},
        "order": re.sub(r"(.)\1*", lambda run: f"{len(run[0])}{run[1]} ", order).strip(),
    }


WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


def variants():
    """(name, call that launches one kernel, name of its launch, K, results per token, whether it reads a state).

    In bfloat16 with float32 taps, at the sizes of a 1B model: 2048 channels, 8192 in the MLP.
    """
    from canonlm.ops.kernels import conv, gated, normed, rotary, step

    def rows(channels, dtype=torch.bfloat16, time=512):
        return torch.empty(8, time, channels, dtype=dtype)

    def taps(channels, kernel=4):
        return torch.empty(channels, kernel)

    x, wide, half, w, weight = rows(2048), rows(8192), rows(1024), taps(2048), torch.empty(2048)
    reach, rstd = torch.empty(8, 512, dtype=torch.int8), torch.empty(8, 512)
    qkv, qkv_taps = [x, rows(512), rows(512)], [w, taps(512), taps(512)]
    act = {"residual": True, "act": 1, "scale": 1.0}
    plain = {"residual": True, "act": 0, "scale": 1.0}
    bare = {"residual": True, "scale": 1.0}
    one, few, mlp = rows(2048, time=1), [rows(n, time=1) for n in (2048, 512, 512)], rows(8192, time=1)

    for kernel in (4, 8):
        w, w_wide, w_half = taps(2048, kernel), [taps(8192, kernel)] * 2, taps(1024, kernel)
        state = torch.empty(8, 2048, kernel, dtype=torch.bfloat16)
        y, weight_y = (x, weight) if kernel == 4 else (half, torch.empty(1024))
        w_y = w if kernel == 4 else w_half
        for documents in (None, reach):
            tail = f", K={kernel}" + (", documents" if documents is not None else "")

            def forward(w=w, r=documents, how=plain):
                conv.run_forward([x], [w], [], None, r, None, **how, return_state=False)

            def forward_act(w=w, r=documents):
                conv.run_forward([x], [w], [], None, r, None, **act, return_state=False)

            def backward(w=w, r=documents, how=plain):
                conv.run_backward([x], [x], [w], [], None, r, **how)

            def backward_act(w=w, r=documents):
                conv.run_backward([x], [x], [w], [], None, r, **act)

            def gated_forward(w=w_wide, r=documents):
                gated.run_forward(wide, wide, w, None, r, None, **act, return_state=False)

            def gated_backward(w=w_wide, r=documents):
                gated.run_backward(wide, wide, wide, w, None, r, **act)

            def normed_forward(y=y, g=weight_y, w=w_y, r=documents):
                normed.run_forward(y, y, g, 1e-6, w, None, r, None, **bare, return_state=False)

            def normed_backward(y=y, g=weight_y, w=w_y, r=documents):
                normed.run_backward(y, y, y, g, w, rstd, None, r, **bare)

            yield "forward" + tail, forward, "forward", kernel, 1, False
            yield "forward, SiLU" + tail, forward_act, "forward", kernel, 1, False
            yield "backward" + tail, backward, "backward", kernel, 1, False
            yield "backward, SiLU" + tail, backward_act, "backward_act", kernel, 1, False
            yield "act(gate) * up forward" + tail, gated_forward, "gated_forward", kernel, 1, False
            yield "act(gate) * up backward" + tail, gated_backward, "gated_backward", kernel, 2, False
            yield "add, norm forward" + tail, normed_forward, "normed_forward", kernel, 3, False
            yield "add, norm backward" + tail, normed_backward, "normed_backward", kernel, 1, False

        def prefill(w=w, state=state):
            conv.run_forward([x], [w], [], state, None, None, **plain, return_state=True)

        def with_state(w=w, state=state):
            conv.run_backward([x], [x], [w], [], state, reach, **plain)

        yield f"forward, state in and out, K={kernel}", prefill, "forward", kernel, 1, True
        yield f"backward, state, documents, K={kernel}", with_state, "backward", kernel, 1, True
    for width in (1365, 2730, 5461, 5632):  # 8/3 of 512, 1024 and 2048; that of 2048 rounded up
        wide, w = rows(width), [taps(width)] * 2
        for documents in (None, reach):
            tail = f", {width} wide" + (", documents" if documents is not None else "")

            def gated_forward(x=wide, w=w, r=documents):
                gated.run_forward(x, x, w, None, r, None, **act, return_state=False)

            def gated_backward(x=wide, w=w, r=documents):
                gated.run_backward(x, x, x, w, None, r, **act)

            yield "act(gate) * up forward" + tail, gated_forward, "gated_forward", 4, 1, False
            yield "act(gate) * up backward" + tail, gated_backward, "gated_backward", 4, 2, False
    w = taps(2048)

    def three():
        conv.run_forward(qkv, qkv_taps, [], None, None, None, **plain, return_state=False)

    def three_backward():
        conv.run_backward(qkv, qkv, qkv_taps, [], None, None, **plain)

    table, heads = [torch.empty(1, 512, 1, 32)] * 2, ([32, 8, 0], 64)

    def rotary_forward(r=None):
        rotary.run_forward(qkv, qkv_taps, *table, r, *heads, **bare)

    def rotary_backward(r=None):
        rotary.run_backward(qkv, qkv, qkv_taps, *table, r, *heads, **bare)

    def steps():
        state = torch.empty(8, 3072, 4, dtype=torch.bfloat16)
        step.run_step(few, qkv_taps, [], state, None, few, **plain)

    def gated_step():
        state = torch.empty(8, 16384, 4, dtype=torch.bfloat16)
        step.run_gated_step(mlp, mlp, [taps(8192)] * 2, state, None, **act)

    def normed_step():
        state = torch.empty(8, 2048, 4, dtype=torch.bfloat16)
        step.run_normed_step(one, weight, 1e-6, w, state, None, **bare)

    yield "forward, q, k and v, K=4", three, "forward", 4, 1, False
    yield "backward, q, k and v, K=4", three_backward, "backward", 4, 1, False
    for documents in (None, reach):
        tail = ", documents" if documents is not None else ""
        yield (
            "rotary forward, q, k and v, K=4" + tail,
            partial(rotary_forward, documents),
            "rotary_forward",
            4,
            2,
            False,
        )
        yield (
            "rotary backward, q, k and v, K=4" + tail,
            partial(rotary_backward, documents),
            "rotary_backward",
            4,
            2,
            False,
        )
    yield "step, q, k and v, K=4", steps, "step", 4, 0, True
    yield "act(gate) * up step, K=4", gated_step, "gated_step", 4, 0, True
    yield "norm, step, K=4", normed_step, "normed_step", 4, 0, True


def complaints(row: dict, results: int, reads_state: bool) -> list[str]:
    """What is wrong with a compiled kernel, in words."""
    wrong = []
    if row["spills"]:
        wrong.append(f"{row['spills']} spills")
    wide = min(8, 2 * row["channels_per_thread"])  # bytes of a bfloat16 row that a thread loads at once
    narrow = sum(count for width, count in row["loads"].items() if 1 < int(width) < wide)
    weights = row["K"] * row["channels_per_thread"] * (2 if row["launch"].startswith(("gated", "rotary")) else 1)
    scalars = row["rows"] * row["stages"] if row["launch"] == "normed_backward" else 0
    if not results and row["shared_bytes"] > 64:
        wrong.append("the state passes through shared memory")
    odd = row["width"] % 16 > 0  # rows begin at any address
    if results and not odd and not row["asynchronous"] and row["stages"] > 1:
        wrong.append("no row is loaded ahead of time")
    if not reads_state and not odd and narrow > (weights + scalars if wide == 8 else 0):
        wrong.append(f"{narrow} loads of less than {wide} bytes; taps and scalars are {weights + scalars}")
    runs = [int(run[:-1]) for run in row["order"].split() if run[-1] == "S"]
    if max(runs) < row["rows"] * results:
        wrong.append(f"stores between loads: {row['order']}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], help="compute capabilities")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--check", action="store_true", help="write nothing; K = 8 for sm_90 alone")
    args = parser.parse_args()
    from canonlm.ops.kernels import launches

    rows, failures = [], 0
    for arch in args.arch:
        launches._card = lambda device, arch=arch: (f"sm_{arch}", 132)
        for name, call, launch_name, kernel, results, reads_state in variants():
            if args.only not in name:
                continue
            if args.check and arch != 90 and (kernel > 4 or " wide" in name):
                continue  # to save time
            [compiled] = compiled_by(call, arch)
            width = int(re.search(r"(\d+) wide|$", name)[1] or (2048 if kernel == 4 else 1024))
            launch = launches.launch_of(launch_name, torch.device("cpu"), kernel, 8, 512, width)
            row = {"kernel": name, "arch": f"sm_{arch}", "launch": launch_name, "K": kernel, **describe(compiled)}
            row |= {"rows": launch.rows, "channels": launch.channels, "stages": launch.stages}
            row["width"] = width
            apart = 2 if launch_name.startswith("rotary") else 1  # a thread's channels are in two places
            row["channels_per_thread"] = max(1, launch.channels // (32 * row["warps"] * apart))
            wrong = complaints(row, results, reads_state)
            failures += bool(wrong)
            print(
                f"sm_{arch:<4}{name:<44}{row['registers']:>4} registers {row['warps_per_sm']:>3} warps/SM  "
                f"{row['asynchronous']:>3} asynchronous loads  "
                f"{'; '.join(wrong) or 'ok'}",
                flush=True,
            )
            rows.append(row)
    if not args.check:
        versions = {"triton": triton.__version__, "torch": torch.__version__}
        text = json.dumps({"versions": versions, "kernels": rows}, indent=1)
        (HERE / "results/kernels-static.json").write_text(text + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
