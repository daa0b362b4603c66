"""Foreign models: transformers' by type, modules of a user's file, flash-linear-attention with a stand-in."""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from transformers import GenerationConfig

from canonlm.core.user_code import load
from canonlm.models import hf
from canonlm.models import loss as losses
from canonlm.models.build import complete_name
from canonlm.models.causality import check
from canonlm.models.hf import library_model, outside_model
from canonlm.models.initialize import generator_for
from canonlm.models.interface import Sizes
from canonlm.ops.varlen import Documents

ROOT = Path(__file__).parents[2]
SIZES = Sizes(num_hidden_layers=4, hidden_size=32, num_attention_heads=4, vocab_size=40, seq_len=32)
TYPES = ["llama", "qwen3", "gpt2", "qwen3_moe", "deepseek_v3", "mamba2", "qwen3_next", "lfm2", "nemotron_h", "xlstm"]
"""Attention, experts, latent attention, recurrences, hybrids."""

ids = torch.randint(0, 40, (2, 32), generator=torch.Generator().manual_seed(0))
targets = ids.roll(-1, dims=1)


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*module.named_parameters(), *module.named_buffers()])


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_model_of_the_library(model_type):
    model = library_model(f"hf:{model_type}", SIZES, seed=3)
    check(model)
    total = model.loss(ids, targets, None, 64.0).total
    expected = nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), targets.flatten())
    assert_close(total, expected)
    total.backward()
    # One layer of nemotron_h is a mixer or an MLP, so two of them are one layer of a preset.
    assert len(model.blocks) == (8 if model_type == "nemotron_h" else 4)
    assert model.logits(ids).shape == (2, 32, 40)
    flops = model.forward_flops(32)
    assert flops["linear"] > 0
    assert flops["head"] == 2 * 32 * 40
    assert (flops["attention"] > 0) == (model_type not in ("mamba2", "xlstm"))


@pytest.mark.parametrize("model_type", [*TYPES, "apertus", "openai-gpt"])  # two whose constructors draw weights
def test_initial_weights_are_a_function_of_seed_and_name(model_type):
    """They are the same if drawn at once or part by part, in another order, after the meta device; buffers too."""
    at_once = library_model(f"hf:{model_type}", SIZES, seed=3).module
    with torch.device("meta"):
        model = library_model(f"hf:{model_type}", SIZES, seed=3)
    made = set()
    for name, part in [*reversed(model.blocks.items()), ("", model.module)]:
        for module in set(part.modules()) - made:
            module.to_empty(device="cpu", recurse=False)
            for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
                tensor.data.fill_(7)
        model.initialize(part, name)
        made |= set(part.modules())
    model.module.tie_weights()
    assert equal(tensors(at_once), tensors(model.module))
    assert not equal(tensors(at_once), tensors(library_model(f"hf:{model_type}", SIZES, seed=4).module))


@pytest.mark.parametrize(
    "arch", ["hf:qwen3+canon", "hf:gpt2+canon=AC:bias", "hf:lfm2+canon=A:avg,M:k3", "hf:mixtral+canon=ABC"]
)
def test_canon_in_a_model_of_the_library(arch):
    """The host starts as without Canon; Canon layers start as in our decoder, in any order of drawing."""
    model, plain = (library_model(name, SIZES, seed=3) for name in (arch, arch.partition("+")[0]))
    check(model)
    mine = model.module.state_dict()
    assert equal({name: mine[name] for name in plain.module.state_dict()}, plain.module.state_dict())
    taps = {name: p for name, p in model.module.named_parameters() if "canon_" in name}
    assert taps
    assert model.num_parameters == plain.num_parameters + sum(p.numel() for p in taps.values())
    for name, parameter in taps.items():
        layer = model.module.get_submodule(name.rpartition(".")[0])
        drawn = torch.empty_like(parameter)
        layer.fill(name.rpartition(".")[2], drawn, generator_for(3, name))
        assert torch.equal(parameter, drawn)
        assert parameter.abs().max() > 0
    with torch.device("meta"):
        apart = library_model(arch, SIZES, seed=3)
    apart.module.to_empty(device="cpu")
    for name, part in reversed({"": apart.module, **apart.blocks}.items()):
        apart.initialize(part, name)
    assert equal(apart.module.state_dict(), mine)
    assert model.forward_flops(32)["conv"] > plain.forward_flops(32)["conv"]
    model.loss(ids, targets, None, 64.0).total.backward()
    assert all(p.grad.abs().max() > 0 for p in taps.values())


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("hf:qwen3+canon", "hf:qwen3+canon=ABCD"),
        ("hf:qwen3{head_dim=16}+canon=DA:k3", "hf:qwen3{head_dim=16}+canon=AD:k3"),
        ("hf:qwen3+canon:nores", "hf:qwen3+canon=ABCD:nores"),
        ("hf:qwen3", "hf:qwen3"),
    ],
)
def test_canon_in_an_hf_model_has_one_spelling(arch, name):
    assert complete_name(arch, SIZES)[0] == name


