"""Graders read the output of models, which may be anything: a malformed answer is wrong, and never an exception."""

import math
import time
from functools import cache

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from canonlm import tasks

SMALL = {
    "brevo": {"N": 8},
    "capo": {"N": 20},
    "copying": {"N": 5},
    "depo": {"N": 6, "K": 2},
    "lano": {"grammar": "cfg3f"},
    "mano": {"L": 3},
    "mqar": {"pairs": 2, "test_pairs": [2]},
    "parity": {"N": 8},
}
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.integers(-3, 40),
    st.sampled_from(
        [
            10**1000,
            -(10**1000),
            2**63,
            -(2**63) - 1,
            math.nan,
            math.inf,
            "x" * 5000,
            object(),
            np.int64(3),
            np.float32(1),
            "\x1b[2J\n",
            {1: 2},
            {1, 2},
            b"\xff",
        ]
    ),
)
OUTPUTS = st.recursive(JUNK, lambda inner: st.lists(inner) | st.tuples(inner, inner), max_leaves=15)
ARRAYS = st.sampled_from(
    [
        np.zeros((0,)),
        np.zeros((2, 3), np.int64),
        np.array(3),
        np.array([[[]]]),
        np.full(50, np.nan),
        np.array(["a", "b"]),
        np.array([object()]),
        np.full(30, -1),
        np.full(30, 2**62),
        np.zeros(7, bool),
    ]
)


@cache
def sampled(name):
    task = tasks.get(name, **SMALL[name])
    return task, [task.sample("test", 0, index) for index in range(2)]


def check(task, sample, output):
    verdicts = task.grade(sample, output)
    assert [verdict.slice for verdict in verdicts] == [query.slice for query in sample.queries]
    assert all(type(verdict.correct) is bool and isinstance(verdict.why, str) for verdict in verdicts)
    return verdicts


def test_every_task_is_covered():
    assert set(SMALL) == set(tasks.names())


@pytest.mark.parametrize("name", SMALL)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=6)
@given(output=OUTPUTS | ARRAYS, data=st.data())
def test_junk_is_wrong(name, output, data):
    task, samples = sampled(name)
    sample = data.draw(st.sampled_from(samples))
    check(task, sample, output)
    per_query = [data.draw(JUNK | st.lists(JUNK)) for _ in sample.queries]
    check(task, sample, per_query)


@pytest.mark.parametrize("name", SMALL)
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=12)
@given(changes=st.dictionaries(st.integers(0, 10_000), JUNK, max_size=5))
def test_a_right_answer_with_junk_in_it(name, changes):
    task, samples = sampled(name)
    for sample in samples:
        output = sample.tokens.tolist()
        assert all(verdict.correct for verdict in check(task, sample, output))
        for place, value in changes.items():
            output[place % len(output)] = value
        check(task, sample, output)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "token",
    [1, *(pytest.param(token, marks=pytest.mark.slow) for token in (None, 10**30))],
)
def test_a_million_tokens(name, token):
    task, samples = sampled(name)
    for output in ([token] * 10**6, [[token] * 10**6] * len(samples[0].queries)):
        start = time.process_time()
        for verdict in check(task, samples[0], output):
            assert len(verdict.why) < 100_000
        assert time.process_time() - start < 5


class Raises:
    def __len__(self):
        raise RuntimeError

    def __iter__(self):
        raise RuntimeError

    def tolist(self):
        return [self]

    def __eq__(self, other):
        return NotImplemented

    __hash__ = None


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


ENDLESS = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(
    "output",
    [10**5000, nested(100_000), ENDLESS, [ENDLESS], Raises(), [Raises()]],
    ids=["digits", "deep", "endless", "endless within", "object", "objects"],
)
def test_values_that_are_not_tokens(name, output):
    task, samples = sampled(name)
    check(task, samples[0], output)
    check(task, samples[0], [output] * len(samples[0].queries))
