"""Bytes of state: formulas for our architectures, real caches for the library's, users' models, and one line each."""

import textwrap
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from canonlm.core.cache_name import CACHE_NAMES
from canonlm.models.build import build, wrap
from canonlm.models.interface import SMALL, Sizes
from canonlm.models.state import State

SIZES = Sizes(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=40, seq_len=1024)
TWO_LAYERS = replace(SIZES, num_hidden_layers=2)
TAPS = 4

# float32 numbers in a layer of width 64: (recurrence, channels of all convolutions, keys and values of a token)
OURS = {
    "llama": (0, 0, 2 * 64),
    "llama-nope+alibi": (0, 0, 2 * 64),
    "llama{num_key_value_heads=2}": (0, 0, 2 * 32),
    "llama+canon": (0, 64 + 3 * 64 + 64 + 2 * 170, 2 * 64),
    "llama{num_key_value_heads=1}+canon=AB": (0, 64 + 64 + 16 + 16, 2 * 16),
    "llama+canon=CO+mlp=standard": (0, 64 + 64, 2 * 64),
    "mla": (0, 0, 4 * 16 + 8),
    "mla{kv_lora_rank=20}+canon=B+rope=0": (0, 4 * 16 + 20, 20),
    "gla5": (2 * 32 * 64, 64 + 64 + 128, 0),
    "gla5-conv": (2 * 32 * 64, 0, 0),
    "gla5{num_heads=4}+canon=AC": (4 * 16 * 32, 64 + 64 + 64 + 64 + 128, 0),
    "gdn2": (2 * 32 * 64, 64 + 64 + 128, 0),
    "kda": (2 * 32 * 32, 3 * 64, 0),
    "delta-vec": (2 * 32 * 32, 3 * 64, 0),
    "deltaproduct2": (2 * 32 * 64, 64 + 2 * (64 + 128), 0),
    "rwkv7": (2 * 32 * 32, 64 // 2, 0),  # two of a token shift's inputs, not four
    "mamba3": (2 * (64 * 128 + 128 + 64 + 128 // 4), 0, 0),
    "mamba3{mimo_rank=3,num_angles=5}+canon=AB": (2 * (64 * 128 + 3 * (128 + 64) + 5), 2 * 128 + 64 + 2 * 384 + 11, 0),
    "mamba3{canon_set=b,state_size=16}": (2 * (64 * 16 + 16 + 64 + 4), 128 + 2 * 16, 0),
    "retention": (2 * 32 * 64, 64 + 64 + 128, 0),
    "gated-retention": (2 * 32 * 64, 64 + 64 + 128, 0),
    "gla": (4 * 8 * 16, 32 + 32 + 64, 0),
}
LIBRARY = (
    *("llama", "qwen3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "olmo3", "phi3", "mistral", "cohere2", "smollm3"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "mamba", "mamba2", "jamba", "lfm2", "falcon_mamba"),
    *("qwen3_next", "bamba", *(f"{name}{{sliding_window=8}}" for name in ("mistral", "gemma3_text", "gpt_oss"))),
)


def on_meta(arch, sizes=SIZES):
    with torch.device("meta"):
        return build(arch, sizes)


@pytest.mark.parametrize("arch", OURS)
def test_ours_by_the_formulas_of_the_docs(arch):
    recurrence, channels, per_token = (4 * TWO_LAYERS.num_hidden_layers * numbers for numbers in OURS[arch])
    model = on_meta(arch, TWO_LAYERS)
    for num_tokens in (1, 1000):
        state = model.state(num_tokens)
        assert state == State(num_tokens, recurrence + TAPS * channels + per_token * num_tokens, per_token)
        assert state.fixed == recurrence + TAPS * channels


@pytest.mark.parametrize(("num_tokens", "kept"), [(5, 5), (9, 9), (10, 9), (1000, 9)])
def test_a_window_keeps_all_tokens_but_the_next(num_tokens, kept):
    """In a window of 10 tokens, the next token is the tenth."""
    state, per_token = on_meta("llama+window=10").state(num_tokens), 4 * SIZES.num_hidden_layers * 2 * 64
    assert (state.total, state.per_token) == (per_token * kept, per_token if num_tokens < 10 else 0)


def test_a_window_in_every_second_layer():
    state, per_token = on_meta("llama{sliding_window=10}.llama").state(1000), 4 * SIZES.num_hidden_layers * 64
    assert state == State(1000, per_token * (9 + 1000), per_token)


@pytest.mark.parametrize(
    "arch", ["mamba2", "mamba2-4.1", "gdn", "llama+canon", "gdn2.llama+canon=AC", "llama+window=9+canon"]
)
def test_ours_is_the_cache_of_a_forward(arch):
    assert on_meta(arch, TWO_LAYERS).state(20).total == real(build(arch, TWO_LAYERS), 20)


@pytest.mark.parametrize("numbers", [(64,), pytest.param((1, 1000), marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", LIBRARY)
def test_a_model_of_the_library_on_the_meta_device_is_its_real_cache(model_type, numbers):
    counted, model = on_meta(f"hf:{model_type}"), build(f"hf:{model_type}", SIZES)
    for num_tokens in numbers:
        assert counted.state(num_tokens).total == real(model, num_tokens)


def real(model, num_tokens):
    """The bytes of what the layers of a cache of transformers hold."""
    with torch.no_grad():
        outputs = model.module.eval()(torch.ones(1, num_tokens, dtype=torch.long), use_cache=True)
    cache = next(outputs[name] for name in CACHE_NAMES if outputs.get(name) is not None)
    held = []
    for layer in cache.layers:
        states = [getattr(layer, name, {}).values() for name in ("conv_states", "recurrent_states")]
        held += [getattr(layer, "keys", None), getattr(layer, "values", None), *states[0], *states[1]]
    marks = 8 * num_tokens if model.arch.partition("{")[0] in ("mamba2", "mamba2-4.1", "gdn") else 0
    return sum(x.numel() * x.element_size() for x in held if isinstance(x, Tensor)) - marks


def test_full_windows_of_attention_are_fixed():
    """Keys and values of 4 heads of 16 numbers, of 7 earlier tokens in two of the four layers."""
    model = on_meta("hf:gemma2{sliding_window=8,head_dim=16}")
    grows, full = model.state(5), model.state(64)
    heads = model.module.config.num_key_value_heads
    layer = 2 * heads * 16 * 4
    assert grows == State(5, 5 * 4 * layer, 4 * layer)
    assert full == State(64, 2 * layer * 64 + 2 * layer * 7, 2 * layer)
    assert (grows.fixed, full.fixed) == (0, 2 * layer * 7)


def test_canon_layers_in_a_model_of_the_library():
    plain, canonized = (on_meta(f"hf:llama{canon}").state(64) for canon in ("", "+canon=AC"))
    assert canonized == State(64, plain.total + 4 * 4 * 2 * 64 * TAPS, plain.per_token)


def test_a_type_whose_code_reads_values_is_counted_on_the_cpu(monkeypatch):
    assert on_meta("hf:biogpt").state(9) == State(9, 9 * 2048, 2048)
    monkeypatch.setattr("canonlm.models.hf.MAX_COUNTED", 1000)
    assert on_meta("hf:biogpt").state(9) is None


def test_counting_changes_nothing():
    model = on_meta("hf:mixtral")
    model.module.train().model.norm.eval()
    modes = [part.training for part in model.module.modules()]
    experts = model.module.get_experts_implementation()
    model.state(9)
    assert [part.training for part in model.module.modules()] == modes
    assert model.module.get_experts_implementation() == experts
    half = wrap(build("llama", SIZES).module.bfloat16())
    assert half.state(10) == State(10, 10 * 4 * 2 * 64 * 2, 4 * 2 * 64 * 2)


def test_a_users_mixer_is_counted_and_a_users_net_has_no_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        textwrap.dedent("""
        from torch import nn
        from transformers import Cache
        from canonlm.models.mixers.gla import GatedLinearAttention

        class Mine(GatedLinearAttention):
            '''Another gated linear attention.'''

        class Raises(GatedLinearAttention):
            def forward(self, *args, **kwargs):
                if any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
                    raise RuntimeError("no cache")
                return super().forward(*args, **kwargs)

        class Net(nn.Module):
            def __init__(self, vocab_size, hidden_size):
                super().__init__()
                self.table, self.head = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, vocab_size)

            def forward(self, ids):
                return self.head(self.table(ids))
        """)
    )
    state = on_meta("mine.py:Mine").state(64)
    assert state == State(64, 4 * 4 * (2 * 32 * 64 + TAPS * 256), 0)
    assert on_meta("mine.py:Net").state(64) is None
    assert on_meta("mine.py:Raises").state(64) is None


def test_experts_keep_no_state():
    plain, experts = (on_meta(arch, SMALL).state(16) for arch in ("llama", "llama+mlp=moe"))
    assert plain == experts
