"""Architecture names, each against the configuration fields it stands for."""

import re
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.canon.sites import SITES as OF_THE_TABLE
from canonlm.canon.sites import slots
from canonlm.models.build import complete_name
from canonlm.models.decoder import config_of, fields_of
from canonlm.models.fields import FIELDS, reads
from canonlm.models.interface import SMALL
from canonlm.models.mixers import MIXERS
from canonlm.models.names import name_of, resolve, split_names


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama-nope", {"rope_dim": 0}),
        ("llama+canon", {"canon_set": "ABCD"}),
        ("llama+canon=A", {"canon_set": "A"}),
        ("llama+canon=DCA", {"canon_set": "ACD"}),
        ("llama+canon=QKVC", {"canon_set": "BC"}),
        ("llama+canon=KVOM:scaled", {"canon_set": "KVOM:scaled"}),
        ("llama+canon=D:k3,A:zero+qknorm", {"canon_set": "A:zero,D:k3", "qk_norm": True}),
        ("gdn2.llama+canon=E:smear,A", {"mixers": ["gdn", "attention"], "canon_sets": ["E:smear,Ab", "E:smear,A"]}),
        ("llama-nope+canon", {"rope_dim": 0, "canon_set": "ABCD"}),
        ("llama+rope=0.25", {"rope_dim": 16}),
        ("llama+rope=1", {"rope_dim": 64}),
        ("llama+rope=0", {"rope_dim": 0}),
        ("llama-nope+rope=0.5", {"rope_dim": 32}),
        ("llama+qknorm", {"qk_norm": True}),
        ("llama+qknorm+rope=0.5+canon=BD", {"qk_norm": True, "rope_dim": 32, "canon_set": "BD"}),
        ("llama+rope=0.5x0.5", {"rope_dim": 32, "rope_heads": 4}),
        ("llama+rope=0.25x1", {"rope_dim": 64, "rope_heads": 2}),
        ("llama+alibi", {"alibi": "alibi"}),
        ("llama+alibi=hard+canon=A", {"alibi": "hard", "canon_set": "A"}),
        ("llama+attnres", {"attention_residuals": True}),
        ("mamba2-conv{head_dim=16}", {"mixers": ["mamba2"], "mixer_options": {"mamba2": {"head_dim": 16}}}),
        ("gdn2.llama{head_dim=16}", {"mixers": ["gdn", "attention"], "head_dim": 16, "canon_sets": ["b", ""]}),
        ("llama{head_dim=32}+rope=0.5", {"head_dim": 32, "rope_dim": 16}),
        (
            "mamba2-conv{head_dim=16}.llama+rope=0.5",
            {"mixers": ["mamba2", "attention"], "mixer_options": {"mamba2": {"head_dim": 16}}, "rope_dim": 32},
        ),
        ("llama+gate+sink", {"attention_gate": True, "attention_sink": True}),
        ("gdn2-conv.llama+window=512", {"mixers": ["gdn", "attention"], "sliding_window": 512}),
        (
            "llama{sliding_window=8}.gdn2-conv.llama",
            {"mixers": ["attention", "gdn", "attention"], "sliding_window": 8, "sliding_layers": [True, False, False]},
        ),
        ("gdn2-conv.llama{sliding_window=8}", {"mixers": ["gdn", "attention"], "sliding_window": 8}),
        ("llama+mlp=standard+relu2", {"mlp": "standard", "hidden_act": "relu2"}),
        ("llama+mlp=moe+canon", {"mlp": "moe", "canon_set": "ABC"}),
        ("llama+canon+frozen", {"canon_set": "ABCD", "canon_frozen": True}),
        ("gla5", {"mixers": ["gla"], "canon_set": "b"}),
        ("gla5-conv", {"mixers": ["gla"]}),
        ("gla5+canon", {"mixers": ["gla"], "canon_set": "AbCD"}),
        ("gla5-conv+canon", {"mixers": ["gla"], "canon_set": "ACD"}),
        ("gdn2+canon=B", {"mixers": ["gdn"], "canon_set": "bB"}),
        ("mamba2+mlp=none+canon", {"mixers": ["mamba2"], "mlp": "none", "canon_set": "Ab"}),
        ("gdn2.gdn2.llama", {"mixers": ["gdn", "gdn", "attention"], "canon_sets": ["b", "b", ""]}),
        (
            "gdn2.llama-nope+canon",
            {"mixers": ["gdn", "attention"], "rope_dim": 0, "canon_sets": ["AbCD", "ABCD"]},
        ),
        ("gla5-conv.gdn2-conv", {"mixers": ["gla", "gdn"]}),
        ("llama+canon:nores:k3", {"canon_set": "ABCD:k3:nores"}),
        ("llama+canon=AC:silu:bias", {"canon_set": "AC:silu:bias"}),
        ("llama{canon_kernel=3}+canon=A:k4,C", {"canon_kernel": 3, "canon_set": "A:k4,C"}),
        ("llama{rope_theta=1e6}", {"rope_theta": 1e6}),
        ("gla5{num_heads=2}", {"mixers": ["gla"], "mixer_options": {"gla": {"num_heads": 2}}, "canon_set": "b"}),
    ],
)
def test_names(name, fields):
    assert resolve(name, hidden_size=512, num_heads=8) == fields


