"""`open_model`: a model from any source computes the same as there; a one-line error if there is none."""

import json
import re
import shutil
from copy import deepcopy

import huggingface_hub
import pytest
import torch
import transformers
from saved_runs import OF_COPYING, OF_TEXT, SIZES, logits_of, save_run
from tokenizers.normalizers import Lowercase
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import main
from canonlm.core.files import Stamp, write_json
from canonlm.data.tokenizers import load
from canonlm.models.build import wrap
from canonlm.models.config import OF_EXPERTS
from canonlm.models.published import save_published
from canonlm.suites.load_model import as_in_training, checksum, fingerprint, open_model
from canonlm.train.checkpoint import path_of


def note_text(run, folder):
    """Write the files in which a run on the text in `folder` records it."""
    write_json(folder / "index.json", {})
    sha256 = Stamp.of(folder / "index.json").sha256
    write_json(run / "data.json", {"text.sources.plain.path": {"folder": str(folder), "sha256": sha256}})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Models of every kind in one folder, and the expected logits of each."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "text").mkdir()
    load("bytes").tokenizer.save(str(folder / "text" / "tokenizer.json"))
    text = {"sources": {"plain": {"path": str(folder / "text")}}}
    steps = save_run(folder / "run", {**OF_TEXT, "text": text})
    expected = {f"run@{step}": result for step, result in steps.items()}
    expected["run"] = expected["run@2"]  # the newest step
    note_text(folder / "run", folder / "text")
    expected["played"] = save_run(folder / "played", {**OF_COPYING, "arch": "gla5+canon"}, (5,))[5]
    assert main(["export", str(folder / "run"), str(folder / "exported")]) == 0
    expected["exported"] = expected["run@2"]

    ours = CanonLMForCausalLM(CanonLMConfig(**SIZES, canon_set="ABCD", qk_norm=True)).eval()
    ours.save_pretrained(folder / "ours")
    ours.save_pretrained(folder / "self-contained", self_contained=True)
    (folder / "sharded").mkdir()
    ours.save_pretrained(folder / "sharded", max_shard_size="5KB")
    expected |= dict.fromkeys(("ours", "self-contained", "sharded"), logits_of(ours))
    plain = CanonLMForCausalLM(CanonLMConfig(**SIZES, canon_set="ABCD")).eval()
    for to in ("hf", "lingua"):
        (folder / to / "Llama-tiny").mkdir(parents=True)
        save_published(plain, folder / to / "Llama-tiny", to)
        expected[f"{to}/Llama-tiny"] = expected[to] = logits_of(plain)
    gdn = CanonLMForCausalLM(CanonLMConfig(**SIZES, mixers=["gdn"], canon_set="AbCD")).eval()
    (folder / "hf" / "GDN2-tiny").mkdir()
    save_published(gdn, folder / "hf" / "GDN2-tiny", "hf")
    expected["hf/GDN2-tiny"] = expected["hf@GDN2-tiny"] = logits_of(gdn)
    expected["hf@Llama-tiny"] = expected.pop("hf")

    for name, model in {
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32, max_position_embeddings=77)),
        "gpt2": GPT2LMHeadModel(GPT2Config(vocab_size=300, n_embd=16, n_layer=2, n_head=2, n_positions=33)),
    }.items():
        model.save_pretrained(folder / name)
        expected[name] = logits_of(model)
    as_in_training(*load("bytes")).save_pretrained(folder / "llama")
    return folder, expected


KINDS = {
    "run": ("run", "gla5+canon"),
    "run@1": ("run", "gla5+canon"),
    "run@2": ("run", "gla5+canon"),
    "played": ("run", "gla5+canon"),
    "exported": ("canonlm", "gla5+canon"),
    "ours": ("canonlm", "llama+canon+qknorm"),
    "self-contained": ("canonlm", "llama+canon+qknorm"),
    "sharded": ("canonlm", "llama+canon+qknorm"),
    "hf/Llama-tiny": ("published", "llama+canon"),
    "hf/GDN2-tiny": ("published", "gdn2+canon"),
    "hf@Llama-tiny": ("published", "llama+canon"),
    "hf@GDN2-tiny": ("published", "gdn2+canon"),
    "lingua": ("published", "llama+canon"),
    "lingua/Llama-tiny": ("published", "llama+canon"),
    "llama": ("transformers", "hf:llama"),
    "gpt2": ("transformers", "hf:gpt2"),
}


