"""Isolated documents by their borders: with stand-ins for GPU kernels, results are those of each document alone."""

import sys
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from operators import Operators
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache, masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex

from canonlm.models import attend, masks
from canonlm.models.decoder import Decoder
from canonlm.ops import fla, gated_delta_rule, packed_attention
from canonlm.ops.varlen import Documents, documents_of

IDS = torch.randint(0, 61, (2, 18), generator=torch.Generator().manual_seed(5))
DOC_IDS = torch.tensor([[0] * 7 + [1] * 11, [4] * 2 + [2] + [4] * 15])
LIMITS = [0, 7, 18, 20, 21, 36]
CLOSE = {"atol": 1e-10, "rtol": 0}
GIVEN = {
    "ids": {"doc_ids": DOC_IDS},
    "ids and borders": {"doc_ids": DOC_IDS, **documents_of(DOC_IDS).arguments()},
    "borders": documents_of(DOC_IDS).arguments(),
    "positions": {"position_ids": torch.tensor([[*range(7), *range(11)], [0, 1, 0, *range(15)]])},
    "full mask": {"doc_ids": DOC_IDS, "attention_mask": torch.ones_like(DOC_IDS)},
}


def alone(model, ids=IDS):
    """The logits of each document in a separate call."""
    with torch.no_grad():
        parts = [model(ids.flatten()[None, start:end]).logits[0] for start, end in pairwise(LIMITS)]
    return torch.cat(parts).view(*ids.shape, -1)


def varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale=None):
    assert cu_seqlens_q is cu_seqlens_k
    assert cu_seqlens_q.dtype == torch.int32
    parts = []
    for start, end in pairwise(cu_seqlens_q.tolist()):
        assert end - start <= max_seqlen_q == max_seqlen_k
        q_, k_, v_ = (x[start:end].transpose(0, 1) for x in (q, k, v))
        k_, v_ = (x.repeat_interleave(len(q_) // len(x), 0) for x in (k_, v_))
        scores = q_ @ k_.mT * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
        earlier = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        parts.append((scores.masked_fill(~earlier, -torch.inf).softmax(-1) @ v_).transpose(0, 1))
    return torch.cat(parts)


def put_in_place(monkeypatch, kernel):
    """Replace torch's kernel, for CPU tensors."""
    for name in ("window_size", "enable_gqa"):
        packed_attention._kernel_takes(name)  # caches the answer about the installed one
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernel)
    monkeypatch.setattr(attend, "takes", lambda *_: True)


@pytest.fixture
def calls(monkeypatch):
    """A stand-in for torch's kernel takes CPU tensors; the fixture lists the borders of its calls."""
    calls = []

    def attend(q, k, v, limits, *others, **_):
        calls.append(limits)
        return varlen(q, k, v, limits, *others)

    put_in_place(monkeypatch, attend)
    return calls


def refuse_masks(monkeypatch):
    monkeypatch.setattr(masks, "create_causal_mask", lambda **_: pytest.fail("a mask is made"))


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("use_cache", [False, True])
def test_attention_without_a_mask(small_model, calls, monkeypatch, given, use_cache):
    model = small_model(canon_set="ABCD", qk_norm=True)
    expected = alone(model)
    refuse_masks(monkeypatch)
    assert_close(model(IDS, **GIVEN[given], use_cache=use_cache).logits, expected, **CLOSE)
    assert calls[0].tolist() == [*LIMITS, *[36] * 11]
    assert calls[0] is calls[1]
    assert len(calls) == 2


def prepared(doc_ids, real=None, cached=0):
    """A mask of all pairs, True where new tokens see cached and new ones."""
    time = doc_ids.shape[1]
    mask = (doc_ids[:, :, None] == doc_ids[:, None]) & torch.ones(time, time, dtype=torch.bool).tril()
    return (mask if real is None else mask & real[:, None] & real[:, :, None])[:, None, cached:]


RUNS = torch.tensor([[0] * 7 + [1] * 11, [0] * 2 + [1] + [2] * 15])
NUMBERS = torch.zeros(2, 1, 18, 18).double().masked_fill(~prepared(RUNS), torch.finfo(torch.float64).min)
BORDERS = torch.tensor(LIMITS, dtype=torch.int32)
OTHER_WAYS = {
    "borders alone": {"cu_seq_lens_q": BORDERS},
    "the library's collator": {"cu_seq_lens_q": BORDERS, "cu_seq_lens_k": BORDERS, "max_length_q": 15,
                               "max_length_k": 15, "seq_idx": RUNS.int(), **GIVEN["positions"]},
    "seq_idx": {"seq_idx": RUNS.int()},
    "all pairs": {"attention_mask": prepared(RUNS)},
    "all pairs, numbers": {"attention_mask": NUMBERS},
    "all pairs and positions": {"attention_mask": NUMBERS, **GIVEN["positions"]},
}  # fmt: skip
KINDS = {
    "plain": {},
    "canon": {"canon_set": "ABCD"},
    "alibi": {"canon_set": "AC", "alibi": "alibi"},
    "hybrid": {"mixers": ["mamba2", "attention"], "canon_set": "ABCD"},
    "gdn": {"mixers": ["gdn"], "canon_set": "AbCD"},
}


@pytest.mark.parametrize("mixers", [["attention"], ["gdn"]])
def test_a_mask_has_a_row_for_each_row(small_model, mixers):
    model, mask = small_model(mixers=mixers, canon_set="AC"), torch.tensor([[0, 1, 1, 1]])
    with pytest.raises(ValueError, match=r"^attention_mask: expected a row for each of 2, got \[1, 4\]"):
        model(torch.ones(2, 4, dtype=torch.long), attention_mask=mask)


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_documents_under_the_librarys_other_names(small_model, kind, kernel):
    model = small_model(**KINDS[kind])
    model.set_attn_implementation(kernel)
    expected, close = alone(model), CLOSE if kernel == "sdpa" else {"atol": 1e-5, "rtol": 0}  # softmax in float32
    with torch.no_grad():
        for way, arguments in OTHER_WAYS.items():
            got = model(IDS, use_cache=False, **arguments).logits
            assert_close(got, expected, **close, msg=lambda m, way=way: f"{way}: {m}")
        cache = DynamicCache(config=model.config)  # a border inside the second chunk, one before it, padding at the end
        first = model(IDS[:, :7], attention_mask=prepared(RUNS[:, :7]), past_key_values=cache).logits
        rest = model(IDS[:, 7:], attention_mask=prepared(RUNS, cached=7), past_key_values=cache).logits
        assert_close(torch.cat([first, rest], dim=1), expected, **close)
        real = (torch.arange(18) < torch.tensor([[18], [12]])) & (torch.arange(18) >= torch.tensor([[0], [1]]))
        got = model(IDS, attention_mask=prepared(torch.zeros_like(IDS), real), use_cache=False).logits
        assert_close(got[1, 1:12], model(IDS[1:, 1:12], use_cache=False).logits[0], **close)


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_that_nothing_reads_are_refused(small_model, kind):
    model, tree = small_model(**KINDS[kind]), prepared(RUNS)
    for name, near in {"cu_seqlens": "cu_seq_lens_q", "attn_mask": "attention_mask", "is_causal": "is_causal"}.items():
        value = False if near == name else BORDERS
        with pytest.raises(ValueError, match=rf'^unknown argument of forward "{name}"\.( Did you mean "{near}")?'):
            model(IDS, **{name: value})
    model(IDS, cu_seqlens=None, is_causal=True, token_type_ids=torch.zeros_like(IDS), output_router_logits=False)
    cache = model(IDS[:, :4], use_cache=True).past_key_values
    for name, value in {"cu_seq_lens_q": BORDERS, "seq_idx": RUNS[:, 4:]}.items():
        with pytest.raises(ValueError, match=f"^{name}: expected doc_ids, of cached and new tokens"):
            model(IDS[:, 4:], past_key_values=cache, **{name: value})
    tree[..., 5, 3] = False  # a branch: it is not the last tokens that are seen
    if kind == "plain":
        model(IDS, attention_mask=tree)
    else:
        with pytest.raises(ValueError, match=r"^attention_mask: expected causal attention within documents"):
            model(IDS, attention_mask=tree)
    with pytest.raises(ValueError, match=r"^attention_mask: expected True or False, or numbers to add"):
        model(IDS, attention_mask=tree.long())


@pytest.mark.parametrize("cache", [DynamicCache, lambda config: StaticCache(config=config, max_cache_len=30)])
def test_cached_tokens_need_a_mask(small_model, calls, cache):
    model = small_model(canon_set="ABCD")
    expected, cache = alone(model), cache(config=model.config)
    with torch.no_grad():
        begin = model(IDS[:, :12], doc_ids=DOC_IDS[:, :12], past_key_values=cache).logits
        assert len(calls) == 2
        end = model(IDS[:, 12:], doc_ids=DOC_IDS, past_key_values=cache).logits
    assert len(calls) == 2
    assert_close(torch.cat([begin, end], dim=1), expected, **CLOSE)


def test_padding_needs_a_mask(small_model, calls):
    model = small_model(canon_set="ABCD")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[:, :2] = 0
    padded = [torch.nn.functional.pad(x, (2, 0)) for x in (IDS, DOC_IDS)]
    got = model(padded[0], doc_ids=padded[1], attention_mask=mask, **documents_of(padded[1]).arguments()).logits
    assert_close(got[:, 2:], alone(model), **CLOSE)
    assert not calls


@pytest.mark.parametrize("config", [{"alibi": "alibi"}, {"attention_dropout": 0.5}, {"eager": True}])
def test_other_cases_that_need_a_mask(small_model, calls, config):
    eager = config.pop("eager", False)
    model = small_model(canon_set="A", **config)
    if eager:
        model.set_attn_implementation("eager")
    model.train()(IDS, doc_ids=DOC_IDS)
    assert not calls


# Training


def delta_rule(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    """A stand-in for fla's kernel."""
    parts, states = [], []
    for start, end in pairwise(cu_seqlens.tolist()):
        tokens = [x[:, start:end] for x in (q, k, v, g, beta)]
        y, state = gated_delta_rule.gated_delta_rule_recurrent(*tokens, scale=scale)
        parts.append(y)
        states.append(state)
    delta_rule.calls.append(cu_seqlens)
    return torch.cat(parts, dim=1), torch.cat(states)


@pytest.fixture
def fla_calls(monkeypatch):
    """A stand-in for fla's kernel takes CPU tensors; the fixture lists the borders of its calls."""
    module = ModuleType("fla.ops.gated_delta_rule")
    module.chunk_gated_delta_rule = delta_rule
    delta_rule.calls = []
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", module)
    monkeypatch.setattr(gated_delta_rule, "_kernel_is_right", lambda with_gradients: True)
    return delta_rule.calls


def test_a_step_does_not_synchronize_and_computes_borders_once(small_model, calls, fla_calls, monkeypatch):
    model = Decoder(small_model(torch.float32, mixers=["gdn", "attention"], num_hidden_layers=4, canon_set="ACD"))
    targets = IDS.roll(-1, 1)

    def step(documents):
        loss = model.loss(IDS, targets, documents, 36.0).total
        return [loss, *torch.autograd.grad(loss, list(model.module.parameters()))]

    given = documents_of(DOC_IDS)
    with monkeypatch.context() as on_a_cpu:
        on_a_cpu.setattr(attend, "takes", lambda *_: False)
        expected = step(Documents(DOC_IDS))
        assert all(map(torch.equal, step(given), expected))
    assert not calls
    monkeypatch.setattr(fla, "takes", lambda *_: True)
    refuse_masks(monkeypatch)
    with Operators() as operators:
        got = step(given)
    assert_close(got, expected, atol=1e-5, rtol=1e-4)
    assert [limits is given.cu_seqlens for limits in (*calls, *fla_calls)] == [True] * 4
    assert not {"aten.nonzero.default", "aten._local_scalar_dense.default"} & {*operators.seen}


@pytest.mark.slow
def test_compiled_blocks_are_rarely_recompiled(small_model, monkeypatch):
    model = Decoder(small_model(torch.float32, canon_set="", num_hidden_layers=1))
    attend = torch.library.custom_op("canonlm_test::varlen_attn", _with_lists, mutates_args=(), schema=SCHEMA)
    attend.register_fake(lambda q, *_, **__: torch.empty_like(q))
    put_in_place(monkeypatch, lambda *tensors, **_: attend(*tensors))
    compiled = []
    batches = [
        (torch.rand(2, 64, generator=torch.Generator().manual_seed(n)) < 0.5 / (n + 1)).cumsum(1) for n in (0, 3, 9)
    ]
    ids = torch.zeros(2, 64, dtype=torch.long)
    with torch.no_grad():
        expected = [model.loss(ids, ids, documents_of(docs), 1.0).total for docs in batches]
        for block in model.blocks.values():
            block.compile(backend=lambda graph, _: compiled.append(graph) or graph, fullgraph=True)
        got = [model.loss(ids, ids, documents_of(docs), 1.0).total for docs in batches]
    assert len({(len(d.cu_seqlens), d.max_length) for d in map(documents_of, batches)}) == 3
    assert_close(got, expected)
    assert len(compiled) <= 2


SCHEMA = "(Tensor q, Tensor k, Tensor v, Tensor limits, Tensor same, SymInt longest, SymInt also) -> Tensor"


def _with_lists(q, k, v, limits, same, longest, also):
    return varlen(q, k, v, limits, limits, longest, also)


# The library's own kernels


@pytest.fixture
def flash_calls(monkeypatch):
    """A stand-in for flash-attn takes CPU tensors; the fixture lists the borders of its calls."""
    calls = []

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1)):  # fmt: skip
        assert causal
        flash_attn_varlen_func.window = window_size
        calls.append(cu_seqlens_q)
        return varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=softmax_scale)

    for name in [name for name in vars(flash) if name.startswith("_") and name.endswith("_fn")]:
        monkeypatch.setattr(flash, name, None)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(flash, "_lazy_imports", lambda *_, **__: (None, flash_attn_varlen_func, None, None, None))
    return calls


