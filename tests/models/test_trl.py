"""TRL's SFTTrainer: rows padded, packed or put one after another give the mean of the loss of each row alone."""

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from canonlm import CanonLMConfig, CanonLMForCausalLM, canonize

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"initializer_range": 0.3}
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
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
    for layout in ({"max_length": 32}, {"max_length": 32, "packing": True}, {"max_length": None, "padding_free": True}):
        arguments = SFTConfig(
            tmp_path, **layout, max_steps=1, per_device_train_batch_size=8, learning_rate=0.0, eos_token="w2",
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
        )  # fmt: skip
        rows = Dataset.from_dict({"input_ids": ROWS})
        trainer = SFTTrainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
        trainer.train()
        assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, abs=1e-5), layout
