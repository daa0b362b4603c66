"""Runs that start from a saved model: its loss at the first step, resuming, what is new, frozen or scaled, mistakes."""

import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import canonlm
from canonlm.cli import main
from canonlm.data.prepare import prepare
from canonlm.models.published import save_published
from canonlm.train import data
from canonlm.train.build import build_model
from canonlm.train.checkpoint import load_model
from canonlm.train.load_config import Recipe
from canonlm.train.loop import train
from canonlm.train.weights import Weights, completed

SHORT = {"steps": 6, "checkpoint_every": 2, "eval_every": 6, "log_every": 1, "optim": {"warmup_steps": 2}}
SIZES = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
QWEN = {**SIZES, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "tie_word_embeddings": True}


@pytest.fixture
def start_from(tiny, tmp_path):
    """`start_from(folder, "train.steps=9")`: the configuration of `canonlm train run.yaml model.weights=folder …`."""
    path = tiny.yaml(tmp_path / "run.yaml", train=SHORT)
    return lambda folder, *more: Recipe(path, [f"model.weights={folder}", *more], complete=completed).run


def first_loss(tiny, run, folder):
    train(run, folder)
    return next(row["loss"] for row in tiny.rows(folder) if row["kind"] == "train")


def saved_qwen(tiny, folder, vocab_size=None, seed=0):
    torch.manual_seed(seed)
    vocab_size = vocab_size or len(tiny().built_task.vocab)
    Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab_size, **QWEN)).save_pretrained(folder)


def test_an_identity_start_has_the_loss_of_the_host_and_resumes_bit_for_bit(tiny, tmp_path, start_from):
    saved_qwen(tiny, tmp_path / "host")
    canonized = canonlm.canonize(AutoModelForCausalLM.from_pretrained(tmp_path / "host"), "ABCD")
    canonized.save_pretrained(tmp_path / "canonized")
    run = start_from(tmp_path / "canonized")
    assert run.arch == "hf:qwen3+canon=ABCD:zero"
    loss = first_loss(tiny, run, tmp_path / "whole")
    assert loss == first_loss(tiny, start_from(tmp_path / "host"), tmp_path / "of-host")
    assert loss == first_loss(tiny, start_from(tmp_path / "host", "arch=+canon=ABCD:zero"), tmp_path / "added")
    assert tiny.rows(tmp_path / "whole") == tiny.rows(tmp_path / "added") != tiny.rows(tmp_path / "of-host")

    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    (tmp_path / "canonized").rename(tmp_path / "moved")
    for step in (4, 2):
        tiny.back_to(tmp_path / "cut", step)
        train(start_from(tmp_path / "moved"), tmp_path / "cut")
    tiny.same(tmp_path / "cut", tmp_path / "whole")


SOURCES = {
    "run": lambda run, folder: shutil.copytree(run, folder, dirs_exist_ok=True),
    "export": lambda run, folder: load_model(run).module.save_pretrained(folder),
    "release": lambda run, folder: save_published(load_model(run).module, folder, "hf"),
}


@pytest.mark.parametrize("kind", SOURCES)
def test_the_first_loss_is_that_of_the_saved_model(tiny, tmp_path, start_from, kind):
    """The saved model was trained; the other loss is that of a forward over the first windows."""
    first = tiny(arch="llama+canon=ACD", train=SHORT)
    train(first, tmp_path / "first")
    (folder := tmp_path / "saved").mkdir()
    SOURCES[kind](tmp_path / "first", folder)
    run = start_from(folder)
    assert run.arch == first.arch
    assert run.model.weights_sha256
    model = load_model(tmp_path / "first")
    batch = data.stream(run).rows(0, run.train.batch_size)
    targets = (batch.targets != -100).sum().item()
    expected = model.loss(batch.input_ids, batch.targets, batch.documents, targets).total.item()
    assert first_loss(tiny, run, tmp_path / "further") == pytest.approx(expected, rel=1e-5)
    assert first_loss(tiny, first, tmp_path / "random") != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("same", [True, False])
