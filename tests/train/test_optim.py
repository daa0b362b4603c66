"""Learning rates against hand computation; which parameters decay."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from canonlm import CanonLMForCausalLM
from canonlm.train.build import build_model
from canonlm.train.config import Optim
from canonlm.train.loop import train
from canonlm.train.optim import build_optimizer, learning_rate

WSD = {"schedule": "wsd", "decay_steps": 20}
COSINE = {"lr": 2.0, "warmup_steps": 4, "schedule": "cosine", "final_lr_ratio": 0.1}


@pytest.mark.parametrize(
    ("step", "changes", "rate"),
    [
        (0, {}, 0.5),
        (1, {}, 1.0),
        (3, {}, 2.0),
        (4, {}, 2.0),  # the schedule starts at its top
        (54, {}, 1.1),  # half way: the mean of 2 and 0.2
        (29, {}, 0.2 + 1.8 * 0.5 * (1 + math.sqrt(0.5))),  # a quarter
        (104, {}, 0.2),  # the end, just after the last step (103)
        (54, {"schedule": "linear"}, 1.1),
        (29, {"schedule": "linear"}, 2 - 0.25 * 1.8),
        (103, {"schedule": "linear", "final_lr_ratio": 0.0}, 0.02),
        (103, {"schedule": "constant"}, 2.0),
        (84, WSD, 2.0),  # the decay starts at its top
        (94, WSD, 1.1),
        (103, WSD, 0.2 + 1.8 / 20),
        (103, {**WSD, "decay_steps": 1}, 2.0),
        (54, {**WSD, "decay_steps": 100}, 1.1),  # nothing stable: linear
    ],
)
def test_learning_rate(step, changes, rate):
    assert learning_rate(step, 104, Optim(**{**COSINE, **changes})) == pytest.approx(rate, rel=1e-12)


def test_a_warm_up_longer_than_the_run():
    assert [learning_rate(step, 3, Optim(**COSINE)) for step in range(3)] == [0.5, 1.0, 1.5]


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    parts=st.tuples(st.integers(0, 50), st.integers(0, 50), st.integers(1, 50)),
    low=st.floats(0, 1),
)
def test_a_rate_rises_stays_and_falls(schedule, parts, low):
    warmup, stable, decay = parts
    fall = {"decay_steps": decay} if schedule == "wsd" else {}
    config = Optim(lr=3.0, warmup_steps=warmup, schedule=schedule, final_lr_ratio=low, **fall)
    rates = [learning_rate(step, sum(parts), config) for step in range(sum(parts))]
    rise, rest = rates[:warmup], rates[warmup:]
    assert rise == sorted(set(rise))
    assert rest == sorted(rest, reverse=True)
    assert max(rates) == rest[0] == pytest.approx(3.0)
    assert min(rest) >= 3.0 * low * (1 - 1e-12)
    if schedule == "wsd":
        assert set(rest[:stable]) <= {3.0}
        assert low == 1 or decay == 1 or rest[-1] < 3.0


def test_published_runs_decay_everything_and_arguments_of_adamw(tiny):
    config = tiny(train={"optim": {"lr": 0.5, "decay": "all", "betas": [0.8, 0.9], "eps": 1e-3}})
    model = build_model(config).module
    [group] = build_optimizer(model, config.train.optim).param_groups
    assert group["weight_decay"] == config.train.optim.weight_decay > 0
    assert len(group["params"]) == len(list(model.parameters()))
    assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-3)


VECTORS = ("bias", "A_log", ".D", "sinks", "bonus", "removal", "share", "shifts")
MATRICES = ["embed_tokens", "lm_head", "canonA.weight", "canonB", "canonD", "q_proj.weight"]


@pytest.mark.parametrize(
    ("arch", "fields", "parts"),
    [
        ("llama+canon", {"attention_bias": True, "canon_bias": True, "qk_norm": True}, [*MATRICES, "norm", "bias"]),
        *(("llama", {"mixers": [mixer]}, ["A_log", "dt_bias"]) for mixer in ("gdn", "mamba2")),
        ("mamba3{mimo_rank=2}", {}, ["B_bias", "C_bias", "mimo_x"]),
        ("rwkv7", {}, ["shifts"]),
        ("hf:mamba", {}, ["A_log"]),  # of two dimensions, unlike that of Mamba2
        ("hf:gpt_oss", {}, ["experts.down_proj_bias"]),
        ("hf:rwkv", {}, ["time_mix_key", "time_decay"]),
    ],
)
def test_only_matrices_decay(tiny, arch, fields, parts):
    config = tiny(arch=arch, model={"num_hidden_layers": 2, "fields": fields})
    model = build_model(config).module
    optimizer = build_optimizer(model, config.train.optim)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    decays = {name: decay[id(p)] for name, p in model.named_parameters()}
    for name, value in decays.items():
        kept = any(part in name for part in ("norm", ".ln", "pre_ln", "time_")) or name.endswith(VECTORS)
        assert value == (0.0 if kept else config.train.optim.weight_decay), name
    for part in parts:
        assert any(part in name for name in decays), part
    assert len(decay) == len(decays)


@pytest.mark.parametrize("mixer", ["attention", "gla"])
def test_frozen_canon_layers_keep_their_initial_values(tiny, tmp_path, mixer):
    """Site b is trained; frozen parameters are still frozen after saving and loading."""
    sites = "ABCD" if mixer == "attention" else "AbBCD"
    fields = {"mixers": [mixer], "canon_set": sites, "canon_frozen": True}
    config = tiny(arch="llama", model={"fields": fields}, train={"steps": 3})
    model = build_model(config).module
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in model.named_parameters() if "canon" in name}
    optimizer = build_optimizer(model, config.train.optim)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters())) - len(frozen)

    train(config, tmp_path)
    before = {name: value.numpy().tobytes() for name, value in model.state_dict().items()}
    after = tiny.weights(tmp_path)
    assert {name for name in after if after[name] == before[name]} == frozen

    model.save_pretrained(tmp_path)
    loaded = CanonLMForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert frozen == {name for name, parameter in loaded.named_parameters() if not parameter.requires_grad}
