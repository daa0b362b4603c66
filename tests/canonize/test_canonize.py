"""Canon layers in decoders of transformers (`canonlm.canonize`), against the host and against plain forwards."""

import copy
import functools
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_hosts import DOUBLE, KINDS, canonized, differ, host, ids, logits, with_taps
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn.attention.flex_attention import create_block_mask
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import canonlm
from canonlm.canon.layer import CanonLayer
from canonlm.canonize import check
from canonlm.core.cache_name import CACHE
from canonlm.ops.varlen import Layout

QUICK = {
    **dict.fromkeys(("llama", "gpt2"), tuple(check.CASES)),
    **dict.fromkeys(("mixtral", "jamba"), ("greedy", "left padding", "packed documents")),
}
"""By host, the cases that are not slow."""


# Its initial state, and its results.


@pytest.mark.parametrize("kind", KINDS)
def test_initially_equals_the_host_bit_for_bit(kind):
    model = host(kind, torch.float32)
    before = logits(model, ids())
    sites = KINDS[kind].replace(":scaled", "")
    assert canonlm.canonize(model, sites) is model
    assert torch.equal(logits(model, ids()), before)
    assert any(isinstance(part, CanonLayer) for part in model.modules())


@functools.cache
def canonized_once(kind):
    return canonized(kind)


@pytest.mark.parametrize(
    ("kind", "case"),
    [
        pytest.param(kind, case, marks=() if case in QUICK.get(kind, ()) else pytest.mark.slow)
        for kind in KINDS
        for case in check.CASES
    ],
)
def test_decoding_in_any_way_gives_the_same_result(kind, case):
    [after] = check.decoding(canonized_once(kind), [case])
    if after.error is not None and after.error < 1e-6:  # some hosts make their rotary tables in single precision
        return
    [before] = check.decoding(host(kind), [case])
    order = ("passed", "refused", "failed", "differs")
    assert order.index(after.state) <= order.index(before.state), (before, after)


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_tap_is_trained(kind):
    model = canonized(kind, dtype=torch.float32).train()
    model(ids(), labels=ids()).loss.backward()
    without = [n for n, p in model.named_parameters() if "canon_" in n and (p.grad is None or not p.grad.any())]
    assert not without


def test_llama_is_our_own_decoder_with_the_same_weights():
    """The reference is our decoder, whose own forward calls its Canon layers."""
    from canonlm import CanonLMConfig, CanonLMForCausalLM

    model = canonized("llama", "ABCD")
    config = model.config
    ours = CanonLMForCausalLM(
        CanonLMConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rope_theta=config.rope_parameters["rope_theta"],
            rms_norm_eps=config.rms_norm_eps,
            canon_set="ABCD",
        )
    ).to(DOUBLE)
    names = {"canon_A": "canonA", "canon_C": "canonC", "canon_D_gate": "mlp.canonD_gate", "canon_D_up": "mlp.canonD_up"}
    names |= {f"canon_{x.upper()}": f"self_attn.canonB_{x}" for x in "qkv"}
    weights = {}
    for name, tensor in model.state_dict().items():
        for theirs, own in names.items():
            name = name.replace(theirs + ".", own + ".")
        weights[name] = tensor
    ours.load_state_dict(weights)
    assert differ(logits(ours.eval(), ids()), logits(model, ids())) < 1e-6  # its rotary table is computed differently


@pytest.mark.parametrize(
    ("kind", "letter"), [(kind, letter) for kind in ("gpt2", "phi3", "gpt_neox", "falcon") for letter in "QKV"]
)
def test_channels_of_fused_projections_are_those_that_attention_gets(kind, letter):
    """By gradients of attention's keys with respect to the projection's output."""
    model = host(kind)
    [place, *_] = canonlm.describe(model, letter)
    projection = model.get_submodule(f"{place.block}.{place.module}")
    made, reached = [], {}
    handle = projection.register_forward_hook(lambda module, args, output: made.append(output))
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(query, key, value, *args, **kwargs):
        if not reached:
            reached.update(Q=query, K=key, V=value)
        return plain(query, key, value, *args, **kwargs)

    torch.nn.functional.scaled_dot_product_attention = watched
    try:
        model(ids(1, 4), use_cache=False)
    finally:
        torch.nn.functional.scaled_dot_product_attention = plain
        handle.remove()
    [gradient] = torch.autograd.grad(reached[letter].square().sum(), made[0])
    channels = gradient.abs().sum((0, 1)) > 0
    selected = torch.zeros_like(channels).unflatten(-1, (place.part.groups, -1))
    selected[:, place.part.first : place.part.end] = True
    assert torch.equal(channels, selected.flatten())


