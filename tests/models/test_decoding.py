"""Decoding with a cache, in any way, equals one uncached call on the whole.

A case is a test with its arguments. Not every model runs every case: `decoding_cases.json` lists the fast and the slow
models of each, in which every feature of a model (a mixer, a Canon site, an option) meets every feature of a case, and
every case every mixer. A new model or case needs its own entries. A mixer without any runs those of gated retention,
slow.
"""

import copy
import itertools
import json
from pathlib import Path

import pytest
import torch
import transformers
from families import FAMILIES, ids
from packaging.version import Version
from torch.testing import assert_close
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

from canonlm.canon.sites import SITES as OF_THE_TABLE
from canonlm.canon.sites import slots
from canonlm.core.cache_name import CACHE
from canonlm.models.mixers import MIXERS

OLD_CACHES = Version(transformers.__version__) < Version("5.18")
EVERY = slots(OF_THE_TABLE)
OPTIONS = {
    "gla": {"linear_num_key_value_heads": 1, "clamp_min": -0.5},
    "mamba2": {"mamba_state_size": 16},
    "mamba3": {"mamba_state_size": 16},
}
RECURRENT = {
    **{name: {"mixers": [name], **OPTIONS.get(name, {})} for name, mixer in MIXERS.items() if mixer.recurrent},
    "hybrid": {"mixers": ["gdn", "attention", "mamba2"], "num_hidden_layers": 3, "mamba_state_size": 16},
}
SITES = {
    **{name: ["", "AbBCD"] for name in RECURRENT},
    "llama": ["", "A", "B", "C", "D", "ABCD"],
    "gla": ["", "A", "b", "B", "C", "D", "AbBCD"],
    "gdn": ["", "A", "b", "B", "C", "D", "AbBCD"],
    "mamba2": ["", "A", "b", "B", "C", "D", "AbBCD"],
    "hybrid": ["", "A", "B", "C", "D"],
}
MODELS = {
    f"{name}+{sites}": {"canon_set": sites, **RECURRENT.get(name, {})} for name, each in SITES.items() for sites in each
}
MODELS |= {
    "hybrid+AbBCD": {**RECURRENT["hybrid"], "canon_sets": ["AbBCD", "ABCD", "AbBCD"]},
    "mamba2-no-mlp": {**RECURRENT["mamba2"], "mlp": "none", "canon_set": "Ab", "mamba_n_groups": 2},
    "mimo": {
        **{"mixers": ["mamba3", "attention"], "mixer_options": {"mamba3": {"state_size": 8, "mimo_rank": 2}}},
        "canon_sets": ["", "A"],
    },
    "first-values": {
        **{"mixers": ["attention", "rwkv7"], "num_hidden_layers": 4, "canon_sets": ["A", "bB"]},
        **{"mixer_options": {"rwkv7": {"value_residual": True, "value_rank": 4}}},
    },
    "attnres": {"mixers": ["gla", "attention"], "attention_residuals": True, "canon_sets": ["bO", "ABCD"]},
    "attention-last": {"mixers": ["gla", "gla", "attention"], "num_hidden_layers": 3, "canon_sets": ["b", "Ab", "A"]},
    "alibi": {"alibi": "alibi", "canon_set": "AC"},
    "hard-alibi": {"alibi": "hard", "canon_set": "ABCD"},
    "hybrid-alibi": {**RECURRENT["hybrid"], "alibi": "alibi"},
    "rope-heads": {"rope_heads": 2, "rope_dim": 4},
    "mla": {"mixers": ["mla"], "attention_gate": True},
    "mla+options": {
        **{"mixers": ["mla"], "mixer_options": {"mla": {"q_lora_rank": 6, "kv_lora_rank": 5, "v_head_dim": 6}}},
        **{"canon_set": "ABCD", "sliding_window": 4, "attention_sink": True},
    },
    "hybrid-mla": {"mixers": ["gdn", "mla", "attention"], "num_hidden_layers": 3, "canon_sets": ["b", "B", "A"]},
    "gate+sink": {"attention_gate": True, "attention_sink": True, "canon_set": "B"},
    "window": {"sliding_window": 5},
    "window+sink+ABCD": {"sliding_window": 4, "attention_sink": True, "canon_set": "ABCD"},
    "alternating": {"sliding_window": 4, "sliding_layers": [True, False], "canon_sets": ["ABCD", "A"]},
    "hybrid+window": {
        **RECURRENT["hybrid"],
        "sliding_window": 3,
        "attention_gate": True,
        "canon_sets": ["b", "A", "b"],
    },
    "standard": {"mlp": "standard", "hidden_act": "relu2", "canon_set": "D"},
    "experts": {"mlp": "moe", "num_experts": 4, "canon_set": "ABC"},
    "options": {
        "canon_set": "ABCD",
        "canon_kernel": 3,
        "canon_activation": True,
        "canon_bias": True,
        "qk_norm": True,
        "rope_dim": 4,
    },
    "per-layer": {"num_hidden_layers": 3, "canon_sets": ["A", "ABCD", ""]},
    "inkling": {"canon_set": "KVOM"},
    "inkling2": {"canon_set": "KV:dynamic:scaled,OM:scaled"},
    "everywhere": {"canon_set": EVERY.replace("b", "")},
    "cheap": {"canon_set": "E:smear,K:offset"},
    "kernels": {"canon_set": "A:k2:avg,Q:k3:zero,V:k6:bias:silu,D:k8:id,M:smear"},
    "hybrid+everywhere": {
        **RECURRENT["hybrid"],
        "canon_sets": ["E:smear,AbOM,KV:dynamic", "E:smear,K:offset,V:k2,O:scaled", f"E:smear,{EVERY[1:]}"],
    },
}
EXACT = {"atol": 1e-10, "rtol": 0}
ROUNDED = {"atol": 1e-4, "rtol": 0, "check_dtype": False}  # `generate` returns logits in float32
NEW = 12


