"""The ledger: every claim of the paper, what was run for it, the estimate with its interval, and the verdict.

`claims.yaml` has the claims and what decides them beside the experiments: kept runs (`canonlm.experiments.ledger`)
decide the comparisons that an experiment has registered, the published tables those about published models
(`retests`), and counting those about parameters. Each part of a claim is judged, and `verdicts.combined` gives the
claim's verdict.
"""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

from canonlm.core.errors import unknown
from canonlm.core.safe_yaml import read_yaml
from canonlm.experiments import ledger, schema
from canonlm.experiments.grid import Outcomes
from canonlm.experiments.retests import RIGHT, TableTest, retests
from canonlm.experiments.schema import Experiment, Scale
from canonlm.experiments.verdicts import (
    FASTER,
    POINTS,
    Compared,
    State,
    Verdict,
    combined,
    is_complete,
    judge,
    shares_right,
)
from canonlm.runs.rows import one_line
from canonlm.runs.seed_statistics import LEVEL, SEEDS_OF_INTERVAL, Interval, gaffke_interval, holm
from canonlm.train.config import Settings

STATES: tuple[State, ...] = ("supported", "supported in part", "contradicted", "undecided", "untested")

FILE = Path(__file__).parent / "claims.yaml"


class Enough(Settings):
    """A share of right answers that the text of a claim promises. since: when that was decided."""

    arm: str
    slices: list[str]
    at_least: float
    since: str


class Shape(Settings):
    layers: int
    width: int
    heads: int


class Counted(Settings):
    """`arch` has at most this share of parameters more than `against`, without its embedding and head, at any shape."""

    arch: str
    against: str
    limit: float
    models: list[Shape]
    paper: str


class Listed(Settings):
    """An entry of `claims.yaml`, which has a comment on each field."""

    text: str
    enough: list[Enough] = []
    part: str = ""
    undecided: dict[Scale, str] = {}
    caveats: dict[Scale, str] = {}
    counted: Counted | None = None
    tables: list[TableTest] = []
    reason: str = ""


@cache
def listed() -> dict[str, Listed]:
    """All claims by their numbers, in order."""
    return {number: Listed.model_validate(entry) for number, entry in read_yaml(FILE)[0].items()}


@dataclass(frozen=True)
class Estimate:
    """One part of a verdict: how much higher the first is than the second, in `unit`, or a share of right answers (the
    unit is then `RIGHT`). low, high: the safe 95 % interval; both are the value if there is none. state: the verdict on
    this part. note: what to know about it. normal: the interval if further runs differ as these do. p: see `Compared`;
    None: no test. edge: the arms whose learning rate is the largest or smallest that was tried. assumes: low and high
    hold only if further runs differ as these do, as these numbers have no bounds."""

    what: str
    value: float
    low: float
    high: float
    unit: str
    state: State
    note: str = ""
    normal: Interval | None = None
    p: float | None = None
    edge: tuple[str, ...] = ()
    assumes: bool = False

    def __str__(self) -> str:
        if self.unit == FASTER and self.value in (0, math.inf):  # no run of one of them gets there
            more, less = self.value and self.low > 0, not self.value and self.high < math.inf
            bound = f"more than {self.low:.3g}" if more else f"less than {self.high:.2g}" if less else "any number of"
            return f"{bound} {self.unit}"
        number = self._written(self.value)
        if self.low < self.high:
            number += f" {self.interval(Interval(self.low, self.high))}"
        return f"{number} {self.unit}"

    def interval(self, ends: Interval) -> str:
        return f"[{self._written(ends.low)}, {self._written(ends.high)}]"

    def _written(self, number: float) -> str:
        digits = 3 if self.unit.startswith("nats") else 2 if self.unit != "points" or abs(self.value) < 10 else 1
        sign = "" if self.unit in (RIGHT, FASTER) else "+"
        number = round(number, digits) or 0.0  # not -0.0
        return f"{number:{sign if number else ''}.{digits}f}".replace("-", "−").replace("inf", "∞")


@dataclass(frozen=True)
class Claim:
    """An entry of the ledger. source: where the evidence is from. reason: why a claim is untested, or what limits the
    test. runs: the numbers of finished runs and of all runs behind it. setting: the one whose runs decide it."""

    id: str
    text: str
    state: State
    source: str
    paper: str
    estimates: tuple[Estimate, ...]
    reason: str = ""
    seeds: int = 0
    runs: tuple[int, int] = (0, 0)
    machines: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    setting: str = ""


