"""The bytes that the devices of a run send each other in a training step, computed from its layout in advance.

FSDP gathers a block's weights before its forward and again before its backward, for each micro-batch; those outside
blocks (embedding, last norm, head) once, as the backward does not need them or finds them kept. Gradients are reduced
to shards in float32, for each micro-batch. With copies (`parallel.dp_replicate`), shards are summed over the copies
once a step. In a tensor-parallel group, the mixer and the MLP of a layer each sum their output, and in the backward
pass the gradient of their input. In a context-parallel group, what a forward pass sends is counted on a model without
contents; gradients take the same way back, and activation checkpointing sends it again.

Left out: norms of gradients and losses (bytes), data, checkpoints, the inputs of convolutions that are sent; in a
tensor-parallel group, the logits' sums and the keys and values that Gated DeltaProduct exchanges.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from canonlm.models.interface import LanguageModel
from canonlm.ops.context_parallel import Span
from canonlm.train.config import RunConfig
from canonlm.train.flops import GPUS

MACHINE = 8
"""Devices of one machine."""

NETWORK = 50.0
"""GB/s between machines in each direction, by device: 400 Gbit/s."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a device sends in a step, by kind; as many arrive."""

    gathers: float  # of weights
    reductions: float  # of gradients, within a copy
    copies: float  # of gradients, over copies
    tensor_parallel: float  # of activations
    context_parallel: float = 0.0  # the same

    @property
    def total(self) -> float:
        return self.gathers + self.reductions + self.copies + self.tensor_parallel + self.context_parallel

    def seconds(self, run: RunConfig, devices: int, gpu: str, network: float = NETWORK) -> float:
        """The time of all of it, one after another at the full speed of the links. network: GB/s by device."""
        tp, copies = run.parallel.tp, run.parallel.dp_replicate
        shards = devices // (tp * copies)

        def speed(apart: int, size: int) -> float:
            """Bytes per second of a group of `size` devices with numbers that are `apart`."""
            link = GPUS[gpu].link
            on_one_machine = apart * size <= MACHINE
            return 1e9 * (link if on_one_machine else min(link, network * max(1, MACHINE // apart)))

        within = (self.gathers + self.reductions) / speed(tp, shards)
        activations = self.tensor_parallel / speed(1, tp) + self.context_parallel / speed(tp, run.parallel.cp)
        return within + self.copies / speed(tp * shards, copies) + activations


def traffic(model: LanguageModel, run: RunConfig, devices: int, micro_batch: int) -> Traffic:
    """model: complete, on the meta device. micro_batch: windows of a device at a time."""
    parallel = run.parallel
    part = model.part_of(parallel.tp)
    shards = devices // (parallel.tp * parallel.dp_replicate)
    times = run.train.batch_size * parallel.tp * parallel.cp // devices // micro_batch
    itemsize = 2 if run.train.precision == "bf16" else 4
    in_blocks = sum(p.numel() for block in part.blocks.values() for p in block.parameters())
    gathered = 2 * in_blocks + (part.num_parameters - in_blocks)
    others = (shards - 1) / shards
    copies, group = parallel.dp_replicate, parallel.tp
    head: Any = model.module.get_output_embeddings().weight
    sums = (6 if parallel.activation_checkpointing == "full" else 4) * len(part.blocks) + 2
    tokens = run.train.batch_size * group * run.data.seq_len // devices  # less than a window with cp
    return Traffic(
        gathers=times * itemsize * gathered * others,
        reductions=times * 4 * part.num_trained * others,
        copies=4 * part.num_trained / shards * 2 * (copies - 1) / copies,
        tensor_parallel=sums * tokens * head.shape[1] * itemsize * 2 * (group - 1) / group if group > 1 else 0.0,
        context_parallel=tokens * itemsize * _exchanged(part, run) * (parallel.cp - 1) / parallel.cp,
    )


@torch.no_grad()
def _exchanged(model: LanguageModel, run: RunConfig) -> float:
    """The numbers that a process of a context-parallel group exchanges for each of its tokens in a step."""
    if (cp := run.parallel.cp) == 1:
        return 0.0
    counted = []
    for length in (64, 128):
        with _Sent() as sent:
            model.module(torch.zeros(1, length, dtype=torch.long, device="meta"), span=Span(1, cp, ""), use_cache=False)
        counted.append(sent.numbers)
    passes = 3 if run.parallel.activation_checkpointing == "full" else 2
    return passes * (counted[1] - counted[0]) / 64


class _Sent(TorchDispatchMode):
    """Counts the numbers in messages between processes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            self.numbers += args[0].numel()
        return func(*args, **(kwargs or {}))
