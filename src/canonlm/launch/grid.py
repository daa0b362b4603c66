"""The runs of `canonlm play`: every architecture at every learning rate and seed, on the same data in the same
order."""

import copy
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from canonlm.core.errors import InvalidSetting, expected, writing
from canonlm.core.files import lock, make_folder, write_json
from canonlm.core.untrusted import path_inside, read_object
from canonlm.launch.recipes import TEXT, Preset
from canonlm.runs.folder import is_run
from canonlm.runs.identity import exact, flat, run_name, slug
from canonlm.tasks import Task
from canonlm.train.config import RunConfig, changes, resolve
from canonlm.train.load_config import check_folder, create_folder, load, merge, outside_of, override

_BY_OPTION = {"arch": "--arch", "train.optim.lr": "--lr", "train.seed": "--seeds"}

_ONE_VALUE = ("data", "on_checkpoint")
"""Settings that are a path or a command, whose commas separate nothing."""

MAX_SEEDS = 1_000
"""Each of the runs is checked before the first one starts, which takes milliseconds."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid, and its folder."""

    name: str
    folder: Path
    config: RunConfig

    @property
    def task(self) -> Task | None:
        """The task of the run; None for a run on text."""
        return self.config.built_task


def plan(
    preset: Preset,
    out: Path,
    *,
    archs: Sequence[str],
    lrs: Sequence[float] | None = None,
    seeds: int | None = None,
    overrides: Sequence[str] = (),
    match: str | None = None,
) -> list[PlannedRun]:
    """The runs of the grid, all checked: every architecture at every rate and seed, and at every value of the overrides
    that have several (`train.batch_size=32,64`). match: "parameters", "state" or "state,parameters": each architecture
    gets the sizes at which it has as many parameters, or bytes of state, as the first
    (`canonlm.models.matching`). ValueError for wrong settings, or settings that contradict a run in `out`.
    """
    check_seeds(seeds)
    points, swept = sweep(overrides)
    by_folder: dict[Path, PlannedRun] = {}
    for point in points:
        base = copy.deepcopy(preset.run)
        for key in override(base, [_source(pair) if preset.task == TEXT else pair for pair in point]):
            if key in _BY_OPTION:
                raise InvalidSetting(key, f"{key} is set by the option {_BY_OPTION[key]}")
        for run in _grid(preset, base, out, archs, lrs or preset.lrs, seeds or preset.seeds, match, swept):
            if (first := by_folder.setdefault(run.folder, run)).config != run.config:
                key = _differing(first.config, run.config, swept)
                raise InvalidSetting(
                    key, f"{key}: several values would repeat one run, as its result does not depend on it"
                )
    runs = list(by_folder.values())
    # Draw one window, so that the samplers are compiled and cached before several processes need them at once.
    if (task := runs[0].task) is not None:
        data = runs[0].config.data
        task.windows("train", 0, 0, 1, seq_len=data.seq_len, loss_on=data.loss_on)
    for run in runs:
        path_inside(out, str(run.folder.relative_to(out)))
        check_folder(run.folder, run.config)
    return runs


def check_seeds(seeds: int | None) -> None:
    if seeds is not None and not 1 <= seeds <= MAX_SEEDS:
        raise expected("--seeds", f"an integer from 1 to {MAX_SEEDS}", seeds)


def sweep(overrides: Sequence[str]) -> tuple[list[list[str]], list[str]]:
    """(`key=value` pairs, each with one value, for every combination; the keys that have several values).

    Commas separate values: `train.batch_size=32,64`. Those in brackets, braces or quotes belong to a value:
    `task.weights=[1,2]` is one list."""
    choices = {pair: _values(pair) for pair in overrides}
    swept = [pair.partition("=")[0] for pair, values in choices.items() if len(values) > 1]
    return [list(point) for point in product(*choices.values())], swept


def _values(pair: str) -> list[str]:
    key, equals, text = pair.partition("=")
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'" and not parts[-1]:
            quote = letter
        depth += 0 if quote else (letter in "[{") - (letter in "]}")
        if letter == "," and not (quote or depth) and key not in _ONE_VALUE:
            parts.append("")
        else:
            parts[-1] += letter
    if len(parts) > 1 and not all(parts):
        raise expected(key, "values separated by commas, such as 32,64", text)
    return [f"{key}{equals}{part}" for part in dict.fromkeys(parts)]


