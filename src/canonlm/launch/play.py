"""What `canonlm play` runs: every architecture at every learning rate and seed, on the same data in the same order."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm.errors import expected
from canonlm.files import write_json
from canonlm.recipes import Preset
from canonlm.report.runs import slice_key
from canonlm.runs import folder
from canonlm.tasks import Task
from canonlm.train.config import RunConfig, resolve
from canonlm.train.recipe import merge, override

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
) -> list[PlannedRun]:
    """The runs of the grid, all checked. ValueError for settings that cannot be, or that a run in `out` contradicts."""
    from canonlm.train.build import check

    if seeds is not None and seeds < 1:
        raise expected("--seeds", "an integer >= 1", seeds)
    base = merge(preset.run, {})
    for key in override(base, overrides):
        if key in _BY_OPTION:
            raise expected(key, f"nothing here: the option {_BY_OPTION[key]} sets it", key)
    runs = []
    for arch in dict.fromkeys(archs):
        for lr in dict.fromkeys(lrs or preset.lrs):
            for seed in range(seeds or preset.seeds):
                point = {"arch": arch, "train": {"seed": seed, "optim": {"lr": lr}}}
                config = resolve(merge(base, point))
                check(config)
                name = f"{preset.difficulty or preset.task}-{arch}-lr{config.train.optim.lr:g}-seed{seed}"
                runs.append(PlannedRun(name, out / "runs" / name, config))
    # Draw one window: the samplers are compiled and cached before several processes ask for them at once.
    data = runs[0].config.data
    runs[0].task.windows("train", 0, 0, 1, seq_len=data.seq_len, loss_on=data.loss_on)
    for run in runs:
        folder.check(run.folder, run.config)
    return runs


def write_plan(runs: Sequence[PlannedRun], preset: Preset, out: Path, command: str) -> None:
    """Make the run folders, and note in `play.json` which runs belong together; sections of other tasks stay."""
    try:
        others = _sections(out / "play.json")
        for run in runs:
            folder.create(run.folder, run.config)
        task = runs[0].task
        section = {
            "id": f"{preset.name}/{preset.difficulty or preset.task}",
            "heading": preset.difficulty or preset.task,
            "command": command,
            "chance": {slice_key(where): task.chance(where) for where in task.slices()},
            "runs": [run.name for run in runs],
        }
        sections = [*(other for other in others if other["id"] != section["id"]), section]
        play = {"title": "Playground", "sections": sections, "command": "\n".join(s["command"] for s in sections)}
        write_json(out / "play.json", play)
    except OSError as error:
        raise expected("--out", f"a folder that can be written ({error.strerror})", str(out)) from None


def _sections(path: Path) -> list[dict[str, Any]]:
    try:
        sections = json.loads(path.read_text(encoding="utf-8"))["sections"]
        whole = all({"id", "command"} <= section.keys() for section in sections)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise expected("--out", "a folder whose play.json is whole (remove the damaged file)", str(path))
    return sections
