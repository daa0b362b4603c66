"""Finds tasks of the harness by their names, and opens them with their data."""

import random
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy

from canonlm.core.errors import expected
from canonlm.core.user_folders import expanded
from canonlm.suites.harness import TASKS

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

SEEDS = 0, 1234
"""Seeds of Python's generator and of the others, as in the harness."""


def open_tasks(include: str | None = None, metadata: Mapping[str, Any] | None = None) -> "TaskManager":
    """All tasks: the harness's, ours, and those of the folder `include`."""
    from lm_eval.tasks import TaskManager

    folders = [TASKS, *([expanded(include)] if include else [])]
    if include is not None and not folders[-1].is_dir():
        raise expected("include", "a folder with YAML files of tasks", include)
    return TaskManager(include_path=folders, metadata=dict(metadata or {}))


def find(manager: "TaskManager", names: Sequence[str]) -> list[str]:
    """The tasks that names, patterns and files stand for: tags, and groups without a mean, become their tasks.

    ValueError for unknown names, with the closest ones.
    """
    tasks: list[str] = []
    for name in names:
        if name.endswith(".yaml") and (file := expanded(name)).is_file():
            tasks.append(str(file))
        elif matches := manager.match_tasks([name]):
            tasks += [single for match in matches for single in _singles(manager, match)]
        else:
            raise unknown_task(manager, name)
    return list(dict.fromkeys(tasks))


def _singles(manager: "TaskManager", name: str) -> list[str]:
    entry = manager.task_index[name]
    config = entry.cfg or {"task": sorted(entry.tags)}
    members = config.get("task")
    if not isinstance(members, list) or config.keys() - {"group", "group_alias", "task", "metadata"}:
        return [name]  # a task, a group with a mean, or one that changes its tasks' settings
    if not all(isinstance(member, str) and member in manager.task_index for member in members):
        return [name]
    return [single for member in members for single in _singles(manager, member)]


def unknown_task(manager: "TaskManager", name: str) -> ValueError:
    """The error for an unknown name. It lists the closest of more than ten thousand names."""
    close = get_close_matches(name, manager.all_tasks, n=4, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    others = f" Also close: {', '.join(close[1:])}." if close[1:] else ""
    return ValueError(f'unknown task "{name}".{guess}{others} `canonlm lm-eval ls tasks` lists all of them.')


class Part(NamedTuple):
    """A unit of loading: a task, a group with a mean, or one member (by its place) of another group.

    names: those of its tasks and groups with a mean, as far as they are known before it is loaded.
    """

    source: str
    member: int | None
    names: list[str]


def parts(manager: "TaskManager", source: str) -> list[Part]:
    """The parts of one of the names that `find` returns."""
    if (entry := manager.task_index.get(source)) is None:
        return [Part(source, None, [])]  # a file
    if (members := _members(entry.cfg)) is None:
        return [Part(source, None, [source])]
    return [Part(source, place, _names(manager, source, member)) for place, member in enumerate(members)]


def _members(config: Mapping[str, Any] | None) -> list[Any] | None:
    """The members of a group without a mean; None for anything else."""
    if not config or "group" not in config or config.get("aggregate_metric_list"):
        return None
    return config["task"] if isinstance(config.get("task"), list) else None


def _names(manager: "TaskManager", group: str, member: Any) -> list[str]:
    name = member if isinstance(member, str) else member.get("group") or member["task"]
    if (entry := manager.task_index.get(name)) is None:
        return [f"{group}::{name}"]  # as the harness calls what is defined within a group
    if entry.cfg is None:
        return sorted(entry.tags)
    members = _members(entry.cfg)
    return [name] if members is None else [each for inner in members for each in _names(manager, name, inner)]


def load(manager: "TaskManager", part: Part) -> "list[Task | Group]":
    """The tasks of a part, with their data; a group with a mean counts as one.

    ValueError: a data set, or a package that the task needs, is missing or cannot be used.
    """
    from datasets.exceptions import DatasetsError

    name = ", ".join(part.names) or part.source
    seed()
    try:
        with reachable(name), _alone(manager, part):
            loaded = manager.load([part.source])
    except (OSError, ImportError, LookupError, RuntimeError, DatasetsError) as error:
        reason = re.sub(r"\x1b\[[0-9;]*m|\*{3,}", "", str(error))  # NLTK's colours and frames
        raise ValueError(f"{name}: {textwrap.shorten(reason, 400)} ({type(error).__name__})") from None
    groups: Mapping[str, Group] = loaded.get("groups", {})
    inside = {child for group in groups.values() for child in group.child_names}
    roots = [*groups.values(), *loaded["tasks"].values()]
    return [unit for root in roots if name_of(root) not in inside for unit in _units(root)]


@contextmanager
def _alone(manager: "TaskManager", part: Part) -> Iterator[None]:
    """Within this context, the group of the part has only this member."""
    from lm_eval.tasks._yaml_loader import load_yaml

    index, entry = manager.task_index, manager.task_index.get(part.source)
    if part.member is None or entry is None:
        yield
        return
    config = load_yaml(entry.yaml_path) if entry.yaml_path else entry.cfg  # with its functions
    index[part.source] = replace(entry, yaml_path=None, cfg={**config, "task": [config["task"][part.member]]})
    try:
        yield
    finally:
        index[part.source] = entry


def _units(unit: "Task | Group") -> "Iterator[Task | Group]":
    from lm_eval.api.group import Group

    if isinstance(unit, Group) and not unit.has_aggregation:
        for child in unit:
            yield from _units(child)
    else:
        yield unit


def seed() -> None:
    """Seed the global generators, as the harness does: its tasks draw from them."""
    random.seed(SEEDS[0])
    numpy.random.seed(SEEDS[1])


def name_of(unit: "Task | Group") -> str:
    from lm_eval.api.group import Group

    return unit.name if isinstance(unit, Group) else unit.task_name


@contextmanager
def reachable(name: str = "") -> Iterator[None]:
    """One ValueError, with what to do, if the data of `name` (or of some task) is neither on this machine nor can be
    downloaded."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (ConnectionError, DatasetNotFoundError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name or 'a task'}: its data is not on this machine and cannot be downloaded "
            f"({' '.join(str(error).split())}). Where there is a network, `canonlm lm-eval --model dummy --tasks "
            f"{name or 'TASK'} --limit 1` downloads it into the folder $HF_HOME (default: ~/.cache/huggingface), which "
            "can be copied here; or write a YAML file of the task that names local files"
        ) from None
