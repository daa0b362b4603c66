"""Dictionary: an independent reader, the distribution and chance by guessing."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks

FUZZY = {"keys": 3, "key_length": 2, "value_length": 3}


def slots(task, sample):
    """(key, value), or None for noise; and the places of the values."""
    _, *words = task.vocab.show(sample).split()
    found, places = [], []
    for match in re.finditer(r"((?:k\d+ )+)((?:v\d+ )+)|n\d+ n\d+ ", " ".join([*words, ""])):
        start = 1 + " ".join([*words, ""])[: match.end() - len(match[2] or "")].count(" ")
        found.append((match[1], match[2]) if match[1] else None)
        places.append((start, start + (match[2] or "").count(" ")))
    return found, places


@given(
    st.integers(2, 40), st.sampled_from([{}, {"noise": 0.5}, FUZZY]), st.sampled_from(["train", "test"]),
    st.integers(0, 2**40),
)  # fmt: skip
def test_a_key_that_comes_again_has_its_value(N, settings, split, seed):
    task = tasks.get("dictionary", N=N, test_lengths=["x1", "x1.5"], **settings)
    for index in range(3):  # one after the other: draws leave no trace in the sampler's arrays
        sample = task.sample(split, seed, 0, index)
        found, places = slots(task, sample)
        assert len(found) in ([N, int(1.5 * N)] if split == "test" else [N])
        assert found[-1] is not None
        values, newest, asked = {}, {}, []
        for at, (slot, place) in enumerate(zip(found, places, strict=True)):
            if slot is None:
                continue
            key, value = slot
            for part in slot:
                assert len({*part.split()}) == len(part.split())
            assert split == "train" or len(key.split()) == task.spec.key_length
            if key in values:
                assert values[key] == value
                asked.append((*place, f"{key}had {value.strip()}, {at - newest[key]} slot"))
            values[key], newest[key] = value, at
        assert [(query.start, query.stop) for query in sample.queries] == [(a, b) for a, b, _ in asked]
        assert asked[-1][1] == len(sample.tokens)
        for query, (*_, why) in zip(sample.queries, asked, strict=True):
            assert task.explain(sample, query).startswith(why)
            assert query.slice == {"n": len(found)}


def test_slots_are_equally_likely(documents, fits):
    task = tasks.get("dictionary", N=3, keys=2, values=2, noise=0.5, noise_words=2)
    kinds = Counter(
        "".join(task.vocab.name(token)[0] for token in doc[1:5:2]) for doc in documents(task, "train", 40_000)
    )
    assert {*kinds} == {"kk", "kn", "nk"}  # one of the first two never has noise
    fits([kinds["kn"], kinds["nk"], kinds["kk"] / 2, kinds["kk"] / 2])
    plain = documents(tasks.get("dictionary", N=3, keys=2, values=2), "train", 20_000)
    fits(Counter(tuple(doc[1:5]) for doc in plain if doc[1] != doc[3]).values())  # 2 orders of keys, 4 of values
    fits(Counter((doc[1], doc[3]) for doc in plain).values())
    fits(Counter(doc[5] == doc[3] for doc in plain if doc[1] != doc[3]).values())
    fuzzy = documents(tasks.get("dictionary", N=2, values=2, keys=2, key_length=2, value_length=2), "train", 40_000)
    keys = Counter(tuple(token for token in doc[1 : len(doc) // 2 + 1] if token < 3) for doc in fuzzy)
    fits([keys[1,], keys[2,], keys[1, 2], keys[2, 1]])


@pytest.mark.parametrize("name", ["dictionary", "recall"])
def test_the_tables_of_long_keys_are_made_once(name):
    task = tasks.get(name, keys=9, key_length=2, values=9, value_length=2)
    first, second = (task.sampler(False)[1] for _ in range(2))
    assert first.keys is second.keys
    assert first.values is second.values


@pytest.mark.parametrize(
    "settings", [{"N": 9}, {"N": 9, "noise": 0.4}, {"N": 6, **FUZZY}], ids=["plain", "noise", "fuzzy"]
)
def test_chance_is_what_guessing_scores(settings):
    task, right, asked = tasks.get("dictionary", **settings), 0, 0
    for index in range(4_000):
        values = {}
        for slot in slots(task, task.sample("test", 1, index))[0]:
            if slot is not None:
                if slot[0] in values:
                    asked += 1
                    right += Counter(sorted(values.values())).most_common(1)[0][0] == slot[1]
                values[slot[0]] = slot[1]
    assert right / asked == pytest.approx(task.chance({"n": settings["N"]}), abs=0.015)


def test_a_long_guess_is_right_about_its_beginnings_in_windows():
    """docs/tasks/dictionary.md has the number."""
    task, right, asked = tasks.get("dictionary", difficulty="dictionary-32-fuzzy"), 0, 0
    for index in range(500):
        values = {}
        for slot in slots(task, task.sample("test", 1, index))[0]:
            if slot[0] in values:
                known = Counter(values.values())
                guess = max(known, key=lambda long: sum(known[value] for value in known if long.startswith(value)))
                asked += 1
                right += guess.startswith(slot[1])
            values[slot[0]] = slot[1]
    assert right / asked == pytest.approx(0.17, abs=0.01)
    assert task.chance({"n": 32}) == pytest.approx(0.12, abs=0.005)
