"""Run folders among other folders."""

import logging
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from canonlm.core.errors import expected, plain
from canonlm.core.untrusted import path_inside

Folders = str | Path | Sequence[str | Path]


def as_paths(folders: Folders) -> list[Path]:
    """One folder or several, each once."""
    return list(dict.fromkeys(map(Path, [folders] if isinstance(folders, (str, Path)) else folders)))


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders of a play folder or of a folder of runs, or the folder itself if it is a run. Empty if there are
    only results of `canonlm eval`; ValueError if there is nothing."""
    folder = Path(folder)
    if is_run(folder):
        return [folder]
    try:
        inside = sorted(_folders_in(folder))
    except OSError as error:
        raise expected("folder", f"a folder that can be read ({error.strerror})", str(folder)) from None
    results = {path.parent for path in folder.rglob("results.json")}
    if not inside and not results:
        raise expected("folder", "a folder with runs or results of `canonlm eval` in it", str(folder))
    of_results = {path for each in results for path in (each, each / "answers", *each.parents)}
    return [path for path in inside if is_run(path) or path not in of_results]


def plays_in(folder: Path) -> list[Path]:
    """The play folders in a folder of them, or in its folder `runs`."""
    below = (path.parent for pattern in ("*/runs", "runs/*/runs") for path in folder.glob(pattern))
    inside = sorted(path for path in below if not is_run(path) and not _leads_out(folder, path))
    return [path for path in inside if configured(path)]


def configured(folder: Path) -> list[Path]:
    """The run folders that have a configuration. Nothing else is read, so it can be called often."""
    return [folder] if is_run(folder) else sorted(filter(is_run, _folders_in(folder)))


def is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "config.yaml")  # False, not an error, without permission


def _folders_in(folder: Path) -> list[Path]:
    """The folders in a folder of runs. Links out of it are left out, with a warning; ValueError if there are only
    such links."""
    inside = path_inside(folder, "runs") if (folder / "runs").is_dir() else folder
    folders = [path for path in inside.iterdir() if path.is_dir()] if inside.is_dir() else []
    reasons = {path: reason for path in folders if (reason := _leads_out(folder, path))}
    if reasons and len(reasons) == len(folders):
        raise ValueError(min(reasons.values()))
    for reason in reasons.values():
        _warn(reason)
    return [path for path in folders if path not in reasons]


def _leads_out(folder: Path, path: Path) -> str:
    """The reason why a folder does not count as one in `folder`: it is a link to another place. "" for any other."""
    try:
        path_inside(folder, str(path.relative_to(folder)))
    except ValueError as error:
        return str(error)
    return ""


@cache  # once, as folders are looked through again and again
def _warn(text: str) -> None:
    logging.getLogger(__name__).warning("left out: %s", plain(text))
