"""State: groups against sympy, words by an independent reader, and distributions."""

import itertools
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sympy.combinatorics import Permutation, PermutationGroup
from sympy.combinatorics.named_groups import AlternatingGroup, CyclicGroup, DihedralGroup, SymmetricGroup

from canonlm import tasks
from canonlm.tasks.groups import RANGES, group

NAMED = {"Z": CyclicGroup, "D": DihedralGroup, "S": SymmetricGroup, "A": AlternatingGroup}
NAMES = ["Z2", "Z3", "Z7", "Z60", "D3", "D4", "D30", "S3", "S4", "S5", "A4", "A5"]
PRODUCTS = ["Z2xZ2", "A5xZ2", "A4xZ5", "S3xS3", "Z2xD4xZ3"]
LARGE = [pytest.param(name, marks=pytest.mark.slow) for name in ("S6", "A6")]
PAGE = Path(__file__).parents[2] / "docs" / "tasks" / "state.md"


def of_sympy(name):
    """The group from sympy; a product acts on disjoint points."""
    generators, offset = [], 0
    for part in name.split("x"):
        factor = NAMED[part[0]](int(part[1:]))
        generators = [[*g, *range(offset, offset + factor.degree)] for g in generators]
        generators += [[*range(offset), *(offset + p for p in g.array_form)] for g in factor.generators]
        offset += factor.degree
    return PermutationGroup(*map(Permutation, generators))


@pytest.mark.parametrize("name", [*NAMES, *PRODUCTS, *LARGE])
def test_elements_and_products_are_those_of_sympy(name):
    ours, theirs = group(name), of_sympy(name)
    permutations = [tuple(row) for row in ours.permutations.tolist()]
    assert ours.order == theirs.order() == len({*permutations})
    assert {*permutations} == {tuple(element.array_form) for element in theirs.elements}
    assert permutations[0] == tuple(range(theirs.degree))
    rng = np.random.default_rng(0)
    for a, b in rng.integers(0, ours.order, (200, 2)).tolist():
        product = Permutation(permutations[a]) * Permutation(permutations[b])  # sympy, too, applies the first one first
        assert permutations[ours.table[a, b]] == tuple(product.array_form)
    for row in (*ours.table, *ours.table.T):
        assert sorted(row) == [*range(ours.order)]
    assert PermutationGroup(*(Permutation(permutations[g]) for g in ours.generators)).order() == ours.order


def test_cycles_are_written_as_by_sympy():
    for name in ("S4", "A5xZ2"):
        for element, permutation in enumerate(group(name).permutations.tolist()):
            cycles = Permutation(permutation).cyclic_form
            assert group(name).cycles(element) == (
                "".join(f"({' '.join(str(p + 1) for p in c)})" for c in cycles) or "()"
            )


