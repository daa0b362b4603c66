"""The packaged numbers are those of the release and of the paper, by check values from their tables."""

import hashlib

import polars as pl
import pytest

from canonlm import tasks
from canonlm.experiments.published import AVERAGES, BENCHMARKS, GROUPS, LOWER_IS_BETTER, table
from canonlm.experiments.published.benchmarks import DIFFICULTIES
from canonlm.experiments.published.names import setting_of
from canonlm.launch.recipes import find
from canonlm.report import published as package
from canonlm.runs.table import MODEL, QUESTION, RESULTS, SCHEMA, paired
from canonlm.train.load_config import load

COLUMN_OF = {(b.task, b.slice, b.metric): name for name, b in BENCHMARKS.items()}
DELTA_COLUMNS = ("lm_eval_avg13", "LMB", "Hella", "ARC-c", "CSQA", "MMLU", "Wiki_ppl", "LMB_ppl", "JRT_avg12",
                 "1hop-0k", "1hop-4k", "1hop-5k", "2hop-0k", "babilong_avg20")  # fmt: skip
DELTAS = {
    "LlamaCanon-8B-Nemo-1T-lr0.003": (1.0, 1.8, 0.9, 1.8, 1.2, 1.5, -0.41, -0.33, 0.5, 0.0, 12.4, 24.1, -3.3, 2.4),
    "LlamaCanon-1B-Nemo-1T-lr0.002": (1.3, 1.2, 1.0, 0.7, 0.6, 3.0, -0.51, -0.36, 0.4, 0.0, 64.3, 34.0, 1.2, 7.5),
    "Mamba2Canon-1B-Nemo-1T-lr0.002": (0.4, -1.1, 0.8, 1.8, -10.2, -5.3, -0.09, 0.13, -0.2, 0.0, -0.7, -3.3, 0.2, 0.1),
    "GLA5Canon-1B-Nemo-1T-lr0.002": (1.8, 1.8, 1.4, 1.1, 8.5, -0.1, -0.57, -0.91, 1.7, 7.5, 12.9, 6.3, 0.2, 0.8),
    "GDN2Canon-1B-Nemo-1T-lr0.002": (1.2, 2.3, 0.8, 0.8, 5.9, 5.4, -0.28, -0.61, 0.5, -8.9, -4.1, -1.7, 1.6, 0.9),
}


def digest(rows):
    """The digest of a set of rows in any order."""
    text = "\n".join(sorted("|".join(repr(float(x)) if isinstance(x, int | float) else x for x in row) for row in rows))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def by_column(frame):
    """(model, column of the release's tables, value)"""
    rows = frame.select("model", "task", "slice", "metric", "value").iter_rows()
    return [(model, COLUMN_OF[task, slice, metric], value) for model, task, slice, metric, value in rows]


@pytest.fixture(scope="module")
def finals():
    return package.published()


@pytest.mark.parametrize(
    ("name", "rows", "total", "check"),
    [
        ("published", 64 * 87, 296697.14, "fa6c6cd0a1da3c01"),
        ("best", 26 * 87, 125214.68, "79b4e24b12707aef"),
        ("references", 18 * 14 - 4 * 3, 14330.6, "3e07a485b8436fcf"),
        ("slimpajama", 27 * 36, 43794.6, "6dd65f7b3ff95c95"),
    ],
)
def test_every_number_equals_the_printed_one(name, rows, total, check):
    frame = getattr(package, name)()
    assert frame.schema == pl.Schema({column: SCHEMA[column] for column in RESULTS})
    assert len(frame) == rows
    assert frame["value"].sum() == pytest.approx(total, abs=1e-6)
    assert digest(by_column(frame)) == check


def test_all_64_models_with_their_settings(finals):
    assert finals["model"].n_unique() == 64
    runs = finals.select(MODEL).unique()
    assert runs["seed"].unique().to_list() == [777]
    counts = dict(runs.group_by("arch").len().iter_rows())
    assert counts == {"Llama": 16, "GLA5": 16, "GDN2": 16, "Mamba2": 16}
    assert runs.filter(pl.col("canon") == "ABCD")["arch"].unique().to_list() == ["Llama"]
    assert len(runs.filter(pl.col("canon").is_in(["ABCD", "AbCD"]))) == 32


