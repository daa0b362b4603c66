"""The chunked loss: against autograd through the formula, and the sizes of the tensors that it makes."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models import loss as loss_module
from canonlm.models.loss import loss_of_hidden, loss_of_logits, mean_loss

Z_LOSSES = [None, "logsumexp", "squared_nll"]
CLOSE = {"atol": 1e-12, "rtol": 1e-10}


def config(z_loss=None):
    return CanonLMConfig(z_loss=z_loss, z_loss_weight=0.1)


def drawn(vocab, hidden, tokens, seed=0, dtype=torch.float64):
    """(h [1, tokens, hidden], weight [vocab, hidden], targets [1, tokens]); about a third of the targets are -100."""
    generator = torch.Generator().manual_seed(seed)
    h = torch.randn(1, tokens, hidden, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64)
    targets = torch.randint(-vocab // 2, vocab, (1, tokens), generator=generator)
    leaves = (tensor.to(dtype).requires_grad_() for tensor in (h, weight))
    return *leaves, targets.where(targets >= 0, -100)


def by_the_formula(h, weight, targets, z_loss, divisor):
    total = z_total = torch.zeros((), dtype=h.dtype)
    for x, target in zip((h @ weight.T)[0], targets[0].tolist(), strict=True):
        if target != -100:
            log_z = x.exp().sum().log()
            nll = log_z - x[target]
            z = {None: 0 * nll, "logsumexp": 0.1 * log_z**2, "squared_nll": 0.1 * nll**2}[z_loss]
            total, z_total = total + nll + z, z_total + z
    return total / divisor, z_total / divisor


def chunked(case, h, weight, targets, num_items=None, **how):
    return mean_loss(case, loss_of_hidden(case, h, weight, targets, **how), targets, None, num_items)


def plain(case, h, weight, targets):
    sums = loss_of_logits(case, torch.nn.functional.linear(h, weight), targets)
    return mean_loss(case, sums, targets, None, None)


@given(
    z_loss=st.sampled_from(Z_LOSSES),
    vocab=st.integers(2, 40),
    hidden=st.integers(1, 9),
    tokens=st.integers(2, 30),
    at_once=st.integers(1, 40),
    num_items=st.sampled_from([None, 17, torch.tensor(17)]),
    seed=st.integers(0, 99),
)
def test_loss_and_gradients_are_those_of_the_formula(z_loss, vocab, hidden, tokens, at_once, num_items, seed):
    h, weight, targets = drawn(vocab, hidden, tokens, seed)
    targets[0, 0] = 1
    divisor = int((targets != -100).sum()) if num_items is None else 17
    loss, z = chunked(config(z_loss), h, weight, targets, num_items, at_once=at_once * vocab * 8)
    gradients = torch.autograd.grad(3 * loss, (h, weight))
    expected, z_expected = by_the_formula(h, weight, targets, z_loss, divisor)
    assert_close(loss, expected, **CLOSE)
    assert z is None if z_loss is None else not z.requires_grad
    if z_loss is not None:
        assert_close(z, z_expected.detach(), **CLOSE)
    assert_close(gradients, torch.autograd.grad(3 * expected, (h, weight)), **CLOSE)


@pytest.mark.parametrize("z_loss", Z_LOSSES)
def test_compiled_terms_are_those_of_the_formula(monkeypatch, z_loss):
    """Three chunks, the last one shorter."""
    full = torch.compile(loss_module._terms, fullgraph=True, dynamic=False, backend="aot_eager")
    monkeypatch.setattr(loss_module, "_compiled", lambda: full)
    h, weight, targets = drawn(13, 6, 23)
    loss, z = chunked(config(z_loss), h, weight, targets, compiled=True, at_once=8 * 13 * 8)
    expected, z_expected = by_the_formula(h, weight, targets, z_loss, int((targets != -100).sum()))
    assert_close(loss, expected, **CLOSE)
    assert z is None if z_loss is None else torch.allclose(z, z_expected, rtol=1e-10)
    assert_close(torch.autograd.grad(3 * loss, (h, weight)), torch.autograd.grad(3 * expected, (h, weight)), **CLOSE)


@pytest.mark.parametrize("z_loss", Z_LOSSES)
def test_large_logits(z_loss):
    """exp(1000) overflows."""
    h, weight, targets = drawn(11, 5, 8)
    case = config(z_loss)
    loss, z = chunked(case, 1000 * h, weight, targets)
    logits = 1000 * h @ weight.T
    expected, expected_z = mean_loss(case, loss_of_logits(case, logits, targets), targets, None, None)
    assert_close((loss, z), (expected, expected_z), **CLOSE)
    got, expected = (torch.autograd.grad(value, (h, weight)) for value in (loss, expected))
    assert all(gradient.isfinite().all() for gradient in got)
    assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("z_loss", Z_LOSSES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_products_and_float32_sums(z_loss, weight_dtype, autocast):
    """Only inputs of products are rounded, never the loss or the sum over chunks."""
    h, weight, targets = drawn(50, 8, 64, dtype=torch.float32)
    h_type = torch.float32 if autocast else torch.bfloat16
    h, weight = h.detach().to(h_type).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, z = chunked(config(z_loss), h, weight, targets, at_once=3 * 50 * 4)
    loss.backward()
    assert (loss.dtype, h.grad.dtype, weight.grad.dtype) == (torch.float32, h_type, weight_dtype)
    exact = [x.detach().bfloat16().double().requires_grad_() for x in (h, weight)]
    # Logits are rounded like those of a linear layer in bfloat16, and so is the reference.
    logits = exact[0] @ exact[1].T
    logits = logits + (logits.bfloat16().double() - logits).detach()
    case = config(z_loss)
    expected, expected_z = mean_loss(case, loss_of_logits(case, logits, targets), targets, None, None)
    expected.backward()
    assert_close(loss.double(), expected, atol=0, rtol=1e-6)
    if z_loss is not None:
        assert_close(z.double(), expected_z, atol=0, rtol=1e-6)
    for got, truth in zip((h, weight), exact, strict=True):
        scale = truth.grad.abs().max()
        assert_close(got.grad.double() / scale, truth.grad / scale, atol=6e-3, rtol=0)


def test_the_gradient_of_the_head_is_summed_up_in_float32():
    """1024 chunks of one token with equal gradients: a bfloat16 sum would stop at 256 times the first."""
    h = torch.ones(1, 1024, 4, dtype=torch.bfloat16)
    weight = torch.zeros(2, 4, dtype=torch.bfloat16, requires_grad=True)
    chunked(config(), h, weight, torch.zeros(1, 1024, dtype=torch.int64), at_once=1)[0].backward()
    assert_close(weight.grad, torch.tensor([[-0.5], [0.5]], dtype=torch.bfloat16).expand(2, 4), atol=0, rtol=0.01)


def test_nothing_is_saved_without_gradients():
    h, weight, targets = drawn(20, 6, 10)
    case = config()
    expected = chunked(case, h, weight, targets)[0].detach()
    with torch.no_grad(), Allocations() as made:
        loss, _ = chunked(case, h, weight, targets)
    assert_close(loss, expected, atol=0, rtol=0)
    assert not loss.requires_grad
    assert "aten::addmm_" not in made.names
    loss, _ = chunked(case, h.detach(), weight, targets)
    assert torch.autograd.grad(loss, weight)[0].shape == weight.shape
    loss, _ = chunked(case, h, weight.detach(), targets)
    assert torch.autograd.grad(loss, h)[0].shape == h.shape


@pytest.mark.parametrize("saved", [nullcontext, save_on_cpu])
def test_a_second_backward_is_refused(saved):
    h, weight, targets = drawn(20, 6, 10)
    with saved():
        loss, _ = chunked(config(), h, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_target_outside_the_vocabulary_is_an_error():
    h, weight, targets = drawn(20, 6, 10)
    targets[0, 3] = 20
    with pytest.raises(RuntimeError, match="out of bounds"):
        chunked(config(), h, weight, targets)


# Memory


class Allocations(TorchDispatchMode):
    """Records the operators that ran, and the bytes of the largest tensor that any of them returned."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.names.add(func._schema.name)
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.largest = max([self.largest, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_a_chunk_or_the_head(dtype):
    vocab, hidden, tokens = 5000, 8, 1000
    h, weight, targets = drawn(vocab, hidden, tokens, dtype=dtype)
    case = config("logsumexp")
    sizes = []
    for way in (functools.partial(chunked, at_once=2**20), plain):
        with Allocations() as made:
            way(case, h, weight, targets)[0].backward()
        sizes.append(made.largest)
    assert sizes[0] <= 2**20 < sizes[1] == 4 * vocab * tokens


def test_logits_that_fit_are_one_chunk():
    h, weight, targets = drawn(30, 4, 20)
    for chunk_bytes, products in ((30 * 8 * 20, 1), (30 * 8 * 20 - 1, 2), (30 * 8, 20), (1, 20)):
        with torch.profiler.profile() as profile:
            chunked(config(), h, weight, targets, at_once=chunk_bytes)
        assert next(e.count for e in profile.key_averages() if e.key == "aten::amax") == products


# In the model


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"mlp": "moe", "num_experts": 4}], ids=str)
@pytest.mark.parametrize("z_loss", Z_LOSSES)
def test_a_model_without_logits_learns_the_same(small_model, monkeypatch, changes, z_loss):
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 7 * 61 * 8)
    model = small_model(**changes, z_loss=z_loss, z_loss_weight=0.1).train()
    ids = torch.randint(61, (3, 17))
    labels = ids.masked_fill(ids % 5 == 0, -100)
    targets = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    results = []
    for call in (
        {"labels": labels},
        {"shift_labels": targets, "loss_only": True},
        {"labels": labels, "loss_only": True},
    ):
        model.zero_grad()
        output = model(ids, num_items_in_batch=torch.tensor(40), **call)
        assert (output.logits is None) == ("loss_only" in call)
        output.loss.backward()
        gradients = {name: value.grad for name, value in model.named_parameters()}
        results.append([output.loss.detach(), gradients] + ([] if z_loss is None else [output.z_loss]))
        assert (output.z_loss is None) == (z_loss is None)
    assert_close(results[1], results[0], **CLOSE)
    assert_close(results[2], results[0], **CLOSE)


