"""The evaluations of a finished run, from its folder or from rows of a CSV."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from canonlm.core.untrusted import read_object
from canonlm.experiments.schema import Setting
from canonlm.runs.folder import with_final
from canonlm.runs.rows import DAMAGE, Evaluation, count, evaluation, finite, primary, read, text_evaluation


@dataclass(frozen=True)
class Outcome:
    """The evaluations of a finished run, in order of steps."""

    steps: int
    evals: tuple[Evaluation, ...]

    @property
    def final(self) -> Evaluation:
        return self.evals[-1]

    def first_step(self, slices: Sequence[str], threshold: float) -> int | None:
        """The first evaluated step with at least that accuracy, if there is one."""
        return next((row.step for row in self.evals if accuracy(row, slices) >= threshold), None)

    def __post_init__(self) -> None:
        if not self.evals or self.steps < 1 or self.evals[-1].step != self.steps:
            raise ValueError("a finished run has an evaluation after its last step")


def read_outcome(folder: Path) -> Outcome | None:
    """The outcome of a run, None until it is finished. ValueError: its files are damaged."""
    if not (folder / "result.json").is_file():
        return None
    evals, _, _ = read(folder / "metrics.jsonl", _evaluation)
    evals = [replace(row, place=str(folder / "metrics.jsonl")) for row in evals]
    try:
        result = read_object(folder / "result.json")
        steps = count(result["steps"])
        return Outcome(steps, tuple(with_final(evals, _evaluation(result["final"], steps))))
    except DAMAGE as error:
        raise ValueError(f"{folder}: {error if isinstance(error, ValueError) else 'result.json is damaged'}") from None


def _evaluation(row: Any, step: int | None = None) -> Evaluation:
    """An evaluation of a task, or of text, whose losses become measures."""
    if "sets" not in row:
        return evaluation(row, step)
    text = text_evaluation(row, step)
    measures = {"loss": text.loss, **row.get("measures", {})}
    return Evaluation(text.step, {}, text.loss, {key: float(value) for key, value in measures.items() if finite(value)})


LARGER_IS_BETTER = {"bits_per_parameter"}
"""Measures of which a larger value is better; of all others a smaller one is."""


def score(outcome: Outcome, setting: Setting) -> float:
    """The score that chooses the learning rate, larger is better: the mean accuracy over the setting's slices at the
    end, or its measure, negated if smaller is better. The run has not `diverged`."""
    if setting.measure is not None:
        value = outcome.final.measures[setting.measure]
        return value if setting.measure in LARGER_IS_BETTER else -value
    return accuracy(outcome.final, setting.slices)


def diverged(outcome: Outcome, measure: str | None) -> bool:
    """Whether the run ends without a finite value of the measure. None: accuracies, which are always there."""
    return measure is not None and measure not in outcome.final.measures


def accuracy(row: Evaluation, slices: Sequence[str]) -> float:
    """Mean accuracy over `slices`, or over those of the primary scale if `slices` is empty."""
    keys = slices or primary(row.slices) or ["all"]
    return sum(row.answers(key).accuracy for key in keys) / len(keys)


def step_at(outcome: Outcome, slices: Sequence[str], threshold: float) -> float:
    """The first evaluated step with at least that accuracy, as a share of the training; for a run without one, the
    training and one evaluation interval more."""
    step = outcome.first_step(slices, threshold)
    return 1 + outcome.evals[0].step / outcome.steps if step is None else step / outcome.steps
