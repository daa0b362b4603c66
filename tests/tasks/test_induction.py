"""Induction: an independent reader, the distribution, and every mistake."""

from collections import Counter

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
    fits([*Counter(places).values()])
    fits([*Counter(tuple(token for token in doc[1:-2] if token > 2) for doc in docs).values()])
    fits(
        [
            *Counter(
                (doc[1:-2].index(doc[-2]) == place[0], doc[-1]) for doc, place in zip(docs, places, strict=True)
            ).values()
        ]
    )
    fits([*Counter(tuple(token for token in doc[1:-2] if token < 3) for doc in docs).values()])


def test_a_window_is_its_samples_even_with_many_triggers():
    task = tasks.get("induction", N=20, triggers=50, shown=9)
    row = task.windows("train", 3, 0, 1, seq_len=230).input_ids[0].tolist()
    assert row == [token for j in range(10) for token in task.sample("train", 3, 0, j).tokens.tolist()]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("bos T1 w1 T1", "position 4: expected bos, 4 to 8 tokens, a trigger and its word, got 4 tokens"),
        ("w1 T1 w1 T2 w2 T1 w1", "position 0: expected bos, got w1"),
        ("bos T1 T2 w2 w1 T1 w1", "position 2: expected each trigger once, and before a word, got T2"),
        ("bos T1 w1 T1 w2 T1 w1", "position 3: expected each trigger once, and before a word, got T1"),
        ("bos T1 w1 w1 T2 T1 w1", "position 4: expected each trigger once, and before a word, got T2"),
        ("bos T1 w1 bos w2 T1 w1", "position 3: expected a word or a trigger, got bos"),
        ("bos T1 w1 w1 w2 T1 w1", "position 5: expected 2 triggers before it, got 1"),
        ("bos T1 w1 T2 w2 T3 w1", "position 5: expected a trigger of the row, got T3"),
        ("bos T1 w1 T2 w2 T2 w1", "position 6: expected w2, got w1"),
    ],
)
def test_malformed_samples(text, line):
    task = tasks.get("induction", N=8, triggers=3, shown=2)
    with pytest.raises(ValueError) as error:
        task.read([task.vocab.ids[word] for word in text.split()])
    assert str(error.value) == line


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"shown": 2}, "induction.shown: expected at most 1, as there are 1 triggers and N is 64, got 2"),
        (
            {"N": 6, "triggers": 9, "shown": 4},
            "induction.shown: expected at most 3, as there are 9 triggers and N is 6",
        ),
        ({"test_lengths": [1]}, "induction.test_lengths: expected different integers from 2 to 65536, or multiples"),
    ],
)
def test_bad_settings(settings, line):
    with pytest.raises(ValueError) as error:
        tasks.get("induction", **settings)
    assert line in str(error.value)
