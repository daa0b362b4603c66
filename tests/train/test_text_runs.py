"""Runs on text: the windows that are read, their losses, and the message of each mistake."""

import json
import math
import os
import shutil
import time
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from canonlm.cli import main
from canonlm.data.prepare import prepare
from canonlm.runs.load import load_run
from canonlm.train import data, loop
from canonlm.train.build import build_model
from canonlm.train.checkpoint import load_model
from canonlm.train.config import resolve
from canonlm.train.load_config import create_folder, merge
from canonlm.train.loop import train

SEQ_LEN, BATCH = 16, 4


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """Two folders of documents, with words of digits and with words of letters."""
    folder = tmp_path_factory.mktemp("text")
    for name, letters in (("digits", "0123456789"), ("letters", "abcdefgh")):
        draw = np.random.default_rng(7)
        documents = ["".join(draw.choice(list(letters), draw.integers(5, 60))) for _ in range(120)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
        prepare(folder / name, [str(folder / f"{name}.jsonl")], tokenizer="bytes", validation=0.2, workers=1)
    return folder


@pytest.fixture
def settings(text, tiny):
    """`settings(train={"steps": 2})`: a run with three windows of letters for every window of digits."""

    def make(folder=text, **changes):
        sources = {name: {"path": str(folder / name), "weight": w} for name, w in (("digits", 1.0), ("letters", 3.0))}
        train = {"steps": 20, "log_every": 1, "eval_every": 10, "checkpoint_every": 5}
        data = {"seq_len": SEQ_LEN, "loss_on": "all"}
        return resolve(merge(tiny.raw(task=None, text={"sources": sources}, data=data, train=train), changes))

    return make


def rows(folder, kind="train"):
    result = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in result if row["kind"] == kind]


def tokens_of(folder, split):
    """The tokens of a split, read from the files without our code, and the bytes of its text per token."""
    index = json.loads((folder / "index.json").read_text())
    shards = index["splits"][split]
    tokens = np.concatenate([np.fromfile(folder / shard["name"], index["dtype"]) for shard in shards]).astype(np.int64)
    return torch.from_numpy(tokens), sum(shard["bytes"] for shard in shards) / len(tokens)


def windows_of(text, run, first, last):
    """The tokens of windows."""
    for window in range(first, last + 1):
        source, _, position = data.stream(run).describe(window)
        yield tokens_of(text / source, "train")[0][position * SEQ_LEN :][: SEQ_LEN + 1]


def test_the_first_loss_is_that_of_the_windows_it_names(text, settings, tmp_path):
    run = data.complete(settings())
    train(run, tmp_path)
    row = rows(tmp_path)[0]
    assert row["windows"] == [0, BATCH - 1]
    model = build_model(run).module.train()
    losses = []
    for tokens in windows_of(text, run, *row["windows"]):
        logits = model(tokens[None, :-1], use_cache=False).logits[0]
        losses.append(cross_entropy(logits, tokens[1:]).item())  # all 16 targets, the last one too
    assert row["loss"] == pytest.approx(np.mean(losses), rel=1e-6)


def test_the_mix_is_as_weighted(settings):
    stream = data.stream(data.complete(settings()))
    assert abs([stream.describe(window).source for window in range(400)].count("letters") - 300) <= 1


def test_validation_is_the_held_out_part(text, settings, tmp_path):
    result = train(settings(), tmp_path)
    model, total, tokens_seen, sets = load_model(tmp_path).module.eval(), 0.0, 0, {}
    for name in ("digits", "letters"):
        tokens, bytes_per_token = tokens_of(text / name, "valid")
        windows = [tokens[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1] for i in range(8)]
        nats = [cross_entropy(model(w[None, :-1]).logits[0], w[1:], reduction="sum").item() for w in windows]
        sets[name] = sum(nats) / (8 * SEQ_LEN) / bytes_per_token / math.log(2)
        total, tokens_seen = total + sum(nats), tokens_seen + 8 * SEQ_LEN
    final = result["final"]
    assert final["loss"] == pytest.approx(total / tokens_seen, rel=1e-5)
    assert {name: s["bits_per_byte"] for name, s in final["sets"].items()} == pytest.approx(sets, rel=1e-5)


