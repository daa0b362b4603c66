"""The decoder with a linear layer in place of the language-model head: for rows (a classifier, a reward model) and for
tokens. All else is transformers' own."""

from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from canonlm.models.modeling import CanonLMPreTrainedModel


class _Classifier(CanonLMPreTrainedModel):
    new_head = "score."


class CanonLMForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """Scores `[B, num_labels]` of rows, from the last token that is not `config.pad_token_id`. `from_pretrained` of a
    language model leaves its head out and starts a new one."""


class CanonLMForTokenClassification(GenericForTokenClassification, _Classifier):
    """Scores `[B, T, num_labels]` of tokens. `from_pretrained` as above."""
