"""Links, FIFOs and guessed names in somebody else's folder: nothing is written outside it, and nothing waits."""

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from abuse.bases import ONE_STEP
from transformers import LlamaConfig, LlamaForCausalLM

import canonlm
from canonlm.cli import main
from canonlm.core import files
from canonlm.core.untrusted import is_inside, path_inside
from canonlm.data.tokenizers import load
from canonlm.suites import load_model


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    return tmp_path / "mine"


def test_a_place_is_where_links_lead(tmp_path, mine, monkeypatch):
    """`out/d/../mine/file` is not tmp_path's: d leads to a deep folder, whose parent is another one."""
    (tmp_path / "foreign" / "a" / "b").mkdir(parents=True)
    (tmp_path / "d").symlink_to("foreign/a/b")
    (tmp_path / "foreign" / "a" / "mine").mkdir()
    (tmp_path / "foreign" / "a" / "mine" / "file").touch()
    assert is_inside(mine / "file", mine)
    assert not is_inside(tmp_path / "d" / ".." / "mine" / "file", mine)  # as text it is mine/file
    assert not is_inside(mine / "missing", mine)
    (tmp_path / "loop").symlink_to("loop")
    assert not is_inside(tmp_path / "loop" / ".." / "mine" / "file", mine)
    deep = tmp_path / "deep"  # whose absolute path is too long to be resolved
    deep.mkdir()
    monkeypatch.chdir(deep)
    for _ in range(25):
        os.mkdir("x" * 200)
        os.chdir("x" * 200)
    os.symlink("y" * 200, "d")
    assert not is_inside(files.Path(f"d/{'../' * 30}{mine}/file"), mine)


def test_writers_do_not_follow_links(tmp_path, mine):
    folder = tmp_path / "foreign"
    folder.mkdir()
    for name in ("text", "log", "new"):
        (folder / name).symlink_to(mine / "file")
    files.write_text(folder / "text", "theirs")  # replaces the link
    with pytest.raises(OSError, match="symbolic links"):
        files.append(folder / "log")
    with pytest.raises(FileExistsError):
        files.create(folder / "new")
    with pytest.raises(ValueError, match="got a link"):
        files.lock(folder / "new")
    assert (mine / "file").read_text() == "mine"
    assert (folder / "text").read_text() == "theirs"
    assert not (folder / "text").is_symlink()


def test_linked_sub_folders(tmp_path, mine, monkeypatch):
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / "evals").symlink_to(mine)
    with pytest.raises(ValueError, match=r"foreign/evals: expected a folder, got a link \(.*CANONLM_DISKS"):
        files.make_folder(folder, "evals", "step-1")
    with pytest.raises(ValueError, match="got a link out of it, evals/file"):
        path_inside(folder, "evals/file", "place")
    monkeypatch.setenv("CANONLM_DISKS", f"/nowhere:{mine}")
    assert files.make_folder(folder, "evals", "step-1").resolve() == mine / "step-1"
    assert path_inside(folder, "evals/file", "place").read_text() == "mine"