LISTED = json.loads(Path(__file__).with_name("decoding_cases.json").read_text())
UNLISTED = [name for name in RECURRENT if f'"{name}+' not in json.dumps(LISTED)]


def cases(**arguments):
    """Run a test on the models listed for each of its cases. An argument's values: a list, or a dictionary by label."""
    by_label = {name: each if isinstance(each, dict) else {str(v): v for v in each} for name, each in arguments.items()}

    def declare(test):
        parameters = []
        for labels in itertools.product(*by_label.values()):
            case = "-".join(labels)
            values = [each[label] for each, label in zip(by_label.values(), labels, strict=True)]
            of_case = {speed: [*models] for speed, models in LISTED[test.__name__][case].items()}
            like = [model for models in of_case.values() for model in models if model.startswith("gated_retention+")]
            of_case["slow"] += [model.replace("gated_retention", name) for model in like for name in UNLISTED]
            for speed, marks in (("fast", ()), ("slow", pytest.mark.slow)):
                for model in of_case[speed]:
                    name = f"{model}-{case}" if case else model
                    parameters.append(pytest.param(model, *values, id=name, marks=marks))
        return pytest.mark.parametrize(("model", *arguments), parameters, indirect=["model"])(test)

    return declare


@pytest.fixture
def model(small_model, request):
    return small_model(**MODELS[request.param])


def whole(model, input_ids, **kwargs):
    with torch.no_grad():
        return model(input_ids, use_cache=False, **kwargs).logits


def greedy(model, prompt):
    """The reference: a full forward pass for every token. Also checks that the choices are clear."""
    tokens, logits = prompt, []
    for _ in range(NEW):
        logits.append(whole(model, tokens)[:, -1])
        best = logits[-1].topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > 1e-5
        tokens = torch.cat([tokens, logits[-1].argmax(-1, keepdim=True)], dim=1)
    return tokens, torch.stack(logits, dim=1)


def generate(model, prompt, **kwargs):
    output = model.generate(
        prompt, max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True, **kwargs
    )
    return output.sequences, None if output.logits is None else torch.stack(output.logits, dim=1)


def in_chunks(model, input_ids, sizes, cache, mask=None, doc_ids=None):
    """Logits of all tokens, read in chunks through the cache, which may already have tokens."""
    logits, end = [], input_ids.shape[1] - sum(sizes)
    for chunk in input_ids[:, end:].split(sizes, dim=1):
        end += chunk.shape[1]
        seen = {"attention_mask": mask, "doc_ids": doc_ids}
        seen = {key: value[:, :end] for key, value in seen.items() if value is not None}
        with torch.no_grad():
            logits.append(model(chunk, past_key_values=cache, **seen).logits)
    return torch.cat(logits, dim=1)


