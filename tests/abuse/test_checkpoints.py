"""An untrusted checkpoint: no code in it runs, and no missing tensor is invented."""

import copy
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from saved_runs import save_run
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata

from canonlm import CanonLMForCausalLM
from canonlm.cli import main
from canonlm.core.files import Stamp
from canonlm.train.checkpoint import load_model

WEIGHT = "model.lm_head.weight"


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stranger") / "run"
    save_run(folder, tiny.raw(train={"steps": 4, "eval_every": 4, "checkpoint_every": 1}), (1,))
    return folder


@pytest.fixture
def run(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "run"))


def checkpoint_of(run):
    return run / "checkpoints" / "step-00000001"


def stamp_again(run):
    """Write a manifest that fits the changed files, as an attacker can."""
    folder = checkpoint_of(run)
    names = [path.name for path in folder.iterdir() if path.name != "manifest.json"]
    files = {name: Stamp.of(folder / name).model_dump() for name in names}
    (folder / "manifest.json").write_text(json.dumps({"step": 1, "processes": 1, "files": files}))


def change_metadata(run, change):
    path = checkpoint_of(run) / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    changed = change(metadata)
    path.write_bytes(pickle.dumps(metadata if changed is None else changed))
    stamp_again(run)


class Runs:
    def __reduce__(self):
        return os.system, ("touch ran",)


class Builds:
    """Calls a class that the file may use, with arguments that make it print."""

    def __reduce__(self):
        return eval, ("print('ran')",)


def key(metadata, name=WEIGHT):
    return next(index for index in metadata.storage_data if index.fqn == name)


def bytes_entry(metadata):
    metadata.state_dict_metadata[WEIGHT] = BytesStorageMetadata()


def outside(metadata):
    old = metadata.storage_data[key(metadata)]
    metadata.storage_data[key(metadata)] = _StorageInfo("../../config.yaml", old.offset, old.length)


def beyond(metadata):
    metadata.storage_data[key(metadata)].length = 2**60


def transformed(metadata):
    metadata.storage_data[key(metadata)].transform_descriptors = ["zstd"]


