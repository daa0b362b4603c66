"""The commands and code in README and docs work."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.cli import app, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list:
    return [
        pytest.param(
            text, id=f"{page.relative_to(ROOT)}:{page.read_text().count(chr(10), 0, page.read_text().index(text))}"
        )
        for page in PAGES
        for matches, text in FENCE.findall(page.read_text())
        if matches == language
    ]


def files_of(page: Path) -> list[str]:
    """The blocks of a page that are a complete `mine.py`."""
    return [text for _, text in FENCE.findall(page.read_text()) if text.startswith("# mine.py\n")]


def commands() -> list[str]:
    """The commands in blocks without a language; those in `sh` blocks take long, or need a cluster."""
    lines = [line for block in blocks("") for line in str(block.values[0]).splitlines()]
    return sorted({line.partition("#")[0].strip() for line in lines if line.startswith("canonlm ")})


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs", "exec"), {})  # it must not raise


# Other tests run these commands and look at what they print.
TESTED_ELSEWHERE = ("canonlm doctor", "canonlm recipes list", "canonlm check", "canonlm plan")


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.slow] if c.startswith(TESTED_ELSEWHERE) else []) for c in commands()],
)
def test_commands_are_accepted(command, tmp_path, monkeypatch):
    """Everything runs but the training itself."""
    questions = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("\n".join(code for page in PAGES for code in files_of(page)))
    monkeypatch.setattr("canonlm.cli.progress.follow", lambda runs, *_: questions.extend(runs) or [])
    monkeypatch.setattr("canonlm.cli.report.show", lambda *arguments, **options: None)
    arguments = shlex.split(command)[1:]
    if any("…" in argument for argument in arguments):
        pytest.skip("a pattern, not a command")
    assert main(arguments) == 0
    assert bool(questions) == (arguments[0] == "play")


def long_commands() -> list[str]:
    """The commands in `sh` blocks."""
    lines = [line for block in blocks("sh") for line in str(block.values[0]).replace("\\\n", " ").splitlines()]
    return sorted({line for line in lines if line.startswith("canonlm ")})


@pytest.mark.every(2)
@pytest.mark.parametrize("line", long_commands())
def test_slow_commands_are_parsed(line):
    """Nothing is run: the options and arguments exist."""
    command, words = get_command(app), shlex.split(line, comments=True)[1:]
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    command.make_context("canonlm", words)  # it must not raise


SHORTER = {
    "canonlm train debug": ["train.steps=2", "train.eval_size=2", "train.batch_size=2"],
    "canonlm generate runs/debug": ["--max-tokens", "4"],
    "canonlm eval org/model": ["n=2", "people=2", "--tokenizer", "bytes"],
}


@pytest.mark.slow
def test_the_readmes_commands_for_text_run(tmp_path, monkeypatch, capsys):
    """In their order. Training is shorter, and a small model in a folder replaces one of the Hub."""
    monkeypatch.chdir(tmp_path)
    sizes = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    CanonLMForCausalLM(CanonLMConfig(**sizes, max_position_embeddings=8192)).save_pretrained("org/model")
    [block] = [text for language, text in FENCE.findall((ROOT / "README.md").read_text()) if "canonlm train" in text]
    for line in block.splitlines():
        [shorter] = [more for start, more in SHORTER.items() if line.startswith(start)] or [[]]
        assert main([*shlex.split(line, comments=True)[1:], *shorter]) == 0, line
        assert capsys.readouterr().out.strip(), line
    assert (tmp_path / "runs" / "debug" / "result.json").exists()


@pytest.mark.every(4)
@pytest.mark.parametrize("line", [*commands(), *long_commands()])
def test_shells_do_not_change_the_commands(line):
    """Without quotes, zsh refuses brackets, and bash expands braces with a comma."""
    assert not re.search(r"\[|\{.*,", re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" #")[0]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if not link.startswith("http") and not (page.parent / link).exists()]
    assert not missing


def test_make_has_the_documented_targets():
    named = set(re.findall(r"^\$? ?make ([\w-]+)", "\n".join(page.read_text() for page in PAGES), re.MULTILINE))
    assert {"demo", "test"} <= named
    for target in named:
        plan = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert plan.returncode == 0, plan.stderr


@pytest.mark.slow
@pytest.mark.parametrize("page", ["add-a-mixer", "foreign-models"])
def test_models_in_the_docs_train(page, tmp_path, monkeypatch):
    """The model trains beside llama, on the same data, and is opened again in a folder without its file."""
    [code] = files_of(ROOT / f"docs/{page}.md")
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    name = re.findall(r"^class (\w+)", code, re.MULTILINE)[-1]
    short = {"steps": 3, "eval_every": 3, "eval_size": 8, "checkpoint_every": 2, "batch_size": 4}
    overrides = [f"train.{key}={value}" for key, value in short.items()]
    assert main(["play", "depo", "--arch", f"llama,mine.py:{name}", "--out", "out", *overrides]) == 0
    [run] = (tmp_path / "out" / "runs").glob(f"*{name}*")
    assert (run / "code" / "mine.py").read_text() == code
    monkeypatch.chdir(run.parent)
    eval_command = ["eval", str(run), "--suite", "playground", "n=8", "--out", str(tmp_path / "asked")]
    assert main(eval_command) == 2  # a run folder is only data
    assert main([*eval_command, "--trust-remote-code"]) == 0