def open_named(directory, name, **options):
    """`hf@GDN2-tiny`: a variant; `run@1`: a step."""
    source, _, part = name.partition("@")
    if part:
        options["step" if part.isdigit() else "variant"] = int(part) if part.isdigit() else part
    return open_model(str(directory / source), **options)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind(place, name):
    folder, expected = place
    subject = open_named(folder, name)
    kind, arch = KINDS[name]
    assert torch.equal(logits_of(subject.model), expected[name])
    assert not subject.model.training
    about = subject.about
    assert (about["kind"], about["arch"], about["dtype"]) == (kind, arch, "float32")
    assert about["source"] == str(folder / name.partition("@")[0])
    assert about["parameters"] == sum(p.numel() for p in subject.model.parameters())
    assert about.get("step") == {"run": 2, "run@1": 1, "run@2": 2, "played": 5}.get(name)
    json.dumps(about)
    has_tokenizer = name in ("run", "run@1", "run@2", "exported", "llama")
    assert (subject.tokenizer is not None) == has_tokenizer == (about["tokenizer"] is not None)
    if has_tokenizer:
        assert subject.tokenizer("ab").input_ids == [256, 97, 98]
        assert subject.tokenizer.eos_token_id == 257
    assert {e for e in KINDS if e in expected} == set(expected)


def test_a_damaged_checkpoint_is_skipped(place, tmp_path, caplog):
    shutil.copytree(place[0] / "run", tmp_path / "run")
    damaged = next(path_of(tmp_path / "run" / "checkpoints", 2).glob("*.distcp"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    subject = open_model(str(tmp_path / "run"))
    assert subject.about["step"] == 1
    assert torch.equal(logits_of(subject.model), place[1]["run@1"])
    assert "truncated" in caplog.text
    with pytest.raises(ValueError, match="is truncated"):
        open_model(str(tmp_path / "run"), step=2)
    shutil.rmtree(path_of(tmp_path / "run" / "checkpoints", 1))
    with pytest.raises(ValueError, match="is truncated"):
        open_model(str(tmp_path / "run"))


def test_a_run_whose_text_was_moved(place, tmp_path, caplog):
    shutil.copytree(place[0] / "run", tmp_path / "run")
    gone = {"text.sources.plain.path": {"folder": str(tmp_path / "gone"), "sha256": ""}}
    write_json(tmp_path / "run" / "data.json", gone)
    assert open_model(str(tmp_path / "run")).tokenizer is None
    assert "tokenizer is no longer there" in caplog.text
    assert open_model(str(tmp_path / "run"), tokenizer="bytes").tokenizer is not None
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "tokenizer.json").write_text("{")
    assert open_model(str(tmp_path / "run")).tokenizer is None, "another text"
    note_text(tmp_path / "run", tmp_path / "gone")
    with pytest.raises(ValueError, match=r"gone/tokenizer.json: not a tokenizer \(.*\)$"):
        open_model(str(tmp_path / "run"))


@pytest.mark.parametrize("name", ["run", "ours", "hf@GDN2-tiny", "lingua", "gpt2"])
def test_dtype(place, name):
    subject = open_named(place[0], name, dtype="bf16")
    assert {p.dtype for p in subject.model.parameters()} == {torch.bfloat16}
    assert subject.about["dtype"] == "bfloat16"
    stored = open_named(place[0], name)
    assert stored.about["fingerprint"] != subject.about["fingerprint"]


def test_half_precision_weights_keep_their_dtype(place, tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32)).bfloat16()
    model.save_pretrained(tmp_path / "half")
    assert open_model(str(tmp_path / "half")).about["dtype"] == "bfloat16"
    assert open_model(str(tmp_path / "half"), dtype="fp32").about["dtype"] == "float32"


@pytest.mark.parametrize("requested", ["bytes", "text", "text/tokenizer.json", "exported"])
def test_a_requested_tokenizer(place, requested):
    folder, _ = place
    subject = open_model(str(folder / "ours"), tokenizer=requested if requested == "bytes" else str(folder / requested))
    assert subject.tokenizer("é", add_special_tokens=False).input_ids == [0xC3, 0xA9]
    assert subject.tokenizer.decode([104, 105]) == "hi"
    assert subject.about["tokenizer"] == open_model(str(folder / "run")).about["tokenizer"]


def test_a_published_checkpoint_with_a_tokenizer(place, tmp_path):
    """The library does not know the release's model type, but checks it before it reads a tokenizer.json."""
    shutil.copytree(place[0] / "hf" / "GDN2-tiny", tmp_path / "release")
    shutil.copy(place[0] / "text" / "tokenizer.json", tmp_path / "release")
    subject = open_model(str(tmp_path / "release"))
    assert subject.tokenizer("ab", add_special_tokens=False).input_ids == [97, 98]


