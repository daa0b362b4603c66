"""CanonLayer: y = x + conv(x), and its guarantees for padding, documents, states, dtypes, compilers and host models."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

from canonlm import CanonLayer

OPTIONS = [
    {"residual": residual, "activation": activation, "bias": bias}
    for residual in (True, False)
    for activation in (True, False)
    for bias in (True, False)
]


def make(kernel=4, channels=3, seed=0, dtype=torch.float64, **options):
    torch.manual_seed(seed)
    return CanonLayer(channels, kernel, dtype=dtype, **options)


def by_definition(layer, x):
    """One row without padding: x_t + act(b + sum_i w_i x_{t-i}), token by token."""
    kernel, rows = layer.kernel_size, []
    for t in range(x.shape[0]):
        y = x[t] * 0
        for back in range(min(kernel, t + 1)):
            y = y + layer.weight[:, 0, kernel - 1 - back] * x[t - back]
        if layer.bias is not None:
            y = y + layer.bias
        if layer.activation:
            y = y * torch.sigmoid(y)
        rows.append(x[t] + y if layer.residual else y)
    return torch.stack(rows) if rows else x


@pytest.mark.every(5)
@pytest.mark.parametrize("kernel", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradients_equal_the_definition(kernel, options):
    layer = make(kernel, **options)
    x = torch.randn(2, 7, 3, dtype=torch.float64, requires_grad=True)
    y, expected = layer(x), torch.stack([by_definition(layer, row) for row in x])
    assert_close(y, expected, atol=1e-12, rtol=0)
    weights = torch.randn_like(y)
    tensors = [x, *layer.parameters()]
    got = torch.autograd.grad((y * weights).sum(), tensors)
    assert_close(got, torch.autograd.grad((expected * weights).sum(), tensors), atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradcheck_with_padding_documents_and_state(options):
    layer = make(**options)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    state = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    mask, doc_ids = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 0, 1]]), torch.tensor([[5, 5, 7, 7, 7]] * 2)

    def call(x, state, *parameters):
        return layer(x, attention_mask=mask, doc_ids=doc_ids, state=state, return_state=True)

    assert torch.autograd.gradcheck(call, (x, state, *layer.parameters()))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    kernel=st.integers(1, 6),
    options=st.sampled_from(OPTIONS),
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
    side=st.sampled_from(["left", "right", "inside"]),
    cuts=st.lists(st.integers(0, 9), max_size=4),
    docs=st.booleans(),
)
def test_padded_packed_rows_in_chunks_equal_each_document_alone(seed, kernel, options, lengths, side, cuts, docs):
    """The results of every row's documents are those in a padded batch that is read chunk by chunk through states."""
    layer = make(kernel, seed=seed, **options)
    time = max(1, *lengths)
    mask, alone = torch.zeros(len(lengths), time, dtype=torch.long), []
    doc_ids = torch.randint(0, 9, (len(lengths), time))  # arbitrary at padding
    x = torch.randn(len(lengths), time, 3, dtype=torch.float64)
    for row, length in enumerate(lengths):
        real = {"left": torch.arange(time - length, time), "right": torch.arange(length)}.get(side)
        if real is None:
            real = torch.randperm(time)[:length].sort().values
        mask[row, real] = 1
        doc_ids[row, real] = torch.randint(0, 2 if docs else 1, (length,)).cumsum(0)
        if side == "inside":  # padding belongs to the document before it
            doc_ids[row] = torch.where(mask[row] != 0, doc_ids[row], 0).cummax(0).values
        _, sizes = doc_ids[row, real].unique_consecutive(return_counts=True)
        documents = x[row, real].split(sizes.tolist() or [0])
        alone.append(torch.cat([by_definition(layer, document) for document in documents]))
    bounds = sorted({0, *(min(cut, time) for cut in cuts), time})
    state, outputs = None, []
    for first, last in itertools.pairwise(bounds):
        new = slice(first, last)
        ids = doc_ids[:, new] if docs else None
        if docs and state is not None:  # the caller must ensure that a state belongs to the document of the next token
            same = [_continues(doc_ids[row], mask[row], first) for row in range(len(lengths))]
            state = state * torch.tensor(same)[:, None, None]
        y, state = layer(x[:, new], attention_mask=mask[:, new], doc_ids=ids, state=state, return_state=True)
        assert state.shape == (len(lengths), 3, kernel)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    for row, expected in enumerate(alone):
        assert_close(y[row][mask[row] != 0], expected, atol=1e-12, rtol=0)


