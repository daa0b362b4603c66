"""The user's runs as rows of the frame of the published results: complete, in its units, with a list of omissions."""

import math

import polars as pl
import pytest
import yaml
from folders import evaluation, write_results, write_run

from canonlm.experiments.published import curves, everything, published
from canonlm.experiments.published.names import setting_of, split_arch
from canonlm.experiments.published.runs import runs_curves, runs_frame
from canonlm.experiments.published.training import as_in_the_paper
from canonlm.launch.recipes import load_preset
from canonlm.models import names
from canonlm.report.results_payload import of_runs, payload
from canonlm.runs.gather import gather
from canonlm.runs.identity import flat, settings
from canonlm.runs.load import LeftOut, tokens_of
from canonlm.runs.table import RESULTS, choose, has_canon, over_seeds, paired, results, short_tokens
from canonlm.train.config import resolve

DEPO1 = {"name": "depo", "N": 225, "K": 8, "M": 10, "name_vocab": 50, "min_name_len": 1, "max_name_len": 2}
SHAPE = {"model": {"num_hidden_layers": 8, "hidden_size": 512}}
TOKENS = 32 * 512  # a step of `write_run`


def depo_run(folder, **kwargs):
    rows = [evaluation(step, {("k", 4): (step, 1000), ("k", 8): (step // 2, 1000)}) for step in (100, 200, 800)]
    return write_run(folder, **{"task": DEPO1, "evals": rows, "config": SHAPE} | kwargs)


def rows(numbers, *columns, **where):
    for key, value in where.items():
        numbers = numbers.filter(pl.col(key) == value)
    return list(numbers.select(columns).iter_rows())


def test_a_finished_run(tmp_path):
    run = depo_run(tmp_path / "runs" / "a", arch="llama+canon", lr=0.003, seed=2)
    numbers, left_out = runs_frame([run])
    assert left_out == []
    assert numbers.schema == published().schema
    (about,) = numbers.select("source", "model", "arch", "canon", "size", "tokens", "lr", "seed").unique().to_dicts()
    assert about == {"source": "yours", "model": "a", "arch": "Llama", "canon": "ABCD", "size": "8L512D",
                     "tokens": 800 * TOKENS, "lr": 0.003, "seed": 2}  # fmt: skip
    assert set(rows(numbers, "task", "setting")) == {("depo", "depo1-225")}
    assert rows(numbers, "slice", "value", "total", metric="accuracy") == [
        ("all", pytest.approx(60.0), 2000), ("k=4", 80.0, 1000), ("k=8", 40.0, 1000)]  # fmt: skip
    four, eight = (math.sqrt(p * (1 - p) / 999) for p in (0.8, 0.4))
    errors = dict(rows(numbers, "slice", "stderr", metric="accuracy"))
    assert errors["k=4"] == pytest.approx(100 * four)
    assert errors["all"] == pytest.approx(100 * math.hypot(four, eight) / 2)
    assert rows(numbers, "value", "unit", metric="loss") == [(2.0, "")]
    filters = ["task=depo", "setting=depo1-225", "slice=k=8", "arch=llama", "canon=ABCD", "size=8l512d"]
    both = choose(pl.concat([everything(), numbers]), [*filters, "metric=accuracy"])
    assert set(both.select("source", "unit").iter_rows()) == {("paper", "%"), ("yours", "%")}


def test_an_unfinished_run_has_a_curve_but_no_result(tmp_path):
    depo_run(tmp_path / "runs" / "running", finished=False, steps=1000, tail='{"kind": "eval", "st')
    numbers, left_out = runs_frame([tmp_path])
    assert len(numbers) == 0
    assert numbers.schema == published().schema
    assert left_out == [LeftOut("running", "unfinished at step 800 of 1000: no final result")]
    along, left_out = runs_curves([tmp_path])
    assert rows(along, "tokens", "value", slice="k=4") == [
        (100 * TOKENS, 10.0), (200 * TOKENS, 20.0), (800 * TOKENS, 80.0)]  # fmt: skip
    assert left_out == [LeftOut("part of running", "1 damaged row of metrics.jsonl skipped")]


def test_answers_without_a_slice_are_not_all(tmp_path):
    """The score of the task is `all`. With 1 and "1" as values, a slice is both."""
    entries = [({"k": 1}, 2, 10), ({"k": "1"}, 1, 10), ({"k": 2}, 1, 10), ({}, 9, 10)]
    slices = [{"slice": where, "correct": correct, "total": total} for where, correct, total in entries]
    write_run(tmp_path / "runs" / "a", task={"name": "mine.py:Mixed"}, evals=[evaluation(2, {}) | {"slices": slices}])
    accuracies = runs_frame([tmp_path])[0].filter(pl.col("metric").str.starts_with("accuracy"))
    assert rows(accuracies, "slice", "metric", "value") == [
        ("all", "accuracy", pytest.approx(12.5)),
        ("k=1", "accuracy", 15.0),
        ("k=2", "accuracy", 10.0),
        ("all", "accuracy of other questions", 90.0),
    ]


def test_curves_have_the_training_loss_as_published_ones(tmp_path):
    depo_run(tmp_path / "a", losses=[(10, 3.5), (20, math.nan), (30, 2.5)])
    along, _ = runs_curves([tmp_path / "a"])
    where = {"task": "train", "slice": "all", "metric": "loss", "unit": ""}
    assert rows(along, "tokens", "value", **where) == [(10 * TOKENS, 3.5), (30 * TOKENS, 2.5)]
    assert len(rows(curves(), "value", **where)) == 48 * 40


def test_impossible_numbers_do_not_fail(tmp_path):
    depo_run(tmp_path / "runs" / "a", seed=10**30, config={**SHAPE, "data": {"seq_len": 10**20}})
    numbers, _ = runs_frame([tmp_path])
    assert set(numbers.select("seed", "tokens").iter_rows()) == {(None, None)}


@pytest.fixture
def evaluated(tmp_path):
    """A run on text and a published checkpoint, both evaluated."""
    run = tmp_path / "runs" / "mine"
    run.mkdir(parents=True)
    config = {"arch": "gla5+canon", "text": {"train": "x"}, "model": {"num_hidden_layers": 2, "hidden_size": 64},
              "data": {"seq_len": 128}, "train": {"batch_size": 4, "seed": 3, "optim": {"lr": 0.01}}}  # fmt: skip
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    model = {"source": "elsewhere/mine", "kind": "run", "step": 10, "arch": "gla5+canon", "parameters": 1_234_567}
    write_results(
        run / "evals" / "step-00000010",
        model,
        [
            ("multihop", "1hop-2k", {"published": True}, [("exact", 0.5, 0.02, 500, {}, True),
                                                         ("exact", 0.25, 0.04, 100, {"position": 3}, True)]),
            ("multihop", "2hop-2k", {"published": False}, [("exact", 0.5, 0.02, 500, {}, True)]),
            ("babilong", "babilong-qa1-4k", {"facts": "hub", "text": "dataset"},
             [("correct", 0.75, 0.01, 100, {}, True)]),
            ("harness", "hellaswag", {}, [("acc", 0.25, 0.01, 10, {}, True), ("acc_norm", 0.5, 0.01, 10, {}, True)]),
            ("harness", "wikitext", {}, [("word_perplexity", 13.5, None, 62, {}, False)]),
            ("harness", "niah_single_2", {}, [("512", 1.0, 0.0, 500, {}, True), ("4096", 0.5, 0.1, 500, {}, True)]),
            ("harness", "fda", {}, [("contains", 0.5, 0.01, 10, {}, True)]),
            ("harness", "canonlm_fda_twice", {}, [("contains", 0.75, 0.01, 10, {}, True)]),
            ("harness", "triviaqa", {}, [("exact_match", 0.25, 0.01, 10, {}, True)]),
            ("playground", "depo", {"task": DEPO1}, [("accuracy", 0.5, 0.1, 8, {}, True),
                                                     ("accuracy", 0.5, 0.1, 8, {"k": 4}, True)]),
        ],
    )  # fmt: skip
    write_results(
        tmp_path / "evals" / "theirs",
        {"source": "hub/LlamaCanon-1B-Nemo-1T-lr0.002", "kind": "published", "arch": "?", "parameters": 1_366_460_416},
        [("harness", "piqa", {}, [("acc", 0.7, 0.01, 100, {}, True)])],
    )
    return tmp_path


def test_evaluations_match_the_published_tables(evaluated):
    numbers, left_out = runs_frame([evaluated])
    assert left_out == []  # the run on text has rows by its evaluation
    mine = numbers.filter(pl.col("model") == "mine/step-00000010")
    assert rows(mine, "arch", "canon", "size", "tokens", "lr", "seed")[0] == (
        "GLA5", "AbCD", "2L64D", 10 * 4 * 128, 0.01, 3)  # fmt: skip
    question = ("task", "setting", "slice", "metric", "unit")
    theirs = set(published().select(question).iter_rows())
    values = {tuple(row[key] for key in question): row["value"] for row in mine.iter_rows(named=True)}
    shared = {key: value for key, value in values.items() if key in theirs}
    assert {(key[0], key[2]): value for key, value in shared.items()} == {
        ("multihop", "1hop-2k"): 50.0, ("babilong", "qa1-4k"): 75.0, ("hellaswag", "all"): 50.0,
        ("wikitext", "all"): 13.5, ("niah_single_2", "0.5k"): 100.0, ("niah_single_2", "4k"): 50.0,
        ("fda", "once"): 50.0, ("fda", "twice"): 75.0}  # fmt: skip
    assert values["multihop", "fair", "2hop-2k", "exact", "%"] == 50.0  # not the published setting
    assert values["multihop", None, "1hop-2k, position=3", "exact", "%"] == 25.0
    assert values["depo", "depo1-225", "k=4", "accuracy", "%"] == 50.0
    questions = set(curves().select(question).iter_rows())
    assert ("triviaqa", None, "all", "exact_match", "%") in questions & set(values)
    assert rows(mine, "stderr", task="wikitext") == [(None,)]
    assert rows(mine, "stderr", "total", task="babilong") == [(1.0, 100)]


def test_a_published_checkpoint_is_recognised_by_its_name(evaluated):
    numbers, _ = runs_frame([evaluated / "evals"])
    assert rows(numbers, "source", "model", "arch", "canon", "size", "tokens", "lr") == [
        ("yours", "theirs", "Llama", "ABCD", "1B", 1006632960000, 0.002)
    ]


def test_a_single_run(evaluated):
    numbers, _ = runs_frame([evaluated / "runs" / "mine"])
    assert set(numbers["model"]) == {"mine/step-00000010"}


def test_a_run_evaluated_again_is_not_a_second_run(tmp_path):
    """The questions of another evaluation have a separate column, and no pair with the result of training."""
    for name, arch in (("a", "llama"), ("b", "llama+canon")):
        depo_run(tmp_path / "runs" / name, arch=arch)
    scores = [("accuracy", 0.5, 0.1, 8, {}, True), ("accuracy", 0.5, 0.1, 8, {"k": 4}, True)]
    write_results(
        tmp_path / "runs" / "b" / "evals" / "step-00000800",
        {"source": str(tmp_path / "runs" / "b"), "arch": "llama+canon", "step": 800},
        [("playground", "depo", {"task": DEPO1}, scores)],
    )
    for folder in (tmp_path, tmp_path / "runs" / "b"):
        numbers, _ = runs_frame([folder])
        assert set(rows(numbers, "model", "value", setting="depo1-225, evaluated again")) == {("b/step-00000800", 50.0)}
    numbers, _ = runs_frame([tmp_path])
    pairs = paired(numbers).filter(pl.col("slice") == "k=4")
    assert rows(pairs, "base_model", "canon_model") == [("a", "b")]


@pytest.mark.parametrize(
    ("task", "config", "seed"),
    [
        (DEPO1, {}, 7),
        (DEPO1, {"train": {"eval_seed": 3}, "data": {"seed": 5}}, 3),
        ({"name": "capo", "N": 10}, {"data": {"seed": 5}}, 5),  # it tests what it trained on
    ],
)
def test_runs_with_other_seeds_have_one_setting(tmp_path, task, config, seed):
    """The playground asks with the run's own seed by default; any other seed is in the setting."""
    train = {"steps": 800, "batch_size": 4, "seed": 7, "optim": {"lr": 0.001}} | config.get("train", {})
    run = depo_run(
        tmp_path / "a", task=task, config=SHAPE | {"train": train, "data": {"seq_len": 64} | config.get("data", {})}
    )
    entries = [
        ("playground", "x", {"task": task, "n": 500, "seed": each}, [("loss", 0.5, None, 8, {}, False)])
        for each in (seed, 11)
    ]
    write_results(run / "evals" / "x", {"source": str(run), "kind": "run", "step": 800}, entries)
    numbers, _ = runs_frame([tmp_path])
    settings = [setting for (setting,) in rows(numbers, "setting", task="x", metric="loss")]
    assert settings == [setting_of(task), f"{setting_of(task)}, seed=11"]


def test_damaged_results_are_left_out(evaluated):
    path = evaluated / "evals" / "theirs" / "results.json"
    path.write_text(path.read_text().replace('"model": {', '"model": 3, "other": {'))
    (evaluated / "evals" / "half").mkdir()
    (evaluated / "evals" / "half" / "results.json").write_text('{"model": {}')
    numbers, left_out = runs_frame([evaluated])
    assert set(numbers["model"]) == {"mine/step-00000010"}
    assert sorted(entry.name for entry in left_out) == ["evals/half/results.json", "evals/theirs/results.json"]


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("llama", ("Llama", "none")),
        ("llama+canon", ("Llama", "ABCD")),
        ("llama+canon=AC+rope=0.25", ("Llama+rope=0.25", "AC")),
        ("llama-nope+canon+frozen", ("Llama-nope", "ABCD(frozen)")),
        ("llama+canon=BD:silu:k3:nores", ("Llama", "BD(no-res,silu,k3)")),
        ("llama+canon=KVOM:scaled", ("Llama", "KVOM:scaled")),
        ("llama+canon=A,D:k3", ("Llama", "A,D:k3")),
        ("gla5", ("GLA5", "b")),
        ("gla5-conv", ("GLA5", "none")),
        ("gdn2+canon", ("GDN2", "AbCD")),
        ("gdn2-conv+canon", ("GDN2", "ACD")),
        ("mamba2.mamba2.llama+canon", ("mamba2.mamba2.llama", "AbCD,ABCD")),
        ("something else", ("something else", None)),
    ],
)
def test_split_arch(name, split):
    assert split_arch(name) == split


def test_sites_are_those_of_the_model():
    for name in ("llama+canon", "gla5+canon=AC", "mamba2", "llama+canon+mlp=moe"):
        assert split_arch(name)[1] == names.resolve(name, hidden_size=1024, num_heads=16)["canon_set"]


def test_a_setting_has_a_short_name_only_where_it_matches_fully():
    assert setting_of(DEPO1) == "depo1-225"
    assert setting_of(DEPO1 | {"K": 4}) == "depo1-225-k4"
    assert setting_of(DEPO1 | {"M": 5}).startswith("N=225, K=8, M=5")
    assert setting_of({"name": "lano", "grammar": "cfg3k"}) == "cfg3k"
    assert setting_of({"name": "copying", "N": 4}) == "N=4"


def test_tokens_of_an_old_configuration_are_unknown():
    assert tokens_of({"train": {}, "data": {}}, 5) is None
    assert tokens_of({"train": {"batch_size": 2}, "data": {"seq_len": 3}}, 5) == 30


def test_pairs_of_your_runs(tmp_path):
    for arch, canon in (
        ("llama", "none"),
        ("llama+canon", "ABCD"),
        ("llama+canon=AC", "AC"),
        ("llama+rope=0.25", "none"),
    ):
        for seed in (0, 1):
            rows_ = [evaluation(10, {("k", 4): (500 + 100 * has_canon(canon) + seed, 1000)})]
            depo_run(tmp_path / "runs" / f"{arch}-{seed}", arch=arch, seed=seed, evals=rows_)
    numbers, _ = runs_frame([tmp_path])
    pairs = paired(numbers).filter((pl.col("slice") == "k=4") & (pl.col("metric") == "accuracy"))
    assert sorted(rows(pairs, "base_model", "canon_model", "canon", "seed", "delta")) == [
        (f"llama-{seed}", f"llama+canon{more}-{seed}", canon, seed, pytest.approx(10.0))
        for seed in (0, 1)
        for more, canon in (("", "ABCD"), ("=AC", "AC"))
    ]


def test_short_token_counts_and_has_canon():
    assert [short_tokens(n) for n in (1006632960000, 2013265920000, 33550000000, 999_999, 512)] == [
        "1T", "2T", "34B", "1M", "512"]  # fmt: skip
    assert [has_canon(sites) for sites in ("none", "b", "ABCD", "b,AbCD", None)] == [False, False, True, True, False]


def test_choose():
    numbers = everything()
    assert set(choose(numbers, ["arch=gla5,GDN2", "size=1B", "canon=yes"]).select("arch", "canon").iter_rows()) == {
        ("GLA5", "AbCD"), ("GDN2", "AbCD")}  # fmt: skip
    assert set(choose(numbers, ["arch=gla5", "arch=GDN2"])["arch"]) == {"GLA5", "GDN2"}
    assert set(choose(numbers, ["source=published", "tokens=2T"])["tokens"]) == {2013265920000}
    assert set(choose(numbers, ["tokens=1006632960000"])["tokens"]) == {1006632960000}
    assert set(choose(numbers, ["lr=2e-3"])["lr"]) == {0.002}
    close = numbers[:2].with_columns(lr=pl.Series([10**-3.5, 0.00031622]))
    assert list(choose(close, ["lr=0.000316228"])["lr"]) == [10**-3.5]  # as tables show it
    assert set(choose(numbers, ["source=best", "lr="])["source"]) == {"best"}
    assert set(choose(numbers, ["setting=depo1-225-k4"])["setting"]) == {"depo1-225-k4"}
    assert len(choose(numbers, ["source=reference", "arch=GLA5"])) == 0
    assert choose(numbers, []).equals(numbers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("arhc=GLA5", 'unknown filter "arhc". Did you mean "arch"?'),
        ("value=3", 'unknown filter "value".'),
        ("arch", "filter: expected key=value"),
        ("arch=Mamba3", 'unknown arch "Mamba3". Did you mean "Mamba2"? Values of arch: '),
        ("arch=GLA5,x", 'unknown arch "x".'),
        ("lr=0.2", 'unknown lr "0.2".'),
        ("size=", 'unknown size "".'),
        ("model=Llama-1B-Nemo-1T-lr2", 'unknown model "Llama-1B-Nemo-1T-lr2". Did you mean "Llama-1B-Nemo-'),
    ],
)  # fmt: skip
def test_choose_refuses(text, message):
    with pytest.raises(ValueError) as error:
        choose(everything(), [text])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_frames_without_runs_and_with_names_that_are_not_text():
    assert results().columns == list(RESULTS)
    assert results([{"model": "a\udcff", "value": 1}])["model"].to_list() == ["a?"]


# -- beside the paper's cells -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", ["B", "B(no-res)", "ABCD", "ABCD(frozen)"])
def test_canon_variants_match_only_cells_of_the_same_variant(tmp_path, cell):
    """Runs of earlier versions have this in fields; now it is in the name."""
    sites, _, flag = cell.rstrip(")").partition("(")
    fields = {"no-res": {"canon_residual": False}, "frozen": {"canon_frozen": True}, "": {}}[flag]
    config = {"model": {**SHAPE["model"], "fields": fields}}
    depo_run(tmp_path / "fields", arch=f"llama+canon={sites}", config=config)
    depo_run(tmp_path / "name", arch=f"llama+canon={sites}" + {"no-res": ":nores", "frozen": ":frozen", "": ""}[flag])
    numbers, _ = runs_frame([tmp_path])
    assert set(rows(numbers, "arch", "canon")) == {("Llama", cell)}


def test_other_fields_are_other_architectures(tmp_path):
    depo_run(tmp_path / "a", config={"model": {**SHAPE["model"], "fields": {"hidden_act": "relu2", "eos_token_id": 3}}})
    depo_run(tmp_path / "b", arch="llama+canon:k3")
    numbers, _ = runs_frame([tmp_path])
    assert set(rows(numbers, "model", "arch", "canon")) == {
        ("a", "Llama+hidden_act=relu2", "none"),
        ("b", "Llama", "ABCD(k3)"),
    }


def test_runs_that_differ_are_not_pooled_over_seeds(tmp_path):
    for seed, decay in ((0, 0.1), (1, 0.1), (2, 0.3), (3, 0.3)):
        train = {"steps": 800, "batch_size": 32, "seed": seed, "optim": {"lr": 0.001, "weight_decay": decay}}
        for arch in ("llama", "llama+canon"):
            depo_run(tmp_path / f"{arch}{seed}", arch=arch, seed=seed, config={**SHAPE, "train": train})
    numbers, _ = runs_frame([tmp_path])
    names = {"Llama (weight_decay=0.1)", "Llama (weight_decay=0.3)"}
    assert set(numbers["arch"]) == names
    assert set(rows(over_seeds(numbers), "arch", "runs")) == {(name, 2) for name in names}
    assert len(paired(numbers).select("base_model").unique()) == 4
    assert len(choose(numbers, ["arch=llama"])) == len(numbers)


PAPER = [("depo", "depo1-225"), ("depo", "depo2-75-k4"), ("brevo", "brevo1-70"), ("brevo", "brevo2-40"),
         ("mano", "mano-13"), ("lano", "cfg3j")]  # fmt: skip


@pytest.mark.parametrize(("task", "setting"), PAPER)
def test_only_runs_trained_like_the_paper_are_compared_with_it(task, setting):
    run = resolve({**load_preset(task, "paper", setting).run, "arch": "llama"}).model_dump(mode="json")
    assert as_in_the_paper(flat(run))
    assert as_in_the_paper(settings(run))
    larger = {"num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12}
    for same in ({"model": {**run["model"], **larger}}, {"train": {**run["train"], "seed": 3, "device": "cpu"}},
                 {"train": {**run["train"], "precision": "fp32", "log_every": 1}}, {"preset": None}):  # fmt: skip
        assert as_in_the_paper(flat(run | same))
    optim = {**run["train"]["optim"], "weight_decay": 0.5}
    for other in (
        {"train": {**run["train"], "steps": 500}},
        {"train": {**run["train"], "batch_size": 8}},
        {"train": {**run["train"], "optim": optim}},
        {"data": {**run["data"], "seq_len": 4096}},
        {"data": {**run["data"], "isolate_documents": True}},
        {"task": {**run["task"], next(iter(run["task"].keys() - {"name"})): 11}},
        {"model": {**run["model"], "num_attention_heads": 4}},
        {"model": {**run["model"], "matched": {"intermediate_size": [1365, 1400]}}},
    ):
        assert not as_in_the_paper(flat(run | other)), other
    assert not as_in_the_paper({})


def test_the_page_shows_other_training_instead_of_a_difference(tmp_path):
    run = resolve({**load_preset("depo", "paper", "depo1-225").run, "arch": "llama"}).model_dump(mode="json")
    optim = {**run["train"]["optim"], "lr": 0.001}
    for name, steps, seeds in (("long", 87_500, (0, 1)), ("short", 800, (0, 1))):
        for seed in seeds:
            train = {**run["train"], "steps": steps, "seed": seed, "optim": optim}
            row = evaluation(steps, {("k", 8): (50 + seed, 100)})
            depo_run(tmp_path / f"{name}{seed}", seed=seed, steps=steps, evals=[row], config={**run, "train": train})
    models = payload(of_runs(gather(tmp_path)))["models"]
    mine = {(one["model"], one["tokens"] > 10**9): one["as_in_the_paper"] for one in models if one["source"] == "yours"}
    assert mine == {("long0", True): True, ("long1", True): True, ("short0", False): False, ("short1", False): False,
                    ("mean over seeds", True): True, ("mean over seeds", False): False}  # fmt: skip
    assert {one["as_in_the_paper"] for one in models if one["source"] != "yours"} == {None}
