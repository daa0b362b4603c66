"""The page in a real browser, from disk. Run by `make test-browser`, which installs chromium."""

import re
from xml.etree import ElementTree

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
    set_scheme,
    show_paper,
    until,
    wait_for_charts,
)
from folders import evaluation, text_evaluation, write_run, write_runs, write_text_run
from reading import evals_of

from canonlm.report import blocks, load_play, write_report
from canonlm.report.charts import series_of
from canonlm.report.page import numbers_csv, write_page
from canonlm.report.theme import looks

pytestmark = MARKS


COLORS = """[getComputedStyle(document.querySelector('#curves-0 .xtitle')).fill,
  document.querySelector('#curves-0').layout.paper_bgcolor]"""
TICKS = """[...document.querySelectorAll('.chart')].flatMap(box => Object.entries(box._fullLayout)
  .filter(([key, axis]) => /^[xy]axis/.test(key) && axis.showticklabels !== false)
  .map(([key, axis]) => [box.id, key, axis._vals.map(tick => tick.text).filter(text => text)]))"""
SHOWN = {"light": ["rgb(89, 99, 110)", "#ffffff"], "dark": ["rgb(154, 164, 175)", "#14171a"]}


def show(browser, path, width=1440, scheme="light"):
    load(browser, path, width, scheme)
    assert until(lambda: count(browser, "#curves-0 .scatterlayer path") > 10)


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_every_task_is_drawn_without_errors_or_requests(browser, every_task, width, scheme):
    show(browser, write_report(every_task), width, scheme)
    open_all(browser)
    assert count(browser, ".chart") == 7 + 7 + 6
    check(browser, width)
    assert until(lambda: ask(browser, COLORS) == SHOWN[scheme])
    other = "dark" if scheme == "light" else "light"
    set_scheme(browser, other)  # the page follows
    assert until(lambda: ask(browser, COLORS) == SHOWN[other])
    show_paper(browser)
    assert ask(browser, "Math.max(...[...document.querySelectorAll('table')].map(each => each.scrollWidth))") <= WIDEST


def test_a_click_on_a_name_acts_on_every_panel(browser, demo):
    show(browser, write_report(demo))
    lines = "#curves-1 .scatterlayer .trace"
    before = count(browser, lines)
    browser.execute_script("document.querySelector('#curves-1').parentElement.querySelector('.legend button').click()")
    assert until(lambda: count(browser, lines) == before - 4 * (3 + 1))
    # hidden traces stay hidden after a new layout
    resize(browser, 390)
    assert until(lambda: ask(browser, "document.querySelector('#curves-1').layout.width < 400"))
    assert count(browser, lines) == before - 4 * (3 + 1)


def test_charts_are_drawn_when_the_reader_comes_near(browser, every_task):
    """The others take the space that they will have, so that nothing moves; on paper all are drawn."""
    load(browser, write_report(every_task))
    each = "[...document.querySelectorAll('.chart')].filter(box => box.checkVisibility()).map(box => {}).slice(-5)"
    drawn, heights = each.format("!!box.layout"), each.format("box.clientHeight")
    assert until(lambda: min(ask(browser, heights)) > 200)
    before = ask(browser, heights)
    assert not any(ask(browser, drawn))
    browser.execute_script("scrollTo(0, document.body.scrollHeight)")
    assert until(lambda: ask(browser, drawn)[-1])
    assert not ask(browser, drawn)[0]
    browser.execute_script("dispatchEvent(new Event('beforeprint')); dispatchEvent(new Event('afterprint'))")
    assert all(ask(browser, drawn))
    assert until(lambda: ask(browser, heights) == before)