@pytest.mark.parametrize("kind", ["hook", "lora", "unit of FSDP"])
def test_a_head_that_is_more_than_a_weight_is_called(small_model, kind, tmp_path):
    model, ids = small_model(canon_set="A", z_loss="logsumexp"), torch.arange(20).view(2, 10)
    if kind == "hook":
        model.lm_head.register_forward_hook(lambda head, inputs, logits: logits * 2)
    elif kind == "lora":
        from peft import LoraConfig  # not above: processes that import this file need seconds for it

        model.add_adapter(LoraConfig(target_modules=["lm_head"], init_lora_weights=False))
    else:
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        fully_shard(model.lm_head)
        fully_shard(model)
    try:
        expected, got = (model(ids, labels=ids, loss_only=loss_only) for loss_only in (False, True))
        assert got.logits is None
        assert_close(got.loss, expected.loss, **CLOSE)
        gradients = []
        for output in (expected, got):
            model.zero_grad()
            output.loss.backward()
            grads = [p.grad for p in model.parameters() if p.requires_grad]
            gradients.append([grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads])
        assert gradients[0]
        exactly = {"atol": 0, "rtol": 0}  # of the same logits; FSDP's head makes them chunk by chunk
        assert_close(gradients[1], gradients[0], **(CLOSE if kind == "unit of FSDP" else exactly))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_the_last_position_counts_where_its_target_is_given(small_model):
    model = small_model()
    ids = torch.randint(61, (2, 9))
    targets = torch.full_like(ids, -100)
    targets[:, -1] = 5
    expected = -model(ids).logits[:, -1].log_softmax(-1)[:, 5].mean()
    assert_close(model(ids, shift_labels=targets).loss, expected, **CLOSE)
    assert_close(model(ids, shift_labels=targets, loss_only=True).loss, expected, **CLOSE)


