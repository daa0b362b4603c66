"""Sentences must be true of the numbers."""

import json

import pytest
from folders import evaluation, write_run, write_runs
from reading import page_of, printed, visible_text

from canonlm import tasks
from canonlm.core.untrusted import MAX_JSON
from canonlm.experiments.published.runs import runs_frame
from canonlm.report import load_play, read_runs, render, summarise
from canonlm.report.charts import learning_curves
from canonlm.report.format import in_words, number, percent, points, quantity, scale_words, signed, slice_label, span
from canonlm.report.section import section_blocks
from canonlm.report.sentences import verdict
from canonlm.report.theme import DARK, LOOKS, looks
from canonlm.runs import task_info
from canonlm.runs.identity import short, short_size
from canonlm.runs.task_info import MAX_LETTERS, TaskInfo
from canonlm.runs.watch import Watch


@pytest.mark.parametrize(
    ("share", "text"),
    [(0, "0%"), (1, "100%"), (0.9999, ">99.9%"), (0.0001, "<0.1%"), (0.125, "12.5%"), (0.93, "93.0%")],
)
def test_percent_never_rounds_to_0_or_100(share, text):
    assert percent(share) == text


def test_points_and_sizes():
    assert [points(x) for x in (0.125, -0.5, 0.0, -0.0001)] == ["+12.5", "−50.0", "0.0", "0.0"]
    assert [short(x) for x in (None, 12, 61234.0, 1_052_160, 1.3e9)] == ["–", "12", "61.2 k", "1.05 M", "1.3 B"]
    assert [short(x) for x in (999.7, 999_600, 1.006632960e12)] == ["1 k", "1 M", "1.01 T"]
    assert [short_size(x) for x in (999, 999_700, 1_364_396_032)] == ["999", "1M", "1.36B"]


def test_measures_in_words_with_a_fallback():
    assert [number(x) for x in (1.917, 0.003141, 0.0, -0.5, 999.7, 12345.6, 2e-7)] == [
        "1.92", "0.00314", "0", "−0.5", "1,000", "12,346", "2e−07"
    ]  # fmt: skip
    assert [signed(x) for x in (0.3125, -0.3125, 0.0)] == ["+0.312", "−0.312", "0"]
    assert (span(0.9, 0.95), span(1.0, 1.25, number), span(2.0, 2.0, number)) == ("90.0–95.0%", "1–1.25", "2")
    assert (span(-0.3, 1.9, number), span(0.979, 0.9999)) == ("−0.3 to 1.9", "97.9% to >99.9%")
    assert (quantity(TaskInfo("lano"), "kl").label, quantity(TaskInfo("lano"), "kl").log) == ("divergence (KL)", True)
    assert quantity(TaskInfo("mine"), "tokens_per_joule").label == "tokens per joule"
    assert quantity(TaskInfo("depo"), "k=1").say(0.5) == quantity(TaskInfo("depo"), "").say(0.5) == "50.0%"


def test_scales_in_words_with_a_fallback():
    assert scale_words(TaskInfo("brevo"), "depth=3").by == "depth of the question"
    assert scale_words(TaskInfo("mine"), "width=3").by == "width"


LABELS = {
    "depo": {"k=1": "1 hop", "k=8": "8 hops", "k=1, n=5": "k = 1, n = 5", "all": "all questions"},
    "mano": {"l=10": "10 operations"},
    "copying": {"first=all": "whole list"},
    "mqar": {"pairs=1": "1 pair"},
    "brevo": {"n=70": "70 items", "depth=3": "depth 3", "nodes=9-16": "9–16 to list"},
    "lano": {"from=start": "from the start", "from=cut": "after 50 given tokens", "cfg=3f": "cfg = 3f"},
    "capo": {"attribute=birth city": "birth city", "question=birth city": "birth city, asked"},
}


@pytest.mark.parametrize("task", LABELS)
def test_slices_in_words_with_a_fallback(task):
    assert {key: slice_label(TaskInfo(task), key) for key in LABELS[task]} == LABELS[task]


def of_rows(folder, rows, task="depo"):
    """`rows`: {arch: [the final evaluation of each seed]}."""
    return summarise(read_runs(write_runs(folder, rows, task={"name": task}))[0])


def architectures(tmp_path, scores):
    """`scores`: {arch: [(correct of 100 at k=1, at k=2) per seed]}."""
    return of_rows(tmp_path, {
        arch: [evaluation(10, {("k", 1): (one, 100), ("k", 2): (two, 100)}) for one, two in seeds]
        for arch, seeds in scores.items()
    })  # fmt: skip


