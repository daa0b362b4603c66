"""A grid of runs on a terminal, in a log and on its page, and one line for an evaluation of any task."""

import io
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from canonlm.cli.live import MAX_PAGE_SHARE, PAGE_SECONDS, GridLines, LivePage, grid_table, short_name
from canonlm.cli.play import run_all
from canonlm.launch.grid import PlannedRun
from canonlm.launch.plan import START_SECONDS
from canonlm.launch.play import Progress
from canonlm.launch.play import grid_time_left as seconds_left
from canonlm.report.format import in_words
from canonlm.runs.identity import run_name
from canonlm.runs.rows import TrainRow, evaluation
from canonlm.runs.task_info import TaskInfo
from canonlm.train.config import resolve

SETTINGS = {
    "task": {"name": "depo", "N": 20, "K": 2},
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 200, "loss_on": "answer"},
}
TRAIN = {"steps": 100, "batch_size": 5, "eval_every": 8, "eval_size": 8, "checkpoint_every": 10}


def progress(arch, lr, seed, state="waiting", step=0, speed=None):
    config = resolve(SETTINGS | {"arch": arch, "train": TRAIN | {"seed": seed, "optim": {"lr": lr}}})
    name = run_name("depo", config.model_dump(), config.model_dump())
    result = Progress(PlannedRun(name, Path("runs/demo/runs") / name, config))
    result.state, result.step = state, step
    result.train = TrainRow(step, 1.5, speed) if speed else None
    return result


def simulated(seconds, jobs):
    """The time until the last of several runs ends, if each free worker takes the next."""
    workers = [0.0] * jobs
    for one in seconds:
        workers.sort()
        workers[0] += one
    return max(workers)


def test_time_left_is_that_of_the_schedule():
    """100 steps of 1,000 tokens at 1,000 tokens a second: 100 s a run; Canon at half the speed: 200 s."""
    grid = [progress("llama", 1e-3, seed) for seed in range(6)] + [progress("llama+canon", 1e-3, s) for s in range(6)]
    assert seconds_left(grid, 2) is None
    for one in (grid[0], grid[6]):
        one.state, one.step = "running", 50
        one.train = TrainRow(50, 1.5, 1000.0 if one is grid[0] else 500.0)
    waiting = [START_SECONDS + seconds for seconds in (100, 200) for _ in range(5)]
    assert seconds_left(grid, 2) == pytest.approx(simulated([100, 50, *waiting], 2), rel=0.1)
    # Runs took twice as long as their reported speed implies, so the others will, too.
    ended = progress("llama", 3e-3, 0, "finished", 100, 1000.0)
    ended.seconds = 2 * (START_SECONDS + 100)
    assert seconds_left([*grid, ended], 2) == pytest.approx(2 * seconds_left(grid, 2))
    # A run that was continued at step 90 took 20 s, as predicted.
    ended.first_step, ended.seconds = 90, START_SECONDS + 10
    assert seconds_left([*grid, ended], 2) == pytest.approx(seconds_left(grid, 2))
    assert seconds_left(grid[:1], 4) == 50