def _continues(doc_ids, mask, first):
    before, after = mask[:first].nonzero(), mask[first:].nonzero()
    if len(before) == 0 or len(after) == 0:
        return True
    return bool(doc_ids[before[-1, 0]] == doc_ids[first + after[0, 0]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nothing_leaks_out_of_padding(bad):
    layer = make()
    x, mask = torch.randn(1, 6, 3, dtype=torch.float64), torch.tensor([[0, 0, 1, 1, 1, 0]])
    dirty = x.clone()
    dirty[mask == 0] = bad
    got, expected = (layer(value, attention_mask=mask, return_state=True) for value in (dirty, x))
    assert_close(got, expected)
    assert got[0][:, :2].abs().max() == 0


def test_leaves_the_callers_tensors_alone():
    layer = make(bias=True)
    tensors = [
        torch.randn(2, 5, 3, dtype=torch.float64),
        torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 0, 0]]),
        torch.tensor([[0, 0, 0, 1, 1]] * 2),
        torch.randn(2, 3, 4, dtype=torch.float64),
    ]
    before = [tensor.clone() for tensor in tensors]
    x, mask, doc_ids, state = tensors
    y, new_state = layer(x, attention_mask=mask, doc_ids=doc_ids, state=state, return_state=True)
    y.add_(1), new_state.add_(1)
    assert_close(tensors, before, atol=0, rtol=0)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_returns_the_dtype_it_was_given(options, dtype, autocast):
    layer = make(dtype=torch.float32 if autocast else dtype, **options)
    x = torch.randn(2, 5, 3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, state = layer(x, return_state=True)
    assert y.dtype == state.dtype == dtype


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bfloat16_is_rounded_once(options, weight_dtype):
    layer = make(channels=64, dtype=weight_dtype, **options)
    x = torch.randn(4, 50, 64, dtype=torch.bfloat16)
    got, exact = layer(x), layer.double()(x.double()).bfloat16()
    assert (got != exact).float().mean() < 0.002  # close to halfway, float32 may round the other way
    assert_close(got, exact)


@pytest.mark.parametrize(
    ("options", "backend"),
    [(OPTIONS[0], "aot_eager"), ({}, "aot_eager"), pytest.param(OPTIONS[0], "inductor", marks=pytest.mark.slow)],
    ids=["all", "default", "generated code"],
)
def test_compiles_forward_and_backward_without_graph_breaks(options, backend):
    layer = make(**options)
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    mask, doc_ids = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 0, 1, 0, 0]]), torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)

    def loss(function):
        y, state = function(x, attention_mask=mask, doc_ids=doc_ids, return_state=True)
        total = y.square().sum() + state.square().sum()
        return total, *torch.autograd.grad(total, [x, *layer.parameters()])

    torch._dynamo.reset()
    assert_close(loss(torch.compile(layer, fullgraph=True, backend=backend)), loss(layer), atol=1e-12, rtol=1e-12)
    torch._dynamo.reset()


@pytest.mark.parametrize("kernel", [2, 3, 4])
def test_is_initialised_like_conv1d(kernel):
    layer = make(kernel, channels=20000, bias=True, dtype=torch.float32)
    bound = kernel**-0.5
    for parameter in layer.parameters():
        assert parameter.abs().max() <= bound
        assert parameter.std().item() == pytest.approx(bound / 3**0.5, rel=0.01)
        assert abs(parameter.mean().item()) < 0.01
    reference = nn.Conv1d(20000, 20000, kernel, groups=20000)
    assert layer.weight.shape == reference.weight.shape
    assert layer.weight.std().item() == pytest.approx(reference.weight.std().item(), rel=0.01)


