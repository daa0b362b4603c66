"""A profile of synthetic outcomes: sentences, tables, charts."""

import re
from functools import cache

import numpy as np
import pytest
from browsing import MARKS, check, count, load, open_all
from reading import blocks, charts, tables, visible_text

from canonlm.experiments import grid
from canonlm.experiments.profile import profile
from canonlm.experiments.profile_results import profiled
from canonlm.report.profile import caveats, growth, headlines, noise, planned, verdicts
from canonlm.report.profile_page import html
from canonlm.runs.load import Result, Run
from canonlm.runs.rows import Count, Evaluation, TrainRow
from canonlm.runs.seed_statistics import gaffke_interval

PAIR, BOTH = ("llama", "llama+canon"), ("depo", "copying")
SLICES = {"depo": ("k=1", "k=2"), "copying": ("first=1", "first=2", "first=4", "first=all")}


@cache
def made_up(archs, tasks, seeds, score, **options):
    """Outcomes of all planned runs, with four evaluations that rise evenly to score(task, arch, seed)."""
    experiment = profile(archs, tasks, seeds=seeds, **options)
    outcomes = {}
    for point in grid.points(experiment, "micro"):
        while new := [run for run in grid.tuning_runs(experiment, point, outcomes) if run.name not in outcomes]:
            for run in new:
                outcomes[run.name] = _outcome(run, score, 0.5 * (run.config.train.optim.lr != 1e-3))
        runs = grid.reported(experiment, point, outcomes, seeds)  # also those of the first against itself
        outcomes |= {run.name: _outcome(run, score) for run in runs}
    return experiment, outcomes, profiled(experiment, outcomes)


def _outcome(run, score, less=0.0):
    config = run.config
    task, steps = config.task["name"], config.train.steps
    rows = []
    by_size = [config.model.hidden_size] * (score.__code__.co_argcount == 4)
    end = score(task, config.arch, config.train.seed, *by_size)
    for quarter in range(1, 5):
        right = round(1000 * max(0.0, quarter / 4 * end - less))
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


@pytest.mark.parametrize("arch", ["gdn2", "hf:mamba2"])
def test_recurrences_of_transformers_count_in_part(arch):
    _, _, shown = made_up(("llama", arch), ("copying",), 7, apart)
    assert ("those of projections and convolutions only" in visible_text(html(shown, ""))) == arch.startswith("hf:")


def test_seven_seeds_give_verdicts():
    _, _, shown = made_up(PAIR, BOTH, 7, apart)
    depo = verdicts(shown)[0]
    match = re.fullmatch(
        r"Depo: llama\+canon gets half right more than 1\.3 times as fast as llama, which does not in these steps\. "
        r"At the end, llama\+canon beats llama by 70\.0 points \[([\d.]+), ([\d.]+)\]; if further runs differ as these "
        r"do, \[([\d.]+), ([\d.]+)\], 7 seeds each\.",
        depo,
    )
    safe, normal = [float(end) for end in match.groups()[:2]], [float(end) for end in match.groups()[2:]]
    # of two pairs. Seven runs that agree: each may hide failures of a share of 1 - (0.7 * 0.025)^(1/7)
    unseen = 100 * (1 - (0.7 * 0.025) ** (1 / 7))
    assert safe[0] == pytest.approx(70 - np.hypot(0.91 * unseen, 0.79 * unseen), abs=2)
    # Welch's interval by hand: equal values in both, with the floored variance of a mean of questions
    ours = [0.9 + 0.01 * (seed % 3) for seed in range(200, 207)]
    floor = [1.9 * p * (1 - p) / 2000 for p in (np.mean(ours), np.mean(ours) - 0.7)]
    error = np.sqrt(sum(max(np.var(ours, ddof=1), each, 1e-4) for each in floor) / 7)
    assert normal == pytest.approx([70 - 256.0 * error, 70 + 256.0 * error], abs=0.2)  # t at 1.25 %, 12 degrees
    assert re.fullmatch(
        r"Copying: too few runs of llama\+canon and llama get half right to tell which is faster\. At the end, no "
        r"difference is shown: 0\.0 points \[−[\d.]+, [\d.]+\], 7 seeds each\.",
        verdicts(shown)[1],
    )
    assert headlines(shown) == [
        "llama+canon against llama: faster on Depo, slower on none; better at the end on Depo, worse on none, no "
        "difference shown on Copying."
    ]


