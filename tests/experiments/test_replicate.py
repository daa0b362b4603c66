"""The command: its forecast, and one small experiment from nothing to its verdict."""

import json
import shutil
from pathlib import Path

import pytest

from canonlm import cli
from canonlm.data.prepare import prepare
from canonlm.experiments import grid, ledger, schema
from canonlm.experiments.replicate import chosen, estimate, seed_set_of
from canonlm.train.flops import GPUS

ROOT = Path(__file__).parents[2]
SETTINGS = """
copying-test:
  task: copying
  preset: tiny
  changes: {train: {steps: 20, eval_every: 10, eval_size: 32}}
  rates: [3.0e-3, 1.0e-2]
  looks: {2: 0.05}
"""
MINE = """
title: Mine
source: a test
micro:
  - {settings: [copying-test], arms: [llama, llama+canon], sizes: [1L16D2H]}
claims:
  C01:
    at: {micro: {setting: copying-test, size: 1L16D2H}}
    pairs: [{arm: llama+canon, against: llama, expect: higher, smallest: 0.1}]
    paper: "0 to 100 %"
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.setattr(schema, "SETTINGS", tmp_path / "settings.yaml")
    (tmp_path / "settings.yaml").write_text(SETTINGS)
    (tmp_path / "mine.yaml").write_text(MINE)
    return tmp_path / "mine.yaml"


def test_a_dry_run_counts_and_writes_nothing(mine, tmp_path, capsys):
    assert cli.main(["replicate", str(mine), "--dry-run", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "mine" in shown
    assert not (tmp_path / "out").exists()
    [result] = estimate(chosen(str(mine), "micro"), "micro", tmp_path / "out", "h100")
    tokens = 2 * (2 + 2) * 20 * 32 * 66  # architectures x (tuning and fresh runs) x steps x windows x tokens
    assert (result.cost.runs, result.done, result.cost.tokens) == (8, 0, tokens)
    seconds = result.cost.flops / (0.4 * 1e12 * GPUS["h100"].fp32)
    assert result.cost.hours == pytest.approx(seconds / 3600)


def test_a_dry_run_also_counts_rates_beyond_an_edge(tmp_path):
    """All of these runs are in the package; for some architectures, the best of three rates was the last one."""
    [experiment] = chosen(str(ROOT / "benchmarks" / "published.yaml"), "micro", only := ["mad-plain"])
    [result] = estimate([experiment], "micro", tmp_path, "h100", only, ledger.read(ledger.OWN_RESULTS))
    assert result.done == result.cost.runs > len(grid.first_look_runs(experiment, "micro", only))


def test_runs_without_a_claim_are_all_in_the_rows(tmp_path, capsys):
    rows = shutil.copytree(ledger.OWN_RESULTS, tmp_path / "rows", ignore=lambda _, files: {*files} - {"mad-plain.csv"})
    command = ["replicate", str(ROOT / "benchmarks" / "published.yaml"), "--only", "mad-plain", "--export", str(rows)]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    line = f"nothing is judged, as no claim is registered for these runs; all are in {rows}\n"
    assert capsys.readouterr().out == line


@pytest.mark.slow
def test_an_experiment_from_nothing_to_its_verdict(mine, tmp_path, capsys):
    out, rows = tmp_path / "out", tmp_path / "rows"
    command = ["replicate", str(mine), "--out", str(out), "--jobs", "2", "--export", str(rows)]
    assert cli.main(command) == 0
    first = capsys.readouterr().out
    assert first.count("finished") == 8
    assert "C01  undecided\nThe paper: 0 to 100 %\n  llama+canon - llama: " in first
    assert "Evidence: mine, micro scale; 2 seeds each; 8 runs" in first
    [registered] = (out / "experiments").glob("*.json")
    sha = schema.load(str(mine)).sha256
    assert json.loads(registered.read_text())["sha256"] == sha
    for run in (out / "runs").iterdir():
        assert json.loads((run / "experiment.json").read_text())["experiments"] == {"mine-micro": sha}
    assert len((rows / "copying-test.csv").read_text().splitlines()) == 1 + 8 * 2
    assert cli.main(command) == 0  # again: nothing is left to do, and the verdict is the same
    again = capsys.readouterr().out
    assert "started" not in again
    verdict = first.splitlines()[first.splitlines().index("C01  undecided") :]
    assert again.splitlines() == verdict
    elsewhere = ["replicate", str(mine), "--out", str(tmp_path / "elsewhere"), "--export", str(rows)]
    assert cli.main(elsewhere) == 0  # the rows alone are enough
    assert capsys.readouterr().out.splitlines() == verdict
    assert not (tmp_path / "elsewhere" / "runs").exists()
    [known] = estimate(chosen(str(mine), "micro"), "micro", tmp_path / "elsewhere", "h100", (), ledger.read(rows))
    assert known.done == known.cost.runs == 8


OF_TEXT = """
text-test:
  task: text
  preset: tiny
  changes:
    text: {sources: {text: {path: FOLDER}}}
    model: {num_hidden_layers: 1, hidden_size: 16, vocab_size: 258}
    data: {seq_len: 64}
    train: {steps: 2, batch_size: 2, eval_every: 1, eval_size: 2, eval_beyond: 32, optim: {warmup_steps: 1}}
  rates: [1.0e-3]
  looks: {2: 0.05}
  measure: loss
"""


@pytest.mark.slow
def test_an_experiment_on_text(mine, tmp_path, capsys):
    lines = [json.dumps({"text": f"Sentence {i} of a small text. " * 20}) for i in range(60)]
    (tmp_path / "raw.jsonl").write_text("\n".join(lines))
    prepare(tmp_path / "text", [str(tmp_path / "raw.jsonl")], tokenizer="bytes", validation=0.2, workers=1)
    schema.SETTINGS.write_text(OF_TEXT.replace("FOLDER", str(tmp_path / "text")))
    mine.write_text(
        MINE.replace("copying-test", "text-test").replace(", sizes: [1L16D2H]", "").replace(", size: 1L16D2H", "")
    )
    command = [
        "replicate",
        str(mine),
        "--out",
        str(tmp_path / "out"),
        "--jobs",
        "2",
        "--export",
        str(tmp_path / "rows"),
    ]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert shown.count("finished") == 2 * (1 + 2)
    assert "nats per token" in shown
    rows = (tmp_path / "rows" / "text-test.csv").read_text().splitlines()
    assert len(rows) == 1 + 6 * 2
    assert all("loss_beyond" in row for row in rows[1:])
    assert cli.main(command) == 0
    assert "started" not in capsys.readouterr().out


def test_a_new_seed_set_has_no_runs(tmp_path):
    """Our own results have runs of the sets 0 and 1."""
    seeds = {run.seed // 1000 for run in ledger.read(ledger.OWN_RESULTS).values()}
    assert seeds == {0, 1}
    assert seed_set_of("new", tmp_path) == 2
    (tmp_path / "runs" / "depo-llama-lr0.001-seed2103-0123456789ab").mkdir(parents=True)
    (tmp_path / "runs" / "notes").mkdir()
    assert seed_set_of("new", tmp_path) == 3
    assert seed_set_of("17", tmp_path) == 17


@pytest.mark.parametrize("text", ["-1", "1.5", "old", "1000001", ""])
def test_another_seed_set_is_refused(text, tmp_path, capsys):
    assert cli.main(["replicate", "fig7", "--seed-set", text, "--out", str(tmp_path)]) == 2
    message = f'--seed-set: expected an integer from 0 to 1000000, or new, got "{text}"'
    assert message in capsys.readouterr().err