def with_flash(model):
    model.config._attn_implementation_internal = "flash_attention_2"  # as if the package were installed
    return model


@pytest.mark.parametrize("given", GIVEN)
def test_flash_attention(small_model, flash_calls, given):
    expected = alone(small_model(canon_set="ABCD"))
    model = with_flash(small_model(canon_set="ABCD"))
    assert_close(model(IDS, **GIVEN[given]).logits, expected, **CLOSE)
    assert [limits.tolist() for limits in flash_calls] == [[*LIMITS, *[36] * 11]] * 2


@pytest.mark.usefixtures("flash_calls")
def test_flash_attention_gets_the_window(small_model):
    with_flash(small_model(sliding_window=4))(IDS, doc_ids=DOC_IDS)
    assert flash._lazy_imports()[1].window[0] == 3  # tokens before the current one


def test_kernels_without_sinks_are_refused(small_model):
    with pytest.raises(ValueError, match=r"attn_implementation: expected .* with attention_sink"):
        small_model(attention_sink=True).set_attn_implementation("flash_attention_2")


@pytest.mark.usefixtures("flash_calls")
def test_flash_attention_refuses_a_mask(small_model):
    model, cache = with_flash(small_model(canon_set="A")), DynamicCache()
    mask = torch.ones_like(IDS)
    mask[0, 0] = 0
    message = 'attn_implementation: expected "sdpa", "eager" or "flex_attention" with packed documents'
    with pytest.raises(ValueError, match=message):
        model(IDS, doc_ids=DOC_IDS, attention_mask=mask)
    cache = model(IDS, doc_ids=DOC_IDS, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=message):
        model(IDS[:, :1], doc_ids=torch.cat([DOC_IDS, DOC_IDS[:, -1:]], dim=1), past_key_values=cache)


def test_flex_attention_makes_one_block_mask(small_model, monkeypatch):
    expected = alone(small_model(canon_set="ABCD"))
    made = []

    def uncompiled(mask_mod, _compile=True, **sizes):
        made.append(create_block_mask(mask_mod, **sizes))
        return made[-1]

    monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled)
    monkeypatch.setattr(
        flex, "compile_friendly_flex_attention", lambda *x, training, **options: flex_attention(*x, **options)
    )
    model = small_model(canon_set="ABCD")
    model.set_attn_implementation("flex_attention")
    with torch.no_grad():
        got = model(IDS, doc_ids=DOC_IDS, use_cache=False).logits
    assert_close(got, expected, **CLOSE)
    assert len(made) == 1