def test_every_name_is_a_group():
    for letter, (low, high) in RANGES.items():
        for n in {low, (low + high) // 2, high} - ({6} if letter in "AS" else set()):
            assert group(f"{letter}{n}").order == NAMED[letter](n).order()


def test_the_page_says_which_groups_are_solvable():
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| (yes|no) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert {"Z2", "Z60", "D4", "S3", "A4", "S4", "A5", "S5", "A5xZ2", "A4xZ5"} <= {name for name, _, _ in rows}
    for name, order, solvable in rows:
        theirs = of_sympy(name)
        assert (order, solvable) == (f"{theirs.order():,}", "yes" if theirs.is_solvable else "no")


SETTINGS = st.fixed_dictionaries(
    {
        "group": st.sampled_from(["Z2", "Z5", "D4", "S3", "A4", "A5", "A5xZ2"]),
        "inputs": st.sampled_from(["all", "generators"]),
        "answers": st.sampled_from(["end", "every"]),
        "N": st.integers(1, 40),
        "test_lengths": st.none() | st.lists(st.integers(1, 60), min_size=1, max_size=4, unique=True),
    }
)


def walk(task, names):
    """The names of the elements that are the products after each of these, by moving points."""
    by_name = dict(zip(task.vocab.names[2:], map(tuple, task.group.permutations.tolist()), strict=True))
    by_place = {place: name for name, place in by_name.items()}
    at, products = tuple(range(task.group.permutations.shape[1])), []
    for name in names:
        at = tuple(by_name[name][point] for point in at)
        products.append(by_place[at])
    return products


@given(SETTINGS, st.sampled_from(["train", "valid", "test"]), st.integers(0, 2**40))
def test_every_sample_is_its_product(settings, split, seed):
    task = tasks.get("state", **settings)
    sample = task.sample(split, seed, 0)
    bos, *rest = task.vocab.show(sample).split()
    every = settings["answers"] == "every"
    n = len(rest) - (1 if every else 2)
    word, products, test = rest[:n], walk(task, rest[:n]), split == "test"
    assert (bos, rest[n]) == ("bos", "ans")
    assert {*word} <= {task.vocab.names[2 + i] for i in task.inputs}
    assert len(sample.tokens) <= task.max_len
    assert task.read(sample.tokens).meta == sample.meta
    targets = {int(at): task.vocab.names[sample.labels[at]] for at in np.flatnonzero(sample.labels != -100)}
    if every:
        assert n == max(task.test_lengths) if test else 1 <= n <= settings["N"]
        assert targets == dict(enumerate(products, 2))
        assert [q.slice["n"] for q in sample.queries] == [i for i in task.test_lengths if i <= n]
        assert all((q.start, q.stop) == (q.slice["n"] + 1, q.slice["n"] + 2) for q in sample.queries)
    else:
        assert {"n": n} in task.slices() if test else 1 <= n <= settings["N"]
        assert rest[n + 1] == products[-1]
        assert targets == {n + 2: products[-1]}
        assert [(q.start, q.stop, q.slice) for q in sample.queries] == [(n + 2, n + 3, {"n": n})]
    for query in sample.queries:
        answer = products[query.slice["n"] - 1]
        assert task.explain(sample, query).startswith(f"the product of {query.slice['n']} element")
        assert f" is {answer} = " in task.explain(sample, query)


@given(SETTINGS, st.integers(0, 2**40), st.data())
def test_the_grader_knows_the_product(settings, seed, data):
    task = tasks.get("state", **settings)
    sample = task.sample("test", seed, 0)
    assert all(verdict.correct for verdict in task.grade(sample, sample.labels))
    query = data.draw(st.sampled_from(sample.queries))
    right = int(sample.labels[query.start])
    wrong = data.draw(st.integers(0, len(task.vocab) - 1).filter(lambda token: token != right))
    output = sample.labels.copy()
    output[query.start] = wrong
    for each, verdict in zip(sample.queries, task.grade(sample, output), strict=True):
        assert verdict.correct == (each != query)
    name = task.vocab.name
    assert (
        task.grade(sample, output)[sample.queries.index(query)].why == f"expected '{name(right)}', got '{name(wrong)}'"
    )


@pytest.mark.parametrize("inputs", ["all", "generators"])
def test_all_words_of_a_length_are_equally_likely(documents, fits, inputs):
    task = tasks.get("state", group="S3", inputs=inputs, N=3)
    counts = Counter(tuple(doc[1:-2]) for doc in documents(task, "train", 20_000))
    words = [word for n in range(1, 4) for word in itertools.product(task.inputs, repeat=n)]
    shares = [1 / 3 / len(task.inputs) ** len(word) for word in words]
    fits([counts[tuple(2 + i for i in word)] for word in words], shares)


def test_products_of_random_words_are_uniform(documents, fits):
    docs = documents(tasks.get("state", group="A4", test_lengths=[7]), "test", 3000)
    fits(np.bincount([doc[-1] - 2 for doc in docs], minlength=12))
    pairs = Counter((doc[-3], doc[-1]) for doc in docs)  # the last element says nothing about the product
    fits([pairs[a, b] for a in range(2, 14) for b in range(2, 14)])


@pytest.mark.parametrize("name", ["Z5", "S3", "A4"])
def test_chance_is_the_share_of_the_likeliest_product(name):
    task = tasks.get("state", group=name, inputs="generators", test_lengths=[1, 2, 5])
    for n in (1, 2, 5):
        ends = Counter()
        for word in itertools.product(task.inputs, repeat=n):
            product = 0
            for element in word:
                product = task.group.table[product, element]
            ends[int(product)] += 1
        assert task.chance({"n": n}) == pytest.approx(max(ends.values()) / ends.total())
    assert tasks.get("state", group=name).chance({"n": 9}) == 1 / group(name).order


def test_one_answer_at_every_position():
    task = tasks.get("state", group="Z3", answers="every", N=4, test_lengths=[2, 6])
    sample = task.read([0, 3, 3, 4, 1])
    assert [task.vocab.name(token) for token in sample.labels[2:]] == ["g1", "g2", "g1"]
    assert sample.meta == {"n": 3, "products": [1, 2, 1], "queries": sample.queries}
    assert task.show(sample) == [
        ("bos", "marker"),
        ("g1", "context"),
        ("g1", "context"),
        ("g2", "context"),
        ("ans", "marker"),
    ]
    assert (task.slices(), task.max_len) == ([{"n": 2}, {"n": 6}], 8)
    with pytest.raises(ValueError, match=r'^loss_on: expected "answer" with state\.answers=every, got "all"$'):
        task.windows("train", 0, 0, 1, seq_len=9, loss_on="all")
