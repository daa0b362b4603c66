"""`canonlm new`: each file runs with the printed commands, and no file is overwritten."""

import shlex
from pathlib import Path

import pytest

from canonlm.cli import main
from canonlm.cli.new import KINDS, TEMPLATES
from canonlm.experiments import schema
from canonlm.train.loop import train

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {"task": "add-a-task.md", "mixer": "add-a-mixer.md", "experiment": "replicate.md"}
SHORT = ["train.steps=2", "train.eval_every=2", "train.eval_size=8", "train.batch_size=2"]


@pytest.fixture
def commands(tmp_path, monkeypatch, capsys):
    """`commands(kind, name)`: the commands that `canonlm new` prints, run in a temporary folder."""
    monkeypatch.chdir(tmp_path)

    def written(kind, name):
        assert main(["new", kind, name]) == 0
        first, *lines = capsys.readouterr().out.splitlines()
        assert first.startswith(name)
        assert "docs/" not in first  # an installed package has none
        return [shlex.split(line)[1:] for line in lines]

    return written


@pytest.fixture
def trained(monkeypatch):
    """The runs of `canonlm play`, trained in this process."""
    results = {}

    def follow(runs, *_):
        results.update({run.config.arch: train(run.config, run.folder) for run in runs})
        return []

    monkeypatch.setattr("canonlm.cli.live.follow_grid", follow)
    monkeypatch.setattr("canonlm.cli.report.show", lambda folder: None)
    return results


def test_a_task_is_shown_and_played(commands, trained, capsys):
    show, play = commands("task", "a b.py")
    assert main(show) == 0
    assert "→ even" in capsys.readouterr().out
    assert main([*play, *SHORT, "model.hidden_size=16"]) == 0
    assert [result["steps"] for result in trained.values()] == [2, 2]


def test_a_mixer_is_checked_and_played(commands, trained, capsys):
    check, play = commands("mixer", "mine.py")
    assert main([*check, "--cases", "packed documents,pieces"]) == 0
    assert "no wrong answer" in capsys.readouterr().out
    assert main([*play, *SHORT, "model.hidden_size=16", "model.num_hidden_layers=1"]) == 0
    assert [*trained] == ["llama", "mine.py:Fading"]


def test_a_dry_run_of_an_experiment(commands, tmp_path, capsys):
    dry_run, _ = commands("experiment", "mine.yaml")
    assert main(dry_run) == 0
    assert "mine" in capsys.readouterr().out
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_an_experiment_ends_with_a_verdict(commands, tmp_path, monkeypatch, capsys):
    _, replicate = commands("experiment", "mine.yaml")
    setting = (
        "{task: copying, preset: tiny, changes: {train: {steps: 4, eval_size: 8}}, looks: {2: 0.05}, rates: [0.01]}"
    )
    (tmp_path / "settings.yaml").write_text(f"copying-micro: {setting}")
    monkeypatch.setattr(schema, "SETTINGS", tmp_path / "settings.yaml")
    assert main(replicate) == 0
    out = capsys.readouterr().out
    assert "\nCanon  undecided\n" in out
    assert "Evidence: mine, micro scale; 2 seeds each; 6 runs" in out


@pytest.mark.parametrize("kind", KINDS)
def test_the_docs_show_the_file(kind):
    template = KINDS[kind]
    page = (DOCS / PAGES[kind]).read_text(encoding="utf-8")
    assert (TEMPLATES / template.file).read_text(encoding="utf-8") in page
    assert f"`canonlm new {kind} mine.{'yaml' if kind == 'experiment' else 'py'}`" in page


def test_a_mixer_has_a_name_that_arch_reads(tmp_path, monkeypatch, assert_refused):
    monkeypatch.chdir(tmp_path)
    assert_refused(["new", "mixer", "my+mixer.py"], "FILE: expected a path without , + {")
    assert main(["new", "task", "my+task.py"]) == 0
