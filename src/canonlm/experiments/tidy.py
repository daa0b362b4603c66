"""Results in one format: a row per number. The user's runs and published results can be stacked.

`unit` "%": value and stderr are percent. "" (losses, perplexities, …): as measured. polars is imported only when
a frame is made or read.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from canonlm.core.errors import expected, unknown
from canonlm.runs.identity import exact
from canonlm.runs.rows import finite
from canonlm.runs.seed_statistics import t_factor

if TYPE_CHECKING:
    import polars as pl

SCHEMA = {
    "source": "String",  # published, best (of learning rates), reference (open models), paper, yours
    "model": "String",  # a released model, a run, or what the paper calls it
    "arch": "String",  # without its Canon layers
    "canon": "String",  # sites, such as ABCD or AbCD; b: a short convolution alone; none
    "size": "String",  # 1B; 12L768D: layers and width of playground models
    "tokens": "Int64",  # seen in training
    "lr": "Float64",
    "seed": "Int64",
    "task": "String",
    "setting": "String",  # difficulty of a playground task
    "slice": "String",  # which questions of the task: all, 1hop-2k, k=4
    "metric": "String",
    "unit": "String",
    "value": "Float64",
    "stderr": "Float64",
    "n": "Int64",  # answers behind the value
}
FILTERS = tuple(key for key in SCHEMA if key not in ("unit", "value", "stderr", "n"))
MODEL = ("source", "model", "arch", "canon", "size", "tokens", "lr", "seed")
"""The columns that identify a model."""
QUESTION = ("task", "setting", "slice", "metric", "unit")
"""The columns that identify a question."""

_MANY = 30  # values that an error still lists


def frame(rows: "Iterable[Mapping[str, Any]] | pl.DataFrame" = ()) -> "pl.DataFrame":
    """A frame with all columns of `SCHEMA` and no other, from rows (or a frame) that have some of them."""
    import polars as pl

    types = {name: getattr(pl, kind) for name, kind in SCHEMA.items()}
    if not isinstance(rows, pl.DataFrame):
        rows = pl.DataFrame([{name: fitting(row.get(name)) for name in SCHEMA} for row in rows], schema=types)
    given = [pl.col(name) if name in rows.columns else pl.lit(None).alias(name) for name in SCHEMA]
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


def choose(numbers: "pl.DataFrame", filters: Sequence[str]) -> "pl.DataFrame":
    """The rows that pass all filters: `arch=GLA5,GDN2`, `tokens=1T`, `canon=yes`, `lr=2e-3`.

    Case does not matter; filters of one key add up. ValueError: no such key, or a value that no row has.
    """
    import polars as pl

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
    say = short_tokens if key == "tokens" else str if SCHEMA[key] == "String" else exact
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


def paired(numbers: "pl.DataFrame") -> "pl.DataFrame":
    """The change by Canon layers at equal architecture, size, tokens, learning rate and seed: a row for each number
    that a model with them and one without them both have. `delta` is canon − base, in the units of the values.

    Columns: source, arch, size, tokens, lr, seed, base_model, base_canon, canon_model, canon, those of the question,
    base, value, delta. Settings without a column may differ; see `canonlm.experiments.published.differing`.
    """
    import polars as pl

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


def over_seeds(numbers: "pl.DataFrame") -> "pl.DataFrame":
    """Mean and 95 % t-interval of numbers that differ in the seed alone, as far as the columns show, for two seeds
    or more; of percentages, cut to 0 to 100. Equal numbers have no interval.

    Columns: source, arch, canon, size, tokens, lr, those of the question, value, low, high, runs.
    """
    same = [key for key in MODEL if key not in ("model", "seed")]
    return _over_seeds(numbers, [*same, *QUESTION], "value", 0.0)


def paired_over_seeds(numbers: "pl.DataFrame") -> "pl.DataFrame":
    """The mean and the 95 % t-interval of the differences of `paired` over seeds at equal settings, for two seeds or
    more; percentages are cut to −100 to 100.

    Columns: source, arch, size, tokens, lr, base_canon, canon, those of the question, delta, low, high, runs.
    """
    same = ["source", "arch", "size", "tokens", "lr", "base_canon", "canon"]
    return _over_seeds(paired(numbers), [*same, *QUESTION], "delta", -100.0)


def _over_seeds(numbers: "pl.DataFrame", same: Sequence[str], column: str, floor: float) -> "pl.DataFrame":
    import polars as pl

    known = numbers.filter(pl.col("seed").is_not_null(), pl.col("arch").is_not_null(), pl.col(column).is_finite())
    by_seed = known.group_by([*same, "seed"], maintain_order=True).agg(pl.col(column).mean())  # one vote per seed
    grouped = by_seed.group_by(same, maintain_order=True).agg(
        pl.col(column).mean(),
        deviation=pl.col(column).std(),
        unlike=pl.col(column).max() > pl.col(column).min(),
        runs=pl.len().cast(pl.Int64),
    )
    grouped = grouped.filter(pl.col("runs") > 1)
    factors = pl.Series([t_factor(runs) / math.sqrt(runs) for runs in grouped["runs"]], dtype=pl.Float64)
    half = grouped["deviation"] * factors
    low, high = pl.col(column) - half, pl.col(column) + half
    share, unlike = pl.col("unit") == "%", pl.col("unlike")
    return grouped.select(
        *same,
        column,
        low=pl.when(unlike).then(pl.when(share).then(low.clip(lower_bound=floor)).otherwise(low)),
        high=pl.when(unlike).then(pl.when(share).then(high.clip(upper_bound=100.0)).otherwise(high)),
        runs="runs",
    )


def short_size(parameters: Any) -> str | None:
    """1364396032 → `1.36B`"""
    if not isinstance(parameters, int) or isinstance(parameters, bool) or parameters <= 0:
        return None
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= size:
            return f"{parameters / size:.3g}{letter}"
    return str(parameters)
