"""Standard MLPs and experts, against token-by-token definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm import CanonLMConfig
from canonlm.models.cache import Layout
from canonlm.models.mlp import MoE

CLOSE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.mark.parametrize("sites", ["", "D"])
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_standard_mlp_equals_its_definition(small_model, sites, act):
    mlp = small_model(mlp="standard", canon_set=sites, hidden_act=act, mlp_bias=True).model.layers[0].mlp
    x_BTD = torch.randn(2, 7, 32, dtype=torch.float64)
    up = x_BTD @ mlp.up_proj.weight.T + mlp.up_proj.bias
    if sites:
        taps = mlp.canonD_up.weight[:, 0]
        past = torch.nn.functional.pad(up, (0, 0, 3, 0))
        up = up + sum(past[:, i : i + 7] * taps[:, i] for i in range(4))
    active = up * up.sigmoid() if act == "silu" else up.clamp(min=0) ** 2
    expected = active @ mlp.down_proj.weight.T + mlp.down_proj.bias
    y_BTD, router_loss = mlp(x_BTD, Layout())
    assert_close(y_BTD, expected, **CLOSE)
    assert router_loss is None


# Experts


def experts(num_experts=4, capacity=1.0, dtype=torch.float64, **config):
    config = {"hidden_size": 6, "intermediate_size": 5, "num_attention_heads": 1, **config}
    moe = MoE(CanonLMConfig(mlp="moe", num_experts=num_experts, expert_capacity=capacity, **config), 0).to(dtype)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter)
    return moe


def token_by_token(moe, x_BTD, mask_BT):
    """Output and router loss (Switch Transformer, Eq. 1-6)."""
    num_experts, e = moe.num_experts, moe.experts
    tokens = int(mask_BT.sum())
    limit = math.ceil(moe.capacity_factor * tokens / num_experts) if moe.training else tokens
    taken, expected, probabilities, rows = [0] * num_experts, [0] * num_experts, [], []
    for x_TD, mask_T in zip(x_BTD, mask_BT, strict=True):
        for x, real in zip(x_TD, mask_T, strict=True):
            y = torch.zeros_like(x)
            if real:
                p = (moe.router.weight @ x).softmax(0)
                probabilities.append(p)
                i = int(p.argmax())
                expected[i] += 1
                if taken[i] < limit:
                    taken[i] += 1
                    gate, up = e.gate_proj[i] @ x, e.up_proj[i] @ x
                    y = p[i] * (e.down_proj[i] @ (torch.nn.functional.silu(gate) * up))
            rows.append(y)
    mean = torch.stack(probabilities).mean(0)
    loss = num_experts * sum(expected[i] / tokens * mean[i] for i in range(num_experts))
    return torch.stack(rows).view_as(x_BTD), loss, sum(expected) - sum(taken)


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3).filter(any),
    num_experts=st.integers(1, 6),
    capacity=st.sampled_from([0.3, 1.0, 1.25, 9.0]),
    training=st.booleans(),
    left=st.booleans(),
    seed=st.integers(0, 999),
)
def test_experts_equal_their_definition(lengths, num_experts, capacity, training, left, seed):
    torch.manual_seed(seed)
    moe = experts(num_experts, capacity).train(training)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    mask = mask.flip(1) if left else mask
    x = torch.randn(len(lengths), 9, 6, dtype=torch.float64, requires_grad=True)
    y, loss = moe(x, Layout(attention_mask=mask))
    expected_y, expected_loss, dropped = token_by_token(moe, x, mask)
    if not training:
        assert dropped == 0
        assert loss is None
        loss = expected_loss
    weights = torch.randn_like(y)
    variables = [x, *moe.parameters()]
    got, expected = (
        (a, b, torch.autograd.grad((a * weights).sum() + b, variables, retain_graph=True))
        for a, b in ((y, loss), (expected_y, expected_loss))
    )
    assert_close(got, expected, **CLOSE)


def test_routing_is_not_rounded_under_autocast():
    """256 and 257 are the same number in bfloat16: the first expert would get a token of the second."""
    moe = experts(2, dtype=torch.float32).eval()
    x = torch.zeros(1, 1, 6)
    x[..., 0] = 1
    with torch.no_grad():
        moe.router.weight[:, 0] = torch.tensor([256.0, 257.0])
        for parameter in moe.experts.parameters():
            parameter[0] = 0
    with torch.autocast("cpu", torch.bfloat16):
        y, _ = moe(x, Layout())
    assert y.dtype == torch.bfloat16
    assert y.abs().sum() > 0
