"""A run is one folder:

config.yaml     the resolved configuration          metrics.jsonl   a row per logged step and evaluation
env.json        machines and versions               checkpoints/    the newest states
data.json       the text that was read (if any)     profile/, tensorboard/, on_checkpoint/   if configured
code.json       sha256 of the user's files          code/           copies of those that are code
task.json       what guessing scores; the words of a task from outside
result.json     written last: the run is finished   log.txt, logs/  output of launched processes
                                                    launch/         what was submitted to SLURM

`check` and `create` are for training. `read_config` is for readers that trust nothing: the run may be
in progress, crashed, half-written or not a run at all. A folder without a readable `config.yaml` is refused with a
reason. A folder is only data: nothing in it is ever executed.
"""

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import yaml

from canonlm.core import untrusted
from canonlm.core.errors import InvalidSetting, expected, plain, why, writing
from canonlm.core.files import make_folder, write_bytes, write_json, write_text
from canonlm.core.safe_yaml import parse_yaml, read_yaml
from canonlm.runs.identity import Config, changes, decays_from, flat
from canonlm.runs.rows import finite, known_count, one_line

TASK = "task.json"
_CHECKPOINT = re.compile(r"step-([0-9]{8}|[1-9][0-9]{8,9})")  # `train.steps` has at most ten digits
Folders = str | Path | Sequence[str | Path]


class Outside(Protocol):
    """A file from outside that a run uses, as `canonlm.core.user_code.load` gives it; object: None if it is data."""

    @property
    def object(self) -> Any: ...

    @property
    def file(self) -> Path: ...

    @property
    def sha256(self) -> str: ...


# -- for training -----------------------------------------------------------------------------------------------------


def check(
    folder: Path, config: Config, load: Callable[[Path], Config], outside: Mapping[str, Outside] | None = None
) -> None:
    """ValueError, with the first difference, if the folder already has a run that this one does not continue.

    load: reads a `config.yaml`, and adds settings that an earlier version did not write. outside: the files from
    outside, by their references in the configuration.
    """
    path = folder / "config.yaml"
    if (folder / "index.json").exists():
        raise expected("--out", "a folder for a run, and not one of prepared text", str(folder))
    notes: list[str] = []
    changed_files = _changed(folder, outside or {}, notes)
    free = not has_trained(folder)  # then a file may be corrected
    if path.exists():
        done = max(checkpoint_steps(folder / "checkpoints"), default=0)
        if free and changed_files:  # as plain data: `load` would refuse these files
            began_as, config = read_yaml(path)[0], parse_yaml(to_yaml(config), "config.yaml")[0]
        else:
            began_as = load(path)
        if changed := changes(began_as, config, done):
            key, old, new = changed[0]
            way = "choose another --out to change it"
            if (
                key == "train.steps"
                and 0 <= (last := min(decays_from(flat(each)) for each in (began_as, config))) < done
            ):
                way += f", or remove its checkpoints after step {last}, up to which both are the same"
            raise expected(key, f"{old!r}, as in the run that is already in {folder} ({way})", new)
    if notes:
        raise expected("--out", "a folder whose code.json is not damaged", str(folder))
    if not free:
        _refuse(folder, changed_files)


def check_files(folder: Path, outside: Mapping[str, Outside]) -> None:
    """InvalidSetting if the run in `folder` began with other contents of one of these files."""
    _refuse(folder, _changed(folder, outside, []))


def _changed(folder: Path, outside: Mapping[str, Outside], notes: list[str]) -> dict[str, tuple[Outside, str]]:
    """Those that the run in `folder` began with other contents of, with the sha256 that they had."""
    began = noted_digests(folder, notes)
    return {name: (one, began[name]) for name, one in outside.items() if began.get(name, one.sha256) != one.sha256}


def _refuse(folder: Path, changed: Mapping[str, tuple[Outside, str]]) -> None:
    for reference, (one, sha256) in changed.items():
        copied = "" if one.object is None else f" (its copy is in {folder / 'code'})"
        what = f"the file that the run in {folder} began with, sha256 {sha256}{copied}"
        raise InvalidSetting(reference, f"{one.file}: expected {what}, got sha256 {one.sha256}")


