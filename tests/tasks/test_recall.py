"""Recall: an independent reader of all its variants and the distribution."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks
from canonlm.tasks.recall import Recall

COMMON = {
    "pairs": st.integers(1, 9),
    "noise": st.sampled_from([0, 0.3, 0.8]),
    "noise_words": st.integers(1, 4),
    "space": st.integers(1, 4),
    "gaps": st.sampled_from([None, 0.01, 0.7]),
}
UPDATES = st.sampled_from([0, 0.5, 1])
KINDS = st.one_of(
    st.fixed_dictionaries(
        COMMON | {
            "keys": st.integers(9, 20), "values": st.integers(18, 25), "updates": UPDATES,
            "filler": st.sampled_from(["noise", "words"]), "answers": st.sampled_from(["shown", "hidden"]),
        }
    ),
    st.fixed_dictionaries(
        COMMON | {
            "keys": st.just(3), "values": st.just(4), "updates": UPDATES,
            "key_length": st.integers(2, 3), "value_length": st.integers(2, 3),
        }
    ),
    st.fixed_dictionaries(COMMON | {"grid": st.just(True), "updates": UPDATES, "keys": st.integers(3, 9)}),
    st.fixed_dictionaries(COMMON | {"levels": st.integers(2, 4), "keys": st.integers(36, 40)}),
)  # fmt: skip


@given(KINDS, st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_answer_follows_from_the_bindings(settings, split, seed):
    task = tasks.get("recall", **settings)
    sample = task.sample(split, seed, 0)
    bos, *names = task.vocab.show(sample).split()
    context, asked = names[: names.index("ask")], names[names.index("ask") + 1 :]
    levels, hidden = settings.get("levels", 1), settings.get("answers") == "hidden"
    slots = re.findall(r"((?:[kq]\d+ )+)((?:v\d+ )+)|(n\d+ n\d+ )", " ".join([*context, ""]))
    if levels > 1:
        slots = [("", "", one) if one[0] == "n" else (f"{one} ", f"{two} ", "")
                 for one, two in zip(context[::2], context[1::2], strict=True)]  # fmt: skip
    bindings = [(key, value) for key, value, noise in slots if not noise]
    newest = dict(bindings)
    n = len(newest) // levels
    again = int(n * settings.get("updates", 0))
    assert bos == "bos"
    assert len(bindings) == n * levels + again
    assert {key for key, _ in bindings[: n * levels]} == {*newest}  # all keys once, before any is bound again
    assert len({value for _, value in bindings}) == len(bindings)
    fraction = settings["noise"]
    assert len(slots) - len(bindings) == round(len(bindings) * fraction / (1 - fraction))
    assert {"pairs": n} in task.slices() if split == "test" else n <= settings["pairs"]
    ends, hops = {}, Counter()
    for key in newest:
        ends[key] = newest[key]
        hops[key] = 1
        while ends[key] in newest:
            ends[key] = newest[ends[key]]
            hops[key] += 1
    answered = set()
    for query, label in zip(sample.queries, task.grade(sample, sample.labels), strict=True):
        assert label.correct
        key = f"{task.vocab.text(sample.tokens[query.question_start : query.start])} "
        value = f"{task.vocab.text(sample.labels[query.start : query.stop])} "
        assert value == ends[key]
        assert hidden or value == f"{task.vocab.text(sample.tokens[query.start : query.stop])} "
        assert task.explain(sample, query).startswith(f"{key}was bound to ")
        assert query.slice["pairs"] == n
        assert levels == 1 or query.slice["hops"] == hops[key]
        assert not again or query.slice["bound"] == ("again" if [k for k, _ in bindings].count(key) > 1 else "once")
        answered.add(value)
    assert len(answered) == len(sample.queries) == n
    filler = [
        i
        for i in range(len(asked))
        if not any(q.question_start <= i + len(context) + 2 < q.stop for q in sample.queries)
    ]
    assert len(filler) == 2 * n * (settings["space"] - 1)
    if settings.get("filler") == "words":
        assert not {f"{asked[i]} " for i in filler} & {*newest}
    else:
        assert all(asked[i][0] == "n" for i in filler)
    assert len(sample.tokens) <= task.max_len


def test_bindings_questions_and_noise_have_the_stated_probabilities(documents, fits):
    task = tasks.get("recall", pairs=2, keys=3, values=3, test_pairs=[2], noise=0.5, noise_words=2, space=2)
    docs = documents(task, "test", 6000)
    names = [task.vocab.text(doc).split() for doc in docs]
    fits(Counter((doc[i], doc[i + 1]) for doc in names for i in range(1, 9, 2) if doc[i][0] == "k").values())
    fits(Counter(tuple(i for i in range(1, 9, 2) if doc[i][0] == "n") for doc in names).values())  # 6 choices
    order = Counter(tuple(i for i in range(10, 18, 2) if doc[i][0] == "k") for doc in names)
    assert len(order) == 6
    fits(order.values())
    fits([*Counter(doc[1:10].index(next(x for x in doc[10:] if x[0] == "k")) < doc[1:10].index(
        [x for x in doc[10:] if x[0] == "k"][1]) for doc in names).values()])  # fmt: skip
    fits(Counter((doc[i], doc[i + 1]) for doc in names for i in range(10, 18, 2) if doc[i][0] == "n").values())


def test_questions_are_asked_after_gaps_drawn_by_a_power_distribution(documents, fits):
    task = tasks.get("recall", pairs=2, keys=2, values=2, test_pairs=[2], space=3, gaps=0.2)
    weights = np.arange(1, 7) ** (0.2 - 1)
    p = weights / weights.sum()
    counts = Counter()
    for doc in documents(task, "test", 8000):
        key = {doc[1]: 0, doc[3]: 1}
        places = {key[doc[i]]: (i - 6) // 2 for i in range(6, 18, 2) if doc[i] in key}
        counts[places[0], places[1]] += 1
    pairs = [(a, b) for a in range(6) for b in range(6) if a != b]
    fits([counts[pair] for pair in pairs], [p[a] * p[b] / (1 - p[a]) for a, b in pairs])  # without replacement


def test_rows_of_several_words_updates_and_levels_are_equally_likely(documents, fits):
    fuzzy = tasks.get("recall", pairs=1, keys=2, values=1, key_length=2, value_length=1)
    keys = Counter(tuple(doc[1 : doc.index(4)]) for doc in documents(fuzzy, "train", 3000))
    fits([keys[row] for row in ((2,), (3,), (2, 2), (2, 3), (3, 2), (3, 3))], [1 / 4] * 2 + [1 / 8] * 4)
    forgetting = tasks.get("recall", pairs=4, keys=4, values=6, test_pairs=[4], updates=0.5)
    docs = documents(forgetting, "test", 3000)
    fits(Counter(tuple(doc.index(doc[i]) for i in (9, 11)) for doc in docs).values())
    stacked = tasks.get("recall", pairs=2, keys=6, levels=3, test_pairs=[2])
    hops = Counter(q.slice["hops"] for i in range(1500) for q in stacked.sample("test", 0, i).queries)
    fits([hops[1], hops[2], hops[3]])
    grid = documents(tasks.get("recall", pairs=4, keys=2, grid=True, test_pairs=[4]), "test", 6000)
    fits(Counter(tuple(zip(doc[1:13:3], doc[2:13:3], strict=True)) for doc in grid).values())  # 24 orders


def test_the_largest_settings_can_be_drawn():
    task = tasks.get("recall", noise=0.5, noise_words=2**16)
    assert len(task.sample("train", 0, 0).tokens) <= task.max_len
    task = tasks.get("recall", pairs=43, updates=0.5, test_pairs=[43])  # 43 keys, 21 of them again: 64 values
    assert len(task.sample("test", 0, 0).tokens) == task.max_len == 2 + 2 * (43 + 21 + 43)


def test_a_guess_among_the_values_left_scores_chance():
    rng = np.random.default_rng(0)
    for difficulty in ("recall-noisy", "recall-zoology"):
        task = tasks.get("recall", difficulty=difficulty, pairs=5, test_pairs=[5])
        right = []
        for index in range(1500):
            sample = task.sample("test", 0, index)
            answers = [int(sample.labels[query.start]) for query in sample.queries]
            for i, answer in enumerate(answers):
                right.append(rng.choice(answers[i * (not task.spec.hidden) :]) == answer)
        assert np.mean(right) == pytest.approx(task.chance({"pairs": 5}), abs=0.02)


def test_chance_by_binding_is_over_the_sizes_that_have_such_bindings():
    task = tasks.get("recall", updates=0.1, pairs=16, test_pairs=[4, 8, 16])  # keys that are bound again: 0, 0, 1
    assert task.chance({"bound": "again"}) == 1  # the last value of the context
    task, right = tasks.get("recall", updates=0.5, pairs=4, test_pairs=[1, 4]), {"once": [], "again": []}
    for index in range(4000):
        left = [query.slice["bound"] for query in task.sample("test", 0, index).queries]
        while left:
            bound, among = left[0], left.count("again") if left[0] == "again" else len(left)
            right[bound].append(1 / among)
            left.pop(0)
    for bound, each in right.items():
        assert np.mean(each) == pytest.approx(task.chance({"bound": bound}), abs=0.01)


@pytest.mark.parametrize("difficulty", Recall.difficulties)
def test_hidden_answers_have_no_loss_on_all(difficulty):
    task = tasks.get("recall", difficulty=difficulty)
    if task.spec.hidden:
        with pytest.raises(ValueError, match=r'^loss_on: expected "answer" with recall\.answers=hidden, got "all"$'):
            task.windows("train", 0, 0, 1, seq_len=9, loss_on="all")
    row = task.windows("train", 5, 0, 1, seq_len=500)
    parts = [task.sample("train", 5, 0, j) for j in range(int(row.doc_ids[0].max()) + 1)]
    for rows, each in ((row.input_ids, [p.tokens for p in parts]), (row.labels, [p.labels for p in parts])):
        assert rows[0].tolist() == np.concatenate(each)[:500].tolist()


def test_filler_is_any_word_but_the_keys_of_the_sample():
    task = tasks.get("recall", train_pairs=3, pairs=3, keys=4, values=8, space=8, filler="words")
    shown = Counter()
    for index in range(1000):
        names = [task.vocab.name(token) for token in task.sample("train", 0, index).tokens]
        keys, rest = {*names[1:7:2]}, names[names.index("ask") + 1 :]
        shown.update("other key" if name not in keys else "key" for name in rest if name[0] == "k")
    words = 1000 * 2 * (24 - 3)  # of the slots without a question; one of nine is the fourth key
    assert shown["key"] == 1000 * 3
    assert abs(shown["other key"] - words / 9) < 5 * (words * 8 / 81) ** 0.5
