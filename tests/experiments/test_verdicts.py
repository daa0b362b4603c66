"""Plans are functions of the finished runs, and verdicts of the seeds' results, on synthetic outcomes."""

import itertools
import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm.experiments import grid, ledger, schema
from canonlm.experiments.claims import claims, listed, of_verdict
from canonlm.experiments.outcomes import read_finished
from canonlm.experiments.plan import plan
from canonlm.experiments.verdicts import combined, judge
from canonlm.runs.load import Result, Run
from canonlm.runs.rows import Count, Evaluation

MINE = """
title: Mine
source: a test
micro:
  - {settings: [depo-micro], arms: [llama, llama+canon]}
claims:
  C06:
    at: {micro: {setting: depo-micro}}
    pairs: [{arm: llama+canon, against: llama, expect: EXPECT, smallest: SMALLEST}]
    paper: none
"""
OUT = Path("out")


@pytest.fixture
def mine(tmp_path):
    def load(expect="higher", smallest=0.1, more=""):
        path = tmp_path / "mine.yaml"
        path.write_text(MINE.replace("EXPECT", expect).replace("SMALLEST", str(smallest)) + more)
        return of_five(schema.load(str(path)))

    return load


def of_five(experiment, looks=None):
    """The experiment with two tuning seeds, five fresh ones from 0 on and its three rates, whatever the package has."""
    fields = {"tuning_seeds": 2, "looks": looks or {5: 0.05}, "first_seed": 0, "widen": 0}
    experiment._settings = {
        name: setting.model_copy(update=fields) for name, setting in experiment.settings.items() if setting.looks
    }
    return experiment


def finished(*evals):
    """A finished run with these evaluations."""
    last = evals[-1]
    return Run(name="run", arch="llama", lr=1e-3, seed=0, steps=last.step, evals=evals, result=Result(last.step, last))


