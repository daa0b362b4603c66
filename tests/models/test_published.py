"""Published formats without weights (those are in test_golden.py): names and shapes of all 64 checkpoints, round trips,
and refusals."""

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.other_names import FLAT_OPTIONS
from canonlm.models.published import build, export, to_llama
from canonlm.models.published.checkpoint import parse
from canonlm.models.published.format import ratio

FULL_SIZE = json.loads((Path(__file__).parents[1] / "golden" / "full_size.json").read_text())


def digest(shapes):
    lines = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def one_of_each():
    """All 25 models; the 64 checkpoints repeat them with other learning rates. Further ones of a mixer are slow."""
    collected, seen = [], set()
    for name in {json.dumps(recipe["args"]): name for name, recipe in FULL_SIZE["recipes"].items()}.values():
        kind = re.sub("Canon|conv", "", name.split("-")[0])
        collected.append(pytest.param(name, marks=() if kind not in seen else pytest.mark.slow))
        seen.add(kind)
    return collected


@pytest.mark.parametrize("name", one_of_each())
def test_keys_and_shapes_of_the_published_checkpoints(name):
    args = FULL_SIZE["recipes"][name]["args"]
    published = FULL_SIZE["groups"][FULL_SIZE["recipes"][name]["group"]]
    with torch.device("meta"):
        model = CanonLMForCausalLM(parse(args).config())
    for lingua, params in ((True, args), (False, parse(args).release().dump())):
        params, state = export(model, lingua=lingua, **params)
        assert len(state) == published["tensors"]
        assert digest({name: tensor.shape for name, tensor in state.items()}) == published["lingua" if lingua else "hf"]
        again = build(params, state)
        assert sum(parameter.numel() for parameter in again.parameters()) == published["parameters"]


EITHER, SMALL = st.booleans(), st.integers(1, 9)


def family(mixer, sites, **fields):
    """Our configurations, as unusual as a format allows."""
    common = {
        "mixers": st.just([mixer]),
        "canon_set": st.sets(st.sampled_from(sites)).map("".join),
        "num_hidden_layers": st.integers(1, 2),
        "intermediate_size": SMALL,
        "canon_kernel": SMALL,
        "canon_residual": EITHER,
        "canon_activation": EITHER,
        "tie_word_embeddings": EITHER,
    }
    return st.fixed_dictionaries({**common, **fields})


LLAMA = {
    "num_key_value_heads": st.sampled_from([1, 7]),
    "head_dim": st.sampled_from([6, 7]),
    "rope_dim": st.sampled_from([2, 4, 6]),
    "rope_theta": st.just(500.0),
    "qk_norm": EITHER,
}
STATE = {"linear_num_heads": st.just(7), "linear_value_head_dim": SMALL, "conv_kernel": SMALL}
KEYS = {"linear_key_head_dim": SMALL, "output_gate": EITHER, "output_gate_rank": st.sampled_from([None, 1, 16])}
GLA = {"linear_num_key_value_heads": st.sampled_from([1, 7]), "clamp_min": st.sampled_from([None, -0.1])}
TRAINING = {"initializer": st.just("truncated"), "init_base_std": st.just(0.5), "init_std_factor": st.just("dim_ratio")}

RELEASE = st.one_of(
    family("attention", "ABCD", **LLAMA, attention_bias=EITHER, mlp_bias=EITHER, hidden_act=st.just("gelu")),
    family("gla", "AbCD", **STATE, **KEYS, **GLA, zeyuan_layernorm=EITHER),
    family("gdn", "AbBCD", **STATE, **KEYS, zeyuan_layernorm=EITHER),
    family("mamba2", "AbBCD", **STATE, mamba_state_size=SMALL),
    family("mamba2", "AbB", **STATE, mamba_state_size=SMALL, mlp=st.just("none")),
)
LINGUA = st.one_of(
    family("attention", "ABCD", **LLAMA, **TRAINING, z_loss=st.sampled_from([None, "squared_nll"])),
    family("gla", "AbCD", linear_num_heads=st.just(7), zeyuan_layernorm=EITHER),
    family("gdn", "AbBCD", linear_num_heads=st.just(7), zeyuan_layernorm=EITHER),
    family("mamba2", "AbBCD", linear_num_heads=st.just(7), mamba_state_size=st.sampled_from([64, 256])),
)


