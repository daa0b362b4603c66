"""Capo's metric against models whose probabilities are known, and against its upper bound."""

import math
from collections import Counter

import numpy as np
import pytest
from capo_folders import write_pools

from canonlm import tasks
from canonlm.tasks.capo.bits import bits

SIZES = (400, 400, 1000, 200, 300, 100, 263)
LOG2_N0, LOG2_S0 = 27.2535, 47.5916  # of these sizes, as published


def test_the_published_constants():
    everything = bits(math.log(50_000), 0.0, 50_000, SIZES)
    assert everything.names == pytest.approx(LOG2_N0 - math.log2(50_000), abs=1e-4)
    assert everything.values == pytest.approx(LOG2_S0, abs=1e-4)
    assert everything.at_most == pytest.approx(everything.per_person, abs=1e-9)
    assert bits(0.0, 0.0, 1, SIZES, pronoun=False).values == pytest.approx(46.5916, abs=1e-4)


def test_the_formula():
    """Probabilities of 2**-10 for names and 2**-40 for values."""
    result = bits(10 * math.log(2), 40 * math.log(2), 2000, SIZES)
    exact_names, exact_values = math.log2(160_000_000) - 10, math.log2(2 * 12 * 28 * 200 * 200 * 300 * 100 * 263) - 40
    assert result.names == pytest.approx(exact_names, abs=1e-9)
    assert result.values == pytest.approx(exact_values, abs=1e-9)
    assert result.total == pytest.approx(2000 * (exact_names + exact_values), abs=1e-6)
    assert result.per_person == pytest.approx(exact_names + exact_values, abs=1e-9)
    assert result.per_parameter(12345) == pytest.approx(2000 * (exact_names + exact_values) / 12345, abs=1e-9)


def test_bits_are_never_negative():
    assert bits(1e4, 1e4, 2000, SIZES).total == 0
    assert bits(1e4, 0.0, 2000, SIZES).per_person == pytest.approx(LOG2_S0, abs=1e-4)  # each counts separately
    assert bits(math.log(2000), 1e4, 2000, SIZES).per_person == pytest.approx(LOG2_N0 - math.log2(2000), abs=1e-4)


def nats(task, probability):
    """(p1, p2) as an evaluation sums them; probability(ids, position, role): the model's for the true token."""
    ids, roles = task.test_batch(0, 0, task.spec.N)
    sums = np.zeros(4)
    for row, role_row in zip(ids.tolist(), roles.tolist(), strict=True):
        for at, role in enumerate(role_row):
            if role > 0:
                sums[role] -= math.log(probability(row, at, role))
    return sums[1] / task.spec.N, (sums[2] + sums[3]) / task.spec.N


@pytest.mark.parametrize("fullname", [False, True])
def test_a_perfect_model_holds_all_bits(fullname):
    """It gives names their true frequencies (given the tokens so far), and is certain of the rest."""
    task = tasks.get("capo", N=300, fullname=fullname)
    ids, roles = task.test_batch(0, 0, 300)
    names = [tuple(row[(of == 1)].tolist()) for row, of in zip(ids, roles, strict=True)]
    assert len(set(names)) == 300
    begins = Counter(name[:length] for name in names for length in range(len(name) + 1))
    assert all(begins[name] == 1 for name in names)  # no name begins another

    def probability(row, at, role):
        start = tuple(row[1:at])
        return begins[(*start, row[at])] / begins[start] if role == 1 else 1.0

    p1, p2 = nats(task, probability)
    assert p1 == pytest.approx(math.log(300), abs=1e-9)
    result = task.bits(p1, p2)
    assert result.per_person == pytest.approx(result.at_most, abs=1e-6)
    assert result.at_most == pytest.approx(LOG2_N0 - math.log2(300) + LOG2_S0 - fullname, abs=2e-4)


def test_a_guessing_model_holds_no_bits():
    """It knows every pool and every company's city, and guesses: in any order it has S0 possible values."""
    task = tasks.get("capo", N=300)
    cities = task.text.pools.company_city
    ids, roles = task.test_batch(0, 0, 300)
    city_first = 0
    for i in range(300):
        sample, chances = task.sample("test", 0, i), np.ones(ids.shape[1])
        chances[roles[i] == 2] = 1 / 2
        reported = set()
        for query in sample.queries:
            (attribute,) = query.slice.values()
            in_city = cities.count(sample.meta["company city"])
            chance = task.chance({"question": attribute})  # which names nothing before it
            if attribute == "company city":
                chance = 1.0 if "company" in reported else in_city / len(cities)
            elif attribute == "company" and "company city" in reported:
                chance = 1 / in_city
            chances[query.start] = chance
            reported.add(attribute)
            city_first += attribute == "company city" and "company" not in reported
        result = task.bits(math.log(160_000_000), -np.log(chances[(roles[i] == 2) | (roles[i] == 3)]).sum())
        assert result.per_person == pytest.approx(0, abs=1e-9)
    assert 0 < city_first < 300


def test_sizes_are_those_of_the_pools(tmp_path):
    write_pools(tmp_path, "One\nTwo\n", company="A; X\nB; X\nC; Y\n")
    task = tasks.get("capo", N=8, pools=str(tmp_path))
    log2_s0 = math.log2(2 * (12 * 28 * 200) * 2 * 2 * 2 * 3)
    assert task.bits(math.log(8), 0.0).per_person == pytest.approx(log2_s0, abs=1e-9)
    assert task.bits(0.0, 0.0).names == pytest.approx(3, abs=1e-9)