def claims(folder: Path, scale: str = "micro", seed_set: int = 0) -> list[Claim]:
    """All claims, judged. folder: with the CSV files of `canonlm replicate --export`. seed_set: of their runs.
    ValueError: a damaged file, or no such scale."""
    if scale not in schema.SCALES:
        raise unknown("scale", scale, schema.SCALES)
    outcomes = ledger.read(folder)
    experiments = [_loaded(name, seed_set) for name in schema.names()]
    by_claim = {number: each for each in experiments for number in each.claims}
    verdicts = {each.claim: each for experiment in experiments for each in judge(experiment, scale, outcomes)}
    judged = []
    for number, entry in listed().items():
        if entry.tables:
            judged.append(_published(number, entry))
        elif entry.counted is not None:
            judged.append(_counted(number, entry.text, entry.counted))
        elif number not in by_claim:
            judged.append(Claim(number, entry.text, "untested", "", "", (), entry.reason))
        elif number not in verdicts:
            judged.append(_untested(by_claim[number], number, scale))
        else:
            judged.append(of_verdict(by_claim[number], verdicts[number], outcomes))
    return judged


@cache
def _loaded(name: str, seed_set: int) -> Experiment:
    return schema.load(name, seed_set=seed_set)


def summary(entries: Sequence[Claim]) -> str:
    """`12 claims: 4 supported, 1 supported in part, 1 contradicted, 2 undecided, 4 untested`"""
    counts = Counter(each.state for each in entries)
    return f"{len(entries)} claims: " + ", ".join(f"{counts[state]} {state}" for state in STATES)


def after_all(entries: Sequence[Claim]) -> str:
    """How many comparisons of runs that expect a difference still differ if all of these are counted (Holm), and which
    settings decide the claims: verdicts on the same runs stand or fall together."""
    tests = [(entry.id, each.p) for entry in entries for each in entry.estimates if each.p is not None]
    lasting = [name for (name, _), p in zip(tests, holm([p for _, p in tests]), strict=True) if p <= LEVEL]
    by_setting: dict[str, list[str]] = {}
    for entry in entries:
        if entry.setting and entry.state not in ("undecided", "untested"):
            by_setting.setdefault(entry.setting, []).append(entry.id)
    if not tests:
        return ""
    places = "; ".join(f"{setting} decides {', '.join(names)}" for setting, names in sorted(by_setting.items()))
    names = f" ({', '.join(dict.fromkeys(lasting))})" if lasting else ""
    text = (
        f"Of {len(tests)} comparisons of runs that expect a difference, {len(lasting)} "
        f"show{'s' if len(lasting) == 1 else ''} one by an exact permutation test that counts these {len(tests)}"
    )
    return f"{text}{names}." + (f" Verdicts on the same runs stand or fall together: {places}." if places else "")


def of_verdict(experiment: Experiment, verdict: Verdict, outcomes: Outcomes) -> Claim:
    """The verdict on a claim of an experiment as an entry of the ledger, with the shares of right answers that a claim
    of the paper promises."""
    if verdict.state == "untested":
        return _untested(experiment, verdict.claim, verdict.scale, verdict.paper)
    entry, scale = _listed(experiment, verdict.claim), cast(Scale, verdict.scale)
    no_test = entry.undecided.get(scale, "")
    compared = [replace(each, state="undecided") if no_test else each for each in verdict.compared]
    parts = [estimate for each in compared if (estimate := _estimate(each))]
    state: State = "undecided" if no_test else verdict.state
    if entry.enough and verdict.seeds:
        level = LEVEL / (len(verdict.compared) + len(entry.enough))
        shares = [_share(experiment, verdict, each, outcomes, level) for each in entry.enough]
        parts, state = [*parts, *shares], combined([state, *(each.state for each in shares)])
    if entry.part:
        state = combined([state, "undecided"])
    notes = (verdict.note, entry.part, no_test, entry.caveats.get(scale, ""), *(each.since for each in entry.enough))
    env = [run.env for name in verdict.runs if (run := outcomes.get(name))]
    machines, commits = (
        tuple(sorted({one_line(str(each[key])) for each in env if each.get(key)})) for key in ("machine", "commit")
    )
    return Claim(
        verdict.claim,
        entry.text,
        state,
        f"{verdict.experiment}, {verdict.scale} scale",
        verdict.paper,
        tuple(parts),
        "; ".join(filter(None, notes)),
        verdict.seeds,
        (verdict.done, len(verdict.runs)),
        machines,
        commits,
        experiment.claims[verdict.claim].at[scale].setting,
    )