def test_another_tokenizer_is_reported(tiny, tmp_path, same):
    """It may be on purpose, but the saved embeddings are then of other tokens."""
    (tmp_path / "texts.jsonl").write_text('{"text": "a text"}\n' * 100)
    prepare(tmp_path / "text", [str(tmp_path / "texts.jsonl")], tokenizer="bytes", workers=1)
    saved_qwen(tiny, tmp_path / "host", 300)
    tokenizer = Tokenizer.from_file(str(tmp_path / "text" / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    if not same:
        vocabulary |= {"a": vocabulary["b"], "b": vocabulary["a"]}
        tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.add_tokens(["<pad>"])  # exports have more tokens
    tokenizer.save(str(tmp_path / "host" / "tokenizer.json"))
    text = {"sources": {"all": {"path": str(tmp_path / "text")}}}
    path = tiny.yaml(tmp_path / "text.yaml", task=None, text=text, data={"loss_on": "all"}, train=SHORT)
    run = Recipe(path, [f"model.weights={tmp_path / 'host'}", "train.steps=2"], complete=completed).run
    rows = []
    train(run, tmp_path / "run", rows.append)
    notes = [row["why"] for row in rows if row["kind"] == "note" and "tokenizer" in row["why"]]
    why = (
        f"2 of 258 tokens of {tmp_path / 'text'} are others in {tmp_path / 'host'}: model.weights has another tokenizer"
    )
    assert notes == ([] if same else [why])


def test_only_canon_layers_train_at_a_rate_of_their_own(tiny, tmp_path, start_from):
    saved_qwen(tiny, tmp_path / "host")
    more = ["arch=+canon=AC", "train.steps=1", "train.eval_every=1", "train.optim.weight_decay=0.0",
            "train.optim.eps=1e-12", "train.optim.warmup_steps=0", "train.optim.grad_clip=null"]  # fmt: skip
    frozen = ['train.freeze=["*", "!*canon*"]']
    moved = {}
    for name, changes in {"usual": [], "fast": ['train.optim.lr_scale={"*canon*": 10}'], "frozen": frozen}.items():
        run = start_from(tmp_path / "host", *more, *changes)
        model = build_model(run)
        Weights(run, model).write(before := model.module.state_dict())
        train(run, tmp_path / name)
        after = load_model(tmp_path / name).module.state_dict()
        moved[name] = {key: after[key] - before[key] for key in before}
    for key in moved["usual"]:
        assert moved["usual"][key].any(), key
        factor = 10 if "canon" in key else 1
        torch.testing.assert_close(moved["fast"][key], factor * moved["usual"][key], rtol=1e-3, atol=1e-6)
        assert moved["frozen"][key].any() == ("canon" in key), key


@pytest.mark.parametrize("rows", [-3, 5])
def test_tokens_that_the_saved_model_lacks_have_their_initial_values(tiny, tmp_path, start_from, rows):
    known = len(tiny().built_task.vocab)
    saved_qwen(tiny, tmp_path / "host", known + rows)
    run = start_from(tmp_path / "host", "arch=+canon=A")
    model = build_model(run)
    initial = {name: x.clone() for name, x in model.module.state_dict().items()}
    Weights(run, model).write(model.module.state_dict(keep_vars=True))
    host = AutoModelForCausalLM.from_pretrained(tmp_path / "host").state_dict()
    for name, tensor in model.module.state_dict().items():
        old = host.get(name, tensor[:0])[: len(tensor)]
        assert torch.equal(tensor[: len(old)], old), name
        assert torch.equal(tensor[len(old) :], initial[name][len(old) :]), name
    assert {name for name in initial if "canon" in name} == initial.keys() - host.keys()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["model.hidden_size=32"], "model.hidden_size: expected no value, as model.weights has its own"),
        (["arch=llama"], "arch: expected no value, as model.weights has its own, or +canon=SITES"),
        (["train.freeze=[canon]"], "train.freeze: expected a pattern that matches a parameter, such as *canon*"),
        (["train.freeze=['*']"], "train.freeze: expected patterns that leave a parameter to train"),
        (["train.optim.lr_scale={canon: 2.0}"], "train.optim.lr_scale: expected a pattern that matches"),
        (["model.weights=nowhere"], 'model.weights: expected a folder with a saved model, got "nowhere"'),
        (["model.fields.num_key_value_heads=2"], "of another shape: model.layers.0.self_attn.k_proj.weight"),
        (["model.fields.tie_word_embeddings=false"], None),
    ],
)
def test_mistakes(tiny, tmp_path, capsys, more, message):
    saved_qwen(tiny, tmp_path / "host")
    path = tiny.yaml(tmp_path / "run.yaml", train=SHORT)
    capsys.readouterr()
    code = main(["train", str(path), f"model.weights={tmp_path / 'host'}", *more, "--out", str(tmp_path / "run")])
    assert (code, message is None) in {(2, False), (0, True)}
    lines = capsys.readouterr().err.splitlines()
    assert message is None or (len(lines) == 1 and message in lines[0]), lines


def test_other_weights_are_another_run(tiny, tmp_path, start_from):
    saved_qwen(tiny, tmp_path / "host")
    run = start_from(tmp_path / "host")
    train(run, tmp_path / "run")
    saved_qwen(tiny, tmp_path / "host", seed=1)
    with pytest.raises(ValueError, match=r"model\.weights_sha256"):
        train(start_from(tmp_path / "host"), tmp_path / "run")
    with pytest.raises(ValueError, match="expected the weights from which this run began"):
        Weights(run, build_model(run, "meta"))
    with pytest.raises(ValueError, match=r"start from weights by `canonlm train RECIPE model\.weights=FOLDER`"):
        tiny(model={"weights": "host"})
    assert main(["play", "copying", "--arch", "./host", "--out", str(tmp_path / "play")]) == 2
