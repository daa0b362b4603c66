"""One page for all tasks: its charts, tables and data are the rows of the runs, for all measures."""

import json
import math
import statistics

import pytest
from folders import EVERY_TASK, evaluation, write_every_task, write_run
from reading import blocks, charts, evals_of, numbers, page_of, printed, visible_text
from reading import tables as tables_of
from scipy import stats

from canonlm.experiments.published.runs import runs_frame
from canonlm.report import load_play, summarise, wilson
from canonlm.report.charts import BOUND, final_chart, learning_curves, size_curves
from canonlm.report.evals import rows as rows_of_suite
from canonlm.report.format import slice_label
from canonlm.runs.rows import Count
from canonlm.runs.seed_statistics import gaffke_interval
from canonlm.runs.task_info import TaskInfo

SECTIONS = list(EVERY_TASK)
LANO = {"name": "lano", "grammar": "cfg3f"}


def rows_of(folder, run):
    return evals_of(folder / "runs" / run)


def value_in(row, key):
    """A value of a row in the file."""
    result = {f"{k}={v}": part["correct"] / part["total"] for part in row["slices"] for k, v in part["slice"].items()}
    return (result | row.get("measures", {})).get(key)


@pytest.fixture(scope="module")
def page(every_task):
    return page_of(every_task)


@pytest.fixture(scope="module")
def figures(page):
    return charts(page)


def test_the_download_of_the_page_is_every_row(every_task, page):
    lines = [
        (line["run"], line["kind"], int(line["step"]), line["metric"] if line["slice"] == "all" else line["slice"],
         int(line["correct"]) / int(line["total"]) if line["correct"] else float(line["value"]), line["parameters"])
        for line in numbers(page)
        if line["correct"] or line["metric"] not in ("accuracy", "loss", "train_seconds", "tokens_per_s")
    ]  # fmt: skip
    want = []
    for run in (every_task / "runs").iterdir():
        rows, size = rows_of(every_task, run.name), json.loads((run / "result.json").read_text())["num_parameters"]
        for kind, row in [*(("evaluation", row) for row in rows), ("final", rows[-1])]:
            keys = [f"{k}={v}" for part in row["slices"] for k, v in part["slice"].items()]
            keys += row.get("measures", ())
            want += [(run.name, kind, row["step"], key, value_in(row, key), str(size)) for key in keys]
    assert sorted(lines) == sorted(want)
    assert [sheet["name"] for sheet in blocks(page, "sheet")] == ["report.csv"]


@pytest.mark.parametrize("chart", ["curves", "measures"])
def test_every_curve_is_the_run_it_names(every_task, figures, chart):
    drawn = 0
    for number, task in enumerate(SECTIONS):
        figure = figures.get(f"{chart}-{number}")
        if figure is None:
            continue
        keys = ["kl"] if task == "lano" else ["bits_per_parameter", "bits_per_person"]
        if chart == "curves":
            keys = [f"{k}={v}" for k, v in EVERY_TASK[task][1] if k == EVERY_TASK[task][1][0][0]]
        for trace in figure["series"]:
            if trace.get("run") in (None, "mean"):
                continue
            key = keys[trace["panel"]]
            want = {row["step"]: value_in(row, key) for row in rows_of(every_task, trace["run"])}
            assert dict(zip(trace["x"], trace["y"], strict=True)) == want
            drawn += 1
    runs = 2 * 2  # architectures, seeds
    assert drawn == {"curves": runs * (2 + 4 + 1 + 1 + 3 + 2) + 2 * runs * 6, "measures": runs + 2 * runs * 2}[chart]


def test_each_task_has_its_own_pictures(figures):
    common = {f"{chart}-{number}" for chart in ("curves", "loss") for number in range(7)}
    assert common <= set(figures)
    assert set(figures) - common == {
        "final-2-1", "final-2-2", "measures-5", "sizes-6", "measures-6", "final-6-1",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "scale"), [("final-2-1", "depth"), ("final-2-2", "nodes")])
def test_final_charts_hold_the_mean_over_seeds_of_the_last_rows(every_task, figures, name, scale):
    task = SECTIONS[int(name.split("-")[1])]
    keys = [f"{k}={v}" for k, v in EVERY_TASK[task][1] if k == scale]
    for trace in figures[name]["series"]:
        assert trace["x"] == [slice_label(TaskInfo(task), key) for key in keys]
        runs = [f"{task}-{trace['name']}-64000-lr0.003-seed{seed}" for seed in (0, 1)]
        last = [rows_of(every_task, run)[-1] for run in runs]
        values = [[value_in(row, key) for row in last] for key in keys]
        assert trace["y"] == pytest.approx([statistics.fmean(pair) for pair in values])
        assert trace["high"] == [None] * len(values)  # two seeds have no interval


