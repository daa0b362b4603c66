"""From a run's YAML file and `key=value` overrides to a checked configuration, or to an error with file and line.

A file may have `base: FILE`, relative to itself: it then changes that file's settings, group by group.
"""

import copy
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import canonlm
from canonlm.core import user_code
from canonlm.core.errors import InvalidSetting, expected, shown
from canonlm.core.files import Stamp
from canonlm.core.safe_yaml import parse_yaml
from canonlm.core.safe_yaml import read_yaml as read_yaml_file
from canonlm.core.untrusted import is_inside
from canonlm.core.user_folders import expanded, home
from canonlm.runs import folder, task_info
from canonlm.train.config import RunConfig, resolve


class Recipe:
    """A run's YAML file with `key=value` overrides (dotted keys, YAML values), read once: `run` is the checked
    configuration.

    Errors give file and line, unless an override causes them: then the mistake is not in the file. trust: code from
    outside that the file may name (`user_code.of_run`); overrides and the user's own files may name any. trains: the
    run is to be trained, so somebody else's file that runs code is refused, unless trust is True; the error shows it.
    complete: adds settings before they are checked, given the keys of the overrides (`canonlm.train.weights`).
    """

    def __init__(
        self,
        path: str | Path,
        overrides: Iterable[str] = (),
        *,
        trust: user_code.Trust | None = None,
        trains: bool = False,
        complete: Callable[[dict[str, Any], list[str]], dict[str, Any]] = lambda raw, typed: raw,
    ) -> None:
        self.path = Path(path)
        self._written, self._places = read_yaml(self.path, trust=trust is True)
        self._overridden = override(raw := copy.deepcopy(self._written), overrides)
        self._trust: user_code.Trust | None = trust
        with self._located(lambda run: None):
            raw = complete(raw, self._overridden)
        self._runs = _runs(raw)
        own = self._users_own()
        if trains and trust is not True:
            self._refuse_programs(own)
        references = {*filter(None, (user_code.reference_of(own.get("arch", "")), own.get("task.name")))}
        self._trust = trust if trust is True or not references else {*(trust or ()), *references}
        with self._located(lambda run: None):
            if (arch := self._runs.get("arch")) is not None:
                user_code.check_trusted(str(user_code.reference_of(arch)))  # anyone who gets the run builds its model
            self.run = resolve(raw)

    def checked(self, check: Callable[[RunConfig], Any]) -> RunConfig:
        """The run, after a check that needs the model, say: its errors, too, give file and line."""
        with self._located(check):
            check(self.run)
        return self.run

    def _users_own(self) -> dict[str, str]:
        """The settings that run code and that the user typed, or that come from the user's own files."""
        typed = {key for key in self._runs if any(up in self._overridden for up in _and_parents(key))}
        own = {key for key, place in self._places.items() if is_yours(place.file)}
        return {key: value for key, value in self._runs.items() if key in typed | own}

    def _refuse_programs(self, own: dict[str, str]) -> None:
        if foreign := sorted(self._runs.items() - own.items()):
            lines = [f"{key} is {shown(value)}{self._places.get(key, Place(self.path, 1))}" for key, value in foreign]
            what = f"--trust, as this recipe is a program: {'; '.join(lines)}. "
            what += f"Recipes in {your_folder()} need no --trust"
            raise InvalidSetting(foreign[0][0], f"{self.path}: expected {what}")

    @contextmanager
    def _located(self, check: Callable[[RunConfig], Any]) -> Iterator[None]:
        """Within this context, an InvalidSetting gets its place in the file. check: what may raise it."""
        with user_code.of_run(self.path.parent, self._trust, "--trust"):
            try:
                yield
            except InvalidSetting as error:
                if any(key in self._overridden for key in _and_parents(error.key)):
                    raise
                if self._overridden and _complaint(self._written, check) != str(error):
                    raise
                keys = (key for key in _and_parents(error.key) if key in self._places)
                place = next((self._places[key] for key in keys), Place(self.path, 1))
                raise InvalidSetting(error.key, f"{error}{place}") from None


def load(
    path: str | Path,
    overrides: Iterable[str] = (),
    check: Callable[[RunConfig], Any] = lambda run: None,
    *,
    trust: user_code.Trust | None = None,
) -> RunConfig:
    """The checked configuration of a `Recipe`."""
    return Recipe(path, overrides, trust=trust).checked(check)


def your_folder() -> Path:
    """The folder of the user's own recipes: the environment variable CANONLM_RECIPES, or ~/.config/canonlm/recipes."""
    if place := os.environ.get("CANONLM_RECIPES"):
        return expanded(place)
    return (home() or Path(os.devnull)) / ".config" / "canonlm" / "recipes"


def is_yours(file: Path) -> bool:
    """Whether a recipe comes with the package or is in the user's own folder."""
    return is_inside(file, Path(canonlm.__file__).parent, your_folder())


