"""The page shows the contents of the files, and nothing in a file can become code on the page."""

import json
import re
from html.parser import HTMLParser

import pytest
from folders import evaluation, write_run, write_runs
from reading import blocks, charts, embedded_json, evals_of, page_of, printed, tables, visible_text

import canonlm
from canonlm.report import summarise, write_report
from canonlm.report.section import ranking
from canonlm.runs.load import read_runs
from canonlm.runs.seed_statistics import gaffke_interval

NASTY = "<img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """Tags with their attributes, and the text of each script."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.scripts = [], {}
        self.script = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.script = dict(attrs).get("id", f"script {len(self.scripts)}")
            self.scripts[self.script] = ""

    def handle_endtag(self, tag):
        self.script = None if tag == "script" else self.script

    def handle_data(self, data):
        if self.script:
            self.scripts[self.script] += data


@pytest.fixture(scope="module")
def written(demo):
    return page_of(demo)


def test_the_page_loads_nothing(written):
    page = Page(written)
    assert not [attrs for _, attrs in page.tags if "src" in attrs]
    assert all(attrs["href"].startswith("data:") for _, attrs in page.tags if "href" in attrs)
    assert "default-src 'none'" in next(attrs["content"] for tag, attrs in page.tags if "http-equiv" in attrs)


def test_the_page_contains_the_expected_text(written):
    for text in ("Do Canon layers help a small Llama?", "Copying", "1 hop", "documents in a window isolated",
                 "window length (tokens)", "a laptop", "canonlm play demo --arch", "64.8 k",
                 "undecided, a verdict needs", "best learning rate"):  # fmt: skip
        assert text in visible_text(written)


def test_scores_that_look_equal_are_marked_alike(tmp_path):
    """60.0 % is shown for 6,000 and 6,001 of 10,000 right answers."""
    right = {"llama": 6000, "gla5": 6001, "gdn2": 5000}
    runs = write_runs(tmp_path, {arch: [evaluation(10, {("k", 1): (n, 10000)})] for arch, n in right.items()})

    def marks(archs):
        table = ranking(archs, ["k=1"], {})[0]["table"]
        return {row[0]: mark for row, mark in zip(table["rows"], table["marks"], strict=True)}

    archs = summarise(read_runs(runs)[0])
    assert marks(archs) == {"llama": "best", "gla5": "best", "gdn2": ""}
    assert set(marks([a for a in archs if a.arch != "gdn2"]).values()) == {""}


def test_text_from_runs_stays_text(tmp_path, written):
    harmless = Page(written)
    text = f"""{NASTY}</script><script>alert(1)</script>"><b>'&lt;{{{{title}}}} %{{y}} $HOME {{0}}"""
    name = text.replace("/", "∕")
    rows = [evaluation(10, {("k", text): (1, 10), ("k", "<i>"): (1, 10), (text, 1): (1, 10)}, measures={text: 0.5})]
    for number, arch in enumerate((text, "llama")):
        write_run(tmp_path / "runs" / f"{name}{number}", arch=arch, evals=rows, losses=[(5, 1.0)],
                  task={"name": text, "n": text}, config={"preset": text})  # fmt: skip
    write_run(tmp_path / "runs" / f"{name}x", evals=rows, finished=False, task={"name": text, "n": text})
    runs = [f"{name}{end}" for end in "01x"] + [text]
    play = {"title": text, "command": text, "sections": [{"heading": text, "text": text, "runs": runs}]}
    (tmp_path / "play.json").write_text(json.dumps(play))
    written = page_of(tmp_path)
    page = Page(written)
    assert not [tag for tag, _ in page.tags if tag in ("img", "b", "i")]
    assert not [key for _, attrs in page.tags for key in attrs if key.startswith("on")]
    assert page.scripts.keys() == harmless.scripts.keys()
    assert embedded_json(written)["title"] == text
    assert text in visible_text(written)
    printed(tmp_path)


