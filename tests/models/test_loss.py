"""The training loss with all that a configuration can add to it, term by term."""

import pytest
import torch
from torch.testing import assert_close

from canonlm.models.mixers import MIXERS

IDS = torch.arange(36).reshape(2, 18) * 7 % 61
LABELS = IDS.masked_fill(IDS % 3 == 0, -100)
EXPERTS = {"mlp": "moe", "num_experts": 4, "router_loss_weight": 0.3}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


def terms(logits, z_loss, weight):
    for b, t in (LABELS[:, 1:] != -100).nonzero().tolist():
        z = logits[b, t].exp().sum()
        loss = -(logits[b, t, LABELS[b, t + 1]].exp() / z).log()
        yield loss + {None: 0, "logsumexp": weight * z.log() ** 2, "squared_nll": weight * loss**2}[z_loss]


def loss_and_gradients(loss, model):
    parameters = list(model.parameters())
    return loss.detach(), torch.autograd.grad(loss, parameters, retain_graph=True)


@pytest.mark.parametrize("z_loss", [None, "logsumexp", "squared_nll"])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("num_items", [None, 100])
def test_loss_is_the_mean_of_its_terms(small_model, z_loss, experts, num_items):
    model = small_model(**experts, z_loss=z_loss, z_loss_weight=0.1).train()
    router_losses = []
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda module, args, output: router_losses.append(output[1]))
    output = model(IDS, labels=LABELS, num_items_in_batch=num_items)
    each = list(terms(output.logits, z_loss, 0.1))
    expected = sum(each) / (num_items or len(each))
    if experts:  # in proportion to the labelled tokens, where a batch is spread over calls
        expected = expected + 0.3 * sum(router_losses) * len(each) / (num_items or len(each))
        assert len(router_losses) == 2
    assert_close(loss_and_gradients(output.loss, model), loss_and_gradients(expected, model), **CLOSE)


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("fields", [{}, EXPERTS, {"z_loss": "logsumexp"}])
@pytest.mark.parametrize(("real", "num_items"), [(0, 8), (1, 8), (1, None)])
def test_a_call_without_targets_adds_nothing(small_model, fields, real, num_items, loss_only):
    model = small_model(**fields).train()
    mask, labels = torch.full_like(IDS, real), torch.full_like(IDS, -100)
    loss = model(IDS, mask, labels=labels, num_items_in_batch=num_items, loss_only=loss_only).loss
    assert loss == 0 or num_items is None  # a mean of no targets is not a number
    assert not any(gradient.any() for gradient in loss_and_gradients(loss, model)[1])


@pytest.mark.parametrize("loss_only", [False, True])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if MIXERS[name].recurrent])
def test_rows_may_be_empty(small_model, mixer, loss_only):
    model = small_model(mixers=[mixer])
    nothing = model(IDS[:, :0], labels=IDS[:, :0], num_items_in_batch=1, loss_only=loss_only)
    assert nothing.loss == 0
    expected, cache = model(IDS).logits[:, 6:], None
    for ids in (IDS[:, :0], IDS[:, :6], IDS[:, :0], IDS[:, 6:]):
        outputs = model(ids, past_key_values=cache, use_cache=True)
        cache = outputs.past_key_values
    assert_close(outputs.logits, expected, **CLOSE)


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("z_loss", [None, "logsumexp", "squared_nll"])
def test_the_loss_of_a_bfloat16_model_is_float32(small_model, z_loss, experts):
    model = small_model(torch.bfloat16, **experts, z_loss=z_loss).train()
    assert model(IDS, labels=LABELS).loss.dtype == torch.float32
