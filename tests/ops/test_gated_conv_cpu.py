"""silu(conv(gate)) * conv(up) in one pass on a CPU, against a loop over tokens in float64 and separate steps."""

import pytest
import torch
from fused_steps import step
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu
from torch.testing import assert_close

from canonlm import CanonLayer, CanonLMConfig, CanonLMForCausalLM
from canonlm.ops import canon_conv
from canonlm.ops.causal_conv import causal_conv
from canonlm.ops.cpu_gated import STRIP
from canonlm.ops.gated_conv_cpu import convolve_gated, usable_gated
from canonlm.ops.numba_conv import TOKENS


def case(seed, batch, time, channels, kernel, docs=False):
    torch.manual_seed(seed)
    inputs = [torch.randn(batch, time, channels) for _ in range(2)] + [torch.randn(kernel, channels) for _ in range(2)]
    doc_ids = (torch.rand(batch, time) < 0.1).long().cumsum(1) if docs else None
    return [x.requires_grad_() for x in inputs], doc_ids


def by_token(gate, up, gate_taps, up_taps, doc_ids):
    """The definition: every output is a sum over the tokens of its document within the kernel's reach."""
    columns = []
    for t in range(gate.shape[1]):
        sums = []
        for x, taps in ((gate, gate_taps), (up, up_taps)):
            terms = []
            for s in range(max(0, t - len(taps) + 1), t + 1):
                seen = 1 if doc_ids is None else (doc_ids[:, s] == doc_ids[:, t])[:, None]
                terms.append(seen * x[:, s] * taps[len(taps) - 1 - t + s])
            sums.append(sum(terms))
        columns.append(sums[0] / (1 + torch.exp(-sums[0])) * sums[1])
    return torch.stack(columns, dim=1)


def in_steps(gate, up, gate_taps, up_taps, doc_ids):
    convolved = [
        causal_conv(x, taps.t()[:, None], doc_ids_BT=doc_ids) for x, taps in ((gate, gate_taps), (up, up_taps))
    ]
    return silu(convolved[0]) * convolved[1]