@pytest.mark.slow
@given(st.tuples(st.just(False), RELEASE) | st.tuples(st.just(True), LINGUA))
@settings(max_examples=100)
def test_export_and_import_give_the_same_model(drawn):
    lingua, fields = drawn
    sizes = {"vocab_size": 7, "hidden_size": 49, "num_attention_heads": 7, "rope_dim": 0}
    config = CanonLMConfig(**{**sizes, **fields})
    model = CanonLMForCausalLM(config)
    params, state = export(model, lingua=lingua)
    again = build(json.loads(json.dumps(params)), state)
    assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)
    for key in fields.keys() - FLAT_OPTIONS.keys():
        assert getattr(again.config, key) == getattr(config, key), key
    assert again.config.mixer_options == config.mixer_options


def test_expansion_factors_survive_the_release_rounding_down():
    """The release reads 49 * (1 / 49) as 0."""
    sizes = [(width, base) for base in range(1, 200) for width in range(1, 2 * base)]
    assert int(49 * (1 / 49)) == 0
    assert all(int(base * ratio(width, base)) == width for width, base in sizes)


FIELDS = {
    "LlamaCanon": {"rope_version": "lingua"},
    "GLACanon": {"expand_k": 1, "expand_v": 2, "use_short_conv": True, "output_gate_rank": 16},
    "GatedDeltaNetCanon": {"head_dim": 8, "expand_v": 2, "use_short_conv": True, "output_gate_rank": 16},
    "Mamba2Canon": {"head_dim": 16, "state_size": 16, "use_conv_bias": True},
}


def published(kind):
    if kind == "lingua":
        return {"vocab_size": 7, "dim": 32, "n_layers": 1, "n_heads": 4}
    heads = "num_attention_heads" if kind == "LlamaCanon" else "num_heads"
    sizes = {"model_type": kind, "vocab_size": 7, "hidden_size": 32, "num_hidden_layers": 1, heads: 4}
    return {**sizes, **FIELDS[kind]}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("LlamaCanon", {"model_type": "LamaCanon"}, r'^unknown model_type "LamaCanon"\. Did you mean "LlamaCanon"\?'),
        (
            "LlamaCanon",
            {"smell": 2, "hiden_size": 1},
            r'^params: unknown hiden_size \(did you mean "hidden_size"\?\), smell$',
        ),
        ("LlamaCanon", {"canon_bias": True}, r"^params\.canon_bias: expected False, got True$"),
        ("LlamaCanon", {"rope_scaling": {"factor": 2}}, r"^params\.rope_scaling: expected None, got {'factor': 2}$"),
        ("LlamaCanon", {"rope_version": "other"}, r"^params\.rope_version: expected 'lingua' or 'huggingface', got"),
        ("LlamaCanon", {"partial_rotary_factor": 0.5}, r"^params\.partial_rotary_factor: expected rope_dim to go with"),
        ("LlamaCanon", {"rope_dim": 12}, r"^rope_dim: expected an even number from 0 .* 8, got 12$"),
        ("LlamaCanon", {"hidden_size": "32"}, r'^params\.hidden_size: expected an integer > 0, got "32"$'),
        ("LlamaCanon", {"canon_set": "AX"}, r"^canon_set: expected letters out of"),
        ("LlamaCanon", {"canon_set": "AK"}, r"^params\.canon_set: expected no site K"),
        ("GLACanon", {"feature_map": "relu"}, r'^params\.feature_map: expected None, got "relu"$'),
        ("GLACanon", {"use_gv": True}, r"^params\.use_gv: expected False, got True$"),
        ("GLACanon", {"attn": {"layers": [0]}}, r"^params\.attn: expected None"),
        ("GLACanon", {"canon_set": "ABb"}, r"^params\.canon_set: expected no site B"),
        ("GLACanon", {"num_heads": 5}, r"^params\.num_heads: expected a divisor of 32, .*, got 5$"),
        ("GLACanon", {"expand_k": None}, r"^params\.expand_k: expected"),
        ("GatedDeltaNetCanon", {"num_heads": ...}, r"^params\.num_heads: missing; expected an integer > 0$"),
        ("GatedDeltaNetCanon", {"hidden_act": "gelu"}, r"^params\.hidden_act: expected 'swish' or 'silu', got"),
        ("GatedDeltaNetCanon", {"num_v_heads": 8}, r'^params: unknown num_v_heads \(did you mean "num_heads"\?\)$'),
        ("Mamba2Canon", {"n_groups": 2}, r"^params\.n_groups: expected 1, got 2$"),
        ("Mamba2Canon", {"head_dim": 8}, r"^params\.head_dim: expected expand \* hidden_size / num_heads = 16, got 8$"),
        ("Mamba2Canon", {"use_conv_bias": False}, r"^params\.use_conv_bias: expected True with noconv1d = False, got"),
        ("Mamba2Canon", {"mlp_type": "mlp9"}, r"^params\.mlp_type: expected 'mlp10', got"),
        ("Mamba2Canon", {"time_step_limit": [0.0, 1.0]}, r"^params\.time_step_limit: expected \[0\.0, Infinity\], got"),
        ("lingua", {"model_name": "GLA"}, r'^unknown model_name "GLA"\. Did you mean "GLA5"\?'),
        ("lingua", {"sliding_window": 256}, r"^params\.sliding_window: expected None, got 256$"),
        ("lingua", {"n_heads": ...}, r"^params\.n_heads: expected an integer > 0, got None$"),
        ("lingua", {"vocab_size": -1}, r"^params\.vocab_size: expected an integer > 0, got -1$"),
        ("lingua", {"model_name": "Mamba2", "mamba_ssm": 16}, r"^params\.mamba_ssm: expected 64, 128 or 256, got 16$"),
        ("lingua", {"model_name": "GLA5", "canon_set": "AB"}, r"^params\.canon_set: expected no site B"),
        ("lingua", {"init_std_factor": "deep"}, r"^init_std_factor: expected"),
    ],
)
def test_what_we_cannot_compute_is_refused_by_name(kind, changes, message):
    params = {key: value for key, value in {**published(kind), **changes}.items() if value is not ...}
    parse(published(kind)).config()  # valid without the changes
    with pytest.raises(ValueError, match=message):
        parse(params).config()


