"""The fields of a configuration, and the inputs of initial weights."""

import json

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MistralConfig

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.config import OF_EXPERTS
from canonlm.models.initialize import generator_for
from canonlm.models.mixers.recurrent import KeyValueOptions, derive_heads

LINEAR = {"rope_type": "linear", "factor": 4.0}


def state(model):
    return dict(model.state_dict())


def assert_same(got, expected):
    assert got.keys() == expected.keys()
    assert_close(got, expected, atol=0, rtol=0)


# Configuration


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canon_set": "AXD"}, r'letters out of .* \(such as "ABCD" or "KVOM:scaled"\), got "AXD"$'),
        ({"canon_set": "AA"}, r'A once, got "AA"$'),
        ({"canon_sets": ["E", ""]}, r"E in every layer's sites"),
        ({"canon_set": "Ab"}, r'no site b: attention has no short convolution, got "Ab"$'),
        ({"canon_sets": ["A", "b"]}, r'no site b: .*, got "b"$'),
        (
            {"canon_sets": ["A", "B", "C"]},
            r"one entry per layer \(2\), or a pattern that repeats, got \['A', 'B', 'C'\]$",
        ),
        ({"canon_kernel": 0}, r"an integer from 1 to 64, got 0$"),
        ({"vocab_size": -3}, r"an integer >= 1, got -3$"),
        ({"intermediate_size": 0}, r"an integer >= 1, got 0$"),
        ({"num_attention_heads": 5}, r"a divisor of hidden_size = 32 .*, got 5$"),
        ({"num_key_value_heads": 3}, r"a divisor of num_attention_heads = 4, got 3$"),
        ({"rope_dim": 3}, r"an even number from 0 \(no positions\) to head_dim = 8, got 3$"),
        ({"rope_dim": 10}, r"an even number .*, got 10$"),
        ({"rope_dim": -2}, r"an even number .*, got -2$"),
        ({"mixers": ["attention", "atention"]}, r'^unknown mixer "atention"\. Did you mean "attention"\? Mixers: '),
        ({"mixers": []}, r"one entry per layer \(2\), or a pattern that repeats, got \[\]$"),
        (
            {"mixers": ["gla"], "linear_num_heads": 5},
            r"^mixer_options\.gla\.num_heads: expected a divisor of hidden_size = 32 .*, got 5$",
        ),
        (
            {"mixers": ["gdn"], "linear_num_heads": 0},
            r"^mixer_options\.gdn\.num_heads: expected an integer >= 1, got 0$",
        ),
        ({"mixers": "gdn"}, r'a list of strings, one per layer or repeating, got "gdn"$'),
        ({"canon_sets": "AC"}, r'a list of strings, one per layer or repeating, got "AC"$'),
        (
            {"mixers": ["gla"], "mixer_options": {"gla": {"num_key_value_heads": 3}}},
            r"^mixer_options\.gla\.num_key_value_heads: expected a divisor of num_heads = 2, got 3$",
        ),
        (
            {"mixers": ["mamba2"], "mixer_options": {"mamba2": {"n_groups": 3}}},
            r"^mixer_options\.mamba2\.n_groups: expected a divisor of num_heads = 2, got 3$",
        ),
        (
            {"mixers": ["mamba2"], "mamba_state_size": 0},
            r"^mixer_options\.mamba2\.state_size: expected an integer >= 1, got 0$",
        ),
        ({"mixer_options": {"gal": {}}}, r'^unknown mixer "gal"\. Did you mean "gla"\?'),
        (
            {"mixers": ["gla"], "mixer_options": {"gla": {"num_head": 3}}},
            r'^unknown option of gla "num_head"\. Did you mean "num_heads"\? Options of gla: ',
        ),
        ({"conv_kernel": 0}, r"an integer >= 1, got 0$"),
        ({"mlp": "gatd"}, r'"gated" or "standard" or "moe" or "none", got "gatd"$'),
        ({"canon_set": "AC", "mlp": "none"}, r'no sites C, D and M with mlp = "none", got "AC"$'),
        ({"canon_set": "D", "mlp": "moe"}, r'no site D with mlp = "moe": .*, got "D"$'),
        ({"mlp_bias": True, "mlp": "moe"}, r'False with mlp = "moe", got True$'),
        ({"num_experts": 8}, r'none with mlp = "gated", got 8$'),
        ({"router_loss_weight": 0.0, "mlp": "none"}, r'none with mlp = "none", got 0\.0$'),
        ({"alibi": "soft"}, r'"alibi" or "hard", got "soft"$'),
        ({"rope_heads": 3}, r"a multiple of 2 \(query heads per key head\) up to 4, got 3$"),
        ({"initializer": "zero"}, r'"normal" or "fan_in" or "truncated", got "zero"$'),
        ({"z_loss": "l2"}, r'"logsumexp" or "squared_nll", got "l2"$'),
        ({"hidden_act": "silo"}, r'^unknown hidden_act "silo"\. Did you mean "silu"\?'),
        ({"rope_parameters": LINEAR}, r"rope_type 'default' alone: .*'factor': 4.0"),
        ({"rope_scaling": LINEAR}, r"rope_type 'default' alone: .*'factor': 4.0"),
        ({"rope_parameters": {"full_attention": LINEAR}}, r"rope_type 'default' alone: "),
        ({"rope_parameters": 5}, r"an object such as .*, got 5$"),
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e6}},
            r"^rope_parameters\.rope_theta: expected rope_theta = 500000\.0, got 1000000\.0$",
        ),
        ({"rope_theta": 0.0}, r"a number > 0, got 0\.0$"),
        ({"rms_norm_eps": -1e-5}, r"a number >= 0, got -1e-05$"),
        ({"initializer_range": -0.02}, r"a number >= 0, got -0\.02$"),
        ({"max_position_embeddings": 0}, r"an integer >= 1, got 0$"),
        ({"canon_set": "A", "canon_sets": ["B", "C"]}, r'none with canon_sets, got "A"$'),
        (
            {"mixers": ["gla"], "mixer_options": {"gla": {"clamp_min": 0.5}}},
            r"^mixer_options\.gla\.clamp_min: expected a number <= 0, .*, got 0\.5$",
        ),
        ({"partial_rotary_factor": 0.5}, r"1, or rope_dim, .*, got 0\.5$"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            r"^rope_parameters\.partial_rotary_factor: expected 1, or rope_dim, .*, got 0\.5$",
        ),
        ({"attention_chunk_size": 4096}, r"no such setting: .*, got 4096$"),
        ({"mixers": ["mla"], "qk_norm": True}, r"^qk_norm: expected false with mla, .*, got True$"),
        ({"mixers": ["mla"], "rope_heads": 2}, r"^rope_heads: expected all heads with mla, .*, got 2$"),
        ({"sliding_window": 1}, r"an integer >= 2, got 1$"),
        ({"sliding_window": 8, "alibi": "hard"}, r"none with alibi, .*, got 8$"),
        ({"sliding_layers": [True, False]}, r"sliding_window and an attention layer"),
        ({"sliding_layers": [True] * 3, "sliding_window": 4}, r"one entry per layer \(2\)"),
        ({"sliding_layers": "x", "sliding_window": 4}, r"a list of true and false"),
        ({"attention_sink": True, "mixers": ["gdn"]}, r"an attention layer .*, got True$"),
        ({"final_logit_softcapping": 30.0}, r"no such setting"),
        ({"residual_multiplier": 0.2}, r"no such setting"),
        ({"kv_lora_rank": 512}, r"no such setting"),
        ({"n_layer": 12}, r"no such setting"),
        ({"use_bias": True}, r"no such setting"),
        ({"per_layer_config": {0: {"hidden_act": "relu"}}}, r"no such setting"),
        ({"attn_output_gate": True}, r"no such setting"),
        ({"first_k_dense_replace": 3}, r"no such setting"),
        ({"num_hidden_layer": 1}, r'^unknown setting "num_hidden_layer"\. Did you mean "num_hidden_layers"\?'),
        ({"qk_head_dim": 192}, r"no such setting"),
        (
            {"mimo_rank": 3, "mixers": ["mamba3"]},
            r"no such setting: it is an option of mamba3, in mixer_options, got 3$",
        ),
        ({"num_heads": 1, "mixers": ["gdn"]}, r"no such setting: it is an option of gdn, .*, in mixer_options, got 1$"),
        (
            {"negative_eigenvalues": False, "mixers": ["kda"]},
            r"no such setting: .* kda, .*, in mixer_options, got False$",
        ),
        ({"v_head_dim": 8, "mixers": ["mla"]}, r"no such setting: it is an option of mla, in mixer_options, got 8$"),
        ({"is_causal": False}, r"true"),
        ({"canon_sett": "A"}, r'^unknown setting "canon_sett"\. Did you mean "canon_set"'),
    ],
)
def test_a_bad_field_is_named_in_one_line(small_model, fields, message):
    message = message if message.startswith("^") else f"^{next(iter(fields))}: expected {message}"
    with pytest.raises(ValueError, match=message) as caught:
        small_model(**fields)
    assert "\n" not in str(caught.value)


