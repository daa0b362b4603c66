"""Graders read the output of models, which may be anything: a malformed answer is wrong, and never an exception."""

import time
from functools import cache

import pytest

from canonlm import tasks
from canonlm.launch.recipes import load_preset


@cache
def sampled(name):
    task = tasks.get(**load_preset(name, "tiny").run["task"])
    return task, [task.sample("test", 0, index) for index in range(2)]


def check(task, sample, output):
    verdicts = task.grade(sample, output)
    assert [verdict.slice for verdict in verdicts] == [query.slice for query in sample.queries]
    assert all(type(verdict.correct) is bool and isinstance(verdict.why, str) for verdict in verdicts)
    return verdicts


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize("token", [1, *(pytest.param(token, marks=pytest.mark.slow) for token in (None, 10**30))])
def test_many_tokens(name, token):
    """In time that grows with their number: its square would take minutes."""
    task, samples = sampled(name)
    check(task, samples[0], [token] * 9)  # compiles what it needs
    for output in ([token] * 10**5, [[token] * 10**5] * len(samples[0].queries)):
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


@pytest.mark.parametrize("name", tasks.names())
@pytest.mark.parametrize(
    "output",
    [10**5000, nested(100_000), ENDLESS, [ENDLESS], Raises(), [Raises()]],
    ids=["digits", "deep", "endless", "endless within", "object", "objects"],
)
def test_values_that_are_not_tokens(name, output):
    task, samples = sampled(name)
    check(task, samples[0], output)
    check(task, samples[0], [output] * len(samples[0].queries))
