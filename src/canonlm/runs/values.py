"""The numbers of an evaluation, one by one, for data frames."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from canonlm.runs.rows import Evaluation, TextEvaluation
from canonlm.runs.task_info import headline


class Value(NamedTuple):
    """One number; accuracies are shares from 0 to 1. total: answers, or tokens of a text; a measure has none. correct:
    None for the headline, in which every slice weighs the same. percent, stderr: of an accuracy, in percent."""

    slice: str
    metric: str
    value: float | None
    total: int | None = None
    correct: int | None = None
    percent: float | None = None
    stderr: float | None = None


def values_of(task: str, row: Evaluation | TextEvaluation) -> Iterator[Value]:
    """The task's headline first (the mean over the slices of the primary scale, or one of them), then slice by slice,
    then measures and the loss. For text, each validation set is a slice, and the loss over several sets comes first."""
    if isinstance(row, TextEvaluation):
        if len(row.sets) > 1:
            yield Value("all", "loss", row.loss)
        for name, of_set in row.sets.items():
            yield Value(name, "loss", of_set.loss, of_set.tokens)
            yield Value(name, "bits_per_byte", of_set.bits_per_byte, of_set.tokens)
        return
    shares = {key: count.accuracy for key, count in row.slices.items()}
    errors = {key: math.sqrt(p * (1 - p) / max(1, row.slices[key].total - 1)) for key, p in shares.items()}
    keys = headline(task, row.slices)
    if keys and "all" not in row.slices:
        mean = sum(shares[key] for key in keys) / len(keys)
        error = math.sqrt(sum(errors[key] ** 2 for key in keys)) / len(keys)
        total = sum(row.slices[key].total for key in keys)
        yield Value("all", "accuracy", mean, total, None, 100 * mean, 100 * error)
    for key, count in row.slices.items():
        percent = 100 * count.correct / count.total
        yield Value(key, "accuracy", shares[key], count.total, count.correct, percent, 100 * errors[key])
    for name, value in row.measures.items():
        yield Value("all", name, value)
    for name in row.unusable:
        yield Value("all", name, None)
    yield Value("all", "loss", row.loss)
