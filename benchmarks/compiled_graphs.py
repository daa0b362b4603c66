"""A compiled training step: our Llama against transformers', by the code that inductor generates.

    python benchmarks/compiled_graphs.py [--device cpu|cuda] [--precision bf16|fp32] [--quick] [--json FILE]

Forward with loss and backward of equal Llamas are compiled completely, embeddings included. No code is run: `--device
cuda` needs Triton but no GPU: the graphs are traced on the CPU and lowered for a card of compute capability 9.0 (they
keep the CPU's attention, which counts like another). `loss` is the element-wise part of the chunked loss, for all
tokens. For each graph:

kernels    the number of generated kernels; matrix products and attention are called, not generated, and do not count
MB         read and written, as the scheduler counts them: by generated kernels, and by called ones
functions  the number of exp, log, pow, cos and sin values that generated kernels compute, in millions (Triton code
           only): they make a kernel slower than its bytes suggest
"""

import argparse
import copy
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from canon import machine, save
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor import compile_fx, metrics
from torch._inductor.debug import DebugContext
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode
from torch._inductor.virtualized import V
from torch.utils._pytree import tree_map

from canonlm import CanonLMConfig, CanonLMForCausalLM

SHAPE = {"layers": 4, "hidden": 512, "heads": 8, "time": 512, "batch": 8, "vocab": 4096}
QUICK = {"layers": 1, "hidden": 64, "heads": 2, "time": 64, "batch": 2, "vocab": 256}
CUDA = torch.device("cuda", 0)
CARD = SimpleNamespace(
    name="NVIDIA H200", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, total_memory=140 * 2**30,
    L2_cache_size=50 * 2**20, shared_memory_per_block=48 * 2**10, shared_memory_per_block_optin=227 * 2**10,
    gcnArchName="",
)  # fmt: skip


def simulate_card() -> None:
    """Make inductor and Triton read the properties of CARD."""
    import torch._inductor.scheduler
    from torch._dynamo.device_interface import CudaInterface, get_interface_for_device, register_interface_for_device
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    get_interface_for_device("cpu")  # registers all devices, but cuda only if there is one
    for place in (CudaInterface, CudaInterface.Worker):
        place.get_device_properties = staticmethod(lambda device=None: CARD)
    CudaInterface.get_compute_capability = staticmethod(lambda device=None: 90)
    for name in ("cuda", "cuda:0"):
        register_interface_for_device(name, CudaInterface)
    torch.cuda.get_device_properties = lambda device=None: CARD  # type: ignore[assignment]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.current_device = lambda: 0
    torch._inductor.scheduler.has_triton = lambda *_: True
    target = GPUTarget("cuda", 90, 32)
    driver.set_active(SimpleNamespace(get_current_target=lambda: target, get_current_device=lambda: 0))


