"""Trials find kernels that raise, or that are wrong: in their values, in their gradients alone, for packed documents.
The kernels here are ours on a CPU, damaged on purpose."""

import json
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from canonlm.ops import gated_delta_rule, gated_linear_attention, registry, selftest, ssd
from canonlm.ops.selftest import attempt, judge, known

MODULES = {"gla": gated_linear_attention, "delta rule": gated_delta_rule, "ssd": ssd}
CPU = torch.device("cpu")
CHUNKED = {"gla": registry._GLA, "delta rule": registry._DELTA_RULE, "ssd": registry._SSD}


def kernel(name, fast=None):
    real = MODULES[name].KERNEL
    return replace(real, name=f"a {name}", fast=fast or CHUNKED[name])


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "canonlm" / "kernel-trials.json"


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy * 1.1


def damaged(name, how):
    def fast(**inputs):
        doc_ids = inputs["doc_ids"]
        if how == "documents ignored":
            inputs["doc_ids"] = None
        if how == "state ignored":
            inputs["state"] = 0 * inputs["state"]
        if how == "raises with documents" and doc_ids is not None:
            raise RuntimeError("no\nkernel image")
        y, state = CHUNKED[name](**inputs)
        if how == "values":
            y = y * 1.1
        if how == "gradients":
            y = _WrongGradient.apply(y)
        if how == "NaN":
            y = y * torch.where(torch.arange(y.shape[1]) == 7, torch.nan, 1.0)[:, None, None]
        return y, state

    return fast


@pytest.mark.every(5)
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize(
    "how", ["values", "gradients", "documents ignored", "state ignored", "raises with documents", "NaN"]
)
def test_wrong_kernels_are_caught(name, how):
    errors = attempt(kernel(name, damaged(name, how)), CPU, torch.bfloat16)
    assert errors.gradients > 1
    assert (errors.values > 1) == (how != "gradients")
    assert errors.detail == ("RuntimeError: no kernel image" if "raises" in how else "")


def test_a_trial_runs_once_and_is_recorded(own_cache, monkeypatch):
    tried = []
    counted = kernel("ssd", lambda **inputs: tried.append(1) or CHUNKED["ssd"](**inputs))
    first = known(counted, CPU, torch.float32)
    assert len(tried) == 2
    assert known(counted, CPU, torch.float32) == first
    assert len(tried) == 2
    monkeypatch.setattr(selftest, "versions", lambda: {"torch": "another"})
    known(counted, CPU, torch.float32)
    assert len(tried) == 4
    own_cache.write_text('{"damaged": ')
    known(counted, CPU, torch.float32)
    assert len(tried) == 6
    assert len(json.loads(own_cache.read_text())) == 1


def test_gpus_of_a_kind_have_the_same_fingerprint(monkeypatch):
    kinds = [
        SimpleNamespace(name=name, major=9, minor=0, total_memory=8, multi_processor_count=132, uuid=uuid)
        for name, uuid in (("H100", 1), ("H100", 2), ("H200", 3))
    ]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: kinds[device.index])
    first, same, other = (selftest.fingerprint(torch.device("cuda", index)) for index in range(3))
    assert first == same != other


@pytest.mark.parametrize(("how", "values", "gradients"), [("gradients", True, False), ("values", False, False)])
def test_only_a_wrong_kernel_falls_back_and_warns_once(monkeypatch, how, values, gradients):
    one = kernel("gla", damaged("gla", how))
    real = known
    monkeypatch.setattr(selftest, "known", lambda kernel, device, dtype: real(kernel, CPU, dtype))
    is_right = judge(one)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [is_right(False), is_right(True), is_right(True)] == [values, gradients, gradients]
    assert [str(each.message).partition(" (")[0] for each in caught] == ["a gla is wrong on this machine"] * (
        2 - values
    )
    torch._dynamo.reset()  # compiled code keeps what it took for a constant
    assert torch.compile(lambda x: x if is_right(False) else 2 * x, fullgraph=True, backend="eager")(
        torch.ones(1)
    ).tolist() == [1.0 if values else 2.0]


def test_a_trial_ignores_the_callers_modes(monkeypatch):
    """It ignores the caller's inference mode, hooks on saved tensors, and fake tensors."""
    real, saved = known, []
    monkeypatch.setattr(selftest, "known", lambda kernel, device, dtype: real(kernel, CPU, dtype))
    is_right = judge(kernel("ssd"))
    with (
        torch.inference_mode(),
        torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x),
        FakeTensorMode(),
        torch.autocast("cpu", torch.bfloat16),
    ):
        assert is_right(True)
    assert not saved
