"""Costs of runs: tokens, FLOPs and hours, computed in seconds for thousands of runs."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch

from canonlm.core.errors import unknown
from canonlm.launch.plan import HOUR, tokens_of
from canonlm.models.build import build
from canonlm.models.interface import Sizes
from canonlm.train.build import sizes_of
from canonlm.train.config import RunConfig
from canonlm.train.flops import GPUS, flops_per_token, peak_flops_of

MFU = 0.4
"""The assumed share of a device's peak."""


@dataclass(frozen=True)
class Cost:
    runs: int
    tokens: int
    flops: float  # forward and backward
    gpu_hours: float  # of one GPU of the requested kind
    hours: float  # of one process on this machine's CPU


def cost(configs: Iterable[RunConfig], gpu: str = "h100") -> Cost:
    """The cost of runs, one after another. ValueError: no such GPU."""
    if gpu not in GPUS:
        raise unknown("GPU", gpu, GPUS, "GPUs")
    runs, tokens, flops, gpu_seconds = 0, 0, 0.0, 0.0
    for config in configs:
        work = tokens_of(config) * _flops(config)
        runs, tokens, flops = runs + 1, tokens + tokens_of(config), flops + work
        gpu_seconds += work / (MFU * peak_flops_of(gpu, config.train.precision))
    return Cost(runs, tokens, flops, gpu_seconds / HOUR, flops / (MFU * _cpu_peak()) / HOUR if flops else 0.0)


def _flops(config: RunConfig) -> float:
    """FLOPs per token, from models of one and two layers, as all layers cost the same; the head is only its matrix."""
    sizes = sizes_of(config)
    widths = tuple((key, after) for key, (_, after) in config.model.matched.items())
    one, two = (_counted(config.arch, _shape(sizes, layers), widths) for layers in (1, 2))
    head = 6 * sizes.hidden_size * (sizes.vocab_size - _VOCAB)
    return one + (two - one) * (sizes.num_hidden_layers - 1) + head


_VOCAB = 64


def _shape(sizes: Sizes, layers: int) -> tuple[int, ...]:
    return layers, sizes.hidden_size, sizes.num_attention_heads, sizes.seq_len


@cache
def _counted(arch: str, shape: tuple[int, ...], widths: tuple[tuple[str, int], ...]) -> float:
    layers, width, heads, seq_len = shape
    with torch.device("meta"):
        model = build(arch, Sizes(num_hidden_layers=layers, hidden_size=width, num_attention_heads=heads,
                                  vocab_size=_VOCAB, seq_len=seq_len, fields=dict(widths)), 0)  # fmt: skip
    return flops_per_token(model, seq_len)


@cache
def _cpu_peak() -> float:
    """FLOP/s of one process with one thread, measured on products of two matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        a = torch.rand(512, 512)
        torch.mm(a, a)
        begin, products = time.process_time(), 0  # of this process, so that other load does not matter
        while (seconds := time.process_time() - begin) < 0.2:
            torch.mm(a, a)
            products += 1
    finally:
        torch.set_num_threads(threads)
    return products * 2 * 512**3 / seconds