def test_building_leaves_the_random_state_alone():
    before = torch.get_rng_state()
    check(library_model("hf:llama", SIZES))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("model_type", ["qwen3", "mamba2", "gpt2"])
def test_loss_in_chunks_equals_the_loss_at_once(model_type, monkeypatch):
    model = library_model(f"hf:{model_type}", SIZES)
    model.module.double()
    sparse = torch.where(torch.arange(32) % 3 == 0, targets, -100)
    full = model.loss(ids, sparse, None, 22.0).total
    full.backward()
    expected = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    model.module.zero_grad()
    monkeypatch.setattr(losses, "CHUNK_BYTES", 8 * 40 * 10)
    monkeypatch.setattr(losses, "loss_of_logits", None)  # not called
    chunked = model.loss(ids, sparse, None, 22.0).total
    chunked.backward()
    assert_close(chunked, full)
    assert_close({name: p.grad for name, p in model.module.named_parameters()}, expected)


@pytest.mark.parametrize("model_type", ["gemma2{final_logit_softcapping=1.0}", "granite{logits_scaling=4.0}"])
def test_logits_changed_after_the_head_are_not_chunked(model_type, monkeypatch):
    model = library_model(f"hf:{model_type}", SIZES)
    full = model.loss(ids, targets, None, 64.0).total
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1000)
    assert_close(model.loss(ids, targets, None, 64.0).total, full)


def test_flops_of_heads_that_differ_from_layer_to_layer():
    """Three sliding layers with heads of 8 channels and a window of 16, one full layer with heads of 16."""
    model = library_model("hf:gemma4_text{sliding_window=16}", SIZES)
    sizes = {(c.num_attention_heads, c.head_dim) for c in model.module.config.per_layer_config}
    assert sizes == {(4, 8), (4, 16)}
    assert model.forward_flops(32)["attention"] == 3 * 4 * 4 * 8 * (16 - 16**2 / 64) + 4 * 4 * 16 * 16


@pytest.mark.parametrize("model_type", ["llama", "gemma", "gpt2", "deepseek_v2", "deepseek_v3", "minicpm3", "zamba"])
def test_flops_of_attention_are_half_of_those_of_all_pairs(model_type):
    model = library_model(f"hf:{model_type}", SIZES)
    model.module.set_attn_implementation("eager")
    products = Counter()
    for length in (16, 32):  # products of other mixers do not grow with the length
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.logits(torch.ones(1, length, dtype=torch.long))
        products[length] = counter.get_flop_counts()["Global"][torch.ops.aten.bmm] / length
    counted = model.forward_flops(32)["attention"] - model.forward_flops(16)["attention"]
    assert products[32] - products[16] == 2 * counted


@pytest.mark.parametrize(
    ("model_type", "layers"),
    [
        *((kind, "wwww") for kind in ("mistral", "mixtral", "phi3", "starcoder2", "ministral")),
        *(("gemma2", "wfwf"), ("gpt_oss", "wfwf"), ("cohere2", "wwwf")),
    ],
)
def test_flops_of_windows(model_type, layers):
    seen = {"w": sum(min(t + 1, 8) for t in range(32)) / 32 - 8 / 64, "f": 16.0}  # T / 2, not (T + 1) / 2
    model = library_model(f"hf:{model_type}{{sliding_window=8}}", SIZES)
    full = library_model(f"hf:{model_type}{{sliding_window=64}}", SIZES).forward_flops(32)["attention"]
    assert model.forward_flops(32)["attention"] == full * sum(map(seen.get, layers)) / (4 * 16)


