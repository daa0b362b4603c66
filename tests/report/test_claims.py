"""The ledger of claims: from rows of kept runs to verdicts, estimates and pages."""

import csv
import re
from pathlib import Path

import pytest
from reading import row_heads, visible_text

from canonlm.cli import main
from canonlm.experiments import grid, ledger, schema
from canonlm.experiments.claims import CAVEATS, claims, summary
from canonlm.report.claims_page import html, markdown


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Runs of llama and llama+canon on depo-micro: 15 and 75 of 100 questions of each slice, a little more by seed."""
    folder = tmp_path_factory.mktemp("kept")
    fig7 = schema.load("fig7")
    rows = []
    for arch, right in (("llama", 15), ("llama+canon", 75)):
        point = grid.Point("depo-micro", arch, None, None)
        tuning = grid.tuning_runs(fig7, point)
        fresh = [grid.fresh_run(fig7, point, 0.001, seed) for seed in range(5)]
        for run in [*tuning, *fresh]:
            best = run.config.train.optim.lr == 0.001
            correct = right + run.config.train.seed % 5 if best else 10
            base = {
                "run": run.name,
                "setting": "depo-micro",
                "arch": arch,
                "lr": "0.001",
                "machine": "a <b>machine</b>",
            }
            base |= {"seed": "0", "split": "test", "steps": "600", "loss": "1", "commit": "abcdef0123456789"}
            for step, count in ((300, 10), (600, correct)):
                slices = f"k=1 {count}/100; k=2 {count}/100"
                rows.append(dict.fromkeys(ledger.COLUMNS, "") | base | {"step": str(step), "slices": slices})
    with (folder / "depo-micro.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ledger.COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return folder


def test_the_caveat_of_frozen_canon_is_true():
    """The fresh seeds answer at most 7 of 256 complete lists correctly."""
    with (ledger.OWN_RESULTS / "copying-micro.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["arch"] == "llama+canon:frozen" and row["split"] == "test"]
    full = [int(re.search(r"first=all (\d+)/256", row["slices"])[1]) for row in rows if row["step"] == row["steps"]]
    assert (len(full), f"{max(full) / 256:.1%}") == (10, "2.7%")
    assert "2.7 %" in CAVEATS["C02"]


def test_the_docs_list_every_experiment():
    text = (Path(__file__).parents[2] / "docs/replicate.md").read_text()
    listed = dict(re.findall(r"^\| `(\w+)` \| .* \| (C[C\d, ]+|)\|$", text, re.MULTILINE))
    assert {name: set(re.findall(r"C\d+", claims)) for name, claims in listed.items()} == {
        name: set(schema.load(name).claims) for name in schema.names()
    }


@pytest.mark.slow
def test_kept_runs_decide_a_claim(kept):
    entries = {each.id: each for each in claims(kept)}
    depth = entries["C06"]
    assert (depth.state, depth.seeds, depth.runs) == ("supported", 5, (22, 22))
    [estimate] = depth.estimates
    assert estimate.value == pytest.approx(60)
    assert 50 < estimate.low < 60 < estimate.high < 70
    assert str(estimate).startswith("+60.0 [+")
    assert (depth.machines, depth.commits) == (("a <b>machine</b>",), ("abcdef0123456789",))
    assert entries["C10"].state == "untested"
    assert entries["C10"].reason == "no runs yet: canonlm replicate fig7 --scale micro"
    assert entries["C05"].state == "untested"


def test_parameters_are_counted(kept):
    """12 layers of width 768: A and C have 768 channels, B 3 x 768, D 2 x 2048, four taps each."""
    entry = next(each for each in claims(kept) if each.id == "C04")
    added = 4 * (768 + 3 * 768 + 768 + 2 * 2048)
    layer = 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    assert entry.estimates[0].value == pytest.approx(100 * added / layer)
    assert entry.state == "supported"


def test_published_claims_keep_their_confounder(kept):
    entry = next(each for each in claims(kept) if each.id == "C46")
    assert entry.state == "undecided"
    assert "rotary" in entry.reason


@pytest.mark.slow
def test_both_pages_have_every_claim_and_escape_markup(kept):
    entries = claims(kept)
    page, text = html(entries), markdown(entries)
    heads = row_heads(page)
    for entry in entries:
        assert entry.id in heads
        assert re.search(rf"^\| {entry.id} \|", text, re.MULTILINE)
    assert "a <b>machine" in visible_text(page)
    assert "<b>machine" not in page
    assert summary(entries) in text
    assert sum(map(int, re.findall(r"\d+", summary(entries))[1:])) == len(entries) == 51


def test_the_command(kept, capsys, tmp_path):
    assert main(["claims", "c06", "--runs", str(kept)]) == 0
    out = capsys.readouterr().out
    assert "C06  supported" in out
    assert "llama+canon - llama: +60.0 [" in out
    assert main(["claims", "--runs", str(kept), "--out", str(tmp_path / "claims.md")]) == 0
    assert (tmp_path / "claims.md").read_text().startswith("# What the paper claims")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["C99"], 'unknown claim "C99"'),
        (["--out", "claims.pdf"], "--out: expected a file that ends in .html or .md"),
        (["--runs", "nowhere"], "--runs: expected a folder with CSV files"),
        (["--scale", "tiny"], 'unknown scale "tiny"'),
    ],
)
def test_bad_arguments(arguments, message, capsys):
    assert main(["claims", *arguments]) == 2
    assert message in capsys.readouterr().err
