"""A row per architecture of runs on text: the best rate, means over seeds, birth-year questions."""

import math

import pytest
from folders import text_evaluation, write_results, write_text_run
from reading import page_of, printed, visible_text

from canonlm.report import load_play
from canonlm.report.text_section import answer, scores_blocks

LOSSES = {  # (arch, lr): by seed
    ("llama", 0.001): (2.0, 2.2, 2.4), ("llama", 0.003): (1.9, 2.3, 2.1),
    ("llama+canon", 0.001): (1.5, 1.7, 1.9), ("llama+canon", 0.003): (1.4, 1.5),
}  # fmt: skip
RIGHT = {0: 0.5, 1: 0.25, 2: 0.3}


@pytest.fixture
def played(tmp_path):
    for (arch, lr), losses in LOSSES.items():
        for seed, loss in enumerate(losses):
            run = tmp_path / "runs" / f"text-{arch}-lr{lr:g}-seed{seed}"
            rows = [text_evaluation(step, {"web": (more + loss, 1.5 * loss, 1000)}) for step, more in ((5, 1), (10, 0))]
            write_text_run(run, arch=arch, lr=lr, seed=seed, evals=rows)
            if arch == "llama" and lr == 0.003:
                entry = ("multihop", "1hop-0k", {}, [("exact", RIGHT[seed], 0.1, 200, {}, True)])
                write_results(run / "evals" / "step-00000010", {"source": str(run)}, [entry])
    unfinished = [text_evaluation(5, {"web": (0.1, 0.1, 1000)})]
    write_text_run(
        tmp_path / "runs" / "u", arch="llama+canon", lr=0.003, seed=2, evals=unfinished, steps=10, finished=False
    )
    return tmp_path


def test_each_architecture_at_its_best_rate(played):
    """A rate of llama+canon with an unfinished run does not win by its two finished ones."""
    [section] = load_play(played).texts
    llama, canon = (a.best for a in section.architectures)
    assert (llama.arch, llama.lr, llama.score.runs) == ("llama", 0.003, 3)
    assert llama.score.mean == llama.spread("loss (web)").mean == pytest.approx(2.1)
    assert llama.spread("bits per byte (web)").mean == pytest.approx(1.5 * 2.1)
    half = 4.3026527 * 0.2 / 3**0.5  # Student's t, two degrees of freedom
    assert llama.spread("loss (web)").high == pytest.approx(2.1 + half)
    assert (canon.arch, canon.lr, canon.score.runs) == ("llama+canon", 0.001, 3)
    shown = scores_blocks(section)[0]["table"]
    assert shown["head"][3:] == ["loss (web)", "bits per byte (web)", "1hop-0k"]
    assert [row[0] for row in shown["rows"]] == ["llama+canon", "llama"]
    assert [row[-1] if isinstance(row[-1], str) else row[-1]["share"] for row in shown["rows"]] == ["–", 35.0]


@pytest.mark.parametrize(("loss", "said"), [(1.0, True), (3.0, False)])
def test_a_rate_with_a_lower_loss_of_fewer_seeds_is_named(tmp_path, loss, said):
    """All runs have finished; one at the other rate has diverged."""
    for lr, losses in ((0.001, (2.0, 2.0)), (0.003, (loss, math.nan))):
        for seed, each in enumerate(losses):
            evals = [text_evaluation(10, {"web": (each, each, 1000)})]
            write_text_run(tmp_path / "runs" / f"{lr}-{seed}", lr=lr, seed=seed, evals=evals)
    caveat = (
        "Before you conclude: at learning rate 0.003, llama does better than at 0.001, which is shown, but fewer seeds "
        "have a score there (1 against 2). (3 more below.)"
    )
    text = visible_text(page_of(tmp_path))
    assert (caveat in text) == said
    assert "Fewer than 3 seeds: the spread between repeats is not well known." in text


