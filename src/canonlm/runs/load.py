"""Reads run folders into small frozen records, with a reason for everything that is left out.

No file is trusted: see `canonlm.runs.folder`. A run on text has losses on held-out text and no accuracies. Runs on the
same text are compared.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from canonlm.core.errors import expected
from canonlm.runs.folder import TASK, fields_of, noted_digests, read_config, read_object
from canonlm.runs.identity import ABSENT, check_label, flat, label
from canonlm.runs.rows import DAMAGE, Evaluation, TrainRow, count, evaluation, finite, known_count, one_line
from canonlm.runs.rows import read as read_rows
from canonlm.runs.task_info import TaskInfo, read

TEXT = "text"  # in place of a task's name
MAX_REASON, MAX_LABEL = 300, 300
"""Max letters of texts from files."""


@dataclass(frozen=True)
class LeftOut:
    """Something that could not be read or does not count, and why."""

    name: str
    reason: str


NOT_BEGUN = "nothing recorded yet"
MAX_UNFINISHED = 8
"""Max unfinished runs that a terminal names."""


def in_short(left_out: Iterable[LeftOut], unfinished: float = math.inf) -> list[LeftOut]:
    """The same, with all runs that have recorded nothing as one entry at the end: a changed plan leaves many. So are
    those that are only unfinished, if there are more than `unfinished`."""
    entries = list(left_out)
    for reason, most in ((NOT_BEGUN, 1), ("unfinished", unfinished)):
        alike = [entry for entry in entries if entry.reason.startswith(reason) and ";" not in entry.reason]
        if len(alike) > most:
            one = LeftOut(f"{len(alike):,} runs", f"{reason} ({alike[0].name} and others)")
            gathered = {*alike}
            entries = [*(entry for entry in entries if entry not in gathered), one]
    return entries


@dataclass(frozen=True)
class Source:
    """A text that is read; `content`: the sha256 of the folder's content, if the run has recorded it."""

    name: str
    path: str
    weight: float
    content: str

    @property
    def key(self) -> tuple[str, str, float]:
        """Identifies the text, by its content if known, so that its path does not matter."""
        return self.name, self.content or self.path, self.weight


@dataclass(frozen=True)
class Result:
    """`result.json`, which exists once the run has finished."""

    steps: int
    final: Evaluation
    num_parameters: int | None = None
    state_bytes: int | None = None  # of one sequence of data.seq_len tokens
    tokens_per_s: float | None = None
    train_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run folder. `task_label` is the task with its settings. `sources` are the texts of a run on text, which has
    no task. `steps` are the planned ones; `config` and `env` are the contents of the files, and `config` also has the
    sha256 of files from outside as `outside`."""

    name: str
    arch: str
    lr: float
    seed: int
    steps: int | None
    task: TaskInfo = field(default_factory=lambda: TaskInfo(TEXT))
    task_label: str = TEXT
    sources: tuple[Source, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    env: Mapping[str, Any] = field(default_factory=dict, repr=False)
    evals: tuple[Evaluation, ...] = field(default=(), repr=False)
    train: tuple[TrainRow, ...] = field(default=(), repr=False)
    result: Result | None = None
    damaged_rows: int = 0
    notes: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.result is not None

    @property
    def final(self) -> Evaluation:
        """The last evaluation of a finished run."""
        assert self.result is not None
        return self.result.final

    @property
    def final_loss(self) -> float:
        """The loss of the last evaluation of a finished run; infinite if it has none."""
        return math.inf if self.final.loss is None else self.final.loss

    @property
    def eval_seed(self) -> Any:
        """The seed of a task's test samples, as `canonlm.train.config.RunConfig.eval_seed` has it."""
        of_training = getattr(self.task.words, "tests_what_it_trained_on", False)
        own = flat(self.config).get("data.seed" if of_training else "train.eval_seed")
        return self.seed if own is None else own

    @property
    def damage(self) -> list[str]:
        """The files and rows that could not be read, a text for each kind."""
        rows = "row" if self.damaged_rows == 1 else "rows"
        skipped = [f"{self.damaged_rows:,} damaged {rows} of metrics.jsonl skipped"] if self.damaged_rows else []
        return [*skipped, *self.notes]

    @property
    def last_step(self) -> int:
        return max([row.step for row in self.train] + [row.step for row in self.evals], default=0)

    @property
    def tokens(self) -> int | None:
        """The number of tokens read so far."""
        return tokens_of(self.config, self.last_step)

    @property
    def state(self) -> str:
        if self.finished:
            return "finished"
        planned = f" of {self.steps}" if self.steps is not None else ""
        return f"unfinished at step {self.last_step}{planned}"


def load_run(folder: str | Path) -> Run:
    """Read one run folder. ValueError: one line on why it cannot be read at all."""
    folder, notes = Path(folder), list[str]()
    config = read_config(folder)
    on_text = config.get("text") is not None
    if on_text:
        of_kind: dict[str, Any] = {"sources": _sources(folder, config, notes)}
    else:
        of_kind = dict(zip(("task", "task_label"), task_of(config, folder, notes), strict=True))
    env = read_object(folder / "env.json", notes)
    rows, train, damaged = read_rows(folder / "metrics.jsonl", notes)
    evals = [row for row in rows if bool(row.slices) != on_text]
    damaged += len(rows) - len(evals)
    raw = read_object(folder / "result.json", notes)
    check_label((raw or {}).get("run"), label(config), "result.json")
    result = _result(raw, on_text, notes)
    if result is not None:
        evals = _with_final(evals, result.final)
    digests = noted_digests(folder, notes)
    return Run(
        name=one_line(folder.absolute().name, 255), **fields_of(config), **of_kind,
        config={**config, "outside": digests} if digests else config, env=env or {}, evals=tuple(evals),
        train=tuple(train), result=result, damaged_rows=damaged, notes=tuple(notes),
    )  # fmt: skip


