"""Tasks of the harness, asked of an opened model one after the other."""

import logging
import math
import random
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

from canonlm.errors import expected
from canonlm.evals.harness import TASKS, require
from canonlm.evals.model import Subject
from canonlm.evals.questions import Score

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

_log = logging.getLogger(__name__)

PUBLISHED = ["canonlm_standard", "canonlm_retrieval", "canonlm_retrieval_twice", "canonlm_needle"]
"""Groups of the tasks behind the published results."""

SEEDS = 0, 1234
"""Of Python's generator and of the others: the harness's own."""

BOOTSTRAPS = 1000
"""Of scores whose standard error has no formula (LAMBADA's perplexity); the harness's 100,000 take minutes."""


class HarnessSettings(BaseModel):
    """
    tasks: names of tasks, groups, tags, patterns of names, or YAML files.
    num_fewshot: examples before each question; default: the task's own number.
    limit: questions of each task, the first ones; default: all.
    include: a folder with YAML of tasks of one's own.
    max_length: tokens that the model reads at once; default: its context.
    metadata: for tasks that make their own data, such as `{"max_seq_lengths": [1024]}`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tasks: list[str] = Field(min_length=1)
    num_fewshot: NonNegativeInt | None = None
    limit: PositiveInt | None = None
    include: str | None = None
    max_length: int | None = Field(None, ge=2)
    metadata: dict[str, Any] = {}


def run_harness(
    subject: Subject,
    settings: HarnessSettings,
    on_task: Callable[[str, list[Score]], None] = lambda name, scores: None,
    *,
    done: Collection[str] = (),
    bos: bool = False,
    batch_size: int | None = None,
) -> dict[str, list[Score]]:
    """Ask every task. Groups without a mean of their own are asked task by task.

    A group with a mean, such as `mmlu`, has its own scores first, then its tasks', with the slice `{"task": name}`.
    Measures are the harness's: `acc`, `word_perplexity`, …; `exact_match,strict-match` where answers are read in
    several ways. Standard errors, too; None where it knows none.

    Args:
        on_task: told the name and the scores of each task (or group with a mean), as soon as they are there.
        done: names that are not asked again: `on_task` gets no scores with them.
        bos: whether texts begin with a BOS token.
        batch_size: None: found automatically.

    ValueError: the harness is not installed, an unknown task, a model without a tokenizer; and, when all others have
    been asked, a task whose data cannot be reached.
    """
    require()
    from lm_eval.evaluator import evaluate

    from canonlm.evals.harness.lm import CanonLM

    lm = CanonLM(subject, bos=bos, max_length=settings.max_length, batch_size=batch_size or "auto")
    found: dict[str, list[Score]] = {}
    missing: dict[str, str] = {}
    with TemporaryDirectory() as folder:
        # Tasks that make their own data measure it by this.
        lm.tokenizer.save_pretrained(folder)
        units: dict[str, Task | Group | None] = {}
        with _quietly():
            manager = open_tasks(settings.include, {"tokenizer": folder, **settings.metadata})
            for name in find(manager, settings.tasks):
                try:
                    units |= {name: None} if name in done else {_name(unit): unit for unit in load(manager, name)}
                except ValueError as error:
                    missing[name] = str(error)
        for reason in missing.values() if units else ():
            _log.warning("left out: %s", reason)
        for name, unit in units.items():
            if unit is None or name in done:
                on_task(name, [])
                continue
            lm.cut = 0
            with _quietly():
                told = evaluate(
                    lm=lm,
                    task_dict=_ready(manager.load([unit]), settings.num_fewshot),
                    limit=settings.limit,
                    bootstrap_iters=BOOTSTRAPS,
                    log_samples=_is_rolling(unit),
                )
            if lm.cut:
                _log.warning("%s: %d texts of more than %d tokens lost their beginning", name, lm.cut, lm.max_length)
            found[name] = sorted(_scores(told, name), key=lambda score: len(score.slice))
            on_task(name, found[name])
    if missing:
        first, *others = missing
        raise ValueError(missing[first] + (f"; nor were these asked: {', '.join(others)}" if others else ""))
    return found


@contextmanager
def _quietly() -> Iterator[None]:
    """What the harness prints goes where its bars are, and its warnings, one for each text that is cut, nowhere."""
    log = logging.getLogger("lm_eval")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        log.setLevel(level)


def open_tasks(include: str | None = None, metadata: Mapping[str, Any] | None = None) -> "TaskManager":
    """All tasks: the harness's, ours, and those of the folder `include`."""
    from lm_eval.tasks import TaskManager

    if include is not None and not Path(include).is_dir():
        raise expected("include", "a folder with YAML files of tasks", include)
    folders = [TASKS, *([Path(include)] if include else [])]
    return TaskManager(include_path=folders, metadata=dict(metadata or {}))


def find(manager: "TaskManager", names: Sequence[str]) -> list[str]:
    """What is meant by the names, patterns and files, one by one: of a tag, and of a group without a mean, its tasks.

    ValueError, with the closest names, for what is not there.
    """
    found: list[str] = []
    for name in names:
        if name.endswith(".yaml") and Path(name).is_file():
            found.append(name)
        elif matches := manager.match_tasks([name]):
            found += [single for match in matches for single in _singles(manager, match)]
        else:
            raise unknown_task(manager, name)
    return list(dict.fromkeys(found))