def test_a_site_keeps_its_variant_beside_a_field_for_all():
    sizes = replace(SMALL, fields={"canon_kernel": 3})
    assert config_of("llama+canon=A:k4,C", sizes, 0).arch == "llama+canon=A,C:k3"
    assert config_of("llama+canon", sizes, 0).arch == "llama+canon:k3"


def test_fields_beside_a_name_keep_the_variants_of_sites():
    """No name has the short convolution of mamba3, so that the sites are in braces, layer by layer."""
    config = CanonLMConfig(mixers=["mamba3"], num_hidden_layers=2, canon_set="b,B:k3:nores")
    name = name_of(config)
    again = config_of(name, fields_of(config, name), 0)
    assert [again.canons(i) for i in range(2)] == [config.canons(i) for i in range(2)]


def test_resolving_does_not_change_the_table():
    resolve("llama-nope+rope=1+canon", hidden_size=512, num_heads=8)
    assert resolve("llama-nope", hidden_size=512, num_heads=8) == {"rope_dim": 0}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", 'unknown architecture "lama". Did you mean "llama"? Architectures: '),
        ("", 'unknown architecture "". Architectures: '),
        ("llama+cannon", 'unknown architecture modifier "+cannon". Did you mean "+canon"? Architecture modifiers:'),
        ("llama+", 'unknown architecture modifier "+".'),
        ("llama+canon+canon=A", 'arch: expected +canon at most once, got "llama+canon+canon=A"'),
        ("llama+canon=AX", "+canon: expected letters out of E, A, b, B, Q, K, V, O, C, D, M"),
        ("llama+canon=AAC", '+canon: expected A once, got "AAC"'),
        ("llama+canon=b", '+canon: expected sites such as +canon=AC (not b, which NAME-conv leaves out), got "b"'),
        ("llama+canon=", '+canon: expected sites such as +canon=AC (not b, which NAME-conv leaves out), got ""'),
        ("llama+rope", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=x", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=0.3", "+rope: expected a share from 0 to 1 of each head"),  # 4.8 of 16 channels
        ("llama+rope=0.0625", "+rope: expected a share from 0 to 1 of each head"),  # one channel
        ("llama+rope=1.5", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=-0.5", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=nan", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=inf", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+qknorm=1", '+qknorm: expected no value, got "1"'),
        ("kda+rope", 'arch: expected an attention layer for +rope, as in llama or kda.llama, got "kda+rope"'),
        ("gdn2.mamba2+alibi", "arch: expected an attention layer for +alibi, as in llama or gdn2.llama"),
        ("llama+rope=0.3x0.5", "+rope: expected a share of the 8 heads before the x, such as +rope=0.5x0.5"),
        ("llama+rope=0x0.5", "+rope: expected a share of the 8 heads before the x"),
        ("llama+rope=0.5x", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+alibi=soft", '+alibi: expected no value or +alibi=hard, got "soft"'),
        ("gla5+sink", 'arch: expected an attention layer for +sink, as in llama or gla5.llama, got "gla5+sink"'),
        ("mamba3+rope=0.5", "arch: expected an attention layer for +rope, as in llama or mamba3.llama"),
        ("mamba2+window=512", "arch: expected an attention layer for +window, as in llama or mamba2.llama"),
        ("llama+gate=2", '+gate: expected no value, got "2"'),
        *(
            (f"llama+window{value}", "+window: expected a number of tokens >= 2, such as +window=512, got ")
            for value in ("", "=0", "=1", "=-5", "=1e3", "=²")
        ),
        ("llama+mlp", "+mlp: expected +mlp=standard or +mlp=moe or +mlp=none, got None"),
        ("llama-conv", 'unknown architecture "llama-conv". Did you mean'),
        ("gdn2.llama.llama-nope", 'arch: expected one kind of attention in all layers, got "gdn2.llama.llama-nope"'),
        ("gdn2.", 'unknown architecture "". Architectures: '),
        ("llama+canon:nors", '+canon: unknown variant ":nors". Did you mean ":nores"?'),
        ("llama+canon:k0", '+canon: expected a kernel from :k1 to :k64, got "ABCD:k0"'),
        ("llama+canon:k3:k3", "+canon: expected one kernel, not also :k3"),
        ("llama+rope=0.5:nores", "+rope: expected a share from 0 to 1 of each head"),
        ("gla5{num_heads=2}-conv", "arch: expected +, . or one pair of braces after gla5, and -conv before them, got"),
        ("gla5-conv{num_heads=2", "arch: expected +, . or one pair of braces after gla5-conv, and -conv before them"),
        ("gla5{num_head=2}", 'unknown setting of gla5 "num_head". Did you mean "num_heads"?'),
        ("llama{hidden_size=2}", 'unknown setting of llama "hidden_size".'),
        ("llama{rope_theta}", 'arch: expected fields such as {num_heads=4,num_key_value_heads=2}, got "rope_theta"'),
        ("gla5{num_heads=2}.gla5", "arch: expected one kind of gla in all layers"),
        ("gla5.gla", "arch: expected one kind of gla in all layers"),
        ("llama{sliding_window=8}.llama{sliding_window=9}.llama", "arch: expected one window, as in llama{sliding_"),
        ("llama{sliding_window=8}.llama{sliding_window=9}", "arch: expected one window, as in llama{sliding_"),
        ("llama{sliding_window=8}.llama+window=8", "arch: expected one window, as in llama{sliding_"),
        ("llama{canon_set=A}+canon", "arch: expected either +canon or canon_set in braces"),
    ],
)
def test_mistakes(name, message):
    with pytest.raises(ValueError) as caught:
        resolve(name, hidden_size=128, num_heads=8)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arch", "fields", "lacks"),
    [
        *(
            (f"{base}{{{key}=4}}", {}, f"an attention layer to read {key}, as in llama or {base}.llama")
            for base, key in (("gdn2", "head_dim"), ("rwkv7", "head_dim"), ("mamba3", "num_key_value_heads"))
        ),
        ("gla5.gdn2{rope_theta=16}", {}, "an attention layer to read rope_theta, as in llama or gdn2.llama"),
        ("mla.gdn2{num_key_value_heads=2}", {}, "an attention layer to read num_key_value_heads, as in llama or gdn2"),
        ("gdn2", {"head_dim": 16}, "an attention layer to read head_dim, as in llama or gdn2.llama"),
        ("mla", {"num_key_value_heads": 2}, "an attention layer to read num_key_value_heads"),
        ("llama{conv_kernel=3}", {}, "a short convolution (site b) to read conv_kernel, as in gdn2"),
        ("gdn2-conv.llama{conv_kernel=3}", {}, "a short convolution (site b) to read conv_kernel, as in gdn2"),
        ("rwkv7", {"conv_kernel": 3}, "a short convolution (site b) to read conv_kernel, as in gdn2"),
        ("gdn2{canon_kernel=3}", {}, "Canon layers to read canon_kernel, as in gdn2+canon"),
        ("llama+frozen", {}, "Canon layers to read canon_frozen, as in llama+canon"),
        ("mamba2+mlp=none+relu2", {}, "an MLP to read hidden_act"),
        ("mamba2+mlp=none", {"mlp_bias": True}, "an MLP to read mlp_bias"),
        ("llama{head_dim=32}.mla{head_dim=16}", {}, "one value of head_dim"),
        ("llama{hidden_act=gelu}+relu2", {}, "one value of hidden_act"),
        ("llama{sliding_window=8,rope_dim=0}.llama", {}, "rope_dim in all layers of llama: it cannot differ"),
        ("llama", {"linear_num_heads": 2}, "a mixer with the option num_heads"),
        ("llama", {"mixer_options": {"gla": {"num_heads": 2}}}, "a layer of gla to read it"),
    ],
)
def test_settings_without_effect_are_refused(arch, fields, lacks):
    sizes = replace(SMALL, fields=fields)
    key = "".join(f"model.fields.{name}" for name in fields) or "arch"
    with pytest.raises(ValueError, match=f"^{re.escape(key)}(\\.gla)?: expected {re.escape(lacks)}") as refused:
        config_of(arch, sizes, 0)
    assert "\n" not in str(refused.value)
    # A saved run or configuration may have them, and has the name of what it computes.
    config = config_of(arch, sizes, 0, saved=True)
    assert config.arch == name_of(CanonLMConfig(**config.to_dict() | {"arch": arch}))
    assert config_of(config.arch, fields_of(config, config.arch), 0).arch == config.arch


