"""`canonlm export`: transformers loads the trained model; one line about the result, or a one-line error."""

import json
import math
import re
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from saved_runs import OF_TEXT, logits_of, save_run
from scipy import stats
from transformers import AutoModelForCausalLM, AutoTokenizer

from canonlm import CanonLMForCausalLM
from canonlm.cli import main
from canonlm.core.files import Stamp, check_manifest, write_json, write_text
from canonlm.data.tokenizers import load
from canonlm.models import saved_model
from canonlm.models.build import build
from canonlm.models.interface import SMALL
from canonlm.train.checkpoint import load_model


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


@pytest.mark.parametrize("more", [[], ["--self-contained"]])
def test_what_is_shared_with_the_model(trained, workdir, more):
    """A card that the Hub reads, whose code runs, and which its owner may edit; padding; the length of texts. If it is
    self-contained: its code (which needs no canonlm: tests/models/test_self_contained.py)."""
    assert main(["export", "run", "out", *more]) == 0
    if more:
        file, name = json.loads(Path("out", "config.json").read_text())["auto_map"]["AutoConfig"].split(".")
        assert f"class {name}(" in Path("out", f"{file}.py").read_text()
        assert "Apache License" in Path("out", "LICENSE").read_text()
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained("out")), trained[1][2])
    card = ModelCard.load(workdir / "out" / "README.md")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert str(trained[0]) not in card.content
    [code] = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    # Without it, transformers asks whether to run the folder's code, for the tokenizer, too.
    assert code.count("trust_remote_code=True") == (2 if more else 0)
    exec(code, names := {})
    tokenizer, model = names["tokenizer"], names["model"]
    batch = tokenizer(["a", "abcd"], return_tensors="pt", padding=True, padding_side="left")
    assert batch.input_ids[0].tolist() == [257, 257, 257, 256, 97]
    assert model.generate(**batch, max_new_tokens=2).shape == (2, 7)
    assert tokenizer.model_max_length == model.config.max_position_embeddings
    (workdir / "out" / "README.md").write_text("edited")
    check_manifest(workdir / "out")


def test_bf16(trained, workdir, capsys):
    assert main(["export", "run", "half", "--dtype", "bf16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained("half", dtype="auto")
    assert model.dtype == torch.bfloat16
    full = load_model(trained[0]).module.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, full[name].bfloat16())


MISTAKES = [
    (["run", "run"], 'OUT: expected a folder that does not exist yet, got "run"'),
    (["run", "file"], 'OUT: expected a folder that does not exist yet, got "file"'),
    (["run", "file/below"], "OUT: expected a folder that can be written (Not a directory)"),
    (["run", "out", "--dtype", "fp8"], 'unknown dtype "fp8".'),
    (["none", "out"], 'RUN: expected the folder of a run that has saved a checkpoint, got "none"'),
    (["run"], "OUT is missing: `canonlm export --help` explains it"),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_one_line_and_nothing_written(workdir, assert_refused, arguments, start):
    (workdir / "file").write_text("mine")
    assert_refused(["export", *arguments], start)


def test_a_write_that_fails_leaves_nothing(workdir, assert_refused, monkeypatch):
    def fill_the_disk(self, folder, **_):
        (folder / "half").write_text("half a file")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CanonLMForCausalLM, "save_pretrained", fill_the_disk)
    assert_refused(["export", "run", "out"], "OUT: expected a folder that can be written (No space left on device)")


NET = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, vocab_size):
        super().__init__(nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size))
    def forward(self, input_ids):
        return super().forward(input_ids)
"""


def test_a_program_in_a_file_is_not_in_the_folder(tmp_path, monkeypatch, assert_refused):
    """The card of a mixer from a file says to open the run, and so does opening that folder, or one of a module."""
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mixer", "mine.py"]) == 0
    write_text(tmp_path / "net.py", NET)
    text = {"sources": {"plain": {"path": str(tmp_path)}}}
    save_run(tmp_path / "run", {**OF_TEXT, "arch": "mine.py:Fading", "text": text})
    assert main(["export", "run", "mixer", "--trust-remote-code"]) == 0
    assert "canonlm generate RUN --trust-remote-code" in (tmp_path / "mixer" / "README.md").read_text()
    build("net.py:Net", SMALL).module.save_pretrained(tmp_path / "net")
    monkeypatch.setattr(saved_model, "MIXERS", {})  # as in a new process
    for folder, reference in {"mixer": "mine.py:Fading", "net": "net.py:Net"}.items():
        start = f"{folder}: the folder does not have {reference}, a program in a file: open the run in place of it"
        for command in (["check", folder], ["generate", folder, "a"]):
            assert_refused(command, start)


def test_the_card_has_intervals_over_documents(trained, tmp_path, monkeypatch):
    """The card of the evaluated step has them; scipy computes the interval again from the answers."""
    shutil.copytree(trained[0], tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    texts = ["A short text.", "Another one, which is longer.", "x" * 40]
    write_text(tmp_path / "held-out.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert main(["eval", "run", "--suite", "text", "held-out.jsonl"]) == 0
    assert main(["export", "run", "out"]) == main(["export", "run", "first", "--step", "1"]) == 0

    [file] = (tmp_path / "run" / "evals" / "step-00000002" / "answers").glob("*.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    bits = [row["nats"] / math.log(2) / row["bytes"] for row in rows]
    low, high = stats.t.interval(0.95, len(bits) - 1, statistics.mean(bits), stats.sem(bits))
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (
        f"| `text-held-out, bits_per_byte` | {statistics.mean(bits):.3g} | {low:.3g}–{high:.3g} | 3 documents |"
        in card.text
    )
    assert {"bits_per_byte", "perplexity"} <= {each.metric_type for each in card.data.eval_results}
    assert "bits_per_byte" not in (tmp_path / "first" / "README.md").read_text()
