"""The page is written at the start, when a run ends, and otherwise not too often."""

from types import SimpleNamespace

import pytest

from canonlm.cli.live import PAGE_SECONDS, LivePage


@pytest.fixture
def written(monkeypatch):
    """The calls that would write a page: whether it was live, and the time."""
    calls = []
    monkeypatch.setattr("canonlm.cli.live.load_play", lambda folder: folder)
    monkeypatch.setattr("canonlm.report.page.write_page", lambda play, out, live: calls.append(live))
    return calls


def grid(*states):
    return [SimpleNamespace(state=state) for state in states]


def test_when_it_is_written(tmp_path, written):
    now = [0.0]
    page = LivePage(tmp_path, clock=lambda: now[0])
    page(grid("waiting", "waiting"))
    assert written == [True]
    now[0] = PAGE_SECONDS - 1
    page(grid("running", "waiting"))
    assert written == [True]
    page(grid("finished", "waiting"))
    assert written == [True, True]
    now[0] += PAGE_SECONDS
    page(grid("finished", "running"))
    assert written == [True, True, True]
    page(grid("finished", "failed"))
    assert written == [True, True, True, False]


def test_an_unwritable_page_does_not_stop_a_run(tmp_path):
    LivePage(tmp_path / "nothing there")(grid("running"))
    assert list(tmp_path.iterdir()) == []
