"""The examples on each task's page are what the code prints, and the numbers are what it computes."""

import re
from pathlib import Path

import pytest

from canonlm import tasks

DOCS = Path(__file__).parents[2] / "docs"
PAGES = DOCS / "tasks"


@pytest.mark.parametrize("task", sorted(tasks.names()))
def test_the_examples_are_real(task, capsys):
    page = (PAGES / f"{task}.md").read_text(encoding="utf-8")
    examples = re.findall(r"```python\n(.*?)```\n```\n(.*?)```", page, re.S)
    silent = {"lano": 2}.get(task, 0)  # blocks that print nothing; tests/test_docs.py runs them
    assert len(examples) == page.count("```python") - silent > 0
    for code, printed in examples:
        exec(code, {})
        assert capsys.readouterr().out == printed


def test_chance_in_the_docs():
    text = (PAGES / "brevo.md").read_text(encoding="utf-8").replace("\n", " ")
    (guesses,) = re.findall(r"in ([\d.]+) % of the test samples of `(.*?)` and ([\d.]+) % of `(.*?)`", text)
    for answer, difficulty in zip(guesses[::2], guesses[1::2], strict=True):
        task = tasks.get("brevo", difficulty=difficulty)
        assert f"{task.chance(task.slices()[0]):.2%}" == f"{answer}%"
    text = (PAGES / "mqar.md").read_text(encoding="utf-8")
    assert f"{tasks.get('mqar').chance({'pairs': 16}):.1%}".replace("%", " %") + " for 16 pairs" in text


def test_the_task_that_the_docs_build_is_the_one_that_runs():
    source = (Path(tasks.__file__).parent / "mqar.py").read_text(encoding="utf-8")
    assert f"```py\n{source}```" in (DOCS / "add-a-task.md").read_text(encoding="utf-8")
