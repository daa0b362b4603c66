"""The notebooks of docs/notebooks run, and at full size their results match their text."""

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
    assert "llama+canon" in Path("figure.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_printed_numbers_support_the_text(tmp_path, monkeypatch, capsys):
    run("canon_in_your_model.py", tmp_path, monkeypatch)
    printed = capsys.readouterr().out
    without, attention, llama = (float(number) for number in re.findall(r"([\d.]+)% of the answers right", printed))
    assert without < 30 < 60 < attention
    assert llama > 95
    result = run("your_task_in_your_loop.py", tmp_path, monkeypatch)
    assert all(result["right"][n] / result["asked"][n] > 0.9 for n in (2, 4, 8))
