"""RWKV-7 against its equations, one token and head after the other, as products of matrices."""

import math

import pytest
import torch
from torch.nn.functional import normalize
from torch.testing import assert_close

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.cache import Layout
from canonlm.ops.varlen import as_documents

HEADS, WIDTH, HIDDEN = 2, 16, 32


def by_equations(mixer, x_TD, shifts, first=None):
    """The mixer's output and values. shifts: by what is projected, how much of the token before is read. first: the
    values of the first layer."""
    before = torch.cat([torch.zeros_like(x_TD[:1]), x_TD[:-1]])
    weights = dict(mixer.named_parameters())

    def read(name):
        return (1 - shifts[name]) * x_TD + shifts[name] * before

    def linear(name, x):
        return x @ weights[f"{name}.weight"].T

    q, k, v = (linear(f"{name}_proj", read(name)) for name in "qkv")
    if first is not None:
        share = (linear("value_proj.1", linear("value_proj.0", read("v"))) + weights["value_proj.1.bias"]).sigmoid()
        v = (1 - share) * v + share * first
    w = linear("decay_proj.1", linear("decay_proj.0", read("decay")).tanh()) + weights["decay_proj.1.bias"]
    a = (linear("rate_proj.1", linear("rate_proj.0", read("rate"))) + weights["rate_proj.1.bias"]).sigmoid()
    gate = linear("gate_proj.1", linear("gate_proj.0", read("gate")).sigmoid())
    y = torch.zeros(len(x_TD), HEADS * WIDTH, dtype=torch.float64)
    for h in range(HEADS):
        own = slice(h * WIDTH, (h + 1) * WIDTH)
        xi, alpha, rho = (weights[name][own] for name in ("removal", "share", "bonus"))
        state = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)  # values x keys, as in the paper
        for t in range(len(x_TD)):
            removed = normalize(k[t, own] * xi, dim=0)
            added = k[t, own] * (1 + (a[t, own] - 1) * alpha)
            decay = torch.exp(-math.exp(-0.5) * torch.sigmoid(w[t, own]))
            state = state @ (decay.diag() - torch.outer(removed, a[t, own] * removed)) + torch.outer(v[t, own], added)
            o = state @ q[t, own]
            o = (o - o.mean()) / (o.var(correction=0) + 1e-5 * WIDTH).sqrt()
            o = o * weights["norm_weight"][own] + weights["norm_bias"][own]
            y[t, own] = o + (q[t, own] * rho * added).sum() * v[t, own]
    return linear("o_proj", y * gate), v


@pytest.fixture
def mixer(small_model, request):
    model = small_model(mixers=["rwkv7"], canon_set=request.param)
    return model.model.layers[0].mixer


@pytest.mark.parametrize("mixer", ["b", ""], indirect=True)
def test_a_layer_equals_the_equations(mixer):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name in ("removal", "share", "bonus", "norm_weight", "norm_bias"):
            mixer.get_parameter(name).normal_(generator=generator)
    names = ("q", "k", "v", "decay", "rate", "gate")
    shifts = dict(zip(names, mixer.shifts, strict=True)) if hasattr(mixer, "shifts") else dict.fromkeys(names, 0)
    x_BTD = torch.randn(1, 37, HIDDEN, dtype=torch.float64, generator=generator)
    with torch.no_grad():
        expected, _ = by_equations(mixer, x_BTD[0], shifts)
        got = mixer(x_BTD, Layout())[0][0]
    assert_close(got, expected, atol=1e-5, rtol=1e-5)  # the norm of removal keys adds a constant, 1e-6
    assert expected.abs().max() > 0.01


