"""The model on one page, examples/llama_canon.py, against our decoder."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

EXAMPLE = Path(__file__).parents[2] / "examples" / "llama_canon.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("llama_canon", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("options", [{}, {"num_key_value_heads": 2}, {"canon_kernel": 2, "rope_theta": 500.0}])
def test_the_decoder_equals_the_model_on_one_page(example, small_model, options):
    """Logits, and the gradients of every parameter."""
    ours = small_model(torch.float64, canon_set="ABCD", intermediate_size=88, **options)
    config = example.Config(**{key: getattr(ours.config, key) for key in example.Config.__annotations__})
    theirs = example.LlamaCanon(config).double()
    theirs.load_state_dict(ours.state_dict())  # the same names, all of them
    ids = torch.randint(0, ours.config.vocab_size, (3, 21))
    logits, expected = ours(ids).logits, theirs(ids)
    assert_close(logits, expected, atol=1e-10, rtol=0)
    weights = torch.randn_like(logits)
    ours_by_name, theirs_by_name = dict(ours.named_parameters()), dict(theirs.named_parameters())
    got = torch.autograd.grad((logits * weights).sum(), list(ours_by_name.values()))
    truth = torch.autograd.grad((expected * weights).sum(), [theirs_by_name[name] for name in ours_by_name])
    for name, mine, true in zip(ours_by_name, got, truth, strict=True):
        assert_close(mine, true, atol=1e-10, rtol=1e-10, msg=lambda text, name=name: f"{name}: {text}")


def test_half_precision_keeps_positions_apart(example):
    x_BTHE = torch.randn(1, 600, 2, 8, dtype=torch.bfloat16)
    expected = example.rotate(x_BTHE.double(), 10000.0)
    assert_close(example.rotate(x_BTHE, 10000.0), expected, atol=0.05, rtol=0, check_dtype=False)