LOW = [(20, 10), (22, 12), (24, 14), (21, 11), (23, 13)]
HIGH = [(90, 80), (93, 82), (92, 84), (91, 83), (90, 81)]


@pytest.mark.parametrize(
    ("plain", "canon", "text"),
    [
        (LOW, HIGH, "b scores higher than a: 86.6% against 17.0% averaged over question types (5 seeds each); so on "
                    "every question type."),
        (HIGH, LOW, "a scores higher than b: 86.6% against 17.0% averaged over question types (5 seeds each); so on "
                    "every question type."),
        # all runs, also of the one that has more
        ([*LOW, (22, 12)], HIGH, "b scores higher than a: 86.6% against 17.0% averaged over question types (a 6 seeds "
                                 "and b 5 seeds); so on every question type."),
        ([(5, 5)] * 5, [(99, 99)] * 5 + [(2, 2)] * 4, "no difference is shown between a and b: 5.0% and 55.9% averaged "
                                                      "over question types (a 5 seeds and b 9 seeds)."),
        ([(0, 40)] * 5, [(100, 90)] * 5,
         "b scores higher than a: 95.0% against 20.0% averaged over question types (5 seeds each); so on 1 hop."),
        # five runs of each leave it possible that almost half of all fail
        ([(20, one[1]) for one in LOW], [(90, one[1]) for one in LOW],
         "no difference is shown between a and b: 16.0% and 51.0% averaged over question types (5 seeds each)."),
        # three of five runs have solved it, which can be luck
        ([(10, 10)] * 5, [(10, 10), (10, 10), (99, 99), (99, 99), (99, 99)],
         "no difference is shown between a and b: 10.0% and 63.4% averaged over question types (5 seeds each)."),
        ([(100, 100)] * 5, [(100, 100)] * 5,
         "no difference is shown between a and b: 100% and 100% averaged over question types (5 seeds each)."),
        (LOW[:3], HIGH[:3], "a reaches 17.0% and b 86.8% averaged over question types (3 runs each): undecided, a "
                            "verdict needs 2 more seeds of each."),
        ([(0, 0), (0, 0)], [(100, 10), (100, 10)],
         "a reaches 0% and b 55.0% averaged over question types (2 runs each): undecided, a verdict needs 3 more seeds "
         "of each."),
        ([(0, 0)], [(0, 0)], "neither a nor b got anything right yet."),
        ([(20, 10)], [(90, 12)], "a reaches 15.0% and b 51.0% averaged over question types (1 run each): undecided, a "
                                 "verdict needs 4 more seeds of each."),
        (LOW, [(90, 80)], "a reaches 17.0% and b 85.0% averaged over question types (a 5 runs and b 1 run): undecided, "
                          "a verdict needs 5 seeds of each."),
    ],
)  # fmt: skip
def test_the_verdict_follows_from_the_seeds(tmp_path, plain, canon, text):
    assert verdict(architectures(tmp_path, {"a": plain, "b": canon})) == f"At the best learning rates, {text}"


def test_three_architectures_are_compared_two_by_two(tmp_path):
    """Each of the three pairs has a wider interval than one pair alone."""
    archs = architectures(tmp_path, {"a": [(0, 0)] * 5, "b": HIGH, "c": [(0, 0)] * 5})
    first, nothing, last = verdict(archs).removesuffix(".").split(". ")
    assert first.startswith("At the best learning rates, b scores higher than a: 86.6% against 0%")
    assert nothing == "Neither a nor c got anything right yet"
    assert last.startswith("b scores higher than c")


def with_lost(folder, scores):
    """`scores`: {arch: correct of 100 of each seed, None for a run that has not finished}."""
    for arch, of_seeds in scores.items():
        for seed, right in enumerate(of_seeds):
            rows = [evaluation(10, {("k", 1): (right or 0, 100)})]
            write_run(folder / f"{arch}{seed}", arch=arch, seed=seed, evals=rows, finished=right is not None)
    [section] = load_play(folder).sections
    return section


def answer_of(folder, scores):
    return section_blocks(with_lost(folder, scores), 0)[0]["answer"].removeprefix("At the best learning rates, ")