@pytest.mark.parametrize(
    ("arch", "hidden_size", "fields", "new", "old"),
    [
        ("llama+canon", 1024, {}, 2752, 2730),
        ("gdn2.llama+canon", 2048, {}, 4096, 4096),
        ("llama+mlp=moe", 2048, {}, 5504, 5461),
        ("llama+mlp=standard", 1024, {}, 4096, 4096),
        ("llama", 1536, {}, 4096, 4096),
        ("llama", 1024, {"intermediate_size": 2000}, 2000, 2000),
        ("llama", 512, {}, 1365, 1365),
    ],
)
def test_an_older_run_keeps_its_width(arch, hidden_size, fields, new, old):
    """A run names the width where earlier versions had another default."""
    sizes = replace(SMALL, hidden_size=hidden_size, fields=fields)
    for saved, width in ((False, new), (True, old)):
        assert config_of(arch, sizes, 0, saved=saved).intermediate_size == width
        named = complete_name(arch, sizes, saved=saved)
        assert named == (name_of(config_of(arch, sizes, 0)), {"intermediate_size": width} if new != old else fields)
        assert config_of(named[0], replace(sizes, fields=named[1]), 0, saved=not saved).intermediate_size == width


@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        ("mla.llama{num_key_value_heads=2}", {}),
        ("rwkv7.gdn2{conv_kernel=3}", {"linear_num_heads": 2}),
        ("mamba3{canon_set=b,conv_kernel=3}", {}),
        ("gdn2+canon", {"canon_kernel": 3, "sliding_window": None}),
        ("llama", {"canon_set": "A", "canon_kernel": 3}),
    ],
)
def test_settings_that_some_layer_reads(arch, fields):
    """They change the configuration, or are None."""
    bare = re.sub(r",?(num_key_value_heads|conv_kernel)=\d", "", arch)
    changed, plain = (config_of(name, replace(SMALL, fields=own), 0) for name, own in ((arch, fields), (bare, {})))
    assert changed.to_dict() != plain.to_dict()


