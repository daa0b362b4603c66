"""A profile of synthetic outcomes: sentences, tables, charts."""

import re

import numpy as np
import pytest
from browsing import MARKS, errors, load, requested, until
from reading import charts, visible_text

from canonlm.experiments import grid
from canonlm.experiments.profile import profile
from canonlm.experiments.profile_results import profiled
from canonlm.report.profile import caveats, headlines, verdicts
from canonlm.report.profile_page import html
from canonlm.runs.load import Result, Run
from canonlm.runs.rows import Count, Evaluation, TrainRow

SLICES = {"depo": ("k=1", "k=2"), "copying": ("first=1", "first=2", "first=4", "first=all")}


def made_up(archs, tasks, seeds, score, **options):
    """Outcomes of all planned runs, with four evaluations that rise evenly to score(task, arch, seed)."""
    experiment = profile(archs, tasks, seeds=seeds, **options)
    outcomes = {}
    for point in grid.points(experiment, "micro"):
        tuning = grid.tuning_runs(experiment, point)
        for run in tuning:
            outcomes[run.name] = _outcome(run, score, 0.5 * (run.config.train.optim.lr != 1e-3))
        runs = grid.reported(experiment, point, outcomes, seeds)
        outcomes |= {run.name: _outcome(run, score) for run in runs}
    return experiment, outcomes, profiled(experiment, outcomes)