def outcome(accuracy, steps=600, halfway=None):
    def row(step, share):
        right = round(1000 * share)
        return Evaluation(step, {"k=1": Count(right, 1000), "k=2": Count(right, 1000)}, 1.0)

    return finished(row(steps // 2, accuracy if halfway is None else halfway), row(steps, accuracy))


def finish(experiment, accuracies, outcomes=None):
    """Finish all planned runs until the plan has no new ones. accuracies(arch, rate, seed): their results."""
    outcomes = dict(outcomes or {})
    while new := [run for run in plan([experiment], "micro", OUT, outcomes) if run.name not in outcomes]:
        for run in new:
            train = run.config.train
            outcomes[run.name] = outcome(accuracies(run.config.arch, train.optim.lr, train.seed))
    return outcomes


def around(canon, plain, spread=0.01):
    return lambda arch, rate, seed: (canon if "canon" in arch else plain) + spread * (seed % 5 - 2)


@given(order=st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_next_runs_do_not_depend_on_the_order_of_finished_runs(order):
    experiment = EXPERIMENT
    all_of_them = finish(experiment, around(0.9, 0.2))
    names = list(all_of_them)
    order.shuffle(names)
    finished = names[: order.randrange(len(names) + 1)]
    plans = []
    for _ in range(2):
        order.shuffle(finished)
        result = plan([experiment], "micro", OUT, {name: all_of_them[name] for name in finished})
        plans.append([run.name for run in result])
    assert plans[0] == plans[1]
    assert len(set(plans[0])) == len(plans[0])


EXPERIMENT = schema.load("fig10")


def test_fresh_seeds_come_at_the_rate_that_the_tuning_seeds_chose(mine):
    experiment = mine()

    def scores(arch, rate, seed):
        return {3e-4: 0.3, 1e-3: 0.6, 3e-3: 0.5}[rate] if arch == "llama" else {3e-4: 0.9, 1e-3: 0.9, 3e-3: 0.1}[rate]

    first = plan([experiment], "micro", OUT, {})
    assert {run.config.train.seed for run in first} == {100, 101}
    assert {run.config.train.eval_split for run in first} == {"validation"}
    assert len(first) == 2 * 3 * 2
    outcomes = finish(experiment, scores)
    fresh = [run for run in plan([experiment], "micro", OUT, outcomes) if run not in first]
    rates = {(run.config.arch, run.config.train.optim.lr, run.config.train.eval_split) for run in fresh}
    assert rates == {("llama", 1e-3, "test"), ("llama+canon", 3e-4, "test")}  # of equal rates the smallest
    assert sorted(run.config.train.seed for run in fresh) == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_another_seed_set_repeats_the_experiment_with_other_seeds_alone(mine, tmp_path):
    first = mine()
    again = of_five(schema.load(str(tmp_path / "mine.yaml"), seed_set=3))
    assert again.sha256 != first.sha256

    def configs(experiment, base):
        names = finish(experiment, around(0.9, 0.2))
        runs = plan([experiment], "micro", OUT, names)
        dumps = [run.config.model_dump() for run in runs]
        for dump in dumps:
            dump["train"]["seed"] -= base
        return {run.name for run in runs}, dumps

    (names, dumps), (other_names, other_dumps) = configs(first, 0), configs(again, 3000)
    assert not names & other_names
    assert other_dumps == dumps
    assert judge(again, "micro", finish(first, around(0.9, 0.2)))[0].state == "untested"
    assert judge(again, "micro", finish(again, around(0.9, 0.2)))[0].state == "supported"
    with pytest.raises(ValueError, match="--seed-set: expected an integer from 0 to 1000000, got -1"):
        schema.load("fig10", seed_set=-1)


def test_a_rate_at_which_a_run_failed_is_out(mine):
    experiment = mine()
    outcomes = {run.name: outcome(0.5) for run in plan([experiment], "micro", OUT, {})}
    outcomes |= {
        run.name: None
        for run in plan([experiment], "micro", OUT, {})
        if run.config.train.optim.lr == 3e-4 and run.config.train.seed == 101
    }
    point = grid.Point("depo-micro", "llama", None, None)
    assert grid.tuned(experiment, point, outcomes) == 1e-3


def test_of_equally_good_rates_the_one_with_the_lowest_loss(mine):
    """Every rate solves the task: the smallest one would be the slowest learner, and ask for smaller ones still."""
    experiment, losses = mine(), {3e-4: 0.3, 1e-3: 0.1, 3e-3: 0.2}
    outcomes = {
        run.name: finished(Evaluation(600, {"k=1": Count(9, 9), "k=2": Count(9, 9)}, losses[run.config.train.optim.lr]))
        for run in plan([experiment], "micro", OUT, {})
    }
    assert grid.tuned(experiment, grid.Point("depo-micro", "llama", None, None), outcomes) == 1e-3


def test_rates_go_on_beyond_the_edge_until_the_best_is_inside(mine, tmp_path):
    mine()
    path = tmp_path / "mine.yaml"
    path.write_text(path.read_text().replace("depo-micro", "depo-atlas"))
    experiment = schema.load(str(path))

    def scores(arch, rate, seed):
        return 0.5 + rate if arch == "llama" else 1 - abs(math.log10(rate / 1e-2))  # ever better; best at 1e-2

    outcomes = finish(experiment, scores)
    tried = {arch: grid.rates_tried(experiment, grid.Point("depo-atlas", arch, None, None), outcomes)
             for arch in ("llama", "llama+canon")}  # fmt: skip
    assert tried == {"llama": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), "llama+canon": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)}
    reported = [run.config.train for run in plan([experiment], "micro", OUT, outcomes)
                if run.config.train.eval_split == "test"]  # fmt: skip
    assert {(train.optim.lr, train.seed) for train in reported} == set(itertools.product((1e-1, 1e-2), range(200, 220)))
    [verdict] = judge(experiment, "micro", outcomes)
    assert verdict.compared[0].at_edge == ("llama",)


@pytest.mark.parametrize(
    ("expect", "smallest", "canon", "plain", "spread", "state"),
    [
        ("higher", 0.1, 0.9, 0.2, 0.01, "supported"),
        ("higher", 0.1, 0.2, 0.9, 0.01, "contradicted"),
        ("higher", 0.1, 0.5, 0.45, 0.2, "undecided"),  # noise
        ("lower", 0.1, 0.2, 0.9, 0.01, "supported"),
        ("alike", 0.5, 0.5, 0.5, 0.01, "supported"),
        ("alike", 0.1, 0.5, 0.5, 0.01, "undecided"),  # five runs do not show failures of one in three
        ("alike", 0.1, 0.9, 0.2, 0.01, "contradicted"),
        ("not lower", 0.05, 0.9, 0.2, 0.01, "supported"),
        ("not lower", 0.05, 0.2, 0.9, 0.01, "contradicted"),
    ],
)
def test_verdicts(mine, expect, smallest, canon, plain, spread, state):
    experiment = mine(expect, smallest)
    [verdict] = judge(experiment, "micro", finish(experiment, around(canon, plain, spread)))
    assert (verdict.claim, verdict.state, verdict.seeds) == ("C06", state, 5)
    assert verdict.done == len(verdict.runs) == 2 * (3 * 2 + 5)
    [compared] = verdict.compared
    assert compared.result.gap == pytest.approx(canon - plain, abs=1e-3)
    assert compared.at_edge == ("llama+canon", "llama")  # all rates are equal here, so the smallest is taken


def test_before_the_first_run_and_with_fewer_than_five_seeds_nothing_is_decided(mine):
    experiment = mine()
    [verdict] = judge(experiment, "micro", {})
    assert (verdict.state, verdict.done, len(verdict.runs)) == ("untested", 0, 12)
    outcomes = finish(experiment, around(0.9, 0.2))
    last = [run.name for run in plan([experiment], "micro", OUT, outcomes) if run.config.train.seed == 4]
    some = {name: result for name, result in outcomes.items() if name not in last}
    [verdict] = judge(experiment, "micro", some)
    assert (verdict.state, verdict.seeds) == ("undecided", 4)


@pytest.mark.parametrize(("rates", "state"), [([1e-3], "supported"), ([1e-3, 3e-3], "undecided")])
def test_seeds_that_chose_the_rate_decide_nothing(mine, rates, state):
    experiment = mine()
    changes = {"choose_on": "test", "looks": {}, "tuning_seeds": 7, "rates": rates}
    experiment._settings = {key: each.model_copy(update=changes) for key, each in experiment.settings.items()}
    [verdict] = judge(experiment, "micro", finish(experiment, around(0.95, 0.1)))
    assert (verdict.state, verdict.seeds) == (state, 7)


@pytest.mark.parametrize(("changes", "message"), [
    ({"first_seed": 998, "looks": {7: 0.05}}, "first_seed: expected seeds below 1000, where the next seed set begins"),
    ({"first_seed": 1100, "looks": {7: 0.05}}, "first_seed: expected seeds below 1000"),
    ({"first_seed": 998, "tuning_seeds": 7, "choose_on": "test"}, "first_seed: expected seeds below 1000"),
    ({"looks": {7: 0.05}, "tuning_seeds": 901}, "tuning_seeds: expected seeds below 1000"),
])  # fmt: skip
def test_seeds_of_a_setting_stay_in_their_set(changes, message):
    with pytest.raises(ValueError, match=message):
        schema.Setting(task="depo", preset="tiny", **changes)
    schema.Setting(task="depo", preset="tiny", first_seed=993, looks={7: 0.05})


def test_a_verdict_waits_for_all_seeds_of_its_look(mine):
    """Five of seven are enough for an interval that would decide: a look that is not registered."""
    experiment = of_five(mine(), {7: 0.05})
    outcomes = finish(experiment, around(0.9, 0.2))
    assert judge(experiment, "micro", outcomes)[0].state == "supported"
    some = {name: result for name, result in outcomes.items() if "seed5-" not in name and "seed6-" not in name}
    [verdict] = judge(experiment, "micro", some)
    assert (verdict.state, verdict.seeds, verdict.note) == ("undecided", 5, "")
    assert verdict.compared[0].result.safe.low > 0.1


@pytest.mark.parametrize(("lost", "seeds"), [("-seed3-", 6), ("-seed10", 0)])
def test_runs_that_failed_leave_a_claim_undecided(mine, lost, seeds):
    """A fresh run, or all tuning runs: the rest would be a selection."""
    experiment = of_five(mine(), {7: 0.05})
    outcomes = finish(experiment, around(0.9, 0.2))
    failed = [name for name in outcomes if "canon" in name and lost in name]
    [verdict] = judge(experiment, "micro", outcomes | dict.fromkeys(failed))
    assert (verdict.state, verdict.seeds) == ("undecided", seeds)
    assert verdict.note.startswith(f"{len(failed)} of its runs failed or diverged, such as depo-llama+canon-lr")


def test_a_share_of_right_answers_needs_as_many_seeds_as_a_difference():
    """Three seeds without a right answer exclude 90 %."""
    experiment = of_five(schema.load("fig5"))

    def entry(seeds):
        outcomes = dict[str, Run]()
        only = ["copying-micro"]
        while new := [run for run in plan([experiment], "micro", OUT, outcomes, only) if run.name not in outcomes]:
            evals = Evaluation(600, {f"first={n}": Count(0, 256) for n in (1, 2, 4, "all")}, 1.0)
            outcomes |= {run.name: finished(evals) for run in new}
        late = {run.name for run in plan([experiment], "micro", OUT, outcomes, only)
                if seeds <= run.config.train.seed < 100}  # fmt: skip
        some = {name: run for name, run in outcomes.items() if name not in late}
        return of_verdict(experiment, next(one for one in judge(experiment, "micro", some) if one.claim == "C02"), some)

    three, five = entry(3), entry(5)
    assert three.estimates[-1].high < 90
    assert (three.state, three.seeds, three.estimates[-1].state) == ("undecided", 3, "undecided")
    assert (five.state, five.seeds, five.estimates[-1].state) == ("contradicted", 5, "contradicted")


def test_a_file_of_yours_may_have_the_name_of_one_of_ours(tmp_path):
    (tmp_path / "text.yaml").write_text(
        MINE.replace("C06", "mine").replace("EXPECT", "higher").replace("SMALLEST", "0.1")
    )
    experiment = of_five(schema.load(str(tmp_path / "text.yaml")))
    outcomes = finish(experiment, around(0.9, 0.2))
    assert of_verdict(experiment, judge(experiment, "micro", outcomes)[0], outcomes).text == ""


def test_steps_to_a_score_are_compared_where_a_claim_is_about_speed(mine):
    experiment = of_five(mine("higher", 1.5, more="    steps_to: 0.5\n"), {6: 0.05})
    outcomes = finish(experiment, around(0.9, 0.2))
    [verdict] = judge(experiment, "micro", outcomes)
    [compared] = verdict.compared  # the other one never reaches it, this one in the first of two evaluations
    assert (verdict.state, compared.unit, compared.factor) == ("supported", "times as fast", 1)
    assert (compared.result.gap, compared.result.safe) == (math.inf, (2, math.inf))
    for run in plan([experiment], "micro", OUT, outcomes):
        if run.config.arch == "llama":  # reaches it at the end
            outcomes[run.name] = outcome(0.9, halfway=0.1)
    [compared] = judge(experiment, "micro", outcomes)[0].compared
    assert compared.result.safe.low <= 2 <= compared.result.safe.high
    for run in plan([experiment], "micro", OUT, outcomes):
        if run.config.arch == "llama":  # trains a little longer, and reaches it at the end
            outcomes[run.name] = outcome(0.9, 630, halfway=0.1)
    [compared] = judge(experiment, "micro", outcomes)[0].compared
    assert compared.result.gap == pytest.approx(2.1)
    outcomes = finish(experiment, around(0.2, 0.2))  # nobody reaches it
    [verdict] = judge(experiment, "micro", outcomes)
    assert (verdict.state, verdict.compared[0].result) == ("undecided", None)


@pytest.mark.parametrize(
    ("expect", "smallest", "state"),
    [("lower", 2, "supported"), ("lower", 20, "contradicted"), ("not lower", 1.1, "contradicted"),
     ("not lower", 20, "supported"), ("alike", 2, "contradicted"), ("alike", 20, "supported")],
)  # fmt: skip
def test_slower_means_a_ratio_of_steps_below_one(mine, expect, smallest, state):
    """Canon layers need about four times the steps here."""
    experiment = of_five(mine(expect, smallest, more="    steps_to: 0.5\n"), {7: 0.05})
    outcomes = finish(experiment, around(0.9, 0.2))
    for run in plan([experiment], "micro", OUT, outcomes):
        first = (400 if "canon" in run.config.arch else 100) + 10 * (run.config.train.seed % 5)
        counts = [(step, Count(900 * (step >= first), 1000)) for step in range(10, 610, 10)]
        outcomes[run.name] = finished(*(Evaluation(step, {"k=1": each, "k=2": each}, 1.0) for step, each in counts))
    assert judge(experiment, "micro", outcomes)[0].state == state


def test_a_second_look_is_taken_only_where_the_first_does_not_decide(mine, tmp_path):
    experiment = of_five(mine(), {5: 0.02, 10: 0.03})
    experiment._sha256 = "two looks"

    def seeds(accuracies):
        outcomes = finish(experiment, accuracies)
        runs = plan([experiment], "micro", OUT, outcomes)
        [verdict] = judge(experiment, "micro", outcomes)
        return max(run.config.train.seed for run in runs if run.config.train.seed < 100) + 1, verdict.seeds

    assert seeds(around(1.0, 0.0)) == (5, 5)
    assert seeds(around(0.5, 0.45, 0.2)) == (10, 10)


def test_the_ledger_round_trips(mine, tmp_path, monkeypatch):
    experiment, out = mine(), tmp_path / "out"
    outcomes = finish(experiment, around(0.9, 0.2))
    monkeypatch.setattr(ledger, "read_finished", lambda folder: outcomes.get(folder.name))
    assert ledger.export([experiment], "micro", out, tmp_path / "csv") == 22
    kept = ledger.read(tmp_path / "csv")
    assert {name: run.evals for name, run in kept.items()} == {name: run.evals for name, run in outcomes.items()}
    assert ledger.export([experiment], "micro", out, tmp_path / "csv") == 0
    monkeypatch.undo()
    assert judge(experiment, "micro", ledger.read(tmp_path / "csv")) == judge(experiment, "micro", outcomes)


def test_the_ledger_lists_every_claim(tmp_path):
    experiment = schema.load("fig7")
    outcomes, rng = {}, random.Random(0)
    while new := [
        run for run in plan([experiment], "micro", OUT, outcomes, ["depo-micro"]) if run.name not in outcomes
    ]:
        outcomes |= {run.name: outcome(0.98 if "canon" in run.config.arch else rng.random() / 50) for run in new}
    assert len(grid.points(experiment, "micro", ["depo-micro"])) == 5
    states = {verdict.claim: verdict.state for verdict in judge(experiment, "micro", outcomes)}
    assert states["C06"] == "supported"
    assert states["C10"] == "supported in part"  # "not lower by 5 points" is open
    assert states["C11"] == "untested"
    entries = claims(tmp_path)
    assert [entry.id for entry in entries] == list(listed())
    assert all(entry.state == "untested" for entry in entries if "replicate" in entry.reason)
    assert sum("replicate" in entry.reason for entry in entries) > 40


@pytest.mark.parametrize(
    ("parts", "claim"),
    [
        (["supported", "supported"], "supported"),
        (["supported", "undecided"], "supported in part"),
        (["contradicted", "supported"], "supported in part"),
        (["undecided", "contradicted"], "contradicted"),
        (["undecided", "undecided"], "undecided"),
        (["supported", "untested"], "untested"),
        (["supported in part", "contradicted"], "supported in part"),
    ],
)
def test_a_claim_of_several_parts(parts, claim):
    assert combined(parts) == claim


TEXT = """
title: Mine
source: a test
micro:
  - {settings: [text-micro], arms: [llama, llama+canon]}
claims:
  C45:
    at: {micro: {setting: text-micro}}
    measure: loss_beyond
    pairs: [{arm: llama+canon, against: llama, expect: lower, smallest: 0.05}]
    paper: none
  C51:
    at: {micro: {setting: text-micro}}
    pairs: &pairs [{arm: llama+canon, against: llama, expect: lower, smallest: 0.02}]
    paper: none
  C43:
    at: {micro: {setting: text-micro}}
    pairs: *pairs
    part: true
    paper: none
"""


@pytest.mark.parametrize(
    ("spread", "gain", "states"),
    [
        (0.05, 0.5, {"C45": "contradicted", "C51": "supported", "C43": "supported in part"}),
        (0.005, 0.001, {"C45": "contradicted", "C51": "contradicted", "C43": "contradicted"}),
    ],
)
def test_text_is_judged_by_loss_and_loss_beyond_the_context(tmp_path, spread, gain, states):
    """The loss falls by `gain` and by seed; beyond the trained length both architectures have the same loss."""
    (tmp_path / "mine.yaml").write_text(TEXT)
    experiment, outcomes = of_five(schema.load(str(tmp_path / "mine.yaml"))), {}
    while new := [run for run in plan([experiment], "micro", OUT, outcomes) if run.name not in outcomes]:
        for run in new:
            loss = 2 - gain * ("canon" in run.config.arch) + spread * (run.config.train.seed % 5 - 2)
            measures = {"loss": loss, "loss_beyond": 3 + 0.001 * (run.config.train.seed % 5)}
            outcomes[run.name] = finished(Evaluation(600, {}, loss, measures))
    verdicts = {verdict.claim: verdict for verdict in judge(experiment, "micro", outcomes)}
    assert {claim: verdict.state for claim, verdict in verdicts.items()} == states
    [compared] = verdicts["C51"].compared
    assert compared.result.gap == pytest.approx(-gain)
    assert (compared.unit, compared.factor) == ("nats per token", 1)


@pytest.mark.parametrize(
    ("is_out", "rate", "state", "seeds", "note"),
    [
        (lambda train: train.optim.lr == 3e-3, 1e-3, "supported", 5, ""),
        (lambda train: train.eval_split == "test" and train.seed == 3, 3e-3, "undecided", 4, "2 of its runs failed"),
        (lambda train: True, None, "undecided", 0, "12 of its runs failed or diverged, such as text-llama"),
    ],
)
def test_a_run_without_a_finite_loss_counts_as_diverged(tmp_path, is_out, rate, state, seeds, note):
    """The rate 3e-3 is the best one; at others the loss grows with their distance from it."""
    (tmp_path / "mine.yaml").write_text(TEXT)
    experiment, outcomes = of_five(schema.load(str(tmp_path / "mine.yaml"))), {}
    while new := [run for run in plan([experiment], "micro", OUT, outcomes) if run.name not in outcomes]:
        for run in new:
            loss = 2 - 0.5 * ("canon" in run.config.arch) + abs(run.config.train.optim.lr - 3e-3)
            measures = {} if is_out(run.config.train) else {"loss": loss, "loss_beyond": 3.0}
            outcomes[run.name] = finished(Evaluation(600, {}, None, measures))
    verdict = next(each for each in judge(experiment, "micro", outcomes) if each.claim == "C51")
    assert (verdict.state, verdict.seeds, verdict.compared[0].rates) == (state, seeds, (rate, rate))
    assert verdict.note.startswith(note)
    assert bool(verdict.note) == bool(note)


def test_outcomes_of_text_have_losses_as_measures(tmp_path):
    sets = {"web": {"loss": 1.5, "bits_per_byte": 2.1, "tokens": 100}}
    rows = [{"kind": "eval", "step": step, "loss": 2 - step / 4, "sets": sets, "measures": {"loss_beyond": 2.5}}
            for step in (1, 2)]  # fmt: skip
    (tmp_path / "config.yaml").write_text(
        "{arch: llama, text: {sources: {web: {path: x}}}, train: {seed: 0, optim: {lr: 1}}}"
    )
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "result.json").write_text(json.dumps({"steps": 2, "final": rows[1]}))
    of_web = {"loss (web)": 1.5, "bits per byte (web)": 2.1}
    measures = {"loss": 1.5, "loss_beyond": 2.5} | of_web
    run = read_finished(tmp_path)
    assert run.final == Evaluation(2, {}, 1.5, measures, sets={"web": 100})
    assert run.final.of_sets == of_web.keys()


