"""The kernels of flash-linear-attention, through our dispatch, against the step-by-step recurrences in float64."""

import inspect

import pytest
import torch

from canonlm.ops import fla
from canonlm.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_recurrent
from canonlm.ops.gated_linear_attention import gated_linear_attention, gated_linear_attention_recurrent
from canonlm.ops.ssd import ssd, ssd_recurrent

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

BATCH, TIME, HEADS, KEYS, VALUES = 2, 203, 4, 64, 128
OPS = {
    "gla": (gated_linear_attention, gated_linear_attention_recurrent, "state_BJKV"),
    "gla, grouped": (gated_linear_attention, gated_linear_attention_recurrent, "state_BJKV"),
    "delta rule": (gated_delta_rule, gated_delta_rule_recurrent, "state_BHKV"),
    "delta rule by channel": (gated_delta_rule, gated_delta_rule_recurrent, "state_BHKV"),
    "ssd": (ssd, ssd_recurrent, "state_BHPN"),
}


def inputs_of(name):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    tokens = BATCH, TIME
    if name == "ssd":
        state = normal(BATCH, HEADS, VALUES, KEYS)
        dt = torch.nn.functional.softplus(normal(*tokens, HEADS) - 2)
        return [normal(*tokens, HEADS, VALUES), dt, -normal(HEADS).exp(), normal(*tokens, 1, KEYS) / 8,
                normal(*tokens, 1, KEYS) / 8], state  # fmt: skip
    kv_heads = 2 if name == "gla, grouped" else HEADS
    q, k = normal(*tokens, HEADS, KEYS), normal(*tokens, kv_heads, KEYS)
    v, state = normal(*tokens, kv_heads, VALUES), normal(BATCH, kv_heads, KEYS, VALUES)
    if name.startswith("delta rule"):
        q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
        channels = [KEYS] if name == "delta rule by channel" else []
        decays = torch.nn.functional.logsigmoid(normal(*tokens, HEADS, *channels) + 2)
        return [q, k, v, decays, normal(*tokens, HEADS).sigmoid()], state
    return [q, k, v, torch.nn.functional.logsigmoid(normal(*tokens, kv_heads, KEYS)) / 16], state


def outputs_and_gradients(op, inputs, state, state_name, doc_ids, weights):
    leaves = [x.detach().requires_grad_() for x in (*inputs, state)]
    y, final = op(*leaves[:-1], **{state_name: leaves[-1]}, doc_ids_BT=doc_ids)
    loss = (y * weights[0].to(y)).sum() + (final * weights[1].to(final)).sum()
    return y, final, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("dtype", "close"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name, dtype, close, packed, monkeypatch):
    pytest.importorskip("fla")
    op, recurrent, state_name = OPS[name]
    called = []
    run = fla.run
    monkeypatch.setattr(fla, "run", lambda *args, **kwargs: called.append(args[1]) or run(*args, **kwargs))
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    module = inspect.getmodule(recurrent)
    is_right = module._channel_kernel_is_right if name == "delta rule by channel" else module._kernel_is_right
    expected_kernel = dtype == torch.bfloat16 and is_right(True)
    inputs, state = inputs_of(name)
    narrow = [x.to(dtype) for x in inputs]
    gates = {"ssd": (1, 2), "delta rule": (3, 4), "delta rule by channel": (3, 4)}.get(name, (3,))
    given = [x.float() if i in gates else y for i, (x, y) in enumerate(zip(inputs, narrow, strict=True))]
    doc_ids = None
    if packed:
        doc_ids = torch.zeros(BATCH, TIME, dtype=torch.long)
        doc_ids[0, 50:], doc_ids[0, 51:], doc_ids[1, 130:] = 1, 2, 1
    weights = torch.randn(BATCH, TIME, HEADS, VALUES), torch.randn(state.shape)
    wide = [x.double() for x in given]
    expected = outputs_and_gradients(recurrent, wide, state, state_name, doc_ids, weights)
    on_gpu = [x.cuda() for x in given], state.float().cuda()
    got = outputs_and_gradients(op, *on_gpu, state_name, None if doc_ids is None else doc_ids.cuda(), weights)
    assert bool(called) == expected_kernel
    called.clear()
    with torch.no_grad():
        got_alone = op(*on_gpu[0], **{state_name: on_gpu[1]}, doc_ids_BT=None if doc_ids is None else doc_ids.cuda())
    assert bool(called) == (dtype == torch.bfloat16 and is_right(False))
    for one, other in zip(got_alone, expected[:2], strict=True):
        assert (one.cpu().double() - other).abs().max() < close * other.abs().max()
    for idx, (one, other) in enumerate(zip(got, expected, strict=True)):
        error = (one.cpu().double() - other).abs().max() / other.abs().max()
        assert error < close, f"result {idx}: {error:.1e} of the largest"
    assert got[0].dtype == dtype
    assert got[1].dtype == torch.float32
