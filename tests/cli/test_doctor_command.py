"""`canonlm doctor`: what it prints, what it writes, and its exit code."""

import json
from importlib.metadata import version

import pytest
import torch

from canonlm.cli import main
from canonlm.ops import gated_linear_attention, registry, ssd
from canonlm.ops.registry import Form
from canonlm.ops.selftest import Kernel


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_a_healthy_machine(tmp_path, capsys):
    assert main(["doctor", "--json", str(tmp_path / "doctor.json")]) == 0
    out, report = capsys.readouterr().out, json.loads((tmp_path / "doctor.json").read_text())
    assert out.splitlines()[-2:] == ["everything that would be used is right", f"written: {tmp_path / 'doctor.json'}"]
    assert report["machine"]["torch"] == version("torch")
    assert f"torch                   {version('torch')}" in out
    kernels = {(row["kernel"], row["dtype"]) for row in report["kernels"]}
    assert len(kernels) == len(report["kernels"]) == 10
    assert {name for name, _ in kernels} >= {"causal convolution", "state-space duality, in chunks"}
    assert main(["doctor", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert all(row["state"] == "right" and 0 <= row["values"] < 0.02 for row in report["kernels"])


def test_wrong_and_missing_kernels_are_named(monkeypatch, capsys):
    real = gated_linear_attention.KERNEL
    zero = Kernel("a kernel of zeros", lambda **i: (0 * i["v"], 0 * i["state"] + 0 * sum(x.sum() for x in i.values()
                  if isinstance(x, torch.Tensor))), real.definition, real.inputs, real.wide)  # fmt: skip
    some = [Form(zero, "GLA", (torch.float32,)), Form(ssd.KERNEL, "Mamba2", (torch.bfloat16,), "fla is not there")]
    monkeypatch.setattr(registry, "forms", lambda device: some)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "wrong on this machine: a kernel of zeros (float32)"
    assert "fla is not there" in out


def test_outcomes_are_recorded_and_tried_again_on_request(monkeypatch, capsys):
    real, tried = gated_linear_attention.KERNEL, []
    counted = Kernel("counted", lambda **inputs: tried.append(1) or real.definition(**inputs), real.definition,
                     real.inputs, real.wide)  # fmt: skip
    monkeypatch.setattr(registry, "forms", lambda device: [Form(counted, "GLA", (torch.float32,))])
    for options, trials in ([], 1), ([], 1), (["--again"], 2):
        assert main(["doctor", *options]) == 0
        assert len(tried) == 2 * trials  # without documents and with them
    capsys.readouterr()


@pytest.mark.slow
def test_trials_at_once_are_those_one_after_the_other():
    device = torch.device("cpu")
    some = [registry._Place(i, i, form, torch.float32, {}) for i, form in enumerate(registry.forms(device)[:2])]
    at_once = {one.place: result() for one, result in registry._at_once(some, device)}
    assert at_once == {one.place: result() for one, result in registry._one_by_one(some, device)}
