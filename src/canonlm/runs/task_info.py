"""Tasks for readers of runs. `task.json` in a run folder has what guessing scores, and the words of a task from
outside, whose own file is never run.

The JSON may be somebody else's: it is only read as text, and long texts are cut.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from canonlm.core.errors import expected
from canonlm.core.user_code import is_reference
from canonlm.runs.folder import TASK, read_object
from canonlm.runs.rows import DAMAGE, finite, one_line, primary, slice_key

if TYPE_CHECKING:  # numba, which a report of other results does not need
    from canonlm.tasks import Measure, Scale, Score, Task

MAX_LETTERS = 500
ROUNDING = 1e-9  # of probabilities that add up to 1


@dataclass(frozen=True)
class Words:
    """The attributes of a task class with the same names."""

    score: "Score"
    about: str = ""
    scales: "Mapping[str, Scale]" = field(default_factory=dict)
    measures: "Mapping[str, Measure]" = field(default_factory=dict)


@dataclass(frozen=True)
class TaskInfo:
    """A task for readers of its runs. own: the words of a task from outside. A built-in task is looked up by its name;
    any other name has empty words. chance: what guessing scores, by slice (`k=1`)."""

    name: str
    own: "Words | Task | None" = field(default=None, compare=False, repr=False)
    chance: Mapping[str, float] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, task: "Task | None") -> "TaskInfo":
        return cls("") if task is None else cls(task.name, task)

    @property
    def words(self) -> "Words | Task | type[Task]":
        from canonlm.tasks import registered

        return registered(self.name) if self.own is None else self.own

    @property
    def score(self) -> "Score":
        return self.words.score

    @property
    def sliced(self) -> bool:
        """Whether answers have slices; those without one are then the others, not all."""
        own = self.own
        keys = self.chance if own is None or isinstance(own, Words) else map(slice_key, own.slices())
        return any(key != "all" for key in keys)

    def headline(self, slices: Iterable[str]) -> list[str]:
        """The slices whose mean accuracy stands for the task: the one that it names, or all of the primary scale."""
        one = self.score.slice
        return [key for key in primary(slices) if key == one or not one]


def written(task: "Task") -> dict[str, Any]:
    """The content of `task.json`. Scales have labels for the slices of the test. ValueError: words of another type, a
    chance that is not a share, a test without answers, a grade that is not a verdict."""
    _check_words(task)
    _check_answers(task)
    labels: dict[str, dict[str, str]] = {name: {} for name in task.scales}
    for name, value in (pair for where in task.slices() for pair in where.items() if pair[0] in labels):
        labels[name][str(value)] = task.scales[name].label(str(value))
    scales = {
        name: {"by": one.by, "about": one.about, "trained": one.trained, "labels": labels[name]}
        for name, one in task.scales.items()
    }
    chance: dict[str, float] = {}
    for where in task.slices():
        key, score = slice_key(where), task.chance(where)
        if not (isinstance(score, Real) and 0 <= score <= 1 + ROUNDING):
            raise expected(f"{task.name}: chance of {key}", "a share from 0 to 1", score)
        if chance.setdefault(key, score) != score:  # of k=1 and k="1"
            raise expected(f"{task.name}: chance of {key}", f"one share, {chance[key]}", score)
    return {
        "chance": {key: min(1.0, float(score)) for key, score in chance.items()},
        "about": task.about,
        "scales": scales,
        "measures": {key: vars(measure) for key, measure in task.measures.items()},
        "score": vars(task.score),
    }


def _check_words(task: "Task") -> None:
    from canonlm.tasks import Measure, Scale, Score

    if not isinstance(task.score, Score):
        raise expected(f"{task.name}: score", "a canonlm.tasks.Score", task.score)
    for key, words, kind in (("scales", task.scales, Scale), ("measures", task.measures, Measure)):
        if not isinstance(words, Mapping) or not all(isinstance(one, kind) for one in words.values()):
            raise expected(f"{task.name}: {key}", f"a dict of canonlm.tasks.{kind.__name__}", words)


def _check_answers(task: "Task") -> None:
    """A task in Python may have forgotten its answers, or grade by points."""
    from canonlm.tasks.function import SAMPLES_FOR_SLICES
    from canonlm.tasks.tally import Tally

    if not (task.draws_in_python and task.evaluation in ("windows", "generate")):  # others may not ask for answers
        return
    samples = (task.sample("test", 0, index) for index in range(SAMPLES_FOR_SLICES))
    sample = next((one for one in samples if one.queries), None)
    if sample is None:
        raise expected(f"{task.name}: draw", "an Answer in a test sample", f"none in {SAMPLES_FOR_SLICES} samples")
    tally = Tally([])
    for verdict in task.grade(sample, sample.tokens):
        tally.add(verdict)


def read(name: str, path: Path, notes: list[str]) -> TaskInfo:
    """The task of this name and `task.json`; without chance and words if the file is missing or damaged, which is added
    to `notes`."""
    raw = read_object(path, notes)
    return TaskInfo(name, _words(raw or {}, notes) if is_reference(name) else None, chance_in(raw))


def chance_in(raw: Any) -> dict[str, float]:
    """The scores of guessing in the content of a `task.json`, or of a `play.json` of an earlier version."""
    chance = raw.get("chance") if isinstance(raw, Mapping) else None
    return {one_line(str(k)): float(v) for k, v in chance.items() if finite(v)} if isinstance(chance, Mapping) else {}


def _words(raw: Mapping[str, Any], notes: list[str]) -> Words:
    from canonlm.tasks import Measure, Scale, Score

    try:
        return Words(
            Score(**{key: _text({"slice": "", **raw["score"]}, key) for key in ("measure", "share", "slice")}),
            _text(raw, "about"),
            {key: Scale(_text(one, "by"), _labels(key, dict(one["labels"])), _text(one, "about"),
                        _text({"trained": "", **one}, "trained"))
             for key, one in raw["scales"].items()},
            {key: Measure(_text(one, "label"), _text(one, "about"), one["log"] is True)
             for key, one in raw["measures"].items()},
        )  # fmt: skip
    except DAMAGE:
        notes += [f"{TASK} has no readable words"] if raw else []
        return Words(Score())


def _text(raw: Mapping[str, Any], key: str) -> str:
    return one_line(str(raw[key]), MAX_LETTERS)


def _labels(scale: str, labels: Mapping[str, Any]) -> Callable[[str], str]:
    return lambda value: _text(labels, value) if value in labels else f"{scale} = {value}"