def _singles(manager: "TaskManager", name: str) -> list[str]:
    entry = manager.task_index[name]
    config = entry.cfg or {"task": sorted(entry.tags)}
    members = config.get("task")
    if not isinstance(members, list) or config.keys() - {"group", "group_alias", "task", "metadata"}:
        return [name]  # a task, a group with a mean, or one that changes its tasks' settings
    if not all(isinstance(member, str) and member in manager.task_index for member in members):
        return [name]
    return [single for member in members for single in _singles(manager, member)]


def unknown_task(manager: "TaskManager", name: str) -> ValueError:
    """Of more than ten thousand names the closest are enough."""
    close = get_close_matches(name, manager.all_tasks, n=4, cutoff=0.5)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    others = f" Also close: {', '.join(close[1:])}." if close[1:] else ""
    return ValueError(f'unknown task "{name}".{guess}{others} `canonlm lm-eval ls tasks` lists all of them.')


def load(manager: "TaskManager", name: str) -> "list[Task | Group]":
    """The tasks behind a name, with their data; a group that has a mean is one.

    ValueError: a data set, or a package that the task needs, is not there.
    """
    _seed()
    try:
        with reachable(name):
            loaded = manager.load([name])
    except (FileNotFoundError, ImportError) as error:  # local files of its YAML; packages that it asks for
        raise ValueError(f"{name}: {' '.join(str(error).split())}") from None
    groups: Mapping[str, Group] = loaded.get("groups", {})
    inside = {child for group in groups.values() for child in group.child_names}
    roots = [*groups.values(), *loaded["tasks"].values()]
    return [unit for root in roots if _name(root) not in inside for unit in _units(root)]


def _units(unit: "Task | Group") -> "Iterator[Task | Group]":
    from lm_eval.api.group import Group

    if isinstance(unit, Group) and not unit.has_aggregation:
        for child in unit:
            yield from _units(child)
    else:
        yield unit


def _ready(loaded: Any, num_fewshot: int | None) -> Any:
    """Examples as the harness's `simple_evaluate` has them. That itself, called for each task, would spend seconds on a
    description of this machine every time."""
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (num_fewshot is not None and own != 0):  # a task that says 0 can have none
            task.set_config(key="num_fewshot", value=num_fewshot or 0)
        task.set_fewshot_seed(seed=SEEDS[1])
    _seed()
    return loaded


def _seed() -> None:
    """Global, as in the harness, whose tasks draw from it."""
    random.seed(SEEDS[0])
    numpy.random.seed(SEEDS[1])


def _name(unit: "Task | Group") -> str:
    from lm_eval.api.group import Group

    return unit.name if isinstance(unit, Group) else unit.task_name


def _is_rolling(unit: "Task | Group") -> bool:
    from lm_eval.api.group import Group

    tasks = unit.get_all_tasks() if isinstance(unit, Group) else [unit]
    return any(task.OUTPUT_TYPE == "loglikelihood_rolling" for task in tasks)


@contextmanager
def reachable(name: str = "") -> Iterator[None]:
    """Say in one ValueError that the data of `name` (or of some task) is neither here nor can be downloaded, and what
    to do."""
    from datasets.exceptions import DatasetNotFoundError
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (ConnectionError, DatasetNotFoundError, HfHubHTTPError) as error:
        raise ValueError(
            f"{name or 'a task'}: its data is not on this machine and cannot be downloaded "
            f"({' '.join(str(error).split())}). Where there is a network, `canonlm lm-eval --model dummy --tasks "
            f"{name or 'TASK'} --limit 1` downloads it into the folder $HF_HOME (default: ~/.cache/huggingface), which "
            "can be copied here; or write a YAML file of the task that names local files"
        ) from None


def _scores(told: Any, unit: str) -> Iterator[Score]:
    """Of the harness's numbers by task, such as `{"acc,none": 0.5, "acc_stderr,none": 0.1, …}`."""
    for name, numbers in told["results"].items():
        keys = [key for key in numbers if "," in key and "_stderr," not in key]
        for key in keys:
            measure, _, filter = key.partition(",")
            value, stderr = float(numbers[key]), numbers.get(f"{measure}_stderr,{filter}")
            if not isinstance(stderr, int | float):  # but "N/A"
                stderr = _of_texts(measure, [row[measure] for row in told.get("samples", {}).get(name, [])])
            higher = told["higher_is_better"].get(name, {}).get(measure) is not False
            yield Score(
                measure=measure if sum(other.startswith(f"{measure},") for other in keys) == 1 else key,
                value=value,
                stderr=None if stderr is None else float(stderr),
                n=numbers.get("sample_len"),
                slice={} if name == unit else {"task": name},
                higher_is_better=higher,
                share=higher and 0 <= value <= 1,
            )


def _of_texts(measure: str, texts: Sequence[Any]) -> float | None:
    """The standard error of a perplexity (or of bits per byte) over `(log-likelihood, words or bytes)` of independent
    texts, of which the harness has none: that of a ratio of means, to first order."""
    if len(texts) < 2 or measure not in ("word_perplexity", "byte_perplexity", "bits_per_byte"):
        return None
    n, units = len(texts), sum(unit for _, unit in texts)
    nats = -sum(likelihood for likelihood, _ in texts) / units
    spread = sum((likelihood + nats * unit) ** 2 for likelihood, unit in texts)
    stderr = math.sqrt(n / (n - 1) * spread) / units
    return stderr / math.log(2) if measure == "bits_per_byte" else stderr * math.exp(nats)