# States, padding, documents.


def test_cropping_without_a_recorded_past_is_refused():
    model = canonized("llama")
    cache = model(ids(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="activate_past_recording"):
        cache.crop(-2)
    assert cache.get_seq_length() == 10


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_prefix_is_read_once_and_continued_several_times(duplicate):
    model, prefix = canonized("llama"), ids(1, 6)
    with torch.no_grad():
        cache = model(prefix, use_cache=True).past_key_values
    for seed in (5, 6):
        more = ids(1, 4, seed)
        full = logits(model, torch.cat([prefix, more], dim=1))[:, 6:]
        assert differ(logits(model, more, past_key_values=duplicate(cache)), full) < 1e-9


ROWS = torch.tensor([1, 0])


@pytest.fixture(scope="module")
def compiled_prefill():
    """(the model, a cache that its compiled forward has made)"""
    model = canonized("llama", dtype=torch.float32)
    torch._dynamo.reset()
    call: Any = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        cache = call(ids(), use_cache=True).past_key_values
    torch._dynamo.reset()
    return model, cache


@pytest.mark.parametrize("made_by", ["host", "user", pytest.param("compiled", marks=pytest.mark.slow), "static"])
@pytest.mark.parametrize(
    ("method", "argument", "rows"),
    [
        ("reorder_cache", ROWS, ROWS),
        ("batch_select_indices", ROWS[:1], ROWS[:1]),
        ("batch_repeat_interleave", 2, torch.tensor([0, 0, 1, 1])),
        ("reset", None, None),
    ],
)
def test_rows_of_a_cache_move_with_their_states(method, argument, rows, made_by, request):
    tokens, more = ids(), ids(2, 1, 9)
    if made_by == "compiled":
        model, cache = copy.deepcopy(request.getfixturevalue("compiled_prefill"))
    else:
        model = canonized("llama", dtype=torch.float32)
        given = {"user": DynamicCache, "static": lambda: StaticCache(config=model.config, max_cache_len=16)}
        cache = given[made_by]() if made_by in given else None
        with torch.no_grad():
            cache = model(tokens, past_key_values=cache, use_cache=True).past_key_values
    if made_by == "static" and method.startswith("batch"):
        with pytest.raises(AttributeError):  # the library has no such method for it
            getattr(cache, method)(argument)
        return
    getattr(cache, method)(*([] if argument is None else [argument]))
    if made_by != "static" and method == "reset" and cache.get_seq_length():
        pytest.skip("this version of transformers does not reset dynamic attention caches")
    before, new = (tokens[:, :0], more) if rows is None else (tokens[rows], more[rows])
    full = torch.cat([before, new], dim=1)
    assert differ(logits(model, new, past_key_values=cache)[:, 0], logits(model, full)[:, -1]) < 1e-5


def test_a_cache_that_the_host_has_filled_is_refused():
    model = host("llama")
    cache = model(ids(), use_cache=True).past_key_values
    canonlm.canonize(model, "AC")
    with pytest.raises(ValueError, match=f"^{CACHE}: expected a cache filled by this model"):
        model(ids(2, 1), past_key_values=cache)


def test_documents_are_isolated_where_the_host_isolates_them():
    model, tokens = canonized("llama"), ids(1, 10)
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    packed = logits(model, tokens, position_ids=positions, use_cache=False)
    assert differ(packed[:, 4:], logits(model, tokens[:, 4:])) < 1e-9
    # With a cache or a mask, the library lets attention cross documents, so Canon layers cross them, too.
    plain = host("llama")
    for options in ({"use_cache": True}, {"use_cache": False, "attention_mask": torch.ones_like(tokens)}):
        crossing = logits(plain, tokens, position_ids=positions, **options)
        assert differ(crossing[:, 4:], logits(plain, tokens[:, 4:])) > 1e-3
        assert layout_of_a_layer(tokens, position_ids=positions, **options).documents is None
    assert layout_of_a_layer(tokens, position_ids=positions, use_cache=False).documents is not None


def test_documents_of_text_and_images_are_those_of_the_text_positions():
    """`[4, B, T]`: the host's mask reads the first row, and `[3, B, T]`, without that row, separates nothing."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    config = Qwen2_5_VLTextConfig(vocab_size=61, num_hidden_layers=2, rope_parameters=rope, **sizes)
    model, tokens = Qwen2_5_VLTextModel(config).double().eval(), ids(1, 10)
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    for canonize in (False, True):
        if canonize:
            with_taps(canonlm.canonize(model, "ABCD"))
        for rows, isolated in ((4, True), (3, False)):
            packed = model(tokens, position_ids=positions.expand(rows, 1, -1), use_cache=False).last_hidden_state
            alone = model(tokens[:, 4:], use_cache=False).last_hidden_state
            assert (differ(packed[:, 4:], alone) < 1e-9) is isolated


def layout_of_a_layer(tokens: torch.Tensor, **options: Any) -> Layout:
    """The layout of the tokens that a Canon layer gets."""
    model: Any = canonized("llama", "A")
    layouts: list[Layout] = []
    layer = model.model.layers[0].canon_A
    layer.register_forward_pre_hook(lambda m, args, kwargs: layouts.append(kwargs["layout"]), with_kwargs=True)
    logits(model, tokens, **options)
    return layouts[0]


@pytest.mark.parametrize("pads", [[0, 1, 2], [2, 3, 4], [3, 6, 8]], ids=str)
def test_padding_anywhere_in_a_row_changes_nothing(pads):
    """Also in two calls, of which one begins or ends in it."""
    model, tokens = canonized("llama"), ids(1, 6)
    mask = torch.ones(1, 9, dtype=torch.long)
    mask[0, pads] = 0
    padded, real = torch.zeros(1, 9, dtype=torch.long), mask[0] != 0
    padded[:, real] = tokens
    places = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0), "attention_mask": mask}
    assert differ(logits(model, padded, **places)[:, real], logits(model, tokens)) < 1e-9
    cache, parts = DynamicCache(config=model.config), []
    for new in (slice(0, 4), slice(4, 9)):
        seen = {"attention_mask": mask[:, : new.stop], "position_ids": places["position_ids"][:, new]}
        parts.append(logits(model, padded[:, new], past_key_values=cache, **seen))
    assert differ(torch.cat(parts, dim=1)[:, real], logits(model, tokens)) < 1e-9
    recorded = DynamicCache(config=model.config)  # of which two tokens are removed and read again
    recorded.activate_past_recording()
    logits(model, padded, past_key_values=recorded, **places)
    recorded.crop(-2)
    again = logits(
        model, padded[:, 7:], past_key_values=recorded, **seen | {"position_ids": places["position_ids"][:, 7:]}
    )
    assert differ(again[:, real[7:]], logits(model, tokens)[:, 6 - int(real[7:].sum()) :]) < 1e-9


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "mistral"])
def test_padding_beside_static_caches(kind):
    """Their masks are prepared before the model gets them."""
    model, prompts = canonized(kind), ids(3, 12)
    mask = (torch.arange(12) >= torch.tensor([[0], [5], [9]])).long()
    settings: dict[str, Any] = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    rows = [
        model.generate(row[None, row.shape[0] - m.sum() :], **settings) for row, m in zip(prompts, mask, strict=True)
    ]
    for options in (
        {"cache_implementation": "static"},
        {"cache_implementation": "static", "prefill_chunk_size": 3},
        {},
    ):
        written = model.generate(prompts, attention_mask=mask, **settings, **options)
        for row, alone in zip(written, rows, strict=True):
            assert torch.equal(row[12:], alone[0, -30:])


def test_documents_are_read_from_prepared_masks():
    model, tokens = canonized("llama"), ids(1, 10)
    document = torch.arange(10) >= 4
    mask = (document[:, None] == document) & torch.ones(10, 10, dtype=torch.bool).tril()
    positions = torch.cat([torch.arange(4), torch.arange(6)])[None]
    packed = logits(model, tokens, attention_mask=mask[None, None], position_ids=positions)
    assert differ(packed[:, 4:], logits(model, tokens[:, 4:])) < 1e-9
    causal = torch.ones(10, 10, dtype=torch.bool).tril()[None, None]
    assert differ(logits(model, tokens, attention_mask=causal), logits(model, tokens)) < 1e-9


def test_documents_and_padding_are_read_from_the_masks_of_flex_attention():
    model, tokens = canonized("llama", dtype=torch.float32), ids(2, 10)
    document, first = torch.arange(10) >= 6, torch.tensor([0, 2])

    def sees(row, head, query, key):
        return (query >= key) & (document[query] == document[key]) & (key >= first[row])

    parts = [(0, 0, 6), (0, 6, 10), (1, 2, 6), (1, 6, 10)]
    alone = [logits(model, tokens[row : row + 1, begin:end])[0] for row, begin, end in parts]
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):  # compiled by the library, it takes half a minute
        packed = logits(model, tokens, attention_mask=create_block_mask(sees, 2, None, 10, 10, device="cpu"))
    for (row, begin, end), expected in zip(parts, alone, strict=True):
        assert differ(packed[row, begin:end], expected) < 1e-4


def test_tensors_without_values():
    config = host("llama").config
    with FakeTensorMode():
        model: Any = canonlm.canonize(AutoModelForCausalLM.from_config(config), "ABCD")
        tokens = torch.zeros(2, 8, dtype=torch.long)
        for kwargs in ({"attention_mask": tokens + 1}, {"position_ids": tokens}):
            cache = DynamicCache(config=config)
            assert model(tokens, past_key_values=cache, **kwargs).logits.shape == (2, 8, config.vocab_size)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "seq_idx", "cu_seqlens", "doc_ids"])
def test_documents_that_attention_ignores_are_refused(name):
    model, tokens, borders = canonized("llama", "A"), ids(1, 10), torch.tensor([0, 4, 10])
    with pytest.raises(ValueError, match=f"^{name}: expected position_ids that start again at documents"):
        logits(model, tokens, **{name: borders})
    # Beside such positions, as collators of the library give them, they say nothing new.
    packed = {"position_ids": torch.cat([torch.arange(4), torch.arange(6)])[None], "use_cache": False}
    assert torch.equal(logits(model, tokens, **packed, **{name: borders}), logits(model, tokens, **packed))


def test_caches_without_a_place_for_states_are_refused():
    with pytest.raises(ValueError, match="a Cache of transformers"):
        canonized("llama")(ids(), past_key_values=((torch.zeros(1), torch.zeros(1)),))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gemma2"])
def test_hidden_states_can_be_requested(kind):
    model = host(kind)
    options = {"output_hidden_states": True, "use_cache": False}
    with torch.no_grad():
        before = model(ids(), **options).hidden_states
        after = canonlm.canonize(model, "AC")(ids(), **options).hidden_states
    assert len(after) == len(before) == model.config.num_hidden_layers + 1
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


# Variants.


@pytest.mark.parametrize(
    "sites",
    [
        "ABCD:k2",
        "AC:smear",
        "K:offset",
        "KV:dynamic",
        "B:dynamic:scaled",
        "AC:silu:bias",
        "AC:avg",
        "A:nores:silu,C:id",
    ],
)
def test_variants_decode_as_they_are_read(sites):
    model, tokens = canonized("llama", sites), ids()
    assert differ(logits(model, tokens), logits(host("llama"), tokens)) > 1e-4
    [outcome] = check.decoding(model, ["pieces"])
    assert outcome.state == "passed", outcome


def test_uniform_taps_are_drawn_and_frozen_ones_stay():
    model = canonlm.canonize(host("llama"), "A,C:frozen", init="uniform")
    block: Any = model.model.layers[0]
    assert 0.2 < block.canon_A.weight.abs().max() <= 0.5
    assert block.canon_A.weight.requires_grad
    assert not block.canon_C.weight.requires_grad


@pytest.mark.parametrize("sites", ["ABCD", "A:id", "KV:dynamic,A:smear,C:silu:bias,D:frozen,O:avg"])
def test_weights_made_on_the_meta_device_are_initialised(sites):
    plain: Any = host("llama")  # sets the seed
    with torch.device("meta"):
        model = canonlm.canonize(type(plain)(plain.config), sites, init="uniform")
    model.to_empty(device="cpu")
    truth = canonlm.canonize(plain, sites, init="uniform")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    right = {name: p for name, p in truth.named_parameters() if "canon_" in name}
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all(), name
        if name in right:  # drawn from the same distribution
            made, true = (float(each.detach().double().square().mean()) for each in (parameter, right[name]))
            assert 0.5 * true <= made <= 2 * true, name
    assert logits(model.eval(), ids()).isfinite().all()


@pytest.mark.parametrize(
    ("kind", "sites", "why"),
    [
        ("llama", "X", "letters out of"),
        ("llama", "AA", "A once"),
        ("llama", "A:k0", "kernel"),
        ("llama", "A:what", "variant"),
        ("llama", "", "ABCD"),
        ("llama", "Ab", "no b"),
        ("gpt2", "K:offset", "one projection"),
        ("phi3", "B:dynamic", "one projection"),
        ("deepseek_v3", "K", "one projection"),
        ("mixtral", "D", "no D in mixtral: routed experts have no time axis"),
        ("mamba", "C", "no C in mamba"),
        ("mamba", "K", "no K in mamba"),
        ("bert", "AC", "tokens see later ones"),
        ("rwkv", "A", "outside of the library's caches"),
        ("xlnet", "A", "time axis first"),
    ],
)
def test_invalid_arguments_are_refused_in_one_line(kind, sites, why):
    model = host(kind)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=why) as caught:
        canonlm.canonize(model, sites)
    assert "\n" not in str(caught.value)
    assert set(model.state_dict()) == before


def test_models_that_cannot_be_canonized():
    model = canonized("llama", "A")
    for wrong, why in ((model, "without Canon"), (nn.Linear(2, 2), "a model of transformers")):
        with pytest.raises(ValueError, match=why):
            canonlm.canonize(wrong, "A")
    with pytest.raises(ValueError, match="canonize was called on"):
        canonlm.decanonize(host("llama"))
    ours = canonlm.CanonLMForCausalLM(canonlm.CanonLMConfig(vocab_size=11, hidden_size=8, num_attention_heads=2))
    with pytest.raises(ValueError, match="takes them from its configuration: set canon_set"):
        canonlm.canonize(ours, "A")


def test_the_description_lists_the_layers():
    model = host("gpt2")
    rows = canonlm.describe(model, "ABCD")
    assert [(row.letters, row.module, row.side, row.channels) for row in rows[:4]] == [
        ("A", "attn", "input", 32),
        ("QKV", "attn.c_attn", "output", 96),
        ("C", "mlp", "input", 32),
        ("D", "mlp.c_fc", "output", 128),
    ]
    assert len(rows) == 8
    canonlm.canonize(model, "ABCD")
    made = {name: part.hidden_size for name, part in model.named_modules() if isinstance(part, CanonLayer)}
    assert made == {f"{row.block}.{row.name}": row.channels for row in rows}


USE = """from typing import assert_type
from transformers import PreTrainedModel
import canonlm
class Host(PreTrainedModel): ...
def use(host: Host) -> None:
    assert_type(canonlm.canonize(host, "A"), Host)
    assert_type(canonlm.decanonize(host), Host)
    assert_type(canonlm.canonize(host, "A"), PreTrainedModel)
"""
MYPY = "[mypy]\nfollow_imports = skip\n[mypy-canonlm,canonlm.canonize]\nfollow_imports = silent\n"


@pytest.mark.slow
def test_type_checkers_see_the_hosts_class(tmp_path, monkeypatch):
    monkeypatch.setenv("MYPYPATH", str(Path(canonlm.__file__).parents[1]))
    (tmp_path / "use.py").write_text(USE)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", os.devnull, "use.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert [line.partition(":")[2] for line in done.stdout.splitlines() if "error:" in line] == [
        '8: error: Expression is of type "Host", not "Any"  [assert-type]'  # the last line, which is wrong
    ]


class OwnConfig(PreTrainedConfig):
    model_type = "own-decoder"
    vocab_size: int = 61
    hidden_size: int = 16
    num_hidden_layers: int = 2


class OwnAttention(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.out = index, nn.Linear(16, 16)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        parts = (
            project(x).unflatten(-1, (2, 8)).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = parts
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        mask = torch.ones(k.shape[2], k.shape[2], dtype=torch.bool).tril()[-q.shape[2] :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.attn, self.fc1, self.fc2 = OwnAttention(index), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        x = x + self.attn(x, cache)
        return x + self.fc2(self.fc1(x).relu())


class OwnModel(PreTrainedModel, GenerationMixin):
    """A user's model: positional arguments, and an MLP in the block itself."""

    config_class = OwnConfig

    def __init__(self, config: OwnConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.blocks = nn.ModuleList(OwnBlock(index) for index in range(2))
        self.post_init()

    def forward(self, input_ids, past_key_values=None, use_cache=None, cache=None, **kwargs):
        cache = past_key_values if cache is None else cache
        if use_cache and cache is None:
            cache = DynamicCache()
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x, cache)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)