LETTERS = st.sets(st.sampled_from(slots({*OF_THE_TABLE} - {"E", "b"}))).map("".join)
GROUPS = [*("A:zero,D:k3", "KVOM:scaled", "A:k3:nores,C", "Q:k2,V", "K:offset,A", "AC:avg,O:smear")]
SITES = LETTERS | st.sampled_from(GROUPS)
GENERAL = {
    "canon_kernel": st.integers(1, 5),
    "canon_residual": st.booleans(),
    "canon_activation": st.booleans(),
    "canon_bias": st.booleans(),
    "canon_frozen": st.booleans(),
    "qk_norm": st.booleans(),
    "attention_gate": st.booleans(),
    "attention_residuals": st.booleans(),
    "attention_sink": st.booleans(),
    "head_dim": st.sampled_from([16, 24, 64]),
    "rope_dim": st.sampled_from([0, 2, 4, 8, 16]),
    "rope_heads": st.sampled_from([2, 4]),
    "rope_theta": st.sampled_from([10000.0, 5e5]),
    "num_key_value_heads": st.sampled_from([2, 4]),
    "alibi": st.sampled_from([None, "alibi", "hard"]),
    "mlp": st.sampled_from(["gated", "standard"]),
    "hidden_act": st.sampled_from(["silu", "relu2", "gelu"]),
    "tie_word_embeddings": st.booleans(),
    "z_loss": st.sampled_from([None, "squared_nll"]),
    "conv_kernel": st.integers(2, 4),
    "init_base_std": st.sampled_from([None, 0.02]),
}
OPTIONS = {
    "gla": {"num_heads": st.sampled_from([2, 4]), "clamp_min": st.sampled_from([None, -0.5])},
    "gdn": {"key_head_dim": st.sampled_from([8, 96]), "output_gate_rank": st.sampled_from([None, 4])},
    "mla": {"q_lora_rank": st.sampled_from([None, 8]), "v_head_dim": st.sampled_from([8, 16])},
    "kda": {"decay_rank": st.sampled_from([8, 32]), "negative_eigenvalues": st.booleans()},
    "deltaproduct": {"steps": st.integers(1, 3), "negative_eigenvalues": st.booleans()},
    "rwkv7": {
        "key_head_dim": st.sampled_from([8, 16]),
        "gate_rank": st.sampled_from([4, 32]),
        "value_residual": st.booleans(),
    },
    "mamba2": {"state_size": st.sampled_from([64, 128]), "n_groups": st.sampled_from([1, 2])},
    "mamba3": {"state_size": st.sampled_from([64, 128]), "mimo_rank": st.integers(1, 3)},
    "retention": {"output_gate": st.booleans()},
}