def test_context_length():
    def of(**fields):
        return wrap(CanonLMForCausalLM(CanonLMConfig(**SIZES, max_position_embeddings=99, **fields))).context_length

    assert (of(), of(canon_set="ABCD"), of(mixers=["gdn", "attention"])) == (99, 99, 99)
    assert (of(mixers=["gla"]), of(mixers=["gdn", "mamba2"], mamba_state_size=16)) == (None, None)
    assert wrap(LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=77))).context_length == 77
    gpt2 = GPT2Config(vocab_size=9, n_embd=16, n_layer=1, n_head=2, n_positions=33)
    assert wrap(GPT2LMHeadModel(gpt2)).context_length == 33


def test_fingerprints_of_different_models_differ(place):
    folder, _ = place
    names = ["run@1", "run@2", "ours", "hf@GDN2-tiny", "llama", "gpt2"]
    result = [open_named(folder, name).about["fingerprint"] for name in names]
    assert result == [open_named(folder, name).about["fingerprint"] for name in names]
    assert len(set(result)) == len(names)
    assert open_named(folder, "ours").about["fingerprint"] == open_named(folder, "sharded").about["fingerprint"]
    model = CanonLMForCausalLM(CanonLMConfig(**SIZES))
    before = fingerprint(model)
    vars(model.config).update(OF_EXPERTS)  # as in earlier versions
    assert fingerprint(model) == before
    model.config.rope_theta = 5.0
    assert fingerprint(model) != before


def test_a_checksum_counts_every_number_the_whole_tokenizer_and_the_end_tokens():
    model, words = CanonLMForCausalLM(CanonLMConfig(**SIZES)), as_in_training(*load("bytes"))
    before = checksum(model, words)
    assert checksum(model, words) == before != checksum(model, None)

    def changed(change):
        others = deepcopy((model, words))
        change(*others)
        return checksum(*others)

    def weights(change):
        return lambda model, words: change(model.get_input_embeddings().weight.data)

    changes = [
        weights(lambda rows: rows[7, 3:4].copy_(rows[7, 3:4].nextafter(torch.tensor(9.0)))),
        weights(lambda rows: rows.copy_(rows.flip(0))),
        lambda model, words: setattr(words.backend_tokenizer, "normalizer", Lowercase()),
        lambda model, words: setattr(words, "bos_token", "a"),
        lambda model, words: setattr(model.generation_config, "eos_token_id", [5, 6]),
    ]
    assert len({before, *map(changed, changes)}) == len(changes) + 1
    assert changed(lambda model, words: model.bfloat16()) == changed(lambda model, words: model.bfloat16())


@pytest.fixture
def hub(place, monkeypatch, tmp_path):
    """The downloaded part of the Hub; nothing else can be reached."""
    cache = tmp_path / "cache"
    for name in ("llama", "hf", "lingua"):
        repository = cache / f"models--someone--{name}"
        shutil.copytree(place[0] / name, repository / "snapshots" / "abc")
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("abc")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return cache


@pytest.mark.parametrize("name", ["llama", "lingua", "hf@GDN2-tiny"])
def test_the_hub(place, hub, name):
    source, _, variant = name.partition("@")
    subject = open_model(f"someone/{source}", variant=variant or None)
    assert torch.equal(logits_of(subject.model), place[1][name])
    assert (subject.about["kind"], subject.about["arch"]) == KINDS[name]
    assert (subject.tokenizer is not None) == (name == "llama")
    if name == "llama":
        assert open_model(str(place[0] / "ours"), tokenizer="someone/llama").tokenizer is not None


UNREACHED = " is neither a folder nor a model on the Hub that can be reached"
NO_MODEL = (
    "MODEL: expected a run (config.yaml), a saved model (config.json) or a published checkpoint (params.json), got "
)