def test_flops_of_chunks():
    model = library_model("hf:llama4_text{attention_chunk_size=8}", SIZES)
    full = library_model("hf:llama4_text{attention_chunk_size=64}", SIZES)
    assert model.forward_flops(32)["attention"] == full.forward_flops(32)["attention"] * (3 * 4 + 16) / (4 * 16)


def test_router_loss_is_a_mean_over_targets():
    model = library_model("hf:qwen3_moe{output_router_logits=true,router_aux_loss_coef=0.5}", SIZES)
    model.module.train()
    outputs = model.module(input_ids=ids, use_cache=False)
    cross_entropy = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten())
    assert_close(model.loss(ids, targets, None, 64.0).total, cross_entropy + 0.5 * outputs.aux_loss)
    model.module.eval()
    assert_close(model.loss(ids, targets, None, 64.0).total, cross_entropy)  # an evaluation on text has none


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text", "olmo3"])
def test_isolated_documents(model_type):
    check(library_model(f"hf:{model_type}", SIZES), isolated=True)


@pytest.mark.parametrize("model_type", ["lfm2", "gpt_oss", "mamba2", "bloom"])
def test_leaks_between_documents_are_detected(model_type):
    model = library_model(f"hf:{model_type}", SIZES)
    message = (
        f"^data.isolate_documents: expected false with hf:{model_type}, which lets packed documents see each other$"
    )
    with pytest.raises(ValueError, match=message):
        check(model, isolated=True)


@pytest.mark.parametrize("model_type", ["bert", "xlnet"])
def test_models_that_are_not_causal_are_detected(model_type):
    model = library_model(f"hf:{model_type}", SIZES)
    with pytest.raises(ValueError, match=rf"^arch: hf:{model_type} is not causal \(a change of token \d+ changed the"):
        check(model)
    if model_type == "bert":
        check(library_model("hf:bert{is_decoder=true}", SIZES))


