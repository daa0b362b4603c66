"""The gate, sinks and windows of attention against their definition and transformers' own layers."""

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


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("window", "layer"), [(None, 0), (2, 0), (WINDOW, 0), (WINDOW, 1)])
@pytest.mark.parametrize("packed", [False, True])
def test_the_definition(small_model, kernel, sink, window, layer, packed):
    """Every sum as a loop over the tokens that a token sees, in float64 (eager attention's softmax is in float32)."""
    slides = [True, False] if window == WINDOW else None  # the second layer sees all tokens
    options = {"attention_sink": sink, "sliding_window": window, "sliding_layers": slides, "attention_gate": True}
    model, window = small_model(rope_dim=0, **options), window if layer == 0 else None
    model.set_attn_implementation(kernel)
    doc_ids = torch.tensor([[0] * 7 + [1] * 12, [0] * TIME]) if packed else torch.zeros(2, TIME, dtype=torch.long)
    mixer, x_BTD, y_BTD = inside(model, layer, **({"doc_ids": doc_ids} if packed else {}))
    q, k, v = (f(x_BTD).unflatten(-1, (-1, 8)) for f in (mixer.q_proj, mixer.k_proj, mixer.v_proj))
    heads = torch.zeros(2, TIME, 4, 8, dtype=torch.float64)
    for b in range(2):
        for t in range(TIME):
            seen = [s for s in range(t + 1) if t - s < (window or TIME) and doc_ids[b, s] == doc_ids[b, t]]
            for h in range(4):
                p = torch.stack([(q[b, t, h] @ k[b, s, h // 2] / 8**0.5).exp() for s in seen])
                p = p / (p.sum() + (mixer.sinks[h].exp() if sink else 0))
                heads[b, t, h] = sum(p[i] * v[b, s, h // 2] for i, s in enumerate(seen))
    expected = mixer.o_proj(heads.flatten(-2) * torch.sigmoid(mixer.g_proj(x_BTD)))
    assert_close(y_BTD, expected, atol=1e-12 if kernel == "sdpa" else 1e-6, rtol=0)


def mask_of(window):
    steps = torch.arange(TIME)[:, None] - torch.arange(TIME)
    return torch.zeros(1, 1, TIME, TIME).masked_fill((steps < 0) | (steps >= window), torch.finfo(torch.float32).min)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_sinks_and_windows_equal_gpt_oss(small_model, window):
    ours, x_BTD, y_BTD = inside(small_model(torch.float32, attention_sink=True, sliding_window=window))
    kind = "full_attention" if window is None else "sliding_attention"
    config = GptOssConfig(**SIZES, num_hidden_layers=1, layer_types=[kind], sliding_window=WINDOW, attention_bias=False)
    theirs = GptOssAttention(config, 0).eval()
    theirs.config._attn_implementation = "eager"
    theirs.load_state_dict(ours.state_dict())  # strict: the same names and shapes
    ours.load_state_dict(theirs.state_dict())
    cos, sin = (x[:, :, 0] for x in rotary_table(torch.arange(TIME)[None], 8, 10000.0, torch.float32))
    with torch.no_grad():
        expected, _ = theirs(x_BTD, (cos, sin), mask_of(window or TIME))
    assert_close(y_BTD, expected, atol=1e-5, rtol=0)


def test_the_gate_equals_qwen3_next(small_model):
    """Its queries and gates are one projection, head by head; its norms on queries and keys, of single heads, are not
    ours."""
    ours, x_BTD, y_BTD = inside(small_model(torch.float32, attention_gate=True))
    theirs = Qwen3NextAttention(Qwen3NextConfig(**SIZES), 0).eval()
    theirs.config._attn_implementation = "eager"
    theirs.q_norm, theirs.k_norm = torch.nn.Identity(), torch.nn.Identity()
    state = ours.state_dict()
    q, gate = (state.pop(f"{name}_proj.weight").unflatten(0, (4, 8)) for name in "qg")
    theirs.load_state_dict({**state, "q_proj.weight": torch.cat([q, gate], dim=1).flatten(0, 1)})
    q, gate = theirs.q_proj.weight.unflatten(0, (4, 16)).chunk(2, dim=1)
    assert torch.equal(ours.q_proj.weight, q.flatten(0, 1))
    assert torch.equal(ours.g_proj.weight, gate.flatten(0, 1))
    cos, sin = (x[:, :, 0].repeat(1, 1, 2) for x in rotary_table(torch.arange(TIME)[None], 8, 10000.0, torch.float32))
    with torch.no_grad():
        expected, _ = theirs(x_BTD, (cos, sin), mask_of(TIME))
    assert_close(y_BTD, expected, atol=1e-5, rtol=0)