def dynamic(model):
    return DynamicCache(config=model.config)


def static(model):
    return StaticCache(config=model.config, max_cache_len=64)


CACHES = {"dynamic": dynamic, "static": static}


@cases(length=[1, 9], cache=["dynamic", "static", None])
def test_greedy(model, length, cache):
    prompt = ids(2, length)
    how = {"use_cache": False} if cache is None else {"cache_implementation": cache}
    assert_close(generate(model, prompt, **how), greedy(model, prompt), **ROUNDED)


@cases()
def test_beams(model):
    prompt = ids(2, 3)
    result = [generate(model, prompt, num_beams=3, use_cache=use_cache)[0] for use_cache in (True, False)]
    assert torch.equal(*result)


@cases(cache=["dynamic", "static"])
def test_left_padded_batch(model, cache):
    lengths = [1, 2, 4, 9]  # shorter than the kernel, too
    prompt = ids(4, 9)
    mask = (torch.arange(9) >= 9 - torch.tensor(lengths)[:, None]).long()
    tokens, logits = generate(model, prompt, attention_mask=mask, cache_implementation=cache)
    for row, length in enumerate(lengths):
        alone_tokens, alone_logits = greedy(model, prompt[row : row + 1, -length:])
        assert torch.equal(tokens[row, 9 - length :], alone_tokens[0])
        assert_close(logits[row], alone_logits[0], **ROUNDED)


@cases(cache=CACHES)
def test_right_padded_prefill_then_decoding(model, cache):
    lengths, new = [1, 2, 4, 9], 6
    tokens = ids(4, 9 + new)
    mask = (torch.arange(9) < torch.tensor(lengths)[:, None]).long()
    mask = torch.cat([mask, torch.ones(4, new, dtype=torch.long)], dim=1)
    logits = in_chunks(model, tokens, [6, 1, 2, *[1] * new], cache(model), mask)
    for row in range(4):
        real = mask[row] != 0
        assert_close(logits[row, real], whole(model, tokens[row : row + 1, real])[0], **EXACT)


DOCUMENTS = torch.tensor([[4, 4, 4, 4, 2, 2, 2, 9, 9, 4, 4, 4, 4, 4], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0]])


def documents_alone(model, tokens, doc_ids):
    """Logits of each row's documents, each run on its own."""
    rows = []
    for row, row_ids in zip(tokens, doc_ids, strict=True):
        sizes = row_ids.unique_consecutive(return_counts=True)[1].tolist()
        rows.append(torch.cat([whole(model, document[None])[0] for document in row.split(sizes)]))
    return torch.stack(rows)


CHUNKS = {
    "to inside a document": [10, 1, 1, 1, 1],
    "inside documents": [8, 3, 3],
    "to the end of a document": [9, 1, 1, 1, 1, 1],  # in the first row one that is shorter than the kernel
    "single tokens": [1] * 14,
}


@cases(cache=CACHES, chunks=CHUNKS)
def test_packed_documents_then_decoding(model, cache, chunks):
    tokens = ids(2, 14)
    logits = in_chunks(model, tokens, chunks, cache(model), doc_ids=DOCUMENTS)
    assert_close(logits, documents_alone(model, tokens, DOCUMENTS), **EXACT)


HOW = {
    "cache=dynamic": {},
    "cache=static": {"cache_implementation": "static"},
    "chunks=of three": {"prefill_chunk_size": 3},
    "choice=beams": {"num_beams": 2},
}


@cases(how=HOW)
def test_generation_continues_the_last_document(model, how):
    prompt, doc_ids = ids(2, 11), DOCUMENTS[:, :11]  # two tokens each in the last document
    tokens, _ = generate(model, prompt, doc_ids=doc_ids, **how)
    plain = {key: value for key, value in how.items() if key != "prefill_chunk_size"}
    alone, _ = generate(model, prompt[:, -2:], **plain)
    assert torch.equal(tokens[:, -NEW:], alone[:, -NEW:])