def test_the_host_models_initialisation_does_not_change_it():
    class Host(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.canon = CanonLayer(config.hidden_size, bias=True)
            self.before = [parameter.clone() for parameter in self.canon.parameters()]
            self.post_init()

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "vocab_size": 11,
    }
    host = Host(LlamaConfig(**sizes))
    host.init_weights()
    assert_close(list(host.canon.parameters()), host.before, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), r"hidden_size: expected an integer >= 1, got 0"),
        ((8, 0), r"kernel_size: expected an integer >= 1, got 0"),
        ((8, -1), r"kernel_size: expected an integer >= 1, got -1"),
        ((8, 2.0), r"kernel_size: expected an integer >= 1, got 2\.0"),
        ((8, True), r"kernel_size: expected an integer >= 1, got True"),
        ((8, "4"), r'kernel_size: expected an integer >= 1, got "4"'),
    ],
)
def test_bad_sizes_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        CanonLayer(*arguments)


@pytest.mark.parametrize("mask", [None, torch.tensor([[1, 1, 1, 1, 0, 1, 1]])])
def test_a_document_is_a_run_of_equal_ids(mask):
    layer, x = make(), torch.randn(1, 7, 3, dtype=torch.float64)
    again, new = (torch.tensor([ids]) for ids in ([0, 0, 1, 0, 9, 0, 0], [0, 0, 1, 2, 2, 2, 2]))
    if mask is None:
        again[:, 4] = 0
    results = [layer(x, attention_mask=mask, doc_ids=ids, return_state=True) for ids in (again, new)]
    for got, expected in zip(*results, strict=True):
        assert_close(got, expected)


@pytest.mark.parametrize("state", [None, torch.rand(2, 3, 4, dtype=torch.float64)])
def test_no_tokens_leave_the_state_as_it_is(state):
    nothing = {"attention_mask": torch.ones(2, 0), "doc_ids": torch.ones(2, 0, dtype=torch.long)}
    for options in ({}, nothing):
        y, after = make()(torch.zeros(2, 0, 3, dtype=torch.float64), state=state, return_state=True, **options)
        assert y.shape == (2, 0, 3)
        assert_close(after, torch.zeros(2, 3, 4, dtype=torch.float64) if state is None else state)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_inputs_are_floating_point_numbers(dtype):
    with pytest.raises(ValueError, match=f'x: expected a tensor of floating-point numbers, got "{dtype}"'):
        make()(torch.zeros(2, 5, 3, dtype=dtype))


def test_an_unknown_initialisation_is_an_error():
    with pytest.raises(ValueError, match='start: expected "uniform", "zero" or "id", got "identity"'):
        CanonLayer(8, start="identity")


@pytest.mark.parametrize("shape", [(5, 3), (2, 5, 4), (2, 1, 5, 3)])
def test_bad_inputs_are_named(shape):
    with pytest.raises(ValueError, match=r"x: expected a tensor \[batch, time, 3\], got"):
        make()(torch.zeros(shape, dtype=torch.float64))


@pytest.mark.parametrize(
    ("key", "shape"),
    [
        *((key, shape) for key in ("attention_mask", "doc_ids") for shape in [(1, 5), (3, 5), (2, 4), (2, 6)]),
        *(("state", shape) for shape in [(1, 3, 4), (2, 3, 3), (2, 3, 5), (2, 4, 4)]),
    ],
)
def test_arguments_of_another_shape_are_refused(key, shape):
    right = [2, 3, 4] if key == "state" else [2, 5]
    with pytest.raises(ValueError, match=rf"^{key}: expected a tensor {re.escape(str(right))}, .*, got "):
        make()(torch.zeros(2, 5, 3, dtype=torch.float64), **{key: torch.zeros(shape, dtype=torch.long)})
