"""`canonlm.play` and `canonlm.train` as functions."""

import polars as pl
import pytest

import canonlm

SMALL = {
    **{"task.N": 8, "task.min_items": 2, "data.seq_len": 18, "model.hidden_size": 16, "train.batch_size": 4},
    **{"train.eval_size": 8, "train.steps": 6, "train.eval_every": 6, "train.log_every": 3},
}


def test_play_returns_what_its_runs_measured(tmp_path, capfd):
    def play():
        return canonlm.play("copying", ["llama", "llama+canon=A"], lrs=[3e-3], seeds=1, out=tmp_path, settings=SMALL)

    frame = play()
    final = frame.filter(pl.col("kind") == "final", pl.col("metric") == "accuracy", pl.col("slice") == "all")
    assert sorted(final["arch"]) == ["llama", "llama+canon=A"]
    assert (tmp_path / "report.html").exists()
    assert "2 of 2 runs" in capfd.readouterr().out
    results = {path: path.stat().st_mtime_ns for path in tmp_path.glob("runs/*/result.json")}
    assert play().equals(frame)  # nothing is trained again
    assert {path: path.stat().st_mtime_ns for path in results} == results
    with pytest.raises(ValueError, match=r'^unknown setting "task\.nn"'):
        canonlm.play("copying", out=tmp_path / "wrong", settings={"task.nn": 8})
    assert not (tmp_path / "wrong").exists()


def test_train_is_the_package_and_the_function(tmp_path):
    frame = canonlm.train("debug", out=tmp_path / "run", settings={"train.steps": 2, "train.eval_every": 2})
    assert frame.filter(pl.col("kind") == "training")["step"].max() == 2
    assert canonlm.train.__name__ == "canonlm.train"
    with pytest.raises(ValueError, match=r'^unknown recipe "debugg"'):
        canonlm.train("debugg")
