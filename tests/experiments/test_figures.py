"""The experiments of the package against the paper's printed grids, and the form of their files."""

import csv
import gzip
import re
from importlib.resources import files

import pytest
import yaml

from canonlm.experiments import grid, replicate, schema, verdicts
from canonlm.experiments.claims import listed
from canonlm.models.build import complete_name
from canonlm.models.names import resolve
from canonlm.train.build import build_model, sizes_of

PAPER_NAMES = yaml.safe_load((schema.HERE / "paper_names.yaml").read_text(encoding="utf-8"))
OURS = {tuple(paper): name for name, paper in PAPER_NAMES.items()}


def printed():
    packed = (files("canonlm.experiments.published") / "grids.csv.gz").read_bytes()
    lines = gzip.decompress(packed).decode().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


GRIDS = printed()
FIGURES = sorted({f"F{part}" for row in GRIDS for part in row["figure"][1:].split("+")})


def cell(row):
    what = "kl" if row["metric"] == "kl" else f"k={row['k']}" if row["k"] else "from=start" * (row["task"] == "Lano")
    return row["task"], OURS[row["arch"], row["variant"]], row["difficulty"], row["size"], what


def run_of(row):
    return row["task"].removesuffix("KL"), row["arch"], row["variant"], row["difficulty"], row["size"]


def shown_in(figure):
    return [row for row in GRIDS if figure[1:] in row["figure"][1:].split("+")]


def trainings(rows):
    """The number of runs behind the paper's numbers: four rates, and two seeds for Mano."""
    return sum(4 * (2 if task == "Mano" else 1) for task, *_ in {run_of(row) for row in rows})


EXPERIMENTS = {name: schema.load(name) for name in schema.names()}


@pytest.mark.every(3)
@pytest.mark.parametrize("figure", FIGURES)
def test_a_figure_has_the_cells_and_the_runs_that_the_paper_prints(figure):
    [experiment] = [each for each in EXPERIMENTS.values() if each.figure == figure]
    assert grid.cells(experiment) == {cell(row) for row in shown_in(figure)}
    runs = {run.name for run in grid.first_look_runs(experiment, "paper", shared=False)}
    assert len(runs) == trainings(shown_in(figure))


@pytest.mark.slow
def test_all_figures_together_are_the_papers_grids():
    of_grids = [each for each in EXPERIMENTS.values() if each.figure]
    assert len(set().union(*map(grid.cells, of_grids))) == len({cell(row) for row in GRIDS}) == len(GRIDS) == 2913
    runs = {run.name for each in of_grids for run in grid.first_look_runs(each, "paper")}  # including shared ones
    assert len(runs) == trainings(GRIDS) == 9492


@pytest.mark.slow
def test_the_points_of_one_claim():
    """They are exactly those that its verdict uses, and the panels of its experiment train them all."""
    for experiment in EXPERIMENTS.values():
        for number, claim in experiment.claims.items():
            for scale in claim.at:
                chosen = grid.points(experiment, scale, [number])
                [verdict] = [each for each in verdicts.judge(experiment, scale, {}) if each.claim == number]
                runs = {run.name for point in chosen for run in grid.tuning_runs(experiment, point)}
                assert runs == set(verdict.runs)
    [without, silu] = grid.points(EXPERIMENTS["text"], "micro", ["C25"])
    assert (without.arch, silu.arch, silu.setting) == ("llama+canon", "llama+canon:silu", "text-micro-again")


def test_every_claim_is_tested_or_says_why_not():
    tested = [number for each in EXPERIMENTS.values() for number in each.claims]
    assert list(listed()) == [f"C{number:02}" for number in range(1, len(listed()) + 1)]
    for number, claim in listed().items():
        ways = [claim.reason, claim.counted, claim.tables, *[number] * tested.count(number)]
        assert len(list(filter(None, ways))) == 1, number
        for enough in claim.enough:
            [experiment] = [each for each in EXPERIMENTS.values() if number in each.claims]
            assert enough.arm in experiment.claims[number].arms
    assert set(tested) <= listed().keys()