def _result(raw: Mapping[str, Any] | None, on_text: bool, notes: list[str]) -> Result | None:
    if raw is None:
        return None
    try:
        steps = count(raw["steps"])
        final = evaluation(raw["final"], steps)
        if bool(final.slices) == on_text:
            raise ValueError("an evaluation of another kind of run")
    except DAMAGE:
        notes.append("result.json is damaged")
        return None
    notes += [f"{name} of the final evaluation is not a finite number" for name in final.unusable]
    size, speed, seconds = (raw.get(key) for key in ("num_parameters", "tokens_per_s", "train_seconds"))
    return Result(
        steps, final, num_parameters=known_count(size), state_bytes=known_count(raw.get("state_bytes")),
        tokens_per_s=speed if finite(speed) else None, train_seconds=seconds if finite(seconds) else None,
    )  # fmt: skip


def _with_final(evals: list[Evaluation], final: Evaluation) -> list[Evaluation]:
    """The evaluations, and the final one of `result.json` if they lack it. ValueError if they have another one for its
    step."""
    for row in evals:
        if row.step == final.step and row != final:
            where = f"the evaluation after step {final.step}"
            raise ValueError(f"result.json and metrics.jsonl differ in {where}: one is not of this run, or damaged")
    is_there = any(row.step == final.step for row in evals)
    return evals if is_there else sorted([*evals, final], key=lambda row: row.step)


def read_runs(folders: Iterable[str | Path]) -> tuple[list[Run], list[LeftOut]]:
    """Read what can be read. A folder that holds no evaluation and no training row yet is left out too."""
    runs: list[Run] = []
    left_out: list[LeftOut] = []
    for folder in map(Path, folders):
        try:
            run = load_run(folder)
        except (ValueError, OSError) as error:
            left_out.append(LeftOut(one_line(folder.name, 255), one_line(str(error), MAX_REASON)))
            continue
        if run.evals or run.train:
            runs.append(run)
        else:
            left_out.append(LeftOut(run.name, "; ".join((NOT_BEGUN, *run.notes))))
    return runs, left_out


def task_of(config: Mapping[str, Any], folder: Path, notes: list[str]) -> tuple[TaskInfo, str]:
    """A run's task, and its name with its settings; damage is added to `notes`. ValueError: the run has no task."""
    task = config.get("task")
    spec = dict(task) if isinstance(task, dict) else {"name": task}
    name = spec.pop("name", None)
    if not isinstance(name, str):
        raise expected("task.name", "a task's name", name)
    # Later versions have more settings, which are absent unless set.
    settings = ", ".join(f"{key}={value}" for key, value in spec.items() if value not in ABSENT)
    label = one_line(f"{name} ({settings})" if settings else name, MAX_LABEL)
    return read(one_line(name), folder / TASK, notes), label


def _sources(folder: Path, config: Mapping[str, Any], notes: list[str]) -> tuple[Source, ...]:
    """The texts of a run on text. ValueError: one line on why they cannot be read at all."""
    texts = read_object(folder / "data.json", notes) or {}
    sources = []
    for name, source in named_sources(config).items():
        source = source if isinstance(source, dict) else {}
        noted = texts.get(f"text.sources.{name}.path")
        content = noted.get("sha256") if isinstance(noted, dict) else None
        weight = source.get("weight", 1.0)
        sources.append(Source(name, one_line(str(source.get("path", ""))),
                            float(weight) if finite(weight) else 1.0, one_line(str(content or ""))))  # fmt: skip
    return tuple(sources)


def named_sources(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text")
    sources = text.get("sources") if isinstance(text, dict) else None
    if not isinstance(sources, dict) or not sources:
        raise expected("text.sources", "the text that is read, by name", sources)
    return {one_line(str(name)): source for name, source in sources.items()}


def tokens_of(config: Mapping[str, Any], step: int) -> int | None:
    """Tokens read up to a step; None if an old configuration lacks the sizes."""
    try:
        return count(step * count(config["train"]["batch_size"]) * count(config["data"]["seq_len"]))
    except DAMAGE:
        return None


def shape_of(config: Mapping[str, Any]) -> str | None:
    """`12L768D`, as the paper calls models of this size: the same with and without Canon layers."""
    model = config.get("model")
    layers, width = (
        (model.get(key) for key in ("num_hidden_layers", "hidden_size")) if isinstance(model, dict) else (0, 0)
    )
    return f"{layers}L{width}D" if known_count(layers) and known_count(width) else None


def mixes(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """The runs by what they read: the same texts with the same weights, in whatever folders. A mix is named after its
    sources; weights, folders or contents are added only if two mixes would have one name."""
    groups: dict[tuple[Any, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(sorted(source.key for source in run.sources)), []).append(run)
    named: dict[str, list[Run]] = {}
    for group in groups.values():
        others = [other[0].sources for other in groups.values() if other is not group]
        unique = (form for form in _FORMS if all(_name(group[0].sources, form) != _name(o, form) for o in others))
        named[_name(group[0].sources, next(unique, _FORMS[-1]))] = group
    return named


_FORMS = (
    "{0.name}",
    "{0.name} × {0.weight:g}",
    "{0.name} × {0.weight:g} ({0.path})",
    "{0.name} × {0.weight!r} ({0.path}, {0.content:.12})",
)
"""How to name a source, the shortest way first."""


def _name(sources: Sequence[Source], form: str) -> str:
    return ", ".join(sorted(form.format(source) for source in sources))
