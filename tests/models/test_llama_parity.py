"""Without Canon layers the decoder is transformers' Llama, parameter by parameter."""

import pytest
import torch
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM

VARIANTS = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "one-kv-head": {"num_key_value_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "wide-heads": {"head_dim": 24, "rope_theta": 500.0, "rms_norm_eps": 1e-3, "hidden_act": "gelu"},
}
CLOSE = 1e-5  # relative to the largest number, as transformers' rotary tables stay float32


@pytest.fixture(params=VARIANTS)
def pair(request, small_model):
    options = {"num_key_value_heads": 4, "intermediate_size": 88, **VARIANTS[request.param]}
    ours = small_model(canon_set="", **options)
    sizes = {key: getattr(ours.config, key) for key in ("vocab_size", "hidden_size", "num_hidden_layers")}
    config = LlamaConfig(num_attention_heads=4, **sizes, **{"rms_norm_eps": 1e-5, **options})
    theirs = LlamaForCausalLM(config).double().eval()
    theirs.load_state_dict(ours.state_dict())  # the same names, all of them
    theirs.tie_weights()
    return ours, theirs


def logits_loss_gradients(model, **inputs):
    output = model(**inputs)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(output.loss, parameters)
    return {"logits": output.logits, "loss": output.loss, **dict(zip(names, gradients, strict=True))}


def assert_near(got, expected):
    assert got.keys() == expected.keys()
    for name, value in expected.items():  # transformers' loss is always float32
        close = CLOSE * max(1.0, value.abs().max().item())
        assert_close(
            got[name], value, atol=close, rtol=0, check_dtype=name != "loss", msg=lambda m, n=name: f"{n}: {m}"
        )


def test_logits_loss_and_gradients(pair):
    ours, theirs = pair
    input_ids = torch.randint(0, 61, (3, 21))
    labels = input_ids.masked_fill(torch.rand(3, 21) < 0.3, -100)
    got, expected = (logits_loss_gradients(model, input_ids=input_ids, labels=labels) for model in (ours, theirs))
    assert_near(got, expected)


def test_packing_by_restarting_positions(pair):
    ours, theirs = pair
    input_ids = torch.randint(0, 61, (2, 12))
    position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]])
    inputs = {"input_ids": input_ids, "position_ids": position_ids, "labels": input_ids}
    expected = logits_loss_gradients(theirs, use_cache=False, attention_mask=None, **inputs)
    # Also where transformers' Llama lets attention cross documents: with a cache, or a mask of ones.
    for kwargs in ({"use_cache": False}, {"use_cache": True}, {"attention_mask": torch.ones(2, 12)}):
        assert_near(logits_loss_gradients(ours, **inputs, **kwargs), expected)