LOST, LUCK, RIGHT, WRONG = [None], [100] * 8 + [0] * 8, [100] * 6, [0] * 6


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        # both solve the task in half of the cases; one crashes in the others
        ({"a": [100] * 8 + LOST * 8, "b": LUCK},
         "a reaches 100% and b 50.0% (a 8 runs and b 16 runs): undecided, as 8 of 16 runs of a have no final score, "
         "and the rest is a selection."),
        ({"a": LUCK, "b": [100] * 8 + LOST * 8},
         "a reaches 50.0% and b 100% (a 16 runs and b 8 runs): undecided, as 8 of 16 runs of b have no final score, "
         "and the rest is a selection."),
        ({"a": WRONG + LOST, "b": [0] * 5 + LOST},
         "a reaches 0% and b 0% (a 6 runs and b 5 runs): undecided, as 1 of 7 runs of a and 1 of 6 runs of b have no "
         "final score, and the rest is a selection."),
        ({"a": RIGHT + LOST, "b": LOST},
         "a reaches 100%: mean accuracy, 6 runs. 1 of 7 runs of a has no final score, and the rest is a selection. b "
         "has no finished run."),
        ({"a": [100] * 5, "b": [25] * 5, "c": LOST},
         "a scores higher than b: 100% against 25.0% (5 seeds each). c has no finished run."),
        ({"a": [100] * 5, "b": [35] * 5, "c": LOST},  # at the level of three pairs
         "no difference is shown between a and b: 100% and 35.0% (5 seeds each). c has no finished run."),
        ({"a": RIGHT, "b": WRONG, "c": RIGHT + LOST},
         "a scores higher than b: 100% against 0% (6 seeds each). a reaches 100% and c 100% (6 runs each): undecided, "
         "as 1 of 7 runs of c has no final score, and the rest is a selection. b reaches 0% and c 100% (6 runs each): "
         "undecided, as 1 of 7 runs of c has no final score, and the rest is a selection."),
        ({"a": RIGHT, "b": WRONG, "c": [100, *LOST]},
         "averaged over question types, a 6 runs, c 1 run and b 6 runs: a 100%, c 100% and b 0%. Undecided: 1 of 2 "
         "runs of c has no final score, and the rest is a selection."),
        ({"a": RIGHT, "b": WRONG, "c": RIGHT + LOST, "d": WRONG},
         "1 of 7 runs of c has no final score, and the rest is a selection."),
        ({"a": LOST, "b": LOST}, "No run has finished yet."),
    ],
)  # fmt: skip
def test_nothing_is_decided_by_the_runs_that_are_left(tmp_path, scores, text):
    assert answer_of(tmp_path, scores).endswith(text)


def test_a_rate_at_which_runs_failed_hinders_no_verdict_if_another_is_best(tmp_path):
    with_lost(tmp_path, {"a": RIGHT, "b": WRONG})
    for seed in range(6):
        rows = [evaluation(10, {("k", 1): (100, 100)})]
        write_run(tmp_path / f"more{seed}", arch="b", lr=0.1, seed=seed, evals=rows, finished=seed > 0)
    [section] = load_play(tmp_path).sections
    assert "a scores higher than b: 100% against 0% (6 seeds each)." in verdict(section.architectures)
    assert "does better than at 0.001, which is shown, but fewer seeds" in visible_text(render(load_play(tmp_path)))


def test_the_page_explains_at_what_level_its_verdicts_hold(tmp_path):
    with_lost(tmp_path, {"a": RIGHT, "b": WRONG})
    assert "Each section of a page is judged by itself" in visible_text(render(load_play(tmp_path)))
    with_lost(tmp_path / "one", {"a": RIGHT})
    assert "judged by itself" not in visible_text(render(load_play(tmp_path / "one")))


def test_many_architectures_are_only_ranked(tmp_path):
    archs = architectures(tmp_path, {"a": [(10, 20)], "b": [(90, 80)], "c": [(0, 0)], "d": [(100, 100)]})
    assert verdict(archs) == (
        "At the best learning rates, averaged over question types, 1 run each: d 100%, b 85.0%, a 15.0% and c 0%; "
        "the tables show how sure these are."
    )
    archs = architectures(tmp_path / "more", {"a": [(10, 20)] * 2, "b": [(90, 80)], "c": [(0, 0)], "d": [(100, 100)]})
    assert "question types, d 1 run, b 1 run, a 2 runs and c 1 run: d 100%" in verdict(archs)