MISTAKES = {  # arguments, and the beginning of the error
    "missing": (("./nothing",), 'MODEL: "./nothing"' + UNREACHED + "."),
    "misspelt": (("playd",), 'MODEL: "playd"' + UNREACHED + " ("),
    "guess": (("./playd",), 'MODEL: "./playd"' + UNREACHED + '. Did you mean "played"?'),
    "hub": (("someone/else",), 'MODEL: "someone/else"' + UNREACHED + " ("),
    "file": (("notes/todo.txt",), 'MODEL: expected a folder, and not a file in it, got "notes/todo.txt"'),
    "empty": (("empty",), NO_MODEL + '"empty", a folder with nothing in it'),
    "other": (("notes",), NO_MODEL + '"notes", a folder with todo.txt'),
    "grid": (("grid",), "MODEL: expected one run, such as grid/runs/one, got "),
    "checkpoint": (
        ("run/checkpoints/step-00000002",),
        "MODEL: expected the folder of the run, with --step 2, got ",
    ),
    "inside": (("run/checkpoints",), "MODEL: expected the folder of the run, "),
    "half": (("half",), "half/model.safetensors: not a whole file of tensors and nothing else ("),
    "lacking": (("lacking",), "lacking: the weights do not fit the configuration; missing: model.layers.1."),
    "broken": (("broken",), "broken/config.json: not JSON ("),
    "strange": (("strange",), "strange: not a causal language model that can be loaded ("),
    "code": (("code",), "code: it comes with code of its own, which runs only with --trust-remote-code"),
    "t5": (("t5",), "t5: not a causal language model that can be loaded ("),
    "words": (("words",), "words: its tokenizer cannot be read ("),
    "variants": (("hf",), "variant: expected one of GDN2-tiny, Llama-tiny  (in hf)"),
    "variant": (("hf", {"variant": "GDN-tiny"}), 'unknown variant "GDN-tiny". Did you mean "GDN2-tiny"?'),
    "step": (("run", {"step": 3}), "--step: expected a step that has a checkpoint (1, 2), got 3"),
    "no steps": (("ours", {"step": 3}), "--step only works with the folder of a run"),
    "run variant": (("run", {"variant": "x"}), "--variant only works with a published checkpoint"),
    "dtype": (("ours", {"dtype": "fp8"}), 'unknown dtype "fp8".'),
    "device": (("ours", {"device": "gpu"}), "--device: expected auto, cpu or a device that torch sees here, got"),
    "tokenizer": (
        ("ours", {"tokenizer": "./none"}),
        '--tokenizer: "./none" is neither a file, a folder nor a tokenizer on the Hub that can be reached.',
    ),
    "no tokenizer": (
        ("ours", {"tokenizer": "gpt2"}),
        "--tokenizer: expected a tokenizer (tokenizer.json, tokenizer.model, …), got",
    ),
    "no words": (("ours", {"tokenizer": "notes/todo.txt"}), "--tokenizer: expected "),
    "too many": (
        ("small", {"tokenizer": "bytes"}),
        "--tokenizer: expected one of at most 100 tokens, the vocabulary size of small, got",
    ),
    "no checkpoints": (("unsaved",), "MODEL: expected the folder of a run that has saved a checkpoint"),
}


@pytest.fixture(scope="module")
def wrong(place, tmp_path_factory):
    directory = tmp_path_factory.mktemp("wrong") / "models"
    shutil.copytree(place[0], directory)
    shutil.copytree(directory / "run", directory / "unsaved", ignore=shutil.ignore_patterns("checkpoints"))
    (directory / "empty").mkdir()
    (directory / "notes").mkdir()
    (directory / "notes" / "todo.txt").write_text("")
    shutil.copytree(directory / "run", directory / "grid" / "runs" / "one")
    for name in ("half", "lacking", "broken", "strange", "code", "words"):
        shutil.copytree(directory / "llama", directory / name)
    weights = (directory / "half" / "model.safetensors").read_bytes()
    (directory / "half" / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    model = LlamaForCausalLM.from_pretrained(directory / "llama")
    state = {k: v for k, v in model.state_dict().items() if "layers.1" not in k}
    model.save_pretrained(directory / "lacking", state_dict=state)
    (directory / "broken" / "config.json").write_text("{")
    config = json.loads((directory / "strange" / "config.json").read_text()) | {"model_type": "nobody-knows"}
    (directory / "strange" / "config.json").write_text(json.dumps(config))
    config["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    (directory / "code" / "config.json").write_text(json.dumps(config))
    (directory / "words" / "tokenizer.json").write_text("{")
    t5 = transformers.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(directory / "t5")
    small = CanonLMForCausalLM(CanonLMConfig(**{**SIZES, "vocab_size": 100}))
    small.save_pretrained(directory / "small")
    return directory


@pytest.mark.parametrize(("arguments", "start"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_reported_in_one_line(wrong, hub, monkeypatch, arguments, start):
    monkeypatch.chdir(wrong)
    source, *options = arguments
    with pytest.raises(ValueError, match=rf"\A{re.escape(start)}.*\Z"):
        open_model(source, **(options[0] if options else {}))


def test_the_librarys_log_level_is_restored(place):
    logging = transformers.utils.logging
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    open_model(str(place[0] / "llama"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