def test_a_model_that_the_library_does_not_know():
    model = OwnModel(OwnConfig()).eval()
    before = logits(model, ids())
    canonlm.canonize(model, "ABCDOME")
    assert torch.equal(logits(model, ids()), before)
    with_taps(model)
    cases = ["causality", "greedy", "pieces", "crop", "beams", "prompt lookup", "save and load"]
    assert [outcome.state for outcome in check.decoding(model, cases)] == ["passed"] * len(cases)


# Saving, and removing Canon layers.


@pytest.mark.parametrize(
    ("kind", "old"), [("llama", False), ("llama", True), ("gpt_neox", False), ("mixtral", False), ("mamba2", False)]
)
def test_a_folder_gives_the_model_back(kind, old, tmp_path):
    model = canonized(kind, None if kind in KINDS else "AB", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    if old:  # of the version before tools read vocab_size
        change_settings(
            tmp_path, architectures=["LlamaForCausalLM"], vocab_size="a canonized model's", transformers_weights=None
        )
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(loaded.eval(), ids()), logits(model, ids()))
    assert type(loaded) is type(type(model).from_pretrained(tmp_path)) is type(model)


@pytest.mark.parametrize("size", ["5GB", "10KB"])
def test_a_variant_of_the_weights(size, tmp_path):
    model = canonized("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path, variant="fp32", max_shard_size=size)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp32")
    assert torch.equal(logits(loaded.eval(), ids()), logits(model, ids()))
    with pytest.raises(ValueError, match=r"expected weights, model.fp16.safetensors or model.safetensors.index.fp16"):
        AutoModelForCausalLM.from_pretrained(tmp_path, variant="fp16")


