"""Decoding with kernels and a cache equals one uncached call without kernels."""

import pytest
import torch
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache
from wired_models import MODELS, documents, kernels, left_padded, tiny_model, tokens

CLOSE = {"atol": 5e-5, "rtol": 0}


def uncached(model, ids, **call):
    with kernels(on=False), torch.no_grad():
        return model(ids, use_cache=False, **call).logits


def in_parts(model, ids, sizes, cache, **call):
    """Logits of chunks, one after the other; the arguments in `call` cover all tokens."""
    end, parts = 0, []
    with torch.no_grad():
        for chunk in ids.split(sizes, dim=1):
            end += chunk.shape[1]
            until = {key: value[:, :end] for key, value in call.items()}
            parts.append(model(chunk, past_key_values=cache, **until).logits)
    return torch.cat(parts, dim=1)


def states(cache):
    return [state for layer in cache.layers for state in getattr(layer, "conv_states", {}).values()]


@pytest.mark.parametrize("name", MODELS)
def test_a_prefill_in_chunks_then_steps_in_place(name):
    model, ids, mask = tiny_model(name), tokens(2, 8), left_padded(2, 8)
    full = uncached(model, ids, attention_mask=mask)
    with kernels() as count, torch.no_grad():
        cache = DynamicCache(config=model.config)
        first = in_parts(model, ids[:, :7], [5, 2], cache, attention_mask=mask[:, :7])
        places, prefill = [state.data_ptr() for state in states(cache)], dict(count)
        count.clear()
        last = model(ids[:, 7:], attention_mask=mask, past_key_values=cache).logits
    logits = torch.cat([first, last], dim=1)
    assert_close(logits[mask != 0], full[mask != 0], **CLOSE)
    assert {kernel.partition("_with_state")[1] for kernel in prefill} == {"_with_state"}
    assert set(count) <= {"step", "gated_step", "normed_step"}
    assert 2 * sum(count.values()) == sum(prefill.values())
    assert [state.data_ptr() for state in states(cache)] == places


def test_right_padding_then_decoding():
    """A state is that of a row's last real token, even in a row without any or with fewer than the kernel's width."""
    model, ids = tiny_model("llama+canon"), tokens(3, 9)
    lengths = torch.tensor([[7], [2], [5]])
    mask = (torch.arange(7) < lengths).long()
    with kernels(), torch.no_grad():
        cache = DynamicCache(config=model.config)
        in_parts(model, ids[:, :7], [5, 2], cache, attention_mask=mask)
        mask = torch.nn.functional.pad(mask, (0, 2), value=1)
        positions = lengths + torch.arange(2)
        logits = [
            model(ids[:, t : t + 1], attention_mask=mask[:, : t + 1], position_ids=positions[:, t - 7, None],
                  past_key_values=cache).logits for t in (7, 8)
        ]  # fmt: skip
    for row, length in enumerate(lengths.flatten().tolist()):
        alone = torch.cat([ids[row : row + 1, :length], ids[row : row + 1, 7:]], dim=1)
        assert_close(torch.cat(logits, dim=1)[row], uncached(model, alone)[0, -2:], **CLOSE)


def test_documents_in_a_cache():
    model, ids, doc_ids = tiny_model("llama+canon"), tokens(), documents()
    full = uncached(model, ids, doc_ids=doc_ids)
    with kernels() as count:
        logits = in_parts(model, ids, [6, 1, 1, 3], DynamicCache(config=model.config), doc_ids=doc_ids)
    assert_close(logits, full, **CLOSE)
    assert count["conv_with_state"] == count["step"] == 2


def test_gradients_with_a_cache_flow_through_the_inputs():
    model, ids = tiny_model("llama+canon"), tokens()
    with kernels(on=False):
        model(ids, labels=ids, use_cache=False).loss.backward()
    plain = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with kernels() as count:
        model(ids, labels=ids, past_key_values=DynamicCache(config=model.config)).loss.backward()
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        assert_close(parameter.grad, grad, atol=5e-6 * grad.abs().max().item(), rtol=0)
    assert count["conv"] == count["conv_backward"] > 0


GENERATE = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
WAYS = {
    "greedy": {},
    "static cache": {"cache_implementation": "static", "disable_compile": True},
    "beams": {"num_beams": 2},
    "left padding": {"attention_mask": left_padded(2, 6)},
    "prompt lookup": {"prompt_lookup_num_tokens": 2},
}


@pytest.mark.parametrize("way", WAYS)
def test_generates_the_same(way):
    model, prompt = tiny_model("llama+canon"), tokens(1 if way in ("prompt lookup", "beams") else 2, 6)
    with kernels(on=False):
        expected = model.generate(prompt, **GENERATE, **WAYS[way])
    with kernels() as count:
        assert torch.equal(model.generate(prompt, **GENERATE, **WAYS[way]), expected)
    assert way == "prompt lookup" or count["step"] == count["gated_step"] == count["normed_step"] / 2 == 3


def test_a_static_cache_is_used_again_after_a_reset():
    model, ids = tiny_model("llama+canon"), tokens(2, 8)
    full = uncached(model, ids)
    with kernels():
        cache = StaticCache(config=model.config, max_cache_len=16)
        in_parts(model, tokens(2, 5), [4, 1], cache)
        places = [state.data_ptr() for state in states(cache)]
        cache.reset()
        assert_close(in_parts(model, ids, [1, 1, 4, 1, 1], cache), full, **CLOSE)
    assert [state.data_ptr() for state in states(cache)] == places


class NoPeeking(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails where Python reads a tensor's value, which makes the CPU wait for a GPU and breaks a CUDA graph."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default), func
        return func(*args, **(kwargs or {}))


def test_a_step_reads_no_tensor_value():
    model, ids = tiny_model("llama+canon"), tokens()
    with kernels(), torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :10], past_key_values=cache)
        embedded, positions = model.model.embed_tokens(ids[:, 10:]), torch.full((2, 1), 10)
        mask = model.create_masks_for_generate(model.config, embedded, torch.ones(2, 11), cache)
        with NoPeeking():
            model(inputs_embeds=embedded, attention_mask=mask, position_ids=positions, past_key_values=cache)