def half(metadata):
    entry = metadata.state_dict_metadata[WEIGHT]
    entry.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([entry.size[0] // 2, entry.size[1]]))]


def twice(metadata):
    entry = metadata.state_dict_metadata[WEIGHT]
    entry.chunks = entry.chunks * 2


def no_chunks(metadata):
    metadata.state_dict_metadata[WEIGHT].chunks = []


def integers(metadata):
    metadata.state_dict_metadata[WEIGHT].properties.dtype = torch.int64


def huge(metadata):
    metadata.state_dict_metadata[WEIGHT].size = torch.Size([2**61, 2])


def junk(metadata):
    metadata.state_dict_metadata = 7


COMMANDS = (
    ["export", "run", "out"], ["generate", "run", "1 2 3"], ["eval", "run", "--suite", "playground"],
    ["train", "run/config.yaml", "--out", "run"],
)  # fmt: skip
HOSTILE = [
    (lambda metadata: Runs(), "posix.system, which no checkpoint needs; none of it was run"),
    (lambda metadata: {"a": Builds()}, "builtins.eval, which no checkpoint needs"),
    (lambda metadata: print, "builtins.print"),
    (bytes_entry, "torch.distributed.checkpoint.metadata.BytesStorageMetadata"),
    (outside, "expected a *.distcp file beside it, got '../../config.yaml'"),
    (beyond, "its place is outside __0_0.distcp"),
    (transformed, "its place is not that of a plain tensor"),
    (half, "its chunks do not make up a tensor of shape"),
    (twice, "its chunks do not make up a tensor of shape"),
    (no_chunks, "its chunks do not make up a tensor of shape"),
    (integers, "torch.int64"),
    (huge, "its chunks do not make up a tensor of shape"),
    (junk, "not the metadata of a checkpoint"),
]


@pytest.mark.parametrize(
    ("change", "message", "command"), [(*each, COMMANDS[place % 4]) for place, each in enumerate(HOSTILE)]
)
def test_hostile_metadata(change, message, command, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    change_metadata(run, change)
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert command[0] == "train" or error.count("\n") == 1
    assert not Path("ran").exists()
    assert not Path("out").exists()


def rewrite(run, entry):
    """Replace the head's weight by another stored tensor."""
    path = checkpoint_of(run) / "__0_0.distcp"
    with path.open("ab") as file:
        offset = file.tell()
        entry(file)
        length = file.tell() - offset

    def change(metadata):
        metadata.storage_data[key(metadata)].offset = offset
        metadata.storage_data[key(metadata)].length = length

    change_metadata(run, change)


def compressed(file):
    torch.save(torch.zeros(11, 16), "plain.pt")
    with zipfile.ZipFile("plain.pt") as plain, zipfile.ZipFile("small.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in plain.namelist():
            small.writestr(name, plain.read(name))
    file.write(Path("small.pt").read_bytes())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda file: torch.save({"x": Runs()}, file), "not a tensor of a checkpoint"),
        (lambda file: torch.save(torch.zeros(3), file), "got (3,) of torch.float32"),
        (lambda file: torch.save(torch.zeros(11, 16, dtype=torch.int32), file), "not a tensor of a checkpoint"),
        (lambda file: torch.save([torch.zeros(11, 16)], file), "it is not a tensor"),
        (lambda file: torch.save(torch.zeros(11, 16).to_sparse(), file), "it is not a tensor"),
        (lambda file: file.write(b"junk" * 100), "not a zip file"),
        (compressed, "it is compressed"),
    ],
)
def test_hostile_tensors(entry, message, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    rewrite(run, entry)
    assert main(["export", "run", "out"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert WEIGHT in error
    assert error.count("\n") == 1
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"files": {"../../config.yaml": None}}, "cannot be read"),
        ({"files": {"/etc/hostname": None}}, "cannot be read"),
        ({"step": 2}, "manifest.json is of step 2"),
        ({"processes": "many"}, "cannot be read"),
        ({"files": {"fifo": None}}, "fifo"),
    ],
)
def test_hostile_manifest(manifest, message, run, capsys):
    folder = checkpoint_of(run)
    os.mkfifo(folder / "fifo")
    full = json.loads((folder / "manifest.json").read_text())
    stamp = next(iter(full["files"].values()))
    if "files" in manifest:
        manifest = {"files": {**full["files"], **dict.fromkeys(manifest["files"], stamp)}}
    (folder / "manifest.json").write_text(json.dumps({**full, **manifest}))
    assert main(["export", str(run), str(run.parent / "out")]) == 2
    assert message in capsys.readouterr().err


def test_the_same_checkpoint_split_over_files_still_opens(run):
    """The checks above accept valid checkpoints: a grid of chunks in two files."""
    before = load_model(run).module.state_dict()
    folder = checkpoint_of(run)
    weight = before[WEIGHT.removeprefix("model.")].clone()
    rows = weight.shape[0]

    def split(metadata):
        index = key(metadata)
        entry, info = metadata.state_dict_metadata[WEIGHT], metadata.storage_data.pop(index)
        cuts = [(0, 4), (4, rows)]
        entry.chunks = [
            ChunkStorageMetadata(torch.Size([a, c]), torch.Size([b - a, 8])) for a, b in cuts for c in (0, 8)
        ]
        with (folder / "__1_0.distcp").open("wb") as file:
            for a, b in cuts:
                for c in (0, 8):
                    offset = file.tell()
                    torch.save(weight[a:b, c : c + 8].clone(), file)
                    place = copy.copy(info)
                    place.relative_path, place.offset, place.length = "__1_0.distcp", offset, file.tell() - offset
                    metadata.storage_data[type(index)(WEIGHT, (a, c))] = place

    change_metadata(run, split)
    after = load_model(run).module.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert isinstance(load_model(run).module, CanonLMForCausalLM)