@cases(cache=CACHES, chunks={"uneven": [5, 1, 5, 1, 3], "to inside": [6, 9]})
def test_padding_inside_rows(model, cache, chunks):
    """A token sees the real tokens before it, in one call and in pieces, as without padding."""
    gaps = [[], [3, 4, 5], [0, 1, 4, 6, 7, 8, 9, 10, 14], [1, 5]]
    mask = torch.ones(4, 15, dtype=torch.long)
    for row, columns in enumerate(gaps):
        mask[row, columns] = 0
    tokens = ids(4, 15)
    got = [in_chunks(model, tokens, chunks, cache(model), mask)]
    with torch.no_grad():
        got.append(model(tokens, attention_mask=mask, use_cache=False).logits)
    for row, real in enumerate(mask != 0):
        expected = whole(model, tokens[row : row + 1, real])[0]
        for logits in got:
            assert_close(logits[row, real], expected, **EXACT)


@cases(pads=["left", "middle", "inside", "right"], cache=CACHES)
def test_packed_and_padded(model, pads, cache):
    """Padding counts with the document before it, whatever its id, and takes no position."""
    tokens, doc_ids = ids(1, 12), torch.tensor([[0, 0, 0, 5, 5, 5, 5, 5, 5, 5, 5, 5]])
    at, pad = {"left": 0, "middle": 3, "inside": 4, "right": 8}[pads], torch.full((1, 3), 7)
    mask = torch.cat([torch.ones(1, at), torch.zeros(1, 3), torch.ones(1, 12 - at)], dim=1)
    padded, padded_ids = (torch.cat([x[:, :at], pad, x[:, at:]], dim=1) for x in (tokens, doc_ids))
    sizes = {"left": [5, 6, 4], "middle": [5, 6, 4], "inside": [12, 3], "right": [11, 1, 1, 1, 1]}[pads]
    logits = in_chunks(model, padded, sizes, cache(model), mask, padded_ids)
    assert_close(logits[mask != 0], documents_alone(model, tokens, doc_ids)[0], **EXACT)


@cases()
def test_prompt_lookup_equals_greedy(model):
    prompt = ids(1, 6).repeat(1, 3)  # repeats itself, so that lookups succeed
    assert torch.equal(generate(model, prompt, prompt_lookup_num_tokens=4)[0], greedy(model, prompt)[0])
    assert torch.equal(generate(model, prompt, assistant_model=copy.deepcopy(model))[0], greedy(model, prompt)[0])
    assert torch.equal(generate(model, prompt, assistant_early_exit=1)[0], greedy(model, prompt)[0])
    doc_ids = torch.tensor([[0] * 16 + [1] * 2])
    result = generate(model, prompt, prompt_lookup_num_tokens=4, doc_ids=doc_ids)[0]
    assert torch.equal(result[:, -NEW:], greedy(model, prompt[:, -2:])[0][:, -NEW:])


PACKED = {"documents=one": False, "documents=packed": True}


@cases(removed=[1, 3, 6], packed=PACKED, recorded_from=[0, 8])
def test_cropping_is_exact(model, removed, packed, recorded_from):
    if model.config.sliding_window is not None and OLD_CACHES:
        pytest.skip("this version of transformers keeps more of a recorded window than its mask shows")
    tokens, doc_ids = ids(2, 14), DOCUMENTS if packed else None
    expected = documents_alone(model, tokens, DOCUMENTS) if packed else whole(model, tokens)
    cache = dynamic(model)
    if recorded_from:
        in_chunks(model, tokens[:, :recorded_from], [recorded_from], cache, doc_ids=doc_ids)
    cache.activate_past_recording()
    in_chunks(model, tokens, [8, 2, 4] if recorded_from == 0 else [2, 4], cache, doc_ids=doc_ids)
    cache.crop(-removed)
    assert cache.get_seq_length() == 14 - removed
    kernels = [canon.kernel for i in range(len(cache.layers)) for canon in model.config.canons(i).values()]
    for layer in cache.layers:  # no more is kept than the kernels need
        kept = [state.shape[-1] for state in getattr(layer, "conv_states", {}).values()]
        assert all(width <= max(kernels) for width in kept)
    got = in_chunks(model, tokens, [1] * removed, cache, doc_ids=doc_ids)
    assert_close(got, expected[:, 14 - removed :], **EXACT)


