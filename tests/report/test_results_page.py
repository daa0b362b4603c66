"""The page of results has the contents of the files."""

import datetime
import math
import re

import pytest
from folders import evaluation, write_run
from reading import embedded_json, visible_text

from canonlm.report import published, results_page, results_payload, tidy
from canonlm.runs.gather import gather
from canonlm.runs.load import LeftOut

NUMBERS = ("value", "low", "high", "runs")


@pytest.fixture(scope="module")
def page():
    return results_page.render(results_payload.beside_the_published([]))


@pytest.fixture(scope="module")
def data(page):
    return read_back(page)


def shown(numbers, **others):
    return results_payload.Shown(numbers, tidy.results(), **others)


def read_back(page):
    return embedded_json(page)["results"]


def values_by_key(data):
    """(source, model, size, seed, task, setting, slice, metric) → value, of single runs."""
    scores, values = data["scores"], {}
    for m, q, value, runs in zip(*(scores[key] for key in ("model", "question", "value", "runs")), strict=True):
        model, question = data["models"][m], data["questions"][q]
        if runs == 1:
            key = [model[name] for name in ("source", "model", "size", "seed")]
            key += [question[name] for name in ("task", "setting", "slice", "metric")]
            assert tuple(key) not in values
            values[tuple(key)] = value
    return values


def test_every_number_of_all_sources_is_there_once(data):
    numbers = published.everything()
    keys = ("source", "model", "size", "seed", "task", "setting", "slice", "metric")
    theirs = {tuple(row[key] for key in keys): row["value"] for row in numbers.iter_rows(named=True)}
    assert values_by_key(data) == theirs
    assert len(theirs) == len(numbers)


def test_every_curve_is_there(data):
    models, questions = ([one[key] for one in data[of]] for of, key in (("models", "model"), ("questions", "task")))
    curves = [(models[c["model"]], questions[c["question"]], c["tokens"], c["values"]) for c in data["curves"]]
    assert curves == published.curves().group_by("model", "task", maintain_order=True).agg("tokens", "value").rows()
    assert len(curves) == 64 * 14 + 48


def test_pairs_are_the_paired_models_and_both_are_in_the_list(data):
    sides = [[data["models"][pair[side]] for side in ("base", "canon")] for pair in data["pairs"]]
    pairs = {(base["model"], canon["model"], base["source"]) for base, canon in sides}
    frame = tidy.paired(published.everything()).select("base_model", "canon_model", "source").unique()
    assert pairs == set(frame.iter_rows())
    assert sum(source == "published" for *_, source in pairs) == 32
    for base, canon in sides:
        assert (base["has_canon"], canon["has_canon"]) == (False, True)
        assert all(base[key] == canon[key] for key in ("arch", "size", "tokens", "lr", "seed"))


def test_eight_seeds_of_the_paper_have_one_mean_with_its_interval(data):
    scores = data["scores"]
    over = [i for i, runs in enumerate(scores["runs"]) if runs > 1]
    assert {data["models"][scores["model"][i]]["model"] for i in over} == {"mean over seeds"}
    tasks = [data["questions"][scores["question"][i]]["task"] for i in over]
    rows = [(task, *(scores[key][i] for key in NUMBERS)) for task, i in zip(tasks, over, strict=True)]
    assert rows == tidy.over_seeds(published.everything()).select("task", *NUMBERS).rows()


def test_it_needs_no_network_and_less_than_8_MB(page):
    assert len(page.encode()) < 8e6
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.S)
    assert not re.search(r'(src|href)="(?!data:)', outside)


def test_hostile_names_are_text_and_skipped_runs_are_reported():
    nasty = "</script><img src=x onerror=alert(1)>"
    row = {"source": "yours", "model": nasty, "arch": nasty, "canon": "none", "task": nasty, "slice": nasty,
           "metric": "accuracy", "unit": "%", "value": 50.0}  # fmt: skip
    page = results_page.render(shown(tidy.results([row]), left_out=[LeftOut(nasty, "no config.yaml")]))
    assert "<img" not in page.replace("<img src=x onerror=alert(1)>'", "")
    assert read_back(page)["models"][0]["model"] == nasty
    assert f"{nasty}: no config.yaml" in visible_text(page)


def test_a_page_of_nothing_is_still_a_page():
    data = read_back(results_page.render(shown(tidy.results())))
    assert (data["models"], data["pairs"], data["curves"]) == ([], [], [])


def mine(folder, name="mine", **others):
    evals = [evaluation(step, {("k", 1): (step, 40)}) for step in (10, 20)]
    write_run(folder / "runs" / name, evals=evals, **others)
    return folder


def test_yaml_values_without_a_json_form_become_text(tmp_path):
    odd = {"note": {"day": datetime.date(2026, 1, 2), "raw": b"x", "some": {1, 2}, "far": math.inf, "not": math.nan}}
    data = read_back(results_page.render(results_payload.of_runs(gather(mine(tmp_path, config=odd)))))
    settings = data["settings"]["mine"]
    assert settings["note.day"] == "2026-01-02"
    assert (settings["note.far"], settings["note.not"]) == ("inf", "nan")


def test_values_that_are_none_do_not_break_the_page():
    row = {
        "source": "yours", "model": "m", "task": "t", "slice": "all", "metric": "accuracy", "unit": "%",
        "value": 50.0,
    }  # fmt: skip
    data = read_back(results_page.render(shown(tidy.results([row | {"stderr": math.nan}]))))
    assert data["scores"]["stderr"] == [None]


def test_long_curves_are_thinned_and_keep_their_last_point():
    about = {"source": "yours", "model": "m", "task": "train", "slice": "all", "metric": "loss", "unit": ""}
    curve = tidy.results([about | {"tokens": step, "value": 1.0 / step} for step in range(1, 5002)])
    [thin] = read_back(results_page.render(results_payload.Shown(tidy.results(), curve)))["curves"]
    assert len(thin["tokens"]) <= 400
    assert thin["tokens"][-1] == 5001
    assert all(value == 1.0 / step for step, value in zip(thin["tokens"], thin["values"], strict=True))


def test_saved_models_of_unknown_training_are_not_paired():
    about = {"source": "yours", "arch": "Llama", "task": "piqa", "slice": "all", "metric": "acc", "unit": "%"}
    rows = [about | {"model": canon, "canon": canon, "value": 50.0} for canon in ("none", "ABCD")]
    assert len(tidy.paired(tidy.results(rows))) == 0
    trained = [row | {"tokens": 10, "lr": 0.1, "seed": 0} for row in rows]
    assert len(tidy.paired(tidy.results(trained))) == 1


def test_means_over_seeds_have_a_count_and_equal_runs_no_interval(tmp_path):
    for seed in (0, 1):
        mine(tmp_path, f"seed{seed}", seed=seed, params=1234)
    data = read_back(results_page.render(results_payload.of_runs(gather(tmp_path))))
    [mean] = [i for i, model in enumerate(data["models"]) if model["mean"]]
    assert data["models"][mean]["parameters"] == 1234
    scores = data["scores"]
    lows = [low for low, model in zip(scores["low"], scores["model"], strict=True) if model == mean]
    assert lows
    assert set(lows) == {None}
