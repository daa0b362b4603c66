"""Floating-point operations of training, counted from the model's own layers, and what devices can do at most.

What counts: matrix products and convolutions, a multiply-add as two operations, the backward as twice the forward.
What does not: what is computed again (activation checkpointing, the backward of a recurrence), element-wise work
(norms, activations, decays, softmax, rotation) and the look-up of embeddings.

* Attention is causal: a token meets half of the T tokens of its window on average, 4 * heads * head_dim * T / 2
  operations. (A count of the whole square, as torch's `FlopCounterMode` makes it, has twice that.) Documents that are
  isolated in a window make it less; that is not counted.
* A recurrence costs what its chunked form (`canonlm.ops`) computes, with the chunks of CHUNK tokens that run on a GPU.
* Of experts, a token has one.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from canonlm.canon.layer import CanonLayer
from canonlm.models.config import CanonLMConfig
from canonlm.models.mlp import Experts
from canonlm.models.modeling import DecoderLayer

CHUNK = 64


def flops_per_token(config: CanonLMConfig, seq_len: int) -> float:
    """Forward and backward of one token, in a window of `seq_len`."""
    return 3 * sum(forward_flops(config, seq_len).values())


def forward_flops(config: CanonLMConfig, seq_len: int) -> dict[str, float]:
    """Of one token, by part: `linear` (all projections), `attention` or `recurrence` (what mixes tokens), `conv` (Canon
    and short convolutions), `head`."""
    parts: dict[str, float] = {"linear": 0, "attention": 0, "recurrence": 0, "conv": 0}
    for layer_idx, layers in kinds_of_layers(config).items():
        with torch.device("meta"):
            layer = DecoderLayer(config, layer_idx)
        for module in layer.modules():
            weights = sum(p.numel() for name, p in module.named_parameters(recurse=False) if name != "bias")
            if isinstance(module, nn.Linear):
                parts["linear"] += layers * 2 * weights
            elif isinstance(module, Experts):
                parts["linear"] += layers * 2 * weights / config.num_experts
            elif isinstance(module, CanonLayer):
                parts["conv"] += layers * 2 * weights
        mixer = config.mixer(layer_idx)
        if mixer == "attention":
            parts["attention"] += layers * 4 * config.num_attention_heads * config.head_dim * seq_len / 2
        elif mixer in _RECURRENCES:  # of one that somebody added, the projections are all we know
            parts["recurrence"] += layers * _RECURRENCES[mixer](config, min(CHUNK, seq_len))
    return {**parts, "head": 2 * config.hidden_size * config.vocab_size}


def kinds_of_layers(config: CanonLMConfig) -> dict[int, int]:
    """The first layer of every kind, and how many there are of it."""
    kinds = [(config.mixer(i), config.sites(i)) for i in range(config.num_hidden_layers)]
    return {kinds.index(kind): kinds.count(kind) for kind in kinds}


def gla_flops(heads: int, key_dim: int, value_dim: int, chunk: int) -> float:
    """Into the state and out of it; the scores of a chunk, which are made for earlier keys only, times its values."""
    return heads * (4 * key_dim * value_dim + (chunk + 1) * key_dim + 2 * chunk * value_dim)


def gated_delta_flops(heads: int, key_dim: int, value_dim: int, chunk: int) -> float:
    """The state is read twice and written once; scores of queries and of keys; the triangular system solved for its
    inverse, and that times values and times keys; the scores times the errors."""
    within = 4 * key_dim + chunk + 2 * value_dim + 2 * key_dim + 2 * value_dim
    return heads * (6 * key_dim * value_dim + chunk * within)


def ssd_flops(heads: int, groups: int, state_dim: int, value_dim: int, chunk: int) -> float:
    """Into the state and out of it; the scores of a chunk, which the heads of a group share, times its values."""
    return 4 * heads * state_dim * value_dim + 2 * chunk * (groups * state_dim + heads * value_dim)


_RECURRENCES: dict[str, Callable[[CanonLMConfig, int], float]] = {
    "gla": lambda c, chunk: gla_flops(c.linear_num_heads, c.linear_key_head_dim, c.linear_value_head_dim, chunk),
    "gdn": lambda c, chunk: gated_delta_flops(
        c.linear_num_heads, c.linear_key_head_dim, c.linear_value_head_dim, chunk
    ),
    "mamba2": lambda c, chunk: ssd_flops(
        c.linear_num_heads, c.mamba_n_groups, c.mamba_state_size, c.linear_value_head_dim, chunk
    ),
    "retention": lambda c, chunk: ssd_flops(
        c.linear_num_heads, c.linear_num_heads, c.linear_key_head_dim, c.linear_value_head_dim, chunk
    ),
}


class Gpu(NamedTuple):
    """From the maker's data sheet: memory in GiB, which the sheets call GB; dense peaks (half of what is quoted
    "with sparsity") in TFLOP/s."""

    device: str  # a pattern of what torch calls it
    memory: float
    bf16: float
    fp32: float
    sheet: str


GPUS = {
    "a100-40": Gpu(r"\bA100\b.*40GB", 40, 312, 19.5, "NVIDIA A100 Tensor Core GPU, data sheet"),
    "a100-80": Gpu(r"\bA100\b", 80, 312, 19.5, "NVIDIA A100 Tensor Core GPU, data sheet"),
    "h100-pcie": Gpu(r"H100 PCIe", 80, 756, 51, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h100-nvl": Gpu(r"H100 NVL", 94, 835, 60, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h100": Gpu(r"H100", 80, 989, 67, "NVIDIA H100 Tensor Core GPU, data sheet (SXM)"),
    "h200-nvl": Gpu(r"H200 NVL", 141, 835, 60, "NVIDIA H200 Tensor Core GPU, data sheet"),
    "h200": Gpu(r"H200", 141, 989, 67, "NVIDIA H200 Tensor Core GPU, data sheet (SXM)"),
    "b200": Gpu(r"\bB200", 180, 2250, 75, "NVIDIA HGX platform, B200, per GPU"),
    "l40s": Gpu(r"L40S", 48, 362, 91.6, "NVIDIA L40S, data sheet"),
    "l4": Gpu(r"\bL4\b", 24, 121, 30.3, "NVIDIA L4 Tensor Core GPU, data sheet"),
    "a10": Gpu(r"\bA10\b", 24, 125, 31.2, "NVIDIA A10 Tensor Core GPU, data sheet"),
    "rtx4090": Gpu(r"RTX 4090", 24, 165, 82.6, "NVIDIA Ada GPU architecture, whitepaper"),
    "mi300x": Gpu(r"MI300X", 192, 1307, 163.4, "AMD Instinct MI300X, data sheet"),
}
"""By the name that `canonlm plan --gpu` takes. Of two whose patterns fit a device, the first is meant."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """What a device (`torch.cuda.get_device_name()`) can do per second in matrix products of `dtype`; None where
    that is not known. float32 is without TF32, as in our loop."""
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype)
    name = next((name for name, gpu in GPUS.items() if re.search(gpu.device, device_name)), None)
    return None if name is None or precision is None else peak_flops_of(name, precision)


def peak_flops_of(gpu: str, precision: str) -> float:
    """The same by our name of the GPU and `train.precision`."""
    return 1e12 * (GPUS[gpu].bf16 if precision == "bf16" else GPUS[gpu].fp32)