def change_settings(folder: Path, **changes: Any) -> None:
    """Other fields in a folder's config.json; None: without it."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def test_other_tools_read_a_folder(tmp_path):
    """Its configuration by its own class, as TRL and lm-eval do, and by the host's, as PEFT does."""
    model = canonized("gpt2", dtype=torch.float32)
    model.save_pretrained(tmp_path / "one")
    config = AutoConfig.from_pretrained(tmp_path / "one", summary_type="mean")
    config.save_pretrained(tmp_path / "two")
    for name in ("one", "two"):
        saved = json.loads((tmp_path / name / "config.json").read_text())
        assert (
            AutoConfig.from_pretrained(tmp_path / name).architectures
            == saved["architectures"]
            == ["CanonHostForCausalLM"]
        )
        assert type(model.config).from_pretrained(tmp_path / name).vocab_size == saved["vocab_size"] == 61
    assert (config.vocab_size, config.hidden_size, config.summary_type) == (61, 32, "mean")  # GPT-2 calls it n_embd
    assert AutoConfig.from_pretrained(tmp_path / "one", dtype="auto").dtype == "auto"  # as transformers serve does
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "one", config=config, attn_implementation="eager")
    assert (loaded.config.summary_type, loaded.config._attn_implementation) == ("mean", "eager")
    with pytest.raises(ValueError, match="AutoModel"):
        AutoModel.from_pretrained(tmp_path / "one")
    with pytest.raises(ValueError, match="no place for the states of Canon layers"):
        loaded.generate_batch([[1, 2]])


