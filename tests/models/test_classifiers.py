"""Classifiers and reward models: transformers' heads on our decoder, from the weights of a language model."""

import pytest
import torch
from families import FAMILIES
from torch.testing import assert_close
from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

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
