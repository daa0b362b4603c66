"""Capo's people: no two share a name, everything else is uniform and independent, and nothing needs a table."""

from calendar import month_name
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit
from refusals import refused

from canonlm.tasks.capo.people import (
    PEOPLE,
    attributes,
    check_people,
    name,
    name_index,
    name_space,
    person,
)
from canonlm.tasks.capo.pools import load
from canonlm.tasks.random import SPLITS

OURS = (400, 400, 1000, 200, 300, 100, 263)


@njit
def name_indexes(seed, start, count, sizes):
    out = np.empty(count, np.int64)
    for i in range(count):
        out[i] = name_index(seed, start + i, sizes)
    return out


@njit
def all_attributes(seed, start, count, sizes):
    out = np.empty((count, 7), np.int64)
    for i in range(count):
        out[i] = attributes(seed, start + i, sizes)
    return out


# -- names ------------------------------------------------------------------------------------------------------------


@given(st.tuples(*[st.integers(1, 13)] * 3).filter(lambda sizes: np.prod(sizes) <= 1000), st.integers(0, 2**63 - 1))
def test_names_are_a_permutation_of_all_names(parts, seed):
    count = int(np.prod(parts))
    indexes = name_indexes(seed, 0, count, (*parts, 1, 1, 1, 1))
    assert sorted(indexes.tolist()) == list(range(count))


def test_every_size_up_to_300_is_permuted():
    for n in range(1, 301):
        assert np.bincount(name_indexes(3, 0, n, (1, 1, n, 1, 1, 1, 1))).tolist() == [1] * n


@pytest.mark.slow
def test_a_million_people_of_our_pools_have_a_million_names(fits):
    near = name_indexes(0, 0, 1_000_000, OURS)
    far = name_indexes(0, 159_000_000, 1_000_000, OURS)
    both = np.concatenate([near, far])
    assert both.min() >= 0
    assert both.max() < 160_000_000
    assert len(np.unique(both)) == 2_000_000
    # Names are spread over the pools as if drawn at random: every part, and pairs of neighbours.
    for indexes in (near, far):
        fits(np.bincount(indexes // 400_000, minlength=400))
        fits(np.bincount(indexes // 1000 % 400, minlength=400))
        fits(np.bincount(indexes % 1000, minlength=1000))
        first = indexes // 400_000 // 20  # 20 groups of 20 names
        fits(np.bincount(first[:-1] * 20 + first[1:], minlength=400))
        last = indexes % 1000 // 50
        fits(np.bincount(last[:-1] * 20 + last[1:], minlength=400))
        fits(np.bincount(first * 20 + last, minlength=400))


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_every_permutation_is_equally_likely_over_seeds(n, fits):
    """A network of too few rounds, or with one key for all of them, reaches some permutations far more often."""
    permutations = [tuple(name_indexes(seed, 0, n, (1, 1, n, 1, 1, 1, 1)).tolist()) for seed in range(20_000)]
    kinds, counts = np.unique(permutations, axis=0, return_counts=True)
    assert len(kinds) == np.prod(range(1, n + 1))
    fits(counts)


def test_the_parts_of_a_name_are_the_digits_of_its_index():
    for i in (0, 1, 777, 159_999_999):
        first, middle, last = name(5, i, OURS)
        assert (first * 400 + middle) * 1000 + last == name_index(5, i, OURS)
        assert first < 400
        assert middle < 400
        assert last < 1000


# -- attributes -------------------------------------------------------------------------------------------------------


def test_attributes_are_uniform_and_independent_of_each_other_and_of_the_neighbour(fits):
    n = 400_000
    sizes = (12, 28, 200, *OURS[3:])
    drawn = all_attributes(7, 0, n, OURS)
    groups = []  # each attribute in about 20 groups of nearly equal size, and their sizes
    for column, size in zip(drawn.T, sizes, strict=True):
        fits(np.bincount(column, minlength=size))
        parts = min(size, 20)
        groups.append((column * parts // size, np.bincount(np.arange(size) * parts // size) / size))
    name_group = name_indexes(7, 0, n, OURS) // 8_000_000, np.full(20, 1 / 20)
    for a, (x, distribution) in enumerate(groups):
        for y, other_law in [*groups[:a], name_group, (np.roll(x, 1), distribution), (np.roll(x, 2), distribution)]:
            joint = np.outer(distribution, other_law)
            fits(np.bincount(x * len(other_law) + y, minlength=joint.size), joint.ravel())


def test_people_and_samples_use_different_streams():
    assert PEOPLE not in SPLITS.values()


def test_a_person_depends_on_seed_and_number_only():
    at_once = all_attributes(11, 40, 5, OURS)
    alone = [attributes(11, 40 + k, OURS) for k in range(5)]
    assert at_once.tolist() == [list(values) for values in alone]
    assert attributes(11, 40, OURS) != attributes(12, 40, OURS)


# -- in words ---------------------------------------------------------------------------------------------------------


def test_attributes_of_a_person_match_its_indices():
    pools = load()
    for i in (0, 1, 2, 12_345, 159_999_999):
        somebody = person(3, i, pools)
        month, day, year, city, university, field, company = attributes(3, i, pools.sizes)
        first, middle, last = name(3, i, pools.sizes)
        assert somebody.name == f"{pools.first[first]} {pools.middle[middle]} {pools.last[last]}"
        assert somebody.values == {
            "birth date": f"{month_name[month + 1]} {day + 1}, {year + 1900}",
            "birth city": pools.city[city],
            "university": pools.university[university],
            "field": pools.field[field],
            "company city": pools.company_city[company],
            "company": pools.company[company],
        }
        assert somebody.pronoun == ("He" if i % 2 == 0 else "She")


def test_more_people_than_names_is_one_clear_line():
    small = replace(load(), first=("Ann", "Bea"), middle=("Cy",), last=("Dee", "Eve", "Fox"))
    assert name_space(small.sizes) == check_people("capo.people", 6, small.sizes) == 6
    assert len({person(0, i, small).name for i in range(6)}) == 6
    with refused("person: expected at most 6 people (the pools have 2 x 1 x 3 names), got 7"):
        person(0, 6, small)
    with pytest.raises(ValueError, match=r"^capo.people: expected at most 6 people .*, got 7$"):
        check_people("capo.people", 7, small.sizes)
    with pytest.raises(ValueError, match=r"^person: expected an integer from 0 to"):
        person(0, -1, small)
    with pytest.raises(ValueError, match=r"^seed: expected an integer from 0 to"):
        person(-1, 0, small)