ELSEWHERE = """
import sys
for package in ("canonlm", "pydantic", "annotated_types"):
    sys.modules[package] = None  # importing it fails
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModel, LlamaForCausalLM, LlamaModel, pipeline
plain, *folders = sys.argv[1:]
calls = [one.from_pretrained for one in (AutoConfig, AutoModelForCausalLM, AutoModel, LlamaForCausalLM, LlamaModel)]
for call in [*calls, lambda folder: pipeline("text-generation", model=folder)]:
    try:
        call(plain)
    except (ValueError, OSError) as error:
        assert "canon" in str(error), error
    else:
        raise SystemExit(f"{call} opened it")
for folder in folders:
    ids = torch.load(f"{folder}/ids.pt")
    for place in (folder, f"{folder}/again"):
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
        assert torch.equal(model(ids).logits, torch.load(f"{folder}/logits.pt"))
        if place == folder:
            model.save_pretrained(f"{folder}/again")
"""


@pytest.mark.slow
def test_folders_without_canonlm(tmp_path):
    """Transformers refuses a plain one, and loads and saves those that have our code."""
    canonized("llama", dtype=torch.float32).save_pretrained(tmp_path / "plain")
    for kind in ("llama", "gpt2"):
        model = canonized(kind, dtype=torch.float32)
        model.save_pretrained(tmp_path / kind, self_contained=True)
        torch.save(ids(), tmp_path / kind / "ids.pt")
        torch.save(logits(model, ids()), tmp_path / kind / "logits.pt")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / kind)
        assert torch.equal(logits(loaded, ids()), logits(model, ids()))
    folders = [str(tmp_path / name) for name in ("plain", "llama", "gpt2")]
    subprocess.run([sys.executable, "-c", ELSEWHERE, *folders], check=True)


