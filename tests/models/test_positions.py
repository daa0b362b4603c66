"""ALiBi, rotations in some heads, windows, sinks and the gate, against attention computed key by key."""

import pytest
import torch
from families import ids
from torch.testing import assert_close
from transformers import StaticCache

from canonlm import CanonLMConfig
from canonlm.models.positions import alibi_mask

KINDS = {
    "alibi": {"alibi": "alibi"},
    "hard": {"alibi": "hard"},
    "some heads": {"rope_heads": 2, "rope_dim": 4},
    "alibi and rope": {"alibi": "alibi", "rope_heads": 2, "rope_dim": 6},
    "gate and sink": {"attention_gate": True, "attention_sink": True, "rope_dim": 0},
    "window of two": {"sliding_window": 2},
    "window in one layer": {"sliding_window": 5, "sliding_layers": [True, False], "attention_sink": True},
}
DOC_IDS = torch.tensor([[4, 4, 4, 2, 2, 2, 9, 4, 4, 4, 4, 4], [1] * 12])
LEFT = (torch.arange(12) >= torch.tensor([[0], [5]])).long()
MIDDLE = torch.tensor([[1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0]])
INPUTS = {
    "plain": {},
    "left pads": {"attention_mask": LEFT},
    "right pads": {"attention_mask": LEFT.flip(1)},
    "packed": {"doc_ids": DOC_IDS},
    "packed and padded": {"doc_ids": DOC_IDS, "attention_mask": MIDDLE},
}
EXACT = {"atol": 1e-10, "rtol": 0}


def rotated(x_TE, places, config):
    """The first rope_dim channels as complex numbers, turned by p * theta^(-2i / rope_dim)."""
    half = config.rope_dim // 2
    turns = config.rope_theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angle = torch.tensor(places, dtype=torch.float64)[:, None] * turns
    z = torch.complex(x_TE[:, :half], x_TE[:, half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag, x_TE[:, 2 * half :]], dim=1)


def document_by_definition(attention, x_TD):
    """The attention of one document, all of its tokens real."""
    config, outputs = attention.config, []
    heads, time = config.num_attention_heads, len(x_TD)
    group = heads // config.num_key_value_heads
    project = {name: getattr(attention, f"{name}_proj")(x_TD).unflatten(-1, (-1, config.head_dim)) for name in "qkv"}
    for head in range(heads):
        q, k, v = project["q"][:, head], project["k"][:, head // group], project["v"][:, head // group]
        if config.rope_dim and head < config.rope_heads:
            q, k = rotated(q, range(time), config), rotated(k, range(time), config)
        rows = []
        for t in range(time):
            nearest = head + 1 if config.alibi == "hard" and head < heads // 2 else attention.window or time
            seen = range(max(0, t + 1 - nearest), t + 1)
            scores = torch.stack([q[t] @ k[s] / config.head_dim**0.5 for s in seen])
            if config.alibi == "alibi":
                scores = scores - torch.tensor([2 ** (-8 * (head + 1) / heads) * (t - s) for s in seen])
            if config.attention_sink:  # a score that takes its share and has no value
                scores = torch.cat([scores, attention.sinks[head, None]])
            rows.append(sum(p * v[s] for p, s in zip(scores.softmax(0), seen, strict=False)))
        outputs.append(torch.stack(rows))
    gate = attention.g_proj(x_TD).sigmoid() if config.attention_gate else 1
    return attention.o_proj(torch.cat(outputs, dim=1) * gate)


def documents(time, attention_mask=None, doc_ids=None):
    """The position of each document: (row, columns of its real tokens)."""
    for row in range(2):
        real = range(time) if attention_mask is None else attention_mask[row].nonzero()[:, 0].tolist()
        collected, last = [], None
        for column in real:
            number = 0 if doc_ids is None else doc_ids[row, column].item()
            if number != last:
                collected.append([])
            collected[-1].append(column)
            last = number
        yield from ((row, columns) for columns in collected)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_attention_equals_its_definition(small_model, kind, inputs, kernel):
    # Eager attention has a float32 softmax, whatever comes in.
    dtype, close = (torch.float64, 1e-12) if kernel == "sdpa" else (torch.float32, 1e-5)
    model = small_model(dtype, num_hidden_layers=len(KINDS[kind].get("sliding_layers", [0])), **KINDS[kind])
    model.set_attn_implementation(kernel)
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *call: calls.append(call))
    model(ids(2, 12), **INPUTS[inputs])
    places = list(documents(12, **INPUTS[inputs]))
    for attention, (x, *_), (y, *_) in calls:
        got = torch.cat([y[row, columns] for row, columns in places])
        weights = torch.randn_like(got)
        gradients = torch.autograd.grad((got * weights).sum(), [x, *attention.parameters()], retain_graph=True)
        attention, x = attention.double(), x.detach().double().requires_grad_()
        expected = torch.cat([document_by_definition(attention, x[row, columns]) for row, columns in places])
        expected_gradients = torch.autograd.grad((expected * weights).sum(), [x, *attention.parameters()])
        assert_close((got, gradients), (expected, expected_gradients), atol=close, rtol=close, check_dtype=False)


