"""Writes small models as self-contained folders, and beside each what transformers generates with it."""

import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from canonlm import CanonLMConfig, CanonLMForCausalLM, canonize
from canonlm.models.published import to_llama

# vLLM's attention on a CPU takes heads of 32 channels or more.
SIZES = {"vocab_size": 128, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PROMPTS = [[i * 7 % 120 + 1 for i in range(length)] for length in (3, 17, 40)]
NEW = 12
MODELS = {
    "llama": {},
    "qk_norm": {"qk_norm": True, "num_key_value_heads": 2},
    "rope": {"rope_dim": 8, "rope_heads": 2, "mlp": "standard", "attention_bias": True, "mlp_bias": True},
    "tied": {"tie_word_embeddings": True, "head_dim": 64, "hidden_act": "relu2"},
    "canon": {"canon_sets": ["", "B"]},
    "recurrent": {"mixers": ["attention", "gdn"]},
    "experts": {"mlp": "moe", "num_experts": 4},
    "alibi": {"alibi": "alibi"},
}


def words():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(SIZES["vocab_size"])}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    chat = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", chat_template=chat)


def save(model, folder, **options):
    rows = []
    for prompt in PROMPTS:
        tokens = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW, pad_token_id=0)
        new = tokens[:, len(prompt) :]
        logits = model(tokens).logits[:, len(prompt) - 1 : -1]
        rows.append([new[0].tolist(), logits.log_softmax(-1).gather(-1, new[..., None])[0, :, 0].tolist()])
    model.save_pretrained(folder, **options)
    words().save_pretrained(folder)
    (folder / "expected.json").write_text(json.dumps(rows))


folder = Path(sys.argv[1])
for name, fields in MODELS.items():
    made = CanonLMForCausalLM(CanonLMConfig(**SIZES, max_position_embeddings=256, initializer_range=0.3, **fields))
    save(made.eval(), folder / name, self_contained=True)
    if name == "llama":
        save(to_llama(made), folder / "converted")
host = LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=256, max_position_embeddings=256))
save(canonize(host, "ABCD").eval(), folder / "canonized", self_contained=True)
