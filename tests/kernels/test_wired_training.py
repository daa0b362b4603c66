"""Whole decoders whose Canon layers run as kernels: logits, loss and gradients are those of PyTorch's forms."""

import pytest
import torch
from torch.testing import assert_close
from wired_models import MODELS, documents, kernels, left_padded, tiny_model, tokens

LAYOUTS = {
    "plain": {},
    "documents": {"doc_ids": documents()},
    "left padding": {"attention_mask": left_padded()},
}
LAUNCHES = {  # in a forward pass
    "llama+canon": {"normed": 2, "rotary": 1, "gated": 1},
    "llama+canon=KVOM:scaled": {"conv": 3},
    "gdn.llama": {"normed": 4, "conv": 2, "rotary": 1, "gated": 2},
    "llama+canon=ABCD:silu": {"conv": 5},
}


def step(model, **call):
    model.zero_grad()
    ids = tokens()
    labels = ids if "attention_mask" not in call else ids.masked_fill(call["attention_mask"] == 0, -100)
    output = model(ids, labels=labels, use_cache=False, **call)
    output.loss.backward()
    return output, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def compare(model, tolerance=5e-6, **call):
    with kernels(on=False):
        plain, plain_grads = step(model, **call)
    with kernels() as count:
        output, grads = step(model, **call)
    real = call.get("attention_mask", torch.ones(2, 11)) != 0
    assert_close(output.loss, plain.loss, atol=1e-6, rtol=0)
    assert_close(output.logits[real], plain.logits[real], atol=2e-5, rtol=0)
    for name, grad in grads.items():
        assert_close(grad, plain_grads[name], atol=tolerance * plain_grads[name].abs().max().item(), rtol=0, msg=name)
    return count


@pytest.mark.parametrize(("name", "layout"), [(name, "documents") for name in MODELS] + [
    ("llama+canon", "plain"), ("llama+canon", "left padding"),
])  # fmt: skip
def test_loss_logits_and_gradients(name, layout):
    # Roundings before the delta rule's queries are 5e-5 of the gradient; elsewhere they are at most 1.3e-6.
    count = compare(tiny_model(name), 1e-4 if "gdn" in name else 5e-6, **LAYOUTS[layout])
    backward = {f"{kernel}_backward": n for kernel, n in LAUNCHES[name].items()}
    assert count == LAUNCHES[name] | backward


def test_sites_with_different_layers_use_separate_kernels_or_none():
    """Q has another K, V is averaged, D's MLP has an activation without a kernel, and M has K > 8."""
    count = compare(tiny_model("Q:k3,K,V:avg,D,M:k9", hidden_act="relu2"), **LAYOUTS["documents"])
    assert count == {"conv": 4, "conv_backward": 4}  # q; k; v; gate and up
