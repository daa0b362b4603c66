"""One page for all tasks: its charts, tables and data are the rows of the runs, whatever the task reports."""

import base64
import csv
import io
import json
import math
import re
import statistics

import pytest
from folders import EVERY_TASK, evaluation, write_every_task, write_run
from rich.console import Console
from scipy import stats

from canonlm.report import load_play, numbers_csv, summarise, tables, wilson, write_report
from canonlm.report.charts import BOUND, final_chart, learning_curves, size_curves
from canonlm.report.words import slice_label
from canonlm.runs.rows import Count

SECTIONS = list(EVERY_TASK)


def script(page, name):
    """JSON as a browser reads it: NaN is an error."""

    def refuse(text):
        raise ValueError(text)

    text = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)[1]
    return json.loads(text, parse_constant=refuse)


def rows_of(folder, run):
    lines = (folder / "runs" / run / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == "eval"]


def value_in(row, key):
    """Of a row as it stands in the file."""
    found = {f"{k}={v}": part["correct"] / part["total"] for part in row["slices"] for k, v in part["slice"].items()}
    return (found | row.get("measures", {})).get(key)


@pytest.fixture(scope="module")
def page(every_task):
    return write_report(every_task).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def figures(page):
    return {figure["id"]: figure for figure in script(page, "report-figures")}


def test_the_data_inside_the_page_is_every_row(every_task, page):
    runs = [run for section in script(page, "report-data")["sections"] for run in section["runs"]]
    assert len(runs) == len(list((every_task / "runs").iterdir()))
    for run in runs:
        rows = rows_of(every_task, run["name"])
        for seen, row in zip(run["evals"], rows, strict=True):
            slices = {f"{k}={v}": [part["correct"], part["total"]] for part in row["slices"]
                      for k, v in part["slice"].items()}  # fmt: skip
            assert seen["slices"] == slices
            assert seen.get("measures", {}) == row.get("measures", {})
        assert run["final"] == run["evals"][-1]


def test_the_csv_has_a_line_per_measure(every_task):
    lines = list(csv.DictReader(io.StringIO(numbers_csv(load_play(every_task)))))
    name = "lano-llama+canon-64000-lr0.003-seed1"
    seen = {int(line["step"]): float(line["value"]) for line in lines
            if line["run"] == name and line["measure"] == "kl" and line["row"] == "eval"}  # fmt: skip
    assert seen == {row["step"]: row["measures"]["kl"] for row in rows_of(every_task, name)}
    capo = [line for line in lines if line["measure"] == "bits_per_parameter" and line["row"] == "final"]
    assert {line["parameters"] for line in capo} == {"40000", "40500", "160000", "162000"}
    assert all((line["slice"] == "") == (line["measure"] != "") for line in lines)


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
        for trace in figure["data"]:
            if trace.get("meta") in (None, "mean"):
                continue
            key = keys[int(trace["xaxis"][1:] or 1) - 1]
            want = {row["step"]: value_in(row, key) for row in rows_of(every_task, trace["meta"])}
            assert dict(zip(trace["x"], trace["y"], strict=True)) == want
            drawn += 1
    runs = 2 * 2  # architectures, seeds
    assert drawn == {"curves": runs * (2 + 4 + 1 + 1 + 3 + 2) + 2 * runs * 6, "measures": runs + 2 * runs * 2}[chart]


def test_each_task_has_its_own_pictures(figures):
    common = {f"{chart}-{number}" for chart in ("curves", "loss") for number in range(7)}
    assert common <= set(figures)
    assert set(figures) - common == {
        "final-0-0", "final-1-0", "final-2-1", "final-2-2", "final-4-0", "measures-5", "final-5-0",
        "sizes-6", "measures-6", "final-6-0", "final-6-1",
    }  # fmt: skip


