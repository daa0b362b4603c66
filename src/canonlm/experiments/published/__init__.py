"""The published results as frames: one row per number, in the columns of `canonlm.runs.table.RESULTS`.

The files beside this one hold them as they were printed; README.md names the source of each. Every call reads its
files again, which takes milliseconds.
"""

import re
from collections.abc import Mapping
from importlib.resources import files

import polars as pl

from canonlm.experiments.published.benchmarks import (
    AVERAGES,
    BENCHMARKS,
    CURVES,
    GROUPS,
    LOWER_IS_BETTER,
    PERCENT,
    Benchmark,
)
from canonlm.experiments.published.counterparts import UNREAD, Counterpart, counterpart
from canonlm.runs.table import has_canon, results

__all__ = [
    "AVERAGES", "BENCHMARKS", "GROUPS", "LOWER_IS_BETTER", "Benchmark", "Counterpart", "best", "counterpart", "curves",
    "differing", "everything", "grids", "published", "references", "seed_scores", "settings", "slimpajama", "table",
]  # fmt: skip

SEED = 777  # of all 64 runs
_IDENTITY = ("model", "arch", "canon", "size", "tokens", "lr")


def table(name: str) -> pl.DataFrame:
    """A file as it is: `finals`, `best`, `settings`, `references`, `curves`, `losses`, `grids` or `slimpajama`."""
    folder = files(__package__)
    path = next(path for path in (folder / f"{name}.csv", folder / f"{name}.csv.gz") if path.is_file())
    return pl.read_csv(path.read_bytes(), comment_prefix="#", infer_schema_length=None)


def settings() -> pl.DataFrame:
    """How the 64 models were trained: one row each."""
    return table("settings")


def published() -> pl.DataFrame:
    """The final scores of the 64 models."""
    about = settings().select(_IDENTITY).with_columns(source=pl.lit("published"), seed=pl.lit(SEED))
    return _long(table("finals").join(about, on="model", how="left", validate="1:1"))


def best() -> pl.DataFrame:
    """The best score over the learning rates, column by column: no model has all those of a row. `lr` is null."""
    wide, known = table("best"), settings()
    about = pl.DataFrame([_of_group(name, known) for name in wide["model"]], infer_schema_length=None)
    return _long(wide.join(about, on="model", how="left", validate="1:1"))


def references() -> pl.DataFrame:
    """Open models of others on the standard benchmarks. `tokens` is as rounded as published."""
    tokens = (pl.col("tokens").str.strip_suffix("T").cast(pl.Float64) * 1e12).round().cast(pl.Int64)
    return _long(table("references").drop("date").with_columns(tokens=tokens, source=pl.lit("reference")))


def slimpajama() -> pl.DataFrame:
    """The paper's models of 1.3B parameters, trained on 100B tokens. RoPE without Canon has eight seeds."""
    wide = table("slimpajama")
    rows = []
    for arch, variant in wide.select("arch", "variant").iter_rows():
        seed = re.fullmatch(r"original seed (\d+)", variant)
        rows.append({
            "source": "paper", "model": f"{arch} {variant}", "arch": _ARCHS.get(arch, arch), "canon": _sites(variant),
            "size": "1.3B", "tokens": 100_000_000_000, "seed": int(seed[1]) if seed else None,
        })  # fmt: skip
    return _long(pl.concat([pl.DataFrame(rows), wide.drop("arch", "variant")], how="horizontal"))


def seed_scores(column: str) -> list[float]:
    """The scores of those eight seeds. column: of the published tables, such as `LMB`."""
    benchmark = BENCHMARKS[column]
    seeds = slimpajama().filter(pl.col("seed").is_not_null())
    return seeds.filter(task=benchmark.task, slice=benchmark.slice, metric=benchmark.metric)["value"].to_list()


def grids() -> pl.DataFrame:
    """The paper's grids of synthetic tasks: `setting` is the name of a difficulty as `canonlm.tasks` has it.

    `table("grids")` also has the figure of each number, and notes on how it was read. `counterpart`: how to train it.
    """
    rows = []
    for row in table("grids").iter_rows(named=True):
        task, setting, slice = _question(row["task"], row["difficulty"], row["k"])
        share = row["metric"] == "acc_pct"
        arch = _ARCHS.get(row["arch"], row["arch"]) + (f"+{UNREAD}" if row["note"] == "rope unread" else "")
        rows.append({
            "source": "paper", "model": f"{row['arch']} {row['variant']}", "arch": arch,
            "canon": _sites(row["variant"]), "size": row["size"], "task": task, "setting": setting, "slice": slice,
            "metric": "accuracy" if share else "kl", "unit": PERCENT if share else "", "value": row["value"],
        })  # fmt: skip
    return results(rows)


