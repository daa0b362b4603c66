"""Samples as columns of numbers: instance 0 of many windows at once."""

from typing import NamedTuple

import numpy as np

from canonlm.tasks import Sample, Task
from canonlm.tasks.packing import IGNORE


class Rows(NamedTuple):
    """Samples end to end: `tokens` and `labels` int32, `lengths` [count]; `spans` [count] is the number of `starts` and
    `stops` (positions in the sample) of each sample."""

    tokens: np.ndarray
    labels: np.ndarray
    lengths: np.ndarray
    spans: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


def spans(sample: Sample) -> list[tuple[int, int]]:
    """(start, stop) of each answer, in order; questions whose answers start together (the first item, the whole list)
    share one answer, the longest."""
    longest: dict[int, int] = {}
    for query in sample.queries:
        longest[query.start] = max(query.stop, longest.get(query.start, 0))
    return sorted(longest.items())


def draw(task: Task, split: str, seed: int, start: int, count: int, loss_on: str | None = None) -> Rows:
    """`task.sample(split, seed, index)` for index = start … start + count - 1."""
    # If a task has an evaluation of its own, its windows are not plain packing, or not all answers are labelled.
    if task.evaluation in ("windows", "generate") and task.separate_answers and not task.draws_in_python:
        return _heads(task, split, seed, start, count, loss_on or task.loss_on)
    samples = [task.sample(split, seed, index, loss_on=loss_on) for index in range(start, start + count)]
    bounds_of = [spans(sample) for sample in samples]
    bounds = np.array([span for part in bounds_of for span in part], np.int32).reshape(-1, 2)
    return Rows(
        np.concatenate([sample.tokens for sample in samples]),
        np.concatenate([sample.labels for sample in samples]),
        np.array([len(sample.tokens) for sample in samples]),
        np.array([len(part) for part in bounds_of]),
        *bounds.T,
    )


def _heads(task: Task, split: str, seed: int, start: int, count: int, loss_on: str) -> Rows:
    """The first instance of every window; the answers are read off the labels, so no sample is parsed in Python.

    A hundred times as fast as `sample`, although most of a window is thrown away.
    """
    windows = task.windows(split, seed, start, count, seq_len=task.max_len, loss_on="answer")
    head = windows.doc_ids == 0
    tokens, labels, lengths = windows.input_ids[head], windows.labels[head], head.sum(1)
    row = np.repeat(np.arange(count), lengths)
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target = labels != IGNORE
    begins = target & ((within == 0) | ~np.roll(target, 1))
    ends = target & ((within == lengths[row] - 1) | ~np.roll(target, -1))
    return Rows(
        tokens,
        tokens if loss_on == "all" else labels,
        lengths,
        np.bincount(row[begins], minlength=count),
        (within[begins] + task.marker_is_target).astype(np.int32),
        (within[ends] + 1).astype(np.int32),
    )