def test_speeds_are_ratios_of_steps():
    """llama+canon is half right at the second evaluation and llama at the fourth."""

    def halves(task, arch, seed):
        return 1.0 if "canon" in arch else 0.55

    _, _, shown = made_up(PAIR, ("depo",), 6, halves)
    [versus] = shown.tasks[0].comparisons
    assert versus.speeds[0.5].factor == pytest.approx(2)
    # an evaluation every 150 steps: ours in 150 … 300, theirs in 450 … 600
    assert (versus.speeds[0.5].low, versus.speeds[0.5].high) == pytest.approx((1.5, 4))
    assert verdicts(shown)[0].startswith("Depo: llama+canon gets half right 2 [1.5, 4] times as fast as llama. At the")
    [task] = shown.tasks
    assert (task.arms[0].solving(task.slices), len(task.arms[1].solving(task.slices))) == ([], 6)
    assert [arm.hardest(task.slices) for arm in task.arms] == ["", "k=2"]
    # 300 of 600 steps: the second of four evaluations
    assert [arm.score_within(300, task.slices) for arm in task.arms] == pytest.approx([0.275, 0.5])


@pytest.mark.parametrize(
    ("scores", "standing", "said"),
    [
        ((0.14, 0.9), "one at chance", "is at chance (14.0%; guessing scores 14.3%): better"),
        ((0.14, 0.15), "both at chance", "neither is above chance (15.0% and 14.0%; guessing scores 14.3%): nothing"),
        ((0.995, 1.0), "both saturated", "both are saturated (100% and 99.5%): nothing to compare"),
    ],
)
def test_points_that_mean_nothing_are_not_printed(scores, standing, said):
    _, _, shown = made_up(PAIR, ("depo",), 6, lambda task, arch, seed: scores["canon" in arch])
    assert shown.tasks[0].comparisons[0].standing == standing
    [sentence] = verdicts(shown)
    assert said in sentence
    assert "points" not in sentence
    if standing != "one at chance":
        assert (
            "better at the end on none, worse on none, no difference shown on none, nothing to compare on Depo"
            in (headlines(shown)[0])
        )


def test_the_first_against_itself_with_other_seeds_shows_the_noise():
    def by_seed(task, arch, seed):
        return 0.5 + 0.03 * (seed % 4)

    experiment, outcomes, shown = made_up(PAIR, ("depo",), 5, by_seed)
    again = [run.seed for run in outcomes.values() if run.seed >= 500]
    assert again == [500, 501, 502, 503, 504]
    assert [run.arch for run in outcomes.values() if run.seed >= 500] == ["llama"] * 5
    expected = np.mean([0.5 + 0.03 * (seed % 4) for seed in range(500, 505)])
    assert shown.tasks[0].itself.end.gap == pytest.approx(
        expected - np.mean([0.5 + 0.03 * (s % 4) for s in range(5)]), abs=1e-9
    )
    [line] = noise(shown)
    assert re.match(r"Depo: llama with other seeds against llama: 0\.0 points \[−[\d.]+, [\d.]+\]", line)
    assert "llama, other seeds" in visible_text(html(shown, ""))
    without = {name: run for name, run in outcomes.items() if run.seed < 500}
    assert noise(profiled(experiment, without)) == []


def test_the_smallest_visible_difference_is_printed_after_tuning():
    experiment, outcomes, _ = made_up(PAIR, ("depo",), 6, apart)
    tuned = {name: run for name, run in outcomes.items() if run.seed in (100, 101, 102)}
    [line] = planned(profiled(experiment, tuned))
    match = re.fullmatch(
        r"Depo: 6 seeds of each will show ([\d.]+) points if further runs are like the tuning runs; 10 points need "
        r"(\d+)\.",
        line,
    )
    assert 50 < float(match[1]) < 80  # six runs may hide many failures
    assert 20 < int(match[2]) < 100
    assert planned(profiled(experiment, {})) == []