def test_isolated_documents_see_nothing_of_each_other(text, settings, tmp_path):
    run = settings(data={"isolate_documents": True}, train={"steps": 2})
    train(run, tmp_path / "isolated")
    train(settings(train={"steps": 2}), tmp_path / "crossing")
    alone, together = (rows(tmp_path / name)[0]["loss"] for name in ("isolated", "crossing"))
    model, losses = build_model(data.complete(run)).module.train(), []
    for tokens in windows_of(text, data.complete(run), 0, BATCH - 1):
        starts = [0, *(i for i in range(1, SEQ_LEN) if tokens[i] == 256), SEQ_LEN]  # <bos>
        for start, stop in pairwise(starts):
            inputs, targets = tokens[start:stop], tokens[start + 1 : stop + 1]
            keep = targets != 256
            logits = model(inputs[None], use_cache=False).logits[0]
            losses += cross_entropy(logits[keep], targets[keep], reduction="none").tolist()
    assert alone == pytest.approx(np.mean(losses), rel=1e-5)
    assert alone != together


def test_execution_settings_may_change_and_micro_batches_are_one_batch(tiny, settings, tmp_path):
    train(settings(train={"keep_checkpoints": 4}), tmp_path)
    assert tiny.checkpoints(tmp_path) == [f"step-{step:08d}" for step in (5, 10, 15, 20)]
    losses = [row["loss"] for row in rows(tmp_path)]
    for micro in (1, 2):
        tiny.back_to(tmp_path, 5)
        run = settings(train={"keep_checkpoints": 4}, parallel={"micro_batch_size": micro}, profile="8:9")
        assert train(run, tmp_path)["steps"] == 20
        assert [row["loss"] for row in rows(tmp_path)] == pytest.approx(losses, rel=1e-5)
        assert f"micro_batch_size: {micro}" in (tmp_path / "config.yaml").read_text()


