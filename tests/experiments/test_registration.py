"""Registered comparisons on the paper's own numbers."""

import pytest

from canonlm.cli import main
from canonlm.experiments import registration, replicate, schema
from canonlm.experiments.published import table

MINE = """
title: Mine
source: a test
figure: F28
micro:
  - {settings: [depo-micro, lano-micro], arms: ["llama+canon=B:nores", llama+canon=B]}
claims:
  C24:
    at: {micro: {setting: SETTING}}
    pairs: [{arm: "llama+canon=B:nores", against: llama+canon=B, expect: lower, smallest: 0.05}]
    paper: none
"""


def test_the_papers_numbers_pass_every_registration():
    checks = registration.all_checks()
    assert not [str(each) for each in checks if each.fails]
    assert sum(each.cells > 0 for each in checks) > 60


def test_cells_are_counted_one_by_one():
    """Mano of Llama with and without Canon layers: three difficulties at four sizes, as the table has them."""
    rows = [row for row in table("grids").iter_rows(named=True) if row["task"] == "Mano"]
    shares = {
        (row["variant"], row["difficulty"], row["size"]): row["value"] for row in rows if row["arch"] == "Llama(RoPE)"
    }
    gaps = [
        value - shares["original", *cell] for (variant, *cell), value in shares.items() if variant == "Canon-ABCD(res)"
    ]
    [check] = [
        each for each in registration.checks(schema.load("fig7")) if (each.claim, each.scale) == ("C13", "paper")
    ]
    smallest = 100 * check.pair.smallest
    assert (check.passed, check.cells) == (sum(gap >= smallest for gap in gaps), len(gaps)) == (12, 12)


@pytest.fixture
def mine(tmp_path):
    def path(setting):
        (tmp_path / "mine.yaml").write_text(MINE.replace("SETTING", setting))
        return str(tmp_path / "mine.yaml")

    return path


def test_a_test_that_the_papers_numbers_fail_is_refused(mine, capsys):
    """Without its residual connection, Canon-B is better on Depo and worse on Lano."""
    assert replicate.chosen(mine("lano-micro"), "micro")
    message = (
        "claims.C24.pairs: expected a test that the paper's own numbers pass, got C24 at micro scale, .* 12 of the"
    )
    with pytest.raises(ValueError, match=message):
        replicate.chosen(mine("depo-micro"), "micro")
    assert main(["replicate", mine("depo-micro"), "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_command(capsys):
    assert main(["claims", "--check-registration"]) == 0
    assert "12 of 12" in capsys.readouterr().out