@pytest.mark.every(4)
@pytest.mark.parametrize("row", package.settings().to_dicts(), ids=lambda row: row["model"])
def test_settings_are_those_of_the_recipes_of_this_package(row):
    run = load(find(row["model"]))
    base, *added = run.arch.split("+")
    canon = "canon" in added
    assert base == row["arch"].lower()
    assert row["canon"] == {(True, True): "ABCD", (True, False): "AbCD", (False, True): "none", (False, False): "b"}[
        canon, row["arch"] == "Llama"]  # fmt: skip
    head = run.model.hidden_size // run.model.num_attention_heads
    assert row["rope_dim"] == (0 if row["arch"] != "Llama" else head // 4 if canon else head)
    assert row["tokens"] == run.train.steps * run.train.batch_size * run.data.seq_len
    optim = (run.train.optim.lr, run.train.optim.weight_decay, run.train.optim.warmup_steps)
    assert (row["lr"], row["weight_decay"], row["warmup"]) == optim
    assert (row["steps"], row["ctx"], row["batch"]) == (run.train.steps, run.data.seq_len, run.train.batch_size)
    model = (run.model.num_hidden_layers, run.model.hidden_size, run.model.num_attention_heads)
    assert (row["layers"], row["dim"], row["heads"]) == model


def test_contexts_and_batches_in_the_notes():
    runs = package.settings().with_columns(batch_tokens=pl.col("ctx") * pl.col("batch") / 1e6)
    llama, linear = runs.filter(pl.col("arch") == "Llama"), runs.filter(pl.col("arch") != "Llama")
    assert dict(linear.select("size", "ctx").unique().iter_rows()) == {"1B": 16384, "3B": 12288, "8B": 4096}
    assert llama["ctx"].unique().to_list() == [4096]
    assert [round(linear["batch_tokens"].min(), 1), round(linear["batch_tokens"].max(), 1)] == [2.1, 3.1]
    assert [round(llama["batch_tokens"].min(), 1), round(llama["batch_tokens"].max(), 1)] == [4.2, 8.4]
    assert llama["steps"].max() < linear["steps"].min()


@pytest.mark.parametrize("name", ["published", "best", "references"])
@pytest.mark.parametrize(("average", "count"), [("lm_eval_avg13", 13), ("JRT_avg12", 12), ("babilong_avg20", 20),
                                                ("avg10", 10)])  # fmt: skip
def test_averages_are_those_of_their_columns(name, average, count):
    """Columns are rounded to 0.1, and so is the average of unrounded ones, so both are at most 0.1 apart."""
    assert len(AVERAGES[average]) == count
    values = {(model, column): value for model, column, value in by_column(getattr(package, name)())}
    averages = {model: value for (model, column), value in values.items() if column == average}
    assert bool(averages) == ((average == "avg10") == (name == "references"))
    for model, value in averages.items():
        mean = sum(values[model, column] for column in AVERAGES[average]) / count
        assert abs(mean - value) <= 0.0601, model  # what the release's own rows reach


def test_best_is_the_best_of_the_runs_column_by_column(finals):
    same = ("arch", "canon", "size", "tokens", *QUESTION)
    less = pl.col("metric").is_in(list(LOWER_IS_BETTER))
    scores = finals.filter(~pl.col("slice").str.starts_with("average"))
    result = scores.group_by(same).agg(best=pl.when(less.first()).then(pl.min("value")).otherwise(pl.max("value")))
    both = package.best().join(result, on=same, nulls_equal=True)
    assert len(both) == 26 * 84
    assert both["value"].equals(both["best"].alias("value"))
    assert package.best()["lr"].null_count() == 26 * 87


def test_paired_differences_are_the_published_ones(finals):
    rows = paired(finals)
    assert len(rows) == 32 * 87
    result = {}
    for row in rows.iter_rows(named=True):
        assert row["base"] + row["delta"] == pytest.approx(row["value"])
        column = COLUMN_OF[row["task"], row["slice"], row["metric"]]
        result[row["canon_model"], column] = (row["base_model"], row["delta"])
    for model, deltas in DELTAS.items():
        assert [result[model, column][1] for column in DELTA_COLUMNS] == list(deltas), model
    printed = [(model, base, column, delta) for (model, column), (base, delta) in result.items()
               if column in DELTA_COLUMNS]  # fmt: skip
    assert digest(printed) == "975f57848ae7b966"  # of all 32 pairs, as the release prints them


def test_other_differences_in_a_pair():
    result = package.differing()
    rope = result.filter(pl.col("setting") == "rope_dim")
    assert set(rope.select("base", "canon").unique().iter_rows()) == {("64", "16"), ("128", "32")}
    assert (len(rope), len(result)) == (8, 9)
    (other,) = result.filter(pl.col("setting") != "rope_dim").to_dicts()
    assert (other["canon_model"], other["setting"]) == ("GLA5Canon-3B-Nemo-1T-lr0.005", "zeyuan_layernorm")


def test_curves():
    curves = package.curves()
    assert len(curves) == (14 * 64 + 48) * 40
    names = {"train": "train_loss_ma50"}
    rows = curves.select("model", "task", "tokens", "value").iter_rows()
    lines = [repr((model, names.get(task, task), tokens, value)) for model, task, tokens, value in rows]
    assert hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16] == "ea05a61942236ead"
    along = curves.group_by("model", "task", maintain_order=True).agg(pl.col("tokens").diff().min())
    assert along["tokens"].min() > 0
    assert curves.filter(pl.col("unit") == "")["task"].unique().to_list() == ["train"]


