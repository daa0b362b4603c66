"""`canonlm.load_runs`: every number in the files of runs is one row, and missing ones are named."""

import json
import re
import warnings
from pathlib import Path

import polars as pl
import pytest
from folders import evaluation, text_evaluation, write_results, write_run, write_text_run

import canonlm

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
TOKENS = 32 * 512  # a step of `write_run`
ROWS = [evaluation(step, {("k", 1): (step, 1000), ("k", 2): (step // 2, 500)}, loss=1 / step) for step in (100, 800)]


def quiet(*arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return canonlm.load_runs(*arguments, **options)


def warned(folders):
    with pytest.warns(UserWarning, match="not everything is in the data frame") as caught:
        frame = canonlm.load_runs(folders)
    [warning] = caught
    assert warning.filename == __file__
    return frame, str(warning.message).splitlines()[1:]


def only(frame, **where):
    return frame.filter(*(pl.col(key) == value for key, value in where.items()))


def test_every_number_of_a_run_is_a_row(tmp_path):
    folder = write_run(tmp_path / "runs" / "a", arch="llama+canon", lr=0.003, seed=2, evals=ROWS, losses=[(10, 4.0)])
    frame = quiet(tmp_path)
    about = frame.select("run", "state", "task", "setting", "arch", "parameters", "lr", "seed").unique()
    assert about.rows() == [("a", "finished", "depo", "max_n=30, max_k=4", "llama+canon", 1_000_000, 0.003, 2)]
    expected = []  # read from the file without our readers
    for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()):
        at = row["step"], row["step"] * TOKENS
        if row["kind"] == "train":
            names = ("loss", "lr", "grad_norm", "tokens_per_s")
            expected += [("training", "train", *at, "all", name, row[name], None, None) for name in names]
        for kind in {"eval": ["evaluation", "final"], "train": []}[row["kind"]]:
            if (kind, row["step"]) == ("final", 100):
                continue
            shares = []
            for entry in row["slices"]:
                right, requested = entry["correct"], entry["total"]
                key = f"k={entry['slice']['k']}"
                expected.append((kind, "test", *at, key, "accuracy", right / requested, right, requested))
                shares.append(right / requested)
            expected.append((kind, "test", *at, "all", "accuracy", sum(shares) / 2, None, 1500))
            expected.append((kind, "test", *at, "all", "loss", row["loss"], None, None))
    expected += [("final", None, 800, 800 * TOKENS, "all", *row, None, None)
               for row in (("train_seconds", 12.5), ("tokens_per_s", 60_000.0))]  # fmt: skip
    columns = ("kind", "split", "step", "tokens", "slice", "metric", "value", "correct", "total")
    assert sorted(frame.select(columns).rows(), key=str) == sorted(expected, key=str)


def test_unfinished_and_damaged_runs_are_named(tmp_path):
    write_run(tmp_path / "runs" / "cut", evals=ROWS, steps=2000, finished=False, tail="{broken\n")
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "config.yaml").write_text("[")
    write_run(tmp_path / "runs" / "empty", finished=False)
    frame, lines = warned(tmp_path)
    assert frame["run"].unique().to_list() == ["cut"]
    assert frame["kind"].unique().to_list() == ["evaluation"]
    assert frame["state"][0] == "unfinished at step 800 of 2000"
    assert [line.split(": ")[0].strip() for line in lines] == ["bad", "empty", "cut"]
    assert "config.yaml is damaged" in lines[0]
    assert "unfinished at step 800 of 2000" in lines[2]
    assert "1 damaged row" in lines[2]


def test_a_diverged_run_has_rows_without_values(tmp_path):
    row = evaluation(100, {("k", 1): (0, 10)}, loss=float("nan"), measures={"kl": float("inf")})
    write_run(tmp_path / "a", evals=[row], losses=[(50, float("nan"))])
    frame, _ = warned(tmp_path)
    lost = only(frame, kind="evaluation").filter(pl.col("value").is_null())
    assert sorted(lost["metric"]) == ["kl", "loss"]
    assert only(frame, kind="training", metric="loss")["value"].to_list() == [None]


def test_text_runs_and_later_evaluations(tmp_path):
    rows = [text_evaluation(200, {"web": (2.0, 0.5, 3000), "code": (1.0, 0.25, 1000)})]
    run = write_text_run(tmp_path / "runs" / "a", evals=rows)
    model = {"source": str(run), "step": 200, "arch": "llama", "parameters": 7}
    write_results(run / "evals" / "step-00000200", model, [
        ("multihop", "1hop-2k", {"published": True}, [("exact", 0.25, 0.01, 1000, {}, True)]),
    ])  # fmt: skip
    frame = quiet(tmp_path)
    for kind in ("evaluation", "final"):
        rows = only(frame, kind=kind, split="test").select("slice", "metric", "value", "total").rows()
        assert sorted(rows) == [
            ("all", "loss", 1.75, None), ("code", "bits_per_byte", 0.25, 1000), ("code", "loss", 1.0, 1000),
            ("web", "bits_per_byte", 0.5, 3000), ("web", "loss", 2.0, 3000),
        ]  # fmt: skip
    [requested] = only(frame, kind="suite").to_dicts()
    expected = {"run": "a", "task": "multihop", "slice": "1hop-2k", "metric": "exact", "value": 0.25, "stderr": 0.01,
              "total": 1000, "step": 200, "tokens": 200 * TOKENS, "seed": 0}  # fmt: skip
    assert {key: requested[key] for key in expected} == expected


def test_settings_become_columns(tmp_path):
    for name, size in (("a", 64), ("b", 128)):
        write_run(tmp_path / name, evals=ROWS, config={"model": {"hidden_size": size, "fields": {"x": [size]}}})
    frame = quiet([tmp_path / "a", tmp_path / "b"], settings=["model.hidden_size", "model.fields.x"])
    seen = frame.select("run", "model.hidden_size", "model.fields.x").unique().sort("run")
    assert seen.rows() == [("a", 64, "[64]"), ("b", 128, "[128]")]
    with pytest.raises(ValueError, match=r'^unknown setting "model.width"'):
        quiet(tmp_path, settings=["model.width"])


def test_the_example_of_the_docs(tmp_path, monkeypatch, capsys):
    [code] = re.findall(r"```py\n(.*?load_runs.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    for name, arch, right in (("a", "llama", 100), ("b", "llama+canon", 700), ("c", "llama+canon", 900)):
        row = evaluation(800, {("k", 1): (right, 1000)})
        write_run(tmp_path / "runs" / "depo-tiny" / "runs" / name, arch=arch, seed=ord(name), evals=[row])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(canonlm, "play", lambda *_, **__: None)  # tests/cli/test_from_python.py has it
    exec(code, {})
    printed = capsys.readouterr().out
    assert all(number in printed for number in ("llama+canon", "0.8", "2", "0.1"))