def test_moved_text_is_recognised_by_its_sha256(text, tiny, settings, tmp_path, capsys):
    def reading(folder):
        return settings(folder, text={"validation": {"held out": str(folder / "digits")}})

    run = tmp_path / "run"
    train(reading(text), tmp_path / "undisturbed")
    shutil.copytree(text, tmp_path / "here")
    train(reading(tmp_path / "here"), run)
    tiny.back_to(run, 15)
    (tmp_path / "here").rename(tmp_path / "there")
    train(reading(tmp_path / "there"), run)
    tiny.same(run, tmp_path / "undisturbed")
    assert str(tmp_path / "there") in (run / "config.yaml").read_text()
    for noted in json.loads((run / "data.json").read_text()).values():
        assert noted["folder"].startswith(str(tmp_path / "there"))

    tiny.back_to(run, 15)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    (tmp_path / "there" / "digits").rename(tmp_path / "there" / "numbers")
    shutil.copytree(tmp_path / "there" / "letters", tmp_path / "there" / "digits")
    (tmp_path / "run.yaml").write_text(reading(tmp_path / "there").to_yaml())
    for command in (["train"], ["launch", "--local", "2"], ["launch", "--slurm", "tasks=2", "time=5"]):
        assert main([command[0], str(tmp_path / "run.yaml"), *command[1:], "--out", str(run)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"canonlm: text.sources.digits.path: expected the text that the run in {run} began ")
        assert error.count("\n") == 1
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_a_step_that_is_not_finite_is_skipped_and_reported(settings, tmp_path, monkeypatch):
    clip, calls = loop.clip_grad_norm, []

    def poisoned(model, *args):
        calls.append(0)
        if len(calls) == 4:
            for parameter in model.parameters():
                parameter.grad.fill_(math.nan)
        return clip(model, *args)

    monkeypatch.setattr(loop, "clip_grad_norm", poisoned)
    train(settings(train={"on_nonfinite": "skip"}), tmp_path / "skip")
    [skip] = rows(tmp_path / "skip", "skip")
    assert (skip["step"], skip["windows"]) == (4, [12, 15])
    assert "letters epoch 0 window " in skip["why"]
    assert [row["step"] for row in rows(tmp_path / "skip")] == [1, 2, 3, *range(5, 21)]
    assert all(p.isfinite().all() for p in load_model(tmp_path / "skip").module.parameters())
    calls.clear()
    with pytest.raises(FloatingPointError, match=r"stopped at step 4, .*windows 12 to 15 \(letters epoch 0"):
        train(settings(), tmp_path / "stop")
    assert [row["step"] for row in rows(tmp_path / "stop")] == [1, 2, 3]


def test_a_command_starts_beside_each_checkpoint(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")  # the command is not part of a process group
    folder = tmp_path / "a run"
    train(settings(on_checkpoint="echo at {step} of {run} ${RANK:-alone}; ls {checkpoint}"), folder)
    logs = folder / "on_checkpoint"
    for _ in range(2000):  # the run does not wait for it
        if all("manifest.json" in path.read_text() for path in logs.iterdir()):
            break
        time.sleep(0.05)
    assert sorted(path.name for path in logs.iterdir()) == [f"step-{step:08d}.txt" for step in (5, 10, 15, 20)]
    assert (logs / "step-00000010.txt").read_text().startswith(f"at 10 of {folder} alone\n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"vocab_size": 300}}, "model.vocab_size: expected 258, the vocabulary size of "),
        ({"text": {"sources": {"x": {"path": "nowhere"}}}}, "text.sources.x.path: nowhere: expected a folder that "),
        ({"text": {"validation": {"x": "nowhere"}}}, "text.validation.x: nowhere: expected a folder that `canonlm "),
        ({"data": {"seq_len": 9999}}, "data.seq_len: expected less than the "),
        (
            {"arch": "hf:gpt2{n_positions=8}"},
            "data.seq_len: expected at most 8, as hf:gpt2{n_positions=8} has learned 8",
        ),
        (
            {"arch": "hf:gpt2", "train": {"eval_beyond": 4}},
            "train.eval_beyond: expected no value, as hf:gpt2 has learned",
        ),
    ],
    ids=["vocabulary", "no folder", "no validation folder", "too little text", "few positions", "none beyond"],
)
def test_mistakes(settings, tmp_path, capsys, changes, message):
    path = tmp_path / "run.yaml"
    path.write_text(settings(**changes).to_yaml())
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"canonlm: {message}")
    assert error.count("\n") == 1
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"train": {"eval_split": "validation", "eval_size": 9999}},
        {"train": {"eval_beyond": 9999}},
        {"arch": "hf:bert"},
    ],
    ids=["held-out windows", "tokens beyond", "not causal"],
)
def test_a_refused_run_may_be_corrected(settings, tmp_path, changes):
    """But not one that a command has planned."""
    with pytest.raises(ValueError):
        train(settings(**changes), tmp_path / "run")
    train(settings(train={"steps": 1}), tmp_path / "run")
    create_folder(tmp_path / "planned", data.complete(settings(**changes)))
    with pytest.raises(ValueError):
        train(settings(**changes), tmp_path / "planned")
    assert (tmp_path / "planned" / "config.yaml").exists()


@pytest.mark.parametrize("seq_len", [1, 2])
def test_windows_without_room_for_two_documents(settings, tmp_path, seq_len):
    train(settings(data={"seq_len": seq_len, "isolate_documents": True}, train={"steps": 1}), tmp_path)


