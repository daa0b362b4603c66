"""Kimi Delta Attention against transformers' own layer, with the same weights."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

from canonlm.models.cache import Layout

NAMES = {
    **{f"{name}_proj.weight": f"{name}_proj.weight" for name in "qkvbo"},
    **{"a_proj.0.weight": "forget_gate.f_a_proj.weight", "a_proj.1.weight": "forget_gate.f_b_proj.weight"},
    **{"g_proj.0.weight": "g_a_proj.weight", "g_proj.1.weight": "g_b_proj.weight"},
    **{"dt_bias": "forget_gate.dt_bias", "A_log": "forget_gate.A_log", "o_norm.weight": "o_norm.weight"},
}
CONVS = [f"{name}_conv1d.weight" for name in "qkv"]


def to_kimi(ours):
    theirs = {NAMES[name]: x for name, x in ours.items() if name not in CONVS}
    theirs["forget_gate.A_log"] = theirs["forget_gate.A_log"].view(1, 1, -1, 1)
    return theirs | {"conv1d.weight": torch.cat([ours[name] for name in CONVS])}


def from_kimi(theirs):
    ours = {name: theirs[other] for name, other in NAMES.items()}
    ours["A_log"] = ours["A_log"].flatten()
    return ours | dict(zip(CONVS, theirs["conv1d.weight"].chunk(3), strict=True))


@pytest.mark.parametrize("time", [1, 64, 150])
def test_a_layer_equals_transformers(small_model, time):
    mixer = small_model(torch.float32, mixers=["kda"], canon_set="b").model.layers[0].mixer
    config = KimiLinearConfig(hidden_size=32, linear_num_heads=2, linear_head_dim=16, num_hidden_layers=1)
    theirs = KimiLinearDeltaAttention(config, 0)
    theirs.load_state_dict(to_kimi(mixer.state_dict()))
    x_BTD = torch.randn(2, time, 32, generator=torch.Generator().manual_seed(time))
    x_BTD.requires_grad_()
    got, expected = mixer(x_BTD, Layout())[0], theirs(x_BTD)
    assert_close(got, expected, atol=1e-5, rtol=0)
    assert expected.abs().max() > 1e-3
    gradients = [torch.autograd.grad(y.square().sum(), x_BTD)[0] for y in (got, expected)]
    assert_close(*gradients, atol=1e-5, rtol=0)
    assert_close(from_kimi(theirs.state_dict()), dict(mixer.state_dict()), atol=0, rtol=0)
