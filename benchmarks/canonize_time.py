"""The time that Canon adds to a canonized model of transformers, against the time that it adds to our own decoder.

    python benchmarks/canonize_time.py          about 10 minutes; writes benchmarks/results/canonize-time.json

Four models of one shape take turns in one process: transformers' Llama and ours, each with and without Canon at A, B, C
and D. A training step is forward and backward in eager mode; decoding is one token with a static cache and a compiled
forward. Added time is the difference between with and without Canon in the same round, in CPU time of one thread, which
depends little on other work on the machine.

The process keeps the memory that it frees, as `canonlm train` does. Otherwise chance decides which of the four models
pays for page faults.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from canonlm import CanonLMConfig, CanonLMForCausalLM, canonize
from canonlm.core.files import write_text
from canonlm.train.machine import keep_freed_memory

RESULT = Path(__file__).parent / "results" / "canonize-time.json"
SHAPE = {
    **{"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8},
    **{"num_key_value_heads": 8, "intermediate_size": 704, "max_position_embeddings": 512},
}
BATCH, TIME = 8, 256


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    host = LlamaConfig(**SHAPE, tie_word_embeddings=False)
    return {
        "host": LlamaForCausalLM(host),
        "host with Canon": canonize(LlamaForCausalLM(host), "ABCD", init="uniform"),
        "ours": CanonLMForCausalLM(CanonLMConfig(**SHAPE)),
        "ours with Canon": CanonLMForCausalLM(CanonLMConfig(**SHAPE, canon_set="ABCD")),
    }


def in_turns(calls: dict[str, object], rounds: int) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.process_time()
            call()  # type: ignore[operator]
            seconds[name].append(time.process_time() - start)
    return seconds


def training(rounds: int) -> dict[str, list[float]]:
    ids = torch.randint(0, SHAPE["vocab_size"], (BATCH, TIME))

    def step(model):
        def call():
            model(ids, labels=ids, use_cache=False).loss.backward()
            model.zero_grad()

        return call

    calls = {name: step(model.train()) for name, model in models().items()}
    in_turns(calls, 2)
    return in_turns(calls, rounds)


def decoding(rounds: int) -> dict[str, list[float]]:
    prompt, token = torch.randint(0, SHAPE["vocab_size"], (1, 16)), torch.zeros(1, 1, dtype=torch.long)

    def tokens(model):
        cache = StaticCache(config=model.config, max_cache_len=512)
        with torch.no_grad():
            model(prompt, past_key_values=cache)
        compiled = torch.compile(model.forward, dynamic=False)
        position = torch.zeros(1, 1, dtype=torch.long)

        def call():
            with torch.no_grad():
                for index in range(8):
                    position.fill_(16 + index)
                    compiled(token, past_key_values=cache, position_ids=position)

        return call

    calls = {name: tokens(model.eval()) for name, model in models().items()}
    in_turns(calls, 2)
    return {name: [each / 8 for each in times] for name, times in in_turns(calls, rounds).items()}


def added(seconds: dict[str, list[float]]) -> dict[str, float]:
    def gap(name: str) -> float:
        return median(a - b for a, b in zip(seconds[f"{name} with Canon"], seconds[name], strict=True))

    result = {f"{name}, ms": 1e3 * median(times) for name, times in seconds.items()}
    result |= {"added to the host, ms": 1e3 * gap("host"), "added to ours, ms": 1e3 * gap("ours")}
    return {**{k: round(v, 3) for k, v in result.items()}, "ratio of added times": round(gap("host") / gap("ours"), 3)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    report = {"training step": added(training(options.rounds)), "decoding, compiled": added(decoding(options.rounds))}
    report |= {"shape": SHAPE, "batch": BATCH, "tokens": TIME, "threads": 1, "rounds": options.rounds}
    write_text(RESULT, json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