@pytest.mark.parametrize(("seeds", "said"), [(1, "1 seed"), (4, "4 seeds")])
def test_fewer_seeds_than_a_verdict_needs_show_no_difference(seeds, said):
    [line] = planned(made_up(PAIR, ("depo",), seeds, apart)[-1])
    assert line.startswith(f"Depo: {said} of each will show no difference, as a verdict needs 6; 10 points need ")


def test_runs_until_solved_are_compared_by_speed_alone():
    def solved(task, arch, seed):
        return 1.0 if "canon" in arch or seed % 2 else 0.5

    _, outcomes, shown = made_up(PAIR, ("depo",), 7, solved, until=0.75)
    assert {run.config["train"]["until"] for run in outcomes.values()} == {0.75}
    assert {run.steps for run in outcomes.values()} == {4 * 600}
    [sentence] = verdicts(shown)
    assert sentence.startswith("Depo: llama+canon gets 75.0% right 1.3 [0.67, unbounded] times as fast as llama.")
    assert sentence.endswith(" 7 of 7 runs of llama+canon and 3 of 7 runs of llama get there.")
    assert "at the end" not in headlines(shown)[0]
    assert any("final scores say nothing" in line for line in caveats(shown))
    first = blocks(page := html(shown, ""), "table")[0]
    assert first["head"] == ["task", "architecture", "75.0% right, against llama", "get there", "chance"]
    assert [row[3] for row in first["rows"]] == ["3 of 7", "7 of 7", ""]
    assert first["marks"] == ["", "", "aside"]  # no higher score is bold
    assert "profile" not in charts(page)


@pytest.mark.parametrize(
    ("archs", "seeds", "said"),
    [
        (("llama",), 3, "1 of 3 runs of llama get 75.0% right."),
        (PAIR, 1, "llama not in 2,400 steps, llama+canon at step 1,800."),
        (
            PAIR,
            2,
            "llama+canon at step 1,800 and at step 1,800; llama not in 2,400 steps and at step 1,800: undecided.",
        ),
    ],
)
def test_few_runs_until_solved_are_steps(archs, seeds, said):
    shown = made_up(archs, ("depo",), seeds, lambda task, arch, seed: 1 - 0.5 * (arch == "llama" and seed != 201),
                    until=0.75)[-1]  # fmt: skip
    assert verdicts(shown) == [f"Depo: {said}"]


def test_an_unknown_speed_of_the_noise_is_not_printed():
    """One run in five of the first is half right, and two of its other seeds."""
    _, _, shown = made_up(PAIR, ("depo",), 5, lambda task, arch, seed: 0.2 + 0.4 * (seed in (201, 501, 502)))
    [line] = noise(shown)
    assert re.fullmatch(r"Depo: llama with other seeds against llama: 8\.0 points \[[−\d.]+, [\d.]+\]\.", line)