def _listed(experiment: Experiment, number: str) -> Listed:
    """The entry of a claim of the paper; an empty one for a claim of somebody else's experiment, whatever its file is
    called."""
    empty = Listed(text="")
    return listed().get(number, empty) if experiment.name in schema.names() else empty


def _untested(experiment: Experiment, number: str, scale: str, paper: str = "") -> Claim:
    """A claim without runs at this scale, and how to train them."""
    tested = experiment.claims[number].at
    why = "no runs yet" if scale in tested else f"not tested at {scale} scale"
    where = scale if scale in tested else next(each for each in schema.SCALES if each in tested)
    reason = f"{why}: canonlm replicate {experiment.name} --scale {where}"
    return Claim(number, _listed(experiment, number).text, "untested", "", paper, (), reason)


def _estimate(compared: Compared) -> Estimate | None:
    if (result := compared.result) is None:
        return None
    factor = compared.factor
    low, high = result.safe if result.seeds > 1 else (result.gap, result.gap)
    pair = compared.pair
    rates = ", ".join("?" if rate is None else f"{rate:g}" for rate in compared.rates)
    note = f"expected {pair.expect} by {factor * pair.smallest:g}; {compared.state}; rates {rates}"
    normal = None
    if result.normal != result.safe and result.seeds > 1:
        normal = Interval(*(factor * end for end in result.normal))
    return Estimate(
        str(pair), factor * result.gap, factor * low, factor * high, compared.unit, compared.state, note, normal,
        compared.p if pair.expect in ("higher", "lower") else None, compared.at_edge,
        assumes=compared.unit not in (POINTS, FASTER),
    )  # fmt: skip


def _share(experiment: Experiment, verdict: Verdict, enough: Enough, outcomes: Outcomes, level: float) -> Estimate:
    shares = shares_right(experiment, verdict, enough.arm, enough.slices, outcomes)
    mean = low = high = statistics.mean(shares)
    if len(shares) >= SEEDS_OF_INTERVAL:
        low, high = gaffke_interval(shares, level)
    state: State = "undecided"
    if is_complete(experiment, verdict) and not low < enough.at_least <= high:
        state = "supported" if low >= enough.at_least else "contradicted"
    note = f"enough would be {100 * enough.at_least:g} %; {state}"
    return Estimate(f"{enough.arm}, {', '.join(enough.slices)}", 100 * mean, 100 * low, 100 * high, RIGHT, state, note)


def _published(number: str, entry: Listed) -> Claim:
    tests = [each for test in entry.tables for each in retests(test)]
    estimates = tuple(
        Estimate(
            each.comparison,
            each.estimate,
            each.low,
            each.high,
            each.unit,
            each.verdict,
            each.note + (f"; {each.verdict}" if len(tests) > 1 else ""),
            assumes=each.low < each.high,
        )
        for each in tests
    )
    reasons = [text for each in entry.tables for text in (each.confounder, each.note) if text]
    paper = "; ".join(dict.fromkeys(each.paper for each in tests if each.paper))
    state = combined([each.verdict for each in tests])
    seeds = "eight seeds" if any(each.spread for each in entry.tables) else "one seed"
    source = f"published tables, {seeds}"
    return Claim(number, entry.text, state, source, paper, estimates, "; ".join(dict.fromkeys(reasons)))


def _counted(number: str, text: str, counted: Counted) -> Claim:
    estimates = []
    for shape in counted.models:
        plain, more = (_parameters(arch, shape) for arch in (counted.against, counted.arch))
        share = (more - plain) / plain
        state: State = "supported" if round(share, 4) <= counted.limit else "contradicted"
        what, percent = f"{shape.layers} layers, width {shape.width}", 100 * share
        estimates.append(Estimate(what, percent, percent, percent, "% more parameters in its layers", state))
    state = combined([each.state for each in estimates])
    return Claim(number, text, state, "counted", counted.paper, tuple(estimates))


def _parameters(arch: str, shape: Shape) -> int:
    """The number of parameters of a model without its embedding and head."""
    import torch  # which pages do not need

    from canonlm.models.build import build
    from canonlm.models.interface import Sizes

    sizes = Sizes(vocab_size=64, hidden_size=shape.width, num_hidden_layers=shape.layers,
                  num_attention_heads=shape.heads, seq_len=512)  # fmt: skip
    with torch.device("meta"):
        blocks = build(arch, sizes).blocks.values()
    return sum(parameter.numel() for block in blocks for parameter in block.parameters())
