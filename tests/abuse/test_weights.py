"""Untrusted weights must be all of the model's weights; others are refused by name, at every entry point."""

import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import main
from canonlm.models.modeling import CanonLMModel
from canonlm.models.published import load_published, save_published

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
WEIGHT = "model.layers.0.self_attn.q_proj.weight"
FILES = {
    "canonlm": "model.safetensors",
    "hf": "model.safetensors",
    "lingua": "consolidated.pth",
    "llama": "model.safetensors",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder for each format."""
    root = tmp_path_factory.mktemp("models")
    model = CanonLMForCausalLM(CanonLMConfig(**SIZES, canon_set="ABCD"))
    for kind in ("canonlm", "hf", "lingua"):
        (root / kind).mkdir()
        save_published(model, root / kind, kind)
    LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=32)).save_pretrained(root / "llama")
    return root


@pytest.fixture
def folder(made, tmp_path):
    return lambda kind: Path(shutil.copytree(made / kind, tmp_path / kind))


def read(path):
    if path.suffix == ".safetensors":
        return load_file(path)
    return torch.load(path, weights_only=True)["model"]


def write(path, state):
    if path.suffix == ".safetensors":
        save_file({name: tensor.clone() for name, tensor in state.items()}, path, metadata={"format": "pt"})
    else:
        torch.save({"model": state}, path)


def drop(state, name):
    del state[name]
    return f"missing.* {name}"


def add(state, name):
    state["one.more"] = torch.zeros(3)
    return "unknown.* one.more"


def integers(state, name):
    state[name] = state[name].round().long()
    return rf"no floating-point numbers: {name} \("


def complex_numbers(state, name):
    state[name] = state[name].to(torch.complex64)
    return rf"no floating-point numbers: {name} \("


def cut(state, name):
    state[name] = state[name][:-1].clone()
    return f"{name}( |$)"


def flatten(state, name):
    state[name] = state[name].flatten().clone()
    return f"{name}( |$)"


def entries(kind, path):
    """Every entry point for a folder of this kind."""
    yield "eval", lambda: fails(["eval", str(path), "--suite", "playground", "task={name: copying}"])
    yield "generate", lambda: fails(["generate", str(path), "1 2", "--tokenizer", "bytes"])
    if kind != "llama":
        yield "convert", lambda: fails(["convert", str(path), f"{path}-out"])
        yield "load_published", lambda: raises(lambda: load_published(path))
    if kind == "canonlm":
        yield "from_pretrained", lambda: raises(lambda: CanonLMForCausalLM.from_pretrained(path))
        yield "AutoModelForCausalLM", lambda: raises(lambda: AutoModelForCausalLM.from_pretrained(path))


def fails(arguments):
    error = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("canonlm.cli._say", lambda message, code: error.append(message) or code)
        assert main(arguments) == 2, arguments
    return error[0]


def raises(act):
    with pytest.raises(ValueError) as caught:
        act()
    return str(caught.value)


CHANGES = [drop, add, integers, complex_numbers, cut, flatten]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("canonlm", change) for change in CHANGES),
        *(("hf", change) for change in CHANGES[::3]),
        *(("lingua", change) for change in CHANGES[1::3]),
        *(("llama", change) for change in CHANGES[2::3]),
    ],
)
def test_weights_of_another_model_are_refused_by_name(kind, change, folder):
    path = folder(kind)
    state = read(path / FILES[kind])
    name = next(name for name in state if state[name].ndim == 2 and "layers.0" in name)
    expected = change(state, name)
    write(path / FILES[kind], state)
    for entry, refuse in entries(kind, path):
        message = refuse()
        assert re.search(expected, message), (entry, message)
        assert "\n" not in message
        assert not Path(f"{path}-out").exists()


@pytest.mark.parametrize("kind", ["canonlm", "hf", "lingua"])
def test_a_head_that_is_missing(kind, folder):
    path = folder(kind)
    state = read(path / FILES[kind])
    head = next(name for name in state if "lm_head" in name or name.startswith("output"))
    del state[head]
    write(path / FILES[kind], state)
    for _, refuse in entries(kind, path):
        assert head in refuse()


def test_strict_false_accepts_missing_weights(folder):
    path = folder("canonlm")
    state = read(path / "model.safetensors")
    del state[WEIGHT]
    write(path / "model.safetensors", state)
    _, info = CanonLMForCausalLM.from_pretrained(path, strict=False, output_loading_info=True)
    assert set(info["missing_keys"]) == {WEIGHT}
    full = folder("hf").parent / "again"
    CanonLMForCausalLM(CanonLMConfig(**SIZES)).save_pretrained(full)
    assert isinstance(CanonLMModel.from_pretrained(full), CanonLMModel), "the decoder of a folder with a head"
    bigger = CanonLMConfig(**{**SIZES, "vocab_size": 24})
    resized = CanonLMForCausalLM.from_pretrained(full, config=bigger, ignore_mismatched_sizes=True)
    assert resized.lm_head.weight.shape == (24, 16)


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


def pickled(path):
    torch.save({"model": {"a": Runs()}}, path)


def expanded(path):
    state = read(path)
    name = next(name for name in state if state[name].ndim == 2)
    state[name] = torch.zeros(1).expand(10**6, 10**6)
    write(path, state)


def compressed(path):
    with zipfile.ZipFile(path) as plain, zipfile.ZipFile("small", "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    shutil.move("small", path)


def flipped(path):
    """A bit of a tensor, which torch does not notice."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda each: each.file_size)
    content[entry.header_offset + 512 + entry.file_size // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [pickled, expanded, compressed, flipped])
def test_torch_files(damage, folder, monkeypatch, tmp_path):
    path = folder("lingua")
    monkeypatch.chdir(tmp_path)
    damage(path / "consolidated.pth")
    for _, refuse in entries("lingua", path):
        assert "consolidated.pth: not a whole file of tensors and nothing else" in refuse()
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("kind", "weight_map", "message"),
    [
        *(
            (kind, {WEIGHT: "../model.safetensors"}, "expected the name of a file in")
            for kind in ("canonlm", "hf", "llama")
        ),
        ("canonlm", {WEIGHT: "/etc/passwd"}, "expected the name of a file in"),
        ("hf", {WEIGHT: "config.json"}, "expected files of weights"),
        ("llama", {WEIGHT: 3}, "expected a weight_map of names and files"),
        ("canonlm", [], "expected a weight_map of names and files"),
        ("hf", {WEIGHT: "fifo.safetensors"}, "not a regular file"),
        *((kind, {WEIGHT: "link.safetensors"}, "got a link out of it") for kind in ("canonlm", "hf", "llama")),
        ("llama", {WEIGHT: "part.safetensors"}, "its files do not hold the tensors that it lists"),
    ],
)
def test_an_index_cannot_leave_its_folder(kind, weight_map, message, folder):
    path = folder(kind)
    shutil.move(path / "model.safetensors", path / "part.safetensors")
    os.mkfifo(path / "fifo.safetensors")
    (path / "link.safetensors").symlink_to("/etc/hostname")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for _, refuse in entries(kind, path):
        assert message in refuse()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("transformers_weights", "link.safetensors"),
        ("transformers_weights", "adapter_model.bin"),
        ("text_config.transformers_weights", "link.safetensors"),
        ("configuration_files", ["config.4.0.0.json"]),
    ],
)
@pytest.mark.parametrize("kind", ["canonlm", "llama"])
def test_a_configuration_cannot_name_other_files(kind, key, value, folder):
    """The library would read them in place of those that we check."""
    path = folder(kind)
    config = json.loads((path / "config.json").read_text())
    *above, name = key.split(".")
    config |= {above[0]: {name: value}} if above else {name: value}
    (path / "config.json").write_text(json.dumps(config))
    entry_names = ("eval", "generate", "from_pretrained") if "configuration" in key else dict(entries(kind, path))
    for entry, refuse in entries(kind, path):
        if entry in entry_names:
            assert ": expected none, as only the usual files are read, got" in refuse(), entry


@pytest.mark.parametrize("kind", ["canonlm", "llama"])
def test_an_adapter_beside_the_weights(kind, folder):
    """The library would read the weights of the folder that it names."""
    path = folder(kind)
    other = {"peft_type": "LORA", "base_model_name_or_path": str(path.parent)}
    (path / "adapter_config.json").write_text(json.dumps(other))
    for entry, refuse in entries(kind, path):
        if entry != "AutoModelForCausalLM":  # which follows it before our class is called
            assert "expected a complete model, got an adapter (adapter_config.json)" in refuse(), entry
    assert not Path(f"{path}-out").exists()


def test_links_in_the_hub_cache_are_followed(made, tmp_path):
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate((made / "canonlm").iterdir()):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(blobs / str(number))
    assert load_published(snapshot).config.hidden_size == 16
