"""Presets and recipes: YAML files beside this one.

A recipe is a run's configuration (see `canonlm.train.config`): `debug.yaml`, and in `published/` the 64 runs of the
release. `canonlm play` starts from `playground/PRESET/TASK.yaml`:

lrs, seeds: the defaults of the command line
run: a run's configuration without its architecture (see `canonlm.train.config`)
difficulties: {name: changes to `run`}   for presets that follow the task's named difficulties; `lrs` of its own, too,
                                         and `of: NAME` for a variant of another difficulty

`playground/peers/PRESET.yaml` repeats the setting of another paper or package, for the task that it names as `task`.
For a task without such a file, `default.yaml` is used, changed by the `presets` of its class, with windows long enough
for its longest instance. `text.yaml` is for prepared text.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from canonlm import tasks
from canonlm.core.errors import expected, unknown
from canonlm.train.load_config import merge, read_yaml, your_folder

HERE = Path(__file__).parent
PLAYGROUND, PUBLISHED = HERE / "playground", HERE / "published"
PEERS = PLAYGROUND / "peers"
MULTIPLE = 64  # of tokens, for windows of tasks that have no preset
TEXT = "text"  # in place of a task: prepared text


@dataclass(frozen=True)
class Preset:
    task: str  # its name; for a task from outside, without its file or module; `text` for text
    name: str
    difficulty: str | None
    lrs: tuple[float, ...]
    seeds: int
    run: dict[str, Any]


def presets() -> list[str]:
    """Those that every task has."""
    return ["tiny", "small", "paper"]


def peers_presets() -> dict[str, str]:
    """Presets of one task → its name."""
    return {file.stem: read_yaml(file)[0]["task"] for file in sorted(PEERS.glob("*.yaml"))}


def load_preset(task: str, name: str, difficulty: str | None = None) -> Preset:
    """ValueError for an unknown task, preset or difficulty; each names the choices."""
    if set(several := task.split(",")) <= {*tasks.names(), TEXT} and len(several) > 1:
        commands = [f"canonlm play {each} --out runs/{'-'.join(several)}" for each in several]
        what = f"one task; commands with the same --out add to one page: {'; '.join(commands)}"
        raise expected("TASK", what, task)
    cls = tasks.find(task) if task != TEXT else None
    file = PLAYGROUND / name / f"{task}.yaml"
    if name not in presets():
        of_peers = peers_presets()
        if (its_task := of_peers.get(name)) is None:
            raise unknown("preset", name, [*presets(), *of_peers])
        if its_task != task:
            raise expected("--preset", f"one of {task}; `canonlm play {its_task}` has this one", name)
        file = PEERS / f"{name}.yaml"
    if cls is None:
        return _of_text(name, difficulty, file)
    raw = read_yaml(file)[0] if task in tasks.names() and file.is_file() else _default(cls, name, difficulty)
    run = raw["run"]
    difficulties = raw.get("difficulties", {})
    if difficulties:
        chosen = difficulty or next(iter(difficulties))
        if chosen not in difficulties:
            raise unknown(f"{task} difficulty", chosen, difficulties, f"{task} difficulties")
        changes = {"of": chosen, **difficulties[chosen]}
        named = tasks.get(task, difficulty=changes.pop("of")).spec.model_dump()
        raw = {**raw, "lrs": changes.pop("lrs", raw.get("lrs"))}
        run = merge(merge(run, {"task": named}), changes)
        difficulty = chosen
    elif difficulty is not None:
        raise ValueError(f"--difficulty only works with presets of papers: the {name} preset of {task} has only one")
    run = {**run, "preset": name, "task": {"name": task, **run.get("task", {})}}
    made = tasks.get(**run["task"])  # for the defaults that follow from the task
    run["data"] = {"seq_len": -(-made.max_len // MULTIPLE) * MULTIPLE, "loss_on": made.loss_on, **run["data"]}
    lrs = tuple(float(lr) for lr in raw.get("lrs") or [run["train"]["optim"]["lr"]])
    return Preset(task.rpartition(":")[2], name, difficulty, lrs, raw.get("seeds", 1), run)


def _of_text(name: str, difficulty: str | None, file: Path) -> Preset:
    if not file.is_file():
        raise expected("--preset", "tiny or small, for text", name)
    if difficulty is not None:
        raise ValueError("--difficulty does not apply to text, which has none")
    raw = read_yaml(file)[0]
    return Preset(TEXT, name, None, tuple(raw["lrs"]), raw.get("seeds", 1), {**raw["run"], "preset": name})


def _default(cls: type[tasks.Task], name: str, difficulty: str | None) -> dict[str, Any]:
    raw = merge(read_yaml(PLAYGROUND / name / "default.yaml")[0], cls.presets.get(name, {}))
    if difficulty is not None and cls.difficulties:
        return merge({"difficulties": {key: {} for key in cls.difficulties}}, raw)
    return raw


def recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for folder in (HERE, PUBLISHED) for path in sorted(folder.glob("*.yaml"))}


def find(name_or_path: str | Path) -> Path:
    """The file of a recipe, given by its name (in the package or the user's own folder) or by its path. ValueError for
    anything else."""
    name, ours = str(name_or_path), recipes()
    if name in ours:
        return ours[name]
    if name == Path(name).name and (own := your_folder() / f"{name}.yaml").is_file():
        return own
    path = Path(name)
    if (path / "config.yaml").is_file():
        raise expected("RECIPE", f"a YAML file, such as {path / 'config.yaml'}, which repeats that run", name)
    if path.suffix in (".yaml", ".yml") or len(path.parts) > 1 or path.exists():
        return path
    plain = {known.lower(): known for known in ours}
    close = difflib.get_close_matches(name.lower(), plain, n=1, cutoff=0.5)
    guess = f' Did you mean "{plain[close[0]]}"?' if close else ""
    raise ValueError(f'unknown recipe "{name}".{guess} All {len(ours)}: canonlm recipes list. Or give a YAML file.')
