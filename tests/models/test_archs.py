"""Architecture names, each against the configuration fields it stands for."""

import pytest

from canonlm.models.archs import resolve


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("llama-nope", {"rope_dim": 0}),
        ("llama+canon", {"canon_set": "ABCD"}),
        ("llama+canon=A", {"canon_set": "A"}),
        ("llama+canon=DCA", {"canon_set": "ACD"}),
        ("llama+canon=AAC", {"canon_set": "AC"}),
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
    ],
)
def test_names(name, fields):
    assert resolve(name, hidden_size=512, num_heads=8) == fields


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
        ("llama+canon=AX", '+canon: expected letters out of A, B, C, D, such as +canon=AC, got "AX"'),
        ("llama+canon=b", '+canon: expected letters out of A, B, C, D, such as +canon=AC, got "b"'),
        ("llama+canon=", '+canon: expected letters out of A, B, C, D, such as +canon=AC, got ""'),
        ("llama+rope", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=x", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=0.3", "+rope: expected a share from 0 to 1 of each head"),  # 4.8 of 16 channels
        ("llama+rope=0.0625", "+rope: expected a share from 0 to 1 of each head"),  # one channel
        ("llama+rope=1.5", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=-0.5", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=nan", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+rope=inf", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+qknorm=1", '+qknorm: expected no value, got "1"'),
        ("llama+rope=0.3x0.5", "+rope: expected a share of the 8 heads before the x, such as +rope=0.5x0.5"),
        ("llama+rope=0x0.5", "+rope: expected a share of the 8 heads before the x"),
        ("llama+rope=0.5x", "+rope: expected a share from 0 to 1 of each head"),
        ("llama+alibi=soft", '+alibi: expected no value or +alibi=hard, got "soft"'),
        ("llama+mlp", "+mlp: expected +mlp=standard or +mlp=moe or +mlp=none, got None"),
        ("llama-conv", 'unknown architecture "llama-conv". Did you mean'),
        ("gdn2.llama.llama-nope", 'arch: expected one kind of attention in all layers, got "gdn2.llama.llama-nope"'),
        ("gdn2.", 'unknown architecture "". Architectures: '),
    ],
)
def test_mistakes(name, message):
    with pytest.raises(ValueError) as caught:
        resolve(name, hidden_size=128, num_heads=8)
    assert str(caught.value).startswith(message)
