"""Models compared on documents that both have read, from the answers of `canonlm eval --suite text`."""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from canonlm.runs.answers import Row
from canonlm.runs.seed_statistics import Interval, t_interval


class Difference(NamedTuple):
    """A mean over documents that both models read, the second model minus the first, with its 95 % interval (None for
    one document). `position`: the min number of tokens before those that count; None: the whole document."""

    measure: str
    position: int | None
    mean: float
    interval: Interval | None
    documents: int


def differences(ours: Sequence[Row], theirs: Sequence[Row], same_tokens: bool) -> list[Difference]:
    """The second model minus the first, paired by document; by position, too, if both have the same tokens. Documents
    in which one of them predicts no token are left out."""
    pairs = [pair for pair in zip(ours, theirs, strict=True) if all(row["tokens"] for row in pair)]
    bits = [bits_per_byte(b) - bits_per_byte(a) for a, b in pairs]
    made = [_difference("bits per byte", None, bits)] if bits else []
    places = {int(place) for row in ours for place in row["positions"]} if same_tokens else set()
    for position in sorted(places):
        both = [
            [row["positions"][str(position)] for row in pair] for pair in pairs if str(position) in pair[0]["positions"]
        ]
        losses = [[nats / tokens for nats, tokens in pair] for pair in both]
        made.append(_difference("nats per token", position, [b - a for a, b in losses]))
    return made


def _difference(measure: str, position: int | None, values: list[float]) -> Difference:
    interval = t_interval(values) if len(values) > 1 else None
    return Difference(measure, position, statistics.mean(values), interval, len(values))


def bits_per_byte(row: Row) -> float:
    """The bits per byte of one document, an answer of the suite."""
    return row["nats"] / math.log(2) / max(1, row["bytes"])
