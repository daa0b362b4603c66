"""Stop a run anywhere, by a signal or a kill, and run it again: it ends as if nothing had happened, to the bit."""

import json
import os
import shutil
import signal
import time

import pytest

from canonlm.cli import main
from canonlm.train.evals.windows import WindowEval
from canonlm.train.loop import train
from canonlm.train.signals import Interrupted


def _train(path, out, output):
    """Do what `canonlm train` does, with the output in a file."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    raise SystemExit(main(["train", str(path), "--out", str(out)]))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 0])
def test_signals(tiny, tmp_path, start, workers):
    """SIGINT, then SIGTERM, at any step; then to the end."""
    changes = {"train": {"steps": 300, "checkpoint_every": 1000, "eval_every": 70}, "data": {"workers": workers}}
    path, out = tiny.yaml(tmp_path / "run.yaml", **changes), tmp_path / "run"
    train(tiny(**changes), tmp_path / "reference")
    stopped_at = []
    for number in (signal.SIGINT, signal.SIGTERM):
        output = tmp_path / f"{number.name}.txt"
        process = start(_train, path, out, output)
        while not output.exists() or output.read_text().count("\n") < 2:
            assert process.is_alive()
            time.sleep(0.002)
        os.kill(process.pid, number)
        process.join()
        assert process.exitcode == 130
        last = output.read_text().splitlines()[-1]
        assert last.startswith("canonlm: stopped after step ")
        stopped_at.append(int(last.split()[4]))
        assert tiny.checkpoints(out)[-1] == f"step-{stopped_at[-1]:08d}"
        assert not (out / "result.json").exists()
    assert 0 < stopped_at[0] < stopped_at[1] < 300
    assert main(["train", str(path), "--out", str(out)]) == 0
    assert tiny.rows(out) == tiny.rows(tmp_path / "reference")
    assert tiny.weights(out) == tiny.weights(tmp_path / "reference")
    assert not (out / "metrics.discarded.jsonl").exists()  # a run that saves first loses no rows


def _die_at(event, path, out):
    """Train, and die as if by kill -9 right before the event-th change to the run folder."""
    left = [event]

    def deadly(act):
        def act_or_die(*args, **kwargs):
            left[0] -= 1
            if left[0] == 0:
                os._exit(9)
            return act(*args, **kwargs)

        return act_or_die

    for name in ("fsync", "replace", "rename", "unlink", "rmdir", "mkdir"):
        setattr(os, name, deadly(getattr(os, name)))
    main(["train", str(path), "--out", str(out)])


@pytest.mark.slow
def test_killed_once_at_every_third_moment(tiny, tmp_path, start):
    changes = {"train": {"steps": 12, "eval_every": 4, "checkpoint_every": 4}}
    path, ended = tiny.yaml(tmp_path / "run.yaml", **changes), False
    train(tiny(**changes), tmp_path / "reference")
    for event in range(1, 200, 3):
        out = tmp_path / f"run-{event}"
        process = start(_die_at, event, path, out)
        process.join()
        ended = process.exitcode == 0
        train(tiny(**changes), out)
        tiny.same(out, tmp_path / "reference")
        if ended:
            break
    assert ended
    assert event > 40


def test_rows_after_the_checkpoint_are_moved_and_half_written_files_are_accepted(tiny, reference, again, tmp_path):
    full = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    tiny.back_to(tmp_path, 30)
    (tmp_path / "metrics.jsonl").write_text("".join(full) + '{"kind": "train", "st')
    half = tmp_path / "checkpoints" / ".step-00000040.tmp-4711"
    half.mkdir()
    (half / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".result.json.tmp-4711").write_text("{")
    train(tiny(), tmp_path)
    tiny.same(tmp_path, reference)
    late = [line for line in full if json.loads(line)["step"] > 30]
    assert late
    discarded = (tmp_path / "metrics.discarded.jsonl").read_text().splitlines(keepends=True)
    assert discarded == [*late, '{"kind": "train", "st\n']


def test_a_row_without_its_line_end_is_half_a_row(tiny, reference, again, tmp_path):
    """The next row would share its line."""
    tiny.back_to(tmp_path, 30)
    kept = [line for line in (tmp_path / "metrics.jsonl").read_text().splitlines() if json.loads(line)["step"] <= 30]
    (tmp_path / "metrics.jsonl").write_text("\n".join(kept))
    train(tiny(), tmp_path)
    rows = tiny.rows(tmp_path)
    assert rows == [row for row in tiny.rows(reference) if row != tiny.untimed(json.loads(kept[-1]))]


@pytest.mark.every(2)
@pytest.mark.parametrize("which", [0, -1])
def test_an_evaluation_stops_on_request(tiny, reference, tmp_path, monkeypatch, which):
    """It leaves no row, the step is saved, and the continued run evaluates it first."""
    steps = [row["step"] for row in tiny.rows(reference) if row["kind"] == "eval"]
    step, before = steps[which], steps[:which]
    run, signals, ask = tiny(), [], WindowEval.run

    def asked_to_stop(self, model, device):
        done = [row["step"] for row in tiny.rows(tmp_path) if row["kind"] == "eval"]
        if done == before and len(signals) < 2:
            signals.append(step)
            os.kill(os.getpid(), signal.SIGTERM)
        return ask(self, model, device)

    monkeypatch.setattr(WindowEval, "run", asked_to_stop)
    message = f"^stopped after step {step} of {run.train.steps}, before its evaluation;"
    for _ in range(2):
        with pytest.raises(Interrupted, match=message):
            train(run, tmp_path)
        assert (tmp_path / "checkpoints" / f"step-{step:08d}").is_dir()
        assert step not in [row["step"] for row in tiny.rows(tmp_path) if row["kind"] == "eval"]
    train(run, tmp_path)
    assert len(signals) == 2
    tiny.same(tmp_path, reference)


@pytest.mark.slow
def test_a_run_at_a_constant_rate_can_be_extended(tiny, tmp_path):
    """It ends as if started with more steps, except for additional rows of the former last step."""
    constant = {"optim": {"schedule": "constant"}}
    train(tiny(train=constant), tmp_path / "at once")
    out = tmp_path / "out"
    train(tiny(train={**constant, "steps": 20}), out)
    assert train(tiny(train=constant), out)["steps"] == 40
    assert tiny.weights(out) == tiny.weights(tmp_path / "at once")
    assert [row for row in tiny.rows(out) if row["step"] != 20] == tiny.rows(tmp_path / "at once")
    assert json.loads((out / "result.json").read_text())["steps"] == 40
    with pytest.raises(ValueError, match=r"train\.steps: expected 40, as in the run that is already in"):
        train(tiny(train={**constant, "steps": 30}), out)


@pytest.mark.slow
def test_a_run_can_be_extended_from_before_its_decay(tiny, tmp_path):
    """Warm-up, stable, decay: every number of steps shares the stable part."""
    every = {"checkpoint_every": 10, "keep_checkpoints": 9, "optim": {"schedule": "wsd", "decay_steps": 10}}
    train(tiny(train=every), tmp_path / "at once")
    out = tmp_path / "out"
    train(tiny(train={**every, "steps": 30}), out)
    what = "or remove its checkpoints after step 20, up to which both are the same"
    with pytest.raises(ValueError, match=rf"train\.steps: expected 30, as in the run .*, {what}\), got 40"):
        train(tiny(train=every), out)
    shutil.rmtree(out / "checkpoints" / "step-00000030")
    assert train(tiny(train=every), out)["steps"] == 40
    assert tiny.weights(out) == tiny.weights(tmp_path / "at once")
    assert tiny.rows(out) == tiny.rows(tmp_path / "at once")
