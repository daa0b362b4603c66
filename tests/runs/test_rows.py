"""Rows of `metrics.jsonl`, alone and of a continued run."""

import json
import math
import re
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

from canonlm.runs.load import load_run
from canonlm.runs.rows import MAX_LINE, TRAIN_KEYS, Metrics
from canonlm.runs.rows import read as read_rows
from canonlm.train.loop import train
from canonlm.train.machine import environment

OF_ONE_PROCESS = [key for key in TRAIN_KEYS if not key.endswith("_rank")]
ROWS = [
    {"kind": "train", "step": 10, "loss": 2.0, "elapsed_s": 5.0},
    {"kind": "eval", "step": 10, "loss": 1.9, "slices": []},
    {"kind": "train", "step": 20, "loss": 1.5, "elapsed_s": 9.5},
    {"kind": "skip", "step": 21, "windows": [80, 83]},
    {"kind": "train", "step": 30, "loss": 1.0, "elapsed_s": 13.0},
]


def written(folder, rows, last_step=0):
    metrics = Metrics(folder, last_step)
    for row in rows:
        metrics.write(row)
    metrics.close()
    return metrics


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("step", "kept", "elapsed"), [(0, 0, 0.0), (10, 2, 5.0), (20, 3, 9.5), (25, 4, 9.5), (30, 5, 13)]
)
def test_a_continued_run_keeps_the_rows_up_to_its_checkpoint_and_their_time(tmp_path, step, kept, elapsed):
    assert written(tmp_path, ROWS).elapsed_s == 0.0
    again = written(tmp_path, [], last_step=step)
    assert again.elapsed_s == elapsed
    assert read(tmp_path / "metrics.jsonl") == ROWS[:kept]
    assert again.evaluation == (ROWS[1] if step == 10 else None)
    discarded = tmp_path / "metrics.discarded.jsonl"
    assert (read(discarded) if discarded.exists() else []) == ROWS[kept:]


def test_every_row_that_is_written_is_read(tmp_path):
    def row(step, names):
        return {"kind": "eval", "step": step, "slices": [
            {"slice": {"k": f"{name:060d}"}, "correct": 0, "total": 9} for name in range(names)]}  # fmt: skip

    fits = MAX_LINE // len(json.dumps(row(1, 1)["slices"][0]) + ", ") - 2
    written(tmp_path, [row(1, fits)])
    with pytest.raises(ValueError, match=r"metrics.jsonl: expected a row of at most 1,048,576 bytes \(an eval"):
        written(tmp_path, [row(2, fits + 4)], last_step=1)
    written(tmp_path, [row(3, 2)], last_step=2)
    evaluations, _, damaged = read_rows(tmp_path / "metrics.jsonl")
    assert [(each.step, len(each.slices)) for each in evaluations] == [(1, fits), (3, 2)]
    assert damaged == 0


DAMAGED = {
    "empty": b"\n",
    "zeros": b"\0\0\0\n",
    "bytes": b'{"step": "\xff"}\n',
    "list": b"[20]\n",
    "nan": b'{"step": NaN}\n',
    "long": b"x" * 2**21 + b"\n",
    "none": b"",
}
ENDS = DAMAGED | {"cut": b'{"kind": "train", "st', "without its line end": b'{"kind": "train", "step": 10}'}


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("middle", DAMAGED)
def test_damaged_rows_move_and_the_others_stay_as_they_are(tmp_path, middle, end):
    between, last = DAMAGED[middle], ENDS[end]
    lines = [json.dumps(row).encode() + b"\n" for row in ROWS]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], between, *lines[2:], last]))
    before = (tmp_path / "metrics.jsonl").stat().st_ino
    assert written(tmp_path, [], last_step=30).elapsed_s == 13
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join(lines)
    assert ((tmp_path / "metrics.jsonl").stat().st_ino == before) is not bool(between or last)
    discarded = tmp_path / "metrics.discarded.jsonl"
    ended = last and last.removesuffix(b"\n") + b"\n"
    assert (discarded.read_bytes() if discarded.exists() else b"") == between + ended