def _grid(
    preset: Preset, base: dict[str, Any], out: Path, archs: Sequence[str], lrs: Sequence[float], seeds: int,
    match: str | None, swept: Collection[str],
) -> Iterator[PlannedRun]:  # fmt: skip
    """The runs of one configuration: every architecture at every rate and seed."""
    from canonlm.train import data
    from canonlm.train.build import build_model, check, matched, with_complete_name

    settings: dict[tuple[float, int], tuple[RunConfig, RunConfig]] = {}  # of a rate and a seed: the run's, the preset's
    reference = None
    for arch in dict.fromkeys(archs):
        plain, sizes = data.complete(resolve(merge(base, {"arch": arch}))), dict[str, Any]()
        if match is not None:
            reference = reference or build_model(plain, "meta")
            sizes = {"model": matched(plain, reference, match)}
        named = with_complete_name(data.complete(resolve(merge(merge(base, sizes), {"arch": arch}))))
        check(named)
        if named.text is not None and not data.validation(named.text):
            what = "text with a held-out part (canonlm data prepare --validation), on which runs are compared"
            raise expected("data", what, ", ".join(named.text.folders.values()))
        for lr in dict.fromkeys(lrs):
            for seed in range(seeds):
                if (lr, seed) not in settings:  # checked once for all architectures, as a check takes milliseconds
                    point = {"arch": arch, "train": {"seed": seed, "optim": {"lr": lr}}}
                    usual = data.complete(resolve(merge(preset.run, point)))
                    settings[lr, seed] = resolve(merge(base, point)), usual
                config, usual = (each.model_copy(update={"arch": named.arch}) for each in settings[lr, seed])
                config = config.model_copy(update={"model": named.model})
                name = _name(preset, out, config, usual, swept)
                yield PlannedRun(name, out / "runs" / name, config)


def _differing(a: RunConfig, b: RunConfig, swept: Sequence[str]) -> str:
    left, right = flat(a.model_dump()), flat(b.model_dump())
    return next((key for key in swept if left.get(key) != right.get(key)), swept[0])


def _source(pair: str) -> str:
    """`data=FOLDER`: the text to read, named after its folder."""
    key, _, folder = pair.partition("=")
    if key != "data" or not folder:
        return pair
    name = slug(Path(folder).absolute().name)
    return f"text={json.dumps({'sources': {name: {'path': folder}}})}"


def _name(preset: Preset, out: Path, config: RunConfig, usual: RunConfig, swept: Collection[str]) -> str:
    """The run's name, with the differences from the preset, and in a sweep always the values of `swept`. A run that
    this one continues keeps its name: earlier versions left out differences and rounded rates, and a command may have
    no sweep."""
    task, arch = preset.difficulty or preset.task, config.arch
    plain = run_name(task, config.model_dump(), usual.model_dump())
    name = run_name(task, config.model_dump(), usual.model_dump(), swept) if swept else plain
    lr = config.train.optim.lr
    names = [f"{task}-{arch}-lr{lr:g}-seed{config.train.seed}"] if slug(arch) == arch else []
    rounded = [each.replace(f"-lr{exact(lr)}-", f"-lr{lr:g}-") for each in (plain, name)]
    for earlier in [*names, *rounded, plain]:
        folder = out / "runs" / earlier
        if is_run(folder):
            with suppress(ValueError):  # an unreadable run is not continued
                if not changes(load(folder / "config.yaml", trust=set(outside_of(config))), config):
                    return earlier
    return name


def write_plan(runs: Sequence[PlannedRun], preset: Preset, out: Path, command: str) -> None:
    """Make the run folders, and write to `play.json` which runs belong together. A section has all runs of its task
    from all commands, and these commands; sections of other tasks are kept. After an error, no new folder is left."""
    _sections(out / "play.json")  # a damaged one is reported before anything is written
    with writing("--out", out), lock(make_folder(out) / ".play.lock"):  # no other command changes the file
        sections = _sections(out / "play.json")
        new = [run.folder for run in runs if not os.path.lexists(run.folder)]
        try:
            for run in runs:
                create_folder(run.folder, run.config)
            for tasks in _by_task(runs):
                _add(sections, preset, tasks, command)
            commands = dict.fromkeys(line for section in sections for line in section["command"].split("\n"))
            write_json(out / "play.json", {"sections": sections, "command": "\n".join(commands)})
        except BaseException:
            for folder in new:
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _by_task(runs: Sequence[PlannedRun]) -> list[list[PlannedRun]]:
    """The runs by task, as a sweep may be over settings of the task."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(json.dumps(run.config.task, sort_keys=True), []).append(run)
    return list(groups.values())


def _add(sections: list[dict[str, Any]], preset: Preset, runs: Sequence[PlannedRun], command: str) -> None:
    """Add runs of one task to the section of their kind, or as a new one, in place."""
    new: dict[str, Any] = {
        "id": f"{preset.name}/{preset.difficulty or preset.task}",
        "heading": preset.difficulty or preset.task,
        "command": command,
        "task": runs[0].config.task,
        "runs": [run.name for run in runs],
    }
    matches = [place for place, old in enumerate(sections) if old["id"] == new["id"] and _same_questions(old, new)]
    if matches:
        old = sections[matches[0]]
        new["command"] = "\n".join(dict.fromkeys([*old["command"].split("\n"), command]))
        new["runs"] = list(dict.fromkeys([*old["runs"], *new["runs"]]))
        sections[matches[0]] = new
    else:
        sections.append(new)


def _same_questions(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Whether two sections have the same task settings, as far as known: earlier versions did not write them."""
    return old.get("task", new["task"]) == new["task"] or not set(old["runs"]).isdisjoint(new["runs"])


def _sections(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    try:
        sections = list(read_object(path)["sections"])
        valid = all(isinstance(s["id"] + s["command"], str) and isinstance(s["runs"], list) for s in sections)
        valid = valid and all(isinstance(name, str) for s in sections for name in s["runs"])
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise expected("--out", "a folder whose play.json can be read (remove the damaged file)", str(path))
    return sections