def test_an_unfinished_run_is_named_but_not_averaged(tmp_path):
    rows = [evaluation(10, {("k", 1): (5, 10)})]
    write_run(tmp_path / "runs" / "done", evals=rows, steps=40)
    write_run(tmp_path / "runs" / "going", evals=rows, seed=1, steps=40, finished=False, tail="{")
    (tmp_path / "runs" / "nothing").mkdir()
    text = write_report(tmp_path, tmp_path / "out.html").read_text(encoding="utf-8")
    words = visible_text(text)
    assert "going: unfinished at step 10 of 40, not in the averages; 1 damaged row of metrics.jsonl skipped" in words
    assert "nothing: empty folder" in words
    assert "1 of 2" in words
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["out.html"]


def test_many_unfinished_runs_are_one_line_of_the_terminal(tmp_path):
    rows = [evaluation(10, {("k", 1): (5, 10)})]
    write_run(tmp_path / "runs" / "hurt", evals=rows, seed=99, steps=40, finished=False, tail="{")
    for seed in range(8):
        write_run(tmp_path / "runs" / f"going{seed}", evals=rows, seed=seed, steps=40, finished=False)
    assert printed(tmp_path).count("unfinished at step 10 of 40") == 9
    write_run(tmp_path / "runs" / "going8", evals=rows, seed=8, steps=40, finished=False)
    (tmp_path / "runs" / "nothing").mkdir()
    lines = printed(tmp_path).splitlines()[-3:]
    assert [line.partition(": unfinished")[0].strip() for line in lines[:2]] == ["hurt", "9 runs"]
    assert lines[1].strip() == "9 runs: unfinished (going0 and others)"
    assert lines[2].strip() == "nothing: left out, empty folder"
    words = visible_text(page_of(tmp_path))
    assert all(f"going{seed}: unfinished" in words for seed in range(9))


def test_accidental_differences_are_listed_with_the_comparison(tmp_path):
    rows = [evaluation(10, {("k", 1): (5, 10)})]
    write_run(tmp_path / "runs" / "a", evals=rows, steps=10)
    write_run(tmp_path / "runs" / "b", evals=rows, steps=20, arch="llama+canon", lr=0.01, seed=3)
    sentence = "he runs also differ in training steps: see the settings."
    assert f"t{sentence}" in visible_text(page_of(tmp_path))
    assert f"- T{sentence}" in printed(tmp_path)


def test_before_anything_has_finished(tmp_path):
    write_run(tmp_path / "runs" / "a", evals=[evaluation(10, {("k", 1): (5, 10)})], finished=False)
    assert "No run has finished yet." in visible_text(page_of(tmp_path))
    (tmp_path / "empty" / "runs" / "a").mkdir(parents=True)
    assert "There is nothing to show yet" in visible_text(page_of(tmp_path / "empty"))


def test_a_failed_write_leaves_nothing_behind(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "a", evals=[evaluation(10, {("k", 1): (5, 10)})])
    (tmp_path / "report.html").write_text("the old one")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text() == "the old one"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]


def test_the_terminal_tables(demo):
    text = printed(demo, width=160).partition("Depo")[2]
    assert "1 hop" in text
    assert text.count("(best)") == 2  # the best rate of each
    runs = [demo / "runs" / f"depo-llama+canon-64000-lr0.003-seed{seed}" for seed in range(3)]
    final = [evals_of(run)[-1]["slices"][0] for run in runs]
    shares = [part["correct"] / part["total"] for part in final]
    assert f"{100 * sum(shares) / 3:.1f}%" in text
    low = gaffke_interval(shares)[0]  # of a task that a run has either solved or not
    assert f"{100 * low:.1f}–" in text
    assert low < 0.4  # however near 100 % three runs are


def test_the_terminal_says_the_answers_of_the_page(demo, written):
    text = " ".join(printed(demo, width=400).split())
    assert len(blocks(written, "answer")) == 2
    assert all(answer in text for answer in blocks(written, "answer"))


