"""The forward call: arguments, documents by positions, steps of decoding, and what `print` shows."""

import pytest
import torch
from families import FAMILIES
from host_waits import Calls, Waits
from torch._subclasses import FakeTensorMode
from torch.nn.modules.module import register_module_forward_hook
from torch.testing import assert_close
from transformers import DynamicCache, StaticCache

from canonlm import CanonLayer, CanonLMForCausalLM
from canonlm.models.cache import documents_from_positions

IDS = torch.arange(36).reshape(2, 18) * 7 % 61
DOC_IDS = torch.tensor([[3] * 5 + [1] * 2 + [3] * 11, [0] * 18])
CLOSE = {"atol": 1e-10, "rtol": 1e-10}


@pytest.mark.parametrize("keep", [1, 5, torch.tensor([0, 7])])
def test_logits_to_keep(small_model, keep):
    model = small_model(canon_set="ABCD")
    places = slice(-keep, None) if isinstance(keep, int) else keep
    assert_close(model(IDS, logits_to_keep=keep).logits, model(IDS).logits[:, places], **CLOSE)


def test_embeddings_beside_ids_are_refused(small_model):
    model = small_model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(IDS, inputs_embeds=model.get_input_embeddings()(IDS))


@pytest.mark.parametrize("fields", FAMILIES.values(), ids=FAMILIES)
def test_rows_without_tokens(small_model, fields):
    """Their output has no elements, nor does it change a gradient or what is cached."""
    model = small_model(**fields)
    for empty in (IDS[:, :0], IDS[:0]):
        for given in ({}, {"doc_ids": empty}, {"attention_mask": empty}, {"position_ids": empty}):
            logits = model(empty, **given).logits
            assert logits.shape == (*empty.shape, 61)
            logits.sum().backward()
            assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        for part in (IDS[:, :0], IDS[:, :10], IDS[:, :0], IDS[:, 10:]):
            logits = model(part, past_key_values=cache).logits
        assert_close(logits, model(IDS).logits[:, 10:], **CLOSE)


def test_no_positions_at_all(small_model):
    model = small_model(canon_set="", rope_dim=0)
    positions = torch.arange(18).flip(0)[None]
    assert_close(model(IDS, position_ids=positions, doc_ids=DOC_IDS * 0).logits, model(IDS).logits, **CLOSE)


def documents(position_ids, mask):
    result = documents_from_positions(torch.tensor([position_ids]), torch.tensor([mask]))
    return None if result is None else result[0].tolist()


def test_repeated_positions_of_padding_are_not_documents():
    assert documents([0, 0, 0, 1, 2], [0, 0, 1, 1, 1]) is None
    assert documents([1, 1, 0, 1, 2], [0, 0, 1, 1, 1]) is None
    assert documents([0, 1, 2, 0, 0], [1, 1, 1, 0, 0]) is None
    assert documents([0, 1, 1, 2, 3], [1, 1, 0, 1, 1]) is None
    assert documents([0, 1, 0, 0, 1], [1, 1, 0, 1, 1]) == [0, 0, 0, 1, 1]
    assert documents([0, 1, 0, 0, 1], [1, 1, 1, 1, 1]) == [0, 0, 1, 2, 2]


HYBRID = {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"]}
WINDOW = {"canon_set": "ABCD", "sliding_window": 4}


@pytest.mark.parametrize(
    ("values", "fields"),
    [
        (FakeTensorMode, {"canon_set": "ABCD"}),
        (lambda: torch.device("meta"), HYBRID),
        (FakeTensorMode, WINDOW),
        (lambda: torch.device("meta"), {"canon_set": "ABC", "mlp": "moe"}),
    ],
)
def test_tensors_without_values(small_model, values, fields):
    """Tools count memory and FLOPs with such. Every form of padding and documents has the shapes of a plain call."""
    config = small_model(**fields).config
    with values():
        model = CanonLMForCausalLM(config).eval()
        ids = torch.zeros(2, 18, dtype=torch.long)
        pairs = torch.ones(2, 1, 18, 18, dtype=torch.bool).tril()
        inputs = [{"attention_mask": ids + 1}, {"position_ids": ids}, {"doc_ids": ids}, {"labels": ids}]
        inputs += [] if fields is WINDOW else [{"attention_mask": pairs}]
        for kwargs in [*inputs, {"attention_mask": ids + 1, "doc_ids": ids}]:
            cache = DynamicCache(config=config) if "labels" not in kwargs else None
            assert model(ids, past_key_values=cache, **kwargs).logits.shape == (2, 18, 61)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{"canon_set": "ABCD"}, HYBRID])
def test_a_decoding_step_with_a_static_cache_does_not_synchronize(small_model, fields):
    """On a GPU. One graph for all steps: test_hf_native.py."""
    model, result, logits = small_model(**fields), Waits(), []
    cache = StaticCache(config=model.config, max_cache_len=24)
    model(IDS[:, :9], past_key_values=cache)
    for t in range(9, IDS.shape[1]):
        token, positions, ones = IDS[:, t : t + 1], torch.full((1, 1), t), torch.ones_like(IDS[:, : t + 1])
        mask = model.create_masks_for_generate(model.config, token[..., None].double(), ones, cache)
        with result, Calls(result.seen):
            output = model(token, attention_mask=mask, position_ids=positions, past_key_values=cache)
        logits.append(output.logits)
    assert_close(torch.cat(logits, dim=1), model(IDS).logits[:, 9:], **CLOSE)
    assert result.ops > 100
    assert result.seen == []


@pytest.mark.parametrize("mixer", ["attention", "gdn"])
def test_hooks_of_all_modules_see_canon_layers(small_model, mixer):
    """Not only where a kernel would read several weights at once."""
    model, seen = small_model(mixers=[mixer], canon_set="AbBCD" if mixer == "gdn" else "ABCD"), []
    with register_module_forward_hook(lambda module, *_: seen.append(module)):
        model(IDS)
    assert {module for module in model.modules() if isinstance(module, CanonLayer)} <= {*seen}


@pytest.mark.parametrize(("mixer", "sites"), [("attention", "ABCDEOM"), ("gdn", "AbBC")])
def test_print_shows_canon_layers_where_they_act(small_model, mixer, sites):
    text = str(small_model(mixers=[mixer], canon_set=sites, num_hidden_layers=1, qk_norm=mixer == "attention").model)
    names = [line.strip(" (").partition(")")[0] for line in text.splitlines() if ": " in line]
    if mixer == "attention":
        inside = ["q_proj", "q_norm", "canonB_q", "k_proj", "k_norm", "canonB_k", "v_proj", "canonB_v", "o_proj"]
        mlp = ["gate_proj", "canonD_gate", "up_proj", "canonD_up", "down_proj", "act_fn"]
        block = ["input_layernorm", "canonA", "self_attn", *inside, "canonO", "post_attention_layernorm", "canonC"]
        assert names == ["embed_tokens", "canonE", "layers", "0", *block, "mlp", *mlp, "canonM", "norm"]
    else:
        assert names.index("canonA") < names.index("mixer") < names.index("q_proj") < names.index("q_conv1d")
        assert names.index("q_conv1d") + 1 == names.index("canonB_q")