@pytest.mark.parametrize(("name", "scale"), [("final-2-1", "depth"), ("final-2-2", "nodes"), ("final-4-0", "pairs")])
def test_final_charts_hold_the_mean_over_seeds_of_the_last_rows(every_task, figures, name, scale):
    task = SECTIONS[int(name.split("-")[1])]
    keys = [f"{k}={v}" for k, v in EVERY_TASK[task][1] if k == scale]
    for trace in figures[name]["data"]:
        assert trace["x"] == [slice_label(task, key) for key in keys]
        runs = [f"{task}-{trace['name']}-64000-lr0.003-seed{seed}" for seed in (0, 1)]
        last = [rows_of(every_task, run)[-1] for run in runs]
        values = [[value_in(row, key) for row in last] for key in keys]
        assert trace["y"] == pytest.approx([statistics.fmean(pair) for pair in values])
        whiskers = [y + up for y, up in zip(trace["y"], trace["error_y"]["array"], strict=True)]
        ends = [min(1.0, statistics.fmean(pair) + stats.t.ppf(0.975, 1) * stats.sem(pair)) for pair in values]
        tied = [stats.binomtest(round(500 * a), 500).proportion_ci(0.95, "wilson").high for a, _ in values]
        assert whiskers == pytest.approx(
            [end if a != b else tie for (a, b), end, tie in zip(values, ends, tied, strict=True)], abs=1e-6
        )


def test_bits_per_parameter_over_model_sizes_below_what_there_is_to_store(every_task, figures):
    bound, *families = figures["sizes-6"]["data"]
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
    levels = [trace for trace in figures["measures-6"]["data"] if trace["name"] == BOUND]
    assert {trace["line"]["dash"] for trace in levels} == {"dash"}
    assert sorted(trace["y"][0] for trace in levels) == pytest.approx(
        [65e3 / n for n in (162e3, 160e3, 40.5e3, 40e3)] + [65.0]
    )
    assert figures["measures-5"]["wide"]["yaxis"]["type"] == "log"
    low, high = figures["measures-5"]["wide"]["yaxis"]["range"]
    drawn = [y for trace in figures["measures-5"]["data"] for y in trace["y"]]
    assert 10**low < min(drawn) < max(drawn) < 10**high


def test_a_bound_far_above_the_curves_does_not_flatten_them(run_folder):
    for name, most, top in (("near", 2.5, 2.5), ("far", 400.0, 1.0)):
        measures = {"bits_per_person": 1.0, "bits_per_person_at_most": most}
        row = evaluation(5, {("attribute", "field"): (1, 2)}, measures=measures)
        archs = summarise(load_play(run_folder(name, task={"name": "capo"}, evals=[row])).sections[0].runs)
        figure = learning_curves(archs, ["bits_per_person"])
        assert figure.data[0].y == (most, most)
        assert top < figure.layout.yaxis.range[1] < 1.2 * top


def test_a_single_run_shows_its_wilson_interval(run_folder):
    rows = [evaluation(step, {("from", "start"): (n, 40), ("from", "cut"): (1, 2)}, measures={"kl": 0.5})
            for step, n in ((0, 0), (5, 31))]  # fmt: skip
    archs = summarise(load_play(run_folder(task={"name": "lano"}, evals=rows)).sections[0].runs)
    trace = learning_curves(archs, ["from=start"]).data[0]
    low, high = wilson(Count(31, 40))
    assert trace.y[1] + trace.error_y.array[1] == pytest.approx(high)
    assert trace.y[1] - trace.error_y.arrayminus[1] == pytest.approx(low)
    assert "31 of 40; 95% interval" in trace.hovertext[1]
    assert learning_curves(archs, ["kl"]).data[0].error_y.array is None


@pytest.mark.parametrize(("keys", "kind"), [(5, "bar"), (6, "scatter")])
def test_a_scale_with_many_values_is_a_line(run_folder, keys, kind):
    row = evaluation(5, {("depth", d): (1, 2) for d in range(keys)})
    archs = summarise(load_play(run_folder(task={"name": "brevo"}, evals=[row])).sections[0].runs)
    assert final_chart(archs, [f"depth={d}" for d in range(keys)]).data[0].type == kind
    words = [f"attribute={name}" for name in "abcdefg"]
    assert final_chart(archs, words).data[0].type == "bar"