class Peeks(nn.Module):
    """In training only, a branch mixes all tokens before a projection that is zero."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)
        self.head = nn.Linear(hidden_size, vocab_size)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        h = self.embed(x)
        return self.head(h + self.out(h.mean(1, keepdim=True).expand_as(h)) * self.training)


def test_causality_is_checked_past_zero_weights_and_in_training():
    model = outside_model("mine.py:Peeks", Peeks, SIZES)
    with pytest.raises(ValueError, match="is not causal"):
        check(model)
    assert not model.module.model.out.weight.any()  # as it was
    assert all(p.grad is None for p in model.module.parameters())


class Draws(nn.Module):
    """Random in training: dropout as a module, as a function of some tokens, noise, and a layer skipped by Python."""

    def __init__(self, vocab_size: int, hidden_size: int, kind: str = "module") -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(vocab_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.drop, self.kind, self.head = nn.Dropout(0.3), kind, nn.Linear(hidden_size, vocab_size)

    def forward(self, x):
        h = self.linear(self.embed(x))
        if self.training and self.kind in ("module", "leak"):
            h = self.drop(h)
        elif self.training and self.kind == "experts":
            h = torch.where((x % 2 == 0)[..., None], h, h.masked_scatter((x % 2 == 1)[..., None], self.expert(h, x)))
        elif self.training and self.kind == "noise":
            h = h + torch.randn_like(h)
        elif self.training and random.random() + np.random.random() < 1:
            h = 2 * h
        return self.head(h + h.roll(-1, 1) if self.training and self.kind == "leak" else h)

    def expert(self, h, x):
        return nn.functional.dropout(h[x % 2 == 1], 0.3, self.training)


@pytest.mark.parametrize("kind", ["module", "experts", "noise", "skips", "leak"])
def test_a_model_that_draws_random_numbers_is_causal_unless_it_leaks(kind):
    model = outside_model("mine.py:Draws", Draws, Sizes(4, 32, 4, 40, 32, fields={"kind": kind}))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    if kind == "leak":
        with pytest.raises(ValueError, match="is not causal"):
            check(model)
    else:
        check(model)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert (model.module.training, model.module.model.drop.p) == (True, 0.3)


@pytest.mark.parametrize(
    ("arch", "message"),
    [
        ("hf:qwen33", 'unknown model_type "qwen33". Did you mean "qwen3"?'),
        ("hf:llama{num_key_value_hedas=2}", 'unknown field "hf:llama{num_key_value_hedas}". Did you mean "num_key_v'),
        ("hf:llama{head_dim=16", "arch: expected a } at the end of its fields"),
        ("hf:llama+rope=1", "arch: expected no modifiers (+)"),
        ("hf:llama+canon+rope=1", "arch: expected no modifier but +canon"),
        ("hf:llama+canons", "arch: expected no modifier but +canon"),
        ("hf:llama+canon=", "+canon: expected sites such as +canon=AC"),
        ("hf:llama+canon=AA", '+canon: expected A once, got "AA"'),
        ("hf:mixtral+canon", "arch: hf:mixtral+canon cannot be built: sites: no D in mixtral"),
        ("hf:rwkv+canon", "arch: hf:rwkv+canon cannot be built: model: rwkv cannot have Canon layers"),
        ("hf:llama{num_key_value_heads=3}", "arch: hf:llama{num_key_value_heads=3} does not run here"),
        ("hf:llama{hidden_act=nothing}", "arch: hf:llama{hidden_act=nothing} cannot be built here (KeyError"),
        ("hf:gemma3", "arch: hf:gemma3 is made of several models (text_config, vision_config); choose a text model"),
        ("fla:kda", "arch: expected a CUDA device and flash-linear-attention"),
    ],
)
def test_refusals_are_one_line(arch, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check(library_model(arch, SIZES))
    assert "\n" not in str(error.value)


def test_sizes_and_fields():
    sizes = Sizes(4, 64, 4, 40, 32, fields={"tie_word_embeddings": True, "intermediate_size": 96})
    model = library_model("hf:gemma3_text{num_key_value_heads=1,sliding_window=8}", sizes)
    config = model.module.config
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (64, 4, 4)
    assert (config.intermediate_size, config.num_key_value_heads, config.sliding_window) == (96, 1, 8)
    assert config.layer_types == ["sliding_attention"] * 3 + ["full_attention"]  # of five to one
    assert model.context_length == 32
    assert model.module.get_output_embeddings().weight is model.module.get_input_embeddings().weight
    assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (None, None, None)
    experts = library_model("hf:qwen3_moe", SIZES).module.config
    assert (experts.num_experts, experts.num_experts_per_tok, experts.moe_intermediate_size) == (16, 2, 48)
    attention = [library_model("hf:jamba", Sizes(n, 32, 4, 40, 32)).module.config.layer_types for n in (2, 8)]
    assert [types.index("full_attention") for types in attention] == [1, 4]


def written(model, rows: list[list[int]], **options) -> list[list[int]]:
    width = max(map(len, rows))
    padded = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0, **options)
    return model.generate(padded, attention_mask=mask, generation_config=config)[:, width:].tolist()


@pytest.mark.parametrize(
    ("model_type", "works"),
    [("llama", (True, True)), ("mamba2", (True, True)), ("recurrent_gemma", (True, False)), ("rwkv", (False, False))],
)
def test_generation_is_right(model_type, works):
    """RWKV's state is not passed on, and both it and Griffin read padding: they get prompts of one length."""
    model = library_model(f"hf:{model_type}", SIZES)
    model.module.eval()
    with torch.no_grad():
        for p in model.module.parameters():
            p.mul_(2 if p.ndim > 1 else 1)  # models with smaller weights repeat one token
        rows = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [2, 7, 1]]
        answers = []
        for row in rows:
            line = torch.tensor([row])
            for _ in range(5):
                line = torch.cat([line, model.logits(line)[:, -1:].argmax(-1)], 1)
            answers.append(line[0, len(row) :].tolist())
    batches = [rows]
    if model.reads_padding:
        with pytest.raises(ValueError, match="attention_mask: expected prompts of one length in a call"):
            written(model, rows)
        batches = [rows[:1], rows[1:]]
    assert [tokens for batch in batches for tokens in written(model, batch)] == answers
    assert model.generate.works == works


def test_saved_models_are_the_librarys(tmp_path):
    from transformers import AutoModelForCausalLM

    model = library_model("hf:olmo2", SIZES)
    model.module.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_close(loaded(ids).logits, model.logits(ids))
    has_weights = hf.ForeignModel("hf:olmo2", loaded, has_weights=True)
    assert equal(tensors(has_weights.module), tensors(model.module))