HOPS = """
title: Mine
source: a test
micro:
  - {settings: [depo-micro-hops], arms: [llama]}
claims:
  C09:
    at: {micro: {setting: depo-micro-hops, slices: [k=2]}}
    pairs: [{arm: llama@largest, against: llama, expect: lower, smallest: 0.1}]
    paper: none
"""


def test_variants_of_a_training_are_compared(tmp_path):
    (tmp_path / "mine.yaml").write_text(HOPS)
    experiment, outcomes = of_five(schema.load(str(tmp_path / "mine.yaml"))), {}
    while new := [run for run in plan([experiment], "micro", OUT, outcomes) if run.name not in outcomes]:
        for run in new:  # one hop is not part of the claim
            right = 200 if run.config.task["train_k"] == 2 else 900
            slices = {"k=1": Count(1000 - right, 1000), "k=2": Count(right + run.config.train.seed % 5, 1000)}
            outcomes[run.name] = finished(Evaluation(600, slices, 1.0))
    assert {run.config.task["train_k"] for run in plan([experiment], "micro", OUT, outcomes)} == {None, 2}
    [verdict] = judge(experiment, "micro", outcomes)
    assert (verdict.state, verdict.seeds) == ("supported", 5)
    assert verdict.compared[0].result.gap == pytest.approx(-0.7)
    everything = {run.name for run in grid.first_look_runs(schema.load("hops"), "micro", ["depo-micro-hops"])}
    point = grid.Point("depo-micro", "llama+canon", None, None)
    assert {run.name for run in grid.tuning_runs(schema.load("fig7"), point)} < everything  # shared


