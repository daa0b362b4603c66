"""All measurements as data frames with a row per number, and their CSV.

`measurements` reads them from run folders. Its columns (`RUN_COLUMNS`) are those of `canonlm.load_runs`. Published
results, and runs beside them, have the columns of `RESULTS`; there, `unit` "%" means that value and stderr are percent.
Both take their columns from one `SCHEMA`.

In every CSV, a text that a spreadsheet would take for a formula gets an apostrophe before it: a formula in a stranger's
run name could send the sheet's numbers away. The scripts of the pages do the same (`guarded` in web/draw.js), and
`read_csv` removes the apostrophes.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from io import StringIO
from pathlib import Path
from typing import Any, Protocol

import polars as pl

from canonlm.core import untrusted
from canonlm.core.errors import expected, unknown
from canonlm.runs.evaluated import Evaluated
from canonlm.runs.gather import Gathered
from canonlm.runs.identity import exact, flat
from canonlm.runs.load import LeftOut, Run, mixes, tokens_of
from canonlm.runs.rows import (
    DAMAGE,
    MAX_BYTES,
    Evaluation,
    accuracy_of,
    finite,
    known_count,
    of_set,
    one_line,
    slice_key,
)
from canonlm.runs.seed_statistics import t_factor

SCHEMA = {
    "source": pl.String,  # published, best (of learning rates), reference (open models), paper, yours
    "run": pl.String,  # the folder's name
    "model": pl.String,  # a released model, a run, a saved model, or what the paper calls it
    "state": pl.String,  # finished, or: unfinished at step 300 of 2000
    "task": pl.String,  # depo, text; of `canonlm eval`: the name of the test
    "setting": pl.String,  # difficulty of the task; of text: the sources; of `canonlm eval`: what is not default
    "arch": pl.String,  # of results: without its Canon layers
    "canon": pl.String,  # sites, such as ABCD or AbCD; b: a short convolution alone; none
    "size": pl.String,  # 1B; 12L768D: layers and width of playground models
    "parameters": pl.Int64,  # once the run has finished
    "state_bytes": pl.Int64,  # of one sequence of data.seq_len tokens; once the run has finished
    "lr": pl.Float64,  # of the configuration; the metric `lr` is that of a step
    "seed": pl.Int64,
    "kind": pl.String,  # evaluation, training, final, suite
    "split": pl.String,
    "step": pl.Int64,
    "tokens": pl.Int64,  # seen in training up to this step
    "slice": pl.String,  # which questions: all, k=4, 1hop-2k; of text: the validation set
    "metric": pl.String,
    "unit": pl.String,  # share: from 0 to 1; %; or "", as measured
    "value": pl.Float64,  # null where it was not a finite number
    "stderr": pl.Float64,
    "correct": pl.Int64,
    "total": pl.Int64,  # answers, or tokens of a text, behind the value
}
RUN_COLUMNS = ("run", "state", "task", "setting", "arch", "parameters", "state_bytes", "lr", "seed", "kind", "split",
               "step", "tokens", "slice", "metric", "value", "stderr", "correct", "total")  # fmt: skip
MODEL = ("source", "model", "arch", "canon", "size", "tokens", "lr", "seed")
"""The columns of results that identify a model."""
QUESTION = ("task", "setting", "slice", "metric", "unit")
"""The columns that identify a question."""
RESULTS = (*MODEL, *QUESTION, "value", "stderr", "total")
FILTERS = (*MODEL, *QUESTION[:-1])

KINDS = ("evaluation", "training", "final", "suite")
TRAINING = ("loss", "lr", "grad_norm", "tokens_per_s", "z_loss", "mfu", "data_wait_share", "memory_gb")
SHARE, PERCENT = "share", "%"

_TEXTS = ("section", "base_model", "base_canon", "canon_model")  # columns that only files have: of a page, of pairs
_MANY = 30  # values that an error still lists
_FORMULA = r"^['=+\-@\t\r\n]"  # an apostrophe is doubled, so that reading keeps it
_NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"  # not a formula

Row = tuple[Any, ...]


class Names(Protocol):
    """How to name tasks and questions: `canonlm.experiments.published.names`."""

    def setting_of(self, task: Mapping[str, Any], /) -> str: ...

    def question_of(self, suite: str, name: str, measure: str, /) -> tuple[str, str, str]: ...

    def setting_of_suite(self, suite: str, settings: Mapping[str, Any], seed: Any, /) -> str | None: ...


def measurements(
    gathered: Iterable[Gathered], names: Names, kinds: Collection[str] = KINDS
) -> tuple[pl.DataFrame, list[LeftOut]]:
    """Every number of runs and of `canonlm eval`, with the columns `model`, `unit` and `RUN_COLUMNS`, and results that
    cannot be read. kinds: of the rows."""
    gathered = list(gathered)
    tasks = tasks_of([run for one in gathered for run in one.runs.values()], names)
    columns = ("model", "unit", *RUN_COLUMNS)
    rows: list[Row] = []
    unreadable: list[LeftOut] = []
    for one in gathered:
        about: dict[str, Row] = {}
        for run in one.runs.values():
            sizes = (run.result.num_parameters, run.result.state_bytes) if run.result else (None, None)
            about[run.name] = (run.name, run.state, *tasks[run.name], run.arch, *sizes, run.lr, run.seed)
            rows += ((run.name, unit, *about[run.name], *row) for unit, *row in _of_run(run, kinds))
        for name, evaluated in one.evaluated.items() if "suite" in kinds else ():
            try:
                rows += list(_of_suites(evaluated, name, one, about, names))
            except DAMAGE as error:
                unreadable.append(LeftOut(name, f"not readable: {type(error).__name__}: {error}"))
    values = [tuple(map(fitting, row)) for row in rows]
    return pl.DataFrame(values, {name: SCHEMA[name] for name in columns}, orient="row"), unreadable


def tasks_of(runs: Sequence[Run], names: Names) -> dict[str, tuple[str, str]]:
    """(task, setting) by the name of the run; the setting of text is the name of its mix."""
    texts = mixes([run for run in runs if run.sources])
    tasks = {run.name: ("text", mix) for mix, group in texts.items() for run in group}
    for run in runs:
        if not run.sources:
            task = run.config["task"]
            tasks[run.name] = run.task.name, names.setting_of(task if isinstance(task, dict) else {"name": task})
    return tasks


def _of_run(run: Run, kinds: Collection[str]) -> Iterator[Row]:
    """The unit, then the columns from `kind` on."""
    split = str(flat(run.config).get("train.eval_split", "test"))
    for row in run.evals if "evaluation" in kinds else ():
        yield from _of_evaluation(run, row, ("evaluation", split))
    for step in run.train if "training" in kinds else ():
        at = ("training", "train", step.step, tokens_of(run.config, step.step))
        for name in TRAINING:
            if (value := getattr(step, name)) is not None:
                yield ("", *at, "all", name, value, None, None, None)
    if run.result is not None and "final" in kinds:
        yield from _of_evaluation(run, run.result.final, ("final", split))
        at_end = ("final", None, run.result.steps, tokens_of(run.config, run.result.steps))
        for name in ("train_seconds", "tokens_per_s"):
            if (value := getattr(run.result, name)) is not None:
                yield ("", *at_end, "all", name, value, None, None, None)


def _of_evaluation(run: Run, row: Evaluation, kind: tuple[str, str]) -> Iterator[Row]:
    """The task's headline first (the mean over the slices of the primary scale, or one of them), then slice by slice,
    then measures and the loss. For text, each validation set is a slice, and the loss over several sets comes first."""
    at = (*kind, row.step, tokens_of(run.config, row.step))
    if run.sources:
        if len(row.sets) > 1:
            yield ("", *at, "all", "loss", row.loss, None, None, None)
        for name, tokens in row.sets.items():
            for metric in ("loss", "bits_per_byte"):
                value = row.measures.get(of_set(metric.replace("_", " "), name))
                yield ("", *at, name, metric, value, None, None, tokens)
        return
    shares = {key: count.accuracy for key, count in row.slices.items()}
    errors = {key: math.sqrt(p * (1 - p) / max(1, row.slices[key].total - 1)) for key, p in shares.items()}
    keys = run.task.headline(row.slices)
    if keys and [*row.slices] != ["all"]:
        mean = sum(shares[key] for key in keys) / len(keys)
        error = math.sqrt(sum(errors[key] ** 2 for key in keys)) / len(keys)
        yield (SHARE, *at, "all", "accuracy", mean, error, None, sum(row.slices[key].total for key in keys))
    for key, count in row.slices.items():
        metric = accuracy_of(key, row.slices)
        yield (SHARE, *at, key, metric, shares[key], errors[key], count.correct, count.total)
    for name, value in [*row.measures.items(), *((name, None) for name in row.unusable), ("loss", row.loss)]:
        yield ("", *at, "all", name, value, None, None, None)


def _of_suites(one: Evaluated, name: str, where: Gathered, about: Mapping[str, Row], names: Names) -> Iterator[Row]:
    step, parameters = (known_count(one.model.get(key)) for key in ("step", "parameters"))
    arch = one.model.get("arch")
    run = next(
        (run for short, run in where.runs.items() if {short, Path(short).name} & set(parts_of(one, where))), None
    )
    tokens = tokens_of(run.config, step) if run and step is not None else None
    unknown_run = (name, None, None, None, arch if isinstance(arch, str) else None, parameters, None, None, None)
    run_name, state, _, _, *rest = about[run.name] if run else unknown_run
    seed = run.eval_seed if run else 0
    entries = {}  # one per question: the same file under two paths is one question, and its later answer counts
    for entry in one.entries:
        setting = names.setting_of_suite(entry["suite"], entry["settings"], seed)
        entries[entry["suite"], entry["name"], setting] = entry
    for (suite, _, setting), entry in entries.items():
        split = entry["settings"].get("split")
        at = ("suite", split if isinstance(split, str) else None, step, tokens)
        for score in entry["scores"]:
            task, slice, metric = names.question_of(suite, entry["name"], score["measure"])
            if (key := one_line(slice_key(score["slice"]))) != "all":
                slice = key if suite == "playground" else f"{slice}, {key}"
            unit, numbers = SHARE if score["share"] else "", (score["value"], score["stderr"], None, score["n"])
            yield (name, unit, run_name, state, task, setting, *rest, *at, slice, metric, *numbers)


def parts_of(one: Evaluated, where: Gathered) -> tuple[str, ...]:
    """Names, one of which is that of the evaluated run."""
    return where.folder.name, *one.label.split("/")


def results(rows: Iterable[Mapping[str, Any]] | pl.DataFrame = ()) -> pl.DataFrame:
    """A frame with all columns of `RESULTS` and no other, from rows (or a frame) that have some of them."""
    types = {name: SCHEMA[name] for name in RESULTS}
    if not isinstance(rows, pl.DataFrame):
        rows = pl.DataFrame([{name: fitting(row.get(name)) for name in RESULTS} for row in rows], schema=types)
    given = [pl.col(name) if name in rows.columns else pl.lit(None).alias(name) for name in RESULTS]
    return rows.select(given).cast(types)  # type: ignore[arg-type]


def fitting(value: Any) -> Any:
    """A value from a file as a column can hold it; None if it cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # names of folders need not be text
    if isinstance(value, float):
        return value if finite(value) else None
    return None if isinstance(value, int) and abs(value) >= 2**63 else value


