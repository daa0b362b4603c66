"""A run is one folder:

config.yaml     the resolved configuration          metrics.jsonl   a row per logged step and evaluation
env.json        machines and versions               checkpoints/    the newest states
data.json       which text was read (of text)       profile/, tensorboard/, on_checkpoint/   where asked for
result.json     written last: the run is finished   log.txt, logs/  what processes that were launched printed
                                                    launch/         what was submitted to SLURM
"""

import json
from pathlib import Path
from typing import Any

from canonlm.errors import expected
from canonlm.files import write_text
from canonlm.train.config import RunConfig, changes
from canonlm.train.recipe import load


def check(folder: Path, config: RunConfig) -> None:
    """ValueError, naming the first difference, if the folder already holds a run that this one does not continue."""
    path = folder / "config.yaml"
    if (folder / "index.json").exists():
        raise expected("--out", "a folder for a run, and not one of prepared text", str(folder))
    if path.exists() and (changed := changes(load(path), config)):
        key, there, here = changed[0]
        what = f"{there!r}, as in the run that is already in {folder} (choose another --out to change it)"
        raise expected(key, what, here)


def create(folder: Path, config: RunConfig) -> None:
    """Make the folder and write its configuration; one that this one continues is checked and replaced."""
    check(folder, config)
    make(folder)
    path, text = folder / "config.yaml", config.to_yaml()
    try:
        if path.exists() and load(path).train.steps != config.train.steps:
            (folder / "result.json").unlink(missing_ok=True)  # it is finished no longer
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)
    except OSError as error:
        raise expected("--out", f"a folder that can be written ({error.strerror})", str(folder)) from None


def make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise expected("--out", f"a folder that can be written ({error.strerror})", str(folder)) from None


def read_json(path: Path) -> Any:
    """Its content; None where there is no such file yet."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
