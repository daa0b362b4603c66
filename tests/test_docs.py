"""The commands and code in README and docs work."""

import re
import shlex
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from canonlm.cli import main

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


def long_commands(page: Path) -> list[str]:
    """The commands in `sh` blocks."""
    blocks = [text.replace("\\\n", " ") for language, text in FENCE.findall(page.read_text()) if language == "sh"]
    return [line for block in blocks for line in block.splitlines() if line.startswith("canonlm ")]


def commands() -> list[str]:
    """The commands in blocks without a language. Those in `sh` blocks take longer or depend on each other; see
    test_docs_commands.py."""
    lines = [line for block in blocks("") for line in str(block.values[0]).splitlines()]
    return sorted({line.partition("#")[0].strip() for line in lines if line.startswith("canonlm ")})


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs", "exec"), {})  # it must not raise


# Other tests run these two commands and look at what they print.
TESTED_ELSEWHERE = {"canonlm doctor", "canonlm recipes list"}
LONG = ("canonlm check", "canonlm plan")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(c, marks=[pytest.mark.slow] if c.startswith(LONG) else [])
        for c in commands()
        if c not in TESTED_ELSEWHERE
    ],
)
def test_commands_are_accepted(command, tmp_path, monkeypatch):
    """Everything runs but the training itself."""
    questions = []
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("\n".join(code for page in PAGES for code in files_of(page)))
    monkeypatch.setattr("canonlm.cli.live.follow_grid", lambda runs, *_: questions.extend(runs) or [])
    monkeypatch.setattr("canonlm.cli.report.show", lambda *arguments, **options: None)
    arguments = shlex.split(command)[1:]
    if any("…" in argument for argument in arguments):
        pytest.skip("a pattern, not a command")
    assert main(arguments) == 0
    assert bool(questions) == (arguments[0] == "play")


def test_the_notice_has_every_file_that_is_not_code():
    listed = subprocess.run(["git", "ls-files", "src/canonlm"], cwd=ROOT, capture_output=True, text=True, check=True)
    patterns = re.findall(r"^\S+/\S+(?:, \S+/\S+)*$", (ROOT / "NOTICE").read_text(), re.MULTILINE)
    patterns = [pattern for line in patterns for pattern in line.split(", ")]
    files = [Path(path).relative_to("src/canonlm") for path in listed.stdout.splitlines()]
    data = {file for file in files if file.suffix not in ("", ".py", ".md", ".typed")}
    covered = {pattern: {file for file in data if fnmatch(str(file), pattern)} for pattern in patterns}
    assert all(covered.values()), covered
    assert set.union(*covered.values()) == data
    assert (ROOT / "src/canonlm/LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_shells_do_not_change_the_commands():
    """Without quotes, zsh refuses brackets, and bash expands braces with a comma."""
    for line in [*commands(), *(line for page in PAGES for line in long_commands(page))]:
        assert not re.search(r"\[|\{.*,", re.sub(r"'[^']*'|\"[^\"]*\"", "", line.partition(" #")[0])), line


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
