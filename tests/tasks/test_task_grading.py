"""Graders: right answers pass, others fail, and no answer makes them raise."""

import re

import numpy as np
import pytest
from every_task import CAPO
from every_task import TASKS as EVERY
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm import tasks

TASKS = [*(task for task in EVERY if task.name != "lano"), CAPO]  # lano accepts any sentence
EACH = pytest.mark.parametrize("task", TASKS, ids=repr)
FEW = settings(max_examples=5)
SEED = st.integers(0, 2**40)
JUNK = st.one_of(
    st.none(), st.integers(), st.floats(), st.text(), st.booleans(), st.binary(),
    st.recursive(
        st.one_of(st.integers(-3, 60), st.integers(), st.none(), st.floats(), st.text(max_size=3), st.booleans()),
        lambda inner: st.lists(inner, max_size=12), max_leaves=40,
    ),
    st.lists(st.sampled_from(
        [np.int32(3), np.float64(1.0), np.array([1, 2]), np.array(4), np.bool_(True), [np.array([5])], np.array([[6]])]
    )),
)  # fmt: skip


def truth(sample):
    return [sample.tokens[query.start : query.stop].tolist() for query in sample.queries]


@EACH
@FEW
@given(SEED)
def test_the_reference_answer_is_correct_in_every_form(task, seed):
    sample = task.sample("test", seed, 0)
    answers = truth(sample)
    forms = [
        sample.tokens,
        sample.tokens.tolist(),
        answers,
        [np.array(a) for a in answers],
        [(*a, 0, 0) for a in answers],
    ]
    for form in forms:
        verdicts = task.grade(sample, form)
        assert [verdict.slice for verdict in verdicts] == [query.slice for query in sample.queries]
        assert all(verdict.correct and verdict.why == "" for verdict in verdicts)


@EACH
@FEW
@given(SEED, st.data())
def test_one_wrong_token_is_caught(task, seed, data):
    sample = task.sample("test", seed, 0)
    query = data.draw(st.sampled_from(sample.queries))
    at = data.draw(st.integers(query.start, query.stop - 1))
    wrong = data.draw(st.integers(-2, len(task.vocab) + 2).filter(lambda token: token != sample.tokens[at]))
    output = sample.tokens.copy()
    output[at] = wrong
    for form in (output, [output[q.start : q.stop] for q in sample.queries]):
        for queried, verdict in zip(sample.queries, task.grade(sample, form), strict=True):
            # Of Brevo, too, where other orders can be right: they all have the same tokens.
            assert verdict.correct == (not queried.start <= at < queried.stop)
            assert bool(verdict.why) != verdict.correct


@EACH
@FEW
@given(SEED, st.data())
def test_an_unfinished_answer_is_wrong(task, seed, data):
    sample = task.sample("test", seed, 0)
    at = data.draw(st.integers(0, len(sample.queries) - 1))
    answers = truth(sample)
    answers[at] = answers[at][:-1]
    verdicts = task.grade(sample, answers)
    assert not verdicts[at].correct
    assert all(verdict.correct for i, verdict in enumerate(verdicts) if i != at) or task.name == "copying"


@pytest.mark.parametrize("task", [*EVERY, CAPO], ids=repr)
@FEW
@given(SEED, JUNK)
def test_junk_is_wrong_and_never_raises(task, seed, junk):
    sample = task.sample("test", seed, 0)
    for output in (junk, [junk, junk], np.array([1.5]), np.zeros((2, 3)), [[1] * 10_000, [1] * 10_000]):
        flat = output if isinstance(output, list) else []
        for query, verdict in zip(sample.queries, task.grade(sample, output), strict=True):
            assert verdict.slice == query.slice
            right = sample.tokens[query.start : query.stop].tolist()
            if verdict.correct:  # only if the junk happens to spell the answer
                assert any(isinstance(x, list) and x[: len(right)] == right for x in [flat, *flat])
            else:
                assert verdict.why.startswith({"lano": "got "}.get(task.name, "expected ")) or task.name == "brevo"
                assert verdict.why
                assert "\n" not in verdict.why


def test_only_answer_positions_are_read():
    for task in TASKS:
        sample = task.sample("test", 1, 0)
        output = np.full(len(sample.tokens), -1)
        for query in sample.queries:
            output[query.start : query.stop] = sample.tokens[query.start : query.stop]
        assert all(verdict.correct for verdict in task.grade(sample, output))


def test_a_short_flat_output_answers_the_first_question():
    depo, copying = TASKS[0], TASKS[4]
    sample = depo.sample("test", 1, 0)
    verdicts = depo.grade(sample, truth(sample)[0])
    assert [verdict.correct for verdict in verdicts] == [True] + [False] * 9
    assert re.fullmatch(r"expected 'w\d+\.', got nothing", verdicts[1].why)
    sample = copying.sample("test", 1, 0)  # all its queries start at the same token
    items = sample.tokens[1:7].tolist()
    graded = {v.slice["first"]: v.correct for v in copying.grade(sample, items[:3])}
    assert graded == {1: True, 2: True, 4: False, "all": False}


def test_too_few_answers():
    sample = TASKS[0].sample("test", 1, 0)
    assert [v.correct for v in TASKS[0].grade(sample, truth(sample)[:4])] == [True] * 4 + [False] * 6


def test_why_is_readable():
    task = tasks.get("depo", N=3, K=1, M=1, name_vocab=3, min_name_len=1, max_name_len=1)
    text = "bos w1. w2. w3. w1. w2. w3. q1 w2. ans w3."
    sample = task.read([task.vocab.ids[name] for name in text.split()])
    assert task.grade(sample, [task.vocab.ids["w1."]])[0].why == "expected 'w3.', got 'w1.'"
    assert task.grade(sample, [99, -1])[0].why == "expected 'w3.', got '<99>'"
    assert task.grade(sample, [[None]])[0].why == "expected 'w3.', got '<None>'"
    assert task.grade(sample, [True])[0].correct is False
    assert task.grade(sample, [float(task.vocab.ids["w3."])])[0].correct is False


def test_read_takes_integers_only():
    task = TASKS[2]
    tokens = task.sample("test", 0, 0).tokens
    for junk in (tokens + 0.5, [2**40], 5, [[1, 2]], [[1], [2, 3]], ["a"], None):
        with pytest.raises(ValueError, match=r"^tokens: expected "):
            task.read(junk)
    with pytest.raises(ValueError, match=r"^tokens: expected "):
        task.from_original(5)


@pytest.mark.parametrize(("name", "difficulty"), [("recall", "recall-fuzzy"), ("dictionary", "dictionary-32-fuzzy")])
def test_a_longer_value_that_begins_with_the_right_one_is_wrong(name, difficulty):
    task = tasks.get(name, difficulty=difficulty)
    sample = task.sample("test", 0, 1)
    values = [token for token, kind in enumerate(task.vocab.names) if kind[0] == "v"]
    for query, right in zip(sample.queries, truth(sample), strict=True):
        longer = [*right, *values][: task.spec.value_length + 1]
        short = len(right) < task.spec.value_length
        others = [[]] * len(sample.queries)
        at = sample.queries.index(query)
        for answer, correct in ((right, True), ([*right, 0], True), (longer, not short)):
            others[at] = list(answer)
            assert task.grade(sample, others)[at].correct == correct