REQUIRED = [
    *("llama", "mistral", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("olmo3", "olmo_hybrid", "granite", "granitemoehybrid", "smollm3", "gpt2", "gpt_neox", "gpt_oss", "mixtral"),
    *("deepseek_v3", "cohere2", "mamba2", "falcon_h1", "nemotron_h", "jamba", "bamba", "zamba2", "lfm2", "kimi_linear"),
    *("recurrent_gemma", "xlstm", "rwkv", "minimax", "inkling_text"),
]


def test_recorded_coverage():
    """The results of `benchmarks/hf_coverage.py`, which takes minutes, are those on the page."""
    data = json.loads((ROOT / "benchmarks/results/hf-coverage.json").read_text())
    types, page = data["types"], (ROOT / "docs/foreign-models.md").read_text()
    assert data["counts"]["works"] >= 110
    assert data["counts"]["traceback"] == data["counts"]["hang"] == 0
    assert [name for name in REQUIRED if types[name]["outcome"] != "works"] == []
    assert all(f"| `{name}` |" in page for name in types)
    assert not any("\n" in row.get("why", "") for row in types.values())


# -- modules from a file ----------------------------------------------------------------------------------------------


@pytest.fixture
def mine(tmp_path):
    """The example of the docs."""
    page = (ROOT / "docs/foreign-models.md").read_text()
    code = re.search(r"```python\n(# mine\.py.*?)```", page, re.DOTALL)[1]
    assert code.count("\n") <= 30
    (tmp_path / "mine.py").write_text(code)
    return f"{tmp_path / 'mine.py'}:Net"


def test_a_user_defined_module(mine, tmp_path, monkeypatch):
    thing = load(mine).object
    model = outside_model("mine.py:Net", thing, SIZES, seed=3)
    check(model)
    assert list(model.blocks) == [f"model.blocks.{i}" for i in range(4)]
    assert equal(tensors(model.module), tensors(outside_model("mine.py:Net", thing, SIZES, seed=3).module))
    assert not equal(tensors(model.module), tensors(outside_model("mine.py:Net", thing, SIZES, seed=4).module))
    full = model.loss(ids, targets, None, 64.0).total
    assert_close(full, nn.functional.cross_entropy(model.logits(ids).flatten(0, 1), targets.flatten()))
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1000)
    assert_close(model.loss(ids, targets, None, 64.0).total, full)
    optimizer = torch.optim.AdamW(model.module.parameters(), lr=1e-2)
    for _ in range(20):
        model.loss(ids, targets, None, 64.0).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(model.loss(ids, targets, None, 64.0).total.detach()) < float(full.detach()) - 0.5
    assert len(written(model, [[1, 2, 3]])[0]) == 5
    model.module.save_pretrained(tmp_path / "saved")
    assert json.loads((tmp_path / "saved/config.json").read_text())["arch"] == "mine.py:Net"
    with pytest.raises(ValueError, match="packed documents see each other"):
        check(model, isolated=True)


def test_a_factory(mine):
    net = load(mine).object
    seen = {}

    def factory(sizes, depth=1, **kwargs):
        seen.update(kwargs, depth=depth)
        return net(sizes.vocab_size, sizes.hidden_size, depth)

    model = outside_model("mine.py:factory{depth=2,wide=true}", factory, SIZES)
    assert len(model.blocks) == 2
    assert seen["depth"] == 2
    assert seen["wide"] is True
    assert seen["hidden_size"] == 32
    assert (
        outside_model("x.py:f", lambda: library_model("hf:llama", SIZES).module, SIZES).module.config.model_type
        == "llama"
    )


