"""Stack: lists of Python as the independent truth and the distribution."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(
    st.integers(2, 60), st.integers(1, 6), st.integers(2, 5), st.sampled_from(["train", "test"]), st.integers(0, 2**40)
)
def test_what_is_popped_was_pushed_last(N, stacks, elements, split, seed):
    task = tasks.get("stack", N=N, stacks=stacks, elements=elements, test_lengths=["x1", "x1.5"])
    sample = task.sample(split, seed, 0)
    bos, *rest = task.vocab.show(sample).split()
    operations = [*zip(rest[::3], rest[1::3], rest[2::3], strict=True)]
    assert (bos, len(operations)) in [("bos", n) for n in ([N, int(1.5 * N)] if split == "test" else [N])]
    held, popped = defaultdict(list), []
    for i, (kind, stack, element) in enumerate(operations):
        if kind == "push":
            held[stack].append((i, element))
        else:
            assert kind == "pop"
            pushed, on_top = held[stack].pop()
            assert on_top == element
            popped.append((3 * i + 3, pushed))
    assert [(q.start, q.question_start) for q in sample.queries] == [(at, at - 2) for at, _ in popped]
    for query, (_, pushed) in zip(sample.queries, popped, strict=True):
        assert f" by operation {pushed + 1}, and" in task.explain(sample, query)


def test_operations_have_the_stated_probabilities(documents, fits):
    docs = documents(tasks.get("stack", N=2, stacks=2, elements=2), "train", 10_000)
    counts = Counter(tuple(doc[1:]) for doc in docs)
    push, pop, shares = 1, 2, {}
    for first in ((s, x) for s in (3, 4) for x in (5, 6)):
        for s in (3, 4):
            for x in (5, 6):
                shares[push, *first, push, s, x] = 1 / 16 / (2 if s == first[0] else 1)
        shares[push, *first, pop, *first] = 1 / 16
    fits([counts[each] for each in shares], [*shares.values()])
    assert {*counts} == {*shares}


@pytest.mark.parametrize("settings", [{"N": 20, "stacks": 3, "elements": 4}, {"N": 9, "stacks": 1, "elements": 7}])
def test_chance_is_what_guessing_scores(settings):
    task, right = tasks.get("stack", **settings), []
    for index in range(1_500):
        held = Counter()
        for kind, _, element in np.reshape(task.sample("test", 0, index).tokens[1:], (-1, 3)).tolist():
            if kind == 2:
                right.append(max(held, key=lambda each: (held[each], each)) == element)
            held[element] += 1 if kind == 1 else -1
    assert np.mean(right) == pytest.approx(task.chance({"n": settings["N"]}), abs=0.02)
    assert tasks.get("stack", N=4, stacks=4096).chance({"n": 4}) < 0.7  # where hardly any sample pops