def test_bits_per_parameter_over_model_sizes_and_their_bound(every_task, figures):
    bound, *families = figures["sizes-6"]["series"]
    assert bound["name"] == BOUND
    assert [x * y for x, y in zip(bound["x"], bound["y"], strict=True)] == pytest.approx(
        [65.0 * 1000] * len(bound["x"])
    )
    assert [trace["name"] for trace in families] == ["llama", "llama+canon"]
    for trace, sizes in zip(families, ([40_000, 160_000], [40_500, 162_000]), strict=True):
        assert trace["x"] == sizes
        for size, value in zip((40_000, 160_000), trace["y"], strict=True):
            runs = [f"capo-{trace['name']}-{size}-lr0.003-seed{seed}" for seed in (0, 1)]
            bits = [rows_of(every_task, run)[-1]["measures"]["bits_per_parameter"] for run in runs]
            assert value == pytest.approx(statistics.fmean(bits))


def test_bounds_are_dashed_lines_and_kl_is_drawn_on_a_log_axis(figures):
    levels = [trace for trace in figures["measures-6"]["series"] if trace["name"] == BOUND]
    assert {trace["dash"] for trace in levels} == {"dash"}
    assert sorted(trace["y"][0] for trace in levels) == pytest.approx(
        [65e3 / n for n in (162e3, 160e3, 40.5e3, 40e3)] + [65.0]
    )
    [panel] = figures["measures-5"]["panels"]
    assert panel["y"]["log"]
    low, high = panel["y"]["range"]
    drawn = [y for trace in figures["measures-5"]["series"] for y in trace["y"]]
    assert 10**low < min(drawn) < max(drawn) < 10**high


def test_a_bound_far_above_the_curves_does_not_flatten_them(run_folder):
    for name, most, top in (("near", 2.5, 2.5), ("far", 400.0, 1.0)):
        measures = {"bits_per_person": 1.0, "bits_per_person_at_most": most}
        row = evaluation(5, {("attribute", "field"): (1, 2)}, measures=measures)
        archs = summarise(load_play(run_folder(name, task={"name": "capo"}, evals=[row])).sections[0].runs)
        figure = learning_curves(archs, ["bits_per_person"], {})
        assert figure["series"][0]["y"] == [most, most]
        assert top < figure["panels"][0]["y"]["range"][1] < 1.2 * top


@pytest.mark.parametrize("values", [(-2.2, -0.98), (-1.0, 0.0), (-1.0, 2.0), (0.0, 0.0), (1.0, 2.0)])
def test_every_value_of_a_measure_is_in_its_chart(run_folder, values):
    rows = [evaluation(10 * (i + 1), {("k", 1): (5, 10)}, measures={"luck": value}) for i, value in enumerate(values)]
    for seed in (0, 1):
        folder = run_folder(f"seed{seed}", seed=seed, evals=rows).parent
    [axis] = [panel["y"] for chart in charts(page_of(folder)).values() for panel in chart["panels"]
              if panel["title"] == "luck"]  # fmt: skip
    low, high = axis["range"]
    assert low <= min(*values, 0) <= max(*values, 0) <= high
    assert low < high


def test_the_hover_of_a_run_shows_its_answers(run_folder):
    rows = [evaluation(step, {("from", "start"): (n, 40), ("from", "cut"): (1, 2)}, measures={"kl": 0.5})
            for step, n in ((0, 0), (5, 31))]  # fmt: skip
    archs = summarise(load_play(run_folder(task={"name": "lano"}, evals=rows)).sections[0].runs)
    trace = learning_curves(archs, ["from=start"], {})["series"][0]
    low, high = wilson(Count(31, 40))
    assert f"31 of 40; 95% interval {100 * low:.1f}% to {100 * high:.1f}%" in trace["hover"][1]
    assert "low" not in trace  # one run says nothing about others


def test_the_hover_of_an_unfinished_run_is_rounded_as_the_tables_are(run_folder):
    folder = run_folder(evals=[evaluation(5, {("k", 1): (144, 256)})], steps=9, finished=False).parent
    [one] = charts(page_of(folder))["curves-0"]["series"]
    assert one["hover"] == ["run\nstep 5: 56.2%"]  # not the 56.3% of a browser