VALUES = {"mixer_options": {"rwkv7": {"value_residual": True}}}


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_initial_values_are_those_of_the_release(small_model, layer):
    config = small_model(mixers=["rwkv7"], num_hidden_layers=3, canon_set="b", **VALUES).config
    mixer = CanonLMForCausalLM(config).model.layers[layer].mixer
    weights = {name: weight.tolist() for name, weight in mixer.named_parameters()}
    depth, rest = layer / 2, 1 - layer / 3
    for i in range(HIDDEN):
        z = (i % WIDTH - (WIDTH - 1) / 2) / ((WIDTH - 1) / 2)
        line, zigzag = i / (HIDDEN - 1) - 0.5, z * abs(z)
        expected = {
            "decay_proj.1.bias": -6 + 6 * (i / (HIDDEN - 1)) ** (1 + depth**0.3) + 0.5 + 2.5 * zigzag,
            "rate_proj.1.bias": -0.19 + 0.3 * zigzag + 0.4 * line,
            **{"removal": 0.71 - 0.1 * line, "share": 1.02, "bonus": -0.04},
            **{"norm_weight": ((layer + 1) / 3) ** 0.7, "norm_bias": 0},
            **({"value_proj.1.bias": 0.73 - 0.4 * line} if layer else {}),
        }
        assert {name: weights[name][i] for name in expected} == pytest.approx(expected, abs=1e-5)
        shifts = [1 - (i / HIDDEN) ** (power * rest) for power in (0.2, 0.7, 0.7, 0.9, 0.9, 0.2)]
        assert [row[i] for row in weights["shifts"]] == pytest.approx(shifts, abs=1e-5)


def test_later_layers_mix_the_first_values_into_theirs(small_model):
    """Layers 1 and 3 are of RWKV-7, after one of attention; each layer's input is what the model gave it."""
    model = small_model(mixers=["attention", "rwkv7"], num_hidden_layers=6, canon_sets=["", "b"], **VALUES)
    mixers = [model.model.layers[i].mixer for i in (1, 3, 5)]
    assert [hasattr(mixer, "value_proj") for mixer in mixers] == [False, True, True]
    assert mixers[1].value_proj[0].weight.shape == (32, HIDDEN)
    calls = []
    for mixer in mixers:
        mixer.register_forward_hook(lambda _, inputs, outputs: calls.append((inputs[0][0], outputs[0][0])))
    with torch.no_grad():
        model(torch.arange(11)[None], use_cache=False)
        first = None
        for mixer, (x_TD, y_TD) in zip(mixers, calls, strict=True):
            shifts = dict(zip(("q", "k", "v", "decay", "rate", "gate"), mixer.shifts, strict=True))
            expected, values = by_equations(mixer, x_TD, shifts, first)
            assert_close(y_TD, expected, atol=1e-5, rtol=1e-5)
            first = values if first is None else first


def test_recomputed_layers_get_the_first_values(small_model):
    model = small_model(mixers=["rwkv7"], num_hidden_layers=3, canon_set="AbB", **VALUES).train()
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        ids = torch.arange(24).reshape(2, 12)
        model(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    assert_close(*gradients, atol=0, rtol=0)
    assert gradients[0]["model.layers.2.mixer.value_proj.0.weight"].abs().max() > 0
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(
        ValueError, match=r"^use_reentrant: expected False with attention residuals and value_residual: "
    ):
        model(ids)


def test_a_rank_without_values_is_refused():
    with pytest.raises(
        ValueError, match=r"^mixer_options.rwkv7.value_rank: expected none without value_residual, got 8"
    ):
        CanonLMConfig(mixers=["rwkv7"], mixer_options={"rwkv7": {"value_rank": 8}})


@pytest.mark.parametrize("mixer", ["b"], indirect=True)
def test_the_shift_does_not_reach_into_another_document(mixer):
    x_BTD = torch.randn(1, 9, HIDDEN, dtype=torch.float64)
    docs = torch.tensor([[0] * 4 + [1] * 5])
    with torch.no_grad():
        packed = mixer(x_BTD, Layout(documents=as_documents(docs)))[0]
        alone = [mixer(part, Layout())[0] for part in x_BTD.split([4, 5], dim=1)]
    assert_close(packed, torch.cat(alone, dim=1))