@st.composite
def configs(draw):
    mixers = draw(st.lists(st.sampled_from(sorted(MIXERS)), min_size=1, max_size=3))
    layers = len(mixers) * draw(st.integers(1, 2))
    embedding = draw(st.sampled_from(["", "E", "E:smear"]))
    sets = []
    for mixer in mixers:
        short_conv = "b" * (MIXERS[mixer].takes_short_conv and draw(st.booleans()))
        sets.append(",".join(filter(None, [embedding, draw(SITES if MIXERS[mixer].has_qkv else LETTERS), short_conv])))
    fields = {key: draw(values) for key, values in GENERAL.items() if draw(st.booleans())}
    if "mla" in mixers:
        fields = {key: value for key, value in fields.items() if key not in ("qk_norm", "rope_heads")}
    if not any(MIXERS[mixer].attends for mixer in mixers):
        fields = {key: value for key, value in fields.items() if not key.startswith("attention")}
    elif fields.get("alibi") is None and draw(st.booleans()):
        slide = draw(st.lists(st.booleans(), min_size=len(mixers), max_size=len(mixers)))
        if any(MIXERS[mixer].attends and each for mixer, each in zip(mixers, slide, strict=True)):
            fields |= {"sliding_window": 8, "sliding_layers": slide}
    if any(":" in sites for sites in sets):  # variants that exclude others
        fields = {key: value for key, value in fields.items() if not key.startswith("canon")}
    options = {mixer: {key: draw(values) for key, values in OPTIONS.get(mixer, {}).items()} for mixer in mixers}
    same = draw(st.booleans()) and len(set(sets)) == 1
    return CanonLMConfig(
        hidden_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        mixers=mixers,
        mixer_options=options if draw(st.booleans()) else None,
        **({"canon_set": sets[0]} if same else {"canon_sets": sets}),
        **fields,
    )


@given(config=configs())
@settings(max_examples=12)
def test_a_name_determines_everything_but_sizes(config):
    """Two configurations with one name and equal sizes are equal, field by field."""
    name = name_of(config)
    fields = resolve(name, hidden_size=64, num_heads=4)
    again = CanonLMConfig(hidden_size=64, num_hidden_layers=config.num_hidden_layers, num_attention_heads=4, **fields)
    layers = range(config.num_hidden_layers)
    assert [again.canons(i) for i in layers] == [config.canons(i) for i in layers]
    ignored = {"canon_set", "canon_sets", *(key for key in FIELDS if not reads(config, key))}
    different = {key: (getattr(config, key), getattr(again, key)) for key in FIELDS if key not in ignored
                 if getattr(config, key) != getattr(again, key)}  # fmt: skip
    assert not different, name
    assert name_of(again) == name
    assert split_names(f"{name},{name}") == [name, name]


OF_64 = replace(SMALL, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)


@pytest.mark.parametrize(
    "mixers", [["attention"], ["mla"], ["gdn", "attention"], ["mla", "attention"], ["mamba3", "mla"]]
)
@pytest.mark.parametrize(
    ("head_dim", "rope_dim"), [(24, 4), (24, 8), (24, 24), (64, None), (64, 0), (64, 4), (8, None)]
)
def test_a_name_has_the_head_dim_that_its_rope_is_a_share_of(mixers, head_dim, rope_dim):
    config = CanonLMConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        mixers=mixers,
        head_dim=head_dim,
        rope_dim=rope_dim,
    )
    again = config_of(name_of(config), OF_64, 0)
    assert {key: getattr(again, key) for key in FIELDS} == {key: getattr(config, key) for key in FIELDS}
    assert complete_name(again.arch, OF_64) == (again.arch, {})


