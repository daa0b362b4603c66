"""Without an MLP, Mamba2 is transformers' own, parameter by parameter."""

import torch
from torch.testing import assert_close
from transformers import Mamba2Config, Mamba2ForCausalLM

SPLIT = ("z", "x", "B", "C", "dt")


def their_state(ours):
    """Our weights under their names; they have z, x, B, C and dt in one projection, and x, B, C in one convolution."""
    state = {
        "backbone.embeddings.weight": ours["model.embed_tokens.weight"],
        "backbone.norm_f.weight": ours["model.norm.weight"],
        "lm_head.weight": ours["lm_head.weight"],
    }
    for layer in range(2):
        theirs, mine = f"backbone.layers.{layer}", f"model.layers.{layer}"
        state[f"{theirs}.norm.weight"] = ours[f"{mine}.input_layernorm.weight"]
        for same in ("A_log", "D", "dt_bias", "norm.weight", "out_proj.weight"):
            state[f"{theirs}.mixer.{same}"] = ours[f"{mine}.mixer.{same}"]
        state[f"{theirs}.mixer.in_proj.weight"] = torch.cat([ours[f"{mine}.mixer.{p}_proj.weight"] for p in SPLIT])
        for leaf in ("weight", "bias"):
            state[f"{theirs}.mixer.conv1d.{leaf}"] = torch.cat([ours[f"{mine}.mixer.{p}_conv1d.{leaf}"] for p in "xBC"])
    return state


def test_logits_loss_and_gradients(small_model):
    ours = small_model(
        torch.float32, mixers=["mamba2"], mlp="none", canon_set="b", linear_num_heads=4, mamba_state_size=16
    )
    config = Mamba2Config(
        vocab_size=61,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=4,
        head_dim=16,
        state_size=16,
        n_groups=1,
        chunk_size=8,
        layer_norm_epsilon=1e-5,
        residual_in_fp32=False,
    )
    theirs = Mamba2ForCausalLM(config).eval()
    theirs.load_state_dict(their_state(ours.state_dict()))
    input_ids = torch.randint(0, 61, (3, 37))
    got, expected = (model(input_ids, labels=input_ids) for model in (ours, theirs))
    assert_close(got.logits, expected.logits, atol=1e-4, rtol=1e-5)
    assert_close(got.loss, expected.loss, atol=1e-5, rtol=0)
    for output in (got, expected):
        output.loss.backward()
    gradients = their_state({name: p.grad for name, p in ours.named_parameters()})
    for name, parameter in theirs.named_parameters():
        close = 1e-4 * parameter.grad.abs().max().item()
        assert_close(gradients[name], parameter.grad, atol=close, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
