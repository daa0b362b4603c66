"""Windows are pure functions of (seed, split, w), and consist of the results of `sample`."""

import pickle

import numpy as np
import pytest
from every_task import CAPO, TASKS
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from canonlm import tasks

EACH = pytest.mark.parametrize("task", TASKS, ids=repr)
FEW = settings(max_examples=5)
SPLIT = st.sampled_from(["train", "valid", "test"])
SEED = st.integers(0, 2**63 - 1)
LOSS = st.sampled_from(["answer", "all", None])


@EACH
@FEW
@given(SPLIT, SEED, st.integers(0, 2**62), st.integers(0, 3), st.integers(1, 150), LOSS)
def test_windows_are_their_samples_one_after_the_other(task, split, seed, start, count, seq_len, loss_on):
    """Each alone, wherever reading starts and whatever was drawn before it."""
    windows = task.windows(split, seed, start, count, seq_len=seq_len, loss_on=loss_on)
    for part in windows:
        assert (part.shape, part.dtype, part.flags.c_contiguous) == ((count, seq_len), np.int32, True)
    for row in range(count):
        parts, j = [], 0
        while sum(len(part.tokens) for part in parts) < seq_len:
            parts.append(task.sample(split, seed, start + row, j, loss_on=loss_on))
            j += 1
        numbers = [np.full(len(part.tokens), i) for i, part in enumerate(parts)]
        expected = [part.tokens for part in parts], [part.labels for part in parts], numbers
        for got, pieces in zip(windows, expected, strict=True):
            np.testing.assert_array_equal(got[row], np.concatenate(pieces)[:seq_len])


@EACH
@FEW
@given(SPLIT, SEED, st.integers(0, 2**62), st.integers(1, 300))
def test_instances_are_the_complete_samples_of_a_window(task, split, seed, w, seq_len):
    row = task.windows(split, seed, w, 1, seq_len=seq_len).input_ids[0]
    at = 0
    for j, placed in enumerate(task.instances(split, seed, w, seq_len)):
        expected = task.sample(split, seed, w, j)
        assert placed.start == at
        np.testing.assert_array_equal(row[placed.start : placed.stop], expected.tokens)
        assert placed.sample.meta == expected.meta
        at = placed.stop
    rest = len(task.sample(split, seed, w, len(task.instances(split, seed, w, seq_len))).tokens)
    assert at + rest > seq_len


@pytest.mark.parametrize("task", [task for task in TASKS if task.max_len > 8], ids=repr)
def test_splits_seeds_and_windows_differ(task):
    def window(split="train", seed=0, w=0):
        return task.windows(split, seed, w, 1, seq_len=200).input_ids.tobytes()

    different = [window(), window("valid"), window("test"), window(seed=1), window(w=1), window(seed=2**63 - 1)]
    assert len(set(different)) == len(different)
    assert window() == window()


@pytest.mark.parametrize("task", [*TASKS, CAPO], ids=repr)
@FEW
@given(SPLIT, SEED, st.integers(0, 2**62), st.integers(0, 2**62))
def test_labels(task, split, seed, index, j):
    answer = task.sample(split, seed, index, j, loss_on="answer")
    everything = task.sample(split, seed, index, j, loss_on="all")
    np.testing.assert_array_equal(everything.labels, everything.tokens)
    marker = 1 if task.name in ("depo", "brevo", "mano", "lano") else 0
    targets = {i for query in answer.queries for i in range(query.start - marker, query.stop)}
    expected = [token if i in targets else -100 for i, token in enumerate(answer.tokens.tolist())]
    assert answer.labels.tolist() == expected
    assert len(answer.tokens) <= task.max_len
    assert answer.tokens.min() >= 0
    assert answer.tokens.max() < len(task.vocab)


@EACH
@FEW
@given(SPLIT, SEED)
def test_show(task, split, seed):
    sample = task.sample(split, seed, 0)
    shown = task.show(sample)
    assert " ".join(name for name, _ in shown) == task.vocab.show(sample)
    assert [task.vocab.ids[name] for name, _ in shown] == sample.tokens.tolist()
    answers = {i for query in sample.queries for i in range(query.start, query.stop)}
    assert {i for i, (_, role) in enumerate(shown) if role == "answer"} == answers
    assert {role for _, role in shown} <= {"marker", "context", "question", "answer"}


def test_tasks_can_be_pickled():
    for task in [*TASKS, CAPO]:
        task.windows("train", 3, 0, 2, seq_len=64)
        both = (each.windows("train", 3, 4, 2, seq_len=64) for each in (pickle.loads(pickle.dumps(task)), task))
        for ours, theirs in zip(*both, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (
            lambda: tasks.get("depoo"),
            'unknown task "depoo". Did you mean "depo"? Tasks: arithmetic, automaton, brevo, capo, copying, depo',
        ),
        (lambda: tasks.get("depo", difficulty="depo1-226"), 'Did you mean "depo1-225"?'),
        (lambda: tasks.get("depo", name_vocb=3), 'unknown setting "depo.name_vocb". Did you mean "depo.name_vocab"?'),
        (lambda: tasks.get("capo", people=5), 'unknown setting "capo.people"'),
        (lambda: TASKS[0].sample("tst", 0, 0), 'unknown split "tst". Did you mean "test"?'),
        (lambda: TASKS[0].sample("test", -1, 0), "seed: expected an integer from 0 to 2**63 - 1, got -1"),
        (lambda: TASKS[0].sample("test", 2**63, 0), "seed: expected"),
        (lambda: TASKS[0].sample("test", 1.5, 0), "seed: expected"),
        (lambda: TASKS[0].sample("test", 0, -1), "index: expected"),
        (lambda: TASKS[0].windows("test", 0, 0, -1, seq_len=8), "count: expected"),
        (lambda: TASKS[0].windows("test", 0, 0, 1, seq_len=0), "seq_len: expected an integer from 1"),
        (lambda: TASKS[0].windows("test", 0, 0, 1, seq_len=8, loss_on="none"), 'loss_on: expected "answer" or "all"'),
        (
            lambda: TASKS[4].to_original(TASKS[4].sample("test", 0, 0)),
            "copying: the original release has no token ids for this task",
        ),
        (lambda: TASKS[4].from_original([1]), "copying: the original release has no token ids for this task"),
    ],
)
def test_mistakes_are_one_line(call, line):
    with refused(f"...{line}..."):
        call()


def test_specs_are_frozen_and_resolved():
    resolved = {"N": 40, "min_items": 10, "max_items": None, "test_lengths": None}
    assert tasks.get("copying", N=40).spec.model_dump() == resolved
    assert tasks.get("copying", difficulty="copying-500").spec.min_items == 500
    assert tasks.get("depo", difficulty="depo2-75", M=5).spec.M == 5
    with pytest.raises(ValueError):
        TASKS[0].spec.N = 5
