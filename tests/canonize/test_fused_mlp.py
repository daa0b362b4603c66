"""Canon-D, activation and product of a host's MLP in one call give the same numbers as hooks."""

import copy
import pickle

import pytest
import torch
from tiny_hosts import PACKED, canonized, host, ids
from torch import nn
from torch.testing import assert_close
from transformers import DynamicCache

import canonlm
from canonlm.canonize import fused_mlp


def step(model, **call):
    """Logits, gradients and states of a training step, and the number of such calls."""
    calls, model = [], model.train()
    with pytest.MonkeyPatch.context() as patch:
        run = fused_mlp.canon_gated
        patch.setattr(fused_mlp, "canon_gated", lambda *args: calls.append(args) or run(*args))
        model.zero_grad()
        out = model(ids(), labels=ids(), **call)
        out.loss.backward()
    cache = call.get("past_key_values")
    states = [] if cache is None else [state.detach() for state in cache.canon_states.values()]
    return len(calls), out.logits.detach(), [p.grad for p in model.parameters()], states


@pytest.mark.parametrize(
    "call",
    [{}, PACKED, {"attention_mask": torch.ones(2, 10), "past_key_values": True}],
    ids=["plain", "packed", "cache"],
)
def test_a_step_equals_that_with_hooks(call, monkeypatch):
    def fresh():
        return call | {"past_key_values": DynamicCache()} if "past_key_values" in call else call

    runs, *fused = step(canonized("llama", "ABCD", dtype=torch.float32), **fresh())
    monkeypatch.setattr(fused_mlp, "is_usual", lambda mlp: False)
    none, *hooked = step(canonized("llama", "ABCD", dtype=torch.float32), **fresh())
    assert (runs, none) == (2, 0)
    assert_close(fused[0], hooked[0], atol=0, rtol=0)
    assert_close(fused[1], hooked[1], atol=2e-6, rtol=2e-5)
    assert_close(fused[2], hooked[2], atol=0, rtol=0)


def test_a_past_is_read_layer_by_layer():
    model = canonized("llama", "ABCD", dtype=torch.float32)
    cache = DynamicCache()
    model(ids(), past_key_values=cache)
    assert step(model, past_key_values=cache)[0] == 0


class Doubled(nn.Module):
    """An MLP with another forward."""

    def __init__(self, mlp):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = (
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
            mlp.act_fn,
        )

    def forward(self, x):
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_another_mlp_in_its_place_gets_hooks():
    model, other = (canonized("llama", "ABCD", dtype=torch.float32) for _ in range(2))
    for block in model.model.layers:
        block.mlp = Doubled(block.mlp)
    for block in other.model.layers:
        block.mlp.down_proj.weight.data *= 2
    runs, logits, *_ = step(model)
    assert runs == 0
    assert_close(logits, step(other)[1], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("kind", "usual"), [("llama", True), ("gemma2", True), ("granite", True), ("seed_oss", False), ("bitnet", False)]
)
def test_only_the_usual_forward_is_replaced(kind, usual):
    mlps = [part for name, part in host(kind).named_modules() if name.endswith(".mlp")]
    assert mlps
    assert [fused_mlp.is_usual(mlp) for mlp in mlps] == [usual] * len(mlps)


def test_copies_and_decanonized_models_behave_as_before():
    model = canonized("llama", "ABCD", dtype=torch.float32)
    expected, without = (step(each)[1] for each in (model, host("llama", dtype=torch.float32)))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert torch.equal(step(other)[1], expected)
        with torch.no_grad():
            for name, parameter in other.named_parameters():
                if "canon_" in name:
                    parameter.zero_()
        assert torch.equal(step(other)[1], without)
        assert torch.equal(step(model)[1], expected)
    for one in (other, model):
        plain = canonlm.decanonize(one)
        assert type(plain.model.layers[0].mlp) is type(host("llama").model.layers[0].mlp)
        assert torch.equal(step(plain)[1], without)
