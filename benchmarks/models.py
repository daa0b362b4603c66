"""Complete decoders side by side: ours, transformers' Llama and, on a GPU, flash-linear-attention's own models.

    python benchmarks/models.py [--device cuda] [--quick] [--json FILE]

One training step without the optimizer (forward with loss, backward) in tokens per second, best of several; peak memory
on a GPU. Same widths, heads, gates, dtype and data. On a GPU: bf16 weights, 12 layers, hidden 1024, T = 4096, batch 8.
On a CPU: float32, 12 layers, hidden 512, T = 512, batch 8.
"""

import argparse
import gc
import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from canonlm import CanonLMConfig, CanonLMForCausalLM

SHAPES = {
    "cuda": {"layers": 12, "hidden": 1024, "heads": 16, "time": 4096, "batch": 8, "vocab": 32000},
    "cpu": {"layers": 12, "hidden": 512, "heads": 8, "time": 512, "batch": 8, "vocab": 4096},
    "quick": {"layers": 2, "hidden": 128, "heads": 2, "time": 64, "batch": 2, "vocab": 256},
}
OURS = {
    "llama": {},
    "llama+canon": {"canon_set": "ABCD"},
    "gla": {"mixers": ["gla"], "canon_set": "b"},
    "gla+canon": {"mixers": ["gla"], "canon_set": "AbCD"},
    "gdn": {"mixers": ["gdn"], "canon_set": "b"},
    "gdn+canon": {"mixers": ["gdn"], "canon_set": "AbCD"},
    "mamba2, no MLP": {"mixers": ["mamba2"], "canon_set": "b", "mlp": "none"},
}


def ours(shape: dict, name: str) -> torch.nn.Module:
    config = CanonLMConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        output_gate_rank=None,  # as fla's
        max_position_embeddings=shape["time"],
        **OURS[name],
    )
    return CanonLMForCausalLM(config)


def transformers_llama(shape: dict) -> torch.nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape.get("width", 8 * shape["hidden"] // 3),
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        rms_norm_eps=1e-5,
        max_position_embeddings=shape["time"],
    )
    return transformers.LlamaForCausalLM(config)


def theirs(shape: dict, name: str) -> torch.nn.Module:
    """fla's model of the same widths; its fused losses are turned off, as the others have none."""
    from fla.models import (
        GatedDeltaNetConfig,
        GatedDeltaNetForCausalLM,
        GLAConfig,
        GLAForCausalLM,
        Mamba2Config,
        Mamba2ForCausalLM,
    )

    hidden, heads = shape["hidden"], shape["heads"] // 2
    same = {
        "vocab_size": shape["vocab"],
        "hidden_size": hidden,
        "num_hidden_layers": shape["layers"],
        "norm_eps": 1e-5,
        "fuse_cross_entropy": False,
    }
    if name == "gla":
        config = GLAConfig(
            num_heads=heads, expand_k=1, expand_v=2, intermediate_size=2 * hidden, use_short_conv=True, **same
        )
        return GLAForCausalLM(config)
    if name == "gdn":
        config = GatedDeltaNetConfig(
            num_heads=heads, head_dim=hidden // heads, expand_v=2, intermediate_size=2 * hidden, **same
        )
        return GatedDeltaNetForCausalLM(config)
    config = Mamba2Config(head_dim=2 * hidden // heads, num_heads=heads, state_size=128, residual_in_fp32=False, **same)
    return Mamba2ForCausalLM(config)


def step_of(model: torch.nn.Module, input_ids: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        model(input_ids, labels=input_ids, use_cache=False).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def measure(build: Callable[[], torch.nn.Module], shape: dict, device: str, compiled: bool, rounds: int) -> dict:
    torch._dynamo.reset()
    gc.collect()
    model = build().to(device, torch.bfloat16 if device == "cuda" else torch.float32).train()
    parameters = sum(p.numel() for p in model.parameters())
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["time"]), generator=generator).to(device)
    if compiled:
        model = torch.compile(model)
    step = step_of(model, input_ids)
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    step()
    step()
    best = float("inf")
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "parameters_M": round(parameters / 1e6, 1),
        "tokens_per_s": round(input_ids.numel() / best),
        "peak_GiB": memory and round(memory, 1),
    }


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()
    shape = SHAPES["quick" if args.quick else args.device]
    builders: dict[str, Callable[[], torch.nn.Module]] = {"transformers Llama": lambda: transformers_llama(shape)}
    for name in OURS:
        builders[f"ours: {name}"] = lambda name=name: ours(shape, name)
        if args.device == "cuda" and "+canon" not in name and "llama" not in name:
            builders[f"fla: {name}"] = lambda name=name: theirs(shape, name)
    machine = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores"
    versions = {p: version(p) for p in ("torch", "transformers", "triton", "flash-linear-attention")}
    print(f"{machine}; {versions}; {shape}", flush=True)
    rows = []
    for name, build in builders.items():
        for compiled in (False, True):
            if args.only and args.only not in name:
                continue
            row: dict = {"model": name, "compiled": compiled}
            try:
                row |= measure(build, shape, args.device, compiled, rounds=3 if args.quick else 6)
            except Exception as error:  # a model that cannot run must not stop the others
                row["error"] = (
                    f"{type(error).__name__}: {str(error).splitlines()[0][:200]}" if str(error) else repr(error)
                )
            rows.append(row)
            print(json.dumps(row), flush=True)
            if args.json:
                result = {"machine": machine, "versions": versions, "shape": shape, "rows": rows}
                args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
