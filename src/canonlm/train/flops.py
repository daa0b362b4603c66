"""Floating-point operations of training, and the peak speeds of devices.

A model counts its own (`LanguageModel.forward_flops`): matrix products and convolutions, a multiply-add as two
operations. The backward pass counts as twice the forward. Recomputation (activation checkpointing, the backward of a
recurrence), element-wise work (norms, activations, decays, softmax, rotation) and the look-up of embeddings do not
count.
"""

import re
from typing import NamedTuple

import torch

from canonlm.models.interface import LanguageModel


def flops_per_token(model: LanguageModel, seq_len: int) -> float:
    """Forward and backward of one token, in a window of `seq_len`."""
    return 3 * sum(model.forward_flops(seq_len).values())


class Gpu(NamedTuple):
    """A GPU by its maker's data sheet: memory in GiB, which the sheets call GB; dense peaks (half of what is quoted
    "with sparsity") in TFLOP/s; what one direction of its links to the others of a machine carries (half of what is
    quoted), in GB/s."""

    device: str  # a regular expression for its name in torch
    memory: float
    bf16: float
    fp32: float
    link: float
    sheet: str


GPUS = {
    "a100-40": Gpu(r"\bA100\b.*40GB", 40, 312, 19.5, 300, "NVIDIA A100 Tensor Core GPU, data sheet"),
    "a100-80": Gpu(r"\bA100\b", 80, 312, 19.5, 300, "NVIDIA A100 Tensor Core GPU, data sheet"),
    "h100-pcie": Gpu(r"H100 PCIe", 80, 756, 51, 64, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h100-nvl": Gpu(r"H100 NVL", 94, 835, 60, 300, "NVIDIA H100 Tensor Core GPU, data sheet"),
    "h100": Gpu(r"H100", 80, 989, 67, 450, "NVIDIA H100 Tensor Core GPU, data sheet (SXM)"),
    "h200-nvl": Gpu(r"H200 NVL", 141, 835, 60, 450, "NVIDIA H200 Tensor Core GPU, data sheet"),
    "h200": Gpu(r"H200", 141, 989, 67, 450, "NVIDIA H200 Tensor Core GPU, data sheet (SXM)"),
    "b200": Gpu(r"\bB200", 180, 2250, 75, 900, "NVIDIA HGX platform, B200, per GPU"),
    "l40s": Gpu(r"L40S", 48, 362, 91.6, 32, "NVIDIA L40S, data sheet"),
    "l4": Gpu(r"\bL4\b", 24, 121, 30.3, 32, "NVIDIA L4 Tensor Core GPU, data sheet"),
    "a10": Gpu(r"\bA10\b", 24, 125, 31.2, 32, "NVIDIA A10 Tensor Core GPU, data sheet"),
    "rtx4090": Gpu(r"RTX 4090", 24, 165, 82.6, 32, "NVIDIA Ada GPU architecture, whitepaper"),
    "mi300x": Gpu(r"MI300X", 192, 1307, 163.4, 448, "AMD Instinct MI300X, data sheet"),
}
"""By the name for `canonlm plan --gpu`. The first pattern that matches a device is used."""

SMALLER = r"\bMIG\b|\bLaptop\b|\b4090 D\b"
"""In the names of devices that have only a part of the named GPU's units. Their peaks are not known."""


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s of a device (`torch.cuda.get_device_name()`) in matrix products of `dtype`; None if not known.
    float32 is without TF32, as in our loop."""
    precision = {torch.bfloat16: "bf16", torch.float32: "fp32"}.get(dtype)
    names = (name for name, gpu in GPUS.items() if re.search(gpu.device, device_name))
    name = None if re.search(SMALLER, device_name) else next(names, None)
    return None if name is None or precision is None else peak_flops_of(name, precision)


def peak_flops_of(gpu: str, precision: str) -> float:
    """The same, by the GPU's name in `GPUS` and `train.precision`."""
    return 1e12 * (GPUS[gpu].bf16 if precision == "bf16" else GPUS[gpu].fp32)