@pytest.mark.parametrize(
    ("arch", "fields", "head_dim", "rope_dim", "named"),
    [
        ("llama{head_dim=32}+rope=0.5", {}, 32, 16, ("llama{head_dim=32}+rope=0.5", {})),
        ("mla{head_dim=32}", {}, 32, 16, ("mla{head_dim=32}", {})),
        ("llama{head_dim=32}+rope=0.5", {"head_dim": 64}, 64, 32, ("llama{head_dim=32}+rope=0.5", {"head_dim": 64})),
        ("llama+rope=0.5", {"head_dim": 64}, 64, 32, ("llama+rope=0.5", {"head_dim": 64})),
        ("llama", {"head_dim": 64, "rope_dim": 0}, 64, 0, ("llama-nope", {"head_dim": 64})),
        ("llama", {"head_dim": 64, "rope_dim": 8}, 64, 8, ("llama{head_dim=64}+rope=0.125", {})),
        ("llama{rope_dim=32}", {"head_dim": 64}, 64, 32, ("llama{head_dim=64}+rope=0.5", {})),
    ],
)
def test_rope_is_a_share_of_the_head_dim_of_braces_and_of_fields(arch, fields, head_dim, rope_dim, named):
    complete = complete_name(arch, replace(OF_64, fields=fields))
    assert complete == named
    for name, own in ((arch, fields), complete):
        config = config_of(name, replace(OF_64, fields=own), 0)
        assert (config.head_dim, config.rope_dim) == (head_dim, rope_dim)
    assert complete_name(named[0], replace(OF_64, fields=named[1])) == named


@pytest.mark.parametrize(
    "name",
    [
        *(
            "llama",
            "llama-nope",
            "llama+canon",
            "llama+canon=A",
            "llama+rope=0.25",
            "llama+rope=0.5x0.5",
            "llama+alibi",
        ),
        *("llama+canon=A+gate+sink+window=512", "llama{sliding_window=128}.llama+canon+sink", "gdn2.llama+sink"),
        *("llama{sliding_window=128}.gdn2-conv.mla", "mla{kv_lora_rank=64}.gla5+rope=0"),
        *("gla5", "gla5-conv+canon", "gla", "gdn+canon", "gdn-conv", "mamba2-4.1+canon", "gdn2.gdn2.llama"),
        *(
            "llama+canon=KVOM:scaled",
            "llama+canon=A:zero,D:k3",
            "gdn2.gdn2.llama+canon=E:smear,KV:k2",
            "llama+canon:id",
        ),
        *("llama{canon_sets=[A:k3;D,A]}", "mamba3+canon=ABCD", "mamba3.llama", "mamba3{canon_sets=[AbCD]}"),
        *("llama+canon:k3:nores", "llama+canon=AC:silu:frozen", "gla5{clamp_min=-0.5}+canon"),
        *("gdn2.llama{head_dim=16}", "gla5.mla.llama{num_key_value_heads=4}", "gdn2{rms_norm_eps=0.1}.llama"),
        *("gla5{num_heads=2}.llama", "llama{canon_sets=[A,ABCD]}", "llama{num_key_value_heads=2}+canon+qknorm"),
    ],
)
def test_the_shortest_name(name):
    fields = resolve(name, hidden_size=768, num_heads=12)
    sizes = {"hidden_size": 768, "num_hidden_layers": 6, "num_attention_heads": 12}
    assert name_of(CanonLMConfig(**sizes, **fields)) == name


@pytest.mark.parametrize(("hidden_size", "heads"), [(512, 8), (768, 12)])
def test_the_papers_own_linear_models(hidden_size, heads):
    """Part 4.1: numbers in a layer's state, and parameters of mixer and MLP, in units of d and d^2."""
    facts = {"gla": (64 if hidden_size == 512 else 96, 4, 8), "gdn": (144, 6, 6), "mamba2-4.1": (128, 6, 6)}
    for name, (state, mixer, mlp) in facts.items():
        fields = resolve(f"{name}-conv", hidden_size=hidden_size, num_heads=heads)
        config = CanonLMConfig(hidden_size=hidden_size, num_hidden_layers=1, num_attention_heads=heads, **fields)
        with torch.device("meta"):
            layer = CanonLMForCausalLM(config).model.layers[0]
        o = vars(config.options(0))
        width = o["head_dim"] * o["state_size"] if "state_size" in o else o["key_head_dim"] * o["value_head_dim"]
        assert o["num_heads"] * width == state * hidden_size
        sizes = [sum(p.numel() for p in part.parameters()) / hidden_size**2 for part in (layer.mixer, layer.mlp)]
        assert sizes == pytest.approx([mixer, mlp], rel=0.05)
