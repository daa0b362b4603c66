"""The command's experiment: its runs, those that it shares with registered ones, and its estimate of the time."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from canonlm import cli
from canonlm.cli.profile import TASKS
from canonlm.experiments import grid, ledger, schema
from canonlm.experiments.plan import plan
from canonlm.experiments.profile import ABILITIES, label_of, profile, runs_of, tasks_of
from canonlm.launch.grid import PlannedRun
from canonlm.launch.plan import START_SECONDS, tokens_of
from canonlm.launch.play import Progress, grid_time_left
from canonlm.runs.load import Result, Run
from canonlm.runs.rows import Count, Evaluation
from canonlm.train.build import build_model
from canonlm.train.load_config import create_folder

ARCHS = ["llama", "llama+canon"]


def finished(run, accuracy=0.5):
    """A synthetic outcome of a run on Depo."""
    right = round(1000 * accuracy)
    row = Evaluation(run.config.train.steps, {"k=1": Count(right, 1000), "k=2": Count(right, 1000)}, 1.0)
    train = run.config.train
    return Run(name=run.name, arch=run.config.arch, lr=train.optim.lr, seed=train.seed, steps=row.step, evals=(row,),
               result=Result(row.step, row))  # fmt: skip


def test_runs_are_those_of_the_registered_experiments():
    fig7 = schema.load("fig7")
    registered = {run.name for run in grid.first_look_runs(fig7, "micro", ["depo-micro", "mano-micro"])}
    mine = {run.name for run in runs_of(profile(ARCHS, ["depo", "mano"], seeds=5), {})}
    assert len(mine & registered) == 2 * 2 * (3 * 3 + 5)  # both have more seeds
    assert len(mine) == 2 * (2 * (3 * 3 + 5) + 5)  # five more of the first, against itself


def test_every_size_is_trained_and_shares_no_run_with_another():
    experiment = profile(ARCHS, ["depo"], sizes=["1L64D", "2L128D"], seeds=5)
    planned = runs_of(experiment, {})
    at_preset = {run.name for run in runs_of(profile(ARCHS, ["depo"], seeds=5), {})}
    assert len(planned) == len({run.name for run in planned}) == 2 * len(at_preset)
    assert at_preset < {run.name for run in planned}  # the preset has 2L128D
    assert Counter(grid.size_of(run.config) for run in planned) == dict.fromkeys(["1L64D", "2L128D"], len(at_preset))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (["2L64D", "2L64D"], '--sizes: expected different sizes, got "2L64D"'),
        (["64"], "sizes: expected layers and width"),
    ],
)
def test_invalid_sizes(sizes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        profile(ARCHS, ["depo"], sizes=sizes)


def test_abilities_are_asked_for_by_name_and_share_runs():
    experiment = profile(["llama"], ["tracking", "s3", "length"], seeds=5)
    names = [panel.settings[0] for panel in experiment.micro]
    assert names == [f"{name}-micro" for name in ("s3", "z60", "a5", "longer-words", "more-pairs", "longer-rings")]
    assert [label_of(name) for name in names[-2:]] == ["More pairs", "Longer rings"]
    tuning = 3 * 3
    assert len(runs_of(experiment, {})) == 5 * (tuning + 5)  # longer words are asked for in the runs of s3
    for panel in experiment.micro:
        [point] = grid.points(experiment.model_copy(update={"micro": [panel]}), "micro")
        task = grid.tuning_runs(experiment, point)[0].config.built_task
        [asked] = experiment.settings[panel.settings[0]].slices
        assert asked in [f"{key}={value}" for where in task.slices() for key, value in where.items()]
        scale, _, size = asked.partition("=")
        beyond = int(size) > task.scales[scale].largest(task.spec.model_dump())
        assert beyond == (panel.settings[0] in ("longer-words-micro", "more-pairs-micro", "longer-rings-micro"))


def test_the_paper_asks_for_an_ability_with_one_task():
    assert tasks_of([]) == ["depo", "copying", "brevo", "mano", "lano", "capo"]
    assert {f"{name}-micro" for name in tasks_of([*ABILITIES])} < {*schema.setting_names()}
    listed = [f"{ability} ({', '.join(of_ability)})" for ability, of_ability in ABILITIES.items() if of_ability[1:]]
    assert all(part in TASKS.help for part in listed)
    with pytest.raises(ValueError, match=r'unknown task or ability "traking"\. Did you mean "tracking"\?'):
        tasks_of(["traking"])


def test_five_fresh_seeds_come_at_the_rate_that_tuning_seeds_chose():
    experiment = profile(ARCHS, ["depo"], seeds=5)
    best = {"llama": 3e-3, "llama+canon": 3e-4}
    outcomes = {}
    while new := [run for run in plan([experiment], "micro", Path("out"), outcomes) if run.name not in outcomes]:
        for run in new:
            outcomes[run.name] = finished(run, 0.9 if run.config.train.optim.lr == best[run.config.arch] else 0.1)
    fresh = {
        (run.config.arch, run.config.train.optim.lr, run.config.train.seed)
        for run in runs_of(experiment, outcomes)
        if run.config.train.eval_split == "test"
    }
    again = {("llama", 3e-3, seed) for seed in range(500, 505)}  # against itself
    assert fresh == again | {(arch, rate, seed) for arch, rate in best.items() for seed in range(200, 205)}
    assert {run.name for run in runs_of(experiment, outcomes)} == outcomes.keys()  # nothing is left


def test_more_comparisons_have_more_seeds_by_default():
    """With 18, no result of nine seeds shows that one is faster."""
    archs = [f"llama+canon={sites}" for sites in ("A", "B", "C", "D")]
    looks = [[*each.settings["depo-micro"].looks] for each in (profile(archs[:2]), profile(archs))]
    assert looks == [[8], [10]]


def test_the_fastest_rate_wins_where_runs_end_once_solved(tmp_path, monkeypatch):
    """All rates solve the task, and the middle one after the fewest steps. Exported rows, which do not have the planned
    steps, choose alike."""
    experiment = profile(["llama"], ["depo"], until=0.9)
    [point] = grid.points(experiment, "micro")
    outcomes = {}
    for run in grid.tuning_runs(experiment, point):
        train = run.config.train
        row = Evaluation(300 if train.optim.lr == 1e-3 else 900, {"k=1": Count(95, 100)}, 1.0)
        outcomes[run.name] = Run(name=run.name, arch="llama", lr=train.optim.lr, seed=train.seed, steps=train.steps,
                                 evals=(row,), result=Result(row.step, row))  # fmt: skip
    monkeypatch.setattr(ledger, "read_finished", lambda folder: outcomes.get(folder.name))
    assert ledger.export([experiment], "micro", tmp_path / "out", tmp_path / "rows") == len(outcomes)
    for known in (outcomes, ledger.read(tmp_path / "rows")):
        assert grid.tuned(experiment, point, known) == 1e-3


@pytest.mark.parametrize("until", ["0", "101%", "nine", "90"])
def test_a_share_that_is_none_is_one_line(until, capsys):
    assert cli.main(["profile", "llama", "--tasks", "depo", "--until", until, "--dry-run"]) == 2
    message = capsys.readouterr().err
    assert "--until: expected a share of right answers, such as 90%" in message
    assert message.count("\n") == 1


def test_runs_end_by_the_answers_that_are_scored():
    """A run of `longer-words` must not end with all lengths but the scored one right."""
    experiment = profile(["llama"], list(ABILITIES), until=0.9)
    for setting in experiment.settings.values():
        assert setting.changes["train"]["until_slices"] == setting.slices
    assert experiment.settings["longer-words-micro"].slices == ["n=24"]


def test_no_more_runs_follow_when_every_rate_fails():
    experiment = profile(["llama"], ["depo"])
    outcomes = {run.name: None for run in plan([experiment], "micro", Path("out"), {})}
    assert {run.name for run in runs_of(experiment, outcomes)} == outcomes.keys()


def test_quick_means_one_rate_one_seed_and_a_third_of_the_steps():
    full, quick = ({run.config.task["name"]: run for run in runs_of(profile(["llama"], quick=q), {})} for q in (0, 1))
    assert full.keys() == quick.keys() == {"depo", "copying", "brevo", "mano", "lano", "capo"}
    assert len(runs_of(profile(["llama"], quick=True), {})) == 6
    for task, run in quick.items():
        first_seed = schema.setting(f"{task}-micro").first_seed
        assert (run.config.train.seed, run.config.train.eval_split) == (first_seed, "test")
        assert run.config.train.steps == pytest.approx(full[task].config.train.steps / 3, rel=0.02)
    assert quick["depo"].config.train.optim.lr == 1e-3
    assert quick["capo"].config.task["exposures"] == 33  # its steps follow from the exposures


def test_parameters_are_matched_to_the_first():
    plain, wide = ["llama", "llama+canon"], ["llama+canon", "llama"]
    sizes = {}
    for archs in (plain, wide):
        for match in (None, "parameters"):
            runs = runs_of(profile(archs, ["depo"], match=match), {})
            models = {run.config.arch: build_model(run.config, "meta").num_parameters for run in runs}
            sizes[archs[0], match] = [models[arch] for arch in archs]
    for first in ARCHS:
        (unmatched, other), (target, fitted) = sizes[first, None], sizes[first, "parameters"]
        assert target == unmatched
        assert abs(fitted - target) <= 0.01 * target < abs(other - target)


def test_a_changed_file_of_a_block_is_another_run(tmp_path):
    source = "from canonlm.models.mixers.attention import Attention\nclass Wave(Attention):\n    pass\n"
    path, names = tmp_path / "mine.py", []
    for text in (source, source + "# again\n", source):
        path.write_text(text)
        [run] = runs_of(profile([f"{path}:Wave"], ["copying"], quick=True), {})
        create_folder(tmp_path / run.name, run.config)  # the two runs do not share a folder
        names.append(run.name)
    assert names[0] == names[2] != names[1]


def test_time_left_follows_from_timed_steps_and_then_from_finished_runs(tmp_path):
    runs = runs_of(profile(ARCHS, ["depo"], quick=True, seeds=2), {})
    grid = [Progress(PlannedRun(run.name, tmp_path / run.name, run.config)) for run in runs]
    tokens, steps = tokens_of(runs[0].config), runs[0].config.train.steps

    def left(grid):
        return grid_time_left(grid, 2, lambda config: {"llama": 90, "llama+canon": 190}[config.arch] / tokens)

    assert START_SECONDS == 10
    assert left(grid) == pytest.approx((100 + 100 + 200 + 200) / 2)
    grid[0].state, grid[0].step = "running", steps // 2
    assert left(grid) == pytest.approx((90 * (1 - steps // 2 / steps) + 100 + 200 + 200) / 2)
    grid[0].state, grid[0].seconds = "finished", 150.0  # 1.5 times the estimate
    assert left(grid) == pytest.approx(1.5 * (100 + 200 + 200) / 2)
    assert left([grid[0], grid[3]]) == pytest.approx(1.5 * 200)  # one job is idle


SETTINGS = """
copying-micro:
  task: copying
  preset: tiny
  changes: {model: {hidden_size: 16}, train: {steps: 20, eval_every: 10, eval_size: 32}}
  rates: [3.0e-3, 1.0e-2]
  looks: {5: 0.05}
"""


@pytest.mark.slow
def test_a_profile_from_nothing_to_its_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(schema, "SETTINGS", tmp_path / "settings.yaml")
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    command = ["profile", "llama,llama+canon", "--only", "copying", "--out", str(tmp_path / "out"), "--seeds", "1"]
    assert cli.main([*command, "--dry-run"]) == 0
    assert "0 of 15 runs, about" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    total = first.count("finished")
    assert total == len(list((tmp_path / "out" / "runs").iterdir())) >= 15  # 15, and rates beyond an edge
    counts = re.findall(r"\((\d+) of \d+ runs", first)  # runs that end together are counted together
    assert (len(counts), counts[-1]) == (total, str(total))
    assert counts == sorted(counts, key=int)
    assert "One seed proves nothing" in first
    page = (tmp_path / "out" / "profile.html").read_text()
    assert f"{total} of {total} runs done" in page
    for run in (tmp_path / "out" / "runs").iterdir():
        assert "profile-micro" in json.loads((run / "experiment.json").read_text())["experiments"]
    assert cli.main(command) == 0  # again: nothing is left to do
    again = capsys.readouterr().out.splitlines()
    assert again[0] == f"{total} of {total} runs"
    assert again[1:] == first.splitlines()[-len(again) + 1 :]
