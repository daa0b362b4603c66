"""A process's share of a batch, prepared for a step in the threads that read data."""

from typing import NamedTuple

import torch

from canonlm.data.windows import Batch


class Portion(NamedTuple):
    micro_batches: list[Batch]  # on the CPU
    num_targets: int  # of all of them, counted on the CPU so that nothing waits for a GPU


def prepare(batch: Batch, micro_batch_size: int | None, device: torch.device) -> Portion:
    """Split a batch into micro-batches; for a GPU, with document boundaries and in pinned memory. Copies need no stream
    of their own: a micro-batch is less than a megabyte, and its copy from pinned memory does not block the CPU, which
    is steps ahead."""
    num_targets = int((batch.targets != -100).sum())
    parts = batch.split(micro_batch_size or len(batch.input_ids))
    if device.type == "cuda":
        parts = [part.counted().pinned() for part in parts]
    return Portion(parts, num_targets)
