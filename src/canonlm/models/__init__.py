"""One decoder for all architectures, native to transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from canonlm.models.classifiers import CanonLMForSequenceClassification, CanonLMForTokenClassification
from canonlm.models.config import CanonLMConfig
from canonlm.models.modeling import CanonLMForCausalLM, CanonLMModel

AutoConfig.register("canonlm", CanonLMConfig, exist_ok=True)
AutoModel.register(CanonLMConfig, CanonLMModel, exist_ok=True)
AutoModelForCausalLM.register(CanonLMConfig, CanonLMForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(CanonLMConfig, CanonLMForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(CanonLMConfig, CanonLMForTokenClassification, exist_ok=True)

__all__ = [
    "CanonLMConfig",
    "CanonLMForCausalLM",
    "CanonLMForSequenceClassification",
    "CanonLMForTokenClassification",
    "CanonLMModel",
]