def test_a_loss_without_targets_is_refused(small_model):
    with pytest.raises(ValueError, match=r"^expected labels or shift_labels with loss_only$"):
        small_model()(torch.tensor([[1, 2]]), loss_only=True)


@pytest.mark.parametrize("loss_only", [False, True])
def test_targets_of_another_shape_are_refused(small_model, loss_only):
    model, tokens = small_model(), torch.arange(12).view(2, 6)
    for key, targets in {"labels": tokens[:, :4], "shift_labels": tokens.view(6, 2)}.items():
        message = rf"^{key}: expected shape \(2, 6\), a target for every token with logits, got "
        with pytest.raises(ValueError, match=message):
            model(tokens, loss_only=loss_only, **{key: targets})


# A sharded head


def on_a_rank(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    the_loss_alone()
    in_the_model()
    dist.destroy_process_group()


def the_loss_alone():
    mesh = init_device_mesh("cpu", (2,))
    for z_loss in Z_LOSSES:
        h, weight, targets = drawn(7, 5, 20)  # rank 0 has four rows, rank 1 three: as many chunks all the same
        expected = plain(config(z_loss), h, weight, targets)
        truth = torch.autograd.grad(expected[0], (h, weight))
        rows = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
        got = chunked(config(z_loss), h, rows, targets, at_once=8 * 4 * 6)
        h_gradient, rows_gradient = torch.autograd.grad(got[0], (h, rows))
        assert_close(got, expected, **CLOSE)
        assert_close((h_gradient, rows_gradient.full_tensor()), truth, **CLOSE)


def in_the_model():
    sizes = {"vocab_size": 7, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole, sharded = (CanonLMForCausalLM(CanonLMConfig(**sizes)).double() for _ in range(2))
    fully_shard(sharded.lm_head)
    fully_shard(sharded)
    ids = torch.arange(6).view(2, 3)
    losses = [model(ids, labels=ids, loss_only=True).loss for model in (whole, sharded)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, **CLOSE)
    for one, part in zip(whole.parameters(), sharded.parameters(), strict=True):
        assert_close(part.grad.full_tensor(), one.grad, **CLOSE)


@pytest.mark.slow
def test_the_head_may_be_sharded_by_rows(start, tmp_path):
    ranks = [start(on_a_rank, rank, str(tmp_path)) for rank in range(2)]
    for process in ranks:
        process.join(1200)
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()
    assert codes == [0, 0]
