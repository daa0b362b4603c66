"""Which benchmarks of the 64 published models show what? A mixed model for each of them.

    python benchmarks/published_models.py

    score = size + family + tokens + log2(rate) + Canon + group + group:Canon + rest

A group is a family at one size and one number of tokens; it has two or three learning rates, each with and without
Canon layers. Groups, and the gain by Canon within them, are random; so the gain's interval says what to expect of
another such group (t, with a degree of freedom per group but one). The rest is what two trainings differ by that have
all this in common, which is compared with the spread of the paper's eight seeds of one model of 1.3B parameters and
100B tokens.

Writes benchmarks/results/published-models.json, and prints the table of docs/experiments/published.md.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
import statsmodels.formula.api as smf
from scipy.stats import t as student
from statsmodels.stats.multitest import multipletests

from canonlm.core.files import write_text
from canonlm.experiments import published

RESULT = Path(__file__).parent / "results" / "published-models.json"
BENCHMARKS = ("LMB", "PIQA", "Hella", "Wino", "ARC-e", "ARC-c", "SIQA", "BoolQ", "COPA", "OBQA", "RACE", "CSQA", "MMLU",
              "FDA", "SWDE", "NQ", "Squad", "TriviaQA", "Drop", "1hop-1k", "1hop-4k", "2hop-1k", "2hop-4k",
              "babilong_avg20", "niah-S3-4k", "lm_eval_avg13", "JRT_avg12")  # fmt: skip
FORMULA = "score ~ C(size) + C(family) + C(tokens) + rate + canon"


class Fit(NamedTuple):
    """In points. canon, low, high, p: the gain by Canon layers, its 95 % interval, and the probability of one as large
    by chance. rate: gain by a doubled learning rate. between: standard deviation of Canon's gain between groups. rest:
    that of one training."""

    canon: float
    low: float
    high: float
    p: float
    rate: float
    between: float
    rest: float


def fit(rows: Mapping[str, list]) -> Fit:
    """rows: columns `score`, `size`, `family`, `tokens`, `rate` (log2), `canon` (0 or 1), one row per model."""
    groups = [f"{size} {family} {tokens}" for size, family, tokens in zip(rows["size"], rows["family"], rows["tokens"],
                                                                        strict=True)]  # fmt: skip
    frame = pl.DataFrame({**rows, "group": groups, "one": [1] * len(groups)}).to_pandas()
    parts = {"group": "0 + C(group)", "gain": "0 + C(group):canon"}
    model = smf.mixedlm(FORMULA, frame, groups="one", vc_formula=parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a variance at zero, which is an answer here
        found = model.fit(reml=True)
    canon, error, freedom = found.params["canon"], found.bse["canon"], len(set(groups)) - 1
    half, p = student.ppf(0.975, freedom) * error, 2 * student.sf(abs(canon / error), freedom)
    between = dict(zip(model.exog_vc.names, found.vcomp, strict=True))["gain"]
    return Fit(canon, canon - half, canon + half, p, found.params["rate"], between**0.5, found.scale**0.5)


def models() -> dict[str, list]:
    settings = published.table("settings")
    return {
        "model": settings["model"].to_list(),
        "size": settings["size"].to_list(),
        "family": settings["arch"].to_list(),
        "tokens": [round(tokens / 1e12) for tokens in settings["tokens"]],
        "rate": [float(np.log2(rate)) for rate in settings["lr"]],
        "canon": [int(sites not in ("none", "b")) for sites in settings["canon"]],
    }


def spread_of_seeds(benchmark: str) -> float | None:
    """The standard deviation of the paper's eight seeds."""
    table = published.table("slimpajama")
    seeds = table.filter(pl.col("variant").str.contains(" seed "))
    return float(seeds[benchmark].std()) if benchmark in table.columns else None


def main() -> None:
    about, finals = models(), published.table("finals")
    scores = dict(zip(finals["model"], finals.select(BENCHMARKS).iter_rows(named=True), strict=True))
    results = {}
    for benchmark in BENCHMARKS:
        columns = {key: values for key, values in about.items() if key != "model"}
        found = fit(columns | {"score": [scores[model][benchmark] for model in about["model"]]})
        results[benchmark] = found._asdict() | {"seeds": spread_of_seeds(benchmark)}
    holds, *_ = multipletests([found["p"] for found in results.values()], method="holm")
    write_text(RESULT, json.dumps(results, indent=1) + "\n")
    print(
        "| benchmark | gain by Canon | differs between groups by | one training | eight seeds | gain / one training |"
    )
    print("|---|---|---|---|---|---|")
    held = dict(zip(results, holds, strict=True))
    for name, r in sorted(results.items(), key=lambda item: -item[1]["canon"] / item[1]["rest"]):
        gain = f"{r['canon']:+.2f} [{r['low']:+.2f}, {r['high']:+.2f}]".replace("-", "−")
        seeds = "" if r["seeds"] is None else f"{r['seeds']:.2f}"
        cells = [name, f"**{gain}**" if held[name] else gain, f"{r['between']:.2f}", f"{r['rest']:.2f}", seeds]
        print("| " + " | ".join([*cells, f"{r['canon'] / r['rest']:.1f}".replace("-", "−")]) + " |")


if __name__ == "__main__":
    main()