def rendered(grid, width, height=40):
    console = Console(width=width, height=height, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(grid_table(grid, 2, console))
    return console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_shortened_names_differ_at_any_width(width):
    archs = ["llama+canon=ABCD:scaled", "llama+canon=AbCD:scaled", "llama-nope"]
    grid = [progress(arch, lr, 0, "running", 40, 1000.0) for arch in archs for lr in (1e-3, 3e-3)]
    for one in grid:
        one.evaluation = evaluation({"slices": [entry({"k": 1}, 9), entry({"k": 2}, 4)]}, 0)
    text = rendered(grid, width)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    assert re.search(r"0 of 6\s+runs,\s+about 3\s+min\s+left", text)  # 6 runs of 60 more seconds, 2 at a time
    if width >= 80:
        names = "".join(line[: 30 if width == 80 else 45].strip() for line in text.splitlines())  # long ones are folded
        assert all(short_name(one.run) in names for one in grid)
        assert text.count("1:00") == 6


def test_running_runs_are_shown_where_not_all_fit():
    grid = [progress("llama", 1e-3, seed, "finished", 100, 1000.0) for seed in range(30)]
    grid += [progress("llama", 3e-3, 0, "running", 20, 1000.0), progress("llama", 3e-3, 1)]
    text = rendered(grid, 80, height=12)
    assert len(text.splitlines()) < 12
    assert "llama-lr0.003-seed0" in text
    assert "llama-lr0.003-seed1" in text
    assert "30 of 32 runs, about 2 min left; 24 more not shown" in text


def test_a_log_has_a_line_every_ten_seconds():
    now, file = [0.0], io.StringIO()
    lines = GridLines(Console(file=file, width=80), 2, lambda: now[0])
    one, other = grid = [progress("llama", 1e-3, 0), progress("llama+canon", 1e-3, 0)]
    one.state = other.state = "running"
    for step in range(1, 101):  # a step in half a second
        now[0] += 0.5
        one.step, one.train = step, TrainRow(step, 1.25, 2000.0)
        lines(grid)
    one.state = "finished"
    lines(grid)
    text = file.getvalue().splitlines()
    assert text[1] == "depo-llama+canon-lr0.001-seed0: running, step 0/100"
    assert text[2] == "depo-llama-lr0.001-seed0: running, step 21/100  loss 1.250  2,000 tokens/s  0:40 left"
    assert [re.search(r"step (\d+)", line)[1] for line in text[2:-1]] == ["21", "41", "61", "81"]
    assert text[-1] == "depo-llama-lr0.001-seed0: finished, step 100/100  (1 of 2 runs, about 1 min left)"


def scores(task, row):
    return in_words(TaskInfo(task), evaluation(row, 0))


def entry(where, correct, total=10):
    return {"slice": where, "correct": correct, "total": total}


def test_few_slices_are_named_and_many_averaged():
    assert scores("depo", {"slices": [entry({"k": 1}, 9), entry({"k": 2}, 4)]}) == "1 hop 0.90  2 hops 0.40"
    many = [entry({"attribute": name}, right) for name, right in zip("abcde", (0, 2, 4, 6, 8), strict=True)]
    measures = {"bits_per_parameter": 0.12345, "bits_per_person": 12.0}
    assert scores("capo", {"slices": many, "measures": measures}) == "mean accuracy 0.40  bits per parameter 0.123"


def test_other_scales_are_left_to_the_report():
    row = {"slices": [entry({"n": 9}, 5), entry({"depth": 1}, 3, 4), entry({"nodes": "2-4"}, 0, 0)]}
    answer = scores("brevo", row)
    assert answer.endswith(" 0.50")
    assert "depth" not in answer


@pytest.fixture
def written(monkeypatch):
    """The calls that would write a page: whether it was live, and the time."""
    calls = []
    monkeypatch.setattr("canonlm.cli.live.load_play", lambda folder: folder)
    monkeypatch.setattr("canonlm.report.page.write_page", lambda play, out, live: calls.append(live))
    return calls


def in_states(*states):
    return [SimpleNamespace(state=state) for state in states]


def test_when_the_page_is_written(tmp_path, written):
    now = [0.0]
    page = LivePage(tmp_path, clock=lambda: now[0])
    page(in_states("waiting", "waiting"))
    assert written == [True]
    now[0] = PAGE_SECONDS - 1
    page(in_states("running", "waiting"))
    assert written == [True]
    page(in_states("finished", "waiting"))
    assert written == [True, True]
    now[0] += PAGE_SECONDS
    page(in_states("finished", "running"))
    assert written == [True, True, True]
    page(in_states("finished", "failed"))
    assert written == [True, True, True, False]


def test_a_page_that_takes_long_is_written_for_a_small_share_of_the_time(tmp_path, written, monkeypatch):
    """1,000 runs end, one every 5 s; a page takes 7 ms for each run."""
    now, runs = [0.0], 1000
    page = LivePage(tmp_path, clock=lambda: now[0])
    monkeypatch.setattr(page, "write", lambda live: (written.append(live), now.__setitem__(0, now[0] + 0.007 * runs)))
    states = ["waiting"] * runs
    for ended in range(runs):
        states[ended] = "finished"
        page(in_states(*states))
        now[0] += 5
    assert 30 <= len(written) <= now[0] * MAX_PAGE_SHARE / (0.007 * runs) + 2
    assert written.count(False) == 1
    assert written[-1] is False


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the disk is full")])
def test_the_page_of_a_grid_that_ends_early_does_not_wait_for_more(tmp_path, written, monkeypatch, error):
    def stopped(runs, jobs, page):
        page(in_states("running", "waiting"))
        raise error

    monkeypatch.setattr("canonlm.cli.live.follow_grid", stopped)
    with pytest.raises(type(error)):
        run_all([], tmp_path, None)
    assert written == [True, False]


def test_an_unwritable_page_does_not_stop_a_run(tmp_path):
    LivePage(tmp_path / "nothing there")(in_states("running"))
    assert list(tmp_path.iterdir()) == []