def test_a_measure_that_is_zero_or_missing_is_drawn_as_far_as_it_goes(run_folder):
    rows = [evaluation(step, {("from", "start"): (1, 2)}, measures=kl) for step, kl in
            ((0, None), (1, {"kl": 0.5}), (2, {"kl": float("nan")}), (3, {"kl": 0.0}))]  # fmt: skip
    archs = summarise(load_play(run_folder(task={"name": "lano"}, evals=rows)).sections[0].runs)
    figure = learning_curves(archs, ["kl"])
    assert (figure.data[0].x, figure.data[0].y) == ((1, 3), (0.5, 0.0))
    assert figure.layout.yaxis.type != "log"  # a zero cannot be shown there
    assert math.isclose(figure.layout.yaxis.range[1], 0.55)


def test_rows_from_before_there_were_measures(tmp_path):
    page = write_report(write_every_task(tmp_path, measures=False, sizes=(40_000,), seeds=(0,)))
    names = {figure["id"] for figure in script(page.read_text(encoding="utf-8"), "report-figures")}
    assert {"curves-5", "curves-6", "final-6-1"} <= names
    assert not [name for name in names if name.startswith(("measures", "sizes"))]


def test_old_and_new_rows_and_damaged_measures_side_by_side(tmp_path):
    slices = {("attribute", "field"): (1, 2), ("question", "field"): (1, 4)}
    for number, measures in enumerate(
        [None, {"bits_per_parameter": float("nan")}, {"bits_per_parameter": 1.5}, "broken", {"odd <b>": 3}]
    ):
        rows = [evaluation(step, slices, measures=measures) for step in (0, 5)]
        write_run(tmp_path / "runs" / f"run{number}", task={"name": "capo"}, seed=number, evals=rows)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    runs = {run["name"]: run["final"].get("measures") for run in script(page, "report-data")["sections"][0]["runs"]}
    assert runs == {
        "run0": None,
        "run1": None,
        "run2": {"bits_per_parameter": 1.5},
        "run3": None,
        "run4": {"odd <b>": 3.0},
    }
    script(page, "report-figures")
    assert "<b>3" not in page
    assert "run1: bits_per_parameter of the final evaluation is no finite number" in page
    console = Console(file=io.StringIO(), width=160)
    console.print(*tables(tmp_path))
    assert "1.5" in console.file.getvalue()


def test_sizes_are_compared_with_their_like(page):
    assert "llama+canon (4L 64d) − llama (4L 64d)" in page
    assert "llama+canon (4L 128d) − llama (4L 128d)" in page
    assert "llama+canon (4L 128d) − llama (4L 64d)" not in page


def test_a_size_chart_by_accuracy_where_the_score_is_one(tmp_path):
    for size, right in ((1_000, 20), (4_000, 80)):
        row = evaluation(5, {("k", 1): (right, 100), ("k", 2): (0, 100)})
        write_run(tmp_path / "runs" / f"depo-{size}", evals=[row], params=size, config={"model": {"size": size}})
    figure = size_curves(summarise(load_play(tmp_path).sections[0].runs))
    assert [(trace.name, trace.x, trace.y) for trace in figure.data] == [("llama", (1_000, 4_000), (0.1, 0.4))]
    assert "sizes-0" in write_report(tmp_path).read_text(encoding="utf-8")


