"""What `canonlm play` runs: every architecture at every learning rate and seed, on the same data in the same order."""

import copy
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm.errors import expected, writing
from canonlm.files import write_json
from canonlm.recipes import Preset
from canonlm.runs.names import run_name, slug
from canonlm.runs.rows import slice_key
from canonlm.tasks import Task
from canonlm.train.config import RunConfig, changes, resolve
from canonlm.train.recipe import check_folder, create_folder, load, merge, outside_of, override
from canonlm.untrusted import read_object

_BY_OPTION = {"arch": "--arch", "train.optim.lr": "--lr", "train.seed": "--seeds"}


@dataclass(frozen=True)
class PlannedRun:
    """One run of a grid, and the folder it lives in."""

    name: str
    folder: Path
    config: RunConfig

    @property
    def task(self) -> Task:
        assert self.config.built_task is not None  # a grid starts from a preset, and presets are of tasks
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
    """The runs of the grid, all checked. match="parameters": each architecture's MLP is as wide as it takes to have as
    many parameters as the first. ValueError for settings that cannot be, or that a run in `out` contradicts."""
    from canonlm.train.build import build_model, check, matched, with_complete_name

    if seeds is not None and seeds < 1:
        raise expected("--seeds", "an integer >= 1", seeds)
    base = copy.deepcopy(preset.run)
    for key in override(base, overrides):
        if key in _BY_OPTION:
            raise expected(key, f"nothing here: the option {_BY_OPTION[key]} sets it", key)
    if match not in (None, "parameters"):
        raise expected("--match", "parameters", match)
    runs: list[PlannedRun] = []
    parameters = 0
    for arch in dict.fromkeys(archs):
        plain, width = resolve(merge(base, {"arch": arch})), dict[str, Any]()
        if match is not None:
            parameters = parameters or build_model(plain, "meta").num_parameters
            width = {"model": matched(plain, parameters)}
        named = with_complete_name(resolve(merge(merge(base, width), {"arch": arch})))
        check(named)
        same = {"arch": named.arch, "model": named.model}  # for all rates and seeds
        for lr in dict.fromkeys(lrs or preset.lrs):
            for seed in range(seeds or preset.seeds):
                point = {"arch": arch, "train": {"seed": seed, "optim": {"lr": lr}}}
                config = resolve(merge(merge(base, width), point)).model_copy(update=same)
                usual = resolve(merge(preset.run, point)).model_copy(update={"arch": config.arch})
                name = _name(preset, out, config, usual)
                runs.append(PlannedRun(name, out / "runs" / name, config))
    # Draw one window: the samplers are compiled and cached before several processes ask for them at once.
    data = runs[0].config.data
    runs[0].task.windows("train", 0, 0, 1, seq_len=data.seq_len, loss_on=data.loss_on)
    for run in runs:
        check_folder(run.folder, run.config)
    return runs


def _name(preset: Preset, out: Path, config: RunConfig, usual: RunConfig) -> str:
    """The run's name, which says what differs from the preset. Earlier versions did not say it: a run of theirs that
    this one continues keeps its name."""
    task, arch = preset.difficulty or preset.task, config.arch
    earlier = f"{task}-{arch}-lr{config.train.optim.lr:g}-seed{config.train.seed}"
    path = out / "runs" / earlier / "config.yaml"
    if slug(arch) == arch and path.is_file():
        with suppress(ValueError):  # what cannot be read is not continued
            if not changes(load(path, trust=set(outside_of(config))), config):
                return earlier
    return run_name(task, config.model_dump(), usual.model_dump())


def write_plan(runs: Sequence[PlannedRun], preset: Preset, out: Path, command: str) -> None:
    """Make the run folders, and note in `play.json` which runs belong together. A section has all runs of its task
    that any command has added, and all these commands; sections of other tasks stay."""
    with writing("--out", out):
        sections = _sections(out / "play.json")
        for run in runs:
            create_folder(run.folder, run.config)
        task = runs[0].task
        new = {
            "id": f"{preset.name}/{preset.difficulty or preset.task}",
            "heading": preset.difficulty or preset.task,
            "command": command,
            "chance": {slice_key(where): task.chance(where) for where in task.slices()},
            "runs": [run.name for run in runs],
        }
        same = [place for place, old in enumerate(sections) if all(old.get(k) == new[k] for k in ("id", "chance"))]
        if same:
            old = sections[same[0]]
            new["command"] = "\n".join(dict.fromkeys([*old["command"].split("\n"), command]))
            new["runs"] = list(dict.fromkeys([*old["runs"], *new["runs"]]))
            sections[same[0]] = new
        else:
            sections.append(new)
        play = {"title": "Playground", "sections": sections, "command": "\n".join(s["command"] for s in sections)}
        write_json(out / "play.json", play)


def _sections(path: Path) -> list[dict[str, Any]]:
    if not os.path.lexists(path):
        return []
    try:
        sections = list(read_object(path)["sections"])
        whole = all(isinstance(s["id"] + s["command"], str) and isinstance(s["runs"], list) for s in sections)
        whole = whole and all(isinstance(name, str) for s in sections for name in s["runs"])
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise expected("--out", "a folder whose play.json is whole (remove the damaged file)", str(path))
    return sections
