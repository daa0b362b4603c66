"""Capo's people: person i is a pure function of (seed, i), so millions of them need no table.

The full name is entry `name_index(seed, i, sizes)` of all combinations of first, middle and last names: a keyed
permutation, so no two people share a name. All else is uniform and independent, drawn from a stream keyed (seed, i). As
in the original release, the pronoun follows the parity of i, not the name: "He" for even i, "She" for odd.

`sizes` is `Pools.sizes` throughout. The functions under @njit return indexes (into MONTHS, DAYS, YEARS and the pools)
and check nothing: i must be below `name_space(sizes)`, as `check_people` verifies.
"""

import math
from dataclasses import dataclass

import numpy as np

from canonlm.core.errors import expected
from canonlm.core.numba_cache import njit
from canonlm.tasks.capo.pools import ATTRIBUTES, DAYS, MONTHS, YEARS, Pools, Sizes
from canonlm.tasks.random import below, check_count, mix, stream, two_below

PRONOUNS = ("He", "She")  # of person i: PRONOUNS[i % 2]

PEOPLE = 100  # takes the place of a split in the key of a stream: people share no stream with samples

_U = np.uint64
_S32 = _U(32)
_ROUNDS = 16  # enough for all orders of 5 or 6 names to be equally likely; 8 suffice for millions
_DATES = len(MONTHS), len(DAYS), len(YEARS)
_MONTHS, _DAYS, _YEARS = _DATES


@dataclass(frozen=True)
class Person:
    """One person in words. `birth_date` is "Month D, YYYY"; `company_city` is the city of the company."""

    index: int
    first: str
    middle: str
    last: str
    pronoun: str
    birth_date: str
    birth_city: str
    university: str
    field: str
    company_city: str
    company: str

    @property
    def name(self) -> str:
        return f"{self.first} {self.middle} {self.last}"

    @property
    def values(self) -> dict[str, str]:
        """attribute -> value, in the order of ATTRIBUTES."""
        return {attribute: getattr(self, attribute.replace(" ", "_")) for attribute in ATTRIBUTES}


def person(seed: int, i: int, pools: Pools) -> Person:
    """Person i of the population `seed`. ValueError if the pools have fewer than i + 1 different names."""
    sizes = pools.sizes
    check_people("person", check_count("person", i) + 1, sizes)
    first, middle, last = name(check_count("seed", seed), i, sizes)
    month, day, year, city, university, field, company = attributes(seed, i, sizes)
    return Person(
        i, pools.first[first], pools.middle[middle], pools.last[last], PRONOUNS[i % 2],
        f"{MONTHS[month]} {DAYS[day]}, {YEARS[year]}", pools.city[city], pools.university[university],
        pools.field[field], pools.company_city[company], pools.company[company],
    )  # fmt: skip


def name_space(sizes: Sizes) -> int:
    """The number of different full names, which is the max number of people."""
    return math.prod(sizes[:3])


def check_people(key: str, count: int, sizes: Sizes) -> int:
    """Return `count` if the pools have a name for each of that many people; else raise ValueError."""
    if count > name_space(sizes):
        names = " x ".join(map(str, sizes[:3]))
        raise expected(key, f"at most {name_space(sizes)} people (the pools have {names} names)", count)
    return count


@njit(cache=True)
def name(seed, i, sizes):
    """(first, middle, last) of person i: three indexes."""
    index = name_index(seed, i, sizes)
    return index // (sizes[2] * sizes[1]), index // sizes[2] % sizes[1], index % sizes[2]


@njit(cache=True)
def name_index(seed, i, sizes):
    """A keyed permutation of 0 … n - 1, for n = sizes[0] * sizes[1] * sizes[2] < 2**62.

    A Feistel network on pairs (left, right) with left < a, right < b and a * b just above n (Black and Rogaway 2002,
    "Ciphers with arbitrary finite domains"). Each round adds a hash of one half to the other, modulo its size, which is
    invertible. A result of n or more goes through the network again until it is below n.
    """
    n = sizes[0] * sizes[1] * sizes[2]
    a = np.int64(math.ceil(math.sqrt(n)))
    b = (n + a - 1) // a
    key, gamma = stream(seed, PEOPLE, 0, 1)
    index = i
    while True:
        left, right = index // b, index % b
        state = key
        for _ in range(_ROUNDS // 2):
            state = state + gamma
            left += _hashed(state, right, a)
            left -= a if left >= a else 0
            state = state + gamma
            right += _hashed(state, left, b)
            right -= b if right >= b else 0
        index = left * b + right
        if index < n:
            return index


@njit(cache=True)
def _hashed(state, x, n):
    """A hash of x in 0 … n - 1."""
    return np.int64(((mix(state ^ _U(x)) >> _S32) * _U(n)) >> _S32)


@njit(cache=True)
def attributes(seed, i, sizes):
    """(month, day, year, city, university, field, company) of person i: indexes, uniform and independent."""
    state, gamma = stream(seed, PEOPLE, i, 0)
    state, date = below(state, gamma, _MONTHS * _DAYS * _YEARS)
    state, city, university = two_below(state, gamma, sizes[3], sizes[4])
    state, field, company = two_below(state, gamma, sizes[5], sizes[6])
    return date // (_DAYS * _YEARS), date // _YEARS % _DAYS, date % _YEARS, city, university, field, company
