"""`profile: "10:13"`: the trace contains those steps and no others."""

import gzip
import json

import pytest
import torch

from canonlm.train.loop import train
from canonlm.train.profile import Profile, bounds


def traced(path):
    """The steps and the operators in a trace."""
    names = [event.get("name", "") for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
    spans = sorted({int(name.removeprefix("step ")) for name in names if name.startswith("step ")})
    return spans, set(names)


def loop(folder, steps, done=0, last=20, raises_at=None, rank=0):
    x = torch.ones(4, 4)
    with Profile(steps, folder, rank, done) as profile:
        for step in range(done + 1, last + 1):
            (torch.tanh(x) if step == 9 else torch.sin(x) if step == 13 else x @ x).sum()
            if step == raises_at:
                raise KeyboardInterrupt
            profile.step()


@pytest.mark.parametrize(
    ("steps", "done", "last", "name", "held"),
    [
        ("10:13", 0, 20, "steps-10-13", [10, 11, 12]),
        ("1:3", 0, 20, "steps-1-3", [1, 2]),
        ("10:13", 9, 20, "steps-10-13", [10, 11, 12]),
        ("10:13", 10, 20, "steps-11-13", [11, 12]),
        ("10:13", 0, 12, "steps-10-13", [10, 11, 12]),
        ("10:13", 0, 10, "steps-10-12", [10, 11]),  # for the profiler, step 11 has begun
    ],
    ids=["inside", "at the start", "continued before", "continued inside", "ends with it", "ends inside"],
)
def test_contents_of_a_trace(tmp_path, steps, done, last, name, held):
    loop(tmp_path, steps, done, last)
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == f"{name}-rank0.json.gz"
    spans, names = traced(path)
    assert spans == held
    assert "aten::mm" in names
    assert not {"aten::tanh", "aten::sin"} & names  # of the steps before and after


def test_an_interrupted_step_is_in_the_trace(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        loop(tmp_path, "10:13", raises_at=11, rank=3)
    [path] = (tmp_path / "profile").iterdir()
    assert path.name == "steps-10-12-rank3.json.gz"
    assert traced(path)[0] == [10, 11]


@pytest.mark.parametrize(("steps", "done", "last"), [(None, 0, 20), ("10:13", 12, 20), ("10:13", 0, 8)])
def test_no_trace_outside_the_profile(tmp_path, steps, done, last):
    loop(tmp_path, steps, done, last)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["10", "10:", ":13", "13:10", "10:10", "0:3", "-1:3", "a:b", "1:2:3", "1.5:3", ""])
def test_invalid_settings(wrong):
    with pytest.raises(ValueError, match="profile: expected start:stop") as error:
        bounds(wrong)
    assert f'got "{wrong}"' in str(error.value)
    assert "\n" not in str(error.value)


def test_a_run_with_a_profile_is_the_same_run(tiny, reference, tmp_path):
    train(tiny(profile="10:13"), tmp_path)
    assert tiny.rows(tmp_path) == tiny.rows(reference)
    [path] = (tmp_path / "profile").iterdir()
    spans, names = traced(path)
    assert spans == [10, 11, 12]
    assert {"aten::mm", "Optimizer.step#AdamW.step", "aten::embedding", "aten::_fused_adamw_"} <= names
