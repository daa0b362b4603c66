"""Samples as columns of numbers: instance 0 of many windows at once."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from canonlm.tasks.packing import IGNORE
from canonlm.tasks.records import Sample

if TYPE_CHECKING:
    from canonlm.tasks.base import Task


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


def by_sample(task: "Task", split: str, seed: int, start: int, count: int, loss_on: str | None) -> Rows:
    """Every sample as `task.sample` gives it."""
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


def by_label(task: "Task", split: str, seed: int, start: int, count: int, loss_on: str | None) -> Rows:
    """The first instance of every window; the answers are read off the labels, so no sample is parsed in Python.

    A hundred times as fast as `sample`, although most of a window is thrown away.
    """
    windows = task.windows(split, seed, start, count, seq_len=task.max_len, loss_on="answer")
    lengths = (windows.doc_ids == 0).sum(1)
    return by_answer(task, windows.input_ids, windows.labels, windows.labels != IGNORE, lengths, loss_on)


def by_answer(
    task: "Task", ids: np.ndarray, labels: np.ndarray, answers: np.ndarray, lengths: np.ndarray, loss_on: str | None
) -> Rows:
    """The first `lengths` columns. answers: 0 outside of answers; answers that touch have different numbers."""
    head = np.arange(ids.shape[1]) < lengths[:, None]
    tokens, labels, answers = ids[head], labels[head], answers[head]
    row = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    target = answers != 0
    begins = target & ((within == 0) | (np.roll(answers, 1) != answers))
    ends = target & ((within == lengths[row] - 1) | (np.roll(answers, -1) != answers))
    return Rows(
        tokens,
        tokens if (loss_on or task.loss_on) == "all" else labels,
        lengths,
        np.bincount(row[begins], minlength=len(lengths)),
        (within[begins] + task.marker_is_target).astype(np.int32),
        (within[ends] + 1).astype(np.int32),
    )