def test_equal_digits_have_no_winner(tmp_path):
    for arch, loss in (("llama", 2.1001), ("llama+canon", 2.1004), ("gla5", 2.2)):
        evals = [text_evaluation(10, {"web": (loss, loss, 1000)})]
        write_text_run(tmp_path / "runs" / arch, arch=arch, lr=0.001, seed=0, evals=evals, steps=10)
    [section] = load_play(tmp_path).texts
    assert answer(section).startswith(
        "llama and llama+canon have the lowest loss on held-out text: llama 2.100 (1 run)"
    )


def test_runs_without_a_loss_are_named(tmp_path):
    for arch, seed, loss in (("llama", 0, 2.0), ("llama", 1, math.nan), ("llama+canon", 0, 1.9), ("gla5", 0, None)):
        evals = [text_evaluation(10, {"web": (loss or 2.0, 1.0, 1000)})]
        write_text_run(tmp_path / f"{arch}{seed}", arch=arch, seed=seed, evals=evals, finished=loss is not None)
    [section] = load_play(tmp_path).texts
    assert answer(section).endswith(
        " 1 of 2 runs of llama has no final score, and the rest is a selection. gla5 has no finished run."
    )


def test_the_page_and_the_terminal_have_the_table(played):
    text, page = printed(played, width=150), page_of(played)
    lowest = "llama+canon has the lowest loss on held-out text: llama+canon 1.700 (3 runs) and llama 2.100 (3 runs);"
    assert lowest in page
    for shown in (text, page):
        assert "1hop-0k" in shown
        assert "35.0%" in shown
        assert "2.100" in shown


def asked(folder, arch, entries, step=10):
    """A run of ten steps, asked in other settings: (people, share right)."""
    if not folder.exists():
        evals = [text_evaluation(10, {"web": (2.0, 1.5, 1000)})]
        write_text_run(folder, arch=arch, lr=0.001, seed=0, evals=evals)
    write_results(folder / "evals" / f"step-{step:08d}", {"source": str(folder), "step": step}, [
        ("multihop", "1hop-0k", {"people": people, "published": people == 1}, [("exact", share, 0.1, 200, {}, True)])
        for people, share in entries
    ])  # fmt: skip


def columns(folder):
    """The birth-year questions of the table: {question: cells of llama+canon, then of llama}."""
    [section] = load_play(folder).texts
    shown = scores_blocks(section)[0]["table"]
    rows = sorted(shown["rows"], key=lambda row: row[0], reverse=True)
    cells = [[each if isinstance(each, str) else each["text"] for each in row] for row in rows]
    return {name: [row[place] for row in cells] for place, name in enumerate(shown["head"]) if "hop" in name}


def test_questions_in_other_settings_have_other_columns(tmp_path):
    """One run in two settings, and two architectures in different ones."""
    asked(tmp_path / "runs" / "a", "llama", [(5, 0.3)])
    asked(tmp_path / "runs" / "b", "llama+canon", [(1, 0.9), (5, 0.2)])
    assert columns(tmp_path) == {
        "1hop-0k (people=5, published=no)": ["20.0%", "30.0%"],
        "1hop-0k (people=1, published=yes)": ["90.0%", "–"],
    }


def test_one_setting_is_not_in_the_column(tmp_path):
    asked(tmp_path / "runs" / "a", "llama", [(5, 0.3)])
    asked(tmp_path / "runs" / "b", "llama+canon", [(5, 0.2)])
    assert columns(tmp_path) == {"1hop-0k": ["20.0%", "30.0%"]}


def test_answers_are_those_after_the_last_step(tmp_path):
    """An earlier step has no cell beside the final loss, even if its folder comes later or is the only one."""
    asked(tmp_path / "runs" / "a", "llama", [(5, 0.3)])
    asked(tmp_path / "runs" / "a", "llama", [(5, 0.1), (1, 0.1)], step=5)
    (tmp_path / "runs" / "a" / "evals" / "step-00000005").rename(tmp_path / "runs" / "a" / "evals" / "z")
    asked(tmp_path / "runs" / "b", "llama+canon", [(5, 0.2)], step=5)
    assert columns(tmp_path) == {"1hop-0k": ["–", "30.0%"]}