def test_a_long_file_is_read_in_little_memory(tmp_path):
    row, rows = json.dumps(ROWS[0] | {"why": "x" * 1000}).encode() + b"\n", 20_000
    (tmp_path / "metrics.jsonl").write_bytes(row * rows + json.dumps(ROWS[4]).encode() + b"\n")
    tracemalloc.start()
    try:
        assert written(tmp_path, [], last_step=20).elapsed_s == 5.0
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "metrics.jsonl").stat().st_size == len(row) * rows


def test_a_line_that_cannot_be_a_row_is_refused(tmp_path):
    with (tmp_path / "metrics.jsonl").open("wb") as file:
        file.truncate(2**40)  # takes no space
    with pytest.raises(ValueError, match=r"^.*metrics\.jsonl: expected lines of at most 67,108,864 bytes$"):
        Metrics(tmp_path, 10)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_every_key_of_a_row_is_present_and_correct(reference):
    rows = [row for row in read(reference / "metrics.jsonl") if row["kind"] == "train"]
    assert [row["step"] for row in rows] == [*range(3, 40, 3), 40]
    elapsed = tokens = 0
    for row in rows:
        assert list(row) == [key for key in OF_ONE_PROCESS if key != "z_loss"]
        assert math.isfinite(row["loss"] + row["lr"] + row["grad_norm"])
        assert row["tokens"] == row["step"] * 4 * 18
        assert row["windows"] == [(row["step"] - 1) * 4, row["step"] * 4 - 1]
        assert row["mfu"] is None  # of a CPU
        if row["step"] == 3:
            assert row["tokens_per_s"] is row["data_wait_s"] is row["data_wait_share"] is None
        else:
            assert 0 <= row["data_wait_s"] <= row["elapsed_s"] - elapsed
            assert 0 <= row["data_wait_share"] <= 1
            assert row["tokens_per_s"] > 0.999 * (row["tokens"] - tokens) / (row["elapsed_s"] - elapsed)
        assert 0.05 < row["memory_gb"] < 50
        elapsed, tokens = row["elapsed_s"], row["tokens"]
    run = load_run(reference)
    assert run.damaged_rows == 0
    assert [row.loss for row in run.train] == [row["loss"] for row in rows]


def test_the_z_loss_has_a_separate_key(tiny, tmp_path):
    train(tiny(model={"fields": {"z_loss": "logsumexp"}}), tmp_path)
    rows = [row for row in read(tmp_path / "metrics.jsonl") if row["kind"] == "train"]
    assert all(list(row) == OF_ONE_PROCESS for row in rows)
    assert all(row["z_loss"] > 0 for row in rows)


def test_the_time_of_a_run_survives_its_interruptions(tiny, again, tmp_path):
    tiny.back_to(tmp_path, 30)
    path = tmp_path / "metrics.jsonl"
    rows = read(path)
    for row in rows:  # as if everything had taken a thousand seconds longer
        if row["kind"] == "train":
            row["elapsed_s"] += 1000
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = next(row["elapsed_s"] for row in rows if row["kind"] == "train" and row["step"] == 30)
    result = train(tiny(), tmp_path)
    elapsed = {row["step"]: row["elapsed_s"] for row in read(path) if row["kind"] == "train"}
    assert before == elapsed[30] < elapsed[33] < elapsed[40] <= result["train_seconds"] < before + 100
    assert load_run(tmp_path).result.train_seconds == result["train_seconds"]


@pytest.mark.slow
def test_memory_is_the_peak_of_the_process():
    """In a separate process, because an earlier test may have used more."""
    script = (
        "import torch; from canonlm.train.machine import memory_gb as memory; cpu = torch.device('cpu')\n"
        "print(memory(cpu)); ballast = torch.ones(75_000_000); print(memory(cpu)); del ballast; print(memory(cpu))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True, timeout=300)
    before, during, after = map(float, done.stdout.split())
    assert before + 0.25 < during < before + 0.4
    assert after == pytest.approx(during, abs=0.02)


def test_environment_names_the_machine():
    result = environment(torch.device("cpu"))
    assert result["device"] == "cpu"
    assert "CPU, " in result["machine"]
    assert result["torch"] == torch.__version__


def test_the_page_names_every_key():
    page = (Path(__file__).parents[2] / "docs" / "watching.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(TRAIN_KEYS)