def test_charts_and_tables_are_saved_for_a_paper(browser, demo, tmp_path):
    """As SVG and PNG, on white with the legend even from a dark page; as LaTeX, with nothing that TeX would read."""
    nasty = r"\input{x} 50% & $a_b^c$ #1 ~{} a−b <c>"
    write_run(tmp_path / "runs" / "one", arch=nasty, evals=[evaluation(10, {("k", 1): (32, 64)})])
    browser.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(tmp_path)})
    show(browser, write_report(demo), scheme="dark")
    wait_for_charts(browser)
    browser.execute_script("document.querySelectorAll('#curves-1 ~ .saves button').forEach(each => each.click())")
    files = {f"curves-1.{kind}" for kind in ("csv", "svg", "png")}
    assert until(lambda: files <= {file.name for file in tmp_path.iterdir()})
    svg = (tmp_path / "curves-1.svg").read_text()
    texts = "".join(ElementTree.fromstring(svg).itertext())
    assert all(name in texts for name in ("llama+canon", "chance", "4 hops"))
    assert "rgb(255, 255, 255)" in svg
    assert (tmp_path / "curves-1.png").read_bytes().startswith(b"\x89PNG")
    browser.execute_script("document.querySelector('#sheet').click()")
    assert until((tmp_path / "report.csv").exists)
    assert (tmp_path / "report.csv").read_bytes().decode() == numbers_csv(load_play(demo))
    load(browser, write_report(tmp_path / "runs"))
    latex = ask(browser, "latexOf(document.querySelector('table'))")
    head, _, row, *_ = [line for line in latex.splitlines() if "&" in line or "rule" in line][1:]
    assert row.startswith(
        r"\textbackslash{}input\{x\} 50\% \& \$a\_b\textasciicircum{}c\$ \#1 \textasciitilde{}\{\} a$-$b "
        r"\textless{}c\textgreater{} & "
    )
    cells = [len(re.findall(r"(?<!\\)&", line)) for line in (head, row)]
    assert cells[0] == cells[1] == latex.count("r", latex.index("{l"), latex.index("}", latex.index("{l")))
    assert errors(browser) == []


def test_a_chart_saves_its_points(browser, demo):
    show(browser, write_report(demo))
    rows = ask(browser, "document.querySelector('#curves-1 ~ .saves .csv').rows()")
    points = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    name = "depo-llama-64000-lr0.003-seed1"
    evals = evals_of(demo / "runs" / name)
    mine = [point for point in points if point["run"] == name]
    assert {point["series"] for point in mine} == {"llama"}
    counts = [(row["step"], entry) for row in evals for entry in row["slices"] if entry["slice"] == {"k": 2}]
    requested_points = {(step, entry["correct"] / entry["total"]) for step, entry in counts}
    panel = [(point["x"], point["y"]) for point in mine if "2" in point["panel"]]
    assert set(panel) == requested_points
    assert len(panel) == len(requested_points)
    assert any(point["about"].startswith("llama, 2 hops; step 1,000: ") for point in mine)


def test_saved_points_have_their_intervals(browser, tmp_path):
    one = series_of("bold", "llama", [(1, 0.5), (2, 0.25)], low=[0.4, None], high=[0.6, None], hover=["a\nb", "c"])
    path = tmp_path / "page.html"
    drawn = {"panels": [{"title": "p", "x": {}, "y": {}}], "series": [one]}
    path.write_text(blocks.page("", [], [blocks.chart("one", "", drawn)], {}), encoding="utf-8")
    load(browser, path)
    assert ask(browser, "pointsOf(page.blocks[0].chart)") == [
        ["panel", "series", "run", "x", "y", "low", "high", "about"],
        ["p", "llama", None, 1, 0.5, 0.4, 0.6, "a; b"],
        ["p", "llama", None, 2, 0.25, None, None, "c"],
    ]


def test_a_keyboard_stays_where_it_is(browser, demo):
    show(browser, write_report(demo))
    press = "const button = document.querySelectorAll('.legend button')[1]; button.focus(); button.click()"
    for pressed in ("false", "true"):
        browser.execute_script(press)
        state = "[document.activeElement.lastChild.textContent, document.activeElement.getAttribute('aria-pressed')]"
        assert ask(browser, state) == ["llama+canon", pressed]


def test_long_names_do_not_cover_numbers(browser, tmp_path):
    name = "deltaproduct2-conv{negative_eigenvalues=true}+canon(canon_residual=false)"
    write_runs(tmp_path, {name: [evaluation(10, {("k", 1): (3, 9)})]})
    for width in (390, 1440):
        load(browser, write_report(tmp_path), width)
        head = "document.querySelector('tbody th')"
        assert ask(browser, f"{head}.textContent") == name
        assert ask(browser, f"{head}.scrollWidth <= {head}.clientWidth")
        check(browser, width)