@pytest.mark.parametrize("hops", [3, 6])
def test_the_tables_show_the_score_of_guessing(tmp_path, hops):
    """For six slices the table of best rates has the mean, and a separate table has each slice."""
    chance = {f"k={k}": k / 10 for k in range(1, hops + 1)}
    for arch, right in (("llama", 15), ("gla5", 60)):
        last = evaluation(100, {("k", k): (right, 100) for k in range(1, hops + 1)})
        write_run(tmp_path / "runs" / arch, arch=arch, evals=[last])
    section = {"heading": "depo", "text": "", "runs": ["llama", "gla5"], "chance": chance}
    (tmp_path / "play.json").write_text(json.dumps({"title": "", "sections": [section]}))
    first, *more = printed(tmp_path).split("by number of hops")
    row = next(line for line in first.splitlines() if "chance  " in line)
    if hops == 3:
        assert re.findall("[0-9.]+%", row) == ["10.0%", "20.0%", "30.0%"]
        assert first.count("below chance") == 1  # 15 of 100 where guessing scores 30; where it scores 20, that is luck
        assert not more
    else:
        assert re.findall("[0-9.]+%", row) == ["35.0%"]
        assert first.count("below chance") == 1
        assert re.findall("(10|20|30|40|50|60).0% *│\n", more[0]) == ["10", "20", "30", "40", "50", "60"]
        assert more[0].count("below chance") == 4  # 15 % where guessing scores 30 to 60; 60 is not below 60


def test_bytes_of_state_are_a_column_an_axis_and_a_measurement(tmp_path):
    """Runs of earlier versions have not recorded them; a model without a cache has none."""
    states = {"llama": 131_072, "gdn2": 81_920, "mine.py:Net": None, "gla5": 1_234_567}
    for place, (arch, state) in enumerate(states.items()):
        evals = [evaluation(100, {("k", 1): (40 + 10 * place, 100)})]
        write_run(tmp_path / "runs" / f"run-{place}", arch=arch, evals=evals, state=state)
    page = page_of(tmp_path)
    (ranking,) = [rows for rows in tables(page) if "bytes of state" in rows[0]]
    at = ranking[0].index("bytes of state")
    assert {row[0]: row[at] for row in ranking[1:5]} == {
        "llama": "131 kB", "gdn2": "82 kB", "mine.py:Net": "–", "gla5": "1.2 MB"
    }  # fmt: skip
    (chart,) = [each for name, each in charts(page).items() if name.startswith("state-")]
    assert chart["panels"][0]["x"]["title"] == "bytes of state"
    assert {each["name"]: each["x"] for each in chart["series"]} == {
        arch: [state] for arch, state in states.items() if state
    }
    frame = canonlm.load_runs(tmp_path)
    assert dict(frame.select("arch", "state_bytes").unique().iter_rows()) == states


def test_a_model_may_have_no_parameters_and_no_state(tmp_path):
    for arch in ("llama", "mine.py:Fixed"):
        write_run(tmp_path / arch, arch=arch, params=0, state=0, evals=[evaluation(100, {("k", 1): (40, 100)})])
    assert "mine.py:Fixed − llama" in visible_text(page_of(tmp_path))


def test_the_title_keeps_the_name_of_a_file(tmp_path):
    write_run(tmp_path / "a", task={"name": "mine.py:Own"}, evals=[evaluation(100, {("k", 1): (40, 100)})])
    assert embedded_json(page_of(tmp_path))["title"] == "mine.py:Own, tiny: llama"


def test_the_small_print_of_two_runs_is_explained(tmp_path):
    rows = {"llama": 2, "llama+canon": 3}
    write_runs(tmp_path, {arch: [evaluation(9, {("k", 1): (n, 9)}) for n in range(3)][:n] for arch, n in rows.items()})
    note = "Small: 95% intervals over seeds; the values of both runs where there are two."
    assert note in visible_text(page_of(tmp_path))


def test_states_that_are_nearly_equal_have_no_chart(tmp_path):
    for arch, state in {"llama": 16_896, "llama+canon=A": 17_408}.items():
        write_run(tmp_path / arch, arch=arch, evals=[evaluation(100, {("k", 1): (40, 100)})], state=state)
    assert not [name for name in charts(page_of(tmp_path)) if "state-" in name]


def test_runs_that_have_not_recorded_bytes_of_state(written):
    assert all("bytes of state" not in rows[0] for rows in tables(written))
    assert not [name for name in charts(written) if name.startswith("state-")]
