"""Reads run folders into small frozen records, with a reason for everything that is left out.

No file is trusted: see `canonlm.runs.folder`. A run on text is a `TextRun`, with losses and no accuracies.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected
from canonlm.core.user_code import is_reference
from canonlm.runs.folder import TASK, Recorded, read_config, recorded
from canonlm.runs.identity import ABSENT
from canonlm.runs.rows import Evaluation, evaluation, one_line
from canonlm.runs.task_info import Named, read
from canonlm.runs.text import TextRun, load_text

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

    task: str
    task_label: str


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


def task_of(config: Mapping[str, Any], folder: Path) -> tuple[str, str]:
    """The name of a run's task, without and with its settings. ValueError: the run has no task."""
    task = config.get("task")
    spec = dict(task) if isinstance(task, dict) else {"name": task}
    name = spec.pop("name", None)
    if not isinstance(name, str):
        raise expected("task.name", "a task's name", name)
    # Later versions have more settings, which are absent unless set.
    settings = ", ".join(f"{key}={value}" for key, value in spec.items() if value not in ABSENT)
    label = one_line(f"{name} ({settings})" if settings else name, MAX_LABEL)
    name = one_line(name)
    return (Named(name, read(folder / TASK)) if is_reference(name) else name), label
