"""Folders in: the runs and the results of `canonlm eval` in them, each once, under names that tell them apart."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import expected
from ..runs.rows import writable
from .evals import Evaluated, load_evaluated
from .runs import LeftOut, Run, TextRun, read_runs

Folders = str | Path | Sequence[str | Path]


@dataclass(frozen=True)
class Gathered:
    """What is in one folder. `runs`: by the names of their folders, under the names that they go by among all that was
    gathered; `evaluated`: by such a name, with the label that it has in its folder."""

    folder: Path
    runs: dict[str, Run | TextRun]
    evaluated: dict[str, Evaluated]
    left_out: list[LeftOut]


def as_paths(folders: Folders) -> list[Path]:
    """One folder or several, each once."""
    return list(dict.fromkeys(map(Path, [folders] if isinstance(folders, (str, Path)) else folders)))


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders of a play folder, of a folder of runs, or the one run folder that it is. None where there are
    only results of `canonlm eval`; ValueError where there is nothing."""
    folder = Path(folder)
    if _is_run(folder):
        return [folder]
    try:
        found = sorted(_folders_in(folder))
    except OSError as error:
        raise expected("folder", f"a folder that can be read ({error.strerror})", str(folder)) from None
    results = {path.parent for path in folder.rglob("results.json")}
    if not found and not results:
        raise expected("folder", "a folder with runs or results of `canonlm eval` in it", str(folder))
    of_results = {path for each in results for path in (each, each / "answers", *each.parents)}
    return [path for path in found if _is_run(path) or path not in of_results]


def _plays_in(folder: Path) -> list[Path]:
    """The play folders in a folder of them."""
    inside = sorted(path.parent for path in folder.glob("*/runs") if not _is_run(path.parent))
    return [path for path in inside if configured(path)]


def configured(folder: Path) -> list[Path]:
    """The run folders that have a configuration, without a look at anything else: cheap enough to be asked often."""
    return [folder] if _is_run(folder) else sorted(filter(_is_run, _folders_in(folder)))


def gather(folders: Folders) -> list[Gathered]:
    """A run that lies in two of the folders counts for the first. Runs, and results, of one name in two folders get the
    folder before it; the play folders in a folder are folders of their own. ValueError: a folder with neither."""
    found: list[Gathered] = []
    seen: set[Path] = set()
    plays = {each: _plays_in(each) for each in as_paths(folders)}
    for folder in dict.fromkeys(part for each, inside in plays.items() for part in (*inside, each)):
        seen.update(play.resolve() for play in plays.get(folder, ()))  # they are not runs of this folder
        fresh = [path for path in run_folders(folder) if _first(path, seen)]
        runs, left_out = read_runs(fresh)
        evaluated, unreadable = load_evaluated(folder)
        asked = [one for one in evaluated if _first(one.path, seen)]
        itself = f"{folder.absolute().name}/" if _is_run(folder) else ""
        here = {writable(f"{itself}{one.label}"): one for one in asked}
        if fresh or here or not plays.get(folder):
            found.append(Gathered(folder, {run.name: run for run in runs}, here, [*left_out, *unreadable]))
    return [_told_apart(one, [other for other in found if other is not one]) for one in found]


def _told_apart(one: Gathered, others: Sequence[Gathered]) -> Gathered:
    if not others:
        return one
    theirs = {name for other in others for name in (*other.runs, *other.evaluated)}
    before = {name: f"{one.folder}/{name}" if name in theirs else name for name in (*one.runs, *one.evaluated)}
    return Gathered(
        one.folder,
        {name: replace(run, name=writable(before[name])) for name, run in one.runs.items()},
        {writable(before[name]): found for name, found in one.evaluated.items()},
        [LeftOut(writable(f"{one.folder}/{entry.name}"), entry.reason) for entry in one.left_out],
    )


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / "config.yaml")  # False, and no error, where nobody may look


def _folders_in(folder: Path) -> Iterable[Path]:
    inside = folder / "runs" if (folder / "runs").is_dir() else folder
    return (path for path in inside.iterdir() if path.is_dir()) if inside.is_dir() else ()


def _first(path: Path, seen: set[Path]) -> bool:
    resolved = path.resolve()
    new = resolved not in seen
    seen.add(resolved)
    return new