class WithDocuments(nn.Module):
    """Each token sees the mean of its document so far; the head is the embedding."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, doc_ids=None):
        h = self.embed(ids)
        seen = torch.ones(ids.shape[1], ids.shape[1]).tril().bool().expand(len(ids), -1, -1)
        if doc_ids is not None:
            seen = seen & (doc_ids[:, :, None] == doc_ids[:, None, :])
        return (self.head(seen.float() @ h / seen.sum(-1, keepdim=True)),)


def test_a_module_that_takes_documents(tmp_path):
    model = outside_model("mine.py:WithDocuments", WithDocuments, SIZES)
    check(model, isolated=True)
    assert list(model.blocks) == ["model"]
    model.module.save_pretrained(tmp_path)  # with tied weights
    assert model.num_parameters == 8 * 40


@pytest.mark.parametrize(
    ("thing", "arch", "message"),
    [
        (Peeks, "mine.py:Peeks{depth=2}", 'unknown field "mine.py:Peeks{depth}"'),
        (lambda: 3, "mine.py:three", "arch: mine.py:three made a int, not a torch.nn.Module"),
        (lambda vocab_size: nn.Embedding(vocab_size, 7), "mine.py:E", "arch: mine.py:E does not run here"),
        (nn.Identity, "mine.py:I", "arch: mine.py:I made a model without parameters"),
        (lambda: nn.Linear("a", 3), "mine.py:L", "arch: mine.py:L cannot be built (TypeError"),
        (3, "mine.py:N", "arch: mine.py:N is not a class or a function"),
    ],
)
def test_invalid_modules(thing, arch, message):
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        check(outside_model(arch, thing, SIZES))
    assert "\n" not in str(error.value)


# -- flash-linear-attention -------------------------------------------------------------------------------------------

STAND_IN = """
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class KDAConfig(PreTrainedConfig):
    model_type = "kda"
    def __init__(self, hidden_size=2048, num_heads=16, head_dim=128, num_hidden_layers=24,
                 hidden_ratio=4, max_position_embeddings=2048, vocab_size=32000, pad_token_id=None, **kwargs):
        self.hidden_size, self.num_heads, self.head_dim = hidden_size, num_heads, head_dim
        self.num_hidden_layers, self.hidden_ratio = num_hidden_layers, hidden_ratio
        self.max_position_embeddings, self.vocab_size = max_position_embeddings, vocab_size
        super().__init__(pad_token_id=pad_token_id, **kwargs)

class KDABlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)
    def forward(self, h, borders):
        parts = [h] if borders is None else [h[:, a:b] for a, b in zip(borders[:-1].tolist(), borders[1:].tolist())]
        return h + self.proj(torch.cat([part.cumsum(1) for part in parts], 1))

class KDAForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = KDAConfig
    _no_split_modules = ["KDABlock"]
    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(KDABlock(config) for _ in range(config.num_hidden_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()
    def get_input_embeddings(self): return self.embed
    def get_output_embeddings(self): return self.lm_head
    def forward(self, input_ids=None, attention_mask=None, use_cache=None, cu_seqlens=None, **kwargs):
        h = self.embed(input_ids)
        for layer in self.layers:
            h = layer(h, cu_seqlens)
        return CausalLMOutput(logits=self.lm_head(h))

AutoConfig.register("kda", KDAConfig)
AutoModelForCausalLM.register(KDAConfig, KDAForCausalLM)
"""


def test_flash_linear_attention(tmp_path, monkeypatch):
    (tmp_path / "fla/models").mkdir(parents=True)
    (tmp_path / "fla/__init__.py").write_text("from fla import models\n")
    (tmp_path / "fla/models/__init__.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = library_model("fla:kda{hidden_ratio=2}", SIZES, seed=3)
    config = model.module.config
    assert (config.hidden_size, config.num_heads, config.head_dim, config.hidden_ratio) == (32, 4, 8, 2)
    assert (config.num_hidden_layers, config.vocab_size, config.max_position_embeddings) == (4, 40, 32)
    assert list(model.blocks) == [f"layers.{i}" for i in range(4)]
    check(model, isolated=True)
    documents = Documents((torch.arange(32) >= 11).long().expand(2, -1))
    logits = model.logits(ids, documents)
    assert_close(logits[:, 11:], model.logits(ids[:, 11:]))
    full = model.loss(ids, targets, documents, 64.0).total
    monkeypatch.setattr(losses, "CHUNK_BYTES", 1000)
    assert_close(model.loss(ids, targets, documents, 64.0).total, full)
    with pytest.raises(ValueError, match=r'unknown model of flash-linear-attention "kdaa". Did you mean "kda"\?'):
        library_model("fla:kdaa", SIZES)
    with pytest.raises(ValueError, match=r'unknown field "fla:kda\{hidden_ration\}". Did you mean "hidden_ratio"'):
        library_model("fla:kda{hidden_ration=2}", SIZES)