@pytest.mark.parametrize(
    ("args", "width"),
    [
        ({"dim": 2048}, 5632),
        ({"dim": 4096, "ffn_dim_multiplier": 1.3, "multiple_of": 1024}, 14336),  # as in Meta's Llama 3 8B
        ({"dim": 4096, "ffn_dim_multiplier": 1.3, "hidden_dim": 100}, 100),
        ({"dim": 96, "model_name": "GLA5"}, 192),
        ({"dim": 96, "model_name": "Mamba2", "mlp_type": "mlp10", "ffn_dim_multiplier": 3.0}, 192),
    ],
)
def test_width_of_the_mlp_in_training_arguments(args, width):
    assert parse({"vocab_size": 7, "n_layers": 1, "n_heads": 8, **args}).config().intermediate_size == width


def test_training_arguments_may_be_among_other_sections():
    args = {**published("lingua"), "z_loss": True, "init_std_factor": "current_depth"}
    config = parse({"name": "a run", "model": args, "data": {"batch_size": 8}}).config()
    assert (config.z_loss, config.z_loss_weight) == ("squared_nll", 1e-4)
    assert (config.initializer, config.init_std_factor) == ("truncated", "current_depth")
    assert parse({**args, "n_heads": None, "head_dim": 8}).config().num_attention_heads == 4