def checkpoint_steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint in the folder `checkpoints` of a run, ascending."""
    if not folder.is_dir():
        return []
    return sorted(int(match[1]) for path in folder.iterdir() if (match := _CHECKPOINT.fullmatch(path.name)))


def has_trained(folder: Path) -> bool:
    """Whether a folder has results of training: a row, a checkpoint or the final result."""
    metrics = folder / "metrics.jsonl"
    rows = metrics.exists() and metrics.stat().st_size > 0
    return rows or (folder / "result.json").exists() or any((folder / "checkpoints").glob("*"))


def create(
    folder: Path,
    config: Config,
    load: Callable[[Path], Config],
    outside: Mapping[str, Outside] | None = None,
    task: Mapping[str, Any] | None = None,
) -> None:
    """Make the folder and write its configuration. The configuration of a continued run is checked and
    replaced. task: the content of `task.json` (`canonlm.runs.task_info`)."""
    check(folder, config, load, outside)
    make(folder)
    path = folder / "config.yaml"
    with writing("--out", folder):
        result = folder / "result.json"
        if path.exists() and result.exists() and load(path)["train"]["steps"] != config["train"]["steps"]:
            result.unlink()
        if outside:
            _keep(folder, outside)
        files = {TASK: json.dumps(task, indent=1) + "\n"} if task else {}
        for name, text in {**files, "config.yaml": to_yaml(config)}.items():
            if not (folder / name).exists() or untrusted.read_text(folder / name) != text:
                write_text(folder / name, text)


def remove_config(folder: Path) -> None:
    """Undo `create` in a folder that has not trained: it may then get another configuration. Other files are either
    replaced with it, or compared only once it has trained."""
    for name in ("config.yaml", TASK):
        (folder / name).unlink(missing_ok=True)


def make(folder: Path) -> None:
    with writing("--out", folder):
        make_folder(folder)


def _keep(folder: Path, outside: Mapping[str, Outside]) -> None:
    """Write copies of code to `code/`, then the sha256 of all, data too, by reference to `code.json`."""
    digests = {reference: one.sha256 for reference, one in outside.items()}
    if noted_digests(folder, []) == digests:
        return
    names: dict[str, str] = {}  # of the copies: files in two folders may have the same name
    for one in outside.values():
        if one.object is None:
            continue  # data, which may be large
        content = untrusted.read_bytes(one.file)
        if hashlib.sha256(content).hexdigest() != one.sha256:
            raise expected(str(one.file), "a file that does not change while it is used", "other content")
        is_taken = names.setdefault(one.file.name, one.sha256) != one.sha256
        name = f"{one.file.stem}-{one.sha256[:6]}{one.file.suffix}" if is_taken else one.file.name
        write_bytes(make_folder(folder, "code") / name, content)
    write_json(folder / "code.json", {"outside": digests})


def to_yaml(config: Config) -> str:
    return yaml.dump(dict(config), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    """Quotes a text such as 1e3, which `canonlm.train.load_config` would read as a number."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_json(path: Path) -> Any:
    """The content of a file; None if it does not exist."""
    return untrusted.read_json(path) if path.exists() else None


# -- for readers ------------------------------------------------------------------------------------------------------


def fields_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `canonlm.runs.load.Run` that come from the configuration. ValueError: one is missing."""
    known = flat(config)
    for key in ("arch", "train.optim.lr", "train.seed"):
        if key not in known:
            raise ValueError(f"config.yaml has no {key}")
    return {
        "arch": one_line(str(known["arch"])),
        "lr": _number(known, "train.optim.lr"),
        "seed": int(_number(known, "train.seed")),
        "steps": known_count(known.get("train.steps")),
    }


def read_config(folder: Path) -> dict[str, Any]:
    """`config.yaml`; ValueError if it is missing or damaged."""
    if not folder.is_dir():
        raise ValueError("no such folder")
    path = folder / "config.yaml"
    if not path.is_file():
        raise ValueError("empty folder" if not any(folder.iterdir()) else "no config.yaml: not a run folder")
    try:
        config, _ = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"config.yaml is damaged{str(error).removeprefix(str(path))}") from None
    if not isinstance(config, dict):
        raise ValueError("config.yaml is damaged: no settings in it")
    return config


def read_object(path: Path, notes: list[str]) -> dict[str, Any] | None:
    """The object in a JSON file. None if it is missing or damaged; damage is added to `notes`."""
    if not os.path.lexists(path):
        return None
    try:
        return untrusted.read_object(path)
    except ValueError:
        notes.append(f"{path.name} is damaged")
        return None


def noted_digests(folder: Path, notes: list[str]) -> dict[str, str]:
    """The sha256 of files from outside by reference, from `code.json`."""
    digests = (read_object(folder / "code.json", notes) or {}).get("outside")
    return {str(key): str(value) for key, value in digests.items()} if isinstance(digests, dict) else {}


def _number(settings: Mapping[str, Any], key: str) -> float:
    value = settings[key]
    try:
        number = float(value)  # PyYAML reads 3e-3 as text
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not finite(number):
        raise expected(key, "a number", value)
    return number


# -- run folders among other folders ----------------------------------------------------------------------------------


def as_paths(folders: Folders) -> list[Path]:
    """One folder or several, each once."""
    return list(dict.fromkeys(map(Path, [folders] if isinstance(folders, (str, Path)) else folders)))


def run_folders(folder: str | Path) -> list[Path]:
    """The run folders of a play folder or of a folder of runs, or the folder itself if it is a run. Empty if there are
    only results of `canonlm eval`; ValueError if there is nothing."""
    folder = Path(folder)
    if is_run(folder):
        return [folder]
    what = "a folder with runs or results of `canonlm eval` in it"
    try:
        folder.stat()
        inside = sorted(path for path in _folders_in(folder) if is_run(path) or not _is_ours(path.name))
    except OSError as error:
        raise expected("folder", f"{what} ({why(error, folder)})", str(folder)) from None
    results = {path.parent for path in folder.rglob("results.json")}
    if not inside and not results:
        raise expected("folder", what, str(folder))
    of_results = {path for each in results for path in (each, each / "answers", *each.parents)}
    return [path for path in inside if is_run(path) or path not in of_results]


def _is_ours(name: str) -> bool:
    """Whether a folder among runs is the queue's leases, or one that is being written."""
    return name == "leases" or (name.startswith(".") and ".tmp-" in name)


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
    inside = untrusted.path_inside(folder, "runs") if (folder / "runs").is_dir() else folder
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
        untrusted.path_inside(folder, str(path.relative_to(folder)))
    except ValueError as error:
        return str(error)
    return ""


@cache  # once, as folders are looked through again and again
def _warn(text: str) -> None:
    logging.getLogger(__name__).warning("left out: %s", plain(text))
