"""`canonlm export`: transformers loads the trained model; one line about the result, or a one-line error."""

import json

import pytest
import torch
from saved_runs import OF_TEXT, logits_of, save_run
from transformers import AutoModelForCausalLM, AutoTokenizer

from canonlm import CanonLMForCausalLM
from canonlm.cli import main
from canonlm.core.files import Stamp, write_json, write_text
from canonlm.data.tokenizers import load


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on text, and the logits of its model at steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "plain").mkdir()
    (folder / "text").mkdir()
    load("bytes").tokenizer.save(str(folder / "text" / "tokenizer.json"))
    sources = {name: {"path": str(folder / name)} for name in ("plain", "text")}
    logits = save_run(folder, {**OF_TEXT, "text": {"sources": sources}})
    write_text(folder / "text" / "index.json", "{}")
    sums = {"plain": "", "text": Stamp.of(folder / "text" / "index.json").sha256}
    result = {f"text.sources.{name}.path": {"folder": str(folder / name), "sha256": sums[name]} for name in sums}
    write_json(folder / "data.json", result)
    return folder, logits


@pytest.fixture
def workdir(trained, tmp_path, monkeypatch):
    """A working directory with the run in it."""
    (tmp_path / "run").symlink_to(trained[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_model_that_was_trained(trained, workdir, capsys):
    assert main(["export", "run", "out/last"]) == 0
    assert main(["export", "run", "first", "--step", "1"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[2] for line in output] == [
        "parameters, float32, tokenizer: out/last",
        "parameters, float32, tokenizer: first",
    ]
    assert {path.name for path in workdir.iterdir()} == {"run", "out", "first"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (workdir / "first").iterdir()
    }
    tokenizer = AutoTokenizer.from_pretrained(workdir / "first")
    assert tokenizer("ab").input_ids == [256, 97, 98]  # as every training text began
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257)
    assert {path.stat().st_mode for path in (workdir / "first").iterdir()} == {
        (workdir / "first" / "config.json").stat().st_mode
    }
    for folder, step in (("out/last", 2), ("first", 1)):
        assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(folder)), trained[1][step])


def test_bf16(trained, workdir, capsys):
    assert main(["export", "run", "half", "--dtype", "bf16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained("half", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert main(["export", "run", "whole"]) == 0
    full = AutoModelForCausalLM.from_pretrained("whole").state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, full[name].bfloat16())


def test_self_contained(trained, workdir):
    """It brings its code; that it needs no canonlm: tests/models/test_self_contained.py."""
    assert main(["export", "run", "out", "--self-contained"]) == 0
    code, _, name = json.loads((workdir / "out" / "config.json").read_text())["auto_map"]["AutoConfig"].partition(".")
    assert f"class {name}(" in (workdir / "out" / f"{code}.py").read_text()
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained("out")), trained[1][2])


MISTAKES = [
    (["run", "run"], 'OUT: expected a folder that does not exist yet, got "run"'),
    (["run", "file"], 'OUT: expected a folder that does not exist yet, got "file"'),
    (["run", "file/below"], "OUT: expected a folder that can be written (Not a directory)"),
    (["run", "out", "--dtype", "fp8"], 'unknown dtype "fp8".'),
    (["run", "out", "--step", "3"], "--step: expected a step that has a checkpoint (1, 2), got 3"),
    (["none", "out"], 'RUN: expected the folder of a run that has saved a checkpoint, got "none"'),
    (["run/plain", "out"], "RUN: expected the folder of a run that has saved a checkpoint"),
    (["run"], "OUT is missing: `canonlm export --help` explains it"),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_one_line_and_nothing_written(workdir, capsys, arguments, start):
    (workdir / "file").write_text("mine")
    assert main(["export", *arguments]) == 2
    output = capsys.readouterr()
    assert output.err.startswith("canonlm: " + start)
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert {path.name for path in workdir.iterdir()} == {"run", "file"}


def test_a_write_that_fails_leaves_nothing(workdir, monkeypatch, capsys):
    def fill_the_disk(self, folder, **_):
        (folder / "half").write_text("half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CanonLMForCausalLM, "save_pretrained", fill_the_disk)
    assert main(["export", "run", "out"]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert {path.name for path in workdir.iterdir()} == {"run"}