def test_the_headline_of_lano_is_generation_from_the_start(tmp_path):
    """By the mean with sentences after a cut, the other rate would be the best: 0.75 and 0.7 against 0.6 and 0.9."""
    counts = {0.001: [(14, 16), (15, 15)], 0.003: [(12, 18), (11, 19)]}  # (start, cut) of 20, two seeds
    for lr, seeds in counts.items():
        for seed, (start, cut) in enumerate(seeds):
            row = evaluation(5, {("from", "start"): (start, 20), ("from", "cut"): (cut, 20)})
            write_run(tmp_path / "runs" / f"{lr}-{seed}", lr=lr, seed=seed, task=LANO, evals=[row])
    [arch] = summarise(load_play(tmp_path).sections[0].runs)
    assert (arch.score, arch.best.lr) == ("from=start", 0.001)
    assert arch.best.mean == pytest.approx((14 / 20 + 15 / 20) / 2)
    assert arch.best.slices["from=cut"].mean == pytest.approx((16 / 20 + 15 / 20) / 2)
    numbers, _ = runs_frame([tmp_path])
    shares = {(row["lr"], row["seed"], row["slice"]): row["value"] for row in numbers.iter_rows(named=True)
              if row["metric"] == "accuracy"}  # fmt: skip
    for lr, seeds in counts.items():
        for seed, (start, cut) in enumerate(seeds):
            of_run = (shares[lr, seed, where] for where in ("all", "from=start", "from=cut"))
            assert [*of_run] == pytest.approx([5 * start, 5 * start, 5 * cut])
    text = page_of(tmp_path)
    assert "with the highest accuracy (from the start), averaged over seeds" in visible_text(text)


def test_results_of_earlier_versions_averaged_both_kinds_of_generation(tmp_path):
    scores = [("accuracy", 0.94, 0.01, 40, {}), ("accuracy", 0.9, 0.02, 20, {"from": "start"}),
              ("accuracy", 0.98, 0.01, 20, {"from": "cut"}), ("kl", 0.01, None, None, {})]  # fmt: skip
    keys = ("measure", "value", "stderr", "n", "slice")
    entry = {"suite": "playground", "name": "lano", "settings": {"task": LANO},
             "scores": [dict(zip(keys, score, strict=True)) for score in scores]}  # fmt: skip
    (tmp_path / "results.json").write_text(json.dumps({"model": {"source": "mine"}, "results": [entry]}))
    result = {
        (row["slice"], row["metric"]): (row["value"], row["total"]) for row in runs_frame([tmp_path])[0].to_dicts()
    }
    assert result["all", "accuracy"] == result["from=start", "accuracy"] == (90.0, 20)
    assert result["from=cut", "accuracy"] == (98.0, 20)
    [(_, _, [cell]), _] = rows_of_suite(load_play(tmp_path).evaluated, "playground")
    assert cell == "90.0% ± 2.0"


@pytest.mark.parametrize(("keys", "kind"), [(5, "bar"), (6, "bold")])
def test_a_scale_with_many_values_is_a_line(run_folder, keys, kind):
    row = evaluation(5, {("depth", d): (1, 2) for d in range(keys)})
    archs = summarise(load_play(run_folder(task={"name": "brevo"}, evals=[row])).sections[0].runs)
    assert final_chart(archs, [f"depth={d}" for d in range(keys)], {})["series"][0]["kind"] == kind
    words = [f"attribute={name}" for name in "abcdefg"]
    assert final_chart(archs, words, {})["series"][0]["kind"] == "bar"


@pytest.mark.parametrize(("trained", "chart"), [(16, "lengths-0"), (32, "curves-0")])
def test_scores_against_lengths_come_first_where_the_test_has_untrained_ones(run_folder, trained, chart):
    right = {8: 90, 16: 70, 32: 55}
    row = evaluation(5, {("n", n): (correct, 100) for n, correct in right.items()})
    folder = run_folder(task={"name": "parity", "N": trained, "test_lengths": [*right]}, evals=[row])
    drawn = charts(page_of(folder))
    assert next(iter(drawn)) == chart
    line, scores = drawn["lengths-0"]["series"]
    assert line["x"] == [trained, trained]
    assert (scores["x"], scores["y"]) == ([*right], [0.9, 0.7, 0.55])