def results(form, inputs, doc_ids):
    y = form(*inputs, doc_ids)
    dy = torch.arange(y.numel(), dtype=torch.float64).cos().reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def doubles(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


@settings(max_examples=12)
@given(
    seed=st.integers(0, 10**6),
    batch=st.integers(1, 2),
    time=st.one_of(st.integers(1, 9), st.sampled_from([TOKENS - 1, TOKENS + 1, TOKENS + 6])),
    channels=st.integers(1, 40),
    kernel=st.sampled_from([1, 4, 8]),
    docs=st.booleans(),
)
def test_value_and_gradients_equal_the_definition(seed, batch, time, channels, kernel, docs):
    inputs, doc_ids = case(seed, batch, time, channels, kernel, docs)
    got, expected = results(convolve_gated, inputs, doc_ids), results(by_token, doubles(inputs), doc_ids)
    for ours, exact in zip(got, expected, strict=True):
        assert_close(ours.double(), exact, atol=3e-6 * max(1, float(exact.abs().max())), rtol=0)


def test_wide_rows_equal_their_parts():
    """The backward processes a strip of channels at a time."""
    inputs, doc_ids = case(2, 2, 140, STRIP + 88, 4, docs=True)
    dy = torch.randn(2, 140, STRIP + 88)

    def of(channels):
        parts = [x[..., channels].detach().requires_grad_() for x in inputs]
        y = convolve_gated(*parts, doc_ids)
        return [y.detach(), *torch.autograd.grad(y, parts, dy[..., channels])]

    parts = of(slice(0, STRIP)), of(slice(STRIP, None))
    assert_close(of(slice(None)), [torch.cat(pair, dim=-1) for pair in zip(*parts, strict=True)], atol=0, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
def test_is_as_precise_as_the_unfused_form(docs):
    inputs, doc_ids = case(0, 3, 300, 65, 4, docs)
    exact = results(in_steps, doubles(inputs), doc_ids)
    errors = [
        [float((x - y).square().mean().sqrt()) for x, y in zip(results(form, inputs, doc_ids), exact, strict=True)]
        for form in (convolve_gated, in_steps)
    ]
    for fused, stepwise in zip(*errors, strict=True):
        assert fused <= 1.5 * stepwise


def test_sigmoid_is_precise_everywhere():
    """With a single tap of 1 the result is torch's silu(gate), by relative error, even where the sigmoid is 1e-37."""
    gate = torch.cat([torch.linspace(-85, 85, 100_001), torch.tensor([0.0, 1e-30, -1e-30, 300.0, 3e38])])
    one = torch.ones(1, 1)
    y = convolve_gated(gate[None, :, None], torch.ones(1, len(gate), 1), one, one, None)[0, :, 0]
    exact = gate.double() * torch.sigmoid(gate.double())
    assert ((y - exact).abs() <= 4e-7 * exact.abs()).all()
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):  # elsewhere torch computes exp in another way
        assert_close(y, silu(gate), atol=0, rtol=0)
    far = torch.tensor([-100.0, -3e38]), torch.tensor([torch.nan])
    low, undefined = (convolve_gated(x[None, :, None], torch.ones(1, len(x), 1), one, one, None) for x in far)
    assert low[0, 0].abs() < 1e-35
    assert low.isfinite().all()
    assert undefined.isnan().all()


def test_nan_stays_in_its_document():
    inputs, _ = case(0, 1, 12, 5, 4)
    with torch.no_grad():
        inputs[0][0, 3, 2] = torch.nan
    y, dgate, dup, *_ = results(convolve_gated, inputs, (torch.arange(12) >= 5).long()[None])
    assert y.isnan().nonzero().tolist() == [[0, 3, 2], [0, 4, 2]]
    for gradient in (dgate, dup):
        assert not gradient[:, 5:].isnan().any()
        assert not gradient[..., [0, 1, 3, 4]].isnan().any()


def test_any_strides():
    (gate, up, *taps), _ = case(1, 2, 40, 12, 4)
    for part in (lambda x: x[..., 3:8], lambda x: x[:, ::2, 2:7], lambda x: x.transpose(1, 2)[..., :5]):
        own = [tap[:, 3:8] for tap in taps]
        for sum_up in (torch.sum, lambda y: y[:, :, :1].sum() + y[1:].sum()):
            got = torch.autograd.grad(sum_up(convolve_gated(part(gate), part(up), *own, None)), (gate, up, *taps))
            expected = torch.autograd.grad(sum_up(in_steps(part(gate), part(up), *own, None)), (gate, up, *taps))
            assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_results_do_not_depend_on_the_number_of_threads():
    inputs, doc_ids = case(0, 5, 300, 65, 4, docs=True)
    before, by_threads = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            by_threads.append(results(convolve_gated, inputs, doc_ids))
    finally:
        torch.set_num_threads(before)
    assert_close(by_threads[1:], by_threads[:1] * 3, atol=0, rtol=0)


@pytest.mark.parametrize("docs", [False, True])
def test_operator_passes_opcheck(docs):
    inputs, doc_ids = case(0, 2, 9, 5, 4, docs)
    torch.library.opcheck(torch.ops.canonlm.cpu_gated.default, (*inputs, doc_ids))


def test_only_the_inputs_are_saved():
    inputs, _ = case(0, 2, 64, 32, 4)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        convolve_gated(*inputs, None)
    assert sorted(saved) == sorted(x.data_ptr() for x in inputs)


def test_other_dtypes_are_left_to_pytorch():
    inputs, _ = case(0, 1, 9, 5, 4)
    assert usable_gated(*inputs)
    for dtype in (torch.float64, torch.bfloat16):
        assert not usable_gated(*(x.to(dtype) for x in inputs))


def tiny_model(**sizes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 50, **sizes}
    return CanonLMForCausalLM(CanonLMConfig(canon_set="ABCD", **sizes))


@pytest.mark.parametrize("docs", [False, True])
def test_a_model_trains_the_same_with_and_without_it(docs, monkeypatch):
    model, ids = tiny_model(), torch.randint(50, (2, 40))
    call = {"doc_ids": (torch.arange(40) // 7).expand(2, -1)} if docs else {}
    fused, with_it = step(model, ids, canon_conv, "convolve_gated", **call)
    monkeypatch.setattr(canon_conv, "usable_gated", lambda *tensors, **how: False)
    unfused, without = step(model, ids, canon_conv, "convolve_gated", **call)
    assert (fused, unfused) == (2, 0)
    assert_close(with_it, without, atol=1e-6, rtol=2e-5)


@pytest.mark.parametrize("how", ["hook", "replaced", "other activation", "bias", "pads", "autocast", "double"])
def test_unsupported_cases_use_the_unfused_form(how):
    sizes = {"hidden_act": "gelu"} if how == "other activation" else {}
    model, call, seen = tiny_model(num_hidden_layers=1, **sizes), {}, []
    mlp = model.model.layers[0].mlp
    if how == "hook":
        mlp.canonD_up.register_forward_hook(lambda *args: seen.append(args))
    elif how == "replaced":
        own = {"forward": lambda self, *args, **how: CanonLayer.forward(self, *args, **how)}
        mlp.canonD_gate = type("Other", (CanonLayer,), own)(mlp.gate_proj.out_features)
    elif how == "bias":
        mlp.canonD_up = type(mlp.canonD_up)(mlp.up_proj.out_features, bias=True)
    elif how == "pads":
        call["attention_mask"] = torch.tensor([[1] * 7 + [0] * 2])
    elif how == "double":
        model.double()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        fused, _ = step(model, torch.randint(50, (1, 9)), canon_conv, "convolve_gated", **call)
    assert fused == 0
    assert len(seen) == (how == "hook")
