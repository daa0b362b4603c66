"""How well a model predicts held-out text: loss per token, and bits per byte, which other tokenizers can be held to."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from canonlm.data.shards import Dataset
from canonlm.data.text import TextWindows
from canonlm.data.windows import Batch
from canonlm.models.interface import LanguageModel
from canonlm.tasks.packing import IGNORE

if TYPE_CHECKING:
    from canonlm.world import World


class TextEval:
    """The first `size` windows (or all, where there are fewer) of each `{name: (dataset, split)}`, in their order.

    The data-parallel processes of `world` share them, `rows` windows at a time. ValueError: a split has no window.
    """

    def __init__(
        self,
        sets: Mapping[str, tuple[Dataset, str]],
        size: int,
        rows: int,
        world: "World",
        *,
        seq_len: int,
        isolate_documents: bool,
    ) -> None:
        self.sets = {
            name: TextWindows(dataset, split, seq_len, isolate_documents) for name, (dataset, split) in sets.items()
        }
        self.size, self.batch_rows, self.world = size, rows, world

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "sets": {name: {"loss", "bits_per_byte", "tokens"}}}`, the same in all processes.

        Losses are mean cross-entropies of the targets in nats, without what training adds to them (z-loss); the first
        one is of the `tokens` of all sets together. Bits per byte of UTF-8 text: a set's cross-entropy over the bytes
        that its windows have by the split's average. With isolated documents their first tokens cost nothing.
        """
        totals, sets = [0.0, 0.0], {}
        for name, windows in self.sets.items():
            count = min(self.size, len(windows))
            nats, targets = self._sum(model, windows, count, device)
            size = count * windows.seq_len * windows.bytes_per_token
            sets[name] = {
                "loss": nats / max(1.0, targets),
                "bits_per_byte": nats / math.log(2) / size,
                "tokens": int(targets),
            }
            totals = [totals[0] + nats, totals[1] + targets]
        return {"loss": totals[0] / max(1.0, totals[1]), "sets": sets}

    def _sum(self, model: LanguageModel, windows: TextWindows, count: int, device: torch.device) -> list[float]:
        """[cross-entropy in nats, number of targets] of the first `count` windows."""
        ranks = self.world.dp_size
        rows = min(self.batch_rows, -(-count // ranks))
        sums = [0.0, 0.0]
        # All processes call the model equally often, or sharded weights would wait for those that do not.
        for start in range(0, count, rows * ranks):
            first = start + rows * self.world.dp_rank
            batch = _filled(windows.rows(first, max(0, min(rows, count - first))), rows).to(device)
            loss, z_loss = model.loss(batch.input_ids, batch.targets, batch.doc_ids, 1)
            nats = loss if z_loss is None else loss - z_loss
            sums = [sums[0] + float(nats), sums[1] + float((batch.targets != IGNORE).sum())]
        return self.world.sum(sums)


def _filled(batch: Batch, rows: int) -> Batch:
    """With rows without targets, so that every call has one shape."""
    below = (0, 0, 0, rows - len(batch.input_ids))
    doc_ids = None if batch.doc_ids is None else pad(batch.doc_ids, below)
    return Batch(pad(batch.input_ids, below), pad(batch.targets, below, value=IGNORE), doc_ids)
