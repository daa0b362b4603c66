"""Runs the scripts of docs/notebooks and writes each beside itself as NAME.ipynb, with what its cells print and draw.

    python .ci/notebooks.py [NAME …]     two minutes on one core; `make notebooks`

It needs no Jupyter: a cell runs in this process, and its last expression is shown if it is a figure of matplotlib.
tests/test_notebooks.py compares the cells with the scripts.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from pathlib import Path

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
MARKER = re.compile(r"^# %%(.*)\n", re.MULTILINE)


def cells_of(script: str) -> list[dict]:
    """The cells of a script in jupytext's percent format, without outputs."""
    cells = []
    _, *parts = MARKER.split(script)
    for number, (kind, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        cell = {"id": f"cell-{number}", "metadata": {}, "source": text.strip("\n")}
        if "[markdown]" in kind:
            cell |= {"cell_type": "markdown", "source": re.sub(r"^# ?", "", cell["source"], flags=re.MULTILINE)}
        else:
            cell |= {"cell_type": "code", "execution_count": None, "outputs": []}
            cell["metadata"] = {"tags": json.loads(kind.partition("tags=")[2])} if "tags=" in kind else {}
        cells.append(cell)
    return cells


def run(cells: list[dict]) -> None:
    """Run the code cells one after the other, and keep what each prints and draws."""
    names: dict = {"__name__": "__main__"}
    for count, cell in enumerate((cell for cell in cells if cell["cell_type"] == "code"), 1):
        body = ast.parse(cell["source"]).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(ast.Module(body, []), f"cell {count}", "exec"), names)
            value = last and eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
        cell["execution_count"] = count
        if printed.getvalue():
            cell["outputs"].append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
        if hasattr(value, "savefig"):
            value.savefig(picture := io.BytesIO(), format="png", dpi=100)
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            cell["outputs"].append({"output_type": "display_data", "metadata": {}, "data": data})


def main(names: list[str]) -> None:
    for script in sorted(NOTEBOOKS.glob("*.py")):
        if names and script.stem not in names:
            continue
        cells = cells_of(script.read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            run(cells)
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        script.with_suffix(".ipynb").write_text(text, encoding="utf-8")
        print(f"{script.with_suffix('.ipynb')}: {len(text) / 1000:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", "100")
    main(sys.argv[1:])
