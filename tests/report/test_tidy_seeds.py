"""Means over seeds against numpy and scipy: the rows that belong together, and their interval."""

import math
from collections import defaultdict

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from canonlm.report import published, tidy

QUESTION = ("task", "setting", "slice", "metric", "unit")

values = st.one_of(st.sampled_from([0.0, 100.0, None]), st.floats(0, 100).map(lambda x: round(x, 2)))
few = {  # settings, so that many rows share them
    "arch": st.sampled_from(["Llama", "Llama", None]),
    "canon": st.sampled_from(["none", "b", "ABCD", "ABCD"]),
    "lr": st.sampled_from([0.1, None]),
    "seed": st.sampled_from([0, 1, 2, None]),
    "task": st.just("depo"),
    "unit": st.sampled_from(["%", ""]),
    "value": values,
}
many = few | {
    "source": st.sampled_from(["yours", "paper"]),
    "model": st.sampled_from(["a", "b"]),
    "canon": st.sampled_from(["none", "ABCD", None]),
    "size": st.sampled_from(["1B", None]),
    "tokens": st.sampled_from([10, None]),
    "setting": st.sampled_from(["N=8", None]),
}
rows = st.one_of(st.lists(st.fixed_dictionaries(few), max_size=40), st.lists(st.fixed_dictionaries(many), max_size=40))


def interval(by_seed, unit):
    """The interval of the mean of one number per seed, clipped to valid percentages."""
    values = [np.mean(result) for result in by_seed.values()]
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values))
    if max(values) == min(values):
        return np.mean(values), None, None, len(values)
    low, high = np.mean(values) - half, np.mean(values) + half
    return np.mean(values), *((max(0.0, low), min(100.0, high)) if unit == "%" else (low, high)), len(values)


def numbers_by_key(frame, keys, column):
    rows = frame.iter_rows(named=True)
    result = {tuple(row[key] for key in keys): (row[column], row["low"], row["high"], row["runs"]) for row in rows}
    assert len(result) == len(frame)
    return result


def same(found, want):
    assert found.keys() == want.keys()
    for key, numbers in want.items():
        assert [number is None for number in found[key]] == [number is None for number in numbers]
        for one, other in zip(found[key], numbers, strict=True):
            assert one == other or one == pytest.approx(other, abs=1e-6)


@settings(max_examples=40, deadline=None)
@given(drawn=rows)
def test_means_over_seeds(drawn):
    keys = ("source", "arch", "canon", "size", "tokens", "lr", *QUESTION)
    groups = defaultdict(lambda: defaultdict(list))
    for row in drawn:
        if row["seed"] is not None and row["arch"] is not None and row["value"] is not None:
            groups[tuple(row.get(key) for key in keys)][row["seed"]].append(row["value"])
    want = {key: interval(seeds, key[-1]) for key, seeds in groups.items() if len(seeds) > 1}
    result = tidy.over_seeds(tidy.results(drawn))
    assert result.columns == [*keys, "value", "low", "high", "runs"]
    same(numbers_by_key(result, keys, "value"), want)


def test_intervals_of_percentages_stay_within_0_and_100():
    fields = {"arch": "Llama", "task": "depo", "unit": "%"}
    frame = tidy.results([fields | {"seed": seed, "value": value} for seed, value in enumerate((90.0, 10.0))])
    assert tidy.over_seeds(frame).select("low", "high").rows() == [(0.0, 100.0)]


def test_missing_and_infinite_values_do_not_count_as_runs():
    values = [1.0, 2.0, math.nan, math.inf, None]
    fields = [{"arch": "Llama", "seed": seed, "task": "depo", "unit": "", "value": x} for seed, x in enumerate(values)]
    assert tidy.over_seeds(tidy.results(fields)).select("value", "runs").rows() == [(1.5, 2)]
    assert tidy.over_seeds(tidy.results(fields[1:])).is_empty()


def test_the_eight_seeds_of_the_paper():
    numbers = published.slimpajama()
    result = tidy.over_seeds(numbers)
    plain = numbers.filter(pl.col("seed").is_not_null())
    assert plain.select(QUESTION).unique().height == len(result) == 36
    assert result["runs"].to_list() == [8] * 36
    assert set(result.select("arch", "canon", "size", "tokens").rows()) == {("Llama", "none", "1.3B", 100_000_000_000)}
    lambada = (50.8, 55.0, 52.3, 52.8, 53.1, 50.7, 52.3, 53.3)  # figure 16, column LMB
    (row,) = result.filter((pl.col("task") == "lambada_openai") & (pl.col("metric") == "acc")).iter_rows(named=True)
    truth = stats.t.interval(0.95, 7, np.mean(lambada), stats.sem(lambada))
    assert (row["value"], row["low"], row["high"]) == pytest.approx((np.mean(lambada), *truth))
    assert result["low"].min() == 0.0  # two hops after 6,000 tokens: 0.0 to 1.2 %, not below 0