def test_runs_that_ended_early_say_nothing_about_higher_shares():
    """llama+canon ends at a quarter of the steps with 60 % right, llama after all of them with 95 %: it might have been
    the slower one to 90 %."""
    experiment, outcomes = profile(PAIR, ("depo",), seeds=3, until=0.5, sizes=("2L32D", "2L64D")), {}
    for point in grid.points(experiment, "micro"):
        while new := [run for run in grid.tuning_runs(experiment, point, outcomes) if run.name not in outcomes]:
            outcomes |= {run.name: _ended(run) for run in new}
        outcomes |= {run.name: _ended(run) for run in grid.reported(experiment, point, outcomes, 3)}
    shown = profiled(experiment, outcomes)
    assert shown.shares == (0.5,)
    for task in shown.tasks:
        [versus] = task.comparisons
        assert {share: speed.factor for share, speed in versus.speeds.items()} == {0.5: pytest.approx(4)}
        assert (task.visible, task.needed) == (None, None)
    assert headlines(shown)[0] == (
        "llama+canon against llama: so far faster on Depo (2L32D) and Depo (2L64D), slower on none."
    )
    assert (growth(shown), planned(shown)) == ([], [])
    assert not any("points" in line for line in noise(shown))
    text = visible_text(page := html(shown, ""))
    assert "equal FLOPs" not in text
    minutes = 4096 / 9 / 60 * 2400  # of 2400 steps; llama+canon takes a quarter of them
    [costs] = [each for each in tables(page) if "minutes of training" in each[0]]
    assert [row[-1] for row in costs[1:]] == [f"{minutes:.1f}", f"{minutes / 4:.1f}"] * 2
    ends = {one["name"]: one["x"][-1] for one in charts(page)["time"]["series"]}
    assert ends == pytest.approx({"chance": minutes, "llama": minutes, "llama+canon": minutes / 4})
    assert "90 %" not in text
    assert "135" not in text  # a tuning score is 0.6 right, and 0.75 of the steps not needed
    assert "0.001: 1.35" in text
    assert [panel["title"] for panel in charts(page)["solved"]["panels"]] == ["Depo (2L32D), 50%", "Depo (2L64D), 50%"]


