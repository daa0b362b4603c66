"""What Canon costs in a whole decoder: training steps (forward with loss, backward; no optimizer) and generation."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from models import step_of, transformers_llama
from torch import nn
from transformers import GenerationConfig, StaticCache, StoppingCriteria

from canonlm.models.build import build, wrap
from canonlm.models.interface import Sizes
from canonlm.train.flops import flops_per_token, peak_flops
from gpu_parts.device import Device
from gpu_parts.rows import Row, not_available

LLAMA = "transformers Llama"
SHAPES = {
    # The release's models of 1.4 billion parameters.
    "1B": {"layers": 24, "hidden": 2048, "heads": 32, "width": 5632, "time": 4096, "batch": 4, "vocab": 32000},
    # As in benchmarks/results/models-cuda.json.
    "12x1024": {"layers": 12, "hidden": 1024, "heads": 16, "width": 2730, "time": 4096, "batch": 8, "vocab": 32000},
}
TINY = {"layers": 2, "hidden": 64, "heads": 2, "width": 128, "time": 32, "batch": 2, "vocab": 256}


class Case(NamedTuple):
    """Models that take turns. `mode`: eager, blocks (compiled one by one, as our training loop does), whole."""

    shape: str
    mode: str
    models: tuple[str, ...]


CASES = [
    Case("1B", "blocks", ("llama", "llama+canon")),
    Case("12x1024", "whole", (LLAMA, "llama")),
    Case("1B", "blocks", ("llama", "llama+canon=AC", "llama+canon=KVOM")),
    Case("1B", "eager", (LLAMA, "llama", "llama+canon")),
    Case("1B", "blocks", (LLAMA, "llama")),
    Case("12x1024", "whole", ("llama", "llama+canon")),
    Case("12x1024", "eager", (LLAMA, "llama", "llama+canon", "llama+canon=AC", "llama+canon=KVOM")),
]
ROUNDS = {"cuda": 7, "cpu": 1}
MOST = 4.0  # per cent of a compiled 1B step that ABCD may add


def made(name: str, shape: dict[str, int], device: Device) -> nn.Module:
    """With the weights of the modules' own constructors: ours are drawn on the CPU, which takes long at this size."""
    torch.set_default_dtype(device.dtype)
    try:
        with device.device, mock.patch("canonlm.models.modeling.init_parameters"):
            if name == LLAMA:
                return transformers_llama(shape)
            sizes = (shape[key] for key in ("layers", "hidden", "heads", "vocab", "time"))
            return build(name, Sizes(*sizes, fields={"intermediate_size": shape["width"]})).module
    finally:
        torch.set_default_dtype(torch.float32)


def train(device: Device, out: Path) -> Iterator[Row]:
    torch._dynamo.config.recompile_limit = 64  # models of one class share their code
    for case in CASES if device.is_gpu else CASES[:4]:
        torch._dynamo.reset()
        yield from one_case(device, case)
        device.empty_cache()


def one_case(device: Device, case: Case) -> Iterator[Row]:
    shape = SHAPES[case.shape] if device.is_gpu else TINY
    input_ids = torch.randint(0, shape["vocab"], (shape["batch"], shape["time"]), device=device.device)
    settings: dict[str, Any] = {"shape": case.shape, "mode": case.mode}
    steps: dict[str, Callable[[], None]] = {}
    more: dict[str, dict[str, float]] = {}
    flops: dict[str, float] = {}
    for name in case.models:
        try:
            device.empty_cache()
            before = device.allocated_gib()
            model = made(name, shape, device).train()
            step = step_with(model, name, case.mode, device, input_ids)
            step()
            device.empty_cache()
            step()
            more[name] = {"peak GiB": device.peak_gib() - before}
            if peak := peak_flops(device.name, device.dtype):
                flops[name] = flops_per_token(wrap(model), shape["time"]) / peak
            steps[name] = step
            speed = input_ids.numel() / min(device.wall(step) for _ in range(2))
            yield Row(f"step alone, {name}", settings, speed, "tokens/s", more=more[name])  # if no time is left
        except Exception as error:  # out of memory, no kernel: the others keep their numbers
            yield not_available(f"step, {name}", settings, error)
    took = device.wall_in_turns(steps, ROUNDS[device.kind])
    for name, seconds in took.items():
        speed = input_ids.numel() / statistics.median(seconds)
        if name in flops:
            more[name]["MFU"] = speed * flops[name]
        yield Row(f"step, {name}", settings, speed, "tokens/s", more=more[name])
    for name in took:
        if name.startswith("llama+") and "llama" in took:
            goal = f"<= {MOST}" if case[:2] == ("1B", "blocks") and name == "llama+canon" else ""
            yield Row(f"added to a step by {name[6:]}", settings, added(took[name], took["llama"]), "%", target=goal)
    if {LLAMA, "llama"} <= took.keys():
        ratio = statistics.median(theirs / ours for theirs, ours in zip(took[LLAMA], took["llama"], strict=True))
        goal = "" if case.mode == "eager" else ">= 1"
        yield Row("ours, times as fast as transformers'", settings, ratio, "x", target=goal)