def test_a_curve_ends_near_the_final_score_and_at_the_last_token(finals):
    """They are not the same evaluation: of 832 pairs only 202 agree to the printed digit."""
    last = package.curves().filter(pl.col("metric") != "loss").group_by("model", "task", "metric").last()
    final = finals.select("model", "task", "metric", "slice", final="value", length="tokens")
    both = last.join(final, on=["model", "task", "metric", "slice"])
    assert len(both) == 64 * 13  # triviaqa has another format there
    assert (both["tokens"] - both["length"]).abs().max() <= 5_000_000
    gaps = both.with_columns(gap=(pl.col("value") - pl.col("final")).abs())
    assert gaps.filter(pl.col("task") == "copa")["gap"].max() == pytest.approx(3.0)
    assert gaps.filter(pl.col("task") != "copa")["gap"].max() <= 1.31
    assert len(gaps.filter(pl.col("gap") <= 0.0501)) == 202


def test_grids():
    raw, tidy = table("grids"), package.grids()
    rows = [
        tuple("" if x is None else str(x) if i == 6 else x for i, x in enumerate(row[:9])) for row in raw.iter_rows()
    ]
    assert digest(rows) == "2b81d7b9584e94be"
    assert tidy["value"].equals(raw["value"])
    assert tidy.drop("value").is_duplicated().sum() == 0  # each cell has a unique name
    one = tidy.filter((pl.col("model") == "Llama(NoPE) Canon-ABCD(res)") & (pl.col("size") == "12L768D"))
    one = one.filter(pl.col("metric") == "accuracy")
    result = {(setting, slice): value for setting, slice, value in one.select("setting", "slice", "value").iter_rows()}
    assert (one["arch"][0], one["canon"][0]) == ("Llama-nope", "ABCD")
    assert result["depo1-375", "k=8"] >= 96
    assert result["cfg3k", "all"] == 53.1


def test_settings_of_the_grids_are_difficulties_of_the_tasks():
    for task, difficulties in DIFFICULTIES.items():
        for name in difficulties:
            assert setting_of({"name": task, **tasks.get(task, difficulty=name).spec.model_dump()}) == name
    cells = package.grids().select("task", "setting").unique().iter_rows()
    assert all(setting in DIFFICULTIES[task] for task, setting in cells)


def test_groups_have_every_column_once():
    columns = [name for group, names in GROUPS.items() if group != "short" for name in names]
    assert sorted(columns) == sorted(BENCHMARKS)
    assert set(GROUPS["short"]) < set(columns)
