"""`canonlm convert`: one line about the result, or a one-line error and nothing written."""

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch.testing import assert_close

from canonlm import CanonLMConfig, CanonLMForCausalLM, load_published
from canonlm.cli import main
from canonlm.core.files import MANIFEST
from canonlm.models.published import save_published

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(scope="module")
def gla():
    return CanonLMForCausalLM(CanonLMConfig(**SIZES, mixers=["gla"], linear_num_heads=2, canon_set="AbC")).eval()


@pytest.fixture
def workdir(gla, tmp_path, monkeypatch):
    """A working directory with `release/one` in the release's format."""
    (tmp_path / "release" / "one").mkdir(parents=True)
    save_published(gla, tmp_path / "release" / "one", "hf")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def files(place):
    return {str(file.relative_to(place)) for file in place.rglob("*")}


def test_a_disk_that_fills_up_while_weights_are_written(workdir, assert_refused, monkeypatch):
    def fill(*args, **kwargs):  # safetensors raises no OSError
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("canonlm.models.published.files.save_file", fill)
    message = (
        "OUT: expected a folder that can be written (Error while serializing: I/O error: No space left on device "
        '(os error 28)), got "theirs"\n'
    )
    assert_refused(["convert", "release", "theirs", "--to", "hf"], message)


def test_into_our_format(gla, workdir, capsys):
    assert main(["convert", "release", "ours"]) == 0
    assert (
        capsys.readouterr().out == f"gla5{{num_heads=2}}+canon=AC, {gla.num_parameters():,} parameters, float32: ours\n"
    )
    model = CanonLMForCausalLM.from_pretrained("ours")
    assert_close(model.state_dict(), gla.state_dict(), atol=0, rtol=0)
    assert {path.name for path in workdir.iterdir()} == {"release", "ours"}


@pytest.mark.parametrize(
    ("to", "written"), [("hf", "config.json model.safetensors"), ("lingua", "params.json consolidated.pth")]
)
def test_to_our_format_and_back(gla, workdir, capsys, to, written):
    assert main(["convert", "release", "ours", "--variant", "one"]) == 0
    assert main(["convert", "ours", "below/theirs", "--to", to]) == 0
    assert capsys.readouterr().out.endswith("float32: below/theirs\n")
    assert files(workdir / "below") == {"theirs", *(f"theirs/{name}" for name in [*written.split(), MANIFEST])}
    assert len({path.stat().st_mode for path in (workdir / "below" / "theirs").iterdir()}) == 1
    assert_close(load_published("below/theirs").state_dict(), gla.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("to", ["canonlm", "hf"])
def test_a_model_that_differs_from_its_manifest(workdir, capsys, to):
    assert main(["convert", "release", "ours", "--variant", "one", "--to", to]) == 0
    path = Path("ours/model.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1  # a bit of a weight
    path.write_bytes(content)
    for command in (["convert", "ours", "again"], ["check", "ours"]):
        capsys.readouterr()
        assert main(command) == 2
        message = f"sha256 of model.safetensors differs; after a change on purpose, remove {MANIFEST}"
        assert capsys.readouterr().err == f"canonlm: ours/{MANIFEST}: {message}\n"
    Path("ours", MANIFEST).unlink()
    assert main(["convert", "ours", "again"]) == 0
    Path("again", MANIFEST).write_text("{")
    assert main(["convert", "again", "further"]) == 2
    assert f"again/{MANIFEST}: it cannot be read" in capsys.readouterr().err


def test_dtype(workdir, capsys):
    assert main(["convert", "release", "ours", "--dtype", "bfloat16"]) == 0
    assert "bfloat16" in capsys.readouterr().out
    assert CanonLMForCausalLM.from_pretrained("ours", dtype="auto").dtype == torch.bfloat16


def test_a_llama(workdir, capsys):
    llama = CanonLMForCausalLM(CanonLMConfig(**SIZES))
    llama.save_pretrained("llama")
    assert main(["convert", "llama", "theirs", "--to", "llama"]) == 0
    assert capsys.readouterr().out.startswith("llama, ")
    assert json.loads(Path("theirs/config.json").read_text())["model_type"] == "llama"


def test_the_hubs_options(workdir, capsys, monkeypatch):
    questions = []

    def snapshot_download(repo_id, allow_patterns, **kwargs):
        questions.append((repo_id, kwargs))
        return str(workdir / "release")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    options = ["--revision", "abc", "--token", "t", "--cache-dir", "c", "--variant", "one"]
    assert main(["convert", "org/name", "ours", *options]) == 0
    expected = {"revision": "abc", "token": "t", "cache_dir": Path("c"), "local_files_only": False}
    assert {repository for repository, _ in questions} == {"org/name"}
    assert all(kwargs == expected for _, kwargs in questions)


MISTAKES = [
    (["release", "release"], 'OUT: expected a folder that does not exist yet, got "release"'),
    (["release", "file"], 'OUT: expected a folder that does not exist yet, got "file"'),
    (["release", "file/below"], "OUT: expected a folder that can be written (Not a directory)"),
    (["release", "ours", "--to", "hff"], 'unknown target "hff". Did you mean "hf"?'),
    (["release", "ours", "--dtype", "bf16"], 'unknown dtype "bf16".'),
    (["release", "ours", "--to", "llama"], 'plain Llama: mixers: expected "attention", got "gla"'),
    (["release/two", "ours"], "release/two: expected config.json with"),
    (["release"], "OUT is missing: `canonlm convert --help` explains it"),
]


@pytest.mark.parametrize(("arguments", "start"), MISTAKES, ids=[" ".join(arguments) for arguments, _ in MISTAKES])
def test_one_line_and_nothing_written(workdir, assert_refused, arguments, start):
    (workdir / "file").write_text("mine")
    (workdir / "release" / "two").mkdir()
    assert_refused(["convert", *arguments], start)


def test_all_commands_of_the_docs_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(text, "docs", "exec"), {})
        else:
            assert all(main(shlex.split(line, comments=True)[1:]) == 0 for line in text.splitlines())
    original = load_published("release").state_dict()
    for folder in ("ours", "theirs", "theirs-lingua"):
        assert_close(load_published(folder).state_dict(), original, atol=0, rtol=0)
    assert load_published("ours-bf16").dtype == torch.bfloat16
