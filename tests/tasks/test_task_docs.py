"""The example on each task's page is what the code prints."""

import re
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "tasks"


@pytest.mark.parametrize("task", ["copying", "depo", "mano"])
def test_the_example_is_real(task, capsys):
    code, printed = re.findall(r"```(?:python)?\n(.*?)```", (PAGES / f"{task}.md").read_text(encoding="utf-8"), re.S)[
        :2
    ]
    exec(code, {})
    assert capsys.readouterr().out == printed
