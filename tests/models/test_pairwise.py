"""The chosen runs contain every promised combination, counted independently of the choice."""

from itertools import product

import test_decoding
from pairwise import cover, fast_and_slow
from test_decoding import CASE_FEATURES, CASE_MODELS, MODEL_FEATURES, MODELS

FAST, SLOW = test_decoding.chosen()


def sets_in(run):
    """Sets of features that occur in a run: of the model, of the case."""
    model, case = run
    return MODEL_FEATURES[model], CASE_FEATURES[case]


def all_runs():
    return [(model, case) for case, models in CASE_MODELS.items() for model in models]


def test_fast_runs_cover_all_pairs_of_model_and_case_features():
    def two(runs):
        return {pair for run in runs for pair in product(*sets_in(run))}

    assert two(FAST) == two(all_runs())
    assert {model for model, _ in FAST} == set(MODELS)
    assert {case for _, case in FAST} == set(CASE_FEATURES)


def test_every_case_runs_with_every_mixer_and_extent_of_canon():
    def met(runs):
        mixers = {(case, mixer) for model, case in runs for mixer in MODELS[model].get("mixers", ["attention"])}
        extents = {(case, f) for model, case in runs for f in MODEL_FEATURES[model] if f.startswith(("mix=", "canon="))}
        return mixers | extents

    assert met([*FAST, *SLOW]) == met(all_runs())


def test_chosen_runs_are_distinct_and_possible():
    runs = [*FAST, *SLOW]
    assert len(set(runs)) == len(runs)
    assert set(runs) <= set(all_runs())
    assert len(runs) < len(all_runs()) / 4


def test_the_choice_is_always_the_same():
    again = fast_and_slow(MODEL_FEATURES, CASE_FEATURES, lambda model, case: model in CASE_MODELS[case])
    assert again == (FAST, SLOW)


def test_the_run_that_covers_the_most_features_comes_first():
    reached = {"a": [1, 2], "b": [2, 3, 4], "c": [4], "d": [1, 5]}
    assert cover(reached) == ["b", "d"]
    assert cover(reached, chosen=["c"]) == ["a", "b", "d"]
    assert cover(reached, chosen=["b", "d"]) == []


def test_features_of_a_model_and_a_case():
    assert MODEL_FEATURES["attention-last"] == {
        *("mixer=gla", "mixer=attention", "mixers=attention+gla", "mix=hybrid"),
        *("canon=some", "A=some", "b=some", "variant=conv-uniform"),
        *(f"{site}=none" for site in "EKOCDM"),
    }
    assert CASE_FEATURES["test_packed_and_padded[middle-static]"] == {
        *("call=forward", "cache=static", "chunks=uneven", "pads=middle", "documents=packed"),
    }
