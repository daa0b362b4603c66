"""Induction: an independent reader and the distribution."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


@given(st.integers(2, 60), st.integers(1, 9), st.data(), st.sampled_from(["train", "test"]), st.integers(0, 2**40))
def test_the_answer_is_what_followed_the_trigger(N, triggers, data, split, seed):
    shown = data.draw(st.integers(1, min(triggers, N // 2)))
    task = tasks.get("induction", N=N, words=4, triggers=triggers, shown=shown, test_lengths=["x1", "x1.5"])
    for index in range(3):  # one after the other: draws leave no trace in the sampler's arrays
        sample = task.sample(split, seed, 0, index)
        bos, *row, trigger, word = task.vocab.show(sample).split()
        assert (bos, len(row)) in [("bos", n) for n in ([N, int(1.5 * N)] if split == "test" else [N])]
        places = [at for at, token in enumerate(row) if token[0] == "T"]
        assert len(places) == len({row[at] for at in places}) == shown
        (at,) = (at for at in places if row[at] == trigger)
        assert word == row[at + 1]
        assert word[0] == "w"
        (query,) = sample.queries
        assert (query.start, query.stop, query.slice) == (len(row) + 2, len(row) + 3, {"n": len(row)})
        assert task.explain(sample, query) == f"{trigger} was followed by {word}, {len(row) - at} tokens before"


def test_rows_are_equally_likely(documents, fits):
    docs = documents(tasks.get("induction", N=6, words=2, triggers=3, shown=2), "train", 10_000)
    places = [tuple(at for at, token in enumerate(doc[1:-2]) if token > 2) for doc in docs]
    assert len({*places}) == 6  # two blocks of two among four slots
    fits(Counter(places).values())
    fits(Counter(tuple(token for token in doc[1:-2] if token > 2) for doc in docs).values())
    chosen = Counter((doc[1:-2].index(doc[-2]) == place[0], doc[-1]) for doc, place in zip(docs, places, strict=True))
    fits(chosen.values())
    fits(Counter(tuple(token for token in doc[1:-2] if token < 3) for doc in docs).values())


@pytest.mark.parametrize("shown", [1, 3])
def test_chance_is_what_guessing_scores(shown):
    task, right = tasks.get("induction", N=20, words=5, triggers=4, shown=shown), []
    for index in range(3_000):
        *row, _, word = task.sample("test", 0, index).tokens[1:].tolist()
        seen = [b for a, b in pairwise(row) if a > 5] if shown > 1 else [token for token in row if token <= 5]
        right.append(Counter(sorted(seen)).most_common(1)[0][0] == word)
    assert np.mean(right) == pytest.approx(task.chance({"n": 20}), abs=0.03)