def test_a_large_fold_is_filled_when_opened_or_searched(browser, tmp_path):
    rows = [[str(row)] for row in range(1001)]
    folds = [block for name, few in (("large", rows), ("small", rows[1:]), ("other", rows))
             for block in blocks.fold(name, [blocks.table(["row"], few)])]  # fmt: skip
    path = tmp_path / "page.html"
    path.write_text(blocks.page("", [], folds, {}), encoding="utf-8")
    load(browser, path)
    filled = "[...document.querySelectorAll('details')].map(fold => fold.querySelectorAll('td, tbody th').length)"
    assert ask(browser, filled) == [0, 1000, 0]
    browser.execute_script("document.querySelector('details').open = true")
    assert until(lambda: ask(browser, filled) == [1001, 1000, 0])
    browser.execute_script("dispatchEvent(new KeyboardEvent('keydown', {key: 'f', ctrlKey: true}))")
    assert ask(browser, filled) == [1001, 1000, 1001]
    browser.execute_script("document.querySelector('details').open = false")
    assert ask(browser, filled) == [1001, 1000, 1001]
    assert errors(browser) == []


def test_a_chart_is_not_taller_than_paper(browser, tmp_path):
    y = {"ticks": [[place, f"claim {place}"] for place in range(60)], "even": True}
    drawn = {
        "height": 22 * 60,
        "panels": [{"title": "", "x": {}, "y": y}],
        "series": [series_of("dots", "llama", [(1, 2)])],
    }
    path = tmp_path / "page.html"
    path.write_text(blocks.page("", [], [blocks.chart("one", "A caption", drawn)], {}), encoding="utf-8")
    load(browser, path)
    assert until(lambda: count(browser, ".main-svg") > 0)
    height = "document.querySelector('figure').getBoundingClientRect().height"
    assert ask(browser, height) > 22 * 60
    show_paper(browser)
    assert PAPER[1] / 2 < ask(browser, height) < PAPER[1]


def test_a_legend_has_the_colours_of_its_chart_in_high_contrast(browser, tmp_path):
    drawn = {"panels": [{"title": "", "x": {}, "y": {}}], "series": [series_of("dots", "llama", [(1, 2)])]}
    path = tmp_path / "page.html"
    path.write_text(blocks.page("", [], [blocks.chart("one", "A caption", drawn)], looks(["llama"])), encoding="utf-8")
    load(browser, path)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "forced-colors", "value": "active"}]})
    assert until(lambda: count(browser, ".legend b") == 1)
    assert ask(browser, "matchMedia('(forced-colors: active)').matches")
    color = "getComputedStyle(document.querySelector(arguments[0])).{}"
    assert ask(browser, color.format("color"), ".legend b") == ask(browser, color.format("stroke"), ".point")


def test_no_printed_page_ends_with_a_title(browser, tmp_path):
    parts = []
    for count_of_rows in range(1, 30):
        rows = blocks.table(["name", "number"], [[f"row {row}", "1"] for row in range(count_of_rows)])
        parts += [{"section": {"title": "Title", "blocks": [{"answer": "Title of the table."}, rows]}}]
        parts += blocks.fold("Title of a fold", [rows], opened=True)
    path = tmp_path / "page.html"
    path.write_text(blocks.page("", [], parts, {}), encoding="utf-8")
    load(browser, path)
    pages = printed(browser)
    assert len(pages) > 10
    for lines in pages:
        assert lines[-1].startswith("row"), lines[-3:]


def test_hostile_names_stay_text(browser, tmp_path):
    nasty = "<img src=x onerror=alert(1)>"
    rows = [
        evaluation(step, {("k", nasty): (step, 20), ("k", "</script>"): (1, 10)}, measures={"<svg onload>": step})
        for step in range(0, 20, 2)
    ]
    for number in range(3):
        write_run(
            tmp_path / "runs" / f"{nasty}{number}", arch=nasty, seed=number, evals=rows, losses=[(5, 1.0), (9, 0.5)]
        )
    show(browser, write_report(tmp_path))
    assert ask(browser, "document.querySelector('.legend button').lastChild.textContent") == nasty
    browser.execute_script("Plotly.Fx.hover('curves-0', [{curveNumber: 0, pointNumber: 3}]);")
    assert until(lambda: count(browser, "#curves-0 .hovertext") > 0)
    hover_text = ask(browser, "document.querySelector('#curves-0 .hovertext').textContent")
    assert nasty in hover_text
    assert "30.0% (6 of 20; 95% interval 11.1% to 59.6%)" in hover_text  # 20 questions count for fewer
    assert count(browser, "img") == 0
    assert errors(browser) == []