@pytest.mark.slow
def test_names_of_architectures_are_complete():
    """Otherwise a run's identity would differ from the planned one. And all fit the number of heads."""
    points = {
        (point.setting, point.arch, point.size): (experiment, point)  # at every difficulty it has the same model
        for experiment in EXPERIMENTS.values()
        for scale in experiment.scales
        for point in grid.points(experiment, scale)
    }
    done, kinds = set(), set()
    for experiment, point in points.values():
        config = grid.fresh_run(experiment, point, 1e-3, 0).config
        width, heads = config.model.hidden_size, config.model.num_attention_heads
        if (point.arch, width, heads) not in kinds:
            kinds.add((point.arch, width, heads))
            resolve(point.arch, hidden_size=width, num_heads=heads, head_dim=width // heads)
        if point.arch not in done:
            done.add(point.arch)
            assert complete_name(point.arch, sizes_of(config)) == (point.arch, config.model.fields)
    assert len(done) > 40


@pytest.mark.parametrize("scale", ["micro", "small"])
def test_states_of_three_sizes_at_equal_parameters(scale):
    """The size of a state is head_dim x state_size for each head."""
    experiment = EXPERIMENTS["hops"]
    arms = {arm for pair in experiment.claims["C41"].pairs for arm in pair.arms}
    counted = {}
    for point in grid.points(experiment, scale):
        if point.arch in arms:
            model = build_model(grid.fresh_run(experiment, point, 1e-3, 0).config, "meta")
            o = model.module.config.mixer_options["mamba2"]
            state = o["num_heads"] * o["head_dim"] * o["state_size"]
            counted[state / model.module.config.hidden_size] = model.num_parameters
    assert sorted(counted) == [32, 64, 128]
    assert len(set(counted.values())) == 1


def test_figures_share_runs():
    names = [{run.name for run in grid.first_look_runs(EXPERIMENTS[name], "micro")} for name in ("fig7", "fig10")]
    point = grid.Point("depo-micro", "llama+canon", None, None)
    assert {run.name for run in grid.tuning_runs(EXPERIMENTS["fig7"], point)} <= names[0] & names[1]


MINE = """
title: Mine
source: a test
micro:
  - {settings: [depo-micro], arms: [llama, llama+canon]}
claims:
  C06:
    at: {micro: {setting: depo-micro}}
    pairs: [{arm: llama+canon, against: llama, expect: higher, smallest: 0.1}]
    paper: none
"""


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("settings: [depo-micro]", "setings: [depo-micro]", 'unknown setting "micro.0.setings". Did you mean'),
        (
            "settings: [depo-micro]",
            "settings: [depo-mirco]",
            'unknown setting "depo-mirco". Did you mean "depo-micro"?',
        ),
        ("against: llama,", "against: lama,", 'unknown arm of depo-micro at micro scale "lama". Did you mean "llama"?'),
        ("expect: higher", "expect: hihger", "claims.C06.pairs.0.expect: expected"),
        ("against: llama, expect: higher", "expect: alike", "claims.C06.pairs.0.against: missing"),
        (
            "arm: llama+canon,",
            "arm: llama+canon@largest,",
            'unknown arm of depo-micro at micro scale "llama+canon@largest"',
        ),
        ("at: {micro: {setting: depo-micro}}", "at: {micro: {setting: depo}}", 'claims.C06.at.micro.setting "depo"'),
        ("smallest: 0.1", "smallest: 0", "claims.C06.pairs.0.smallest: expected a number > 0, got 0"),
        ("llama+canon]}", "llama+canon], sizes: [big]}", "expected layers and width, such as 8L512D"),
        ("llama+canon]}", "llama+canon], sizes: [0L64D]}", "expected layers and width, such as 8L512D"),
        (
            "setting: depo-micro}}",
            "setting: depo-micro, difficulty: hard}}",
            'claims.C06.at.micro.difficulty: expected none, as its runs have none, got "hard"',
        ),
        ("llama+canon]}", "llama+canon], sizes: [2L64D]}", "claims.C06.at.micro.size: expected 2L64D, got None"),
        ("smallest: 0.1", "smallest: 5", "claims.C06.pairs.0.smallest: expected a difference of accuracies < 1 (0.05"),
        (
            "    pairs: [{arm: llama+canon, against: llama, expect: higher, smallest: 0.1}]",
            "    pairs: [" + ", ".join(["{arm: llama+canon, against: llama, expect: higher, smallest: 0.1}"] * 7) + "]",
            "claims.C06.pairs: expected at most 6, got [",
        ),
        ("arm: llama+canon,", "arm: llama,", 'claims.C06.pairs.0.against: expected another arm, got "llama"'),
        ("at: {micro:", "at: {small:", 'claims.C06.at: expected scales with runs (micro), got "small"'),
        ("paper: none", "relative: true\n    paper: none", "claims.C06.relative: expected a measure: ratios of accura"),
        ("paper: none", "steps_to: 0.5\n    paper: none", "claims.C06.pairs.0.smallest: expected a ratio of steps > 1"),
        (
            "paper: none",
            "steps_to: 0.5\n    relative: true\n    paper: none",
            "claims.C06.steps_to: expected no measure",
        ),
        (
            MINE.strip().partition("micro:")[2],
            MINE.strip()
            .partition("micro:")[2]
            .replace("depo-micro", "brevo-micro")
            .replace("0.1}]", "2}]\n    steps_to: 0.5"),
            'claims.C06.at.micro.setting: expected 6 fresh seeds for speeds, got "brevo-micro"',
        ),
    ],
)
def test_a_mistake_is_one_line(tmp_path, before, after, message):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE.replace(before, after, 1))
    with pytest.raises(ValueError) as caught:
        schema.load(str(path))
    assert message in str(caught.value)
    assert str(caught.value).startswith("mine.yaml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("paper: none", "slices: [k=3]\n    paper: none", 'unknown claims.C06.slices "k=3"'),
        ("paper: none", "measure: los\n    paper: none", 'unknown claims.C06.measure "los"'),
        ("smallest: 0.1}]", "smallest: 2}]\n    steps_to: 0.5", "claims.C06.steps_to: expected a task with accuracies"),
    ],
)
def test_a_score_that_the_task_does_not_have_is_found_before_training(tmp_path, before, after, message):
    path = tmp_path / "mine.yaml"
    path.write_text(
        MINE.replace(before, after).replace("depo-micro", "text-micro" if "steps" in after else "depo-micro")
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        replicate.chosen(str(path), "micro")


def test_an_unknown_experiment_is_one_line():
    with pytest.raises(
        ValueError, match=r'unknown experiment "fig77"\. Did you mean "fig7"\? Experiments: all, capacity'
    ):
        schema.load("fig77")


def test_a_changed_file_is_another_experiment(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(MINE)
    first = schema.load(str(path)).sha256
    assert schema.load(str(path)).sha256 == first
    path.write_text(MINE.replace("0.1", "0.05"))
    assert schema.load(str(path)).sha256 != first
