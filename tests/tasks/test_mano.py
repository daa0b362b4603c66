"""Mano: the released format by an independent reader (in original ids), and every distribution of the sampler."""

from collections import Counter
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks


def evaluate(ids, at, modulus):
    """(value or None, operators, end, splits) of the expression at ids[at]; splits: (operators, in the left part)."""
    if ids[at] >= 5000:
        return ids[at] - 5000, 0, at + 1, []
    left, in_left, middle, splits_left = evaluate(ids, at + 1, modulus)
    right, in_right, end, splits_right = evaluate(ids, middle, modulus)
    total = in_left + in_right + 1
    splits = [(total, in_left), *splits_left, *splits_right]
    if left is None or right is None:
        return None, total, end, splits
    kind = (ids[at] - 1) % 4
    if kind == 3:
        quotients = [q for q in range(modulus) if q * right % modulus == left]
        unit = any(right * u % modulus == 1 for u in range(modulus))
        return (quotients[0] if unit else None), total, end, splits
    return (left + right, left - right, left * right)[kind] % modulus, total, end, splits


def parse(ids, modulus):
    """(l, (B, u, v), operator ids, value ids, splits, result)"""
    length, u = divmod(ids[1], 10)
    value, operators, end, splits = evaluate(ids, 2, modulus)
    assert operators == length
    assert end == len(ids) - 2
    assert ids[end] // 10 == length
    v = ids[end] % 10 - 4
    assert value == ids[-1] - 5000
    assert ids[0] in (9999, 9998)
    assert {u, v} <= {0, 1}
    body = ids[2:end]
    return length, (ids[0], u, v), [t for t in body if t < 5000], [t for t in body if t >= 5000], splits, value


def parsed(task, docs):
    return [parse(task.original_ids[doc].tolist(), task.spec.modulus) for doc in docs]


@st.composite
def specs(draw):
    ops = draw(st.lists(st.sampled_from("asmd"), min_size=1, max_size=4, unique=True))
    modulus = draw(st.sampled_from([5, 7, 23, 31]) if "d" in ops else st.integers(2, 60))
    return {"L": draw(st.integers(1, 8)), "ops": "".join(ops), "modulus": modulus, "synonyms": draw(st.booleans())}


