"""Batched, cached generation against simpler ways to generate: one prompt at a time, and without a cache.

    python benchmarks/generate.py [--quick] [--json FILE]

New tokens per second of CPU time, greedy, best of several passes that take turns, so that other work on the machine
matters little. One thread of a CPU, float32, random weights. A test checks that all ways generate the same text
(tests/suites/test_writing.py, in double precision).
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from canon import machine, save
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.train.evals.generate import generate

SIZES = {"layers": 6, "hidden": 256, "heads": 4, "vocab": 4096, "prompt": 256, "new": 128, "prompts": 8}
QUICK = {"layers": 2, "hidden": 64, "heads": 2, "vocab": 512, "prompt": 32, "new": 16, "prompts": 4}
OURS = {
    "llama": {},
    "llama+canon": {"canon_set": "ABCD"},
    "gla5+canon": {"mixers": ["gla"], "canon_set": "AbCD"},
    "gdn2+canon": {"mixers": ["gdn"], "canon_set": "AbCD"},
    "mamba2+canon": {"mixers": ["mamba2"], "canon_set": "AbCD"},
    "retention": {"mixers": ["retention"], "canon_set": "b"},
}
CPU = torch.device("cpu")


def build(name: str, sizes: dict[str, int]) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {
        "vocab_size": sizes["vocab"],
        "hidden_size": sizes["hidden"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
    }
    if name == "transformers Llama":
        return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=8 * sizes["hidden"] // 3)).eval()
    return CanonLMForCausalLM(CanonLMConfig(**shape, **OURS[name])).eval()


def write(model: PreTrainedModel, prompts: list[list[int]], new: int, at_once: int, use_cache: bool) -> list[list[int]]:
    rows = []
    for first in range(0, len(prompts), at_once):
        batch = prompts[first : first + at_once]
        rows += generate(model, batch, new, [], CPU, use_cache=use_cache)
    return rows


def ways_of(name: str, sizes: dict[str, int]) -> dict[str, Callable[..., list[list[int]]]]:
    """The ways in which a model generates; each returns rows of `new` new tokens."""
    model, generator = build(name, sizes), torch.Generator().manual_seed(1)
    count, length = sizes["prompts"], sizes["prompt"]
    # Prompts of different lengths, like real ones: from three quarters of the longest.
    lengths = [length - length // 4 * i // (count - 1) for i in range(count)]
    prompts = [torch.randint(0, sizes["vocab"], (n,), generator=generator).tolist() for n in lengths]
    return {
        "batched": lambda new: write(model, prompts, new, count, True),
        "one by one": lambda new: write(model, [prompts[0], prompts[-1]], new, 1, True),
        "uncached": lambda new: write(model, prompts[:1], new, 1, False),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, rounds = (QUICK, 1) if options.quick else (SIZES, 2)
    result: dict = {"machine": {**machine(), "threads": 1}, "sizes": sizes, "models": {}}
    print(", ".join(f"{key} {value}" for key, value in {**result["machine"], **sizes}.items()), flush=True)
    models = {name: ways_of(name, sizes) for name in ["transformers Llama", *OURS]}
    for ways in models.values():
        for way in ways.values():
            way(2)  # warms up
    best: dict[str, dict[str, float]] = {name: dict.fromkeys(ways, 0.0) for name, ways in models.items()}
    for _ in range(rounds):
        for name, ways in models.items():
            for kind, way in ways.items():
                start = time.process_time()
                written = sum(map(len, way(sizes["new"])))
                best[name][kind] = max(best[name][kind], written / (time.process_time() - start))
        for name, speed in best.items():
            result["models"][name] = {
                "tokens_per_s": {kind: round(value, 1) for kind, value in speed.items()},
                "cached_over_uncached": round(speed["one by one"] / speed["uncached"], 2),
                "batched_over_one_by_one": round(speed["batched"] / speed["one by one"], 2),
            }
        save(result, options.json)
    print(f"{'new tokens per second':22}{'batched':>10}{'one by one':>12}{'uncached':>10}", end="")
    print(f"{'cached/uncached':>18}{'batched/one by one':>20}")
    for name, row in result["models"].items():
        speed = row["tokens_per_s"]
        print(f"{name:22}{speed['batched']:10.1f}{speed['one by one']:12.1f}{speed['uncached']:10.1f}", end="")
        print(f"{row['cached_over_uncached']:18.2f}{row['batched_over_one_by_one']:20.2f}")


if __name__ == "__main__":
    main()
