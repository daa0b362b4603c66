"""Attention residuals against their equation, with all outputs in one tensor; against sums, where they are equal."""

import pytest
import torch
from torch.nn.functional import rms_norm
from torch.testing import assert_close

from canonlm import CanonLMConfig, CanonLMForCausalLM

IDS = torch.arange(36).reshape(2, 18) * 7 % 61
MODELS = {
    "llama": {"canon_set": "BD"},
    "gdn": {"mixers": ["gdn"], "canon_set": "b"},
    "hybrid": {"mixers": ["mamba3", "attention", "gla"], "num_hidden_layers": 3, "canon_sets": ["", "B", "bD"]},
    "without MLPs": {"mixers": ["mamba2"], "mlp": "none", "num_hidden_layers": 3},
    "experts": {"mlp": "moe", "num_experts": 4},
}
CLOSE = {"atol": 1e-10, "rtol": 0}


def read_and_made(model):
    """The inputs of all readers, and the outputs of the embedding, mixers and MLPs, in the order in which they run."""
    read, made = [], []
    decoder = model.model
    norms = [
        norm
        for layer in decoder.layers
        for norm in (layer.input_layernorm, getattr(layer, "post_attention_layernorm", None))
    ]
    for norm in [*filter(None, norms), decoder.norm]:
        norm.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    parts = [part for layer in decoder.layers for part in (layer.get_submodule(layer.mixer_name), layer.mlp)]
    for part in filter(None, parts):
        part.register_forward_hook(lambda _, inputs, output: made.append(output[0]))
    decoder.embed_tokens.register_forward_hook(lambda _, inputs, output: made.append(output))
    with torch.no_grad():
        model(IDS)
    return read, made


@pytest.mark.parametrize("kind", MODELS)
def test_what_is_read_is_a_softmax_over_the_outputs_before(small_model, kind):
    model = small_model(attention_residuals=True, **MODELS[kind])
    read, made = read_and_made(model)
    of_layers = [module.query for name, module in model.model.layers.named_modules() if name.endswith("residual")]
    queries = [*of_layers, model.model.residual.query]
    assert len(read) == len(made) == len(queries) + 1
    assert_close(read[0], made[0], **CLOSE)  # the first mixer reads the embedding
    for n, (h, query) in enumerate(zip(read[1:], queries, strict=True), start=2):
        v = torch.stack(made[:n])
        assert query.abs().min() > 0
        weights = (rms_norm(v, v.shape[-1:], eps=1e-5) @ query).softmax(0)
        assert_close(h, (weights[..., None] * v).sum(0), **CLOSE)


@pytest.mark.parametrize(
    "options",
    [*MODELS.values(), {"canon_set": "EABOCDM"}, {"mixers": ["rwkv7", "attention"], "canon_sets": ["bAC", "ABCD"]}],
)
def test_with_queries_of_zero_a_model_computes_what_one_with_sums_does(small_model, options):
    """Every reader begins with a norm, for which a mean is a sum, but for eps."""
    ours, plain = (small_model(rms_norm_eps=1e-30, attention_residuals=on, **options) for on in (True, False))
    weights = {name: x for name, x in ours.state_dict().items() if not name.endswith("residual.query")}
    plain.load_state_dict(weights)
    with torch.no_grad():
        logits, expected = ours(IDS).logits, plain(IDS).logits
        assert not torch.allclose(logits, expected, atol=1e-3)
        for name, parameter in ours.named_parameters():
            if name.endswith("query"):
                parameter.zero_()
        assert_close(ours(IDS).logits, expected, atol=1e-9, rtol=0)


def test_a_new_model_starts_with_queries_of_zero():
    model = CanonLMForCausalLM(
        CanonLMConfig(vocab_size=61, hidden_size=32, num_hidden_layers=3, attention_residuals=True)
    )
    queries = [x for name, x in model.named_parameters() if name.endswith("query")]
    assert len(queries) == 2 * 3
    assert not any(x.any() for x in queries)


def test_recomputed_blocks_have_the_same_gradients(small_model):
    def gradients(model):
        model.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    model = small_model(attention_residuals=True, num_hidden_layers=3, canon_set="ABCD").train()
    expected = gradients(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_close(gradients(model), expected, **CLOSE)
    assert all(x.any() for x in expected)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"^use_reentrant: expected False with attention residuals .*, got True$"):
        gradients(model)
