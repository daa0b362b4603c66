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

IDS = torch.arange(36).reshape(2, 18) * 7 % 61
EXPERTS = {"mlp": "moe", "num_experts": 4, "expert_capacity": 1.0, "canon_set": "ABC"}
MODELS = {
    "standard": {"mlp": "standard", "canon_set": "ABCD"},
    "relu2": {"mlp": "standard", "hidden_act": "relu2", "canon_set": "D", "mlp_bias": True},
    "gated relu2": {"hidden_act": "relu2", "canon_set": "D"},
    "moe": EXPERTS,
}
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


def test_tokens_over_capacity_are_dropped_in_order():
    moe = experts(2, capacity=0.5).train()
    with torch.no_grad():
        moe.router.weight[0] = -moe.router.weight[1]
    x = moe.router.weight[0].repeat(2, 4, 1)  # all eight choose the first expert; its capacity is ceil(0.5 * 8 / 2) = 2
    y, _ = moe(x, Layout())
    assert (y.flatten(0, 1).abs().sum(-1) > 0).tolist() == [True] * 2 + [False] * 6
    assert (moe.eval()(x, Layout())[0].abs().sum(-1) > 0).all()


def test_the_router_loss_makes_experts_equally_busy():
    moe, x = experts(4).train(), torch.randn(1, 256, 6, dtype=torch.float64)
    with torch.no_grad():
        moe.router.weight.mul_(0.1)[2] += 0.3
        x += 1

    def busiest():
        return (x[0] @ moe.router.weight.T).argmax(-1).bincount(minlength=4).max() / 256

    assert busiest() > 0.9
    optimizer = torch.optim.Adam([moe.router.weight], lr=0.01)
    for _ in range(100):
        optimizer.zero_grad()
        moe(x, Layout())[1].backward()
        optimizer.step()
    assert busiest() < 0.4


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


def loss_and_gradients(model, compiled=None, **inputs):
    model.zero_grad()
    forward = model if compiled is None else compiled
    loss = forward(input_ids=IDS, labels=IDS, use_cache=False, **inputs).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_the_router_loss(small_model, reentrant):
    model = small_model(**EXPERTS, router_loss_weight=5.0).train()
    expected = loss_and_gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_close(loss_and_gradients(model), expected, **CLOSE)


def test_hidden_states_are_those_of_the_stream(small_model):
    hidden = small_model(**EXPERTS).train()(IDS, output_hidden_states=True).hidden_states
    assert [tuple(h.shape) for h in hidden] == [(2, 18, 32)] * 3


def test_biases_of_experts_are_refused():
    with pytest.raises(ValueError, match=r'^mlp_bias: expected False with mlp = "moe", got True$'):
        CanonLMConfig(mlp="moe", mlp_bias=True)
