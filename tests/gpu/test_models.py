"""Decoders on a GPU for which the host must not wait: decoding steps in a graph, training batches, equal runs."""

import shutil

import pytest
import torch
from transformers import StaticCache

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.data.windows import Batch
from canonlm.train.loop import train

pytestmark = pytest.mark.gpu

PROMPT, NEW = 7, 6
MODELS = {
    "llama": {"canon_set": "ABCD", "num_key_value_heads": 2},
    "hybrid": {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"]},
}


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_decoding_steps_in_a_graph_equal_the_whole(device, captured, name):
    sizes = {"vocab_size": 61, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = CanonLMForCausalLM(CanonLMConfig(**sizes, **MODELS[name])).to(device).eval()
    ids = torch.randint(0, 61, (3, PROMPT + NEW), generator=torch.Generator().manual_seed(0)).to(device)
    full = model(ids, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=64)
    model(ids[:, :PROMPT], past_key_values=cache)
    token, made = ids[:, :1].clone(), []
    step = captured(lambda: made.append(model(token, past_key_values=cache).logits), 1)
    cache.reset()  # the capture has written to it
    model(ids[:, :PROMPT], past_key_values=cache)
    for t in range(PROMPT, PROMPT + NEW):
        token.copy_(ids[:, t : t + 1])
        step()
        torch.testing.assert_close(made[-1], full[:, t : t + 1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_repeated_steps_are_bitwise_equal(device, tiny, tmp_path, compiled):
    settings = {"steps": 20, "log_every": 1, "eval_every": 20, "checkpoint_every": 20}
    compiled = compiled and device.type == "cuda"
    run = tiny(train=settings | {"device": device.type, "precision": "bf16", "compile": compiled})
    for name in ("one", "two"):
        torch._dynamo.reset()
        train(run, tmp_path / name)
    tiny.same(tmp_path / "one", tmp_path / "two")


def test_a_run_saves_often_and_continues(device, tiny, tmp_path):
    settings = {"steps": 12, "log_every": 1, "eval_every": 12, "checkpoint_every": 4, "device": device.type}
    run, whole, cut = tiny(train=settings), tmp_path / "whole", tmp_path / "cut"
    train(run, whole)
    shutil.copytree(whole, cut)
    (cut / "result.json").unlink()
    shutil.rmtree(cut / "checkpoints/step-00000012")
    train(run, cut)
    tiny.same(whole, cut)


def test_batches_are_pinned(device, tiny, tmp_path, monkeypatch):
    if device.type == "cpu":
        pytest.skip("memory is pinned for a GPU")
    to, pinned = Batch.to, []

    def spy(self, where):
        pinned.append(self.input_ids.is_pinned() and self.targets.is_pinned())
        return to(self, where)

    monkeypatch.setattr(Batch, "to", spy)
    train(tiny(train={"steps": 4, "eval_every": 4, "checkpoint_every": 4, "device": "cuda"}), tmp_path / "run")
    assert pinned.count(True) >= 4
