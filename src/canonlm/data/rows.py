"""Samples as columns of numbers: instance 0 of many windows at once."""

from typing import NamedTuple

import numpy as np

from canonlm.tasks import Capo, Lano, Sample, Task
from canonlm.tasks.lano.task import CUT
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
    if isinstance(task, Capo) and task.spec.rewrites is None:  # values of rewrites may touch or overlap
        ids, values, lengths = task.biographies(split, seed, start, count)
        return _columns(task, ids, np.where(values, ids, IGNORE), values, lengths, loss_on)
    # If a task has an evaluation of its own, its windows are not plain packing, or not all answers are labelled.
    plain = task.evaluation in ("windows", "generate") and task.separate_answers
    if isinstance(task, Lano) or (plain and not task.draws_in_python):
        rows = _heads(task, split, seed, start, count, loss_on)
        return _with_cut(rows) if isinstance(task, Lano) else rows
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


def _heads(task: Task, split: str, seed: int, start: int, count: int, loss_on: str | None) -> Rows:
    """The first instance of every window; the answers are read off the labels, so no sample is parsed in Python.

    A hundred times as fast as `sample`, although most of a window is thrown away.
    """
    windows = task.windows(split, seed, start, count, seq_len=task.max_len, loss_on="answer")
    lengths = (windows.doc_ids == 0).sum(1)
    return _columns(task, windows.input_ids, windows.labels, windows.labels != IGNORE, lengths, loss_on)


def _columns(
    task: Task, ids: np.ndarray, labels: np.ndarray, answers: np.ndarray, lengths: np.ndarray, loss_on: str | None
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


def _with_cut(rows: Rows) -> Rows:
    """With the second question of Lano, after CUT tokens, in the sentences that are longer."""
    num_queries = 1 + (rows.lengths > CUT + 1)
    starts = np.full(num_queries.sum(), CUT + 1, np.int32)
    starts[np.cumsum(num_queries) - num_queries] = 1
    return rows._replace(spans=num_queries, starts=starts, stops=np.repeat(rows.lengths, num_queries).astype(np.int32))