def curves() -> pl.DataFrame:
    """Benchmarks during training, 40 points for each of the 64 models, and the training loss (nats per token, mean of
    50 records) of the 48 linear ones: `tokens`: seen up to each point."""
    scores = table("curves").unpivot(index=["model", "tokens_M"], variable_name="curve")
    losses = table("losses").rename({"loss": "value"}).with_columns(curve=pl.lit("loss"))
    questions = {**CURVES, "loss": ("train", "all", "loss")}
    names = pl.DataFrame(
        [(curve, *names) for curve, names in questions.items()],
        schema=["curve", "task", "slice", "metric"],
        orient="row",
    )
    long = pl.concat([scores, losses.select(scores.columns)]).join(names, on="curve", how="left", maintain_order="left")
    is_loss = pl.col("metric") == "loss"
    long = long.join(settings().select(_IDENTITY).drop("tokens"), on="model", how="left", maintain_order="left")
    return results(
        long.with_columns(
            source=pl.lit("published"),
            seed=pl.lit(SEED),
            tokens=pl.col("tokens_M") * 1_000_000,
            unit=pl.when(is_loss).then(pl.lit("")).otherwise(pl.lit(PERCENT)),
            value=pl.col("value") / pl.when(is_loss).then(10_000).otherwise(100),
        )
    )


def differing() -> pl.DataFrame:
    """The settings besides Canon layers in which the two models of a published pair differ: base_model, canon_model,
    setting, base, canon. Without the number of parameters, to which Canon layers add."""
    same = ("arch", "size", "tokens", "lr")
    pairs: dict[tuple[object, ...], dict[bool, dict[str, object]]] = {}
    for row in settings().iter_rows(named=True):
        pairs.setdefault(tuple(row[key] for key in same), {})[has_canon(row["canon"])] = row
    rows = [
        (pair[False]["model"], pair[True]["model"], key, str(pair[False][key]), str(pair[True][key]))
        for pair in pairs.values()
        for key in pair[False]
        if key not in ("model", "canon", "parameters") and pair[False][key] != pair[True][key]
    ]
    return pl.DataFrame(rows, schema=["base_model", "canon_model", "setting", "base", "canon"], orient="row")


def everything() -> pl.DataFrame:
    """All results but the curves, which would mix final scores with scores during training."""
    return pl.concat([published(), best(), references(), slimpajama(), grids()])


def _long(wide: pl.DataFrame) -> pl.DataFrame:
    """One row per number, from a table with the columns of `BENCHMARKS`; empty cells have no row."""
    columns = [name for name in wide.columns if name in BENCHMARKS]
    questions = pl.DataFrame(
        [(b.column, b.task, b.slice, b.metric, b.unit) for b in map(BENCHMARKS.__getitem__, columns)],
        schema=["column", "task", "slice", "metric", "unit"],
        orient="row",
    )
    index = [name for name in wide.columns if name not in BENCHMARKS]
    order = pl.DataFrame({"model": wide["model"]}).with_row_index("place")
    long = wide.with_columns(pl.col(columns).cast(pl.Float64)).unpivot(columns, index=index, variable_name="column")
    long = long.drop_nulls("value").join(questions, on="column", how="left", maintain_order="left")
    # Model by model, as they are read; unpivoting gives column by column.
    return results(long.join(order, on="model", maintain_order="left").sort("place", maintain_order=True))


def _of_group(name: str, known: pl.DataFrame) -> Mapping[str, object]:
    """The settings that the runs of a row of bests, such as `Llama-8B-Nemo-1T-lr(0.002,0.003)`, have in common."""
    start = name.partition("(")[0]
    (row,) = known.filter(pl.col("model").str.starts_with(start)).select(_IDENTITY[1:-1]).unique().to_dicts()
    return {"source": "best", "model": name, **row}


_ARCHS = {
    "Llama(RoPE)": "Llama",
    "Llama(NoPE)": "Llama-nope",
    "Llama(RoPE,ReLU2)": "Llama+relu2",
    "Llama(RoPE-1/4 all heads x quarter dims)": "Llama+rope=0.25",
    "Llama(RoPE-1/4 half heads x half dims)": "Llama+rope=0.5x0.5",
    "Llama(RoPE-1/4 quarter heads x full dims)": "Llama+rope=0.25x1",
    "GPT2(RoPE)": "Llama+mlp=standard",
    "GPT2(RoPE,ReLU2)": "Llama+mlp=standard+relu2",
}
"""The paper's names → ours, as in `canonlm.models.names`. Its GLA, GDN and Mamba2 are not the release's."""

_PLAIN = {"original": "none", "noconv1d": "none", "original(noconv1d)": "none", "conv1d": "b", "original(conv1d)": "b"}


def _sites(variant: str) -> str:
    """`Canon-ABCD(res)` → `ABCD`; without a residual `B(no-res)`, with frozen weights `ABCD(frozen)`."""
    if match := re.fullmatch(r"(cst-)?Canon-(\w+)\((res|no-res)\)", variant):
        return match[2] + ("(frozen)" if match[1] else "(no-res)" if match[3] == "no-res" else "")
    return _PLAIN[variant.partition(" seed")[0]]


def _question(task: str, difficulty: str, k: int | None) -> tuple[str, str, str]:
    """(task, setting, slice): `Depo1(K=8)`, `N=225`, 4 → `depo`, `depo1-225`, `k=4`."""
    kind, _, max_hops = task.rstrip(")").partition("(")
    name = kind.rstrip("12").removesuffix("KL").lower()
    number = difficulty.partition("=")[2]
    if name == "lano":
        return name, difficulty, "all"
    if name == "depo":
        usual = {"Depo1": "K=8", "Depo2": "K=16"}[kind]
        return name, f"{kind.lower()}-{number}" + ("" if max_hops == usual else "-k4"), f"k={k}"
    return name, f"{kind.lower()}-{number}", {"brevo": "n", "mano": "l"}[name] + f"={number}"
