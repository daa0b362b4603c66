"""The task of docs/add-a-task.md, as one function and as a class."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "add-a-task.md").read_text(encoding="utf-8")
FUNCTION, CLASS = re.findall(r"```py\n(.*?)```", PAGE, re.S)[:2]
