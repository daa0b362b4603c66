"""The results of a run: the same every time, loadable, and never a checkpoint of NaNs."""

import errno
import json
import re
import subprocess
import sys
import threading

import pytest
import torch
from filelock import FileLock

from canonlm.cli import main
from canonlm.core.files import lock
from canonlm.runs.folder import checkpoint_steps
from canonlm.runs.rows import evaluation
from canonlm.train import loop
from canonlm.train.build import build_model
from canonlm.train.checkpoint import load_model
from canonlm.train.config import resolve
from canonlm.train.loop import train


@pytest.mark.parametrize("workers", [1, 0, 4])
def test_two_runs_are_identical(tiny, reference, tmp_path, workers):
    train(tiny(data={"workers": workers}), tmp_path)
    tiny.same(tmp_path, reference)


def test_a_deterministic_run_has_the_same_numbers_and_leaves_no_setting_behind(tiny, reference, tmp_path):
    during = []
    train(
        tiny(train={"deterministic": True}),
        tmp_path,
        on_row=lambda row: during.append(torch.are_deterministic_algorithms_enabled()),
    )
    tiny.same(tmp_path, reference)
    assert during
    assert all(during)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    train(tiny(), tmp_path)  # the same run


def test_rows_and_result_of_a_run(tiny, reference):
    losses = [row["loss"] for row in tiny.rows(reference) if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    steps_of = {
        kind: [row["step"] for row in tiny.rows(reference) if row["kind"] == kind] for kind in ("train", "eval")
    }
    assert steps_of == {"train": [*range(3, 40, 3), 40], "eval": [8, 16, 24, 32, 40]}
    state = build_model(config := tiny(), "meta").state(config.data.seq_len)
    assert json.loads((reference / "result.json").read_text())["state_bytes"] == state.total > 0


def test_a_finished_run_is_left_alone(tiny, reference):
    before = {path: path.stat().st_mtime_ns for path in reference.rglob("*")}
    result = train(tiny(), reference)
    assert result == json.loads((reference / "result.json").read_text())
    assert {path: path.stat().st_mtime_ns for path in reference.rglob("*")} == before


def test_a_run_ends_once_enough_is_right(tiny, reference, tmp_path):
    """And its steps are those of a run that goes on."""
    evals = [row for row in tiny.rows(reference) if row["kind"] == "eval"]
    scores = {row["step"]: evaluation(row).accuracy for row in evals}
    until = max(scores.values())
    ends = min(step for step, score in scores.items() if score >= until)
    assert ends >= 8
    config = tiny(train={"until": until, "checkpoint_every": 1000})
    result = train(config, tmp_path)
    assert (result["steps"], result["final"]["step"]) == (ends, ends)
    assert checkpoint_steps(tmp_path / "checkpoints") == [ends]
    until_then = [row for row in evals if row["step"] <= ends]
    assert [row for row in tiny.rows(tmp_path) if row["kind"] == "eval"] == until_then
    (tmp_path / "result.json").unlink()  # killed right before: the next process trains no further
    again = train(config, tmp_path)
    assert (again["steps"], again["final"]) == (ends, result["final"])
    never = train(tiny(train={"until": 1.0, "steps": 8}), tmp_path / "never")
    assert never["steps"] == 8


def test_a_run_ends_once_enough_of_some_answers_is_right(tiny, reference, tmp_path):
    evals = [evaluation(row) for row in tiny.rows(reference) if row["kind"] == "eval"]
    shares = {key: [row.answers(key).accuracy for row in evals] for key in evals[0].slices}
    key = min(filter(lambda key: max(shares[key]), shares), key=lambda key: max(shares[key]))  # later than the score
    ends = next(row.step for row in evals if row.answers(key).accuracy >= max(shares[key]))
    result = train(tiny(train={"until": max(shares[key]), "until_slices": [key]}), tmp_path)
    assert result["steps"] == ends
    with pytest.raises(ValueError, match=r'^train\.until_slices: unknown slice "n=0"'):
        tiny(train={"until": 0.5, "until_slices": ["n=0"]})
    with pytest.raises(ValueError, match=r"^train\.until_slices: expected no value without train\.until"):
        tiny(train={"until_slices": [key]})


def test_a_run_shorter_than_its_warm_up_is_reported(tiny, tmp_path):
    message = "the learning rate will not reach train.optim.lr: train.optim.warmup_steps is 5, train.steps 4"
    for length, notes in ((4, [message]), (5, [])):
        rows = []
        train(tiny(train={"steps": length}), tmp_path / str(length), rows.append)
        assert [row["why"] for row in rows if row["kind"] == "note"] == notes


def test_bf16_trains_and_keeps_fp32_weights(tiny, tmp_path):
    train(tiny(train={"precision": "bf16"}), tmp_path)
    rows = [row for row in tiny.rows(tmp_path) if row["kind"] == "train"]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.05
    model = load_model(tmp_path).module
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert any((p != p.bfloat16().float()).any() for p in model.parameters()), "the weights were rounded to bf16"


@pytest.mark.slow
def test_compile_is_close_to_eager(tiny, reference, tmp_path):
    train(tiny(train={"compile": True}), tmp_path)
    for compiled, eager in zip(tiny.rows(tmp_path), tiny.rows(reference), strict=True):
        assert compiled["loss"] == pytest.approx(eager["loss"], rel=1e-4)


@pytest.mark.parametrize(
    ("lr", "clip"), [(1e6, 1.0), (1e30, None), (3e38, None)], ids=["large", "huge", "weights overflow first"]
)
def test_a_diverged_run_is_reported_and_not_saved(tiny, tmp_path, capfd, lr, clip):
    changes = {"optim": {"lr": lr, "grad_clip": clip, "warmup_steps": 0}, "log_every": 1000, "checkpoint_every": 1}
    path = tiny.yaml(tmp_path / "run.yaml", train=changes)
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 1
    error = capfd.readouterr().err
    assert error.startswith("canonlm: stopped at step ")
    assert "diverged" in error
    assert error.count("\n") == 1
    for step in checkpoint_steps(tmp_path / "run" / "checkpoints"):
        assert all(p.isfinite().all() for p in load_model(tmp_path / "run", step).module.parameters())
    assert not (tmp_path / "run" / "result.json").exists()


def test_divergence_is_noticed_when_a_row_is_due(tiny, tmp_path):
    changes = {"optim": {"lr": 1e30, "warmup_steps": 0}, "log_every": 5, "checkpoint_every": 1000, "steps": 1000}
    with pytest.raises(FloatingPointError, match=r"stopped at step 5, .* since step 2: .*; its batch: windows 4 to 7$"):
        train(tiny(train=changes), tmp_path)
    assert tiny.rows(tmp_path) == []  # NaN is no JSON


def test_a_batch_without_any_target_has_loss_0(tiny, tmp_path):
    changes = tiny.raw(train={"batch_size": 1, "steps": 8, "log_every": 1, "eval_size": 64})
    changes["task"] = {"name": "stack", "N": 4, "stacks": 30, "elements": 4}  # most samples pop nothing
    train(resolve(changes), tmp_path)
    losses = [row["loss"] for row in tiny.rows(tmp_path) if row["kind"] == "train"]
    assert 0 < sum(loss == 0 for loss in losses) < 8


def test_a_second_process_in_the_folder_is_refused(tiny, tmp_path, capsys):
    path = tiny.yaml(tmp_path / "run.yaml", train={"steps": 2})
    out = tmp_path / "run"
    out.mkdir()
    script = f"from filelock import FileLock\nwith FileLock({str(out / '.lock')!r}): print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        assert main(["train", str(path), "--out", str(out)]) == 2
        other.communicate(b"\n")
    expected = f'canonlm: --out: expected a folder that no other process is training in, got "{out}"\n'
    assert capsys.readouterr().err == expected
    assert main(["train", str(path), "--out", str(out)]) == 0


def test_a_worker_that_looks_whether_a_folder_is_free_stops_no_training(tiny, tmp_path, monkeypatch):
    """It holds the lock for an instant."""
    other = FileLock(tmp_path / ".lock", thread_local=False)

    def taken(path, timeout):
        assert timeout > 0
        other.acquire()
        threading.Timer(0.2, other.release).start()
        return lock(path, timeout=60 * timeout)  # on a busy machine, the instant is longer

    monkeypatch.setattr(loop, "lock", taken)
    assert train(tiny(train={"steps": 1}), tmp_path)["steps"] == 1


@pytest.mark.parametrize(
    ("error", "name", "message"),
    [
        (PermissionError, "run/.lock", '--out: expected a folder that can be read and written ({}: reason), got "'),
        (OSError, "run/checkpoints", "{}: reason; run it again to continue"),
        (PermissionError, "text.ds", "{}: reason"),
    ],
)
def test_an_error_of_the_system_advises_what_may_help(tiny, tmp_path, monkeypatch, error, name, message):
    def fail(*_):
        raise error(errno.EACCES if error is PermissionError else errno.ENOSPC, "reason", str(tmp_path / name))

    monkeypatch.setattr(loop, "create_folder", fail)
    with pytest.raises(ValueError, match=f"^{re.escape(message.format(tmp_path / name))}") as caught:
        train(tiny(), tmp_path / "run")
    assert str(caught.value).endswith("again to continue") == (error is OSError)


def test_a_run_that_cannot_start_leaves_no_folder(tiny, tmp_path):
    for changes in ({"model": {"fields": {"rope_dim": 7}}}, {"train": {"device": "cuda:77"}}, {"arch": "lama"}):
        with pytest.raises(ValueError):
            train(tiny(**changes), tmp_path / "run")
        assert not (tmp_path / "run").exists()
