"""Capo's metric: how many bits about its people a model holds (bit complexity, Part 3.3; arXiv 2512.17351, App. A).

A name is one of N0 = first x middle x last names. Given the name, the values are one of
S0 = 2 x dates x cities x universities x fields x companies: the 2 is the pronoun, and the company city follows from the
company. A model that gives the true name the probability e^-p1 and the true values e^-p2 needs p1 / ln 2 further bits
for the name instead of log2 N0, and p2 / ln 2 for the values instead of log2 S0. It knows the rest.
"""

import math
from dataclasses import dataclass

from canonlm.tasks.capo.people import name_space
from canonlm.tasks.capo.pools import DAYS, MONTHS, YEARS, Sizes

DATES = len(MONTHS) * len(DAYS) * len(YEARS)


@dataclass(frozen=True)
class Bits:
    """Bits per person; `total` is their sum over all people."""

    names: float
    values: float
    at_most: float  # of a model that knows everything: log2(N0 / N) + log2 S0
    people: int

    @property
    def per_person(self) -> float:
        return self.names + self.values

    @property
    def total(self) -> float:
        return self.people * self.per_person

    def per_parameter(self, parameters: int) -> float:
        """R(F) = N [log2(N0 / e^p1) + log2(S0 / e^p2)] / P, for P parameters."""
        return self.total / parameters


def bits(name_nats: float, value_nats: float, people: int, sizes: Sizes, pronoun: bool = True) -> Bits:
    """The bits that a model holds about `people` (N) people, from two losses, both averaged over people.

    name_nats: p1, the summed cross-entropy (nats) of the tokens of a person's full name, the first of a biography.
    value_nats: p2, the same for the tokens of all values and of the first pronoun; with `pronoun=False` (variant
    fullname) there is no pronoun, and S0 has no factor 2. sizes: `Pools.sizes`.

    The loss on the company city belongs to p2, though S0 has no factor for it: company and city together are as likely
    as the company alone, in either order. Without this loss, a city before its company would give the company away
    for free, and a model that knows nobody would be credited with bits.

    Names and values each count at least 0, so an untrained model holds no negative bits. p1 is at least ln N if it is
    the mean over all N people (a distribution over names gives N of them e^-ln N at best, on average), and p2 is at
    least 0, so no model exceeds `at_most`. The mean over some of the people may, by chance.
    """
    all_names = math.log2(name_space(sizes))
    all_values = math.log2((2 if pronoun else 1) * DATES * math.prod(sizes[3:]))
    return Bits(
        names=max(0.0, all_names - name_nats / math.log(2)),
        values=max(0.0, all_values - value_nats / math.log(2)),
        at_most=all_names - math.log2(people) + all_values,
        people=people,
    )
