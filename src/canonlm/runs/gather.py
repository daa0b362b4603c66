"""The runs and the results of `canonlm eval` in folders, each once, with unique names."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from canonlm.runs.evaluated import Evaluated, load_evaluated
from canonlm.runs.folder import Folders, as_paths, is_run, plays_in, run_folders
from canonlm.runs.load import LeftOut, Run, read_runs
from canonlm.runs.rows import writable


@dataclass(frozen=True)
class Gathered:
    """The content of one folder. `runs`: by the names of their folders; each run has a name that is unique among all
    gathered runs. `evaluated`: by such a unique name, with the label in its folder."""

    folder: Path
    runs: dict[str, Run]
    evaluated: dict[str, Evaluated]
    left_out: list[LeftOut]


def gather(folders: Folders) -> list[Gathered]:
    """The content of each folder. A run in two of them counts for the first. Names that two folders have in common get
    the folder in front. Play folders inside a folder are separate folders. ValueError: no runs or results."""
    gathered: list[Gathered] = []
    seen: set[Path] = set()
    plays = {each: plays_in(each) for each in as_paths(folders)}
    for folder in dict.fromkeys(part for each, inside in plays.items() for part in (*inside, each)):
        seen.update(play.resolve() for play in plays.get(folder, ()))  # they are not runs of this folder
        fresh = [path for path in run_folders(folder) if _is_new(path, seen)]
        runs, left_out = read_runs(fresh)
        evaluated, unreadable = load_evaluated(folder)
        fresh_results = [one for one in evaluated if _is_new(one.path, seen)]
        itself = f"{folder.absolute().name}/" if is_run(folder) else ""
        results = {writable(f"{itself}{one.label}"): one for one in fresh_results}
        if fresh or results or not plays.get(folder):
            gathered.append(Gathered(folder, {run.name: run for run in runs}, results, [*left_out, *unreadable]))
    return [_with_unique_names(one, [other for other in gathered if other is not one]) for one in gathered]


def _with_unique_names(one: Gathered, others: Sequence[Gathered]) -> Gathered:
    if not others:
        return one
    used = {name for other in others for name in (*other.runs, *other.evaluated)}
    unique = {name: f"{one.folder}/{name}" if name in used else name for name in (*one.runs, *one.evaluated)}
    return Gathered(
        one.folder,
        {name: replace(run, name=writable(unique[name])) for name, run in one.runs.items()},
        {writable(unique[name]): result for name, result in one.evaluated.items()},
        [LeftOut(writable(f"{one.folder}/{entry.name}"), entry.reason) for entry in one.left_out],
    )


def _is_new(path: Path, seen: set[Path]) -> bool:
    resolved = path.resolve()
    new = resolved not in seen
    seen.add(resolved)
    return new
