"""The gate, sinks and windows of attention against transformers' own layers."""

import pytest
import torch
from torch.testing import assert_close
from transformers import GptOssConfig, Qwen3NextConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention

from canonlm.models.positions import rotary_table

SIZES = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TIME, WINDOW = 19, 5


def inside(model, layer=0, **kwargs):
    """The mixer of a layer, its input and its output in a forward of the model."""
    seen, mixer = [], model.model.layers[layer].self_attn
    hook = mixer.register_forward_hook(lambda module, inputs, outputs: seen.extend([inputs[0], outputs[0]]))
    with torch.no_grad():
        model(torch.arange(2 * TIME).reshape(2, TIME), use_cache=False, **kwargs)
    hook.remove()
    return mixer, *seen


def output_of(theirs, x_BTD, rope_dim, *, window=TIME, repeats=1):
    """The output of a layer of transformers, whose tables of sines may have every channel twice."""
    steps = torch.arange(TIME)[:, None] - torch.arange(TIME)
    hidden = (steps < 0) | (steps >= window)
    mask = torch.zeros(1, 1, TIME, TIME).masked_fill(hidden, torch.finfo(torch.float32).min)
    table = rotary_table(torch.arange(TIME)[None], rope_dim, 10000.0, torch.float32)
    theirs.eval().config._attn_implementation = "eager"
    with torch.no_grad():
        return theirs(x_BTD, [x[:, :, 0].repeat(1, 1, repeats) for x in table], mask)[0]


@pytest.mark.parametrize("window", [None, WINDOW])
def test_sinks_and_windows_equal_gpt_oss(small_model, window):
    ours, x_BTD, y_BTD = inside(small_model(torch.float32, attention_sink=True, sliding_window=window))
    kind = "full_attention" if window is None else "sliding_attention"
    config = GptOssConfig(**SIZES, num_hidden_layers=1, layer_types=[kind], sliding_window=WINDOW, attention_bias=False)
    theirs = GptOssAttention(config, 0)
    theirs.load_state_dict(ours.state_dict())  # strict: the same names and shapes
    ours.load_state_dict(theirs.state_dict())
    assert_close(y_BTD, output_of(theirs, x_BTD, 8, window=window or TIME), atol=1e-5, rtol=0)


def test_the_gate_equals_qwen3_next(small_model):
    """Its queries and gates are one projection, head by head; its norms on queries and keys, of single heads, are not
    ours."""
    ours, x_BTD, y_BTD = inside(small_model(torch.float32, attention_gate=True))
    theirs = Qwen3NextAttention(Qwen3NextConfig(**SIZES), 0)
    theirs.q_norm, theirs.k_norm = torch.nn.Identity(), torch.nn.Identity()
    state = ours.state_dict()
    q, gate = (state.pop(f"{name}_proj.weight").unflatten(0, (4, 8)) for name in "qg")
    theirs.load_state_dict({**state, "q_proj.weight": torch.cat([q, gate], dim=1).flatten(0, 1)})
    q, gate = theirs.q_proj.weight.unflatten(0, (4, 16)).chunk(2, dim=1)
    assert torch.equal(ours.q_proj.weight, q.flatten(0, 1))
    assert torch.equal(ours.g_proj.weight, gate.flatten(0, 1))
    assert_close(y_BTD, output_of(theirs, x_BTD, 8, repeats=2), atol=1e-5, rtol=0)
