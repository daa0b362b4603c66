"""Capo's stream: every person exactly `exposures` times, every pass in its own order, the same for any request."""

import re
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations, product

import numpy as np
import pytest
from capo_reader import order_and_templates
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm import tasks
from canonlm.tasks.capo.people import person
from canonlm.tasks.capo.pools import ATTRIBUTES
from canonlm.tasks.capo.templates import TEMPLATES

FIXED = settings(max_examples=25)
SPLIT = st.sampled_from(["train", "valid", "test"])
SEED = st.integers(0, 2**40)


def capo(**spec):
    return tasks.get("capo", **{"N": 20, "exposures": 3, **spec})


def documents(task, seed, seq_len):
    """The documents of the training stream, in order, read from its windows."""
    windows = task.windows("train", seed, 0, task.training_windows(seed, seq_len), seq_len=seq_len)
    stream = windows.input_ids[windows.labels != -100]
    return [part.tobytes() for part in np.split(stream, np.flatnonzero(stream == 0)[1:])]


@st.composite
def specs(draw):
    variant = draw(st.sampled_from(["single", "multi", "fresh"]))
    N, questions = draw(st.integers(2, 60)), draw(st.booleans())
    flags = {"permute": draw(st.booleans()), "fullname": draw(st.booleans()), "questions": questions}
    return {"N": N, "exposures": draw(st.integers(1, 4)), "variant": variant, "texts": draw(st.integers(1, 3)), **flags}


