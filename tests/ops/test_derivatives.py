"""Derivatives other than a first backward, of every operator of ours and of models made of them."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, jvp, vmap
from torch.testing import assert_close
from transformers import Qwen3Config, Qwen3ForCausalLM

import canonlm
from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.ops import causal_conv as convolution
from canonlm.ops import fla
from canonlm.ops.causal_conv import causal_conv
from canonlm.ops.gated_delta_rule import gated_delta_rule
from canonlm.ops.gated_linear_attention import gated_linear_attention
from canonlm.ops.ssd import ssd

DOCS = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 2, 2]])


def normal(*shapes, dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def conv(x, weight, state):
    return causal_conv(x, weight, doc_ids_BT=DOCS, state_BCK=state)


def gla(q, k, v, g, state):
    return gated_linear_attention(q, k, v, -g.exp(), state_BJKV=state, doc_ids_BT=DOCS)


def delta_rule(q, k, v, g, beta, state):
    return gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), state_BHKV=state, doc_ids_BT=DOCS)


def vector_rule(q, k, v, g, beta, r, state):
    return gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), r, state_BHKV=state, doc_ids_BT=DOCS)


def duality(x, dt, A, B, C, state):
    return ssd(x, dt.exp(), -A.exp(), B, C, state_BHPN=state, doc_ids_BT=DOCS)


TOKENS = 2, 5, 2
OPS = {
    "cpu_conv": (conv, [(2, 5, 3), (3, 1, 4), (2, 3, 4)]),
    "in place": (conv, [(2, 5, 3), (3, 1, 4), (2, 3, 4)]),
    "gated_linear_attention": (gla, [(*TOKENS, 2), (2, 5, 1, 2), (2, 5, 1, 3), (2, 5, 1, 2), (2, 1, 2, 3)]),
    "gated_delta_rule": (delta_rule, [(*TOKENS, 2), (*TOKENS, 2), (*TOKENS, 3), TOKENS, TOKENS, (2, 2, 2, 3)]),
    "vectors": (
        vector_rule,
        [(*TOKENS, 2), (*TOKENS, 2), (*TOKENS, 3), (*TOKENS, 2), TOKENS, (*TOKENS, 2), (2, 2, 2, 3)],
    ),
    "ssd": (duality, [(*TOKENS, 2), TOKENS, (2,), (2, 5, 1, 2), (2, 5, 1, 2), (2, 2, 2, 2)]),
}


@pytest.mark.parametrize("name", OPS)
def test_every_derivative_in_double(name, monkeypatch):
    function, shapes = OPS[name]
    if name == "in place":
        monkeypatch.setattr(convolution, "usable", lambda *_: False)
    tensors = normal(*shapes)
    checks = {"check_forward_ad": True, "check_batched_grad": name != "in place", "check_batched_forward_grad": True}
    assert gradcheck(function, tensors, fast_mode=True, **checks)
    assert gradgradcheck(function, tensors, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True)


def test_no_other_operator_has_a_backward():
    """Those of Triton refuse a second one (tests/kernels); `materialize` is the identity."""
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("canonlm::")}
    with_backward = {name for name in names if f"{name}_backward" in names}
    assert with_backward == {*OPS, "conv", "gated", "normed", "rotary"} - {
        "in place",
        "vectors",
    }


def test_fla_refuses_a_second_backward(monkeypatch):
    """A kernel's gradients do not depend on its inputs, for autograd: the gradient of a square would be zero."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, dy):
            return 2 * dy * ctx.saved_tensors[0].detach()

    def kernel(q, g, **_):
        return (Square.apply(q), g)

    monkeypatch.setattr(fla.importlib, "import_module", lambda _: type("Module", (), {"kernel": kernel}))
    [q] = normal((1, 2, 3))
    o, _ = fla.run("any", "kernel", {"q": q, "g": torch.zeros(3)}, None, None)
    [dq] = torch.autograd.grad(o.sum(), q, create_graph=True)
    assert_close(dq, 2 * q)
    with pytest.raises(NotImplementedError, match=r"torch\.func"):
        dq.sum().backward()


SIZES = {"vocab_size": 50, "hidden_size": 32, "num_attention_heads": 2, "initializer_range": 0.2}
MODELS = {
    "attention": {
        "num_hidden_layers": 1,
        "canon_set": "E:smear,A:silu,KV:dynamic,C:avg,D",
    },
    "experts": {"num_hidden_layers": 1, "canon_set": "AM:scaled", "mlp": "moe", "num_experts": 2},
    "recurrent": {
        "num_hidden_layers": 4,
        "mixers": ["gdn", "gla", "mamba2", "retention"],
        "canon_set": "AbCD",
    },
}


def model_of(name):
    torch.manual_seed(0)
    if name == "canonized":
        sizes = {"intermediate_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 16}
        model = canonlm.canonize(Qwen3ForCausalLM(Qwen3Config(**SIZES | sizes)), "ABCD", init="uniform")
    else:
        model = CanonLMForCausalLM(CanonLMConfig(**SIZES, **MODELS[name]))
    model = model.double().eval()
    model.set_attn_implementation("eager")  # torch's fused attention has neither, and says so
    return model


@pytest.mark.parametrize("name", [*MODELS, "canonized"])
def test_models(name):
    """Forward mode against the gradient, second derivatives against its differences, per-sample gradients against one
    sample after the other; with all logits and with `loss_only`; in packed rows."""
    model = model_of(name)
    torch.manual_seed(1)
    ids, positions = torch.randint(50, (2, 9)), torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2]).expand(2, -1)
    x = model.get_input_embeddings()(ids).detach()
    direction = torch.randn_like(x)
    options = {"labels": ids, "position_ids": positions, "use_cache": False}

    for more in [{}] if name == "canonized" else [{}, {"loss_only": True}]:

        def loss(x):
            return model(inputs_embeds=x, **options, **more).loss  # noqa: B023

        def gradient(x, **how):
            x = x.requires_grad_()
            return torch.autograd.grad(loss(x), x, **how)[0]

        slope = (gradient(x.clone()) * direction).sum()
        close = 1e-4 if name == "canonized" else 1e-6  # Qwen3 computes its loss in single precision
        assert_close(jvp(loss, (x,), (direction,))[1].double(), slope, atol=close, rtol=close)
        step = 1e-4 * direction
        curvature = (gradient(x + step) - gradient(x - step)) / 2e-4
        by_reverse = torch.autograd.grad((gradient(y := x.clone(), create_graph=True) * direction).sum(), y)[0]
        for result in (by_reverse, jvp(grad(loss), (x,), (direction,))[1]):
            assert (result - curvature).norm() < 2e-2 * curvature.norm()

    parameters = dict(model.named_parameters())

    def loss_of_one(parameters, ids):
        return functional_call(
            model, parameters, (), {"input_ids": ids[None], "labels": ids[None], "use_cache": False}
        ).loss

    per_sample = vmap(grad(loss_of_one), in_dims=(None, 0))({k: p.detach() for k, p in parameters.items()}, ids)
    for i, row in enumerate(ids):
        needed = torch.autograd.grad(loss_of_one(parameters, row), list(parameters.values()), allow_unused=True)
        for key, one in zip(parameters, needed, strict=True):
            assert_close(per_sample[key][i], torch.zeros_like(per_sample[key][i]) if one is None else one)
