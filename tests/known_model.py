"""A language model whose next-token distributions are known."""

import torch
from transformers.modeling_outputs import CausalLMOutputWithPast

from canonlm import CanonLMConfig, CanonLMForCausalLM


class Knows(CanonLMForCausalLM):
    """`distribution(tokens) -> [len(tokens), vocab]`: the scores of the token after each token of a row. It generates
    without a cache, so that it sees the whole row every time; padding on the left is removed first."""

    def __init__(self, vocab_size, distribution):
        super().__init__(
            CanonLMConfig(vocab_size=vocab_size, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)
        )
        self.distribution = distribution

    def forward(self, input_ids, attention_mask=None, **_):
        rows = []
        for row, real in zip(input_ids.tolist(), self._real(input_ids, attention_mask), strict=True):
            scores = torch.zeros(len(row), self.config.vocab_size)
            scores[len(row) - real :] = torch.as_tensor(self.distribution(row[len(row) - real :]), dtype=torch.float32)
            rows.append(scores)
        return CausalLMOutputWithPast(logits=torch.stack(rows))

    def prepare_inputs_for_generation(self, input_ids, attention_mask=None, **_):
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    @staticmethod
    def _real(input_ids, attention_mask):
        return [input_ids.shape[1]] * len(input_ids) if attention_mask is None else attention_mask.sum(1).tolist()