def short_tokens(tokens: float) -> str:
    """1006632960000 → `1T`, 33550000000 → `34B`: two digits, enough to tell lengths of training apart."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= 0.995 * size:
            return f"{float(f'{tokens / size:.2g}'):g}{letter}"
    return f"{tokens:g}"


def choose(numbers: pl.DataFrame, filters: Sequence[str]) -> pl.DataFrame:
    """The rows that pass all filters: `arch=GLA5,GDN2`, `tokens=1T`, `canon=yes`, `lr=2e-3`.

    Case does not matter; filters of one key add up. ValueError: no such key, or a value that no row has.
    """
    texts_by_key: dict[str, list[str]] = {}
    for text in filters:
        key, equals, values = text.partition("=")
        if not equals:
            raise expected("filter", "key=value, such as arch=GLA5", text)
        if key not in FILTERS:
            raise unknown("filter", key, FILTERS)
        texts_by_key.setdefault(key, []).append(values)
    kept = numbers
    for key, texts in texts_by_key.items():
        present = numbers[key].unique(maintain_order=True).to_list()
        passing = [value for text in texts for value in _values(key, text, present)]
        matches = pl.col(key).is_in([value for value in passing if value is not None])
        kept = kept.filter(matches | (pl.col(key).is_null() if None in passing else pl.lit(False)))
    return kept


def _values(key: str, text: str, present: Sequence[Any]) -> list[Any]:
    """The values that a text names: as a whole (settings contain commas) or part by part."""
    if complete := [value for value in present if _matches(key, text, value)]:
        return complete
    values = []
    for part in text.split(","):
        if not (matching := [value for value in present if _matches(key, part.strip(), value)]):
            raise _no_such(key, part.strip(), present)
        values += matching
    return values


def _matches(key: str, text: str, value: Any) -> bool:
    if value is None or text == "":
        return value is None and text == ""  # `lr=`: rows without one
    if key == "canon" and text.lower() in ("yes", "no"):
        return (text.lower() == "yes") == has_canon(value)
    if isinstance(value, str):
        family = value.partition(" (")[0] if key == "arch" else value
        return text.casefold() in (value.casefold(), family.casefold())
    try:
        return math.isclose(float(text), value) or text == f"{value:g}"  # as tables show it
    except ValueError:
        return key == "tokens" and text.casefold() == short_tokens(value).casefold()


def _no_such(key: str, text: str, present: Sequence[Any]) -> ValueError:
    say = short_tokens if key == "tokens" else str if SCHEMA[key] == pl.String else exact
    names = list(dict.fromkeys(say(value) for value in present if value is not None))
    if len(names) <= _MANY:
        return unknown(key, text, names, f"values of {key}" + (", and yes, no" if key == "canon" else ""))
    close = get_close_matches(text, names, n=4, cutoff=0.4)
    guess = f' Did you mean "{close[0]}"?' if close else ""
    others = f" Also close: {', '.join(close[1:])}." if close[1:] else ""
    return ValueError(f'unknown {key} "{text}".{guess}{others} There are {len(names)}: the column {key} of --csv.')


def has_canon(sites: str | None) -> bool:
    """Whether the `canon` of a row names a Canon layer, and not only a short convolution."""
    return sites not in (None, "none", "b")


def paired(numbers: pl.DataFrame) -> pl.DataFrame:
    """The change by Canon layers at equal architecture, size, tokens, learning rate and seed: a row for each number
    that a model with them and one without them both have. `delta` is canon − base, in the units of the values.

    Columns: source, arch, size, tokens, lr, seed, base_model, base_canon, canon_model, canon, those of the question,
    base, value, delta. Settings without a column may differ; see `canonlm.experiments.published.differing`.
    """
    same = ["source", "arch", "size", "tokens", "lr", "seed", *QUESTION]
    layers = ~pl.col("canon").is_in(["none", "b"])
    known = numbers.filter(pl.col("canon").is_not_null() & pl.col("arch").is_not_null())
    # The user's models without known training may differ in anything; published ones leave out what none has.
    trained = pl.all_horizontal(pl.col("lr", "seed").is_not_null())
    known = known.filter(pl.col("source").ne_missing("yours") | trained)
    base = known.filter(~layers).select(*same, base_model="model", base_canon="canon", base="value")
    canon = known.filter(layers).select(*same, "canon", "value", canon_model="model")
    both = canon.join(base, on=same, nulls_equal=True, how="inner", maintain_order="left")
    delta = (pl.col("value") - pl.col("base")).round(9)  # without the rounding error of 67.5 - 66.5
    names = ["base_model", "base_canon", "canon_model", "canon", *QUESTION, "base", "value"]
    return both.select(*same[: -len(QUESTION)], *names, delta=delta)


def over_seeds(numbers: pl.DataFrame) -> pl.DataFrame:
    """Mean and 95 % t-interval of numbers that differ in the seed alone, as far as the columns show, for two seeds
    or more; of percentages, cut to 0 to 100. Equal numbers have no interval.

    Columns: source, arch, canon, size, tokens, lr, those of the question, value, low, high, runs.
    """
    same = [*(key for key in MODEL if key not in ("model", "seed")), *QUESTION]
    known = numbers.filter(pl.col("seed").is_not_null(), pl.col("arch").is_not_null(), pl.col("value").is_finite())
    by_seed = known.group_by([*same, "seed"], maintain_order=True).agg(pl.col("value").mean())  # one vote per seed
    grouped = by_seed.group_by(same, maintain_order=True).agg(
        pl.col("value").mean(),
        deviation=pl.col("value").std(),
        unlike=pl.col("value").max() > pl.col("value").min(),
        runs=pl.len().cast(pl.Int64),
    )
    grouped = grouped.filter(pl.col("runs") > 1)
    factors = pl.Series([t_factor(runs) / math.sqrt(runs) for runs in grouped["runs"]], dtype=pl.Float64)
    half = grouped["deviation"] * factors
    low, high = pl.col("value") - half, pl.col("value") + half
    share, unlike = pl.col("unit") == PERCENT, pl.col("unlike")
    return grouped.select(
        *same,
        "value",
        low=pl.when(unlike).then(pl.when(share).then(low.clip(lower_bound=0.0)).otherwise(low)),
        high=pl.when(unlike).then(pl.when(share).then(high.clip(upper_bound=100.0)).otherwise(high)),
        runs="runs",
    )


def write_csv(frame: pl.DataFrame) -> str:
    """A frame as CSV."""
    text = pl.col(pl.String)
    formula = text.str.contains(_FORMULA) & ~text.str.contains(_NUMBER)
    return frame.with_columns(pl.when(formula).then("'" + text).otherwise(text).name.keep()).write_csv()


def read_csv(file: str | Path) -> pl.DataFrame:
    """A file of `canonlm results --csv` as a frame, with its original texts. OSError: the file cannot be read."""
    return read_text(untrusted.read_text(Path(file), MAX_BYTES))


def read_text(text: str) -> pl.DataFrame:
    """The same for the content of a file."""
    types = SCHEMA | dict.fromkeys(_TEXTS, pl.String)
    known = {name: types[name] for name in text.partition("\n")[0].split(",") if name in types}
    frame = pl.read_csv(StringIO(text), schema_overrides=known, infer_schema_length=None)
    frame = frame.rename({"n": "total"}, strict=False)  # as earlier versions wrote it
    return frame.with_columns(pl.col(pl.String).str.strip_prefix("'"))
