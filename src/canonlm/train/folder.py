"""A run is one folder:

config.yaml     the resolved configuration          metrics.jsonl   a row per logged step and evaluation
env.json        machine and versions                checkpoints/    the newest states, each loadable on its own
result.json     written last: the run is finished   log.txt         what its process printed (under `play`)
"""

import json
from pathlib import Path
from typing import Any

from canonlm.errors import expected
from canonlm.train.config import RunConfig, differences, load
from canonlm.train.files import write_text


def check(folder: Path, config: RunConfig) -> None:
    """ValueError, naming the first difference, if the folder already holds a run of another configuration."""
    path = folder / "config.yaml"
    if path.exists() and (changed := differences(load(path), config)):
        key, there, here = changed[0]
        what = f"{there!r}, as in the run that is already in {folder} (choose another --out to change it)"
        raise expected(key, what, here)


def create(folder: Path, config: RunConfig) -> None:
    """Make the folder and write its configuration; an existing one is checked and left as it is."""
    check(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.yaml").exists():
            write_text(folder / "config.yaml", config.to_yaml())
    except OSError as error:
        raise expected("--out", f"a folder that can be written ({error.strerror})", str(folder)) from None


def result(folder: Path) -> dict[str, Any] | None:
    """The content of `result.json`; None while the run is not finished."""
    path = folder / "result.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
