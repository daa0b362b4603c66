"""Reads run folders into small frozen records, with a reason for everything that is left out.

No file is trusted: see `canonlm.runs.folder`. A run on text is a `TextRun`, with losses on held-out text and no
accuracies. Runs on the same text are compared.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected
from canonlm.core.user_code import is_reference
from canonlm.runs.folder import TASK, Recorded, read_config, read_object, recorded
from canonlm.runs.identity import ABSENT
from canonlm.runs.rows import (
    DAMAGE,
    Evaluation,
    TextEvaluation,
    count,
    evaluation,
    finite,
    known_count,
    one_line,
    text_evaluation,
)
from canonlm.runs.task_info import TaskInfo, read

MAX_REASON, MAX_LABEL = 300, 300
"""Max letters of texts from files."""


@dataclass(frozen=True)
class LeftOut:
    """Something that could not be read or does not count, and why."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Run(Recorded[Evaluation]):
    """A run on a task. `task_label` is the task with its settings."""

    task: TaskInfo
    task_label: str


@dataclass(frozen=True)
class Source:
    """A text that is read; `content`: the sha256 of the folder's content, if the run has recorded it."""

    name: str
    path: str
    weight: float
    content: str

    @property
    def key(self) -> tuple[str, str, float]:
        """Identifies the text, by its content if known, so that its path does not matter."""
        return self.name, self.content or self.path, self.weight


@dataclass(frozen=True, kw_only=True)
class TextRun(Recorded[TextEvaluation]):
    sources: tuple[Source, ...]

    @property
    def tokens(self) -> int | None:
        """The number of tokens read so far."""
        return tokens_of(self.config, self.last_step)

    @property
    def last(self) -> TextEvaluation | None:
        """The newest evaluation on any validation set."""
        return next((row for row in reversed(self.evals) if row.sets), None)


def load_run(folder: str | Path) -> Run | TextRun:
    """Read one run folder. ValueError: one line on why it cannot be read at all."""
    folder = Path(folder)
    config = read_config(folder)
    if config.get("text") is not None:
        return load_text(folder, config)
    task, label = task_of(config, folder)
    return Run(task=task, task_label=label, **recorded(folder, config, evaluation, []))


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run | TextRun], list[LeftOut]]:
    """Read what can be read. A folder that holds no evaluation and no training row yet is left out too."""
    runs: list[Run | TextRun] = []
    left_out: list[LeftOut] = []
    for folder in map(Path, folders):
        try:
            run = load_run(folder)
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(one_line(folder.name, 255), one_line(str(error), MAX_REASON)))
            continue
        if run.evals or run.train:
            runs.append(run)
        else:
            left_out.append(LeftOut(run.name, "; ".join(("nothing recorded yet", *run.notes))))
    return runs, left_out


def task_of(config: Mapping[str, Any], folder: Path) -> tuple[TaskInfo, str]:
    """A run's task, and its name with its settings. ValueError: the run has no task."""
    task = config.get("task")
    spec = dict(task) if isinstance(task, dict) else {"name": task}
    name = spec.pop("name", None)
    if not isinstance(name, str):
        raise expected("task.name", "a task's name", name)
    # Later versions have more settings, which are absent unless set.
    settings = ", ".join(f"{key}={value}" for key, value in spec.items() if value not in ABSENT)
    label = one_line(f"{name} ({settings})" if settings else name, MAX_LABEL)
    name = one_line(name)
    return TaskInfo(name, read(folder / TASK) if is_reference(name) else None), label


def load_text(folder: Path, config: Mapping[str, Any]) -> TextRun:
    """Read a run on text. ValueError: one line on why it cannot be read at all."""
    notes: list[str] = []
    texts = read_object(folder / "data.json", notes) or {}
    sources = []
    for name, source in named_sources(config).items():
        source = source if isinstance(source, dict) else {}
        noted = texts.get(f"text.sources.{name}.path")
        content = noted.get("sha256") if isinstance(noted, dict) else None
        weight = source.get("weight", 1.0)
        sources.append(Source(name, one_line(str(source.get("path", ""))),
                            float(weight) if finite(weight) else 1.0, one_line(str(content or ""))))  # fmt: skip
    return TextRun(sources=tuple(sources), **recorded(folder, config, text_evaluation, notes))


def named_sources(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text")
    sources = text.get("sources") if isinstance(text, dict) else None
    if not isinstance(sources, dict) or not sources:
        raise expected("text.sources", "the text that is read, by name", sources)
    return {one_line(str(name)): source for name, source in sources.items()}


def set_names(runs: Sequence[TextRun]) -> list[str]:
    """The validation sets of any run, in their order."""
    return list(dict.fromkeys(name for run in runs for row in run.evals for name in row.sets))


def tokens_of(config: Mapping[str, Any], step: int) -> int | None:
    """Tokens read up to a step; None if an old configuration lacks the sizes."""
    try:
        return count(step * count(config["train"]["batch_size"]) * count(config["data"]["seq_len"]))
    except DAMAGE:
        return None


def shape_of(config: Mapping[str, Any]) -> str | None:
    """`12L768D`, as the paper calls models of this size: the same with and without Canon layers."""
    model = config.get("model")
    layers, width = (
        (model.get(key) for key in ("num_hidden_layers", "hidden_size")) if isinstance(model, dict) else (0, 0)
    )
    return f"{layers}L{width}D" if known_count(layers) and known_count(width) else None


def mixes(runs: Sequence[TextRun]) -> dict[str, list[TextRun]]:
    """The runs by what they read: the same texts with the same weights, in whatever folders. A mix is named after its
    sources; weights, folders or contents are added only if two mixes would have one name."""
    groups: dict[tuple[Any, ...], list[TextRun]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(source.key for source in run.sources)), []).append(run)
    named: dict[str, list[TextRun]] = {}
    for group in groups.values():
        others = [other[0].sources for other in groups.values() if other is not group]
        unique = (naming for naming in _NAMINGS if all(naming(group[0].sources) != naming(o) for o in others))
        named[next(unique, _NAMINGS[-1])(group[0].sources)] = group
    return named


def _by_name(sources: Sequence[Source]) -> str:
    return ", ".join(sorted(source.name for source in sources))


def _by_weight(sources: Sequence[Source]) -> str:
    return ", ".join(sorted(f"{source.name} × {source.weight:g}" for source in sources))


def _by_place(sources: Sequence[Source]) -> str:
    return ", ".join(sorted(f"{source.name} × {source.weight:g} ({source.path})" for source in sources))


def _by_content(sources: Sequence[Source]) -> str:
    return ", ".join(
        sorted(f"{source.name} × {source.weight!r} ({source.path}, {source.content[:12]})" for source in sources)
    )


_NAMINGS = (_by_name, _by_weight, _by_place, _by_content)
