"""Initial weights against statistics recorded from the original release, parameter kind by parameter kind.

`tests/golden/init_stats.json` pools two layers of hidden size 512: mean, standard deviation, kurtosis, extremes.
"""

import json
import math
import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.initialize import bias_of_time_steps, generator_for, init_parameters, log_of_uniform
from canonlm.models.mixers import MIXERS
from canonlm.models.published import export

RECORDED = json.loads((Path(__file__).parents[1] / "golden" / "init_stats.json").read_text())
LLAMA = {"qk_norm": True, "intermediate_size": 1536, "canon_set": "ABCD"}
LINEAR = {"canon_set": "AbCD", "linear_num_heads": 8, "mamba_state_size": 128}
FAMILIES = {
    "llama_hf": LLAMA,
    "llama_hf canon_kernel 2 (canon only)": {**LLAMA, "canon_kernel": 2},
    "llama_hf canon_kernel 3 (canon only)": {**LLAMA, "canon_kernel": 3},
    "llama_lingua": {**LLAMA, "initializer": "truncated"},
    "llama_lingua init_base_std=0.02": {**LLAMA, "qk_norm": False, "initializer": "truncated", "init_base_std": 0.02},
    "gla GLA5 AbbCD": {**LINEAR, "mixers": ["gla"]},
    "gdn GDN2 AbbCD": {**LINEAR, "mixers": ["gdn"]},
    "gdn GDN2 bb (mlp without canon D)": {**LINEAR, "mixers": ["gdn"], "canon_set": "b"},
    "mamba2 AbbCD ssm128 mlp10": {**LINEAR, "mixers": ["mamba2"]},
}
FEW = ("A_log", "dt_bias")  # sixteen numbers, whose distributions are tested below


def fresh(**fields):
    sizes = {"vocab_size": 4096, "hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8}
    return CanonLMForCausalLM(CanonLMConfig(**{**sizes, **fields}))


def pooled(model, lingua):
    """The release's parameters by name, layers pooled."""
    values = defaultdict(list)
    for name, tensor in export(model, lingua=lingua)[1].items():
        values[re.sub(r"layers\.\d+", "layers.*", name)].append(tensor.flatten().double())
    return {name: torch.cat(parts) for name, parts in values.items()}


@pytest.mark.every(4)
@pytest.mark.parametrize("family", FAMILIES)
def test_statistics(family):
    ours = pooled(fresh(**FAMILIES[family]), lingua="lingua" in family)
    recorded = RECORDED[family]
    assert recorded.keys() <= ours.keys()
    for name, theirs in recorded.items():
        values = ours[name]
        assert len(values) == theirs["n"], name
        if name.endswith(FEW):
            continue
        if theirs["looks_like"] == "constant":
            assert values.min() == values.max() == pytest.approx(theirs["mean"]), name
            continue
        n, kurtosis = theirs["n"], theirs["kurtosis"]
        std = values.std(correction=0).item()
        # Five standard errors of the difference between two samples.
        assert abs(values.mean().item() - theirs["mean"]) < 5 * math.sqrt(2 / n) * theirs["std"], name
        assert abs(std / theirs["std"] - 1) < 5 * math.sqrt(2 * (kurtosis - 1) / (4 * n)), name
        got = ((values - values.mean()) / std).pow(4).mean().item()
        assert abs(got - kurtosis) < 5 * math.sqrt(2 * 24 / n) + 0.005, name
        if theirs["looks_like"] != "normal":  # uniform or truncated: the ends are sharp
            assert values.max().item() == pytest.approx(theirs["max"], rel=0.02), name


@pytest.mark.parametrize("factor", ["current_depth", "global_depth", "dim_ratio"])
def test_depth_factors(factor):
    fields = {**LLAMA, "num_hidden_layers": 4, "initializer": "truncated", "init_std_factor": factor}
    state = export(fresh(**fields), lingua=True)[1]
    recorded = RECORDED[f"llama_lingua init_std_factor={factor}, 4 layers, per layer"]
    for name, theirs in recorded.items():
        assert state[name].std().item() == pytest.approx(theirs["std"], rel=0.01), name


@pytest.mark.parametrize(
    ("name", "fill", "through"),
    [
        ("mamba2 exp(A_log)", log_of_uniform(1, 16), torch.exp),
        ("gdn exp(A_log)", log_of_uniform(0, 16), torch.exp),
        ("mamba2 softplus(dt_bias)", bias_of_time_steps, torch.nn.functional.softplus),
        ("gdn log softplus(dt_bias)", bias_of_time_steps, lambda x: torch.nn.functional.softplus(x).log()),
    ],
)
def test_distributions_of_decays_and_steps(name, fill, through):
    recorded = RECORDED["special parameters, pooled over 40 seeds"][name]
    values = torch.empty(20000)
    fill(values, generator_for(0, name))
    values = through(values.double())
    spread = recorded["max"] - recorded["min"]
    for key, got in (("mean", values.mean()), ("std", values.std()), ("min", values.min()), ("max", values.max())):
        assert abs(got.item() - recorded[key]) < 0.05 * spread, key


@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_the_mixers_use_those_distributions(mixer):
    model = fresh(mixers=[mixer], hidden_size=64, linear_num_heads=256, linear_key_head_dim=1, linear_value_head_dim=1)
    for layer in model.model.layers:
        decays, steps = layer.mixer.A_log.exp(), torch.nn.functional.softplus(layer.mixer.dt_bias)
        assert decays.max() <= 16
        assert 6.5 < decays.mean() < 10.5
        assert 0.9e-3 < steps.min() < 2e-3
        assert 0.05 < steps.max() < 0.101


def test_values_do_not_depend_on_the_dtype_and_the_default_device():
    fields = {"mixers": [*MIXERS], "num_hidden_layers": len(MIXERS), "hidden_size": 64, "canon_set": "E:smear,ACD"}
    model = fresh(vocab_size=97, **fields)
    half = CanonLMForCausalLM._from_config(model.config, dtype=torch.bfloat16)
    again = fresh(vocab_size=97, **fields, init_seed=1)
    with torch.device("meta"):  # in place of a GPU
        for name, module in again.named_modules():
            init_parameters(module, name, model.config)
    for (name, expected), low, other in zip(
        model.named_parameters(), half.parameters(), again.parameters(), strict=True
    ):
        assert torch.equal(low, expected.bfloat16()), name
        assert torch.equal(other, expected), name
