"""The notebooks of docs/notebooks run, and at full size their results match their text."""

import json
import re
from pathlib import Path

import polars as pl
import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"


def run(name, tmp_path, monkeypatch, **parameters):
    """Run a notebook, with `parameters` in place of its own; returns its variables."""
    source = (NOTEBOOKS / name).read_text(encoding="utf-8")
    for key, value in parameters.items():
        source, replaced = re.subn(rf"^{key} = \d+$", f"{key} = {value}", source, flags=re.MULTILINE)
        assert replaced == 1
    monkeypatch.chdir(tmp_path)
    variables = {"__name__": "__main__"}
    exec(compile(source, name, "exec"), variables)
    return variables


@pytest.mark.parametrize("script", sorted(NOTEBOOKS.glob("*.py")), ids=lambda script: script.stem)
def test_a_notebook_with_outputs_has_the_cells_of_its_script(script):
    """Written back as a script. If it differs: `make notebooks`."""
    notebook = json.loads(script.with_suffix(".ipynb").read_text(encoding="utf-8"))
    parts = []
    for cell in notebook["cells"]:
        text = cell["source"]
        if cell["cell_type"] == "markdown":
            text = "\n".join(f"# {line}".rstrip() for line in text.split("\n"))
            parts.append(f"# %% [markdown]\n{text}\n")
        else:
            tags = "".join(f' tags=["{tag}"]' for tag in cell["metadata"].get("tags", []))
            parts.append(f"# %%{tags}\n{text}\n")
    written = script.read_text(encoding="utf-8")
    one_blank_line = re.sub(r"\n{3,}# %%", "\n\n# %%", written[written.index("# %%") :])
    assert "\n".join(parts) == one_blank_line
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert sum(bool(cell["outputs"]) for cell in code) >= 2


def test_canon_in_your_model(tmp_path, monkeypatch):
    result = run("canon_in_your_model.py", tmp_path, monkeypatch, STEPS=1)
    assert result["outcome"].state == "passed"
    assert (tmp_path / "canonized" / "model.safetensors").is_file()


def test_your_task_in_your_loop(tmp_path, monkeypatch):
    result = run("your_task_in_your_loop.py", tmp_path, monkeypatch, STEPS=1)
    assert sorted(result["asked"]) == [2, 4, 8]
    assert sum(result["asked"].values()) - sum(result["right"].values()) == len(result["mistakes"]) > 0


@pytest.mark.slow
def test_runs_to_a_figure(tmp_path, monkeypatch):
    run("runs_to_a_figure.py", tmp_path, monkeypatch, STEPS=10, SEEDS=2)
    points = pl.read_csv("figure.csv")
    assert points.select("arch", "seed").unique().sort("arch", "seed").rows() == [
        (arch, seed) for arch in ("llama", "llama+canon") for seed in (0, 1)
    ]
    assert Path("figure.pdf").read_bytes().startswith(b"%PDF-")


@pytest.mark.slow
def test_printed_numbers_support_the_text(tmp_path, monkeypatch, capsys):
    run("canon_in_your_model.py", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    without, attention, llama = (float(number) for number in re.findall(r"([\d.]+)% of the answers right", printed))
    assert without < 30 < 60 < attention
    assert llama > 95
    result = run("your_task_in_your_loop.py", tmp_path, monkeypatch)
    assert all(result["right"][n] / result["asked"][n] > 0.9 for n in (2, 4, 8))
