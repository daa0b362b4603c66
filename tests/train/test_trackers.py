"""The trackers contain the same as `metrics.jsonl`: read with TensorBoard's own reader, and from a stand-in for W&B,
which needs an account."""

import json
import sys
from types import SimpleNamespace

import pytest

from canonlm.cli import main
from canonlm.train import trackers
from canonlm.train.loop import train

ROWS = [
    {"kind": "train", "step": 3, "loss": 2.0, "lr": 1e-3, "mfu": None, "windows": [8, 11]},
    {
        "kind": "eval",
        "step": 4,
        "loss": 1.5,
        "slices": [{"slice": {"k": 1}, "correct": 3, "total": 4}, {"slice": {}, "correct": 0, "total": 0}],
        "measures": {"kl": 0.25},
        "sets": {"web": {"loss": 1.0, "bits_per_byte": 0.5}},
    },
    {"kind": "skip", "step": 5, "windows": [16, 19], "why": "gradient norm nan"},
]
NUMBERS = [
    {"train/loss": 2.0, "train/lr": 1e-3},
    {"eval/loss": 1.5, "eval/k=1": 0.75, "eval/all": 0.0, "eval/measures/kl": 0.25}
    | {"eval/sets/web/loss": 1.0, "eval/sets/web/bits_per_byte": 0.5},
    {},
]


def scalars(folder):
    """{name: {step: value}}, read by TensorBoard."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def wanted(rows):
    """The same from the rows, in single precision."""
    result = {}
    for row in rows:
        for name, value in trackers.numbers(row).items():
            result.setdefault(name, {})[row["step"]] = pytest.approx(value, rel=1e-6)
    return result


def write(names, folder, rows, step=0):
    for tracker in trackers.start(names, folder, {"arch": "llama"}, step):
        for row in rows:
            tracker.write(row)
        tracker.close()


class Run:
    """A run of W&B that records its calls."""

    def __init__(self, arguments):
        self.init_arguments, self.logged, self.finished = arguments, [], False

    def log(self, numbers, step):
        self.logged.append((step, numbers))

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb(monkeypatch):
    """A package of that name, and its `runs`."""

    def init(**arguments):
        if arguments["project"] == "forbidden":
            raise package.Error("no API key configured")
        package.runs.append(Run(arguments))
        return package.runs[-1]

    package = SimpleNamespace(init=init, runs=[], Settings=dict, Error=FloatingPointError)
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return package


def test_tensorboard_hides_rows_after_the_checkpoint(tmp_path):
    rows = [{"kind": "train", "step": step, "loss": 1 / step} for step in range(1, 11)]
    write(["tensorboard"], tmp_path, rows)
    assert scalars(tmp_path) == wanted(rows)
    again = [{"kind": "train", "step": step, "loss": 10.0} for step in (5, 6)]
    write(["tensorboard"], tmp_path, again, step=4)
    assert scalars(tmp_path) == wanted([*rows[:4], *again])


def test_wandb(tmp_path, monkeypatch, wandb):
    write(["wandb"], tmp_path, ROWS)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    write(["wandb"], tmp_path, ROWS[1:], step=3)
    first, second = wandb.runs
    assert (first.init_arguments["project"], second.init_arguments["project"]) == ("canonlm", "mine")
    assert first.init_arguments["id"] == second.init_arguments["id"]
    assert {run.init_arguments["resume"] for run in wandb.runs} == {"allow"}
    assert first.init_arguments["name"] == tmp_path.name
    assert first.init_arguments["config"] == {"arch": "llama"}
    assert first.logged == list(zip((3, 4, 5), NUMBERS, strict=True))
    assert second.logged == first.logged[1:]
    assert first.finished
    assert second.finished
    (tmp_path / "other").mkdir()
    write(["wandb"], tmp_path / "other", [])
    assert wandb.runs[2].init_arguments["id"] != first.init_arguments["id"]


def test_a_failing_start_of_wandb_is_reported_in_one_line(tmp_path, monkeypatch, wandb):
    monkeypatch.setenv("WANDB_PROJECT", "forbidden")
    with pytest.raises(ValueError, match=r"^track: wandb cannot start: no API key configured$"):
        trackers.start(["wandb"], tmp_path, {}, 0)


@pytest.mark.slow
def test_tracking_does_not_change_a_run(tiny, reference, tmp_path):
    pytest.importorskip("tensorboard")
    config = tiny(track=["tensorboard"])
    train(config, tmp_path)
    tiny.back_to(tmp_path, 20)
    train(config, tmp_path)
    assert tiny.rows(tmp_path) == tiny.rows(reference)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert scalars(tmp_path) == wanted(rows)
    assert {"train/loss", "train/tokens_per_s", "eval/loss"} <= set(wanted(rows))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(tiny, tmp_path, monkeypatch, capsys, name):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    path = tiny.yaml(tmp_path / "run.yaml", track=[name])
    assert main(["train", str(path), "--out", str(tmp_path / "run")]) == 2
    message = f"track: expected trackers that are installed (pip install 'canonlm[track]'), got \"{name}\""
    assert capsys.readouterr().err.startswith(f"canonlm: {message}  (in {path}, line ")
    assert not (tmp_path / "run").exists()
