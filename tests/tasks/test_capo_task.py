"""Capo as a task: samples read back, batches for an evaluation and held-out questions."""

from itertools import pairwise

import numpy as np
import pytest
from capo_folders import write_pools
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from canonlm import tasks
from canonlm.models.build import build
from canonlm.models.interface import Sizes
from canonlm.tasks.capo.people import person
from canonlm.tasks.capo.pools import ATTRIBUTES

FIXED = settings(max_examples=40)
SEED = st.integers(0, 2**40)
VARIANTS = st.fixed_dictionaries(
    {"variant": st.sampled_from(["fresh", "single"]), "permute": st.booleans(), "fullname": st.booleans()}
)


def capo(**spec):
    return tasks.get("capo", **{"N": 40, "exposures": 3, **spec})


@FIXED
@given(SEED, st.sampled_from(["train", "valid", "test"]), st.integers(0, 200), st.integers(0, 9), VARIANTS)
def test_samples_state_the_facts_of_the_person(seed, split, index, j, variant):
    task = capo(**variant)
    sample = task.sample(split, seed, index, j)
    who = person(seed, index % 40, task.text.pools)
    facts = {key: value for key, value in sample.meta.items() if key != "queries"}
    assert facts == {"name": who.name, **who.values}
    assert sorted(query.slice["attribute"] for query in sample.queries) == sorted(ATTRIBUTES)
    for query in sample.queries:
        answer = task.vocab.text(sample.tokens[query.start : query.stop].tolist())
        assert answer == who.values[query.slice["attribute"]]
        questions = task.vocab.text(sample.tokens[query.question_start : query.start].tolist())
        assert questions.startswith((who.name, who.pronoun))
        assert "." not in questions
        assert who.values[query.slice["attribute"]] in task.explain(sample, query)
    assert len(sample.tokens) <= task.max_len
    np.testing.assert_array_equal(sample.labels, sample.tokens)
    again = task.read(sample.tokens)
    assert again.meta == sample.meta


@FIXED
@given(SEED, st.integers(0, 39), st.integers(0, 40), st.booleans())
def test_batches(seed, first, count, fullname):
    task = capo(fullname=fullname)
    count = min(count, 40 - first)
    ids, roles = task.test_batch(seed, first, count)
    assert ids.dtype == np.int32
    assert roles.dtype == np.int8
    assert ids.shape == roles.shape
    assert len(ids) == count
    lengths = (roles >= 0).sum(1)
    assert lengths.max(initial=0) == ids.shape[1]
    for r in range(count):
        sample = task.sample("test", seed, first + r)
        who, n = person(seed, first + r, task.text.pools), len(sample.tokens)
        assert lengths[r] == n
        np.testing.assert_array_equal(ids[r, :n], sample.tokens)
        assert (roles[r, n:] == -1).all()
        assert not ids[r, n:].any()

        name = task.vocab.encode(f" {who.name}")
        pronoun = task.vocab.encode(f" {who.pronoun}")
        expected = np.zeros(n)
        expected[1 : 1 + len(name)] = 1
        if not fullname:
            second = sorted(query.question_start for query in sample.queries)[1]
            expected[second : second + len(pronoun)] = 2
        for query in sample.queries:
            expected[query.start : query.stop] = 3
        np.testing.assert_array_equal(roles[r, :n], expected)