@pytest.mark.parametrize("kind", ["alibi", "hard"])
def test_only_distances_count(small_model, kind):
    model = small_model(alibi=kind)
    tokens = ids(2, 12)
    expected = model(tokens).logits
    assert_close(model(tokens, position_ids=torch.arange(12)[None] + 7).logits, expected, **EXACT)
    restarts = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = model(tokens, position_ids=restarts, use_cache=False).logits
    assert_close(packed[:, 5:], model(tokens[:, 5:]).logits, **EXACT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_distinguishes_neighbouring_positions(dtype):
    """In bfloat16, 2000 and 2001 are equal. And nothing is infinite, or a row of padding would be entirely infinite."""
    cache = StaticCache(config=CanonLMConfig(num_hidden_layers=1), max_cache_len=3000)
    cache.update(*torch.zeros(2, 1, 1, 2000, 1), 0)
    columns = torch.arange(3000)
    visible = ((columns >= 50) & (columns <= 2000)).view(1, 1, 1, -1)
    lowest = torch.finfo(dtype).min
    for mask in (visible, torch.zeros(1, 1, 1, 3000, dtype=dtype).masked_fill(~visible, lowest)):
        config = CanonLMConfig(num_attention_heads=8, alibi="alibi")
        bias_HS = alibi_mask(config, mask, None, cache, dtype)[0, :, 0]
        assert bias_HS.dtype == dtype
        assert bias_HS.isfinite().all()
        assert (bias_HS[:, ~visible.flatten()] <= lowest / 2).all()
        steps = bias_HS[:, 1992:2001].double().diff(dim=1)
        assert_close(steps, (2.0 ** -torch.arange(1, 9))[:, None].expand(8, 8).double(), atol=0, rtol=0.01)


@pytest.mark.parametrize("kind", ["alibi", "hard"])
@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_padding_under_autocast_is_finite(small_model, kind, kernel):
    model = small_model(torch.float32, alibi=kind).train()
    model.set_attn_implementation(kernel)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(ids(2, 12), attention_mask=LEFT, labels=ids(2, 12), use_cache=False)
    output.loss.backward()
    assert output.logits.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "alibi", "hard"])
def test_padding_sees_no_later_token(small_model, kind, dtype):
    model, tokens = small_model(dtype, alibi=kind), ids(2, 12)
    other = torch.where(LEFT.bool(), 60 - tokens, tokens)
    before, after = (model(x, attention_mask=LEFT, use_cache=False).logits[1, :5] for x in (tokens, other))
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", [None, "alibi", "hard"])
def test_padding_of_eager_attention_in_double_precision(small_model, kind):
    model = small_model(alibi=kind)
    tokens = ids(2, 12)
    expected = model(tokens[1:, 5:], use_cache=False).logits
    model.set_attn_implementation("eager")
    result = model(tokens, attention_mask=LEFT, use_cache=False).logits[1:, 5:]
    assert_close(result, expected, atol=1e-5, rtol=0)  # its softmax is in float32
    pairs = torch.ones(12, 12, dtype=torch.bool).tril() & LEFT.bool()[:, None, None] & LEFT.bool()[:, None, :, None]
    result = model(tokens, attention_mask=pairs, use_cache=False).logits[1:, 5:]
    assert_close(result, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["alibi", "hard"])
@pytest.mark.parametrize("kernel", ["flash_attention_2", "flash_attention_3", "flex_attention", "hub/some-kernel"])
def test_kernels_without_a_bias_per_head_are_refused(small_model, kind, kernel):
    message = f'^attn_implementation: expected "sdpa" or "eager" with alibi.*, got "{kernel}"$'
    with pytest.raises(ValueError, match=message):
        small_model(alibi=kind, attn_implementation=kernel)
    model = small_model(alibi=kind)
    with pytest.raises(ValueError, match=message):
        model.set_attn_implementation(kernel)
    assert not model._supports_flash_attn  # continuous batching reads this before it changes the kernel
    assert not model._supports_flex_attn
    assert small_model()._supports_flash_attn