SIZES = """
title: Mine
source: a test
micro:
  - {settings: [capo-micro-bits], arms: [llama, llama+canon], sizes: [1L32D, 2L64D]}
claims:
  C27:
    at: {micro: {setting: capo-micro-bits, sizes: [1L32D, 2L64D]}}
    relative: true
    pairs: [{arm: llama+canon, against: llama, expect: higher, smallest: 0.05}]
    paper: none
"""


@pytest.mark.parametrize(
    ("measure", "unit"),
    [("bits_per_parameter", "% of the bits per parameter"), ("bits_per_person", "% of the bits_per_person")],
)
def test_a_frontier_is_the_best_size_of_each_seed(tmp_path, measure, unit):
    """Llama: 2.0 bits or 1.5; with Canon 1.0, or 2.2 at the larger size. One seed is better at the other."""
    (tmp_path / "mine.yaml").write_text(SIZES.replace("relative:", f"measure: {measure}\n    relative:"))
    experiment, outcomes = of_five(schema.load(str(tmp_path / "mine.yaml"))), {}
    bits = {("llama", 32): 2.0, ("llama", 64): 1.5, ("llama+canon", 32): 1.0, ("llama+canon", 64): 2.2}

    def measured(run):
        arch, width, seed = run.config.arch, run.config.model.hidden_size, run.config.train.seed
        return 2.5 if (arch, width, seed) == ("llama", 64, 3) else bits[arch, width]

    while new := [run for run in plan([experiment], "micro", OUT, outcomes) if run.name not in outcomes]:
        for run in new:
            measures = dict.fromkeys(["bits_per_parameter", "bits_per_person"], measured(run))
            outcomes[run.name] = finished(Evaluation(9, {}, 1.0, measures))
    [verdict] = judge(experiment, "micro", outcomes)
    assert verdict.done == len(verdict.runs) == 2 * 2 * (3 * 2 + 5)
    [compared] = verdict.compared
    assert compared.result.gap == pytest.approx((2.2 - 2.1) / 2.1)
    assert (compared.unit, compared.factor, len(compared.rates)) == (unit, 100, 4)
    assert verdict.state == "undecided"
    unfinished = {name: each for name, each in outcomes.items() if "seed4" not in name}
    assert judge(experiment, "micro", unfinished)[0].seeds == 4


def test_the_rate_with_more_bits_is_chosen(tmp_path):
    (tmp_path / "mine.yaml").write_text(SIZES)
    experiment = of_five(schema.load(str(tmp_path / "mine.yaml")))
    point = grid.Point("capo-micro-bits", "llama", None, "1L32D")
    outcomes = {
        run.name: finished(Evaluation(9, {}, 1.0, {"bits_per_parameter": run.config.train.optim.lr}))
        for run in grid.tuning_runs(experiment, point)
    }
    assert grid.tuned(experiment, point, outcomes) == 4e-3
