"""A small tokenizer that adds a BOS token to texts, and decoders for it whose greedy choices are clear."""

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models.names import resolve
from canonlm.models.published import to_llama

CONTEXT = 48
SENTENCES = [
    "The ferry leaves the harbour before seven, and the gulls follow it.",
    "A baker across the street sells rye bread and small round cakes.",
    "Question: which of the two lamps is brighter? Answer: the left one.",
    "Snow fell on the orchard; nobody had covered the young trees.",
    "He counted the letters twice, put them back, and closed the drawer.",
]


def make_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([*SENTENCES, "Answer: A B C" * 20], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_decoder(arch, dtype=torch.float32):
    fields = resolve(arch, hidden_size=32, num_heads=4)
    config = CanonLMConfig(
        **fields,
        vocab_size=len(make_tokenizer()),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
    )
    model = CanonLMForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                parameter.copy_(noise * (1.0 if "embed" in name else parameter.shape[-1] ** -0.5))
    return model.to(dtype)


def greedily(model, ids, most, end):
    """The tokens after `ids`, up to `end`, of one text, without a cache or padding: the whole text is read for each."""
    written = []
    while len(written) < most:
        with torch.no_grad():
            logits = model(torch.tensor([[*ids, *written]]), use_cache=False).logits[0, -1]
        first, second = logits.topk(2).values.tolist()
        assert first - second > 1e-6, "the comparison needs choices that rounding cannot change"
        if (token := int(logits.argmax())) == end:
            break
        written.append(token)
    return written


def save_llama(folder):
    """Save the weights of `make_decoder("llama")` as transformers' Llama, with the tokenizer."""
    to_llama(make_decoder("llama")).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