@cases()
def test_a_recorded_past_with_padding(model):
    """Drafts may contain the padding token: it is read between tokens, removed with some of them, and read again."""
    tokens, mask = ids(2, 12), torch.ones(2, 15, dtype=torch.long)
    mask[0, [6, 7, 13]] = mask[1, [0, 1, 9]] = 0
    padded, expected = torch.full((2, 15), 7), whole(model, tokens)
    padded[mask != 0] = tokens.flatten()
    for recorded_from in (0, 8):
        cache = dynamic(model)
        if recorded_from:
            in_chunks(model, padded[:, :recorded_from], [recorded_from], cache, mask[:, :recorded_from])
        cache.activate_past_recording()
        if model.config.sliding_window is not None:
            with pytest.raises(ValueError, match="attention_mask: expected padding at the start of rows only"):
                in_chunks(model, padded, [15 - recorded_from], cache, mask)
            return
        in_chunks(model, padded, [4, 11] if recorded_from == 0 else [7], cache, mask)
        for removed, sizes in ((5, [1, 3, 1]), (2, [2])):
            cache.crop(-removed)
            last = torch.arange(15) >= 15 - removed
            got = in_chunks(model, padded, sizes, cache, mask)
            assert_close(got[mask[:, last] != 0], expected[last[None].expand(2, -1)[mask != 0].view(2, 12)], **EXACT)


@cases()
def test_a_recurrent_state_refuses_to_rewind(model):
    """The library alone would crop the convolutions, keep the recurrent state, and generate wrong tokens."""
    tokens = ids(2, 14)
    filled = dynamic(model)
    in_chunks(model, tokens[:, :8], [8], filled)
    with pytest.raises(RuntimeError, match="Call `activate_past_recording`"):
        filled.crop(-2)
    for cache in (filled, dynamic(model)):
        cache.activate_past_recording()
        with pytest.raises(ValueError, match=f"{CACHE}: expected a model without recurrent layers"):
            in_chunks(model, tokens[:, 8:], [6], cache)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, ids(1, 6), prompt_lookup_num_tokens=4)


@cases(cache=CACHES)
def test_reset(model, cache):
    cache = cache(model)
    in_chunks(model, ids(2, 8), [5, 3], cache)
    cache.reset()
    if OLD_CACHES and isinstance(cache, DynamicCache):
        pytest.skip("this version of transformers does not reset dynamic attention caches")
    tokens = ids(2, 7)
    assert_close(in_chunks(model, tokens, [2, 1, 4], cache), whole(model, tokens), **EXACT)


@cases(cache=CACHES)
def test_rows_are_selected_and_repeated(model, cache):
    """As contrastive search and samplers that drop finished rows do."""
    tokens, cache = ids(3, 9), cache(model)
    in_chunks(model, tokens[:, :6], [4, 2], cache)
    if isinstance(cache, StaticCache):  # the library's own keys and values cannot
        with pytest.raises((ValueError, AttributeError), match="batch_select_indices"):
            cache.batch_select_indices(torch.tensor([2, 0]))
        return
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 0, 0]
    assert_close(in_chunks(model, tokens[rows][:, 6:], [1, 2], cache), whole(model, tokens[rows])[:, 6:], **EXACT)


@cases()
def test_a_cache_without_configuration_is_refused_before_it_is_used(model):
    cache = DynamicCache()
    if set(model.config.layer_types) == {"full_attention"}:
        assert_close(in_chunks(model, ids(2, 7), [2, 1, 4], cache), whole(model, ids(2, 7)), **EXACT)
        return
    with pytest.raises(ValueError, match=rf"{CACHE}: expected a cache made with config=model\.config"):
        model(ids(2, 7), past_key_values=cache)
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match=f"{CACHE}: expected a cache of a decoder"):
        model(ids(2, 7), past_key_values=EncoderDecoderCache(DynamicCache(), DynamicCache()))
    moved_away = dynamic(model)
    moved_away.offloading = True
    with pytest.raises(ValueError, match=f"{CACHE}: expected a cache without offloading"):
        model(ids(2, 7), past_key_values=moved_away)