def test_another_tokenizer_is_refused(text, settings, tmp_path):
    prepare(tmp_path / "no-eos", [str(text / "digits.jsonl")], tokenizer="bytes", workers=1)
    index = json.loads((tmp_path / "no-eos" / "index.json").read_text())
    index["tokenizer"]["sha256"] = "0" * 64
    (tmp_path / "no-eos" / "index.json").write_text(json.dumps(index))
    run = settings(text={"validation": {"other": str(tmp_path / "no-eos")}})
    with pytest.raises(ValueError, match=r"text\.validation\.other: expected text made by the same tokenizer as text"):
        data.complete(run)


def test_the_standard_library_is_prepared_as_text(tmp_path, monkeypatch, settings):
    prepared: list[int] = []
    data._stdlib.cache_clear()
    monkeypatch.setattr("canonlm.data.prepare.prepare_stdlib", lambda: prepared.append(0) or (tmp_path, ""))
    with pytest.raises(ValueError, match=r"text\.sources\.letters\.path"):
        data.complete(settings(text={"sources": {"letters": {"path": "python-stdlib"}}}))
    data._stdlib.cache_clear()
    assert prepared == [0]


def test_missing_evaluation_text_is_reported(text, settings, tmp_path):
    prepare(tmp_path / "whole", [str(text / "digits.jsonl")], tokenizer="bytes", workers=1)
    reported = []
    run = settings(text={"sources": {"all": {"path": str(tmp_path / "whole")}}})
    result = train(run, tmp_path / "run", reported.append)
    assert "nothing will be evaluated" in reported[0]["why"]
    assert result["final"] == {}
    assert (load_run(tmp_path / "run").finished, load_run(tmp_path / "run").notes) == (True, ())


@pytest.mark.parametrize("seen", [True, False])
def test_evaluation_on_training_text_is_reported(text, settings, tmp_path, seen):
    for name in ("whole", "other"):
        source = "digits" if name == "whole" else "letters"
        prepare(tmp_path / name, [str(text / f"{source}.jsonl")], tokenizer="bytes", workers=1)
    sources = {"all": {"path": str(tmp_path / "whole")}}
    reported = []
    evaluated = {"whole": str(tmp_path / ("whole" if seen else "other"))}
    run = settings(text={"sources": sources, "validation": evaluated}, train={"steps": 1})
    train(run, tmp_path / "run", reported.append)
    assert [row["why"] for row in reported if row["kind"] == "note" and "text.validation" in row["why"]] == seen * [
        "text.validation.whole has no held-out part (canonlm data prepare --validation), so it is evaluated on windows "
        "that are also trained on"
    ]


def test_each_folder_is_read_once(text, settings, tmp_path, monkeypatch):
    """However often a run uses a folder: its index is opened twice (to parse it, and for its sha256), and the status of
    each file is read twice (for links, and for its size)."""
    calls: Counter[tuple[str, str]] = Counter()
    run = settings(text={"validation": {"digits": str(text / "digits")}}, train={"steps": 1})
    for name, kind in (("open", "open"), ("stat", "stat"), ("lstat", "stat")):
        call = getattr(os, name)

        def count(path, *args, kind=kind, call=call, **kwargs):
            calls[kind, str(path)] += 1
            return call(path, *args, **kwargs)

        monkeypatch.setattr(os, name, count)
    train(run, tmp_path)
    for folder in (text / "digits", text / "letters"):
        assert calls["open", str(folder / "index.json")] == 2
        shards = [path for path in folder.iterdir() if path.name.endswith((".ds", ".ds.index"))]
        assert {calls["stat", str(path)] for path in shards} == {2}


def test_a_text_folder_is_refused_as_a_run_folder(text, settings):
    with pytest.raises(ValueError, match="--out: expected a folder for a run, and not one of prepared text"):
        train(settings(), text / "digits")
    assert not (text / "digits" / "config.yaml").exists()
