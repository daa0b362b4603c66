"""Each kernel reads its inputs once and writes its results once, except at the edges of tiles and for weights."""

import importlib.util
from pathlib import Path

FILE = Path(__file__).parents[2] / "benchmarks/kernels_traffic.py"
SPEC = importlib.util.spec_from_file_location("kernels_traffic", FILE)
traffic = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(traffic)


def test_traffic_is_near_the_minimum(monkeypatch):
    monkeypatch.setattr(traffic, "TIME", 256)
    for row in traffic.table():
        assert 1 <= row["unique"] <= 1.03, row
        assert 1 <= row["issued"] <= 1.06, row
        assert row["partial_sums"] <= 0.026, row


def test_tiles_of_eight_tokens_issue_much_more(monkeypatch):
    """The counts can detect a problem."""
    monkeypatch.setattr(traffic, "TOKENS", 8)
    monkeypatch.setattr(traffic, "TIME", 64)
    kernels = traffic.kernels
    monkeypatch.setattr(traffic, "kernels", lambda: {"conv forward": kernels()["conv forward"]})
    [row] = traffic.table()
    assert row["issued"] > 1.4