def test_a_host_and_a_canonized_model_do_not_load_each_others_folders(tmp_path):
    model, plain = canonized("llama", dtype=torch.float32), host("llama", torch.float32)
    model.save_pretrained(tmp_path / "canon")
    plain.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="expected the folder of a canonized model"):
        type(model).from_pretrained(tmp_path / "plain")
    with pytest.raises(Exception, match="import canonlm"):
        type(plain).from_pretrained(tmp_path / "canon")
    other = canonized("llama", "A", dtype=torch.float32)
    with pytest.raises(ValueError, match="sites"):
        type(other).from_pretrained(tmp_path / "canon")


def test_frozen_taps_are_frozen_when_loaded(tmp_path):
    canonlm.canonize(host("llama", torch.float32), "A:frozen,C").save_pretrained(tmp_path)
    block = AutoModelForCausalLM.from_pretrained(tmp_path).model.layers[1]
    assert not block.canon_A.weight.requires_grad
    assert block.canon_C.weight.requires_grad


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.canon_C.weight": None}, r"missing: .*canon_C"),
        ({"model.layers.0.mlp.up_proj.weight": None}, r"missing: .*up_proj"),
        ({"lm_head.weight": None}, r"missing: lm_head"),
        ({"model.extra": torch.zeros(2)}, r"unknown: .*extra"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int64)}, r"no floating-point numbers: .*norm"),
    ],
)
def test_a_folder_with_other_weights_is_refused(changes, message, tmp_path):
    model = canonized("llama", dtype=torch.float32)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors") | changes
    weights = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for load in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        with pytest.raises(ValueError, match=message) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_decanonize_gives_the_host_back(kind):
    model = host(kind, torch.float32)
    before, names, kind_of = logits(model, ids()), list(model.state_dict()), type(model)
    blocks = [type(part) for part in model.modules()]
    canonlm.decanonize(with_taps(canonlm.canonize(model, KINDS[kind])))
    assert type(model) is kind_of
    assert [type(part) for part in model.modules()] == blocks
    assert list(model.state_dict()) == names
    assert torch.equal(logits(model, ids()), before)
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sites": "A"}, r"do not fit the configuration; unknown: .*canon_C"),
        ({"sites": "ABCDO"}, r"do not fit the configuration; missing: .*canon_O"),
        ({"sites": "ABCDX"}, "sites: expected letters out of"),
        ({"sites": ["A"]}, "sites: expected letters such as"),
        ({"host_type": "canon_host"}, "host_type: expected a model type of transformers"),
        ({"host_type": "canonlm"}, "host_type: expected a model type of transformers"),
        ({"host_type": 3}, "host_type: expected a model type of transformers"),
        ({"host_type": "vit"}, "host_type: expected a causal model of transformers"),
        ({"host_type": ["llama"]}, "host_type: expected a model type of transformers"),
        ({"sites": None}, "sites: expected"),
        ({"host": None}, "host: expected an object"),
        ({"host": [1]}, "host: expected an object"),
        ({"host": {}}, "host: expected an object"),
        ({"host": {"vocab_size": 61}}, "expected a model of the .* numbers"),  # else that of Llama's standard sizes
        ({"host": {"vocab_size": "x"}}, "host: not a configuration of llama"),
        ({"host": {"vocab_size": 61, "architectures": 3}}, "host.architectures: expected a list of names"),
        ({"host": {"vocab_size": 61, "num_hidden_layers": 10**9}}, "num_hidden_layers: expected at most"),
        ({"host": {"transformers_weights": "x.safetensors"}}, "expected none, as only the usual files are read"),
        ({"transformers_weights": "x.safetensors"}, "expected none, as only the usual files are read"),
    ],
)
def test_a_contradictory_folder_is_refused_in_one_line(changes, message, tmp_path):
    model = canonlm.canonize(host("llama"), "ABCD")
    model.save_pretrained(tmp_path)
    change_settings(tmp_path, **changes)
    for load in (AutoModelForCausalLM.from_pretrained, type(model).from_pretrained):
        own = load == type(model).from_pretrained and {"sites", "host_type"} & changes.keys()
        with pytest.raises(ValueError, match="(sites|host_type): expected" if own else message) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["large", "FIFO", "deep"])
def test_settings_are_read_within_limits(damage, tmp_path):
    ours = canonlm.CanonLMForCausalLM(canonlm.CanonLMConfig(vocab_size=11, hidden_size=8, num_attention_heads=2))
    for model in (canonlm.canonize(host("llama"), "A"), ours):
        model.save_pretrained(tmp_path)
        config = tmp_path / "config.json"
        if damage == "deep":
            (tmp_path / "generation_config.json").write_text('{"a": ' + "[" * 9999 + "]" * 9999 + "}")
        else:
            config.unlink()
        if damage == "large":
            config.touch()
            os.truncate(config, 2**32)
        elif damage == "FIFO":
            os.mkfifo(config)
        with pytest.raises(ValueError, match=r"levels of nesting|at most .* bytes|not a regular file"):
            type(model).from_pretrained(tmp_path)
        config.unlink()


def test_a_folder_cannot_name_any_class_of_the_library(tmp_path):
    canonlm.canonize(host("llama"), "ABCD").save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())["host"]
    change_settings(tmp_path, host=settings | {"architectures": ["Trainer"]})
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path)).__name__ == "LlamaForCausalLM"