def step_with(model: nn.Module, name: str, mode: str, device: Device, input_ids: torch.Tensor) -> Callable[[], None]:
    """With all logits, as any model of transformers; ours in blocks as our training loop does: without."""
    if mode != "blocks":
        return step_of(device.compiled(model) if mode == "whole" else model, input_ids)
    language_model = wrap(model)
    for block in language_model.blocks.values():
        block.forward = device.compiled(block.forward)
    if name == LLAMA:
        return step_of(model, input_ids)
    language_model.compiled_loss = device.is_gpu
    targets = input_ids.roll(-1, dims=1)

    def step() -> None:
        language_model.loss(input_ids, targets, None, float(targets.numel())).total.backward()
        model.zero_grad()

    return step


def added(seconds: list[float], without: list[float]) -> float:
    """Per cent, the median over the rounds."""
    return 100 * (statistics.median(one / other for one, other in zip(seconds, without, strict=True)) - 1)


# -- generation -------------------------------------------------------------------------------------------------------

WRITERS = ("llama", "llama+canon")
BATCHES = {"cuda": (1, 64), "cpu": (2,)}
LENGTHS = {"cuda": (128, 16, 144), "cpu": (8, 2, 6)}  # prompt; new tokens of a short and of a long generation
PLACES = {"cuda": 1024, "cpu": 64}  # of the static cache in which single steps are repeated
IN_A_GRAPH = 4
MOST_GENERATED = 3.0  # per cent


def generate(device: Device, out: Path) -> Iterator[Row]:
    """First the decoding step as it is, in a CUDA graph; then what a user calls, compiled."""
    shape = SHAPES["1B"] if device.is_gpu else TINY
    models = {name: made(name, shape, device).eval() for name in WRITERS}
    with torch.no_grad():
        for batch in BATCHES[device.kind]:
            yield from in_a_graph(device, models, batch, shape["vocab"])
        for batch in BATCHES[device.kind]:
            yield from generated(device, models, batch, shape["vocab"])


def in_a_graph(device: Device, models: dict[str, nn.Module], batch: int, vocab: int) -> Iterator[Row]:
    settings = {"batch": batch, "mode": "eager step in a CUDA graph"}
    prompt = torch.randint(0, vocab, (batch, LENGTHS[device.kind][0]), device=device.device)
    calls = {}
    for name, model in models.items():
        cache = StaticCache(config=model.config, max_cache_len=PLACES[device.kind])
        try:
            model(prompt, past_key_values=cache, use_cache=True)
            token = prompt[:, :1].clone()
            calls[name] = device.captured(partial(model, token, past_key_values=cache, use_cache=True), IN_A_GRAPH)
        except Exception as error:  # what waits for the device cannot be captured
            yield not_available(f"generation, {name}", settings, error)
    took = device.median_us(calls)
    for name, us in took.items():
        yield Row(f"generation, {name}", settings, 1e6 * batch * IN_A_GRAPH / us, "tokens/s")
    if set(WRITERS) == took.keys():
        percent = added([took["llama+canon"]], [took["llama"]])
        yield Row("added to generation by canon", settings, percent, "%", target=f"<= {MOST_GENERATED}")


def generated(device: Device, models: dict[str, nn.Module], batch: int, vocab: int) -> Iterator[Row]:
    """By the time that a long generation takes longer than a short one, into caches of one length."""
    settings = {"batch": batch, "mode": "generate(), static cache, compiled"}
    length, short, long = LENGTHS[device.kind]
    prompt = torch.randint(0, vocab, (batch, length), device=device.device)
    calls = {}
    for name, model in models.items():
        try:
            for new in (short, long):
                calls[f"{name} {new}"] = partial(write, model, prompt, new, long)
            device.wall(calls[f"{name} {short}"])  # compiles
        except Exception as error:
            yield not_available(f"generation, {name}", settings, error)
            return
    took = device.wall_in_turns(calls, 3 if device.is_gpu else 1)
    per_token = {
        name: [
            max(b - a, 1e-9) / (long - short)
            for a, b in zip(took[f"{name} {short}"], took[f"{name} {long}"], strict=True)
        ]
        for name in models
    }
    for name, seconds in per_token.items():
        yield Row(f"generation, {name}", settings, batch / statistics.median(seconds), "tokens/s")
    percent = added(per_token["llama+canon"], per_token["llama"])
    yield Row("added to generation by canon", settings, percent, "%", target=f"<= {MOST_GENERATED}")


class After(StoppingCriteria):
    """`max_new_tokens` would decide how long the static cache is, and with it the compiled code."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids.shape[1] >= self.tokens
        return torch.full((len(input_ids),), done, device=input_ids.device)


def write(model: Any, prompt: torch.Tensor, new: int, most: int) -> None:
    config = GenerationConfig(
        max_new_tokens=most, do_sample=False, cache_implementation="static", pad_token_id=0, eos_token_id=None
    )
    mask = torch.ones_like(prompt)
    stop = [After(prompt.shape[1] + new)]
    model.generate(prompt, attention_mask=mask, generation_config=config, stopping_criteria=stop)
