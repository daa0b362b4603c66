"""Published checkpoints as folders and on the Hub: what is read, what is fetched, what is refused."""

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import canonlm
from canonlm.models.published import export, load_published, save_published


@pytest.fixture
def model(small_model):
    return small_model(torch.float32, mixers=["gdn"], canon_set="AbCD", linear_num_heads=4)


@pytest.fixture
def folder(model, tmp_path):
    """`folder(name, to)`: the model in another format."""

    def make(name="published", to="hf"):
        place = tmp_path / name
        place.mkdir(parents=True)
        save_published(model, place, to)
        return place

    return make


def same(got, expected):
    assert_close(got.state_dict(), expected.state_dict(), atol=0, rtol=0)
    assert not got.training


@pytest.mark.parametrize("to", ["hf", "lingua", "canonlm"])
def test_a_folder_in_any_format(model, folder, to):
    same(canonlm.load_published(folder(to=to)), model)
    half = load_published(str(folder("again", to)), dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_the_tensors_keep_their_precision(model, folder):
    place = folder()
    state = load_file(place / "model.safetensors")
    save_file({name: tensor.half() for name, tensor in state.items()}, place / "model.safetensors")
    assert load_published(place).dtype == torch.float16


FORMATS = [
    ({"mixers": ["attention"], "canon_set": "ABCD", "qk_norm": True, "rope_dim": 8}, {"rope_version": "lingua"}),
    ({"mixers": ["attention"], "canon_set": "ABCD", "tie_word_embeddings": True}, {"rope_version": "huggingface"}),
    ({"mixers": ["gla"], "canon_set": "AbCD", "linear_num_heads": 4}, {"hidden_act": "silu", "fuse_norm": False}),
    ({"mixers": ["gdn"], "canon_set": "AbBCD", "linear_num_heads": 4}, {}),
    ({"mixers": ["mamba2"], "canon_set": "AbBCD", "linear_num_heads": 4}, {}),
]


@pytest.mark.parametrize("to", ["hf", "lingua"])
@pytest.mark.parametrize(("fields", "own"), FORMATS)
def test_there_and_back_gives_the_first_files_again(small_model, tmp_path, to, fields, own):
    """Tensors in their order of channels and in their precision, and the configuration with all that is not ours."""
    params, state = export(small_model(torch.bfloat16, **fields), lingua=to == "lingua", **own if to == "hf" else {})
    state = {name: x.float() if x.ndim == 1 else x for name, x in state.items()}
    if fields.get("tie_word_embeddings") and to == "hf":
        del state["lm_head.weight"]  # as the library saves tied models
    params |= {"architectures": ["X"], "auto_map": {"AutoConfig": "a.B"}, "torch_dtype": "bfloat16"}
    params = params if to == "hf" else {"name": "a run", "model": params}
    first, ours, second = (tmp_path / name for name in ("first", "ours", "second"))
    for folder in (first, ours, second):
        folder.mkdir()
    name = "config.json" if to == "hf" else "params.json"
    (first / name).write_text(json.dumps(params, indent=2, sort_keys=True) + "\n")
    if to == "hf":
        save_file(state, first / "model.safetensors", metadata={"format": "pt"})
    else:
        torch.save({"model": state}, first / "consolidated.pth")
    save_published(load_published(first), ours)
    save_published(load_published(ours), second, to)
    assert json.loads((second / name).read_text()) == params
    if to == "hf":
        assert all((second / file.name).read_bytes() == file.read_bytes() for file in first.iterdir())
    again = load_file(second / "model.safetensors") if to == "hf" else torch.load(second / "consolidated.pth")["model"]
    assert {name: x.dtype for name, x in again.items()} == {name: x.dtype for name, x in state.items()}
    assert_close(again, state, atol=0, rtol=0)
    changed = load_published(ours)
    changed.config.canon_activation = True  # no longer the model that was read
    (tmp_path / "changed").mkdir()
    save_published(changed, tmp_path / "changed", to)
    assert load_published(tmp_path / "changed").config.canon_activation


def test_a_plain_transformers_llama(small_model, tmp_path):
    from transformers import AutoModelForCausalLM

    model = small_model(torch.float32, rope_theta=100.0)
    save_published(model, tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())  # transformers reads the first, mlx-lm the second
    assert config["rope_parameters"]["rope_theta"] == config["rope_theta"] == 100.0
    llama = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(llama).__name__ == "LlamaForCausalLM"
    input_ids = torch.arange(30)[None]
    assert_close(llama(input_ids).logits, model(input_ids).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("shards", [1, 2])
def test_weights_in_shards_and_in_older_files(model, folder, kind, shards):
    place = folder()
    state = load_file(place / "model.safetensors")
    (place / "model.safetensors").unlink()
    save = save_file if kind == "safetensors" else torch.save
    stem = "model" if kind == "safetensors" else "pytorch_model"
    names = [f"{stem}-{i}.{kind}" for i in range(shards)] if shards > 1 else [f"{stem}.{kind}"]
    places = {key: names[i % shards] for i, key in enumerate(state)}
    for name in names:
        save({key: state[key].clone() for key in state if places[key] == name}, place / name)
    if shards > 1:
        (place / f"{stem}.{kind}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    same(load_published(place), model)


def test_files_of_a_training_run_may_contain_more(model, folder):
    place = folder(to="lingua")
    params = json.loads((place / "params.json").read_text())
    state = torch.load(place / "consolidated.pth")["model"]
    (place / "params.json").write_text(json.dumps({"name": "a run", **params, "optim": {"lr": 1e-3}}))
    torch.save({"model": state, "optim": {"step": torch.tensor(3)}}, place / "consolidated.pth")
    same(load_published(place), model)
    (place / "params.json").write_text(json.dumps(params["model"]))
    torch.save(state, place / "consolidated.pth")
    same(load_published(place), model)


def test_variants(model, folder, tmp_path):
    folder("all/one", "hf")
    same(load_published(tmp_path / "all"), model)
    folder("all/two", "lingua")
    same(load_published(tmp_path / "all", "two"), model)
    with pytest.raises(ValueError, match=r"^variant: expected one of one, two  \(in .*all\)$"):
        load_published(tmp_path / "all")
    with pytest.raises(ValueError, match=r'^unknown variant "tow"\. Did you mean "two"\? Variants: one, two\.$'):
        load_published(tmp_path / "all", "tow")


class Hub:
    """A stand-in for the Hub: returns the files that match, and records the requests."""

    def __init__(self, repository: Path, cache: Path):
        self.repository, self.cache, self.calls = repository, cache, []

    def snapshot_download(self, repo_id, **kwargs):
        self.calls.append((repo_id, kwargs))
        for file in self.repository.rglob("*.*"):
            name = str(file.relative_to(self.repository))
            if any(fnmatch(name, pattern) for pattern in kwargs["allow_patterns"]):
                (self.cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, self.cache / name)
        return str(self.cache)

    def fetched(self):
        return {str(file.relative_to(self.cache)) for file in self.cache.rglob("*.*")}


@pytest.fixture
def hub(folder, tmp_path, monkeypatch):
    for name, to in (("repo/one", "hf"), ("repo/two", "lingua")):
        folder(name, to)
    (tmp_path / "repo" / "one" / "modeling.py").write_text("raise SystemExit")
    hub = Hub(tmp_path / "repo", tmp_path / "cache")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_from_the_hub_only_what_is_needed(model, hub, tmp_path):
    options = {"revision": "abc", "token": "t", "cache_dir": tmp_path / "c", "local_files_only": True}
    same(load_published("org/name", "two", **options), model)
    assert hub.fetched() == {"one/config.json", "two/params.json", "two/consolidated.pth"}
    for repository, kwargs in hub.calls:
        assert repository == "org/name"
        assert {key: kwargs[key] for key in options} == options
    same(load_published("org/name", "one"), model)
    assert hub.fetched() == {
        *("one/config.json", "one/model.safetensors"),
        *("two/params.json", "two/consolidated.pth"),
    }


def test_from_the_hub_without_a_variant(hub):
    with pytest.raises(ValueError, match=r"^variant: expected one of one, two"):
        load_published("org/name")
    assert hub.fetched() == {"one/config.json", "two/params.json"}


def test_a_repository_with_one_checkpoint_and_folders_beside(model, hub):
    shutil.copytree(hub.repository / "one", hub.repository, dirs_exist_ok=True)
    same(load_published("org/name"), model)
    assert "one/model.safetensors" not in hub.fetched()


@pytest.mark.parametrize(
    "error",
    [
        huggingface_hub.errors.LocalEntryNotFoundError("cannot be found\nand more"),
        huggingface_hub.errors.HFValidationError("cannot be found: no name"),
        ConnectionError("cannot be found"),
    ],
)
def test_a_name_that_is_neither_a_folder_nor_a_repository(monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    message = r'^source: expected a folder or a repository on the Hub, got "runs/nowhere" \(cannot be found.*\)$'
    with pytest.raises(ValueError, match=message):
        load_published("runs/nowhere")


def test_an_unknown_target(model, tmp_path):
    with pytest.raises(ValueError, match=r'^unknown target "hff"\. Did you mean "hf"\?'):
        save_published(model, tmp_path, "hff")
    assert export(model)[0]["model_type"] == "GatedDeltaNetCanon"