def test_a_sentence_names_a_few_of_many_architectures(tmp_path):
    write_runs(tmp_path, {f"a{n}": [evaluation(10, {("k", 1): (n, 40)})] for n in range(10, 30)})
    text = visible_text(page_of(tmp_path))
    assert "a29 72.5%, a28 70.0%, a27 67.5%, a26 65.0%, a25 62.5%, a24 60.0% and 14 others below; the tables" in text
    assert "The verdict takes that into account." not in text


@pytest.mark.parametrize("name", ["llama+canon", "deltaproduct2-conv{negative_eigenvalues=true}+canon"])
def test_no_number_is_cut_in_a_terminal(tmp_path, name):
    rows = [evaluation(10, {("k", 1): (90, 100), ("k", 2): (70, 100)})] * 5
    write_runs(tmp_path, {name: rows}, task={"name": "depo"})
    intervals = {"43.0–95.2%", "33.5–85.7%"}
    assert intervals <= {*printed(tmp_path, width=110).split()}
    narrow = printed(tmp_path, width=80)
    assert "…" not in narrow
    cells = [[cell.strip() for cell in line.split("│")] for line in narrow.splitlines() if "│" in line]
    columns = ["".join(column) for column in zip(*cells, strict=True)]
    assert name in columns[1]
    assert all(any(each in column for column in columns) for each in intervals)


def test_one_architecture_has_no_verdict(tmp_path):
    assert verdict(architectures(tmp_path, {"a": [(1, 2)]})) == ""


@pytest.mark.parametrize(
    ("scores", "text"),
    [
        ({"a": [1.0, 1.2, 1.1, 1.0, 1.2], "b": [1.5, 1.71, 1.6, 1.5, 1.7]},
         "b scores higher than a: 1.6 against 1.1 bits per parameter (5 seeds each), if further runs differ as "
         "these do."),
        ({"a": [1.0, 1.2, 1.1, 1.0, 1.2], "b": [1.0, 1.3, 1.1, 0.9, 1.3]},
         "no difference is shown between a and b: 1.1 and 1.12 bits per parameter (5 seeds each)."),
        ({"a": [1.0], "b": [1.5]}, "a reaches 1 and b 1.5 bits per parameter (1 run each): undecided, a verdict needs "
                                   "4 more seeds of each."),
        ({"a": [1.0], "b": [float("nan")]}, "a against b is undecided, as 1 of 1 run of b has no final score."),
        ({"a": [1.0, 1.2, 1.1, 1.0, 1.2], "b": [1.5, 1.71, 1.6, 1.5, 1.7, float("nan")]},
         "a reaches 1.1 and b 1.6 bits per parameter (5 runs each): undecided, as 1 of 6 runs of b has no final "
         "score, and the rest is a selection."),
        ({"a": [1.0, 1.0], "b": [1.5, float("nan")], "c": [2.0], "d": [float("nan")]},
         "bits per parameter, c 1 run, b 1 run and a 2 runs: c 2, b 1.5, a 1 and d –; the tables show how "
         "sure these are. 1 of 2 runs of b and 1 of 1 run of d have no final score, and the rest is a selection."),
    ],
)  # fmt: skip
def test_the_verdict_on_capo_is_about_bits(tmp_path, scores, text):
    """`scores`: {arch: [bits per parameter per seed]}; everybody knows one fact of two."""
    rows = {
        arch: [evaluation(10, {("attribute", "field"): (5, 10)}, measures={"bits_per_parameter": bits}) for bits in of]
        for arch, of in scores.items()
    }
    assert verdict(of_rows(tmp_path, rows, "capo")) == f"At the best learning rates, {text}"


def test_secondary_slices_do_not_enter_the_verdict(tmp_path):
    archs = of_rows(tmp_path, {
        arch: [evaluation(10, {("n", 70): (50 + seed, 100), ("depth", 1): (right, 100)}) for seed in range(2)]
        for arch, right in (("a", 10), ("b", 90))
    }, "brevo")  # fmt: skip
    assert verdict(archs) == (
        "At the best learning rates, a reaches 50.5% and b 50.5% (2 runs each): undecided, a verdict needs 3 more "
        "seeds of each."
    )


def test_architectures_have_fixed_and_distinct_looks():
    assert looks(["x", "llama"])["llama"] == looks(["llama+canon", "llama"])["llama"] == LOOKS["llama"]
    many = looks(["llama", *(f"mine{n}" for n in range(12))])
    assert len(set(many.values())) == 13
    assert all(look.color in DARK for look in many.values())
    assert len(set(looks([f"mine{n}" for n in range(64)]).values())) == 64


