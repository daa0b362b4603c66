"""A decoding step with a static cache on a GPU: one graph for all positions, and no waiting of the host."""

import pytest
import torch
from host_waits import Calls, Waits
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import StaticCache

IDS = torch.arange(36).view(2, 18) * 7 % 61
MODELS = {
    "llama": {},
    "llama+canon": {"canon_set": "ABCD"},
    "experts": {"mlp": "moe", "num_experts": 4, "intermediate_size": 24},
    "hybrid": {"mixers": ["gdn", "gdn", "attention"], "num_hidden_layers": 3, "canon_sets": ["AbCD", "AbCD", "ABCD"]},
}


def steps(model, forward):
    """The logits of tokens 9 … 17, one at a time by `forward`, after a prompt of 9."""
    cache = StaticCache(config=model.config, max_cache_len=24)
    ones = torch.ones_like(IDS)
    model(IDS[:, :9], past_key_values=cache)
    for t in range(9, IDS.shape[1]):
        token, positions = IDS[:, t : t + 1], torch.full((1, 1), t)
        mask = model.create_masks_for_generate(model.config, token[..., None].double(), ones[:, : t + 1], cache)
        yield forward(token, attention_mask=mask, position_ids=positions, past_key_values=cache).logits


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_one_graph_without_graph_breaks(small_model, name):
    model = small_model(**MODELS[name])
    torch.compiler.reset()
    graphs = CompileCounter()
    compiled = torch.compile(model.forward, backend=graphs, fullgraph=True, dynamic=False)
    logits = torch.cat(list(steps(model, compiled)), dim=1)
    assert_close(logits, model(IDS).logits[:, 9:], atol=1e-10, rtol=0)
    assert graphs.frame_count == 1


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_a_decoding_step_does_not_synchronize(small_model, name):
    model, result = small_model(**MODELS[name]), Waits()

    def watched(*args, **kwargs):
        with result, Calls(result.seen):
            return model(*args, **kwargs)

    logits = torch.cat(list(steps(model, watched)), dim=1)
    assert_close(logits, model(IDS).logits[:, 9:], atol=1e-10, rtol=0)
    assert result.ops > 100
    assert result.seen == []
