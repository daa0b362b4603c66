"""Multi-head latent attention against DeepSeek-V3's in transformers."""

import pytest
import torch
from test_attention_options import inside, output_of
from torch.testing import assert_close
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

RANKS = {"kv_lora_rank": 5, "qk_nope_head_dim": 8, "v_head_dim": 6}
P, HEADS = 4, 4


def to_deepseek(state, interleaved):
    """Their names and rows; they can rotate channels (2i, 2i + 1) where ours are (i, i + P / 2)."""
    order = torch.arange(P).view(2, -1).T.flatten() if interleaved else torch.arange(P)
    state = dict(state)
    state["kv_a_proj_with_mqa.weight"] = torch.cat(
        [state.pop("kv_a_proj.weight"), state.pop("k_rope_proj.weight")[order]]
    )
    name = "q_proj.weight" if "q_proj.weight" in state else "q_b_proj.weight"
    heads = state[name].unflatten(0, (HEADS, -1))
    state[name] = torch.cat([heads[:, :-P], heads[:, -P:][:, order]], dim=1).flatten(0, 1)
    return state


def from_deepseek(state, interleaved):
    order = torch.arange(P).view(-1, 2).T.flatten() if interleaved else torch.arange(P)
    state = dict(state)
    latent, rope = state.pop("kv_a_proj_with_mqa.weight").split([RANKS["kv_lora_rank"], P])
    name = "q_proj.weight" if "q_proj.weight" in state else "q_b_proj.weight"
    heads = state[name].unflatten(0, (HEADS, -1))
    state[name] = torch.cat([heads[:, :-P], heads[:, -P:][:, order]], dim=1).flatten(0, 1)
    return {**state, "kv_a_proj.weight": latent, "k_rope_proj.weight": rope[order]}


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_equals_deepseek_v3(small_model, q_lora_rank, interleaved):
    options = {"mla": {**RANKS, "q_lora_rank": q_lora_rank}}
    fields = {"mixers": ["mla"], "mixer_options": options, "rope_dim": P, "rms_norm_eps": 1e-6}
    ours, x_BTD, y_BTD = inside(small_model(torch.float32, **fields))
    config = DeepseekV3Config(**RANKS, q_lora_rank=q_lora_rank, qk_rope_head_dim=P, rope_interleave=interleaved,
                              hidden_size=32, num_attention_heads=HEADS, num_key_value_heads=HEADS)  # fmt: skip
    theirs = DeepseekV3Attention(config, 0)
    theirs.load_state_dict(to_deepseek(ours.state_dict(), interleaved))
    back = from_deepseek(theirs.state_dict(), interleaved)
    assert all(torch.equal(back[name], weight) for name, weight in ours.state_dict().items())
    assert_close(y_BTD, output_of(theirs, x_BTD, P, repeats=2), atol=1e-5, rtol=0)


def test_a_step_calls_a_wrapped_layer(small_model):
    """It reads the weight of a plain layer; LoRA, offloading and quantization work through calls."""
    model, calls = small_model(mixers=["mla"]), []
    ids = torch.arange(8).view(1, 8)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits[:, -1:]
        for hooked in (False, True):
            if hooked:
                model.model.layers[0].self_attn.kv_b_proj.register_forward_hook(lambda *_: calls.append(1))
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            calls.clear()
            logits = model(ids[:, -1:], past_key_values=cache).logits
            assert_close(logits, expected, atol=1e-10, rtol=0)
            assert len(calls) == hooked
