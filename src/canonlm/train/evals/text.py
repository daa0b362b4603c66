"""Evaluation on held-out text: loss per token, and bits per byte, which are comparable across tokenizers."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from canonlm.core.errors import expected
from canonlm.data.shards import Dataset
from canonlm.data.text import TextWindows
from canonlm.data.windows import Batch
from canonlm.models.interface import LanguageModel
from canonlm.tasks.packing import IGNORE

if TYPE_CHECKING:
    from canonlm.core.distributed import World


class TextEval:
    """`size` windows (or all, if there are fewer) of each `{name: (dataset, split)}`, in order.

    skip: the number of first windows that are left out. beyond: for the loss beyond the trained length, windows are
    this number of tokens longer than `seq_len`, and only these tokens count.
    The data-parallel processes of `world` share the windows, `rows` at a time. ValueError: a split has no window.
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
        skip: int = 0,
        beyond: int = 0,
    ) -> None:
        def windows_of(length: int) -> dict[str, TextWindows]:
            return {name: TextWindows(*source, length, isolate_documents) for name, source in sets.items()}

        self.sets = windows_of(seq_len)
        for dataset, split in sets.values() if beyond else ():
            if (tokens := dataset.num_tokens(split)) <= seq_len + beyond:
                why = f"{dataset.folder} has {tokens:,} tokens in its split {split}"
                raise expected("train.eval_beyond", f"at most {tokens - seq_len - 1:,}, as {why}", beyond)
        self.longer = windows_of(seq_len + beyond) if beyond else {}
        for windows in (*self.sets.values(), *self.longer.values()):
            if len(windows) <= skip:
                raise expected("train.eval_size", f"less than {len(windows)}, the number of held-out windows", skip)
        self.size, self.batch_rows, self.world = size, rows, world
        self.skip, self.beyond = skip, beyond

    @torch.no_grad()
    def run(self, model: LanguageModel, device: torch.device) -> dict[str, Any]:
        """`{"loss", "sets": {name: {"loss", "bits_per_byte", "tokens"}}}`, the same in all processes.

        Losses are mean cross-entropies of the targets in nats, without what training adds to them (z-loss); the first
        one is over the `tokens` of all sets. Bits per byte of UTF-8 text: a set's cross-entropy over the bytes of its
        windows, estimated by the split's bytes per token. With isolated documents their first tokens cost nothing.
        With `beyond` also `measures: {"loss_beyond"}`, over the tokens of all sets that are beyond `seq_len`.
        """
        totals, sets = [0.0, 0.0], {}
        for name, windows in self.sets.items():
            count = min(self.size, len(windows) - self.skip)
            nats, targets = self._sum(model, windows, count, device)
            size = count * windows.seq_len * windows.bytes_per_token
            sets[name] = {
                "loss": nats / max(1.0, targets),
                "bits_per_byte": nats / math.log(2) / size,
                "tokens": int(targets),
            }
            totals = [totals[0] + nats, totals[1] + targets]
        results: dict[str, Any] = {"loss": totals[0] / max(1.0, totals[1]), "sets": sets}
        if self.beyond:
            results["measures"] = {"loss_beyond": self._loss_beyond(model, device)}
        return results

    def _loss_beyond(self, model: LanguageModel, device: torch.device) -> float:
        totals = [0.0, 0.0]
        for windows in self.longer.values():
            count = min(self.size, len(windows) - self.skip)
            nats, targets = self._sum(model, windows, count, device, windows.seq_len - self.beyond)
            totals = [totals[0] + nats, totals[1] + targets]
        return totals[0] / max(1.0, totals[1])

    def _sum(
        self, model: LanguageModel, windows: TextWindows, count: int, device: torch.device, begin: int = 0
    ) -> list[float]:
        """[cross-entropy in nats, number of targets] of `count` windows, from position `begin` on."""
        ranks = self.world.dp_size
        rows = min(self.batch_rows, -(-count // ranks))
        sums = [0.0, 0.0]
        # All processes call the model the same number of times: with sharded weights, each call needs all of them.
        for start in range(0, count, rows * ranks):
            first = start + rows * self.world.dp_rank
            batch = _padded(windows.rows(self.skip + first, max(0, min(rows, count - first))), rows).to(device)
            batch.targets[:, :begin] = IGNORE
            loss, z_loss = model.loss(batch.input_ids, batch.targets, batch.documents, 1)
            nats = loss if z_loss is None else loss - z_loss
            sums = [sums[0] + float(nats), sums[1] + float((batch.targets != IGNORE).sum())]
        return self.world.sum(sums)


def _padded(batch: Batch, rows: int) -> Batch:
    """The batch, padded with rows without targets, so that all calls have one shape."""
    below = (0, 0, 0, rows - len(batch.input_ids))
    documents = batch.documents and batch.documents.each(lambda ids: pad(ids, below))
    return Batch(pad(batch.input_ids, below), pad(batch.targets, below, value=IGNORE), documents)
