"""Classifiers and reward models: transformers' heads on our decoder, from the weights of a language model."""

import json

import pytest
import torch
from families import FAMILIES
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from canonlm import canonize
from canonlm.models.saved_model import saved_model

IDS = torch.arange(24).reshape(2, 12) * 7 % 60 + 1
PADDED = {"right": (slice(0, 7), [1] * 7 + [0] * 5), "left": (slice(5, 12), [0] * 5 + [1] * 7)}


@pytest.mark.parametrize("family", ["llama", "hybrid", "attnres"])
def test_rows_are_scored_at_their_last_token(small_model, family, tmp_path):
    lm = small_model(torch.float64, **FAMILIES[family], pad_token_id=0)
    lm.save_pretrained(tmp_path / "lm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3, dtype=torch.float64)
    model.eval()
    for part, mask in PADDED.values():
        mask = torch.tensor([[1] * 12, mask])
        alone = [lm.model(IDS[:1]).last_hidden_state[0, -1], lm.model(IDS[1:, part]).last_hidden_state[0, -1]]
        labels = torch.tensor([2, 0])
        out = model(IDS * mask, attention_mask=mask, labels=labels)
        assert_close(out.logits, model.score(torch.stack(alone)))
        assert_close(out.loss, torch.nn.functional.cross_entropy(out.logits, labels))
    model.save_pretrained(tmp_path / "own")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "own", dtype=torch.float64).eval()
    assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_tokens_are_scored(small_model, tmp_path):
    lm = small_model(torch.float64, **FAMILIES["hybrid"])
    lm.save_pretrained(tmp_path)
    model = AutoModelForTokenClassification.from_pretrained(tmp_path, num_labels=4, dtype=torch.float64).eval()
    assert_close(model(IDS).logits, model.score(lm.model(IDS).last_hidden_state))


def test_other_tensors_must_fit(small_model, tmp_path):
    model = small_model(torch.float32, **FAMILIES["llama"])
    weights = model.state_dict()
    del weights["model.norm.weight"]
    model.save_pretrained(tmp_path, state_dict=weights)
    with pytest.raises(ValueError, match=r"missing: model\.norm\.weight$"):
        AutoModelForSequenceClassification.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="self_contained: expected False for a classifier"):
        AutoModelForSequenceClassification.from_config(model.config).save_pretrained(tmp_path, self_contained=True)


@pytest.mark.parametrize("kind", ["ours", "canonized", "the library's"])
def test_too_many_classes_are_refused_before_a_table_of_them_is_made(small_model, kind, tmp_path):
    sizes = {"vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "ours":
        small_model(**sizes).save_pretrained(tmp_path)
    else:
        host = LlamaForSequenceClassification(LlamaConfig(**sizes, intermediate_size=32, num_labels=3))
        (canonize(host, "A") if kind == "canonized" else host).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    (saved["host"] if kind == "canonized" else saved)["num_labels"] = 10**12
    (tmp_path / "config.json").write_text(json.dumps(saved))
    with pytest.raises(ValueError, match="num_labels: expected an integer from 0 to 100,000, got 1000000000000"):
        saved_model(str(tmp_path), tmp_path) if kind == "the library's" else AutoModelForCausalLM.from_pretrained(
            tmp_path
        )