def test_equal_configurations_are_normalised():
    assert CanonLMConfig(canon_set="DCAQKV").canon_set == "ABCD"
    assert CanonLMConfig(num_hidden_layers=2, canon_sets=["DA", ""]).canon_sets == ["AD", ""]
    same = CanonLMConfig(canon_set="AC:k3:nores"), CanonLMConfig(canon_set="CA", canon_kernel=3, canon_residual=False)
    assert same[0].to_dict() == same[1].to_dict()
    apart = CanonLMConfig(canon_set="A,C:k2", canon_kernel=3)
    assert (apart.canon_set, apart.canon_kernel) == ("A:k3,C:k2", 4)


def test_sites_replace_sites_in_whichever_field_they_are():
    by_layer = CanonLMConfig(num_hidden_layers=2, canon_sets=["A", "C"]).to_dict()
    for sites in ("BD", ""):
        assert CanonLMConfig.from_dict(by_layer, canon_set=sites).canon_texts == [sites, sites]
    plain = CanonLMConfig(num_hidden_layers=2, canon_set="BD").to_dict()
    assert CanonLMConfig.from_dict(plain, canon_sets=["A", "C"]).canon_texts == ["A", "C"]
    assert CanonLMConfig.from_dict(plain, canon_sets=None).canon_texts == ["BD", "BD"]


