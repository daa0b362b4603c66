"""A folder that brings its code, loaded where canonlm is not installed."""

import ast
import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from families import FAMILIES
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import hub

from canonlm import CanonLMConfig, CanonLMForCausalLM, __version__, canonize
from canonlm.core.bundle import INSTALLED, Module
from canonlm.models.self_contained import flat_modules

IDS = torch.arange(24).reshape(2, 12) * 7 % 60 + 1
ELSEWHERE = """
import sys
for package in ("canonlm", "pydantic", "annotated_types", "numba", "typer", "plotly"):
    sys.modules[package] = None  # importing it fails
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, pipeline

torch.set_num_threads(1)
for number, folder in enumerate(sys.argv[1:]):
    known = torch.load(f"{folder}/known.pt")
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
    assert model.__module__.startswith("transformers_modules."), model.__module__
    assert torch.equal(model(known["ids"]).logits, known["logits"])
    for kwargs, tokens in known["generated"]:
        assert torch.equal(model.generate(**kwargs), tokens), kwargs
    decoder = AutoModel.from_pretrained(folder, trust_remote_code=True).eval()
    assert torch.equal(decoder(known["ids"]).last_hidden_state, known["hidden"])
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    assert config.mixers == known["mixers"]
    if number:  # what follows does not depend on the modules that a folder has
        continue

    generate = pipeline("text-generation", model=folder, trust_remote_code=True)
    text = generate(known["text"], max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"]
    assert text.split() == known["continuation"].split()

    again = f"{folder}-again"
    model.save_pretrained(again)
    model = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
    assert torch.equal(model(known["ids"]).logits, known["logits"])

folder = sys.argv[1]
known = torch.load(f"{folder}/known.pt")
for package in [name for name, module in sys.modules.items() if module is None]:
    del sys.modules[package]
import canonlm

for trust in (None, True):
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust).eval()
    assert type(model) is canonlm.CanonLMForCausalLM  # what is imported goes before what is in the folder
    assert torch.equal(model(known["ids"]).logits, known["logits"])
"""


def save_with_what_is_known(model, folder):
    model.save_pretrained(folder, self_contained=True)
    tokenizer = word_tokenizer(model.config.vocab_size)
    tokenizer.save_pretrained(folder)
    padded = {"input_ids": IDS.clone(), "attention_mask": torch.ones_like(IDS), "pad_token_id": 0}
    padded["input_ids"][0, :5] = padded["attention_mask"][0, :5] = 0
    ways = [
        {"input_ids": IDS, "do_sample": False},
        {"input_ids": IDS, "do_sample": False, "use_cache": False},
        {"input_ids": IDS, "num_beams": 3},
        {**padded, "do_sample": False},
    ]
    ways = [{**way, "max_new_tokens": 6} for way in ways]
    with torch.no_grad():
        new_tokens = model.generate(IDS[:1], do_sample=False, max_new_tokens=6)[0, IDS.shape[1] :]
        known = {
            "ids": IDS,
            "logits": model(IDS).logits,
            "hidden": model.model(IDS).last_hidden_state,
            "generated": [(way, model.generate(**way)) for way in ways],
            "text": tokenizer.decode(IDS[0]),
            "continuation": tokenizer.decode(new_tokens, skip_special_tokens=True),
            "mixers": model.config.mixers,
        }
    torch.save(known, folder / "known.pt")


def word_tokenizer(size):
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0")


@pytest.mark.parametrize(
    "families",
    [["hybrid"], pytest.param([name for name in FAMILIES if name != "hybrid"], marks=pytest.mark.slow)],
    ids=["one", "the others"],
)
def test_works_where_canonlm_is_not_installed(small_model, tmp_path, families):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in families:
        save_with_what_is_known(small_model(torch.float32, **FAMILIES[name]), tmp_path / name)
    torch.set_num_threads(threads)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"}
    folders = [str(tmp_path / name) for name in families]
    child = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, *folders], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert child.returncode == 0, child.stderr[-3000:]


def test_installed_code_takes_precedence_over_code_in_the_folder(small_model, tmp_path):
    model = small_model(torch.float32, canon_set="ABCD")
    model.save_pretrained(tmp_path / "with", self_contained=True)
    for trust in (None, False, True):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "with", trust_remote_code=trust).eval()
        assert type(loaded) is CanonLMForCausalLM
        assert_close(loaded(IDS).logits, model(IDS).logits, atol=0, rtol=0)
    # A folder without code must not claim to have it.
    assert "AutoModel" in loaded.config.auto_map
    loaded.save_pretrained(tmp_path / "without")
    assert loaded.config.auto_map == {}, "tools read it"
    loaded.save_pretrained(tmp_path / "without")
    assert "auto_map" not in json.loads((tmp_path / "without" / "config.json").read_text())
    assert not list((tmp_path / "without").glob("*.py"))