@pytest.mark.parametrize(
    ("task", "scale"),
    [
        ({"name": "recall", "pairs": 32, "train_pairs": 16}, "pairs"),
        ({"name": "recall", "pairs": 16, "train_pairs": None}, "pairs"),
        ({"name": "copying", "N": 16, "max_items": None}, "n"),
        ({"name": "copying", "N": 32, "max_items": 16}, "n"),
    ],
)
def test_the_largest_size_of_training_may_be_in_one_of_two_settings(run_folder, task, scale):
    row = evaluation(5, {(scale, n): (1, 2) for n in (8, 16, 32)})
    drawn = charts(page_of(run_folder(task=task, evals=[row])))
    assert drawn["lengths-0"]["series"][0]["x"] == [16, 16]


@pytest.mark.parametrize(("task", "sizes"), [({"N": 16}, [16]), ({"N": "16"}, [8, 16]), ({}, [8, 16])])
def test_one_size_or_a_damaged_configuration_has_no_such_chart(run_folder, task, sizes):
    row = evaluation(5, {("n", n): (1, 2) for n in sizes})
    folder = run_folder(task={"name": "parity", **task}, evals=[row])
    assert "lengths-0" not in charts(page_of(folder))


def test_a_measure_with_zeros_or_gaps_is_drawn_where_possible(run_folder):
    rows = [evaluation(step, {("from", "start"): (1, 2)}, measures=kl) for step, kl in
            ((0, None), (1, {"kl": 0.5}), (2, {"kl": float("nan")}), (3, {"kl": 0.0}))]  # fmt: skip
    archs = summarise(load_play(run_folder(task={"name": "lano"}, evals=rows)).sections[0].runs)
    figure = learning_curves(archs, ["kl"], {})
    [trace], [panel] = figure["series"], figure["panels"]
    assert (trace["x"], trace["y"]) == ([1, 3], [0.5, 0.0])
    assert "log" not in panel["y"]  # a zero cannot be shown there
    assert math.isclose(panel["y"]["range"][1], 0.55)


def test_rows_of_versions_without_measures(tmp_path):
    names = set(charts(page_of(write_every_task(tmp_path, measures=False, sizes=(40_000,), seeds=(0,)))))
    assert {"curves-5", "curves-6", "final-6-1"} <= names
    assert not [name for name in names if name.startswith(("measures", "sizes"))]


def test_old_and_new_rows_and_damaged_measures_side_by_side(tmp_path):
    slices = {("attribute", "field"): (1, 2), ("question", "field"): (1, 4)}
    for number, measures in enumerate(
        [None, {"bits_per_parameter": float("nan")}, {"bits_per_parameter": 1.5}, "broken", {"odd <b>": 3}]
    ):
        rows = [evaluation(step, slices, measures=measures) for step in (0, 5)]
        write_run(tmp_path / "runs" / f"run{number}", task={"name": "capo"}, seed=number, evals=rows)
    page = page_of(tmp_path)
    lines = [line for line in numbers(page) if line["kind"] == "final"]
    assert {line["run"] for line in lines} == {f"run{number}" for number in range(5)}
    measures = [(line["run"], line["metric"], float(line["value"])) for line in lines if line["value"]]
    measures = [each for each in measures if each[1] in ("bits_per_parameter", "odd <b>")]
    assert measures == [("run2", "bits_per_parameter", 1.5), ("run4", "odd <b>", 3.0)]
    assert "<b>" not in page.partition('id="plotly"')[0].replace("<b>${", "").replace("<b>%{", "")
    assert "run1: bits_per_parameter of the final evaluation is not a finite number" in visible_text(page)
    assert "1.5" in printed(tmp_path, width=160)


def test_only_equal_sizes_are_compared(page):
    assert "llama+canon (4L 64d) − llama (4L 64d)" in page
    assert "llama+canon (4L 128d) − llama (4L 128d)" in page
    assert "llama+canon (4L 128d) − llama (4L 64d)" not in page


def test_a_size_chart_shows_accuracy_where_it_is_the_score(tmp_path):
    for size, right in ((1_000, 20), (4_000, 80)):
        row = evaluation(5, {("k", 1): (right, 100), ("k", 2): (0, 100)})
        write_run(tmp_path / "runs" / f"depo-{size}", evals=[row], params=size, config={"model": {"size": size}})
    figure = size_curves(summarise(load_play(tmp_path).sections[0].runs))
    drawn = [(trace["name"], trace["x"], trace["y"]) for trace in figure["series"]]
    assert drawn == [("llama", [1_000, 4_000], [0.1, 0.4])]
    assert "sizes-0" in charts(page_of(tmp_path))


