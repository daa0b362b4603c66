"""transformers' own model tests, given small models of ours."""

import unittest
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers_tests.test_configuration_common import ConfigTester
from transformers_tests.test_modeling_common import ModelTesterMixin
from transformers_tests.test_training_mixin import TrainingTesterMixin

from canonlm.canonize.canonized_model import canonized_class
from canonlm.models import CanonLMConfig, CanonLMForCausalLM, CanonLMModel
from canonlm.models.modeling import CanonLMPreTrainedModel

pytestmark = pytest.mark.peers

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 512}  # fmt: skip
MODELS = {
    "llama+canon": {"canon_set": "ABCD", "num_key_value_heads": 2},
    "gla": {"mixers": ["gla"], "canon_set": "AbCD"},
    "gdn,gdn,attention": {"mixers": ["gdn", "gdn", "attention"], "canon_sets": ["AbCD", "AbCD", "ACD"],
                          "num_hidden_layers": 3},
    "mamba2": {"mixers": ["mamba2"], "canon_set": "AbCD",
               "mixer_options": {"mamba2": {"state_size": 8, "n_groups": 2}}},
    "moe": {"canon_set": "AC", "mlp": "moe", "num_experts": 4},
    "canonized llama": {"num_key_value_heads": 2},
    "canonized mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}  # fmt: skip


class Sizes:
    """The interface that the library's tests need of a model: sizes, a configuration, inputs."""

    batch_size, seq_length, is_training = 13, 7, True

    def __init__(self, fields, config_class, model_classes):
        self.fields, self.config_class, self.causal_lm_class = {**SIZES, **fields}, config_class, model_classes[-1]
        self.base_model_class = model_classes[0] if len(model_classes) > 1 else None
        self.__dict__.update(self.fields)

    def get_config(self):
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self):
        input_ids = torch.randint(3, self.vocab_size, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids).tril()}


# These tests load files that lack weights. Without `strict=False` our `from_pretrained` refuses such files.
lenient = patch.object(CanonLMPreTrainedModel.from_pretrained.__func__, "__kwdefaults__", {"strict": False})


class Peer(ModelTesterMixin, TrainingTesterMixin):
    all_model_classes = (CanonLMModel, CanonLMForCausalLM)
    config_class = CanonLMConfig
    test_can_init_all_missing_weights_before_2023 = True  # else skipped: our files have no copyright year

    def setUp(self):
        self.model_tester = Sizes(MODELS[self.peer], self.config_class, self.all_model_classes)

    @lenient
    def test_base_model_prefix_loads_base_weights(self):
        super().test_base_model_prefix_loads_base_weights()

    @lenient
    def test_can_init_all_missing_weights(self):
        super().test_can_init_all_missing_weights()

    @lenient
    def test_correct_missing_keys(self):
        super().test_correct_missing_keys()

    @lenient
    def test_model_weights_reload_no_missing_tied_weights(self):
        super().test_model_weights_reload_no_missing_tied_weights()

    def test_config(self):
        ConfigTester(self, config_class=self.config_class, hidden_size=64).run_common_tests()


class TestLlamaCanon(Peer, unittest.TestCase):
    peer = "llama+canon"


class TestGla(Peer, unittest.TestCase):
    peer, has_attentions = "gla", False


class TestGdnHybrid(Peer, unittest.TestCase):
    peer = "gdn,gdn,attention"


class TestMamba2(Peer, unittest.TestCase):
    peer, has_attentions = "mamba2", False


class TestExperts(Peer, unittest.TestCase):
    peer = "moe"


class TestCanonizedLlama(Peer, unittest.TestCase):
    peer, config_class, all_model_classes = "canonized llama", LlamaConfig, (canonized_class(LlamaForCausalLM, "ABCD"),)


class TestCanonizedMixtral(Peer, unittest.TestCase):
    peer, config_class = "canonized mixtral", MixtralConfig
    all_model_classes = (canonized_class(MixtralForCausalLM, "AC"),)


CLASSES = {cls.peer: cls for cls in Peer.__subclasses__()}


def test_the_tests_are_those_of_the_installed_library():
    [pinned] = [line for line in (Path(__file__).parent / "sdist.txt").read_text().splitlines() if line[0] != "#"]
    assert pinned.startswith(f"transformers=={version('transformers')} ")


def test_every_entry_matches_a_test_of_each_of_its_models(expected_entries):
    assert set(MODELS) == set(CLASSES)
    for entry in expected_entries:
        assert entry.models, entry
        for model in entry.models:
            names = [name for name in dir(CLASSES[model]) if name.startswith("test_")]
            for pattern in entry.tests:
                one = type(entry)((pattern,), (model,), "", "", "")
                assert any(one.matches(name, model) for name in names), f"{pattern}: no test of {model}"
