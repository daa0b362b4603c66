"""The sections of a report with their runs, from folders. Without a `play.json` there is one section per task."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from canonlm.core.untrusted import read_object
from canonlm.report.evals import years_of
from canonlm.report.format import listed
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.folder import Folders
from canonlm.runs.gather import Gathered, gather
from canonlm.runs.groups import Group
from canonlm.runs.load import MAX_LABEL, LeftOut, Run, mixes
from canonlm.runs.rows import one_line, writable
from canonlm.runs.summary import Architecture, summarise
from canonlm.runs.task_info import TaskInfo, chance_in

MAX_TITLES = 3
MAX_COMMAND = 20_000  # letters


@dataclass(frozen=True)
class Section:
    """Runs of one task, or on the same text, that are compared with each other. `chance` maps a slice (`k=1`) to what
    guessing scores. `years`: (share right, questions) by run on text and birth-year question."""

    heading: str
    text: str
    runs: tuple[Run, ...]
    chance: Mapping[str, float] = field(default_factory=dict)
    years: Mapping[str, Mapping[str, tuple[float, int]]] = field(default_factory=dict)

    @cached_property
    def architectures(self) -> list[Architecture]:
        return summarise(self.runs)

    @property
    def groups(self) -> list[Group]:
        return [a.group for a in self.architectures]

    @property
    def task(self) -> TaskInfo:
        return self.runs[0].task

    @property
    def task_label(self) -> str:
        return self.runs[0].task_label


@dataclass(frozen=True)
class Play:
    """title: of `play.json`; "" if there is none, or too many."""

    title: str
    command: str
    sections: tuple[Section, ...]
    left_out: tuple[LeftOut, ...]
    evaluated: tuple[Evaluated, ...] = ()
    texts: tuple[Section, ...] = ()
    gathered: tuple[Gathered, ...] = field(default=(), repr=False)  # everything, as it was read

    @property
    def parts(self) -> list[Section]:
        return [*self.sections, *self.texts]

    @property
    def runs(self) -> list[Run]:
        return [run for part in self.parts for run in part.runs]


def load_play(folders: Folders) -> Play:
    """Read `play.json` and all runs of a folder, or of several: sections of one task with equal settings, from two
    folders, become one. Raises ValueError for a folder in which there is no run folder at all."""
    gathered = gather(folders)
    several = len(gathered) > 1
    plays, sections, left_out = [], [], []
    for one in gathered:
        before = f"{one.folder}/" if several else ""
        left_out += one.left_out
        play, in_folder, missing = _sections(one)
        plays.append(play)
        sections.append(in_folder)
        left_out += [LeftOut(writable(before + entry.name), entry.reason) for entry in missing]
    texts = [run for one in gathered for run in one.runs.values() if run.sources]
    texts.sort(key=lambda run: (run.arch, run.lr, run.seed))
    evaluated = {name: one for each in gathered for name, one in each.evaluated.items()}
    titles = list(dict.fromkeys(title for play in plays if (title := _text_of(play, "title"))))
    commands = dict.fromkeys(command for play in plays if (command := _text_of(play, "command")))
    return Play(
        title=listed(titles) if 0 < len(titles) <= MAX_TITLES else "",
        command="\n".join(commands),
        sections=_merged(sections),
        left_out=tuple(left_out),
        evaluated=tuple(replace(one, label=name) if several else one for name, one in evaluated.items()),
        texts=tuple(
            Section(
                f"Pretraining on text: {name}",
                "",
                tuple(group),
                years=years_of(evaluated, group),
            )
            for name, group in mixes(texts).items()
        ),
        gathered=tuple(gathered),
    )


def _sections(one: Gathered) -> tuple[Mapping[str, Any], list[Section], list[LeftOut]]:
    """(`play.json`, the sections of one folder, what is missing)."""
    missing: list[LeftOut] = []
    runs = {name: run for name, run in one.runs.items() if not run.sources}
    play = _read(one.folder / "play.json", missing)
    known = {*one.runs, *(entry.name.removeprefix(f"{one.folder}/") for entry in one.left_out)}
    sections = _listed(play, runs, known, missing) if isinstance(play.get("sections"), list) else None
    if not sections:
        members = sorted(runs.values(), key=lambda run: (run.task_label, run.arch, run.lr, run.seed))
        sections = [Section("", "", tuple(members), chance_in(play))] if members else []
    return play, [part for section in sections for part in _by_task(section)], missing


def _read(path: Path, left_out: list[LeftOut]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return read_object(path)
    except ValueError:
        left_out.append(LeftOut("play.json", "damaged; the sections below are one per task"))
        return {}


def _text_of(raw: Mapping[str, Any], key: str) -> str:
    value = raw.get(key)
    if not isinstance(value, str):
        return ""
    return writable(value)[:MAX_COMMAND] if key == "command" else one_line(value, MAX_LABEL)


def _listed(
    play: Mapping[str, Any], runs: Mapping[str, Run], known: set[str], left_out: list[LeftOut]
) -> list[Section]:
    """Names are looked up among the folders that were read, so a name can never lead out of the play folder."""
    named: set[str] = set()
    sections = []
    for raw in play["sections"]:
        names = raw.get("runs") if isinstance(raw, dict) else None
        names = [one_line(str(name), 255) for name in names] if isinstance(names, list) else []
        left_out += [LeftOut(name, "not started: no such folder") for name in names if name not in known]
        named.update(names)
        members = tuple(runs[name] for name in names if name in runs)
        if members:
            sections.append(Section(_text_of(raw, "heading"), _text_of(raw, "text"), members, chance_in(raw)))
    left_out += [LeftOut(name, "not listed in play.json") for name in runs if name not in named]
    return sections


def _by_task(section: Section) -> list[Section]:
    """Accuracies on different tasks are never pooled: a section holds runs of one task with one set of settings."""
    tasks = {run.task_label: run.task.name for run in section.runs}
    parts = []
    for label in tasks:
        short = tasks[label] if list(tasks.values()).count(tasks[label]) == 1 else label
        heading = section.heading if len(tasks) == 1 else f"{section.heading}: {short}" if section.heading else short
        members = tuple(run for run in section.runs if run.task_label == label)
        chance = next((run.task.chance for run in members if run.task.chance), section.chance)
        parts.append(Section(heading or short, section.text, members, chance))
    return parts


def _merged(folders: Sequence[Sequence[Section]]) -> tuple[Section, ...]:
    """Each section of a later folder joins the first one of an earlier folder with the same task and settings."""
    merged: list[Section] = []
    for sections in folders:
        earlier = {section.task_label: place for place, section in reversed(list(enumerate(merged)))}
        for section in sections:
            if (place := earlier.get(section.task_label)) is None:
                merged.append(section)
                continue
            first = merged[place]
            chance = {**section.chance, **first.chance}
            merged[place] = Section(first.heading, first.text or section.text, (*first.runs, *section.runs), chance)
    labels: dict[str, set[str]] = {}
    for section in merged:
        labels.setdefault(section.heading, set()).add(section.task_label)
    for place, section in enumerate(merged):
        if len(labels[section.heading]) > 1:  # the heading was unique in its folder
            heading = "" if section.heading == section.task.name else f"{section.heading}: "
            merged[place] = replace(section, heading=f"{heading}{section.task_label}")
    return tuple(merged)
