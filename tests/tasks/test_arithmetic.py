"""Arithmetic: Python's own evaluator and the distribution."""

import itertools
from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from canonlm import tasks

SETTINGS = st.fixed_dictionaries(
    {
        "modulus": st.integers(2, 20),
        "ops": st.lists(st.sampled_from("+-*"), min_size=1, max_size=3, unique=True).map("".join),
        "brackets": st.booleans(),
        "N": st.integers(3, 60),
    }
)


@given(SETTINGS, st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_the_answer_is_what_python_computes(settings, split, seed):
    task = tasks.get("arithmetic", **settings)
    sample = task.sample(split, seed, 0)
    bos, *formula, equals, answer = task.vocab.show(sample).split()
    assert (bos, equals, len(formula)) == ("bos", "=", sample.meta["n"])
    assert int(answer) == eval(" ".join(formula)) % settings["modulus"]
    assert {*formula} - {*"()-"} <= {*settings["ops"], *map(str, range(settings["modulus"]))}
    assert settings["brackets"] or (len(formula) % 2 and not {*formula} & {*"()"})
    assert 3 <= len(formula) <= settings["N"]
    assert split != "test" or {"n": len(formula)} in task.slices()
    where = len(formula) + 2
    assert [(q.start, q.stop, q.slice) for q in sample.queries] == [(where, where + 1, {"n": len(formula)})]
    assert np.flatnonzero(sample.labels != -100).tolist() == [where]
    assert task.read(sample.tokens).meta == sample.meta


@cache
def formulas(n, modulus, ops):
    """{formula with brackets: probability}, by the definition."""
    digits = range(modulus)
    if n < 5:
        return {["", "{}", "-{}", "({})", "(-{})"][n].format(d): 1 / modulus for d in digits}
    out = Counter()
    for left in range(1, n - 3):
        rest = itertools.product(
            formulas(left, modulus, ops).items(), ops, formulas(n - 3 - left, modulus, ops).items()
        )
        for (a, p), op, (b, q) in rest:
            out[f"({a}{op}{b})"] += p * q / len(ops) / (n - 4)
    return out


def plain(n, modulus, ops):
    digits, parts = [*map(str, range(modulus))], [ops] * n
    parts[::2] = [digits] * len(parts[::2])
    every = ["".join(each) for each in itertools.product(*parts)]
    return dict.fromkeys(every, 1 / len(every))


@pytest.mark.parametrize("brackets", [False, True])
def test_formulas_have_the_stated_probabilities(documents, fits, brackets):
    task = tasks.get("arithmetic", modulus=2, ops="-*", brackets=brackets, N=9, test_lengths=[7])
    every = formulas(7, 2, "-*") if brackets else plain(7, 2, "-*")
    counts = Counter("".join(map(task.vocab.name, doc[1:-2])) for doc in documents(task, "test", 8000))
    assert {*counts} <= {*every}
    fits([counts[each] for each in every], [*every.values()])
    lengths = Counter(len(doc) - 3 for doc in documents(task, "train", 3000))
    assert {*lengths} == {*range(3, 10, 1 if brackets else 2)}
    fits(lengths.values())


@pytest.mark.parametrize("brackets", [False, True])
@pytest.mark.parametrize(("modulus", "ops"), [(2, "-*"), (3, "*"), (3, "+")])
def test_chance_is_the_share_of_the_likeliest_value(brackets, modulus, ops):
    task = tasks.get("arithmetic", modulus=modulus, ops=ops, brackets=brackets)
    for n in (3, 5, 7):
        shares = Counter()
        for formula, share in (formulas(n, modulus, ops) if brackets else plain(n, modulus, ops)).items():
            shares[eval(formula) % modulus] += share
        np.testing.assert_allclose(task.value_distribution(n), [shares[i] for i in range(modulus)], atol=1e-12)
        assert task.chance({"n": n}) == pytest.approx(max(shares.values()))


def test_test_lengths_may_be_multiples_of_the_longest_formula_of_training():
    task = tasks.get("arithmetic", N=42, test_lengths=["x2", "x1", "x1.25", 9])
    assert task.slices() == [{"n": 9}, {"n": 41}, {"n": 51}, {"n": 81}]
    assert tasks.get("arithmetic", N=42, brackets=True, test_lengths=["x1.25"]).slices() == [{"n": 52}]
