"""The page in a real browser, from disk. Run by `make test-browser`, which installs chromium."""

import json

import pytest
from browsing import MARKS, errors, load, requested, until
from folders import evaluation, write_run

from canonlm.report import write_report

pytestmark = MARKS

# Of the explorer's one chart, what Canon layers change, there is nothing to draw without pairs.
DRAWN = """return [...document.querySelectorAll('section:not([hidden]) .chart')].every(
  box => box.querySelectorAll('path').length > 3)"""


def show(browser, path, width=1440, scheme="light"):
    load(browser, path, width, scheme)
    assert until(lambda: paths(browser) > 10)


def paths(browser):
    return browser.execute_script("return document.querySelectorAll('#curves-0 .scatterlayer path').length")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_it_renders_quietly_and_alone(browser, demo, width, scheme):
    show(browser, write_report(demo), width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.execute_script("return document.querySelectorAll('.chart').length") == 5 + 1
    assert until(lambda: browser.execute_script(DRAWN))
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    ink = browser.execute_script("return getComputedStyle(document.querySelector('#curves-0 .legendtext')).fill")
    assert ink == {"light": "rgb(27, 31, 36)", "dark": "rgb(232, 234, 237)"}[scheme]
    assert errors(browser) == []
    assert requested(browser) == []


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
def test_every_task_is_drawn_and_no_legend_covers_a_chart(browser, every_task, width, scheme):
    show(browser, write_report(every_task), width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    assert browser.execute_script("return document.querySelectorAll('.chart').length") == 25 + 1
    assert until(lambda: browser.execute_script(DRAWN))
    covered = """return [...document.querySelectorAll('.chart:not(#overview-chart)')].filter(box => {
      const places = inside => [...box.querySelectorAll(inside)].map(part => part.getBoundingClientRect());
      const bottom = Math.max(...places('.legend .traces').map(place => place.bottom));
      return bottom > Math.min(...places('.annotation-text-g, .plot').map(place => place.top)) + 2;
    }).map(box => box.id)"""
    assert browser.execute_script(covered) == []
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert errors(browser) == []


def test_a_click_on_a_name_acts_on_every_panel(browser, demo):
    show(browser, write_report(demo))
    lines = "return document.querySelectorAll('#curves-1 .scatterlayer .trace').length"
    before = browser.execute_script(lines)
    click = """
      const toggle = document.querySelectorAll('#curves-1 .legendtoggle')[0];
      for (const type of ['mousedown', 'mouseup']) toggle.dispatchEvent(new MouseEvent(type, {bubbles: true}));
    """
    browser.execute_script(click)
    assert until(lambda: browser.execute_script(lines) == before - 4 * (3 + 1))
    # what was hidden stays hidden when the page is laid out anew
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                            {"width": 390, "height": 900, "deviceScaleFactor": 1, "mobile": True})  # fmt: skip
    assert until(lambda: browser.execute_script("return document.querySelector('#curves-1').layout.width < 400"))
    assert browser.execute_script(lines) == before - 4 * (3 + 1)


def test_a_chart_saves_its_points(browser, demo):
    show(browser, write_report(demo))
    rows = browser.execute_script("return document.querySelector('#curves-1 ~ .csv').rows()")
    points = [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
    name = "depo-llama-lr0.01-seed1"
    lines = (demo / "runs" / name / "metrics.jsonl").read_text().splitlines()
    evals = [row for row in map(json.loads, lines) if row["kind"] == "eval"]
    mine = [point for point in points if point["run"] == name]
    assert {point["series"] for point in mine} == {"llama"}
    counts = [(row["step"], entry) for row in evals for entry in row["slices"] if entry["slice"] == {"k": 2}]
    asked = {(step, entry["correct"] / entry["total"]) for step, entry in counts}
    panel = [(point["x"], point["y"]) for point in mine if "2" in point["panel"]]
    assert set(panel) == asked
    assert len(panel) == len(asked)


def test_the_page_follows_when_the_scheme_changes(browser, demo):
    show(browser, write_report(demo), scheme="light")
    media = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    paper = "return document.querySelector('#curves-0').layout.paper_bgcolor"
    assert until(lambda: browser.execute_script(paper) == "#14171a")


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
    assert browser.execute_script("return document.querySelector('#curves-0 .legendtext').textContent") == nasty
    hover = "Plotly.Fx.hover('curves-0', [{curveNumber: 0, pointNumber: 3}]);"
    browser.execute_script(hover)
    assert until(lambda: browser.execute_script("return document.querySelectorAll('#curves-0 .hovertext').length") > 0)
    said = browser.execute_script("return document.querySelector('#curves-0 .hovertext').textContent")
    assert nasty in said
    assert "30.0% (6 of 20; 95% interval 14.5% to 51.9%)" in said
    assert browser.execute_script("return document.querySelectorAll('img').length") == 0
    assert errors(browser) == []