def test_the_ticks_of_an_axis_differ(browser, tmp_path):
    """Three steps, one evaluation of a text, and a KL that 1, 2 and 5 × 10ⁿ are not among."""
    lano = [evaluation(step, {("from", "start"): (step, 9)}, measures={"kl": 0.31 + step / 100}) for step in (1, 2, 3)]
    losses = [(step, 3 / step) for step in (1, 2, 3)]
    write_run(tmp_path / "runs/lano", evals=lano, task={"name": "lano", "grammar": "cfg3f"}, losses=losses)
    write_text_run(tmp_path / "runs/text", evals=[text_evaluation(200, {"web": (2.0, 1.0, 900)})])
    load(browser, write_report(tmp_path))
    open_all(browser)
    axes = ask(browser, TICKS)
    assert len(axes) >= 8
    for chart, axis, texts in axes:
        assert len(texts) == len(set(texts)) >= 2, (chart, axis)


def test_names_on_an_axis_stay_text(browser, tmp_path):
    nasty = '<a href="http://x.example">link</a>'
    rows = [evaluation(9, {("k", 1): (7, 20), ("k", 2): (7, 20), ("task", nasty): (7, 20), ("task", "a < b"): (1, 9)})]
    for arch in ("llama", "llama+canon"):
        write_run(tmp_path / "runs" / arch, arch=arch, evals=rows, losses=[(5, 1.0), (9, 0.5)])
    load(browser, write_report(tmp_path))
    open_all(browser)
    assert until(lambda: count(browser, "#final-0-1 .xtick") == 2)
    ticks = ask(browser, "[...document.querySelectorAll('#final-0-1 .xtick')].map(tick => tick.textContent)")
    assert ticks[0].endswith("link</a>")
    assert ticks[1] == "task = a < b"
    assert count(browser, ".chart a") == 0


def test_a_page_of_four_runs_answers_on_two_screens(browser, tmp_path):
    for number, arch in enumerate(("llama", "llama", "llama+canon", "llama+canon")):
        right = [(step, {("k", k): (step // 8 + number, 40) for k in (1, 2, 3, 4)}) for step in range(0, 240, 20)]
        rows = [evaluation(step, slices) for step, slices in right]
        write_run(tmp_path / "runs" / str(number), arch=arch, seed=number % 2, evals=rows, losses=[(5, 1.0), (9, 0.5)])
    show(browser, write_report(tmp_path))
    assert ask(browser, "document.documentElement.scrollHeight") <= 2500
    assert count(browser, ".chart .main-svg") > 0
    folded = "return [...document.querySelectorAll('details .chart')].filter(box => box.children.length).length"
    assert browser.execute_script(folded) == 0  # drawn when opened
    open_all(browser)
    assert until(lambda: browser.execute_script(folded) == 1)


def test_a_page_of_unfinished_runs_updates_without_scrolling(browser, tmp_path):
    rows = [evaluation(step, {("k", k): (step, 40) for k in (1, 2)}) for step in range(0, 40, 4)]
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"going{seed}", seed=seed, evals=rows[:5], steps=36, finished=False)
    path = write_page(load_play(tmp_path), tmp_path / "report.html", live=True)
    show(browser, path)  # curves of unfinished runs
    state = "return [...document.querySelectorAll('details')].map(part => [part.firstChild.textContent, part.open])"
    assert ["Every learning rate, every run (2 runs)", True] in browser.execute_script(state)
    open_all(browser)
    browser.execute_script("scrollTo(0, 500)")
    for seed in (0, 1):
        write_run(tmp_path / "runs" / f"done{seed}", seed=seed, evals=rows)
    write_report(tmp_path)
    assert ask(browser, "document.getElementById('live') !== null")
    browser.execute_script("readAgain()")
    assert until(lambda: ask(browser, "document.getElementById('live') === null && !!window.Plotly"))
    assert until(lambda: ask(browser, "scrollY") == 500)
    assert ["Every learning rate, every run (4 runs)", True] in browser.execute_script(state)
    assert errors(browser) == []
