"""One run on a terminal of any width, and in a log."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from canonlm.cli.live import RunLines, RunPanel, follow_run, sparkline
from canonlm.train.config import resolve

SETTINGS = {
    "arch": "llama+canon",
    "task": {"name": "depo", "N": 20, "K": 2},
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 200, "loss_on": "answer"},
    "train": {
        "steps": 4000,
        "batch_size": 4,
        "eval_every": 8,
        "eval_size": 8,
        "checkpoint_every": 10,
        "optim": {"lr": 3e-3},
    },
}
TEXT = SETTINGS | {
    "task": None,
    "text": {"sources": {"web": {"path": "web"}}},
    "model": SETTINGS["model"] | {"vocab_size": 256},
    "data": {"seq_len": 200},
}
TRAIN = {
    "kind": "train", "step": 1000, "loss": 2.12345, "lr": 3e-4, "grad_norm": 0.8125, "tokens": 800_000,
    "windows": [7992, 7999], "tokens_per_s": 16_000.0, "mfu": 0.4123, "data_wait_s": 0.1, "data_wait_share": 0.0125,
    "memory_gb": 1.25, "elapsed_s": 55.0,
}  # fmt: skip
EVAL = {
    "kind": "eval",
    "step": 900,
    "loss": 1.5,
    "slices": [{"slice": {"k": 1}, "correct": 3, "total": 4}, {"slice": {"k": 2}, "correct": 1, "total": 4}],
}
SETS = {name: {"loss": 1.5, "bits_per_byte": bits, "tokens": 512} for name, bits in (("web", 0.75), ("code", 0.5))}
TEXT_EVAL = {"kind": "eval", "step": 900, "loss": 1.5, "sets": SETS}
SKIP = {
    "kind": "skip",
    "step": 1001,
    "windows": [8000, 8007],
    "why": "gradient norm nan; its batch: windows 8000 to 8007",
}
CHECKPOINT = {"kind": "checkpoint", "step": 1010}


def shown(view, width, **options):
    console = Console(width=width, file=io.StringIO(), force_terminal=True, color_system=None, **options)
    console.print(view)
    return console.file.getvalue()


def view_of(*rows, settings=SETTINGS):
    view = RunPanel(resolve(settings), Path("runs/demo"))
    for row in rows:
        view.show(row)
    return view


def test_everything_is_shown_on_a_wide_terminal():
    earlier = [TRAIN | {"step": step, "loss": loss} for step, loss in ((100, 5.0), (200, 4.0), (300, 3.5))]
    output = shown(view_of(*earlier, EVAL, TRAIN, SKIP, CHECKPOINT), 200)
    for part in (
        "demo: llama+canon",
        "step 1,010/4,000",
        "2:30 left",  # 2,990 steps of 800 tokens at 16,000 per second: 149.5 s
        "loss 2.1235",
        "lr 3.00e-04",
        "gradient 0.812",
        "tokens 800,000",
        "tokens/s 16,000",
        "MFU 41.2%",
        "data wait 1.2%",
        "memory 1.2 GB",
        "loss █▆▄▁",
        "step 900  test loss 1.5000  1 hop 0.75  2 hops 0.25",
        "step 1,001  skipped: gradient norm nan; its batch: windows 8000 to 8007",
        "step 1,010  checkpoint",
    ):
        assert part in output


def test_unknown_values_are_not_shown():
    output = shown(
        view_of(TRAIN | {"tokens_per_s": None, "mfu": None, "data_wait_share": None, "memory_gb": None}), 120
    )
    assert "loss 2.1235" in output
    assert not re.search("None|MFU|tokens/s|left|data wait|memory|█", output)
    assert "step 0/4,000" in shown(view_of(), 120)


@pytest.mark.parametrize("width", [1, 2, 3, 8, 20, 37, 40, 80, 81, 120, 300])
@pytest.mark.parametrize("settings", [SETTINGS, TEXT], ids=["task", "text"])
def test_any_width(width, settings):
    evaluation = EVAL if settings is SETTINGS else TEXT_EVAL
    rows = [TRAIN | {"step": step, "loss": 1 / step} for step in range(1, 1000)]
    view = view_of(*rows, TRAIN, evaluation, *[SKIP] * 10, CHECKPOINT, settings=settings)
    for output in (shown(view, width), shown(view_of(settings=settings), width)):
        assert all(len(text) <= max(width, 3) for text in output.splitlines())
    if width >= 40:
        assert "loss 2.1235" in shown(view, width)
        assert len(shown(view, width).splitlines()) <= 30


def test_columns_stay_where_they_are_and_are_aligned():
    first = shown(view_of(TRAIN), 80).splitlines()
    second = shown(view_of(TRAIN | {"loss": 12.5, "grad_norm": 9.0, "tokens": 1_600_000, "mfu": 0.05}), 80).splitlines()
    for name in ("loss", "lr", "gradient", "tokens", "tokens/s", "MFU", "data wait", "memory"):
        at = [next(text.index(f" {name} ") for text in lines if f" {name} " in text) for lines in (first, second)]
        assert at[0] == at[1]
    starts = [[match.start() for match in re.finditer(r"(?<=  |│ )\S", text)] for text in first[3:5]]
    assert starts[0] == starts[1]


def test_a_terminal_without_unicode():
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(width=80, file=ascii_only, force_terminal=True, color_system=None).print(
        view_of(TRAIN | {"step": 1}, TRAIN, EVAL)
    )
    ascii_only.flush()
    assert b"loss 2.1235" in ascii_only.buffer.getvalue()


def test_sparkline():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([3.0, 3.0]) == "▁▁"


@pytest.mark.parametrize(
    ("seconds", "expected_text"),
    [(5, "0:05"), (59.7, "1:00"), (65, "1:05"), (7265, "2:01:05"), (86400 * 3 + 7200, "3 d 2 h")],
)
def test_time_left(seconds, expected_text):
    row = TRAIN | {"step": 0, "tokens_per_s": 4000 * 800 / seconds}
    assert f" {expected_text} left" in shown(view_of(row), 80)


def test_lines_of_a_log(capsys):
    def line(row, settings=SETTINGS):
        RunLines(resolve(settings), Path("runs/demo")).show(row)
        first, second = capsys.readouterr().out.splitlines()
        assert first == "runs/demo: llama+canon, 4,000 steps"
        return second

    # 3,000 more steps of 800 tokens at 16,000 a second
    assert line(TRAIN) == "step 1000/4000  loss 2.1235  lr 3.00e-04  16,000 tokens/s  2:30 left"
    assert line(TRAIN | {"tokens_per_s": None}) == "step 1000/4000  loss 2.1235  lr 3.00e-04"
    assert line(EVAL) == "step 900  test loss 1.5000  1 hop 0.75  2 hops 0.25"
    assert line(TEXT_EVAL, TEXT) == "step 900  validation loss 1.5000  bits per byte: web 0.7500, code 0.5000"
    assert line(SKIP) == "step 1001  skipped: gradient norm nan; its batch: windows 8000 to 8007"
    assert line(CHECKPOINT) == "step 1010  checkpoint"


def test_a_log_has_a_step_every_ten_seconds_and_all_evaluations(capsys):
    now = [0.0]
    lines = RunLines(resolve(SETTINGS), Path("runs/demo"), lambda: now[0])
    for step in range(1, 61):
        now[0] = step * 0.5
        lines.show(TRAIN | {"step": step})
        if step == 30:
            lines.show(EVAL)
    printed = capsys.readouterr().out.splitlines()
    assert [re.match(r"step (\d+)", each)[1] for each in printed[1:]] == ["1", "21", "900", "50"]


def test_follow_in_a_log_on_a_terminal_and_in_other_processes(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("RANK", raising=False)
    with follow_run(resolve(SETTINGS), tmp_path) as on_row:
        on_row(TRAIN)
        first, second = capsys.readouterr().out.splitlines()  # at once
    assert first == f"{tmp_path}: llama+canon, 4,000 steps"
    assert second.startswith("step 1000/4000  loss 2.1235")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with follow_run(resolve(SETTINGS), tmp_path) as on_row:
        on_row(TRAIN)
    assert "tokens/s" in (output := capsys.readouterr().out)
    assert "╭" in output
    monkeypatch.setenv("RANK", "1")
    with follow_run(resolve(SETTINGS), tmp_path) as on_row:
        on_row(TRAIN)
    assert capsys.readouterr().out == ""