def lowered(gm: torch.fx.GraphModule, on_cuda: bool, **options: Any) -> dict:
    """The numbers of one graph."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    mode = torch._guards.detect_fake_mode([node.meta["val"] for node in placeholders])
    compile_fx.view_to_reshape(gm)
    with V.set_fake_mode(mode), V.set_debug_handler(DebugContext()):
        compile_fx.fake_tensor_prop(gm, [node.meta["val"] for node in placeholders])
        compile_fx.record_original_output_strides(gm)
        compile_fx._recursive_post_grad_passes(gm, is_inference=False)
        if on_cuda:
            _move(gm, mode)
        inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        graph = GraphLowering(gm, example_inputs=inputs, is_backward=options.get("is_backward", False))
        before = metrics.generated_kernel_count
        with V.set_graph_handler(graph):
            graph.run(*inputs)
            code, _ = graph.codegen()
            total, _, _ = graph.count_bytes()
            called = sum(
                node.get_read_write_buffers_sizes()
                for node in graph.scheduler.nodes
                if isinstance(node, ExternKernelSchedulerNode)
            )
    row = {"kernels": metrics.generated_kernel_count - before}
    row |= {"MB": (total - called) / 1e6, "MB called": called / 1e6}
    return row | ({"functions": functions(getattr(code, "value", str(code)))} if on_cuda else {})


def _move(gm: torch.fx.GraphModule, mode: Any) -> None:
    def moved(x: Any) -> Any:
        if isinstance(x, torch.device):
            return CUDA
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
        return x

    with mode:
        for node in gm.graph.nodes:
            node.args, node.kwargs = tree_map(moved, node.args), tree_map(moved, node.kwargs)
            node.meta["val"] = tree_map(moved, node.meta.get("val"))


def functions(code: str) -> dict[str, float]:
    """The number of values of each function that the Triton kernels in `code` compute, in millions."""
    calls, counts = Counter(re.findall(r"(triton_\w+)\.run\(", code)), Counter()
    for kernel in code.split("@triton.jit")[1:]:
        kernel = kernel.split("'''")[0]
        if not (name := re.search(r"def (triton_\w+)\(", kernel)):
            continue  # a function that kernels call
        size = 1
        for numel in re.findall(r"^ *\w+numel = (\d+)", kernel, re.MULTILINE):
            size *= int(numel)
        for function in re.findall(r"\w+\.(exp2|exp|log|pow|cos|sin)\(", kernel):
            counts[function] += calls[name[1]] * size
    return {function: count / 1e6 for function, count in sorted(counts.items())}


def recording(rows: list[dict], on_cuda: bool) -> Callable:
    """A backend of `torch.compile` that adds a row per graph and runs the graphs uncompiled."""

    def inner(gm: torch.fx.GraphModule, example_inputs: Any, **options: Any) -> Callable:
        run = make_boxed_func(copy.deepcopy(gm).forward)
        part = {"part": "backward" if options.get("is_backward") else "forward"}
        rows.append(part | lowered(gm, on_cuda, **options))
        return run

    return lambda gm, inputs: compile_fx.compile_fx(gm, inputs, inner_compile=inner)


def of_model(build: Callable[[], torch.nn.Module], shape: dict, dtype: torch.dtype, on_cuda: bool) -> list[dict]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    rows: list[dict] = []
    model = build().to(dtype).train()
    embeds = torch.randn(shape["batch"], shape["time"], shape["hidden"], dtype=dtype, requires_grad=True)
    labels = torch.randint(shape["vocab"], (shape["batch"], shape["time"]))
    compiled = torch.compile(model, backend=recording(rows, on_cuda), fullgraph=True)
    compiled(inputs_embeds=embeds, labels=labels, use_cache=False).loss.backward()
    return rows


@torch.no_grad()
def of_loss(shape: dict, dtype: torch.dtype, on_cuda: bool) -> list[dict]:
    """The element-wise part of the chunked loss: loss and gradient of the logits of all tokens."""
    from canonlm.models.loss import _terms

    rows: list[dict] = []
    tokens = shape["batch"] * shape["time"]
    logits, targets = torch.randn(tokens, shape["vocab"], dtype=dtype), torch.randint(shape["vocab"], (tokens, 1))
    torch.compile(_terms, backend=recording(rows, on_cuda), fullgraph=True)(logits, targets, None, 0.0)
    return rows


def models(shape: dict) -> dict[str, Callable[[], torch.nn.Module]]:
    same = {
        "vocab_size": shape["vocab"],
        "hidden_size": shape["hidden"],
        "intermediate_size": 8 * shape["hidden"] // 3 // 64 * 64,
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "max_position_embeddings": shape["time"],
        "rms_norm_eps": 1e-5,
    }
    return {
        "transformers": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**same)),
        "ours": lambda: CanonLMForCausalLM(CanonLMConfig(**same)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp32"])
    parser.add_argument("--only", help="some of transformers,ours,loss")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--json", type=Path, help="write the numbers to this file")
    options = parser.parse_args()
    shape, on_cuda = QUICK if options.quick else SHAPE, options.device == "cuda"
    if on_cuda:
        simulate_card()
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    result: dict = {"machine": machine(), "generated for": options.device, "precision": options.precision}
    result |= {"shape": shape, "rows": []}
    print(", ".join(f"{key} {value}" for key, value in shape.items()), options.precision, options.device, flush=True)
    parts = {name: partial(of_model, build) for name, build in models(shape).items()} | {"loss": of_loss}
    for name, measure in parts.items():
        if options.only and name not in options.only.split(","):
            continue
        for row in measure(shape, dtype, on_cuda):
            result["rows"].append({"model": name, **row})
            counted = ", ".join(f"{key} {value:.1f} M" for key, value in row.get("functions", {}).items())
            sizes = f"{row['kernels']:4} kernels {row['MB']:8.1f} MB, called {row['MB called']:8.1f} MB"
            print(f"{name:12} {row['part']:8} {sizes}  {counted}", flush=True)
            save(result, options.json)


if __name__ == "__main__":
    main()