@pytest.mark.parametrize("kind", ["ours", "canonized"])
def test_pushing(small_model, tmp_path, kind, monkeypatch):
    """`push_to_hub` uploads what `save_pretrained` writes; while saving it is refused, with the lines that do."""
    model = small_model()
    if kind == "canonized":
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = canonize(LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes)), "A")
    with pytest.raises(ValueError, match=r"^push_to_hub: expected False: save_pretrained\(") as error:
        model.save_pretrained(tmp_path / "x", self_contained=True, push_to_hub=True)
    uploads = []
    monkeypatch.setattr(huggingface_hub, "upload_folder", lambda **options: uploads.append(options))
    lines = str(error.value).partition("False: ")[2].rpartition(", got")[0].replace(", then ", "\n")
    exec(f"import huggingface_hub\nmodel.{lines.replace('NAME', str(tmp_path / 'x'))}", {"model": model})
    assert uploads == [{"repo_id": str(tmp_path / "x"), "folder_path": str(tmp_path / "x")}]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "x").num_parameters() == model.num_parameters()

    def upload(self, folder, *_, **__):
        assert AutoModelForCausalLM.from_pretrained(folder).num_parameters() == model.num_parameters()
        uploads.append(folder)

    card = SimpleNamespace(save=lambda path: None)
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    monkeypatch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card)
    monkeypatch.setattr(hub, "hf_api", lambda: api, raising=False)  # in 5.17: create_repo
    monkeypatch.setattr(hub, "create_repo", api.create_repo, raising=False)
    monkeypatch.setattr(type(model), "_upload_modified_files", upload)
    model.push_to_hub("me/model")
    assert len(uploads) == 2


# The modules


def modules_of(family):
    return flat_modules(CanonLMConfig(**{"num_hidden_layers": 2, **FAMILIES[family]}))


@pytest.mark.every(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_modules_import_only_each_other_and_installed_packages(family):
    modules = modules_of(family)
    for text in modules.values():
        assert text.startswith(f"# Generated by canonlm {__version__} from canonlm.")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert (node.level, node.module in modules) == (1, True), ast.unparse(node)
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in INSTALLED
            elif isinstance(node, ast.Import):
                assert {alias.name.split(".")[0] for alias in node.names} <= INSTALLED


@pytest.mark.slow
def test_no_missing_names_and_no_unused_imports(tmp_path):
    pytest.importorskip("ruff")
    for family in FAMILIES:
        (tmp_path / family).mkdir()
        for name, text in modules_of(family).items():
            (tmp_path / family / f"{name}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F", str(tmp_path)]
    checked = subprocess.run(ruff, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


def test_only_used_code_is_included():
    llama, gdn = modules_of("llama"), modules_of("gdn")
    assert not {"gla", "gdn", "mamba2", "recurrent", "ssd", "fla"} & llama.keys()
    assert not {"gla", "mamba2", "ssd"} & gdn.keys()
    assert {"gdn", "gated_delta_rule"} <= gdn.keys()
    assert "pydantic" not in llama["errors"]
    # Comments and the strings below constants come with what they explain.
    assert '"""Max of any integer' in llama["settings"]
    assert "# A single token shows no restart" in llama["layout"]


def flattened(source, *names):
    module = Module("canonlm.models.example", source)
    paths = [path for name in names for path in module.keep(name)]
    return paths, module.text("copy").split("\n", 1)[1]


def test_operators_keep_their_registrations_under_new_names():
    source = """import torch

op = torch.library.custom_op("canonlm::op")


def backward(ctx, dy):
    return dy


op.register_autograd(backward)
"""
    assert flattened(source, "op") == ([], source.replace("canonlm::", "canonlm_copy::"))
    # The code of two folders differs, so their operators must differ, too.
    gdn, hybrid = (modules_of(family)["gated_delta_rule"] for family in ("gdn", "hybrid"))
    assert re.findall('"canonlm.*::', gdn) != re.findall('"canonlm.*::', hybrid)
    assert '"canonlm::' not in gdn


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("import pydantic\n\ndef f(): return pydantic.x\n", "line 1: not supported in a folder: import pydantic"),
        ("def f():\n    from canonlm.cli import main\n", "line 2: .*: from canonlm.cli import main"),
        ("import canonlm.cli\n\ndef f(): return canonlm.cli\n", "line 1: .*: import canonlm.cli"),
        ("from . import x\n\ndef f(): return x\n", "line 1: .*: from . import x"),
        ("print()\n\ndef f(): pass\n", r"example, line 1: not supported in a folder: print\(\)"),
        ("if True:\n    def f(): pass\n", "line 1: not supported in a folder: if True"),
        ("from canonlm.ops import fla\n\ndef f(run): return fla.run(run)\n", "run is ambiguous without fla"),
        ("def g(): pass\n", "example does not define f"),
    ],
)
def test_code_that_cannot_be_saved_in_a_folder_is_refused(source, complaint):
    with pytest.raises(RuntimeError, match=complaint):
        flattened(source, "f")