def test_questions_are_held_out():
    """Training has questions about people 0 … 19 of 41, and the test about the 21 others."""
    task = capo(N=41, questions=True)
    windows = task.windows("train", 2, 0, task.training_windows(2, 100), seq_len=100)
    stream = windows.input_ids[windows.labels != -100]
    asked_in_training, reported = set(), set()
    for tokens in np.split(stream, np.flatnonzero(stream == 0)[1:]):
        facts = task.read(tokens).meta
        (asked_in_training if "question" in facts else reported).add(facts["name"])
    ids, roles = task.question_batch(2, 0, 6 * 21)
    asked_in_test = []
    for r, (row, of) in enumerate(zip(ids, roles, strict=True)):
        sample = task.read(row[of >= 0])
        (query,) = sample.queries
        facts, attribute = sample.meta, ATTRIBUTES[r % 6]
        who = person(2, 20 + r // 6, task.text.pools)
        assert query.slice == {"question": attribute}
        assert (facts["name"], facts["answer"]) == (who.name, who.values[attribute])
        assert np.flatnonzero(of == 3).tolist() == list(range(query.start, query.stop))
        assert task.vocab.text(row[of == 1].tolist()) == who.name
        np.testing.assert_array_equal(task.question(2, 20 + r // 6, attribute).tokens, sample.tokens)
        asked_in_test.append((facts["name"], attribute))
    assert len(set(asked_in_test)) == 6 * 21
    names = {person(2, i, task.text.pools).name for i in range(41)}
    assert reported == names
    assert len(asked_in_training) == 20
    assert asked_in_training | {name for name, _ in asked_in_test} == names
    assert asked_in_training.isdisjoint(name for name, _ in asked_in_test)
    np.testing.assert_array_equal(task.question_batch(2, 6 * 21, 3)[0], task.question_batch(2, 0, 3)[0])
    assert [list(slice) for slice in task.slices()] == [["attribute"]] * 6 + [["question"]] * 6


def test_questions_must_be_enabled():
    with refused("capo.questions: expected true, for a training that has questions, got False"):
        capo().question_batch(0, 0, 1)
    with pytest.raises(ValueError, match='unknown attribute "job"'):
        capo().question(0, 0, "job")
    assert capo().slices() == [{"attribute": attribute} for attribute in ATTRIBUTES]


@FIXED
@given(SEED, st.integers(0, 130), st.integers(1, 200), st.booleans(), st.sampled_from(["answer", "all"]))
def test_labels_and_instances(seed, w, seq_len, questions, loss_on):
    """The windows' labels are those of the documents in them, including those of cut documents."""
    task = capo(questions=questions)
    start = max(0, w - 200 // seq_len)
    rows = task.windows("train", seed, start, w - start + 200 // seq_len + 2, seq_len=seq_len, loss_on=loss_on)
    real = task.windows("train", seed, start, len(rows.labels), seq_len=seq_len).labels.reshape(-1) != -100
    ids, labels = rows.input_ids.reshape(-1), rows.labels.reshape(-1)
    bounds = [i for i in range(len(ids)) if ids[i] == 0 and (real[i] or real[i - 1])]  # documents, then padding
    full = {}
    for begin, end in pairwise(bounds):
        if real[begin]:
            sample = task.read(ids[begin:end], loss_on=loss_on)
            np.testing.assert_array_equal(labels[begin:end], sample.labels)
            if begin // seq_len == (end - 1) // seq_len == w - start:
                full[begin % seq_len] = sample.tokens.tolist()
    placed = task.instances("train", seed, w, seq_len)
    assert {at: sample.tokens.tolist() for at, _, sample in placed} == full
    assert all(stop - at == len(sample.tokens) for at, stop, sample in placed)


def test_grading():
    task = capo(questions=True)
    sample = task.sample("test", 0, 7)
    wrong = sample.tokens.copy()
    query = next(query for query in sample.queries if query.slice == {"attribute": "company"})
    wrong[query.stop - 1] = 1
    (verdict,) = [verdict for verdict in task.grade(sample, wrong) if not verdict.correct]
    assert verdict.slice == {"attribute": "company"}
    assert verdict.why.startswith(f"expected '{sample.meta['company']}', got '")
    questions = task.question(0, 3, "field")
    assert [v.correct for v in task.grade(questions, questions.tokens)] == [True]


def test_invalid_documents():
    task = capo()
    tokens = task.sample("test", 0, 0).tokens.tolist()
    answer = sorted(task.read(tokens).queries, key=lambda query: query.start)
    last, fourth = answer[5], answer[3]
    for position, expected, wrong in (
        (0, "<bos>", tokens[1:]),
        (1, "a biography", tokens[:1]),
        (last.question_start, "a biography of six sentences", tokens[:-1]),  # read up to the last sentence
        (len(tokens), "a biography of six sentences", [*tokens, tokens[1]]),
        (fourth.question_start, "", [*tokens[: fourth.start], 0, *tokens[fourth.start + 1 :]]),
    ):
        with refused(f"position {position}: expected {expected}..."):
            task.read(wrong)
    with refused("...the original release has no token ids for this task..."):
        task.to_original(task.sample("test", 0, 0))


def test_a_company_is_in_its_city():
    """With two people's company sentences exchanged, every sentence is valid, but no such person can exist."""
    task = capo(permute=False)
    a, b = (task.sample("test", 0, i) for i in (1, 3))
    assert a.meta["company city"] != b.meta["company city"]
    mixed = [*a.tokens[: a.queries[5].question_start], *b.tokens[b.queries[5].question_start :]]
    with pytest.raises(ValueError, match=f"position {len(mixed)}: expected a biography"):
        task.read(mixed)


def test_chance_is_the_likeliest_value_that_fits_the_text_before():
    task = capo()
    cities = task.text.pools.company_city
    expected = {"birth date": 1 / 67_200, "birth city": 1 / 200, "university": 1 / 300, "field": 1 / 100}
    likeliest = {"company": 1 / 263, "company city": max(map(cities.count, cities)) / 263}
    expected |= {"company": (len({*cities}) / 263 + 1 / 263) / 2, "company city": (1 + likeliest["company city"]) / 2}
    assert {attribute: task.chance({"attribute": attribute}) for attribute in ATTRIBUTES} == pytest.approx(expected)
    for kind, value in likeliest.items():
        assert task.chance({"question": kind}) == pytest.approx(value)
    in_order = capo(permute=False)
    assert in_order.chance({"attribute": "company city"}) == pytest.approx(likeliest["company city"])
    assert in_order.chance({"attribute": "company"}) == len({*cities}) / 263


def test_tokens_that_never_occur_change_only_the_models_size():
    """One embedding table for input and output has 987 more rows of 128."""
    plain, padded = capo(questions=True), capo(questions=True, vocab_size=3275)
    assert (len(plain.vocab), len(padded.vocab)) == (2288, 3275)
    for split in ("train", "test"):
        for ours, theirs in zip(*(t.windows(split, 1, 0, 30, seq_len=128) for t in (plain, padded)), strict=True):
            np.testing.assert_array_equal(ours, theirs)
            assert ours.max() < 2288
    np.testing.assert_array_equal(padded.test_batch(1, 0, 40)[0], plain.test_batch(1, 0, 40)[0])
    assert padded.bits(3.0, 20.0) == plain.bits(3.0, 20.0)
    fields = {"tie_word_embeddings": True}
    small, large = (build("llama", Sizes(1, 128, 2, len(t.vocab), 128, fields), 0) for t in (plain, padded))
    assert (small.num_parameters, large.num_parameters) == (489_728, 489_728 + 987 * 128)
    text = plain.vocab.show(plain.sample("train", 0, 0))
    assert padded.vocab.text([*plain.sample("train", 0, 0).tokens, 2288, 3274]) == f"{text} <unused 0> <unused 986>"


def test_indices_beyond_the_last_person():
    """Samples continue with the next pass over the people; a test batch has each person at most once."""
    task = capo()
    assert task.sample("train", 0, 40 + 3).tokens.tolist() == task.sample("train", 0, 3, 1).tokens.tolist()
    texts = {tuple(task.sample("train", 0, i).tokens) for i in range(200)}
    assert len(texts) == 200
    with pytest.raises(ValueError, match=r"^count: expected at most 1 people from number 39 on, got 2$"):
        task.test_batch(0, 39, 2)


def test_user_provided_pools(tmp_path):
    write_pools(tmp_path, "Ann\r\nBo\r\n", company="Café Olé; B\r\nC; D\r\n")
    task = tasks.get("capo", N=8, pools=str(tmp_path))
    with refused("capo.N: expected at most 8 people (the pools have 2 x 2 x 2 names), got 40"):
        tasks.get("capo", N=40, pools=str(tmp_path))
    assert {task.sample("test", 0, i).meta["name"] for i in range(8)} == {
        f"{a} {b} {c}" for a in ("Ann", "Bo") for b in ("Ann", "Bo") for c in ("Ann", "Bo")
    }
    assert {task.sample("test", 0, i).meta["company"] for i in range(8)} == {"Café Olé", "C"}