def test_a_long_interval_does_not_flatten_the_size_chart(tmp_path):
    """Bits 1 and 2 over two seeds: from −4.9 to 7.9, on a logarithmic axis from 1 to 2."""
    for size in (1_000, 4_000):
        for seed, bits in enumerate((1.0, 2.0)):
            row = evaluation(5, {("attribute", "field"): (1, 2)}, measures={"bits_per_parameter": bits})
            write_run(tmp_path / f"{size}-{seed}", seed=seed, evals=[row], params=size, task={"name": "capo"},
                      config={"model": {"size": size}})  # fmt: skip
    figure = size_curves(summarise(load_play(tmp_path).sections[0].runs))
    (trace,) = figure.data
    low, high = figure.layout.yaxis.range
    assert figure.layout.yaxis.type == "log"
    assert -0.1 < low < 0 < high < math.log10(2) + 0.1
    assert trace.y == (1.5, 1.5)
    assert [y - down for y, down in zip(trace.y, trace.error_y.arrayminus, strict=True)] == [
        pytest.approx(10 ** (low - 1))
    ] * 2  # below the axis and above zero
    assert trace.error_y.array[0] == pytest.approx(stats.t.ppf(0.975, 1) * 0.5)
    assert "95% t-interval over 2 runs: −4.85 to 7.85<br>single runs: 1–2" in trace.hovertext[0]


def test_every_number_says_how_many_runs_are_behind_it(tmp_path):
    """Where one of three runs has no bits, and in the tables by scale, which have no column for it."""
    for arch, right in (("llama", 10), ("llama+canon", 60)):
        for seed in range(3):
            slices = {("attribute", "field"): (right + seed, 100), ("question", "field"): (right, 100)}
            bits = {"bits_per_parameter": float("nan") if seed == 2 and arch == "llama" else right + seed}
            write_run(tmp_path / "runs" / f"{arch}{seed}", arch=arch, seed=seed, task={"name": "capo"},
                      evals=[evaluation(5, slices, measures=bits)])  # fmt: skip
    page = write_report(tmp_path).read_text(encoding="utf-8")
    assert ">10.5<small>4.15–16.9, 2 runs</small>" in page
    assert 'title="95% t-interval over 2 runs: 4.15–16.9; single runs: 10–11"' in page
    assert ">11.0%<small>8.5–13.5%</small>" in page
    assert ">+50<small>all equal, 2 pairs</small>" in page
    assert "<th scope=col>llama, 3 runs</th>" in page
    assert "<th scope=col>llama+canon − llama, 3 pairs</th>" in page
    assert 'title="95% interval of 3 equal runs: 7.1–13.9%"' in page
    console = Console(file=io.StringIO(), width=160)
    console.print(*tables(tmp_path))
    for words in ("4.15–16.9, 2 runs", "3 runs", "small: 95% interval"):
        assert words in console.file.getvalue()


def test_the_terminal_says_the_same(every_task):
    console = Console(file=io.StringIO(), width=170)
    for part in tables(every_task):
        console.print(part)
    text = console.file.getvalue()
    for words in ("divergence (KL)", "bits per parameter", "after 50 given tokens", "Brevo: by depth of the question",
                  "9–16 to list", "birth city, asked", "llama+canon (4L 64d)", "8 pairs",
                  "* best rate: highest bits per parameter, averaged over seeds"):  # fmt: skip
        assert words in text
    last = [rows_of(every_task, f"lano-llama-64000-lr0.003-seed{seed}")[-1]["measures"]["kl"] for seed in (0, 1)]
    assert f"{statistics.fmean(last):.3g}" in text
    half = stats.t.ppf(0.975, 1) * stats.sem(last)
    assert f"{statistics.fmean(last) - half:.3g}–{statistics.fmean(last) + half:.3g}" in text


def test_many_slices_have_rows_and_not_columns_in_a_terminal(run_folder):
    def console(hops):
        row = evaluation(5, {("k", k): (k, 10) for k in range(1, hops + 1)})
        console = Console(file=io.StringIO(), width=110)
        for part in tables(run_folder(f"hops{hops}", evals=[row])):
            console.print(part)
        return console.file.getvalue()

    few, many = console(4), console(9)
    assert "mean accuracy" not in few
    assert "by number of hops" not in few
    assert "…" not in few + many
    for text in ("mean accuracy", "50.0%", "by number of hops", "9 hops", "90.0%"):
        assert text in many


def test_the_download_on_the_page_is_the_csv(every_task, page):
    sheet = re.search(r"base64,([A-Za-z0-9+/=]+)", page)[1]
    assert base64.b64decode(sheet).decode() == numbers_csv(load_play(every_task))