@FIXED
@given(specs(), SEED, st.integers(1, 700))
def test_every_person_exactly_once_in_every_pass(spec, seed, seq_len):
    task = tasks.get("capo", **spec)
    result = documents(task, seed, seq_len)
    size = spec["N"] + 6 * (spec["N"] // 2) * spec["questions"]
    assert len(result) == size * spec["exposures"]
    for e in range(spec["exposures"]):
        expected = Counter(task.sample("train", seed, i, e).tokens.tobytes() for i in range(spec["N"]))
        if spec["questions"]:
            questions = [(i, attribute) for i in range(spec["N"] // 2) for attribute in ATTRIBUTES]
            expected += Counter(task.question(seed, i, attribute).tokens.tobytes() for i, attribute in questions)
        assert Counter(result[e * size : (e + 1) * size]) == expected


@FIXED
@given(specs(), SEED, st.integers(1, 300), SPLIT)
def test_padding_and_document_ids(spec, seed, seq_len, split):
    task = tasks.get("capo", **spec)
    ids, labels, docs = task.windows(split, seed, 0, task.training_windows(seed, seq_len) + 3, seq_len=seq_len)
    padding = labels == -100
    np.testing.assert_array_equal(labels[~padding], ids[~padding])
    assert (ids[padding] == 0).all()
    assert (docs[:, 0] == 0).all()
    if seq_len > 1:  # a document begins at bos; the padding of a row is one more
        begins = (ids[:, 1:] == 0) & ~padding[:, 1:]
        pads = padding[:, 1:] & ~padding[:, :-1]
        np.testing.assert_array_equal(np.diff(docs), begins | pads)
        assert not (padding[:, :-1] & ~padding[:, 1:]).any()
    if split == "train":  # otherwise texts and lengths differ
        assert padding[-3:].all()
        assert not padding[-4].all()


@FIXED
@given(specs(), SEED, st.integers(1, 200), SPLIT, st.data())
def test_windows_do_not_depend_on_where_reading_starts(spec, seed, seq_len, split, data):
    count = tasks.get("capo", **spec).training_windows(seed, seq_len) + 2
    full = tasks.get("capo", **spec).windows(split, seed, 0, count, seq_len=seq_len)
    task = tasks.get("capo", **spec)
    for _ in range(6):
        start = data.draw(st.integers(0, count))
        stop = data.draw(st.integers(start, count))
        part = task.windows(split, seed, start, stop - start, seq_len=seq_len)
        for ours, theirs in zip(part, full, strict=True):
            np.testing.assert_array_equal(ours, theirs[start:stop])


@FIXED
@given(specs(), SEED, st.integers(1, 700), st.data())
def test_whether_the_stream_has_so_many_windows(spec, seed, seq_len, data):
    windows = tasks.get("capo", **spec).training_windows(seed, seq_len)
    count = data.draw(st.integers(0, windows + 2) | st.integers(windows - 1, windows + 1))
    assert tasks.get("capo", **spec).has_windows(seed, seq_len, count) == (count <= windows)


def test_far_away_windows_are_padding():
    ids, labels, docs = capo().windows("test", 0, 2**60, 2, seq_len=30)
    assert not ids.any()
    assert not docs.any()
    assert (labels == -100).all()


def test_threads_and_more_passes_than_tables():
    spec = {"N": 1500, "exposures": 9}
    count = capo(**spec).training_windows(5, 128)
    full = capo(**spec).windows("train", 5, 0, count, seq_len=128)
    starts = np.random.default_rng(0).permutation(np.arange(0, count, 100)).tolist()
    shared = capo(**spec)
    with ThreadPoolExecutor(6) as pool:
        parts = pool.map(lambda start: shared.windows("train", 5, start, min(100, count - start), seq_len=128), starts)
        for start, part in zip(starts, parts, strict=True):
            for ours, theirs in zip(part, full, strict=True):
                np.testing.assert_array_equal(ours, theirs[start : start + 100])


def test_every_pass_has_a_different_order(fits):
    task = capo(N=6, exposures=400, variant="single")
    result = documents(task, 0, 64)
    number = {document: i for i, document in enumerate(sorted(set(result)))}
    orders = [tuple(map(number.get, result[at : at + 6])) for at in range(0, len(result), 6)]
    assert len(orders) == 400
    assert len(set(orders)) > 250  # of 720; 307 expected
    for place in range(6):
        fits(np.bincount([order[place] for order in orders], minlength=6))
    for a, b in [(0, 1), (0, 5), (2, 3)]:  # neighbours and others: all 30 pairs alike
        pairs = Counter((order[a], order[b]) for order in orders)
        fits([pairs[pair] for pair in permutations(range(6), 2)])


def test_variants():
    def texts(i, **spec):
        task = capo(exposures=12, **spec)
        return [task.sample("train", 4, i, e).tokens.tobytes() for e in range(12)]

    assert len(set(texts(3, variant="fresh"))) == 12
    assert len(set(texts(3, variant="single"))) == 1
    multi = texts(3, variant="multi", texts=4)
    assert multi == 3 * multi[:4]
    assert len(set(multi)) == 4
    first = texts(3, variant="fresh")
    assert texts(3, variant="single")[0] == first[0]
    assert multi[:4] == first[:4]
    task = capo(variant="single")
    others = {task.sample(split, 4, 3, e).tokens.tobytes() for split in ("valid", "test") for e in range(6)}
    assert len(others | set(first)) == 24  # valid and test have texts of their own, fresh in every pass


@pytest.mark.every(3)
@pytest.mark.parametrize("fullname", [False, True])
@pytest.mark.parametrize("permute", [False, True])
def test_distribution_of_the_texts(permute, fullname, fits):
    task = capo(N=50_000, permute=permute, fullname=fullname)
    counts, places, n = defaultdict(Counter), Counter(), 600
    for i in range(n):
        text = " " + task.vocab.text(task.sample("train", 9, i, 7).tokens[1:].tolist())
        order, templates = order_and_templates(text, person(9, i, task.text.pools), fullname)
        places[tuple(order)] += 1
        for a, t in enumerate(templates):
            counts[a][t] += 1
    for a in range(6):
        fits([counts[a][t] for t in range(len(TEMPLATES[ATTRIBUTES[a]]))])
    if permute:
        for a in range(6):
            fits([sum(c for order, c in places.items() if order.index(a) == place) for place in range(6)])
        first = Counter()
        for order, count in places.items():
            first[order[:2]] += count
        fits([first[pair] for pair in permutations(range(6), 2)])
    else:
        assert places == {tuple(range(6)): n}


def test_the_people_do_not_depend_on_the_variant():
    settings = product(("single", "fresh"), (True, False), (True, False))
    every = [capo(variant=variant, permute=permute, fullname=fullname) for variant, permute, fullname in settings]
    for i in range(5):
        samples = [task.sample(split, 4, i, j) for task in every for split in ("train", "test") for j in (0, 5)]
        names = {sample.meta["name"] for sample in samples}
        assert names == {person(4, i, every[0].text.pools).name}


def test_texts_contain_no_template_notation():
    """None of the templates' notation is left, and no space is doubled."""
    task = capo(N=3000)
    for i in range(200):
        text = task.vocab.text(task.sample("test", 1, i).tokens[1:].tolist())
        assert not re.search(r"[{}]|  | \.|,,|\.\.", text)
