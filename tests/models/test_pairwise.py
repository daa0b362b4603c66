"""The chosen runs: every combination that is promised occurs, counted another way than they are chosen."""

from itertools import combinations, product

import test_decoding
from pairwise import cover, fast_and_slow
from test_decoding import CASE_FEATURES, CASE_MODELS, MODEL_FEATURES, MODELS

FAST, SLOW = test_decoding.chosen()


def sets_in(run):
    """Sets of features that occur in a run: of the model, of the case."""
    model, case = run
    return MODEL_FEATURES[model], CASE_FEATURES[case]


def sets_of_two_and_three(runs):
    """Every two features that meet in some run; every three of both the model and the case."""
    collected = set()
    for model, case in map(sets_in, runs):
        model, case = sorted(model), sorted(case)
        collected |= {frozenset(two) for two in combinations([*model, *case], 2)}
        collected |= {frozenset([*two, one]) for two in combinations(model, 2) for one in case}
        collected |= {frozenset([one, *two]) for one in model for two in combinations(case, 2)}
    return collected


def all_runs():
    return [(model, case) for case, models in CASE_MODELS.items() for model in models]


def test_every_two_and_three_features_meet():
    assert sets_of_two_and_three([*FAST, *SLOW]) == sets_of_two_and_three(all_runs())


def test_every_model_and_every_case_occurs():
    assert {model for model, _ in [*FAST, *SLOW]} == set(MODELS)
    assert {case for _, case in FAST} == set(CASE_FEATURES)


def test_every_case_meets_every_feature_of_a_model():
    met = {(case, feature) for model, case in [*FAST, *SLOW] for feature in MODEL_FEATURES[model]}
    assert met == {(case, feature) for model, case in all_runs() for feature in MODEL_FEATURES[model]}


def test_fast_runs_hold_every_two_features_and_every_case_with_every_mixer():
    def two(runs):
        return {pair for run in runs for pair in product(*sets_in(run))}

    def mixers(runs):
        return {(case, mixer) for model, case in runs for mixer in MODELS[model].get("mixers", ["attention"])}

    assert two(FAST) == two(all_runs())
    assert mixers(FAST) == mixers(all_runs())


def test_no_run_is_chosen_twice_or_cannot_be():
    runs = [*FAST, *SLOW]
    assert len(set(runs)) == len(runs)
    assert set(runs) <= set(all_runs())
    assert len(runs) < len(all_runs()) / 2


def test_the_choice_is_always_the_same():
    again = fast_and_slow(MODEL_FEATURES, CASE_FEATURES, lambda model, case: model in CASE_MODELS[case])
    assert again == (FAST, SLOW)


def test_the_run_that_reaches_most_comes_first():
    reached = {"a": [1, 2], "b": [2, 3, 4], "c": [4], "d": [1, 5]}
    assert cover(reached) == ["b", "d"]
    assert cover(reached, chosen=["c"]) == ["a", "b", "d"]
    assert cover(reached, chosen=["b", "d"]) == []


def test_what_a_model_is_made_of():
    assert MODEL_FEATURES["attention-last"] == {
        *("mixer=gla", "mixer=attention", "mixers=attention+gla", "mix=hybrid"),
        *("canon=some", "A=some", "b=some", "variant=conv-uniform"),
        *(f"{site}=none" for site in "EKOCDM"),
    }
    assert CASE_FEATURES["test_packed_and_padded[middle-static]"] == {
        *("call=forward", "cache=static", "chunks=uneven", "pads=middle", "documents=packed"),
    }