def test_temporary_files_of_killed_processes_are_removed(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from canonlm.core.files import complete_file, temporary_folder\n"
        "with complete_file(Path(sys.argv[1], 'file')), temporary_folder(Path(sys.argv[1], 'file')):\n"
        "    print('begun', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        files.write_text(tmp_path / "file", "x")
        files.remove_leftovers(tmp_path)
        assert len(list(tmp_path.glob(".file.tmp-*"))) == 2  # in use
        process.send_signal(signal.SIGKILL)
    files.write_text(tmp_path / "file", "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_leftovers_that_are_links(tmp_path, mine):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".x.tmp-1").symlink_to(mine)
    (tmp_path / "run" / ".y.tmp-1").symlink_to(mine / "file")
    os.mkfifo(tmp_path / "run" / ".z.tmp-1")
    files.remove_leftovers(tmp_path / "run")
    assert not list((tmp_path / "run").iterdir())
    assert (mine / "file").read_text() == "mine"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder of one run."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "run.yaml").write_text(ONE_STEP)
    assert main(["train", str(folder / "run.yaml"), "--out", str(folder / "runs" / "a")]) == 0
    return folder


@pytest.fixture
def foreign(trained, tmp_path, monkeypatch):
    """A copy of it, in which tests put links."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "foreign")
    return tmp_path / "foreign"


LINKED_FOLDERS = {
    "runs/a/checkpoints": ["train", "foreign/run.yaml", "--out", "foreign/runs/a"],
    "runs/a/evals": ["eval", "foreign/runs/a", "--suite", "playground", "n=2"],
    "runs/a/evals/step-00000001": ["eval", "foreign/runs/a", "--suite", "playground", "n=2"],
    "runs/a/evals/step-00000001/answers": ["eval", "foreign/runs/a", "--suite", "playground", "n=2"],
    "leases": ["work", "foreign"],
    "experiments": ["replicate", "fig7", "--out", "foreign", "--only", "mano-micro"],
    "out/work": ["data", "prepare", "foreign/out", "--input", "foreign/run.yaml", "--tokenizer", "bytes"],
    "x.parquet.parts": ["data", "dump", "copying", "--n", "2", "--out", "foreign/x.parquet"],
}


@pytest.mark.parametrize("link", LINKED_FOLDERS)
def test_commands_do_not_write_through_linked_folders(link, foreign, mine, capsys):
    if (foreign / link).exists():
        shutil.rmtree(foreign / link)
    (foreign / link).parent.mkdir(parents=True, exist_ok=True)
    (foreign / link).symlink_to(mine)
    (foreign / "runs" / "a" / "result.json").unlink()
    assert main(LINKED_FOLDERS[link]) == 2
    error = capsys.readouterr().err
    assert "link" in error
    assert error.count("\n") == 1
    assert [path.name for path in mine.iterdir()] == ["file"]


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "metrics.discarded.jsonl"])
def test_a_resumed_run_does_not_write_through_links(name, foreign, mine, capsys):
    """A lock would empty your file, and rows would be added to it."""
    run = foreign / "runs" / "a"
    (run / "result.json").unlink()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 9}\n')  # after the checkpoint, so it is discarded
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(mine / "file")
    assert main(["train", "foreign/run.yaml", "--out", "foreign/runs/a"]) == 2
    assert name in capsys.readouterr().err
    assert (mine / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.jsonl", "result.json", "env.json", "config.yaml", "../b"])
def test_reports_do_not_read_through_links(name, foreign, trained, capsys):
    secret = foreign.parent / "secret"
    shutil.copytree(trained / "runs" / "a", secret)
    for file in secret.glob("*.*"):
        file.write_text(file.read_text().replace("llama", "llama+canon").replace('"correct"', ' "correct"'))
    place = foreign / "runs" / "a" / name
    if place.is_file():
        place.unlink()
    place.symlink_to(secret if name == "../b" else secret / name)
    assert main(["report", "foreign", "--table"]) in (0, 2)
    output = capsys.readouterr()
    assert "llama+canon" not in output.out + output.err
    main(["work", "foreign", "--dry-run"])
    assert "llama+canon" not in capsys.readouterr().out


@pytest.fixture
def words(mine):
    """A folder with a tokenizer."""
    folder = mine.parent / "words"
    load_model.as_in_training(*load("bytes")).save_pretrained(folder)
    (folder / "additional_chat_templates").mkdir()
    return folder


OF_TOKENIZERS = [
    *("chat_template.jinja", "additional_chat_templates/x.jinja", "tokenizer.4.0.0.json", "spiece.model", "merges.txt"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "bpe.codes", "tokenizer.model.v3"),
]


@pytest.mark.parametrize("name", OF_TOKENIZERS)
def test_tokenizers_are_not_read_through_links(name, words, mine):
    (words / name).unlink(missing_ok=True)
    (words / name).symlink_to(mine / "file")
    if name == "tokenizer.json":
        with pytest.raises(ValueError, match=f"a link out of it, {name}"):
            load(words)
    for folder in (words, Path(os.path.relpath(words))):
        with pytest.raises(ValueError, match=f"a link out of it, {name}"):
            load_model._saved_tokenizer(folder, False)


@pytest.mark.parametrize(
    "settings",
    [
        {"tokenizer_class": "BertTokenizer", "vocab": "{file}"},
        {"tokenizer_class": "GPT2Tokenizer", "vocab": "{file}", "merges": "{file}"},
        {"tokenizer_class": "BertTokenizer", "init_inputs": ["{file}"]},
        {"tokenizer_class": "CohereTokenizer", "vocab_file": "{file}"},
        {"fast_tokenizer_files": ["../mine/file"]},
    ],
)
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_settings_of_tokenizers_name_no_file_outside(name, settings, words, mine):
    text = json.dumps(settings).replace("{file}", str(mine / "file"))
    (words / name).write_text(text)
    with pytest.raises(ValueError, match=rf": expected (no file outside|the name of a file in) {words}, got"):
        load_model._saved_tokenizer(words, False)


def test_canonize_copies_no_file_from_outside(words, mine, capsys):
    LlamaForCausalLM(
        LlamaConfig(vocab_size=258, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(words)
    (words / "chat_template.jinja").symlink_to(mine / "file")
    assert main(["canonize", str(words), str(words.parent / "out"), "--sites", "A"]) == 2
    assert "got a link out of it, chat_template.jinja" in capsys.readouterr().err
    assert not (words.parent / "out").exists()


WRITERS = {
    *("write_text", "write_bytes", "mkdir", "makedirs", "touch", "rename"),
    *("symlink_to", "hardlink_to", "symlink", "link"),
    *("save_file", "save_pretrained", "write_html", "write_image", "to_csv", "write_parquet", "truncate", "copymode"),
    *("copy2", "copytree", "copyfile", "move", "mkdtemp", "mkstemp", "NamedTemporaryFile", "export_chrome_trace"),
    *("SummaryWriter", "TokenizedFile", "FileHandler", "savez", "tofile", "memmap", "OSFile", "FileLock"),
}
ALLOWED = {
    # What a user calls with a folder of their own; commands call it with a new folder (`write_folder`).
    "canonize/canonized_model.py": {"save_pretrained", "write_text", "shutil.copy"},
    "core/bundle.py": {"mkdir", "write_text"},
    "models/modeling.py": {"save_pretrained"},
    "models/published/files.py": {"write_text", "save_file", "torch.save", "save_pretrained"},
    # In a new folder or file of `canonlm.core.files`, or in one where links are refused.
    "canonize/check/cases.py": {"save_pretrained"},
    "cli/canonize.py": {"save_pretrained"},
    "cli/export.py": {"save_pretrained"},
    "cli/options.py": {"copymode"},
    "data/dump.py": {"replace", "OSFile"},
    "data/pipeline.py": {"TokenizedFile", "replace", "write_bytes"},
    "launch/slurm.py": {"mkdir", "copytree"},
    "runs/answers.py": {"truncate"},
    "runs/leases.py": {"os.link"},
    "suites/harness/run.py": {"save_pretrained"},
    "train/profile.py": {"export_chrome_trace", "replace"},
    "train/trackers.py": {"SummaryWriter"},
    # The user's own cache, and a device.
    "cli/status.py": {"os.open"},
    "launch/fork_server.py": {"os.open"},
    "ops/kernels/launches.py": {"mkdir", "write_text"},
    "ops/selftest.py": {"NamedTemporaryFile", "os.replace"},
    "core/user_folders.py": {"mkdir"},
}


def writing_calls(source):
    """The calls of a module that write a file by its name, as `write_text` or `os.replace`."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        owner = getattr(getattr(node.func, "value", None), "id", "")
        texts = [
            each.value for each in [*node.args, *(k.value for k in node.keywords)] if isinstance(each, ast.Constant)
        ]
        if name == "open" and (
            owner == "os" or any(str(text) in ("r+", "rb+") or str(text)[:1] in "wxa" for text in texts)
        ):
            yield f"{owner}.open" if owner else "open"
        elif owner in ("os", "shutil", "torch") and name in ("replace", "copy", "save", "link"):
            yield f"{owner}.{name}"
        elif name in ("replace", "rename") and isinstance(node.func, ast.Attribute):
            if len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Dict):
                yield name
        elif name in WRITERS and (isinstance(node.func, ast.Attribute) or name not in ("write_text", "write_bytes")):
            yield name


def test_files_are_written_by_one_module():
    root = files.Path(canonlm.__file__).parent
    calls_by_file = {str(path.relative_to(root)): set(writing_calls(path.read_text())) for path in root.rglob("*.py")}
    homes = ("core/files.py", "core/untrusted.py")
    assert {name: calls for name, calls in calls_by_file.items() if calls and name not in homes} == ALLOWED
