"""An untrusted recipe or run folder runs no program without --trust; programs that the user typed run."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from abuse.bases import ONE_STEP

import canonlm.experiments.replicate  # noqa: F401  # now, as libraries may warn when they are imported
from canonlm.cli import main
from canonlm.launch.slurm import parse, training
from canonlm.train.config import resolve

EVIL = """\
open("ran", "w")
from canonlm.models.mixers.base import Mixer
class Block(Mixer):
    pass
"""
MODULE = """\
import torch
open("ran", "w")
class Net(torch.nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embed, self.head = torch.nn.Embedding(vocab_size, hidden_size), torch.nn.Linear(hidden_size, vocab_size)
    def forward(self, input_ids):
        return self.head(self.embed(input_ids))
"""
PROGRAMS = {
    "on_checkpoint": ONE_STEP + "on_checkpoint: touch ran\n",
    "arch: evil.py:Block": ONE_STEP.replace("llama", "stranger/evil.py:Block"),
    "arch: os:system": ONE_STEP.replace("arch: llama", "arch: 'os:system{command=touch ran}'"),
    "task.name": ONE_STEP.replace("copying, N: 8, min_items: 2", "stranger/evil.py:Parity"),
}


@pytest.fixture(autouse=True)
def stranger(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CANONLM_RECIPES", str(tmp_path / "own"))
    folder = tmp_path / "stranger"
    folder.mkdir()
    (folder / "evil.py").write_text(EVIL)
    return folder


def refused(capsys, arguments):
    assert main([str(x) for x in arguments]) == 2, arguments
    error = capsys.readouterr().err
    assert error.startswith("canonlm: ")
    assert error.count("\n") == 1
    assert not Path("ran").exists(), arguments
    return error


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_foreign_recipe_is_shown_and_not_run(name, stranger, capsys):
    (stranger / "run.yaml").write_text(PROGRAMS[name])
    for command in (["train"], ["launch", "--local", "2"], ["launch", "--slurm", "time=5", "tasks=1", "--dry-run"]):
        error = refused(capsys, [command[0], stranger / "run.yaml", *command[1:]])
        assert "expected --trust, as this recipe is a program" in error
        assert name.partition(":")[0] in error
        assert str(stranger / "run.yaml") in error
    if name != "on_checkpoint":  # these commands do not run it
        for command in (["plan"], ["recipes", "show"], ["recipes", "diff", "debug"]):
            assert "--trust" in refused(capsys, [*command, stranger / "run.yaml"])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != "on_checkpoint"])
def test_a_foreign_run_folder_is_opened_without_its_programs(name, stranger, capsys):
    (stranger / "config.yaml").write_text(PROGRAMS[name])
    (stranger / "checkpoints" / "step-00000001").mkdir(parents=True)
    # The run folder claims that it started with this file, which is where its reference points.
    sha256 = subprocess.run(["sha256sum", stranger / "evil.py"], capture_output=True, text=True).stdout.split()[0]
    references = {f"stranger/evil.py:{thing}": sha256 for thing in ("Block", "Parity")}
    (stranger / "code.json").write_text(json.dumps({"outside": references}))
    for command in (["export", stranger, "out"], ["eval", stranger, "--suite", "playground"], ["probe", stranger],
                    ["generate", stranger, "a"]):  # fmt: skip
        error = refused(capsys, command)
        assert "as it is a program named in a file" in error or (command[0] == "export" and "manifest.json" in error)
    Path("mine.yaml").write_text(ONE_STEP)
    assert "as it is a program" in refused(capsys, ["train", "mine.yaml", "--out", stranger])


def test_resuming_a_foreign_play_folder_runs_no_program(stranger, capsys):
    run = stranger / "runs" / "copying-llama-steps1-lr0.001-seed0"  # the name of this play's run
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(PROGRAMS["arch: evil.py:Block"])
    command = ["play", "copying", "--out", stranger, "--arch", "llama", "--lr", "1e-3", "train.steps=1"]
    assert "stranger/evil.py:Block: expected --trust, as it is a program" in refused(capsys, command)


def test_typed_or_trusted_programs_run(stranger):
    Path("net.py").write_text(MODULE)
    Path("mine.yaml").write_text(ONE_STEP)
    assert main(["train", "mine.yaml", "--out", "typed", "arch=net.py:Net", "on_checkpoint=touch typed/ran"]) == 0
    assert Path("ran").exists()
    (stranger / "run.yaml").write_text(ONE_STEP.replace("llama", "net.py:Net") + "on_checkpoint: touch trusted/ran\n")
    assert main(["train", str(stranger / "run.yaml"), "--out", "trusted", "--trust"]) == 0
    own = Path("own")
    own.mkdir()
    (own / "of-mine.yaml").write_text(ONE_STEP.replace("llama", "net.py:Net") + "on_checkpoint: touch own-run/ran\n")
    assert main(["train", "of-mine", "--out", "own-run"]) == 0, "by its name, without --trust"
    for folder in ("typed", "trusted", "own-run"):
        log = Path(folder) / "on_checkpoint" / "step-00000001.txt"
        _wait(lambda log=log: "exit code 0" in log.read_text())
        assert (Path(folder) / "ran").exists()
    assert main(["export", "typed", "exported"]) == 2
    assert main(["export", "typed", "exported", "--trust-remote-code"]) == 0


def test_a_link_into_your_folder_is_not_trusted(stranger, capsys):
    Path("own").mkdir()
    (stranger / "run.yaml").write_text(PROGRAMS["on_checkpoint"])
    assert "--trust" in refused(capsys, ["train", "own/../stranger/run.yaml"])


def test_the_parent_of_a_link_is_not_your_folder(stranger, capsys):
    """As text, `d/../../own/base.yaml` is the user's own file; but `d` leads to a folder of the stranger."""
    Path("own").mkdir()
    Path("own/base.yaml").write_text(ONE_STEP)
    deep = stranger / "a" / "b"
    deep.mkdir(parents=True)
    Path("own").rename("moved")
    Path("own").symlink_to("moved")  # the user's own folder may be a link
    (stranger / "d").symlink_to("a/b")
    for place in ("own", "moved"):
        (stranger / place).mkdir()
        for name, program in PROGRAMS.items():
            (stranger / place / "base.yaml").write_text(program)
            (stranger / "run.yaml").write_text(f"base: d/../../{place}/base.yaml\n")
            (stranger / "config.yaml").write_text((stranger / "run.yaml").read_text())
            for command, *more in (["train"], ["plan"], ["launch", "--local", "1"], ["work"], ["work", "--dry-run"]):
                if (command, name) != ("plan", "on_checkpoint"):
                    where = stranger if command == "work" else stranger / "run.yaml"
                    assert "--trust" in refused(capsys, [command, where, *more])


EXPERIMENT = """\
title: x
source: x
match: llama
micro: [{settings: [copying-micro], arms: [llama, llama+canon]}]
claims:
  C:
    at: {micro: {setting: copying-micro}}
    paper: x
    pairs: [{arm: llama+canon, against: llama, expect: higher, smallest: 1}]
"""


FOREIGN_ARMS = [
    ("[llama, llama+canon]", "[llama, llama+canon, 'stranger/evil.py:Block']"),
    ("[llama, llama+canon]", "['os:system+canon', llama, llama+canon]"),
    ("[llama, llama+canon]", "[llama, llama+canon, 'this:s']"),
    ("match: llama", "match: 'stranger/evil.py:Block'"),
]


@pytest.mark.parametrize("change", FOREIGN_ARMS)
def test_a_foreign_experiment_runs_no_program(change, stranger, capsys):
    assert change[0] in EXPERIMENT
    (stranger / "mine.yaml").write_text(EXPERIMENT.replace(*change))
    for more in ([], ["--dry-run"], ["--slurm", "time=5", "--dry-run"]):
        error = refused(capsys, ["replicate", stranger / "mine.yaml", *more])
        assert "mine.yaml: arms: expected --trust, as this experiment is a program" in error
    assert "this" not in sys.modules


def test_foreign_tasks_of_the_harness_are_programs(stranger, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(stranger.parent))
    (stranger / "x.yaml").write_text("task: x\ndoc_to_text: !function evil.f\n")
    for more in (["--tasks", "x", f"include={stranger}"], ["--tasks", f"~/{stranger.name}/x.yaml"]):
        assert "--trust, as its task files run Python" in refused(capsys, ["eval", "none", "--suite", "harness", *more])


def test_a_trusted_base_does_not_make_the_recipe_trusted(stranger, capsys):
    Path("own").mkdir()
    Path("own/base.yaml").write_text(PROGRAMS["on_checkpoint"])
    (stranger / "run.yaml").write_text("base: ../own/base.yaml\narch: os:system\n")
    error = refused(capsys, ["train", stranger / "run.yaml"])
    assert 'arch is "os:system"' in error
    assert "on_checkpoint" not in error


@pytest.mark.parametrize("base", ["/etc/passwd", "../../../../../../etc/passwd", "../../../../../../../dev/zero"])
def test_a_base_above_the_folder(base, stranger, capsys):
    (stranger / "run.yaml").write_text(f"base: {base}\narch: llama\n")
    assert "root:" not in refused(capsys, ["train", stranger / "run.yaml"])
    (stranger / "run.yaml").write_text("base: secret.txt\n")
    (stranger / "secret.txt").write_text("password hunter2\n")
    assert "hunter2" not in refused(capsys, ["train", stranger / "run.yaml"])


NASTY = "r; touch ran; {step} {checkpoint} '\"$(touch ran)`touch ran` é"


def test_values_in_the_command_stay_single_words(tmp_path):
    """A folder name with a placeholder, quotes and commands stays one word."""
    Path("mine.yaml").write_text(ONE_STEP)
    command = (
        f'{sys.executable} -c \'import json, os, sys; print(json.dumps([sys.argv[1:], os.environ["CANONLM_RUN"], '
        'os.environ["CANONLM_CHECKPOINT"], os.environ["CANONLM_STEP"]]))\' {run} {checkpoint} {step} {other}'
    )
    overrides = yaml.safe_dump(command, width=10**6).strip()
    assert main(["train", "mine.yaml", "--out", NASTY, f"on_checkpoint={overrides}"]) == 0
    log = Path(NASTY) / "on_checkpoint" / "step-00000001.txt"
    _wait(lambda: "exit code" in log.read_text())
    checkpoint = str(Path(NASTY) / "checkpoints" / "step-00000001")
    words, *variables = json.loads(log.read_text().splitlines()[0])
    assert words == [NASTY, checkpoint, "1", "{other}"]
    assert variables == [NASTY, checkpoint, "1"]
    assert not Path("ran").exists()


@pytest.mark.parametrize("value", ["x\n#SBATCH --uid=0", "a\rb", "\x1b[2J", "a\u2028b", "a\0b"])
def test_slurm_options_are_one_line(value):
    with pytest.raises(ValueError, match="expected a text without line ends"):
        parse(["tasks=1", "time=5", f"comment={value}"])
    run = resolve(yaml.safe_load(ONE_STEP))
    with pytest.raises(ValueError, match="--out: expected a text without line ends"):
        _ = training(run, Path(f"run{value}"), parse(["tasks=1", "time=5"]), main).script


def _wait(done, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if done():
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError("it did not come to an end")