def _runs(raw: dict[str, Any]) -> dict[str, str]:
    """The settings that run code, by their dotted keys."""
    arch, task, command = raw.get("arch"), raw.get("task"), raw.get("on_checkpoint")
    name = task.get("name") if isinstance(task, dict) else None
    return {
        **({"arch": arch} if isinstance(arch, str) and user_code.reference_of(arch) else {}),
        **({"task.name": name} if isinstance(name, str) and user_code.is_reference(name) else {}),
        **({} if command is None else {"on_checkpoint": str(command)}),
    }


def check_folder(path: Path, run: RunConfig) -> None:
    """ValueError, with the first difference, if the folder already has a run that this one does not continue."""
    used = outside_of(run)
    folder.check(path, run.model_dump(), partial(_completed, trust=set(used)), used)


def create_folder(path: Path, run: RunConfig) -> None:
    """Make a run's folder, or check the one that it continues."""
    used, task = outside_of(run), run.built_task
    described = None if task is None else task_info.written(task)
    folder.create(path, run.model_dump(), partial(_completed, trust=set(used)), used, described)


def outside_of(run: RunConfig) -> dict[str, folder.Outside]:
    """The files from outside that a run uses, by the references in its configuration; the data of its task, by path."""
    task = run.task["name"] if run.task is not None and user_code.is_reference(run.task["name"]) else None
    references = [reference for reference in (user_code.reference_of(run.arch), task) if reference]
    return {reference: user_code.load(reference) for reference in references} | data_of_task(run)


def data_of_task(run: RunConfig) -> dict[str, folder.Outside]:
    """The user's files that the samples of a run's task depend on, by path."""
    files = [] if run.built_task is None else run.built_task.files
    return {str(file): user_code.Outside(None, file, Stamp.of(file).sha256, file.name) for file in files}


def _completed(path: Path, trust: set[str]) -> dict[str, Any]:
    """A `config.yaml`, completed by settings that an earlier version did not have and the architecture's complete name.
    Code from outside runs only if the continuing run uses it, too."""
    from canonlm.train.build import with_complete_name  # imports torch, which many readers of recipes do not need

    return with_complete_name(load(path, trust=trust), saved=True).model_dump()


def _complaint(raw: dict[str, Any], check: Callable[[RunConfig], Any]) -> str | None:
    try:
        check(resolve(raw))
    except ValueError as error:
        return str(error)
    return None


def override(raw: dict[str, Any], overrides: Iterable[str]) -> list[str]:
    """Write `key=value` pairs into nested dicts, in place; returns the keys."""
    keys = []
    for pair in overrides:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise expected("setting", "KEY=VALUE, such as train.steps=100", pair)
        *parents, leaf = key.split(".")
        place = raw
        for parent in parents:
            if not isinstance(place.setdefault(parent, {}), dict):
                raise expected(key, f"a key below a group of settings ({parent} is not a group)", value)
            place = place[parent]
        try:
            place[leaf], _ = parse_yaml(value, key)
        except ValueError:
            raise expected(key, "a YAML value", value) from None
        keys.append(key)
    return keys


REPLACED_GROUPS = {"sources", "validation"}
"""Groups that are replaced and not merged, as their keys are the user's names."""


def merge(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`top` over `base`, group by group."""
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict) and key not in REPLACED_GROUPS
        merged[key] = merge(merged[key], value) if both else value
    return merged


class Place(NamedTuple):
    """The file and line of a key."""

    file: Path
    line: int

    def __str__(self) -> str:
        return f"  (in {self.file}, line {self.line})"


def read_yaml(path: Path, above: tuple[Path, ...] = (), trust: bool = False) -> tuple[dict[str, Any], dict[str, Place]]:
    """The mapping of a file merged over its base, and the place of every dotted key. `above`: the files that are based
    on this one. trust: a base may be anywhere, even if the file is not the user's own."""
    raw, lines = _read(path)
    places = {key: Place(path, line) for key, line in lines.items()}
    if "base" not in raw:
        return raw, places
    name, place, files = raw.pop("base"), places.pop("base"), (*above, path.resolve())
    base = path.parent / str(name)
    if not isinstance(name, str) or not base.is_file():
        what = "the path of a YAML file, relative to this one"
    elif base.resolve() in files:
        what = "a file that is not itself based on this one"
    elif not trust and not is_yours(path) and not is_inside(base, files[0].parent, Path.cwd()):
        what = "a file below the folder of the recipe or the current folder, or --trust"
    else:
        under, under_places = read_yaml(base, files, trust)
        return merge(under, raw), {**under_places, **places}
    raise InvalidSetting("base", f"{expected('base', what, name)}{place}")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """A file's mapping, and the line of every dotted key."""
    raw, node = read_yaml_file(path)
    if not isinstance(raw, dict):
        kind = "nothing" if raw is None else f"a {type(raw).__name__}"  # not its content: it may be any file
        raise ValueError(f"{path}: expected a YAML mapping, got {kind}")
    return raw, dict(_key_lines(node, ""))


def _key_lines(node: Any, prefix: str):
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield prefix + str(key.value), key.start_mark.line + 1
            yield from _key_lines(value, f"{prefix}{key.value}.")


def _and_parents(key: str):
    """A key and its parents: train.optim.lr, train.optim, train."""
    while key:
        yield key
        key = key.rpartition(".")[0]
