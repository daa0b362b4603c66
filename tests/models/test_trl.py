"""TRL gives the losses of each row alone: SFTTrainer (rows padded, packed, one after another) and RewardTrainer."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from canonlm import CanonLMConfig, CanonLMForCausalLM, canonize

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.3}
WORDS = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=WORDS, pad_token="w1", eos_token="w2")
ROWS = [[(i * 7 + j * 5) % 60 + 3 for j in range(4 + i)] for i in range(8)]


def canonized():
    torch.manual_seed(0)
    return canonize(LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=64)), "ABCD", init="uniform")


MODELS = {
    "canon": lambda: CanonLMForCausalLM(CanonLMConfig(**SIZES, canon_set="ABCD")),
    "hybrid": lambda: CanonLMForCausalLM(CanonLMConfig(**SIZES, mixers=["gdn", "attention"])),
    "canonized": canonized,
}


@pytest.mark.parametrize("kind", MODELS)
def test_sft_trainer(kind, tmp_path):
    model = MODELS[kind]().eval()
    losses = []
    for row in ROWS:
        ids = torch.tensor([row])
        losses.append(torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="none"))
    expected = torch.cat(losses).mean().item()
    for layout in ({"max_length": 32}, {"max_length": 32, "packing": True}, {"max_length": None, "padding_free": True}):
        arguments = SFTConfig(
            tmp_path, **layout, max_steps=1, per_device_train_batch_size=8, learning_rate=0.0, eos_token="w2",
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        )  # fmt: skip
        rows = Dataset.from_dict({"input_ids": ROWS})
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=TOKENIZER)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5), layout


def test_reward_trainer(tmp_path):
    """Its loss is that of scores of each row alone; it opens a language model's folder by name."""
    MODELS["hybrid"]().save_pretrained(tmp_path / "lm")
    arguments = RewardConfig(
        tmp_path / "out", max_steps=1, per_device_train_batch_size=4, learning_rate=0.0, max_length=32, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, gradient_checkpointing=False,
    )  # fmt: skip
    rows = Dataset.from_dict({"chosen_ids": ROWS[:4], "rejected_ids": ROWS[4:]})
    trainer = RewardTrainer(str(tmp_path / "lm"), arguments, train_dataset=rows, processing_class=TOKENIZER)
    model = trainer.model.eval()
    scores = torch.stack([model(torch.tensor([row])).logits[0, 0] for row in ROWS])
    trainer.train()
    expected = -torch.nn.functional.logsigmoid(scores[:4] - scores[4:]).mean().item()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5)
