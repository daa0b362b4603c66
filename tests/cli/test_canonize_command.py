"""`canonlm canonize`: what it lists, what it writes, and one line for what it cannot do."""

import json
import socket

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import canonlm
from canonlm.cli import main

IDS = torch.arange(8)[None]


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes))
    model.save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_it_writes_a_folder_that_answers_as_before(saved, tmp_path, capsys):
    assert main(["canonize", str(saved), str(tmp_path / "out"), "--sites", "ABCD"]) == 0
    added = 2 * 4 * (16 + 3 * 16 + 16 + 2 * 24)
    assert f"14 Canon layers, {added:,} parameters" in capsys.readouterr().out
    before, after = (AutoModelForCausalLM.from_pretrained(folder).eval() for folder in (saved, tmp_path / "out"))
    assert torch.equal(after(IDS).logits, before(IDS).logits)
    canonlm.decanonize(after)
    assert "`llama` with Canon layers at `ABCD`" in (tmp_path / "out" / "README.md").read_text()
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # all may read the weights, too
    assert main(["canonize", str(saved), str(tmp_path / "with"), "--self-contained"]) == 0
    assert {"LICENSE", "canonized_model.py"} <= {path.name for path in (tmp_path / "with").iterdir()}
    assert "trust_remote_code=True" in (tmp_path / "with" / "README.md").read_text()
    assert main(["check", str(tmp_path / "out"), "--cases", "greedy,left padding"]) == 0
    assert main(["canonize", str(tmp_path / "out"), str(tmp_path / "again")]) == 2
    assert "one without Canon layers" in capsys.readouterr().err


def test_the_same_seed_draws_the_same_taps(saved, tmp_path):
    for name in ("one", "two"):
        assert main(["canonize", str(saved), str(tmp_path / name), "--init", "uniform", "--seed", "3"]) == 0
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("one", "two"))
    assert torch.equal(one(IDS).logits, two(IDS).logits)
    assert one.model.layers[0].canon_A.weight.any()


def test_a_folder_needs_no_network(saved, monkeypatch, capsys):
    def resolve(*_, **__):
        raise AssertionError("asked for a name")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert main(["canonize", str(saved), "--dry-run"]) == 0
    assert main(["canonize", str(saved), str(saved.parent / "out")]) == 0
    assert "Canon layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    "setting",
    [
        {"attn_implementation": "kernels-community/x"},
        {"_attn_implementation": "somebody/x@v1:forward"},
        {"attn_implementation": {"": "paged|kernels-community/x"}},
        {"text_config": {"_attn_implementation_internal": "kernels-community/x"}},
        {"attn_implementation": "flash_attention_2"},  # not installed: the library would take it from the Hub
        {"experts_implementation": "sonicmoe"},
    ],
)
@pytest.mark.parametrize("command", ["canonize --dry-run", "check --cases greedy", "generate x"])
def test_a_configuration_downloads_no_kernel(setting, command, saved, monkeypatch, capsys):
    def load(*_, **__):
        raise AssertionError("loaded a kernel")

    monkeypatch.setattr("transformers.integrations.hub_kernels.load_and_register_attn_kernel", load)
    file = saved / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **setting}))
    name, *options = command.split()
    assert main([name, str(saved), *options]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"canonlm: {file}: ")
    assert "expected the name of an installed kernel, such as sdpa, got" in message


@pytest.mark.parametrize("model", ["hf:gpt2", "folder"])
def test_a_dry_run_lists_equal_blocks_once(model, saved, capsys):
    assert main(["canonize", str(saved) if model == "folder" else model, "--sites", "AD", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    if model == "folder":
        assert lines == [
            "model.layers.0 and 1 more, up to model.layers.1",
            "  A       16 channels, input of self_attn",
            "  D       24 channels, output of mlp.gate_proj",
            "  D       24 channels, output of mlp.up_proj",
            "6 Canon layers in 2 blocks",
        ]
    else:
        assert "  D      256 channels, output of mlp.c_fc" in lines


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["hf:mixtral", "--dry-run"], "sites: no D in mixtral: routed experts have no time axis"),
        (["hf:what", "--dry-run"], "unknown model_type"),
        (["hf:qwen3{{hidden_size=-4}}", "--dry-run"], "MODEL: hf:qwen3{hidden_size=-4} cannot be built: "),
        (["hf:qwen3", "--dry-run", "--dtype", "fp8"], 'unknown dtype "fp8"'),
        (["nowhere", "--dry-run"], "cannot be built"),
        (["hf:llama", "{new}"], "is an architecture, which only works with --dry-run"),
        (["{saved}"], "OUT is missing: the folder to write (or --dry-run)"),
        (["{saved}", "{saved}"], "does not exist yet"),
        (["{saved}", "{new}", "--dry-run"], "writes nothing"),
        (["{saved}", "{new}", "--init", "ones"], "init"),
        (["{run}", "{new}"], "canonlm export it first"),
    ],
)
def test_unsupported_models_are_one_line(arguments, why, saved, tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("arch: llama\n")
    places = {"saved": saved, "run": run, "new": tmp_path / "new"}
    assert main(["canonize", *(text.format(**places) for text in arguments)]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()
