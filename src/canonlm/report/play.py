"""A play folder in: its sections with their runs. Works without `play.json`, then with one section per task."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import expected
from .evals import Evaluated, load_evaluated
from .runs import LeftOut, Run, load_runs


@dataclass(frozen=True)
class Section:
    """Runs of one task that are compared with each other. `chance` maps a slice (`k=1`) to what guessing scores."""

    heading: str
    text: str
    runs: tuple[Run, ...]
    chance: Mapping[str, float] = field(default_factory=dict)

    @property
    def task(self) -> str:
        return self.runs[0].task


@dataclass(frozen=True)
class Play:
    title: str
    command: str
    sections: tuple[Section, ...]
    left_out: tuple[LeftOut, ...]
    evaluated: tuple[Evaluated, ...] = ()


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders of a play folder, of a folder of runs, or the one run folder that it is. None where there are
    only results of `canonlm eval`; ValueError where there is nothing."""
    folder = Path(folder)
    if (folder / "config.yaml").is_file():
        return [folder]
    inside = folder / "runs" if (folder / "runs").is_dir() else folder
    found = sorted(path for path in inside.iterdir() if path.is_dir()) if inside.is_dir() else []
    results = {path.parent for path in folder.rglob("results.json")}
    if not found and not results:
        raise expected("folder", "a folder with runs or results of `canonlm eval` in it", str(folder))
    of_results = {path for each in results for path in (each, each / "answers", *each.parents)}
    return [path for path in found if (path / "config.yaml").is_file() or path not in of_results]


def load_play(folder: str | Path) -> Play:
    """Read `play.json` and all runs. Raises ValueError where there is no run folder at all."""
    folder = Path(folder)
    runs, left_out = load_runs(run_folders(folder))
    evaluated, unreadable = load_evaluated(folder)
    left_out += unreadable
    play = _read(folder / "play.json", left_out)
    sections = _listed(play, runs, left_out) if isinstance(play.get("sections"), list) else None
    if not sections:
        runs.sort(key=lambda run: (run.task_label, run.arch, run.lr, run.seed))
        sections = [Section("", "", tuple(runs), _chance(play))] if runs else []
    title = play.get("title")
    command = play.get("command")
    return Play(
        title=title if isinstance(title, str) and title else folder.resolve().name,
        command=command if isinstance(command, str) else "",
        sections=tuple(part for section in sections for part in _by_task(section)),
        left_out=tuple(left_out),
        evaluated=tuple(evaluated),
    )


def _read(path: Path, left_out: list[LeftOut]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        play = json.loads(path.read_bytes())
    except ValueError:
        play = None
    if not isinstance(play, dict):
        left_out.append(LeftOut("play.json", "damaged; the sections below are one per task"))
        return {}
    return play


def _chance(raw: Mapping[str, Any]) -> dict[str, float]:
    chance = raw.get("chance")
    return (
        {str(k): float(v) for k, v in chance.items() if isinstance(v, (int, float))} if isinstance(chance, dict) else {}
    )


def _listed(play: Mapping[str, Any], runs: list[Run], left_out: list[LeftOut]) -> list[Section]:
    """Names are looked up among the folders that were read, so a name can never lead out of the play folder."""
    by_name = {run.name: run for run in runs}
    known = set(by_name) | {entry.name for entry in left_out}
    listed: set[str] = set()
    sections = []
    for raw in play["sections"]:
        names = [str(name) for name in raw.get("runs", [])] if isinstance(raw, dict) else []
        left_out += [LeftOut(name, "not started: no such folder") for name in names if name not in known]
        listed.update(names)
        members = tuple(by_name[name] for name in names if name in by_name)
        if members:
            sections.append(Section(str(raw.get("heading", "")), str(raw.get("text", "")), members, _chance(raw)))
    left_out += [LeftOut(name, "not listed in play.json") for name in by_name if name not in listed]
    return sections


def _by_task(section: Section) -> list[Section]:
    """Accuracies on different tasks are never pooled: a section holds runs of one task with one set of settings."""
    tasks = {run.task_label: run.task for run in section.runs}
    parts = []
    for label in tasks:
        short = tasks[label] if list(tasks.values()).count(tasks[label]) == 1 else label
        heading = section.heading if len(tasks) == 1 else f"{section.heading}: {short}" if section.heading else short
        members = tuple(run for run in section.runs if run.task_label == label)
        parts.append(Section(heading or short, section.text, members, section.chance))
    return parts