@pytest.mark.parametrize("model", ["hybrid+AbBCD"], indirect=True)
def test_doc_ids_must_cover_the_cache(model):
    cache = dynamic(model)
    in_chunks(model, ids(2, 4), [4], cache)
    with pytest.raises(ValueError, match=r"doc_ids: expected shape \(2, 5\).*got \(2, 1\)"):
        model(ids(2, 1), past_key_values=cache, doc_ids=torch.zeros(2, 1, dtype=torch.long))


@pytest.mark.parametrize("given", ["doc_ids", "seq_idx", "position_ids"])
def test_cached_documents_must_be_given_again(small_model, given):
    """Attention would read all of them, and recurrences the last."""
    model, tokens = small_model(mixers=["gdn", "attention"], canon_set="A"), ids(1, 9)
    values = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] if given == "position_ids" else [[3] * 4 + [5] * 5])
    with torch.no_grad():
        filled = model(tokens[:, :8], use_cache=True, **{given: values[:, :8]})[CACHE]
        with pytest.raises(ValueError, match="doc_ids: expected those of cached and new tokens, as several"):
            model(tokens[:, 8:], past_key_values=filled)
        model(tokens[:, 8:], past_key_values=filled, doc_ids=torch.tensor([[0] * 4 + [1] * 5]))
        one = model(tokens[:, :4], use_cache=True, **{given: values[:, :4]})[CACHE]
        if given == "position_ids":
            with pytest.raises(ValueError, match="position_ids: expected no restart behind cached tokens"):
                model(
                    tokens[:, 4:],
                    past_key_values=one,
                    position_ids=values[:, 4:].clone().index_fill_(1, torch.tensor(2), 0),
                )
            for how in HOW.values():
                with pytest.raises(ValueError, match=r"behind cached tokens|several documents are cached"):
                    generate(model, tokens, position_ids=values, **how)
        assert_close(model(tokens[:, 4:], past_key_values=one).logits, whole(model, tokens)[:, 4:], **EXACT)


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_columns_of_a_mask(small_model, kind, cache):
    """A column for every token, and any number after them, as for the places of a static cache."""
    model, tokens = small_model(**FAMILIES[kind]), ids(2, 9)
    mask = (torch.arange(64) >= torch.tensor([[3], [0]])).long()
    expected, filled = whole(model, tokens, attention_mask=mask[:, :9]), CACHES[cache](model)
    with torch.no_grad():
        got = [model(part, past_key_values=filled, attention_mask=mask).logits for part in tokens.split([6, 3], dim=1)]
        assert_close(torch.cat(got, dim=1)[mask[:, :9] != 0], expected[mask[:, :9] != 0], **EXACT)
        with pytest.raises(ValueError, match="attention_mask: expected 12 columns: cached tokens and new ones, got 3"):
            model(tokens[:, :3], past_key_values=filled, attention_mask=mask[:, :3])


@pytest.mark.parametrize("kind", FAMILIES)
def test_gradients_through_a_cache(small_model, kind):
    """Those of one call on the whole, though a cache writes states in place."""
    model, tokens, gradients = small_model(**FAMILIES[kind]), ids(2, 9), []
    for parts in ([9], [5, 4], [5, 3, 1]):
        filled = dynamic(model)
        logits = [model(part, past_key_values=filled).logits for part in tokens.split(parts, dim=1)]
        model.zero_grad()
        torch.cat(logits, dim=1)[:, 6:].logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for got in gradients[1:]:
        assert_close(got, gradients[0], **EXACT)


@pytest.mark.parametrize("key", ["doc_ids", "seq_idx", "attention_mask"])
def test_tensors_are_where_the_tokens_are(small_model, key):
    elsewhere = torch.ones(2, 4, dtype=torch.long, device="meta")
    with pytest.raises(ValueError, match=f'^{key}: expected a tensor on cpu, as the tokens, got "meta"'):
        small_model()(ids(2, 4), **{key: elsewhere})


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_has_either_name(small_model, name):
    model, tokens = small_model(mixers=["gdn", "attention"], canon_sets=["AbBCD", "ABCD"]), ids(2, 9)
    passed = {name: dynamic(model)}
    with torch.no_grad():
        logits = [model(part, **passed).logits for part in tokens.split(5, dim=1)]
    assert_close(torch.cat(logits, dim=1), whole(model, tokens), **EXACT)
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=f"^{CACHE}: expected none in training with gradient checkpointing"):
        model.train()(tokens, **passed)
