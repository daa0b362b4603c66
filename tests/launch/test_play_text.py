"""Grids of runs on text: the plan of `canonlm play text`, and its final answers about birth years."""

import json

import pytest

from canonlm.data.prepare import prepare
from canonlm.launch.grid import plan
from canonlm.launch.recipes import load_preset
from canonlm.suites.birth_years import ask
from canonlm.train.loop import train

SMALL = [
    "data.seq_len=192", "model.hidden_size=16", "model.num_hidden_layers=1", "train.steps=2", "train.batch_size=2",
    "train.eval_every=2", "train.eval_size=2", "train.checkpoint_every=2", "train.optim.warmup_steps=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    lines = [json.dumps({"text": f"Sentence {i} of a small text. " * 20}) for i in range(60)]
    (folder / "raw.jsonl").write_text("\n".join(lines))
    prepare(folder / "stories", [str(folder / "raw.jsonl")], tokenizer="bytes", validation=0.2, workers=1)
    return folder / "stories"


def test_a_grid_on_custom_text(text, tmp_path):
    runs = plan(load_preset("text", "tiny"), tmp_path, archs=["llama", "llama+canon"], seeds=2,
                overrides=[*SMALL, f"data={text}"])  # fmt: skip
    assert [(run.config.arch, run.config.train.seed) for run in runs] == [
        ("llama", 0), ("llama", 1), ("llama+canon", 0), ("llama+canon", 1)]  # fmt: skip
    for run in runs:
        assert run.task is None
        assert {name: source.path for name, source in run.config.text.sources.items()} == {"stories": str(text)}
        assert run.config.model.vocab_size == 258  # bytes, bos and eos
    assert len({run.name for run in runs}) == 4


def test_text_without_a_held_out_part_is_refused(text, tmp_path):
    prepare(tmp_path / "whole", [str(text.parent / "raw.jsonl")], tokenizer="bytes", workers=1)
    with pytest.raises(ValueError, match=rf"^data: expected text with a held-out part .*, got .*{tmp_path}/whole"):
        plan(load_preset("text", "tiny"), tmp_path, archs=["llama"], overrides=[*SMALL, f"data={tmp_path}/whole"])


@pytest.mark.slow
def test_a_trained_model_is_asked_for_birth_years(text, tmp_path):
    overrides = [*SMALL, f"data={text}"]
    [run] = plan(load_preset("text", "tiny"), tmp_path, archs=["llama"], seeds=1, overrides=overrides)
    train(run.config, run.folder)
    ask(run.folder, run.config)
    results = run.folder / "evals" / "step-00000002" / "results.json"
    before = results.read_text()
    [entry] = json.loads(before)["results"]
    assert (entry["name"], entry["scores"][0]["n"], entry["settings"]["people"]) == ("1hop-0k", 200, 2)
    ask(run.folder, run.config)
    assert results.read_text() == before, "nothing is asked twice"