@pytest.fixture
def tied(small_model):
    model = small_model(torch.float32, canon_set="BD", tie_word_embeddings=True)
    return model, *export(model, rope_version="lingua")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": None}, r"^state: missing model\.norm\.weight$"),
        (
            {"extra": torch.zeros(1), "model.norm.weight": torch.zeros(7)},
            r"^state: unknown extra; model\.norm\.weight is \(7,\), not \(32,\)$",
        ),
        (
            {"model.embed_tokens.weight": torch.zeros(97, 32)},
            r"^state: model\.embed_tokens\.weight is \(97, 32\), not \(61, 32\); lm_head\.weight differs from",
        ),
        ({"lm_head.weight": torch.zeros(61, 32)}, r"lm_head\.weight differs from .*, although tied$"),
    ],
)
def test_damaged_tensors_are_refused_with_a_list(tied, changes, message):
    _, params, state = tied
    state = {name: tensor for name, tensor in {**state, **changes}.items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        build(params, state)


def test_tensors_of_another_configuration_are_refused_with_a_list(tied):
    _, params, state = tied
    message = r"^state: unknown model\.layers\.0\.self_attn\.canonB\.weight; unknown .*1.*canonB\.weight$"
    with pytest.raises(ValueError, match=message):
        build({**params, "canon_set": "D"}, state)
    del state["lm_head.weight"]
    with pytest.raises(ValueError, match=r"^state: missing lm_head\.weight$"):
        build({**params, "tie_word_embeddings": False}, state)


@pytest.mark.parametrize("given", ["twice", "once"])
def test_a_tied_head_may_be_given_twice_and_stays_tied(tied, given):
    original, params, state = tied
    if given == "once":
        del state["lm_head.weight"]
    model = build(params, state)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_close(model.state_dict(), original.state_dict(), atol=0, rtol=0)


def test_dtype_and_independence(tied):
    _, params, state = tied
    model = build(params, state, torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    before = state["model.norm.weight"].clone()
    build(params, state).model.norm.weight.data.fill_(7)
    assert torch.equal(state["model.norm.weight"], before)


def test_the_zero_taps_of_mamba2_without_convolution(small_model):
    """They are stored but never read: with any values the model is the same, and they are exported as zeros."""
    model = small_model(torch.float32, mixers=["mamba2"], canon_set="A", num_key_value_heads=None)
    params, state = export(model)
    taps = [name for name in state if "conv1d" in name]
    assert len(taps) == 2
    assert not any(state[name].any() for name in taps)
    again = build(params, {**state, **{name: torch.ones_like(state[name]) for name in taps}})
    assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_mamba2_without_mlp_has_no_sites_c_and_d():
    assert parse({**published("Mamba2Canon"), "canon_set": "AbCD"}).config().canon_set == "Ab"
    assert parse({**published("Mamba2Canon"), "canon_set": "AbCD", "mlp_type": "mlp10"}).config().canon_set == "AbCD"


CANNOT = [
    ({"rope_dim": 0}, r"^params\.rope_dim: expected .*, got 0$"),
    ({"alibi": "hard", "rope_dim": 8}, r'alibi: expected None, got "hard"'),
    ({"rope_heads": 2}, r"rope_heads: expected 4, got 2"),
    ({"mlp": "standard"}, r'mlp: expected "gated", got "standard"'),
    ({"canon_sets": ["A", "AB"]}, r"""canon_set: expected "A", got \['A', 'AB'\]"""),
    ({"canon_set": "AM"}, r"^params\.canon_set: expected no site M, which this class of the release does not have"),
    ({"canon_bias": True, "canon_set": "A"}, r"canon_bias: expected False, got True"),
    ({"mixers": ["gdn", "attention"]}, r"^mixers: expected one of attention, .* in all layers"),
    ({"mixers": ["retention"]}, r"^mixers: expected one of attention, .* in all layers"),
]


@pytest.mark.parametrize("lingua", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *CANNOT,
        ({"mixers": ["gla"], "hidden_act": "relu2"}, r'hidden_act: expected "silu", got "relu2"'),
        ({"mixers": ["gdn"], "mlp": "none"}, r'mlp: expected "gated", got "none"'),
        ({"mixers": ["mamba2"], "mamba_n_groups": 2, "mamba_state_size": 64}, r"n_groups: expected 1, got 2"),
    ],
)
def test_an_export_refuses_what_its_format_cannot_express(small_model, fields, message, lingua):
    with pytest.raises(ValueError, match=message):
        export(small_model(torch.float32, **fields), lingua=lingua)


def test_an_export_refuses_options_that_contradict_the_model(small_model):
    model = small_model(torch.float32, canon_set="A")
    with pytest.raises(ValueError, match=r"^LlamaCanon: canon_kernel: expected 3, got 4; rms_norm_eps: expected 0\.1"):
        export(model, canon_kernel=3, rms_norm_eps=0.1)


@pytest.mark.parametrize("tie", [False, True])
def test_a_plain_model_is_a_transformers_llama(small_model, tie):
    model = small_model(
        torch.float32, tie_word_embeddings=tie, rope_theta=500.0, attention_bias=True, hidden_act="gelu"
    )
    llama = to_llama(model)
    input_ids = torch.arange(40)[None]
    assert_close(llama(input_ids).logits, model(input_ids).logits, atol=1e-5, rtol=0)
    assert (llama.lm_head.weight is llama.model.embed_tokens.weight) == tie
    llama.model.norm.weight.data.fill_(7)
    assert not (model.model.norm.weight == 7).any()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"canon_set": "AB", "qk_norm": True}, r'canon_set: expected "", got "AB"; qk_norm: expected False, got True$'),
        ({"rope_dim": 4}, r"rope_dim: expected 8, got 4$"),
        ({"mixers": ["gla"]}, r'mixers: expected "attention", got "gla"$'),
        ({"alibi": "alibi"}, r'^plain Llama: alibi: expected None, got "alibi"'),
        (
            {"attention_gate": True, "sliding_window": 4},
            r"attention_gate: .* got True; sliding_window: expected None, got 4$",
        ),
        ({"attention_residuals": True}, r"^plain Llama: attention_residuals: expected False, got True$"),
        ({"attention_sink": True}, r"^plain Llama: attention_sink: expected False, got True$"),
    ],
)
def test_reasons_why_a_model_is_not_a_plain_llama(small_model, fields, message):
    with pytest.raises(ValueError, match=message):
        to_llama(small_model(torch.float32, **fields))
