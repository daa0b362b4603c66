"""`canonlm probe`, on a run of a few steps."""

import json
import shutil

import pytest
import yaml

from canonlm.cli import main


@pytest.fixture(scope="module")
def trained(tiny, tmp_path_factory):
    """A run on sentences, and one on another task."""
    top = tmp_path_factory.mktemp("trained")
    train = {"steps": 2, "eval_every": 2, "checkpoint_every": 2}
    raw = tiny.raw(arch="llama+canon=A", data={"seq_len": 128, "loss_on": "all"}, train=train)
    for name, task in (("run", {"name": "lano", "grammar": "small"}), ("other", {"name": "copying", "N": 4})):
        (top / "run.yaml").write_text(yaml.safe_dump({**raw, "task": task}))
        assert main(["train", str(top / "run.yaml"), "--out", str(top / name)]) == 0
    return top


@pytest.fixture(autouse=True)
def _workdir(trained, tmp_path, capsys):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    capsys.readouterr()


def test_a_table_and_a_file(tmp_path, capsys):
    assert main(["probe", str(tmp_path / "run"), "--fit", "12", "--test", "6", "--layer", "1"]) == 0
    output = capsys.readouterr()
    assert output.err == ""
    assert output.out.startswith("llama+canon=A, layer 1: ")
    rows = json.loads((tmp_path / "run" / "probe.json").read_text())
    assert (rows["layer"], rows["fit"], rows["test"]) == (1, 12, 6)
    assert [level["level"] for level in rows["levels"]] == [1, 2, 3]
    for level in rows["levels"]:
        assert f"{level['symbol_at_end']:.1%}" in output.out


def test_a_result_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "run" / "probe.json").mkdir()
    assert main(["probe", str(tmp_path / "run"), "--fit", "4", "--test", "4"]) == 2
    assert capsys.readouterr().err == (
        f'canonlm: RUN: expected a folder that can be written (Is a directory), got "{tmp_path / "run"}"\n'
    )


def test_mistakes(tmp_path, monkeypatch, assert_refused):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unsaved").mkdir()
    (tmp_path / "unsaved" / "config.yaml").write_text((tmp_path / "run" / "config.yaml").read_text())
    (tmp_path / "foreign").mkdir()
    config = (tmp_path / "run" / "config.yaml").read_text()
    (tmp_path / "foreign" / "config.yaml").write_text(config.replace("arch: llama+canon=A", "arch: net.py:Net"))
    for arguments, line in (
        (["nowhere"], "RUN: expected a run folder (with a config.yaml), got"),
        (["other"], 'RUN: expected a run of lano, the task whose sentences have a parse tree, got "copying"'),
        (["unsaved"], "RUN: expected a run that has saved a checkpoint, got"),
        (["foreign"], "net.py:Net: expected --trust-remote-code"),
        (["run", "--layer", "2"], "--layer: expected 0 to 1, or -1 for the last, got 2"),
    ):
        assert_refused(["probe", *arguments, "--fit", "4", "--test", "4"], line)
    assert main(["probe", "run", "--layer", "-2", "--fit", "4", "--test", "4"]) == 0
