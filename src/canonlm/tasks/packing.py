"""Packing: a window is filled with instances j = 0, 1, … until it is full; the last one is cut, its labels kept.

Instance j of window w is keyed (seed, split, w, j), so any window can be made without the windows before it. `_loop` is
the only loop that does this. A task inserts a compiled draw with `compile_loop`; `python_loop` is the same loop around
`Task.draw`. (Capo's windows are cut out of passes over all people instead: `capo.stream`.)
"""

from collections.abc import Callable
from random import Random
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np

from canonlm.core.numba_cache import njit
from canonlm.tasks.random import stream

IGNORE = -100  # the label of a token that is not a target, as in torch and transformers
SLACK = 64  # a draw may write this many tokens beyond the end of its instance


class Windows(NamedTuple):
    """Packed rows, each int32 [count, seq_len], C-contiguous. `doc_ids` counts the instances of a row: 0, 1, 2, …

    `labels[b, t]` is the target for `input_ids[b, t]` (the model shifts). The first token of every instance keeps its
    label under loss_on="all"; with isolated documents, it must not be predicted from the document before.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    doc_ids: np.ndarray


def empty_windows(count: int, seq_len: int) -> Windows:
    return Windows(*(np.empty((count, seq_len), np.int32) for _ in range(3)))


def _loop(seed, split, start, first, loss_on_all, tables, max_len, ids, labels, docs):
    """Fill the rows of ids, labels and docs: windows start, start + 1, …, each from its instance `first` on."""
    tokens, targets = np.empty(max_len + SLACK, np.int32), np.empty(max_len + SLACK, np.int32)
    room = make_room(tables)  # type: ignore[name-defined] # noqa: F821
    for row in range(ids.shape[0]):
        at = 0
        doc = 0
        while at < ids.shape[1]:
            state, gamma = stream(seed, split, start + row, first + doc)
            length = draw(state, gamma, tables, room, tokens, targets)  # type: ignore[name-defined] # noqa: F821
            at = place(tokens, targets, length, doc, loss_on_all, ids[row], labels[row], docs[row], at)
            doc += 1


@njit(cache=True)
def place(tokens, labels, length, doc, loss_on_all, row_ids, row_labels, row_docs, at):
    """Copy one instance into a row at position `at`, cut where the row ends. Returns where the next one starts."""
    length = min(length, len(row_ids) - at)
    for i in range(length):
        row_ids[at + i] = tokens[i]
        row_docs[at + i] = doc
    source = tokens if loss_on_all else labels
    for i in range(length):
        row_labels[at + i] = source[i]
    return at + length


def _loop_around(draw: Callable[..., int], make_room: Callable[..., Any]) -> FunctionType:
    """`_loop` with these two functions as its globals. numba cannot cache a loop that takes functions as arguments,
    because they are different objects in every process."""
    loop = FunctionType(_loop.__code__, {**globals(), "draw": draw, "make_room": make_room}, _loop.__name__)
    loop.__qualname__ = f"{_loop.__name__}.{draw.__module__}.{draw.__name__}"  # the cached file's name
    return loop


def compile_loop(draw: Callable[..., int], make_room: Callable[..., Any] = lambda tables: ()) -> Any:
    """The packing loop around `draw`, compiled by numba: the first item that `Task.sampler` returns.

    draw(state, gamma, tables, room, tokens, targets) -> length writes tokens[:length] and their targets under
    loss_on="answer" (the token, or IGNORE). All randomness comes from (state, gamma): see `tasks.random`. It allocates
    no arrays: make_room(tables) allocates its work arrays, `room`, once per call of the loop, and they keep what the
    last draw left in them. tables: the second item that the task's `sampler` returns, a tuple of arrays and numbers.

    `draw` is inlined and compiled without reference counting, which would take a fifth of the time of a short instance.
    Loops of this package are cached on disk. Others are compiled in every process, as numba would not notice changes.
    """
    ours = draw.__module__.startswith(f"{__package__}.")
    inner = njit(forceinline=True, _nrt=False)(draw), njit(forceinline=True)(make_room)
    return njit(cache=ours, nogil=True)(_loop_around(*inner))


def _draw_in_python(state, gamma, tables, room, tokens, targets):
    task, test = tables
    sample = task.draw_sample(state, gamma, test, "answer")
    length = len(sample.tokens)
    tokens[:length], targets[:length] = sample.tokens, sample.labels
    return length


def rng_of(state: int, gamma: int) -> Random:
    """The generator that `Task.draw` gets: Python's, seeded with the key of the instance."""
    return Random(int(state) << 64 | int(gamma))


python_loop = _loop_around(_draw_in_python, lambda tables: None)