def _outcome(run, score, less=0.0):
    config = run.config
    task, steps = config.task["name"], config.train.steps
    rows = []
    for quarter in range(1, 5):
        right = round(1000 * max(0.0, quarter / 4 * score(task, config.arch, config.train.seed) - less))
        rows.append(Evaluation(steps * quarter // 4, {key: Count(right, 1000) for key in SLICES[task]}, 1.0))
    speed = 4096.0 * (1 + ("canon" not in run.name))
    return Run(
        name=run.name, arch=config.arch, lr=config.train.optim.lr, seed=config.train.seed, steps=steps,
        config=config.model_dump(), evals=tuple(rows), train=(TrainRow(steps, 1.0, memory_gb=0.75),),
        result=Result(steps, rows[-1], tokens_per_s=speed),
    )  # fmt: skip


def apart(task, arch, seed):
    """Canon layers help on Depo and do nothing for copying."""
    base = 0.9 if task == "depo" and "canon" in arch else 0.2
    return base + 0.01 * (seed % 3)


def test_five_seeds_give_verdicts():
    _, _, shown = made_up(["llama", "llama+canon"], ["depo", "copying"], 5, apart)
    # Welch's interval by hand: equal values in both, with the floored variance of a mean of questions
    depo = verdicts(shown)[0]
    match = re.fullmatch(r"Depo: llama\+canon beats llama by 70\.0 points \[([\d.]+), ([\d.]+)\], 5 seeds each\.", depo)
    ours = [0.9, 0.91, 0.92, 0.9, 0.91]
    floor = [1.9 * p * (1 - p) / 2000 for p in (np.mean(ours), np.mean(ours) - 0.7)]
    error = np.sqrt(sum(max(np.var(ours, ddof=1), each, 1e-4) for each in floor) / 5)
    assert [float(end) for end in match.groups()] == pytest.approx([70 - 231 * error, 70 + 231 * error], abs=0.2)
    assert verdicts(shown)[1].startswith("Copying: no difference shown between llama+canon and llama: 0.0 points [")
    assert headlines(shown) == [
        "llama+canon against llama: better on Depo, worse on none, no difference shown on Copying."
    ]


def test_three_seeds_are_reported_as_undecided():
    _, _, shown = made_up(["llama", "llama+canon"], ["depo", "copying"], 3, apart)
    assert re.fullmatch(
        r"Depo: llama\+canon is ahead of llama by 70\.0 points \[[\d.]+, [\d.]+\], 3 seeds each: undecided\.",
        verdicts(shown)[0],
    )
    assert headlines(shown) == [
        "llama+canon against llama: so far higher on Depo, lower on none.",
        "Nothing is decided: with 2 comparisons, a verdict needs 5 seeds of each architecture, and this has 3.",
    ]


def test_many_comparisons_need_more_seeds():
    """C(10, 5) = 252 ways to label five and five runs: 2 / 252 decides six comparisons at 5 %, not eight."""
    archs = ["llama", "llama+canon", "llama+canon=A", "llama+canon=C", "llama+canon=AC"]
    _, _, shown = made_up(archs, ["depo", "copying"], 5, apart)
    assert shown.needed == 6
    assert all(line.endswith("5 seeds each: undecided.") for line in verdicts(shown))


def test_the_worse_block_is_called_worse():
    _, _, shown = made_up(["llama+canon", "llama"], ["depo"], 5, apart)
    assert verdicts(shown)[0].startswith("Depo: llama+canon beats llama by 70.0 points [6")
    assert (
        headlines(shown)[0] == "llama against llama+canon: better on none, worse on Depo, no difference shown on none."
    )


def test_one_seed_proves_nothing():
    _, _, shown = made_up(["llama", "llama+canon"], ["depo"], 1, apart, quick=True)
    assert verdicts(shown) == ["Depo: llama 20.0%, llama+canon 90.0%."]
    assert headlines(shown)[1].startswith("One seed proves nothing")
    assert "Quick: one rate for all, and a third of the training." in caveats(shown)


def test_one_architecture_is_a_profile_without_comparisons():
    _, _, shown = made_up(["llama"], ["depo"], 3, apart)
    assert headlines(shown) == ["llama alone: nothing is compared."]
    half = 430.3 * np.sqrt(1.9 * 0.21 * 0.79 / 2000 / 3)  # Student's t, two degrees of freedom
    interval = f"[{21 - half:.1f}%, {21 + half:.1f}%]"
    assert verdicts(shown) == [f"Depo: 21.0% {interval}, 3 seeds; guessing scores 14.3%."]  # one of seven names


def test_seeds_that_never_solved_a_task_are_censored():
    def by_seed(task, arch, seed):
        return {0: 1.0, 1: 0.6, 2: 0.3}.get(seed, 0.9) if "canon" in arch else 0.1

    _, _, shown = made_up(["llama", "llama+canon"], ["depo"], 3, by_seed)
    [task] = shown.tasks
    assert task.arms[1].solved_at(0.5, task.slices) == [300, 600, None]  # half of 600 steps, and at the end
    assert task.arms[1].solved_at(0.99, task.slices) == [600, None, None]
    half = [one for one in charts(html(shown, "canonlm profile"))["solved"]["series"] if one["panel"] == 0]
    canon = next(trace for trace in half if trace["name"] == "llama+canon")
    assert (canon["x"], canon["y"]) == ([0, 300, 600, 600], pytest.approx([0, 1 / 3, 2 / 3, 2 / 3]))
    assert "1 of 3 seeds not in 600 steps: censored" in canon["hover"][-1]


def test_costs_are_counted_and_speeds_are_measured():
    _, _, shown = made_up(["llama", "llama+canon"], ["depo"], 3, apart)
    plain, canon = shown.tasks[0].arms
    # 64 windows of 64 tokens a step: one second a step, or two
    assert (plain.minutes, canon.minutes) == (pytest.approx(1 / 120), pytest.approx(1 / 60))
    # A, B, C and D in two layers of width 128: four taps for 128 + 384 + 128 + 2 x 341 channels
    assert canon.parameters - plain.parameters == 2 * 4 * (128 + 384 + 128 + 2 * 341)
    by_time = charts(html(shown, ""))["time"]
    ends = {trace["name"]: max(trace["x"]) for trace in by_time["series"] if trace["name"] != "chance"}
    assert ends == {"llama": pytest.approx(5), "llama+canon": pytest.approx(10)}


def test_a_page_before_the_first_run_and_after_failures():
    experiment, outcomes, _ = made_up(["llama", "llama+canon"], ["depo"], 3, apart)
    empty = profiled(experiment, {})
    assert verdicts(empty) == ["Depo: not trained yet."]
    assert "0 of 12 runs done" in visible_text(html(empty, ""))
    broken = {name: None if "canon" in name else outcome for name, outcome in outcomes.items()}
    shown = profiled(experiment, broken)
    assert verdicts(shown) == ["Depo: every run of llama+canon failed."]
    assert "Runs that failed and are left out: 3 of llama+canon on Depo." in caveats(shown)
    assert html(shown, "")
    one = {name: None for name in outcomes if "canon-" in name and "lr0.003-" in name}  # a rate of three
    assert verdicts(profiled(experiment, one)) == ["Depo: not trained yet."]


def test_a_tie_has_no_winner():
    _, _, shown = made_up(["llama", "llama+canon"], ["depo"], 3, lambda task, arch, seed: 0.5)
    assert re.fullmatch(
        r"Depo: llama\+canon and llama are level \[−3.\d, 3.\d\], 3 seeds each: undecided.", verdicts(shown)[0]
    )


def test_names_cannot_break_the_page(tmp_path):
    folder = tmp_path / "a&b"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from canonlm.models.mixers.attention import Attention\nclass Wave(Attention):\n    pass\n"
    )
    page = html(made_up([f"{folder / 'mine.py'}:Wave"], ["copying"], 1, apart, quick=True)[2], "a <b> command")
    assert any("a&b" in head for head in visible_text(page).splitlines())
    assert "a&b" not in page
    assert "<b> command" not in page


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
@MARKS[0]
@MARKS[1]
def test_renders_in_a_browser(browser, tmp_path, width, scheme):
    path = tmp_path / "profile.html"
    path.write_text(html(made_up(["llama", "llama+canon"], ["depo", "copying"], 3, apart)[2], "canonlm profile"))
    load(browser, path, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach(part => part.open = true)")
    drawn = "return [...document.querySelectorAll('.chart')].every(box => box.querySelectorAll('path').length > 3)"
    assert until(lambda: browser.execute_script(drawn))
    assert browser.execute_script("return document.querySelectorAll('.chart').length") == 4
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    assert errors(browser) == []
    assert requested(browser) == []