def test_a_long_interval_does_not_flatten_the_size_chart(tmp_path):
    """Bits 1, 1.5 and 3 over three seeds: from −0.75 to 4.42, on a logarithmic axis from 1 to 3."""
    for size in (1_000, 4_000):
        for seed, bits in enumerate((1.0, 1.5, 3.0)):
            row = evaluation(5, {("attribute", "field"): (1, 2)}, measures={"bits_per_parameter": bits})
            write_run(tmp_path / f"{size}-{seed}", seed=seed, evals=[row], params=size, task={"name": "capo"},
                      config={"model": {"size": size}})  # fmt: skip
    figure = size_curves(summarise(load_play(tmp_path).sections[0].runs))
    [trace], [panel] = figure["series"], figure["panels"]
    low, high = panel["y"]["range"]
    assert panel["y"]["log"]
    assert -0.1 < low < 0 < high < math.log10(3) + 0.1
    assert trace["y"] == pytest.approx([5.5 / 3, 5.5 / 3])
    assert trace["low"] == [pytest.approx(10 ** (low - 1))] * 2  # below the axis and above zero
    half = stats.t.ppf(0.975, 2) * stats.sem([1.0, 1.5, 3.0])
    assert trace["high"][0] - 5.5 / 3 == pytest.approx(half)
    assert "95% interval over 3 runs: −0.752 to 4.42\nsingle runs: 1–3" in trace["hover"][0]


def test_every_number_shows_its_number_of_runs(tmp_path):
    """One of three runs has no bits, and the tables by scale have no column for the number of runs."""
    for arch, right in (("llama", 10), ("llama+canon", 60)):
        for seed in range(3):
            slices = {("attribute", "field"): (right + seed, 100), ("question", "field"): (right, 100)}
            bits = {"bits_per_parameter": float("nan") if seed == 2 and arch == "llama" else right + seed}
            write_run(tmp_path / "runs" / f"{arch}{seed}", arch=arch, seed=seed, task={"name": "capo"},
                      evals=[evaluation(5, slices, measures=bits)])  # fmt: skip
    page = page_of(tmp_path)
    cells = {cell for each in tables_of(page) for row in each for cell in row}
    assert "10.5\n10, 11, 2 runs" in cells
    assert "2 runs; single runs: 10–11" in visible_text(page)
    low, high = (100 * end for end in gaffke_interval([0.1, 0.11, 0.12]))
    assert f"11.0%\n{low:.1f}–{high:.1f}%" in cells
    assert "+50\nno interval, 2 pairs" in cells
    assert {"llama, 3 runs", "llama+canon − llama, 3 pairs"} <= cells
    low, high = (100 * end for end in gaffke_interval([0.1, 0.1, 0.1]))
    assert f"95% interval over 3 runs: {low:.1f}–{high:.1f}%" in visible_text(page)
    for words in ("10, 11, 2 runs", "3 runs", "Small: 95% interval"):
        assert words in printed(tmp_path, width=160)


def test_the_terminal_shows_the_same(every_task):
    text = printed(every_task, width=170)
    for words in ("divergence (KL)", "bits per parameter", "after 50 given tokens", "Brevo: by depth of the question",
                  "9–16 to list", "birth city, asked", "llama+canon (4L 64d)", "8 pairs",
                  "best: the highest bits per parameter, averaged over seeds"):  # fmt: skip
        assert words in text
    last = [rows_of(every_task, f"lano-llama-64000-lr0.003-seed{seed}")[-1]["measures"]["kl"] for seed in (0, 1)]
    assert f"{statistics.fmean(last):.3g}" in text
    assert f"{last[0]:.3g}, {last[1]:.3g}" in text


def test_many_slices_have_rows_and_not_columns_in_a_terminal(run_folder):
    rows = {hops: evaluation(5, {("k", k): (k, 10) for k in range(1, hops + 1)}) for hops in (4, 9)}
    few, many = (printed(run_folder(f"hops{hops}", evals=[row]), width=110) for hops, row in rows.items())
    assert "mean accuracy ┃" not in few
    assert "by number of hops" not in few
    assert "…" not in few + many
    for text in ("mean accuracy ┃", "50.0%", "by number of hops", "9 hops", "90.0%"):
        assert text in many