@given(specs(), st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_parses_back(spec, split, seed):
    task = tasks.get("mano", **spec)
    sample = task.sample(split, seed, 0)
    original = task.to_original(sample)
    length, coins, operators, _, _, value = parse(original, spec["modulus"])
    assert length == spec["L"] if split == "test" else 1 <= length <= spec["L"]
    assert sample.meta["l"] == length
    assert sample.meta["value"] == value
    assert {"asmd"[(t - 1) % 4] for t in operators} <= set(spec["ops"])
    if not spec["synonyms"]:
        assert coins == (9999, 0, 0)
        assert max(operators) <= 4
    assert len(original) == 2 * length + 5
    (query,) = sample.queries
    assert (query.start, query.stop, query.slice) == (len(original) - 1, len(original), {"l": length})
    again = task.from_original(original)
    np.testing.assert_array_equal(again.tokens, sample.tokens)
    assert again.meta == sample.meta


def test_by_hand():
    """(3 * 5) - 20 = -5 = 18 mod 23, with the second forms of bos, minus and ans."""
    task = tasks.get("mano")
    ids = [9998, 20, 6, 3, 5003, 5005, 5020, 25, 5018]
    sample = task.from_original(ids)
    assert task.vocab.show(sample) == "bos' len2 -' * 3 5 20 ans2' 18"
    assert sample.meta["value"] == 18
    assert task.explain(sample, sample.queries[0]) == "(3 * 5) - 20 = 18 modulo 23"
    assert task.to_original(sample) == ids
    plain = tasks.get("mano", synonyms=False)
    assert plain.vocab.show(plain.from_original([9999, 10, 2, 5000, 5001, 14, 5022])) == "bos len1 - 0 1 ans1 22"
    divide = tasks.get("mano", ops="d", modulus=7, L=1)  # 3 / 5 = 3 * 3 = 2 mod 7
    sample = divide.from_original([9999, 10, 4, 5003, 5005, 14, 5002])
    assert sample.meta["value"] == 2
    assert divide.explain(sample, sample.queries[0]) == "3 / 5 = 2 modulo 7"


@pytest.mark.slow
def test_training_distributions(documents, fits):
    task = tasks.get("mano")
    samples = parsed(task, documents(task, "train", 20_000))
    fits(np.bincount([s[0] for s in samples])[1:])  # l uniform on 1..10
    coins = Counter(s[1] for s in samples)
    fits([coins[c] for c in product((9999, 9998), (0, 1), (0, 1))])  # three independent fair coins
    operators = Counter(t for s in samples for t in s[2])
    fits([operators[t] for t in (1, 2, 3, 5, 6, 7)])  # operator uniform, and a coin per occurrence
    values = Counter(t for s in samples for t in s[3])
    fits([values[5000 + x] for x in range(23)])
    splits = Counter(split for s in samples for split in s[4])
    for total in range(2, 11):
        fits([splits[total, left] for left in range(total)])
    lengths = [len(doc) for doc in documents(task, "train", 20_000)]
    assert np.mean(lengths) == pytest.approx(16, abs=4 * np.std(lengths) / np.sqrt(20_000))


def test_neighbouring_operators_are_independent(documents, fits):
    task = tasks.get("mano", L=3, synonyms=False)
    pairs = Counter(tuple(s[2][:2]) for s in parsed(task, documents(task, "test", 10_000)))
    fits([pairs[pair] for pair in product((1, 2, 3), repeat=2)])


@pytest.mark.parametrize(
    ("length", "p0"),  # the reference's exact recursion
    [
        (1, 0.05734089),
        (2, 0.06176086),
        (3, 0.06419699),
        (5, 0.06699774),
        (10, 0.07025848),
        (13, 0.07133266),
        (16, 0.07212401),
    ],
)
def test_answer_distribution_equals_the_reference(length, p0):
    distribution = tasks.get("mano").answer_distribution(length)
    assert distribution[0] == pytest.approx(p0, abs=1e-8)
    assert distribution[1:] == pytest.approx(np.full(22, (1 - p0) / 22), abs=1e-9)


@pytest.mark.parametrize(("ops", "modulus"), [("asm", 6), ("asmd", 5), ("d", 5), ("md", 9), ("ad", 4)])
def test_answer_distribution_by_enumeration(ops, modulus):
    """Every expression of two operators, with its exact probability; those that divide by a non-unit are redrawn."""
    ids = {"a": 1, "s": 2, "m": 3, "d": 4}
    mass = Counter()
    for first, second in product(ops, repeat=2):
        for x, y, z in product(range(modulus), repeat=3):
            values = [5000 + v for v in (x, y, z)]
            for body in ([ids[first], *values[:1], ids[second], *values[1:]], [ids[first], ids[second], *values]):
                value = evaluate(body, 0, modulus)[0]
                if value is not None:
                    mass[value] += Fraction(1, 2 * len(ops) ** 2 * modulus**3)
    distribution = tasks.get("mano", L=2, ops=ops, modulus=modulus).answer_distribution(2)
    assert distribution == pytest.approx([float(mass[v] / sum(mass.values())) for v in range(modulus)], abs=1e-12)


@pytest.mark.parametrize(
    "spec",
    [{"L": 1}, {"L": 10}, {"L": 16}, {"L": 4, "ops": "asmd", "modulus": 5}, {"L": 3, "ops": "md", "modulus": 9}],
    ids=str,
)
def test_answers_follow_the_distribution(spec, documents, fits):
    task = tasks.get("mano", **spec)
    answers = [doc[-1] - task.first_value for doc in documents(task, "test", 20_000)]
    distribution = task.answer_distribution(spec["L"])
    kept = distribution > 0
    counts = np.bincount(answers, minlength=task.spec.modulus)
    assert counts[~kept].sum() == 0
    fits(counts[kept], distribution[kept])
    assert task.chance({"l": spec["L"]}) == distribution.max()


def test_undefined_expressions_are_fully_redrawn(documents, fits):
    """One division modulo 5: the numerator stays uniform, the denominator is uniform over the units."""
    task = tasks.get("mano", L=1, ops="d", modulus=5, synonyms=False)
    pairs = Counter(tuple(s[3]) for s in parsed(task, documents(task, "test", 10_000)))
    fits([pairs[5000 + x, 5000 + y] for x in range(5) for y in range(1, 5)])
    assert sum(pairs[5000 + x, 5000] for x in range(5)) == 0


def test_vocabulary_mirrors_the_release():
    task = tasks.get("mano")
    endings = [10 * length + u for length in range(1, 11) for u in (0, 1, 4, 5)]
    assert sorted(task.original_ids) == sorted([1, 2, 3, 5, 6, 7, *endings, *range(5000, 5023), 9998, 9999])
    assert len(task.vocab) == len(task.original_ids)
    assert len(tasks.get("mano", synonyms=False).vocab) == 1 + 3 + 10 + 10 + 23


def test_several_test_lengths(documents, fits):
    task = tasks.get("mano", L=8, test_lengths=[8, 1, 3])
    assert task.slices() == [{"l": 1}, {"l": 3}, {"l": 8}]
    assert tasks.get("mano", L=8).slices() == [{"l": 8}]
    lengths = Counter((len(doc) - 5) // 2 for doc in documents(task, "test", 5000))
    assert set(lengths) == {1, 3, 8}
    fits([lengths[length] for length in (1, 3, 8)])
    assert {task.sample("valid", 0, i).meta["l"] for i in range(200)} == {*range(1, 9)}  # as in training
    assert task.chance({"l": 1}) == task.answer_distribution(1).max() < task.chance({"l": 3})


@given(specs(), st.integers(0, 2**40))
def test_the_explanation_is_true(spec, seed):
    """Python evaluates the formula, if it has no division."""
    spec["ops"] = spec["ops"].replace("d", "") or "asm"
    task = tasks.get("mano", **spec)
    sample = task.sample("train", seed, 0)
    formula, value = task.explain(sample, sample.queries[0]).split(" = ")
    assert value == f"{sample.meta['value']} modulo {task.spec.modulus}"
    assert eval(formula) % task.spec.modulus == sample.meta["value"]
    assert sum(formula.count(sign) for sign in "+-*") == sample.meta["l"]
