"""The trapezoidal recurrence against its definition, one token, head and input after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm.ops.trapezoidal_ssd import trapezoidal_ssd
from canonlm.ops.varlen import Documents

DOUBLE = torch.float64
DECAYS = {"ordinary": None, "near one": 1 - 1e-7, "small or near one": (1e-4, 1 - 1e-7)}


def inputs(time, rank=1, decay=None, batch=2, heads=2, size=6, channels=5):
    """x, k, q, g, before, now; and a state."""
    x = torch.randn(batch, time, rank, heads, channels, dtype=DOUBLE)
    k, q = torch.randn(2, batch, time, rank, heads, size, dtype=DOUBLE)
    before, now = torch.rand(2, batch, time, heads, dtype=DOUBLE)
    g = -torch.rand_like(now)
    if decay is not None:
        choices = torch.tensor(decay, dtype=DOUBLE).log().reshape(-1)
        g = choices[torch.randint(len(choices), now.shape)]
    state = (
        torch.randn(batch, heads, channels, size, dtype=DOUBLE),
        torch.randn(batch, rank, heads, size, dtype=DOUBLE),
        torch.randn(batch, rank, heads, channels, dtype=DOUBLE),
    )
    return (x, k, q, g, before, now), state


def by_definition(x, k, q, g, before, now, state=None, real=None, doc_ids=None):
    (batch, time, rank, heads, channels), size = x.shape, k.shape[-1]
    rows, after = [], []
    for b in range(batch):
        S, k_last, x_last = ([part[b] for part in state]) if state else (
            x.new_zeros(heads, channels, size), x.new_zeros(rank, heads, size), x.new_zeros(rank, heads, channels)
        )  # fmt: skip
        outputs = []
        for t in range(time):
            if real is not None and not real[b, t]:
                outputs.append(x.new_zeros(rank, heads, channels))
                continue
            if doc_ids is not None and t and doc_ids[b, t] != doc_ids[b, t - 1]:
                S, k_last, x_last = S * 0, k_last * 0, x_last * 0
            states = []
            for h in range(heads):
                one = g[b, t, h].exp() * (S[h] + before[b, t, h] * x_last[:, h].T @ k_last[:, h])
                states.append(one + now[b, t, h] * x[b, t, :, h].T @ k[b, t, :, h])
            S, k_last, x_last = torch.stack(states), k[b, t], x[b, t]
            outputs.append(
                torch.stack([torch.stack([S[h] @ q[b, t, r, h] for h in range(heads)]) for r in range(rank)])
            )
        rows.append(torch.stack(outputs))
        after.append((S, k_last, x_last))
    return torch.stack(rows), tuple(map(torch.stack, zip(*after, strict=True)))


def both(tensors, state, real=None, doc_ids=None):
    """The results of the op and of the definition: outputs at real tokens, states, gradients."""
    results = []
    for form in (trapezoidal_ssd, by_definition):
        leaves = [part.clone().requires_grad_() for part in (*tensors, *(state or ()))]
        past = tuple(leaves[6:]) or None
        gates = [part if real is None else part * real[..., None] for part in leaves[3:6]]  # zero at padding
        if form is trapezoidal_ssd:
            documents = None if doc_ids is None else Documents(doc_ids)
            y, after = form(*leaves[:3], *gates, state=past, real_BT=real, documents=documents)
        else:
            y, after = form(*leaves[:3], *gates, past, real, doc_ids)
        y = y if real is None else y * real[..., None, None, None]
        values = [y, *after]
        total = sum((part * torch.arange(part.numel()).view(part.shape).cos()).sum() for part in values)
        results.append((values, torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)))
    return results


def compare(*args, **kwargs):
    (values, gradients), (expected, by_autograd) = both(*args, **kwargs)
    for value, other in zip(values, expected, strict=True):
        assert_close(value, other, atol=1e-10, rtol=0)
    for gradient, other in zip(gradients, by_autograd, strict=True):
        assert_close(gradient, other, atol=1e-8, rtol=0)
    assert values[0].abs().max() > 0.1


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("time", "rank"), [(1, 1), (1, 3), (63, 1), (64, 1), (65, 1), (130, 1), (22, 3), (44, 3)])
def test_it_equals_the_definition(time, rank, decay):
    tensors, state = inputs(time, rank, DECAYS[decay])
    compare(tensors, state)


@given(
    time=st.integers(2, 90), rank=st.sampled_from([1, 2]), docs=st.booleans(), padding=st.booleans(), past=st.booleans()
)
@settings(max_examples=15)
def test_documents_padding_and_a_state_before(time, rank, docs, padding, past):
    torch.manual_seed(time)
    tensors, state = inputs(time, rank)
    real = torch.rand(2, time) < 0.6 if padding else None
    doc_ids = None
    if docs:
        new = torch.rand(2, time) < 0.2
        doc_ids = (new if real is None else new & real).long().cumsum(1)
        doc_ids = doc_ids - doc_ids[:, :1]  # the first token continues the document of the state
    compare(tensors, state if past else None, real=real, doc_ids=doc_ids)


def test_nothing_cancels():
    """In float32, with a next step a million times as long: a form that subtracts the next token's share loses this."""
    (x, k, q, g, before, now), _ = inputs(40)
    before, now = before.clone(), now.clone()
    before[:, 1::2], now[:, ::2] = 1e3 * before[:, 1::2], 1e-3 * now[:, ::2]
    tensors = [part.float() for part in (x, k, q, g - 20, before, now)]
    expected, _ = by_definition(*(part.double() for part in tensors))
    got, _ = trapezoidal_ssd(*tensors)
    assert_close(got[:, ::2].double(), expected[:, ::2], rtol=1e-3, atol=1e-8)