def test_curves_are_one_trace_per_run_and_one_mean(tmp_path):
    archs = architectures(tmp_path, {"a": [(20, 10), (22, 12)], "b": [(90, 80), (90, 82)]})
    series = learning_curves(archs, ["k=1", "k=2"], {"k=1": 0.125})["series"]
    assert len(series) == 1 + 2 * 2 * (2 + 1)
    assert {one["name"] for one in series} == {"a", "b", "chance"}
    mean = next(one for one in series if one.get("run") == "mean")
    assert mean["y"] == [pytest.approx(0.21)]
    assert "mean of 2 runs: 20.0–22.0%\nlearning rate" in mean["hover"][0]


def test_answers_without_a_slice_are_all_or_the_others():
    alone, others = (TaskInfo("mine.py:Own", chance=dict.fromkeys(keys, 0.5)) for keys in (["all"], ["k=1", "all"]))
    assert [slice_label(task, "all") for task in (alone, others)] == ["all questions", "other questions"]
    assert slice_label(TaskInfo.of(tasks.get("depo")), "all") == "other questions"


WORDS = {
    "chance": {"bits=4": 0.5, "bits=9": "half"},
    "about": "Count <b>the bits</b>.",
    "scales": {"bits": {"by": "length", "about": "Longer is harder.", "labels": {"4": "4 <i>bits</i>", "9": 9}}},
    "measures": {"kl": {"label": "distance", "about": "", "log": True}},
    "score": {"measure": "kl", "share": "share of rows"},
}


def of_mine(folder, words):
    """A run on a task from a file that is not there."""
    rows = [evaluation(step, {("bits", 4): (step, 8), ("bits", 9): (1, 8)}, measures={"kl": 0.5}) for step in (4, 8)]
    write_run(folder / "runs" / "one", task={"name": "mine.py:Parity", "bits": 9}, evals=rows)
    (folder / "runs" / "one" / "task.json").write_bytes(words)
    return folder


def test_an_outside_task_provides_its_wording(tmp_path):
    """They are text in the run's folder: a report never runs the file of a task."""
    page = render(load_play(of_mine(tmp_path, json.dumps(WORDS).encode())))
    for words in ("Count <b>the bits</b>.", "4 <i>bits</i>"):
        assert words in visible_text(page)
        assert words not in page
    [section] = load_play(tmp_path).sections
    assert section.chance == {"bits=4": 0.5}
    [run] = section.runs
    assert (slice_label(run.task, "bits=9"), slice_label(run.task, "bits=3")) == ("9", "bits = 3")
    assert (quantity(run.task, "kl").label, run.task.score.measure) == ("distance", "kl")
    [row] = runs_frame([tmp_path])[0].filter(slice="bits=4").iter_rows(named=True)
    assert row["task"] == "mine.py:Parity"
    watch = Watch([tmp_path])
    watch.read(0.0)
    assert in_words(watch.runs[0].task, watch.runs[0].evaluation).startswith("4 <i>bits</i> 1.00  9 0.12")


@pytest.mark.parametrize(
    "words",
    [
        b"", b"{", b"[]", b"\xff", b"[" * 9999, json.dumps(WORDS | {"scales": 3}).encode(),
        json.dumps(WORDS | {"scales": {"bits": {"by": 1, "about": 2, "labels": 3}}}).encode(),
        json.dumps(WORDS | {"about": "x" * MAX_JSON}).encode(),
    ],
)  # fmt: skip
def test_unreadable_wording_is_ignored_with_a_note(tmp_path, words):
    [run] = load_play(of_mine(tmp_path, words)).runs
    assert [note.split()[0] for note in run.damage] == ["task.json"]
    assert (run.task.words.about, slice_label(run.task, "bits=4")) == ("", "bits = 4")


def test_chance_of_thousands_of_slices_is_read(tmp_path):
    task = tasks.get("state", group="S3", N=30_000, answers="every", test_lengths=[*range(1, 30_001)])
    (tmp_path / "task.json").write_text(json.dumps(task_info.written(task), indent=1))
    chance = task_info.read("state", tmp_path / "task.json", notes := []).chance
    assert not notes
    assert len(chance) == 30_000
    assert chance["n=30000"] == 1 / 6


def test_long_wording_is_truncated(tmp_path):
    [run] = load_play(of_mine(tmp_path, json.dumps(WORDS | {"about": "x" * 9999}).encode())).runs
    assert len(run.task.words.about) == MAX_LETTERS
