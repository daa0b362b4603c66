"""Whole decoders on a GPU give the numbers of the CPU, with every kernel that is used there."""

import pytest
import torch
from families import ids
from torch.testing import assert_close
from transformers import DynamicCache

from canonlm.models import attend, masks
from canonlm.ops import packed_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MODELS = {
    "llama": {"canon_set": "ABCD", "qk_norm": True},
    "gla": {"mixers": ["gla"], "canon_set": "AbBCD"},
    "gdn": {"mixers": ["gdn"], "canon_set": "AbBCD"},
    "kda": {"mixers": ["kda"], "canon_set": "AbBCD"},
    "deltaproduct": {"mixers": ["deltaproduct"], "canon_set": "AbBCD"},
    "rwkv7": {"mixers": ["rwkv7"], "canon_set": "AbBCD"},
    "mla": {"mixers": ["mla"], "canon_set": "ABCD"},
    "mamba2": {"mixers": ["mamba2"], "canon_set": "AbBCD", "mamba_state_size": 16},
    "mamba3": {"mixers": ["mamba3"], "canon_set": "AbBCD", "mamba_state_size": 16},
    "retention": {"mixers": ["retention"], "canon_set": "AbCD"},
    "hybrid": {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"]},
}
SIZES = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(params=MODELS)
def model(small_model, request):
    return small_model(**SIZES, **MODELS[request.param])


def documents(input_ids):
    return (torch.arange(input_ids.shape[1]) > 70).long().expand_as(input_ids)


@pytest.mark.parametrize("packed", [False, True])
def test_loss_and_gradients(model, packed):
    input_ids = ids(2, 150)
    how = {"doc_ids": documents(input_ids)} if packed else {}
    collected = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32), ("cuda", torch.bfloat16)):
        model.to(device, dtype).zero_grad()
        there = {key: value.to(device) for key, value in how.items()}
        output = model(input_ids.to(device), labels=input_ids.to(device), use_cache=False, **there)
        output.loss.backward()
        collected.append((output.loss.item(), output.logits.detach().cpu().double(),
                      {n: p.grad.detach().cpu().double() for n, p in model.named_parameters()}))  # fmt: skip
    (loss, logits, gradients), exact, narrow = collected
    assert exact[0] == pytest.approx(loss, abs=1e-4)
    assert_close(exact[1], logits, atol=1e-3, rtol=0)
    assert narrow[0] == pytest.approx(loss, rel=0.05)
    for name, gradient in gradients.items():
        # That of a decay may be a sum of terms which cancel: float32 on the CPU is off by 4e-8, too, where it is 2e-5.
        assert (exact[2][name] - gradient).abs().max() <= 1e-3 * gradient.abs().max() + 1e-6, name
    cosine = torch.nn.functional.cosine_similarity(
        *(torch.cat([g.flatten() for g in every.values()]) for every in (narrow[2], gradients)), dim=0
    )
    assert cosine > 0.98


def test_isolated_documents_without_a_mask(small_model, monkeypatch):
    """If torch's kernel is right on this GPU; the numbers are those with a mask."""
    model, input_ids = small_model(torch.bfloat16, **SIZES, canon_set="ABCD").cuda(), ids(2, 150).cuda()
    made, make = [], masks.create_causal_mask
    monkeypatch.setattr(masks, "create_causal_mask", lambda **how: made.append(how) or make(**how))
    with torch.no_grad():
        doc_ids = documents(input_ids).cuda()
        got = model(input_ids, doc_ids=doc_ids, use_cache=False).logits
        assert bool(made) != packed_attention._kernel_is_right(False)
        monkeypatch.setattr(attend, "takes", lambda *_: False)
        expected = model(input_ids, doc_ids=doc_ids, use_cache=False).logits
    assert made
    assert_close(got, expected, atol=0.5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decoding(model, dtype):
    """Chunks with kernels, then one token at a time, against one uncached call."""
    model.to("cuda", dtype)
    tokens, sizes = ids(3, 100).cuda(), [64, 3, 20, *[1] * 13]
    mask = (torch.arange(100) >= torch.tensor([[0], [9], [60]])).long().cuda()
    with torch.no_grad():
        full = model(tokens, attention_mask=mask, use_cache=False).logits
        cache, end, parts = DynamicCache(config=model.config), 0, []
        for chunk in tokens.split(sizes, dim=1):
            end += chunk.shape[1]
            parts.append(model(chunk, attention_mask=mask[:, :end], past_key_values=cache).logits)
    error = (torch.cat(parts, dim=1) - full)[mask != 0].abs().max().item()
    assert error < (1e-3 if dtype == torch.float32 else 0.5)


def test_generation(model):
    model.to("cuda", torch.float32)
    prompt = ids(2, 33).cuda()
    kwargs = {"max_new_tokens": 12, "do_sample": False}
    cached, rerun, static = (
        model.generate(prompt, **kwargs, **how)
        for how in ({}, {"use_cache": False}, {"cache_implementation": "static"})
    )
    assert torch.equal(cached, rerun)
    assert torch.equal(static, rerun)


def test_compiled_training_step(model):
    model.to("cuda", torch.bfloat16).train()
    input_ids = ids(2, 128).cuda()
    eager = model(input_ids, labels=input_ids, use_cache=False).loss
    compiled = torch.compile(model)(input_ids, labels=input_ids, use_cache=False).loss
    compiled.backward()
    assert compiled.item() == pytest.approx(eager.item(), rel=0.02)