def test_only_mixtures_of_experts_have_fields_of_experts(tmp_path):
    """Other tools take a model with `num_experts` for one. Files of earlier versions have it in any case."""
    CanonLMConfig(mlp="moe", num_experts=4).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert {key: saved[key] for key in OF_EXPERTS} == {**OF_EXPERTS, "num_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps({**saved, **OF_EXPERTS, "mlp": "gated"}))
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert [getattr(loaded, key) for key in OF_EXPERTS] == [None] * 3
    loaded.save_pretrained(tmp_path)
    assert not OF_EXPERTS.keys() & json.loads((tmp_path / "config.json").read_text())


def test_settings_under_the_names_of_other_models(tmp_path):
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, "num_hidden_layers": 2}
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0}
    for kind in (LlamaConfig, MistralConfig):
        saved = kind(
            **sizes,
            num_key_value_heads=2,
            rope_parameters=rope,
            **({"sliding_window": None} if kind is MistralConfig else {}),
        )
        saved = {key: value for key, value in saved.to_dict().items() if key != "model_type"}
        assert CanonLMConfig(**saved).rope_theta == 5e5
    off = {
        "sliding_window": None,
        "residual_multiplier": 1.0,
        "use_bias": False,
        "rope_scaling": None,
        "is_causal": True,
    }
    notes = {"unsloth_version": "1", "tokenizer_class": "X", "quantization_config": {}, "experts_implementation": None}
    assert CanonLMConfig(**sizes, **off, **notes).unsloth_version == "1"
    # Set afterwards, or given to the library's loaders:
    config = CanonLMConfig(**sizes)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path, rope_theta=5.0, use_cache=False).rope_theta == 5.0
    for wrong in ({"rope_scaling": LINEAR}, {"canon_set": "X"}, {"attention_chunk_size": 5}):
        with pytest.raises(ValueError, match=rf"^{next(iter(wrong))}: expected"):
            AutoConfig.from_pretrained(tmp_path, **wrong)
    config.rope_scaling = LINEAR
    with pytest.raises(ValueError, match=r"^rope_parameters: expected"):
        AutoModelForCausalLM.from_config(config)


# Initial weights


def fresh(**config):
    sizes = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    return CanonLMForCausalLM(CanonLMConfig(**{**sizes, "canon_set": "ABCD", "canon_bias": True, **config}))


def test_initial_weights_depend_on_seed_and_name_alone():
    torch.manual_seed(1)
    model = fresh()
    torch.manual_seed(2)
    assert_same(state(fresh()), state(model))
    # With another depth or other sites, common parameters start the same.
    other = state(fresh(num_hidden_layers=3, canon_set="AD", canon_bias=False))
    shared = other.keys() & state(model).keys()
    assert len(shared) > 20
    assert_same({name: other[name] for name in shared}, {name: state(model)[name] for name in shared})
    changed = state(fresh(init_seed=1))
    assert all((changed[name] != value).any() for name, value in state(model).items() if "norm" not in name)


@pytest.mark.parametrize("wrapped", ["_orig_mod.model.layers.0.", "model.layers.0._checkpoint_wrapped_module."])
def test_wrappers_do_not_change_the_draw(wrapped):
    draws = [torch.rand(3, generator=generator_for(0, name + "x.weight")) for name in (wrapped, "model.layers.0.")]
    assert torch.equal(*draws)


def test_derive_heads_by_its_old_name():
    options = KeyValueOptions(value_head_dim=5)
    with pytest.warns(FutureWarning, match=r"use self.derive_heads\(config"):
        derive_heads(options, CanonLMConfig(hidden_size=64, num_attention_heads=8), key_head_dim=1, value_head_dim=1)
    assert options == KeyValueOptions(num_heads=4, key_head_dim=16, value_head_dim=5)