def _ended(run):
    full, ends = run.config.train.steps, [0.6] if "canon" in run.config.arch else [0.1, 0.2, 0.3, 0.95]
    counts = [{key: Count(round(1000 * end), 1000) for key in SLICES["depo"]} for end in ends]
    rows = [Evaluation(full * quarter // 4, each, 1.0) for quarter, each in enumerate(counts, 1)]
    return Run(
        name=run.name, arch=run.config.arch, lr=run.config.train.optim.lr, seed=run.config.train.seed, steps=full,
        config=run.config.model_dump(), evals=tuple(rows), result=Result(rows[-1].step, rows[-1], tokens_per_s=9.0),
    )  # fmt: skip


def test_three_seeds_are_reported_as_undecided():
    _, _, shown = made_up(PAIR, BOTH, 3, apart)
    assert re.fullmatch(
        r"Depo: .* At the end, llama\+canon is ahead of llama by 70\.0 points \[[\d.−]+, [\d.]+\]: undecided, 3 seeds "
        r"each\.",
        verdicts(shown)[0],
    )
    assert headlines(shown) == [
        "llama+canon against llama: so far higher on Depo, lower on none.",
        "Nothing is decided: with 2 comparisons, a verdict needs 7 seeds of each architecture, and this has 3.",
    ]


def test_many_comparisons_need_more_seeds():
    more = ("llama+canon=A", "llama+canon=C", "llama+canon=AC")
    two, eight = (made_up(archs, BOTH, 8, apart)[2] for archs in (PAIR, PAIR + more))
    states = [[each.end.state for task in shown.tasks for each in task.comparisons] for shown in (two, eight)]
    assert states == [["higher", "open"], ["undecided"] * 8]
    assert headlines(eight)[-1] == (
        "Nothing is decided: with 8 comparisons, a verdict needs 9 seeds of each architecture, and this has 8."
    )


def test_a_comparison_waits_for_all_seeds():
    """Five of six would decide: the sixth is still to come, or failed."""
    experiment, outcomes, shown = made_up(PAIR, ("depo",), 6, apart)
    assert shown.tasks[0].comparisons[0].end.state == "higher"
    last = [name for name in outcomes if "canon" in name and "seed205-" in name]
    waiting = profiled(experiment, {name: run for name, run in outcomes.items() if name not in last})
    for incomplete in (waiting, profiled(experiment, outcomes | dict.fromkeys(last))):
        assert verdicts(incomplete)[0].endswith("]: undecided, llama+canon 5 seeds and llama 6 seeds.")
        assert headlines(incomplete)[0].endswith(
            "faster on none, slower on none; better at the end on none, worse on none, no difference shown on none, "
            "undecided on Depo."
        )


def test_a_speed_waits_for_all_seeds():
    """Five of six have half of the answers right, and none of the other: so far it is faster."""
    experiment, outcomes, shown = made_up(PAIR, ("depo",), 6, apart, until=0.5)
    assert headlines(shown)[0] == "llama+canon against llama: faster on Depo, slower on none."
    assert verdicts(shown)[0].endswith(" of llama get there.")
    some = profiled(experiment, {name: run for name, run in outcomes.items() if "seed205-" not in name})
    assert headlines(some)[0] == "llama+canon against llama: faster on none, slower on none."
    assert verdicts(some)[0].endswith(" of llama get there: undecided, as seeds are missing.")


def test_the_worse_block_is_called_worse():
    _, _, shown = made_up(PAIR[::-1], ("depo",), 6, apart)
    assert "At the end, llama+canon beats llama by 70.0 points [" in verdicts(shown)[0]
    assert headlines(shown)[0] == (
        "llama against llama+canon: faster on none, slower on Depo; better at the end on none, worse on Depo, no "
        "difference shown on none."
    )


def test_one_seed_proves_nothing():
    _, _, shown = made_up(PAIR, ("depo",), 1, apart, quick=True)
    assert verdicts(shown) == ["Depo: llama 22.0%, llama+canon 92.0%."]  # the seed is 200
    assert headlines(shown)[0].startswith("Not a comparison")
    assert headlines(shown)[2].startswith("One seed proves nothing")
    assert "Quick: one rate for all, and a third of the training." in caveats(shown)
    assert "edge" not in "".join(caveats(shown))


def test_one_architecture_is_a_profile_without_comparisons():
    _, _, shown = made_up(("llama",), ("depo",), 3, apart)
    assert headlines(shown) == ["llama alone: nothing is compared."]
    low, high = (f"{100 * end:.1f}%" for end in gaffke_interval([0.2, 0.21, 0.22]))
    assert verdicts(shown) == [f"Depo: 21.0% [{low}, {high}], 3 seeds; guessing scores 14.3%."]  # one of seven names


def test_seeds_that_never_solved_a_task_are_censored():
    def by_seed(task, arch, seed):
        return {200: 1.0, 201: 0.6, 202: 0.3}.get(seed, 0.9) if "canon" in arch else 0.1

    _, _, shown = made_up(PAIR, ("depo",), 3, by_seed)
    [task] = shown.tasks
    assert task.arms[1].solved_at(0.5, task.slices) == [300, 600, None]  # half of 600 steps, and at the end
    assert task.arms[1].solved_at(0.99, task.slices) == [600, None, None]
    half = [one for one in charts(html(shown, "canonlm profile"))["solved"]["series"] if one["panel"] == 0]
    canon = next(trace for trace in half if trace["name"] == "llama+canon")
    assert (canon["x"], canon["y"]) == ([0, 300, 600, 600], pytest.approx([0, 1 / 3, 2 / 3, 2 / 3]))
    assert "1 of 3 seeds not in 600 steps: censored" in canon["hover"][-1]


def test_costs_are_counted_and_speeds_are_measured():
    _, _, shown = made_up(PAIR, ("depo",), 3, apart)
    plain, canon = shown.tasks[0].arms
    # 64 windows of 64 tokens a step: one second a step, or two
    assert (plain.minutes, canon.minutes) == (pytest.approx(1 / 120), pytest.approx(1 / 60))
    # A, B, C and D in two layers of width 128: four taps for 128 + 384 + 128 + 2 x 341 channels
    assert canon.parameters - plain.parameters == 2 * 4 * (128 + 384 + 128 + 2 * 341)
    assert canon.sensitivity == pytest.approx(0.5)  # made_up: half of the answers are lost at any rate but 0.001
    by_time = charts(html(shown, ""))["time"]
    ends = {trace["name"]: max(trace["x"]) for trace in by_time["series"] if trace["name"] != "chance"}
    assert ends == {"llama": pytest.approx(5), "llama+canon": pytest.approx(10)}


def test_a_page_before_the_first_run_and_after_failures():
    experiment, outcomes, _ = made_up(PAIR, ("depo",), 3, apart)
    empty = profiled(experiment, {})
    assert verdicts(empty) == ["Depo: not trained yet."]
    assert "0 of 27 runs done" in visible_text(html(empty, ""))
    broken = {name: None if "canon" in name else outcome for name, outcome in outcomes.items()}
    shown = profiled(experiment, broken)
    assert verdicts(shown) == ["Depo: every run of llama+canon failed."]
    assert caveats(shown)[2].startswith("Runs that failed and are left out: 9 of llama+canon on Depo. With fewer seeds")
    assert html(shown, "")
    one = {name: None for name in outcomes if "canon-" in name and "lr0.003-" in name}  # a rate of three
    assert verdicts(profiled(experiment, one)) == ["Depo: not trained yet."]


def test_a_tie_has_no_winner():
    _, _, shown = made_up(PAIR, ("depo",), 3, lambda task, arch, seed: 0.5)
    match = re.fullmatch(
        r"Depo: .* llama\+canon and llama are level \[−([\d.]+), ([\d.]+)\]: undecided, 3 seeds each\.",
        verdicts(shown)[0],
    )
    half = 100 * np.hypot(0.5, 0.5) * (1 - (0.7 * 0.05) ** (1 / 3))  # what three runs that agree may hide
    assert [float(end) for end in match.groups()] == pytest.approx([half, half], abs=1)


def test_names_cannot_break_the_page(tmp_path):
    folder = tmp_path / "a&b"
    folder.mkdir()
    (folder / "mine.py").write_text(
        "from canonlm.models.mixers.attention import Attention\nclass Wave(Attention):\n    pass\n"
    )
    page = html(made_up((f"{folder / 'mine.py'}:Wave",), ("copying",), 1, apart, quick=True)[2], "a <b> command")
    assert any("a&b" in head for head in visible_text(page).splitlines())
    assert "a&b" not in page
    assert "<b> command" not in page


@pytest.mark.parametrize(("width", "scheme"), [(1440, "light"), (390, "dark")])
@MARKS[0]
@MARKS[1]
def test_renders_in_a_browser(browser, tmp_path, width, scheme):
    path = tmp_path / "profile.html"
    path.write_text(html(made_up(PAIR, BOTH, 3, apart)[2], "canonlm profile"))
    load(browser, path, width, scheme)
    open_all(browser)
    assert count(browser, ".chart") == 4
    check(browser, width)


@cache
def two_sizes(small, large, seeds=20):
    """llama scores 0.2, and llama+canon `small` at the first size and `large` at the other."""

    def of_size(task, arch, seed, width):
        return ({64: small, 128: large}[width] if "canon" in arch else 0.2) + 0.01 * (seed % 3)

    return made_up(PAIR, ("depo",), seeds, of_size, sizes=("2L64D", "2L128D"))[-1]


@pytest.mark.parametrize(
    ("small", "large", "means"),
    [(0.5, 0.9, "grows [15.9, 57.7]"), (0.9, 0.5, "shrinks [−57.7, −15.9]"),
     (0.9, 0.9, "no change is shown [−22.5, 22.5]")],
)  # fmt: skip
def test_the_difference_of_two_sizes_is_one_sentence(small, large, means):
    gaps = f"{100 * small - 20:.1f} points at 2L64D and {100 * large - 20:.1f} at 2L128D"
    [line] = growth(two_sizes(small, large))
    assert line.startswith(f"Depo: llama+canon against llama, {gaps}: {means}; if further runs differ as these do, [")


def test_two_sizes_are_rows():
    shown = two_sizes(0.5, 0.9)
    assert [task.label for task in shown.tasks] == ["Depo (2L64D)", "Depo (2L128D)"]
    assert shown.tasks[0].arms[0].parameters < shown.tasks[1].arms[0].parameters / 2
    text = visible_text(html(shown, "canonlm profile"))
    assert growth(shown)[0] in text
    assert "2 architectures · 1 task · 2 sizes · 20 seeds each" in text
    assert len(verdicts(shown)) == len(noise(shown)) == 2
    assert "at 2L128D: undecided [" in growth(two_sizes(0.5, 0.9, seeds=4))[0]
    assert growth(made_up(PAIR, ("depo",), 5, apart, sizes=("2L64D",))[-1]) == []
