"""The page of results in a real browser: actions of a reader, and what the page then shows."""

import csv
import io
from statistics import fmean

import polars as pl
import pytest
from browsing import (
    MARKS,
    PAPER,
    WIDEST,
    ask,
    check,
    count,
    errors,
    load,
    open_all,
    printed,
    resize,
    show_paper,
    until,
    wait_for_charts,
)
from folders import evaluation, write_run
from scipy import stats

from canonlm.launch.recipes import load_preset
from canonlm.report import figures, published, results_figures, results_page, results_payload, tidy
from canonlm.runs.gather import gather
from canonlm.runs.identity import flat
from canonlm.train.config import resolve

pytestmark = MARKS

MEAN_OF_LLAMA = "Llama, without Canon, 4L128D, 150K tokens, learning rate 0.001, mean over seeds"
PANELS = "document.getElementById('curves-chart').layout.annotations.length"
CELLS = """[...document.querySelectorAll(`#${arguments[0]}-table tbody tr`)].map(
  row => [...row.cells].map(cell => cell.innerText.trim()))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return results_page.write_results(
        results_payload.beside_the_published([]), tmp_path_factory.mktemp("page") / "results.html"
    )


def show(browser, page, *args):
    load(browser, page, *args, height=9000)  # all charts are near, and so follow every choice at once
    open_all(browser, ".scatterlayer path")


def choose(browser, key, value):
    script = (
        "const s = document.getElementById(arguments[0]); s.value = arguments[1]; s.dispatchEvent(new Event('change'));"
    )
    browser.execute_script(script, key, value)


def tick(browser, name, value):
    script = "document.querySelector(`input[name='${arguments[0]}'][value='${arguments[1]}']`).click()"
    browser.execute_script(script, name, value)


def saved(browser, section):
    """The data that the section's button saves; the download itself goes to the browser's folder."""
    text = ask(browser, "csvOf(document.getElementById(arguments[0]).rows())", f"{section}-csv")
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_renders_without_errors_or_requests_at_any_width(browser, page, width, scheme):
    show(browser, page, width, scheme)
    assert count(browser, ".chart") == 3
    assert ask(browser, PANELS) == 13  # four architectures in three sizes, and Llama with more tokens
    assert ask(browser, "performance.getEntriesByName('first-contentful-paint')[0].startTime") < 2000
    check(browser, width)


def test_paper_has_every_column_and_what_was_chosen(browser, page):
    load(browser, page)
    pages = printed(browser)
    assert any("benchmarks" in line and "short" in line for line in pages[0])
    of_models = [lines for lines in pages if sum("-Nemo-" in line for line in lines) > 5]
    assert len(of_models) > 1
    for lines in of_models:  # each page has the headings
        assert any("MMLU" in line and "babilong_avg20" in line for line in lines)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    show_paper(browser)
    width = "document.getElementById(arguments[0]).scrollWidth"
    assert ask(browser, width, "models-table") <= PAPER[0]
    for group in ask(browser, "[...document.getElementById('models-group').options].map(option => option.value)"):
        choose(browser, "models-group", group)
        assert ask(browser, width, "models-table") <= WIDEST, group
    assert ask(browser, width, "grids-table") <= WIDEST


def test_the_filters_do_not_cover_a_low_window(browser, page):
    position = "getComputedStyle(document.getElementById('bar')).position"
    load(browser, page)
    assert ask(browser, position) == "sticky"
    resize(browser, 720, 450)  # as at 200 %
    assert ask(browser, position) == "static"


def test_every_section_saves_what_it_shows(browser, page, tmp_path):
    show(browser, page)
    frame = tidy.paired(published.published())
    deltas = {
        (row["base_model"], row["task"], row["slice"], row["metric"]): row["delta"]
        for row in frame.iter_rows(named=True)
    }
    choose(browser, "overview-group", "standard")
    rows = saved(browser, "overview")
    assert len(rows) == 32 * 14
    for row in rows:
        assert float(row["delta"]) == deltas[row["base_model"], row["task"], row["slice"], row["metric"]]
    curves = saved(browser, "curves")
    expected = published.curves().filter(pl.col("task") == "hellaswag")["value"].to_list()
    assert sorted(float(row["value"]) for row in curves) == sorted(expected)
    assert {row["task"] for row in saved(browser, "grids")} <= {"depo", "brevo", "mano", "lano"}
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    browser.execute_script("document.getElementById('models-csv').click()")
    file = tmp_path / "canonlm-models.csv"
    assert until(lambda: file.is_file() and file.stat().st_size > 0)
    table = pl.read_csv(file)
    assert set(table["model"]) == set(published.settings()["model"])
    mine = table.filter(pl.col("task") == "mmlu").sort("model")["value"].to_list()
    theirs = published.published().filter(pl.col("task") == "mmlu").sort("model")["value"].to_list()
    assert mine == theirs


def test_a_heading_sorts_with_the_keyboard_too(browser, page):
    from selenium.webdriver.common.keys import Keys

    show(browser, page)
    heads = browser.find_elements("css selector", "#models-table th[scope=col] button")
    labels = [head.text for head in heads]
    heads[labels.index("MMLU")].send_keys(Keys.ENTER)
    place = labels.index("MMLU")

    def column():
        return [float(cells[place]) for cells in ask(browser, CELLS, "models")]

    assert column() == sorted(column(), reverse=True)
    assert len(column()) == 64
    browser.switch_to.active_element.send_keys(Keys.ENTER)  # the focus stays on the heading
    assert column() == sorted(column())
    order = ask(browser, "document.querySelector('#models-table th[aria-sort]').getAttribute('aria-sort')")
    assert order == "ascending"
    assert errors(browser) == []


def test_filters_and_ticks_act_on_every_section(browser, page):
    show(browser, page)
    tick(browser, "arch", "GLA5")
    tick(browser, "size", "8B")
    left = published.settings().filter((pl.col("arch") != "GLA5") & (pl.col("size") != "8B"))
    assert len(ask(browser, CELLS, "models")) == len(left)
    assert {row["model"] for row in saved(browser, "curves")} == set(left["model"])
    assert len({row["canon_model"] for row in saved(browser, "overview")}) == len(left) // 2
    assert ask(browser, PANELS) == 3 * 3 + 1 - 3
    browser.execute_script("document.querySelector('#models-table tbody input').click()")
    assert len({row["model"] for row in saved(browser, "curves")}) == len(left) - 1
    browser.execute_script("document.getElementById('ticked').click()")
    assert len(ask(browser, CELLS, "models")) == len(left)
    box = browser.find_element("id", "named")
    box.send_keys("mamba2canon-3b")
    assert until(lambda: len(ask(browser, CELLS, "models")) == 3)
    assert errors(browser) == []


def test_seeds_become_one_row_with_its_interval(browser, page):
    show(browser, page)
    tick(browser, "source", "paper")
    choose(browser, "models-group", "standard")
    rows = len(ask(browser, CELLS, "models"))
    browser.execute_script("document.getElementById('over-seeds').click()")
    cells = ask(browser, CELLS, "models")
    assert len(cells) == rows - 8 + 1
    [mean] = [row for row in cells if "mean over seeds" in row[0]]
    assert any("8 runs" in cell for cell in mean)


def test_an_unticked_model_counts_in_no_mean(browser, tmp_path):
    """Numbers are rounded as in Python: 144 of 256 is 56.25, and 56.2."""
    for arch, rights in {"llama": (144, 120, 130), "llama+canon": (200, 231, 250)}.items():
        for seed, right in enumerate(rights):
            write_run(
                tmp_path / f"runs/{arch}{seed}", arch=arch, seed=seed, evals=[evaluation(9, {("k", 1): (right, 256)})]
            )
    shown = results_payload.of_runs(gather(tmp_path))
    show(browser, results_page.write_results(shown, tmp_path / "mine.html"))
    assert next(cells for cells in ask(browser, CELLS, "models") if cells[0] == "llama0")[4].startswith("56.2\n")
    gains = [(right - plain) / 2.56 for plain, right in ((144, 200), (120, 231), (130, 250))]
    for seeds in (3, 2):
        mean, (low, high) = fmean(gains[:seeds]), stats.ttest_1samp(gains[:seeds], 0).confidence_interval()
        ends = f"{max(-100, low):+.1f} to {min(100, high):+.1f}".replace("-", "−")
        rows = {cells[0]: cells[-3:] for cells in ask(browser, CELLS, "overview-seeds")}
        assert rows["k=1"] == [f"{mean:+.1f} points", ends, str(seeds)]
        browser.execute_script("document.querySelector('input[aria-label=\"show llama+canon2\"]')?.click()")
    browser.execute_script("document.getElementById('over-seeds').click()")
    names = {cells[0] for cells in ask(browser, CELLS, "models")}
    assert names == {"llama+canon0", "llama+canon1", MEAN_OF_LLAMA}
    browser.execute_script(f"document.querySelector('input[aria-label=\"show {MEAN_OF_LLAMA}\"]').click()")
    assert {cells[0] for cells in ask(browser, CELLS, "models")} == {"llama+canon0", "llama+canon1"}
    assert errors(browser) == []


def test_units_are_those_of_the_numbers(browser, every_task, tmp_path):
    shown = results_payload.of_runs(gather(every_task))
    show(browser, results_page.write_results(shown, tmp_path / "mine.html"))
    [name] = (group for group in ask(browser, "Object.keys(groups)") if group.startswith("capo"))
    choose(browser, "overview-group", name)
    titles = ask(browser, "document.getElementById('overview-chart').layout.annotations.map(title => title.text)")
    assert titles == [f"<b>{title}</b>" for title in results_figures.KINDS_OF_UNIT]
    charts = {chart["id"]: chart for _, chart, _ in figures.drawn(results_figures.html(shown))}
    panels = charts[f"overview-{name}"]["panels"]
    assert tuple(panel["title"] for panel in panels) == results_figures.KINDS_OF_UNIT
    for metric, title in (("accuracy", "percent"), ("bits_per_parameter", "bits_per_parameter"), ("loss", "loss")):
        chosen = ask(browser, f"questions.findIndex(q => q.task === 'capo' && q.metric === '{metric}')")
        choose(browser, "compute-question", str(chosen))
        assert ask(browser, "document.getElementById('compute-chart').layout.yaxis.title.text") == title


def test_best_rates_smoothing_and_a_hover(browser, page):
    show(browser, page)
    choose(browser, "overview-whose", "best")
    assert {row["source"] for row in saved(browser, "overview")} == {"best"}
    lines = "JSON.stringify(document.querySelector('#curves-chart').data[0].y)"
    before, saved_before = ask(browser, lines), saved(browser, "curves")
    choose(browser, "curves-smooth", "9")
    assert ask(browser, lines) != before
    assert saved(browser, "curves") == saved_before  # smoothing is only visual
    browser.execute_script(
        "Plotly.Fx.hover(document.querySelector('#curves-chart'), [{curveNumber: 0, pointNumber: 20}])"
    )
    assert until(lambda: count(browser, "#curves-chart .hovertext") > 0)
    assert "Llama-1B-Nemo-1T-lr0.002" in ask(browser, "document.querySelector('#curves-chart .hovertext').textContent")
    assert errors(browser) == []


def test_two_runs_setting_by_setting(browser, page):
    show(browser, page)
    settings_rows = {row[0]: row[1:] for row in ask(browser, CELLS, "settings")}
    assert settings_rows["rope_dim"] == ["64", "16"]
    assert "layers" not in settings_rows
    browser.execute_script("document.getElementById('settings-all').click()")
    assert "layers" in {row[0] for row in ask(browser, CELLS, "settings")}
    browser.execute_script(
        "const b = document.getElementById('settings-b'); b.value = 'no such'; b.dispatchEvent(new Event('input'));"
    )
    assert ask(browser, "document.getElementById('settings-note').innerText") == "Choose two names from the list."


def test_your_runs_are_shown_beside_the_paper_cell_by_cell(browser, tmp_path):
    nasty = "<img src=x onerror=alert(1)>"
    mine = {"source": "yours", "model": nasty, "arch": "Llama", "canon": "ABCD", "size": "12L768D", "tokens": 10**9,
            "lr": 1e-3, "seed": 0, "task": "depo", "setting": "depo1-225", "slice": "k=8", "metric": "accuracy",
            "unit": "%", "value": 90.0}  # fmt: skip
    numbers = pl.concat([published.grids(), tidy.results([mine])])
    curve = tidy.results([mine | {"tokens": 10**8 * step, "value": 10.0 * step} for step in range(1, 10)])
    preset = resolve({**load_preset("depo", "paper", "depo1-225").run, "arch": "llama+canon"}).model_dump(mode="json")
    settings = {nasty: flat(preset), "short": flat(preset) | {"train.steps": 100}}
    numbers = pl.concat([numbers, tidy.results([mine | {"model": "short", "seed": 1}])])
    path = results_page.write_results(results_payload.Shown(numbers, curve, settings), tmp_path / "mine.html")
    load(browser, path)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert until(lambda: count(browser, "#curves .scatterlayer path") > 0)
    cells = ask(browser, CELLS, "grids")[0]
    assert cells[0].startswith(nasty)
    theirs = published.grids().filter(
        (pl.col("arch") == "Llama") & (pl.col("canon") == "ABCD") & (pl.col("size") == "12L768D")
        & (pl.col("setting") == "depo1-225") & (pl.col("slice") == "k=8")
    )["value"][0]  # fmt: skip
    assert any(
        cell.split() == ["90.0", f"{90 - theirs:+.1f}".replace("-", "−"), "from", "the", "paper's"] for cell in cells
    )
    short = ask(browser, CELLS, "grids")[1]
    assert short[0].startswith("short")
    assert any(cell.split() == ["90.0", "other", "training"] for cell in short)
    titles = ask(browser, "[...document.querySelectorAll('#grids td[title]')].map(c => c.title)")
    large = "model.num_hidden_layers=12 model.hidden_size=768 model.num_attention_heads=12"
    assert f"canonlm play depo --preset paper --difficulty depo2-75-k4 --arch gla-conv {large}" in titles
    text = ask(browser, "document.getElementById('grids-table').innerText")
    assert "not compared: how much rotary embedding" in text
    browser.execute_script("models.forEach((one, i) => one.source === 'paper' && unticked.add(i)); showAll()")
    assert "from the paper's" not in ask(browser, "document.getElementById('grids-table').innerText")
    assert count(browser, "img") == 0
    assert errors(browser) == []


def test_your_pairs_come_first_in_separate_groups(browser, demo, tmp_path):
    path = results_page.write_results(results_payload.beside_the_published(gather(demo)), tmp_path / "mine.html")
    load(browser, path)
    wait_for_charts(browser, ".scatterlayer path")
    rows = saved(browser, "overview")
    assert {row["source"] for row in rows} == {"yours"}
    assert len(rows) > 0
    assert {row["source"] for row in saved(browser, "models")} >= {"yours"}
    choose(browser, "overview-whose", "published")
    assert {row["source"] for row in saved(browser, "overview")} == {"published"}
    assert len(ask(browser, CELLS, "overview-seeds")) == 0
    choose(browser, "overview-whose", "yours")
    seeds = ask(browser, CELLS, "overview-seeds")
    assert {row[-1] for row in seeds} == {"3"}
    assert errors(browser) == []


def test_saved_figures_are_the_charts_of_the_page(browser, page):
    show(browser, page)
    html = results_figures.html(results_payload.beside_the_published([]))
    charts = {chart["id"]: chart for _, chart, _ in figures.drawn(html)}
    for view, name in (("overview", "overview-short"), ("curves", "curves"), ("compute", "compute")):
        script = f"return charts.get(document.getElementById('{view}-chart'))().series"
        ours, theirs = charts[name]["series"], browser.execute_script(script)
        assert [(one["name"], one["panel"]) for one in ours] == [(one["name"], one["panel"]) for one in theirs]
        for one, other in zip(ours, theirs, strict=True):
            assert one["x"] == pytest.approx(other["x"])
            assert one["y"] == pytest.approx(other["y"])
