"""Canon-B and the rotary embedding in one pass on a CPU, against a loop over tokens in float64 and the two steps."""

import pytest
import torch
from fused_steps import step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._inductor.utils import run_and_get_code
from torch.testing import assert_close

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.positions import rotary_table, rotate
from canonlm.ops import canon_conv
from canonlm.ops.causal_conv import causal_conv
from canonlm.ops.numba_conv import TOKENS
from canonlm.ops.rotary_conv_cpu import rotary_conv, usable_rotary


def case(seed, batch, time, heads, head_dim, half, kernel, docs=False, own_angles=False):
    torch.manual_seed(seed)
    x, weight = torch.randn(batch, time, heads * head_dim), torch.randn(kernel, heads * head_dim)
    doc_ids = (torch.rand(batch, time) < 0.1).long().cumsum(1) if docs else None
    positions = torch.randint(1000, (batch if own_angles else 1, time))
    return (x.requires_grad_(), weight.requires_grad_()), doc_ids, rotary_table(positions, 2 * half, 1e4, x.dtype)


def by_token(inputs, doc_ids, table, heads, rotated):
    """The definition, token after token."""
    (x, weight), (cos, sin) = inputs, table
    kernel, half, head_dim = len(weight), cos.shape[-1], x.shape[-1] // heads
    rows = []
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            past = [
                s for s in range(max(0, t - kernel + 1), t + 1) if doc_ids is None or doc_ids[b, s] == doc_ids[b, t]
            ]
            y = sum(x[b, s] * weight[kernel - 1 - t + s] for s in past).view(heads, head_dim)
            angle = cos[b if len(cos) > 1 else 0, t, 0] + 1j * sin[b if len(sin) > 1 else 0, t, 0]
            z = torch.complex(y[:rotated, :half], y[:rotated, half : 2 * half]) * angle
            turned = torch.cat([z.real, z.imag, y[:rotated, 2 * half :]], dim=-1)
            rows.append(torch.cat([turned, y[rotated:]]))
    return torch.stack(rows).view(*x.shape[:2], heads, head_dim)


def in_steps(inputs, doc_ids, table, heads, rotated):
    x, weight = inputs
    y = causal_conv(x, weight.t()[:, None], doc_ids_BT=doc_ids).unflatten(-1, (heads, -1))
    return rotate(y, *table, rotated) if rotated else y


def fused(inputs, doc_ids, table, heads, rotated):
    return rotary_conv(*inputs, doc_ids, *table, heads, rotated)


def results(form, inputs, *rest):
    """The value and both gradients. dy has attention's layout: heads before time."""
    y = form(inputs, *rest)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().reshape(y.transpose(1, 2).shape).to(y.dtype).transpose(1, 2)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


@settings(max_examples=6)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 2),
    time=st.one_of(st.integers(1, 9), st.sampled_from([TOKENS - 1, TOKENS + 1, TOKENS + 6])),
    heads=st.integers(1, 3),
    half=st.integers(1, 20),
    rest=st.sampled_from([0, 1, 17]),
    rotated=st.integers(0, 4),
    kernel=st.sampled_from([1, 4]),
    docs=st.booleans(),
    own_angles=st.booleans(),
)
def test_values_and_gradients(seed, batch, time, heads, half, rest, rotated, kernel, docs, own_angles):
    """Equal to the definition, and to the two steps bit by bit."""
    inputs, doc_ids, table = case(seed, batch, time, heads, 2 * half + rest, half, kernel, docs, own_angles)
    got = results(fused, inputs, doc_ids, table, heads, rotated)
    assert_close(got, results(in_steps, inputs, doc_ids, table, heads, rotated), atol=0, rtol=0)
    doubles = [x.detach().double().requires_grad_() for x in inputs]
    angles = [each.double() for each in table]
    expected = results(by_token, doubles, doc_ids, angles, heads, rotated)
    assert_close(got, [x.float() for x in expected], atol=1e-5 * time**0.5, rtol=1e-5)


def test_any_strides_and_any_number_of_threads():
    (x, weight), doc_ids, table = case(1, 4, 300, 6, 40, 16, 4, docs=True)
    before = torch.get_num_threads()
    for part in (lambda x: x[..., 40:200], lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)[..., 40:200]):
        expected = results(in_steps, (part(x), weight[:, 40:200]), doc_ids, table, 4, 3)
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                got = results(fused, (part(x), weight[:, 40:200]), doc_ids, table, 4, 3)
                assert_close(got, expected, atol=0, rtol=0)
        finally:
            torch.set_num_threads(before)


@pytest.mark.parametrize("docs", [False, True])
def test_operator_passes_opcheck(docs):
    inputs, doc_ids, table = case(0, 2, 9, 2, 12, 4, 4, docs)
    torch.library.opcheck(torch.ops.canonlm.cpu_rotary_conv.default, (*inputs, doc_ids, *table, 2, 1))


def test_other_dtypes_are_left_to_pytorch():
    (x, weight), _, table = case(0, 1, 9, 2, 12, 4, 4)
    assert usable_rotary(x, weight, *table)
    assert not usable_rotary(x.bfloat16(), weight, *table)
    assert not usable_rotary(x.double(), weight.double(), *(each.double() for each in table))


SIZES = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50, "canon_set": "ABCD"}


def model_with(**changes):
    torch.manual_seed(0)
    return CanonLMForCausalLM(CanonLMConfig(**{**SIZES, **changes}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "fused_sites"),
    [
        ({}, 6),
        ({"num_key_value_heads": 2, "rope_heads": 2, "rope_dim": 6, "qk_norm": True}, 6),
        ({"canon_set": "K:k2:zero,QV"}, 6),
        ({"rope_dim": 0}, 0),
        ({"canon_bias": True}, 0),
        ({"canon_set": "ACDK"}, 0),
    ],
    ids=["all", "some heads, part of each", "variants", "no positions", "bias", "keys alone"],
)
def test_a_model_trains_the_same_with_and_without_it(changes, fused_sites, monkeypatch):
    """To the bit, in packed documents."""
    model, ids = model_with(**changes), torch.randint(50, (2, 40))
    doc_ids = (torch.arange(40) // 7).expand(2, -1)
    count, with_it = step(model, ids, canon_conv, "rotary_conv", doc_ids=doc_ids)
    monkeypatch.setattr(canon_conv, "usable_rotary", lambda *tensors: False)
    none, without = step(model, ids, canon_conv, "rotary_conv", doc_ids=doc_ids)
    assert (count, none) == (fused_sites, 0)
    assert_close(with_it, without, atol=0, rtol=0)


@pytest.mark.slow
def test_a_compiled_model_has_it_in_one_graph():
    model, ids = model_with(num_hidden_layers=1), torch.randint(50, (2, 40))
    _, eager = step(model, ids, canon_conv, "rotary_conv")
    forward = torch.compile(model, fullgraph=True)
    model.zero_grad()
    loss, codes = run_and_get_code(lambda: forward(input_ids=ids, labels=ids, use_cache=False).loss)
    loss.backward()
    compiled = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    assert "cpu_rotary_conv" in codes[0]
    assert_close(compiled, eager, atol=1e-6, rtol=2e-5)
