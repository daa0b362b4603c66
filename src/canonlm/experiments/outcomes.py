"""Finished runs of experiments, from their folders or from rows of a CSV, and their scores."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from canonlm.core.errors import expected
from canonlm.experiments.schema import Setting
from canonlm.runs.folder import read_json
from canonlm.runs.load import Run, load_run
from canonlm.runs.rows import Evaluation, one_line, primary


def read_finished(folder: Path) -> Run | None:
    """A finished run, with the commit of `noted` in its `env`; None until it is finished. ValueError: its files are
    damaged."""
    if not (folder / "result.json").is_file():
        return None
    try:
        run = load_run(folder)
        if run.result is None:
            raise ValueError("; ".join(run.notes))
        return replace(checked(run), env={**run.env, "commit": noted(folder)[1]})
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None


def checked(run: Run) -> Run:
    """A finished run as it is. ValueError if its last evaluation is not that after its last step."""
    steps = run.result.steps if run.result else 0
    if steps < 1 or run.evals[-1].step != steps:
        raise ValueError("a finished run has an evaluation after its last step")
    return run


def noted(folder: Path) -> tuple[dict[str, str], str]:
    """The experiments that a run was trained for, with their sha256, and the commit, from `experiment.json`. ValueError
    if it holds anything else."""
    path = folder / "experiment.json"
    value = read_json(path)
    content = {} if value is None else value
    experiments = content.get("experiments", {}) if isinstance(content, dict) else None
    if not isinstance(experiments, dict) or not all(isinstance(sha, str) for sha in experiments.values()):
        raise expected(str(path), "experiments and their sha256", content)
    return experiments, one_line(str(content.get("commit", "")))


LARGER_IS_BETTER = {"bits_per_parameter", "bits_per_person"}
"""Measures of which a larger value is better; of all others a smaller one is."""


def score(run: Run, setting: Setting, planned_steps: int) -> float:
    """The score that chooses the learning rate, larger is better: the mean accuracy over the setting's slices at the
    end, or its measure, negated if smaller is better. Of runs that end once enough is right, the share of the planned
    steps that they did not need is added; rows of a CSV do not have them. The run has not `diverged`."""
    if setting.measure is not None:
        value = run.final.measures[setting.measure]
        return value if setting.measure in LARGER_IS_BETTER else -value
    unneeded = 0.0 if setting.until is None else 1 - run.final.step / planned_steps
    return accuracy(run.final, setting.slices) + unneeded


def diverged(run: Run, measure: str | None) -> bool:
    """Whether the run ends without a finite value of the measure. None: accuracies, which are always there."""
    return measure is not None and measure not in run.final.measures


def accuracy(row: Evaluation, slices: Sequence[str]) -> float:
    """Mean accuracy over `slices`, or over those of the primary scale if `slices` is empty."""
    keys = slices or primary(row.slices) or ["all"]
    return sum(row.answers(key).accuracy for key in keys) / len(keys)


def evaluated_every(run: Run) -> int:
    """The largest number of steps between two evaluations."""
    steps = [0, *(row.step for row in run.evals)]
    return max(after - before for before, after in pairwise(steps))


def first_step(run: Run, slices: Sequence[str], threshold: float) -> int | None:
    """The first evaluated step with at least that accuracy, if there is one."""
    return next((row.step for row in run.evals if accuracy(row, slices) >= threshold), None)
