"""The training loss with all that a configuration can add to it, term by term."""

import pytest
import torch
from torch.testing import assert_close

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


@pytest.mark.parametrize("experts", [{}, EXPERTS])
@pytest.mark.parametrize("z_loss", [None, "logsumexp", "squared_nll"])
def test_the_loss_of_a_bfloat16_model_is_float32(small_model, z_loss, experts):
    model = small_model(torch.bfloat16, **experts, z_loss=z_loss).train()
    assert model(IDS, labels=LABELS).loss.dtype == torch.float32
