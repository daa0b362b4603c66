"""transformers' conventions for a causal model: each table, attribute and loader in which the library looks for one."""

import copy

import pytest
import torch
from test_self_contained import word_tokenizer
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    ContinuousBatchingConfig,
    GenerationConfig,
    Trainer,
    TrainingArguments,
    pipeline,
)
from transformers.cli.serving.model_manager import ModelManager
from transformers.generation.utils import GenerationMixin
from transformers.modelcard import TrainingSummary
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils.generic import find_labels

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models import CanonLMModel

KINDS = {
    "llama+canon": {"canon_set": "ABCD", "tie_word_embeddings": True, "z_loss": "logsumexp"},
    "alibi": {"alibi": "alibi"},
    "hybrid": {"mixers": ["gdn", "attention"], "canon_set": "ACD", "z_loss": "squared_nll"},
    "moe": {"mlp": "moe", "num_experts": 4, "intermediate_size": 24},
}
IDS = torch.arange(36).reshape(2, 18) * 7 % 60 + 1


def trainer(model, folder, **arguments):
    arguments = TrainingArguments(folder, report_to=[], disable_tqdm=True, use_cpu=True, **arguments)
    rows = [{"input_ids": row, "labels": row} for row in IDS]
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)


def names_of_classes(model, folder):
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["canonlm"] == type(model).__name__
    assert MODEL_MAPPING_NAMES["canonlm"] == type(model.base_model).__name__
    assert ModelManager.get_model_modality(model).name == "LLM"


def auto_classes(model, folder):
    opened = AutoConfig.from_pretrained(folder), AutoModel.from_pretrained(folder)
    assert list(map(type, opened)) == [CanonLMConfig, CanonLMModel]
    assert type(AutoModelForCausalLM.from_pretrained(folder)) is CanonLMForCausalLM
    assert opened[0].architectures == ["CanonLMForCausalLM"]
    for kind in (AutoTokenizer, AutoProcessor):
        assert kind.from_pretrained(folder)("w1 w2")["input_ids"] == [1, 2]


def label_smoothing(model, folder):
    logp = model(IDS).logits[:, :-1].log_softmax(-1)
    by_hand = -0.9 * logp.gather(-1, IDS[:, 1:, None]).mean() - 0.1 * logp.mean()
    result = trainer(model, folder, label_smoothing_factor=0.1).evaluate()["eval_loss"]
    assert result == pytest.approx(float(by_hand), rel=1e-5)


def predictions_are_logits(model, folder):
    got = trainer(model, folder).predict([{"input_ids": row, "labels": row} for row in IDS])
    assert_close(torch.from_numpy(got.predictions), model(IDS).logits, atol=1e-5, rtol=0)
    assert find_labels(type(model)) == ["labels"]


def loss_of_parts(model, folder):
    """Trainer divides by the labels of all micro-batches, as the forward takes `num_items_in_batch`."""
    assert trainer(model, folder).model_accepts_loss_kwargs
    parts = sum(model(ids[None], labels=ids[None], num_items_in_batch=34).loss for ids in IDS)
    assert_close(parts, model(IDS, labels=IDS).loss)


@torch.enable_grad()
def resuming(model, folder):
    settings = {
        "max_steps": 8,
        "save_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
    }
    full, again = (trainer(each, folder / "run", **settings) for each in (model, copy.deepcopy(model)))
    full.train()
    first, *_, last = [row["loss"] for row in full.state.log_history if "loss" in row]
    assert last < first / 2
    again.train(resume_from_checkpoint=str(folder / "run" / "checkpoint-4"))
    assert again.state.global_step == 8
    assert_close(again.model.state_dict(), full.model.state_dict(), atol=0, rtol=0)


def parts(model, folder):
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert model.get_output_embeddings() is model.lm_head
    assert model.get_decoder() is model.base_model is model.model
    assert model.can_generate()
    assert isinstance(model, GenerationMixin)
    assert model.main_input_name == "input_ids"
    assert model.config.get_text_config() is model.config
    assert model.model(IDS, logits_to_keep=3).last_hidden_state.shape[1] == IDS.shape[1]  # for the head, says TRL


def a_loss_of_ones_own(model, folder):
    model.loss_function = lambda logits, labels, vocab_size, **more: logits.sum() + labels.sum() + vocab_size
    outputs = model(IDS, labels=IDS)
    assert outputs.loss == outputs.logits.sum() + IDS.sum() + model.config.vocab_size
    assert_close(model(IDS, labels=IDS, loss_only=True).loss, outputs.loss)


def tied_weights(model, folder):
    tied = model.config.tie_word_embeddings
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model.all_tied_weights_keys == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})


def blocks_and_devices(model, folder):
    from accelerate import infer_auto_device_map

    block = max(sum(p.nbytes for p in layer.parameters()) for layer in model.model.layers)
    places = infer_auto_device_map(model, {0: 2 * block, "cpu": "1GB"}, no_split_module_classes=model._no_split_modules)
    assert not any(name.count(".") > 2 for name in places), places
    assert set(model._no_split_modules) == {type(layer).__name__ for layer in model.model.layers}
    assert set(model._skip_keys_device_placement) == {"cache", "past_key_values"}


def supported_kernels(model, folder):
    """On the class, the usual value; on a model, that of its configuration."""
    cls, alibi = type(model), model.config.alibi is not None
    assert not cls._is_stateful
    assert all([cls._supports_flash_attn, cls._supports_flex_attn, cls._supports_sdpa, cls._supports_attention_backend])
    assert (model._is_stateful, model._supports_flash_attn) == (model.config.is_recurrent, not alibi)
    model.set_attn_implementation("eager")
    outputs = model(IDS, output_attentions=True, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert len(outputs.attentions) == model.config.mixers.count("attention")
    assert_close(model(IDS, return_dict=False, labels=IDS)[1], outputs.logits)


def text_generation(model, folder):
    write = pipeline("text-generation", model=str(folder), device="cpu")
    options = {"max_new_tokens": 3, "do_sample": False}
    [[first], [second]] = write(["w1 w2", "w3"], batch_size=2, return_tensors=True, **options)
    assert first["generated_token_ids"] == model.generate(torch.tensor([[1, 2]]), **options)[0].tolist()
    assert second["generated_token_ids"][-3:] == model.generate(torch.tensor([[3]]), **options)[0, 1:].tolist()


def continuous_batching(model, folder):
    prompts, options = [[1, 2, 3, 4, 5], [7, 8, 9]], {"max_new_tokens": 4, "do_sample": False}
    settings = GenerationConfig(**options, eos_token_id=-1, pad_token_id=0)
    batching = ContinuousBatchingConfig(num_blocks=4, block_size=32, max_batch_tokens=32)
    batch = {"generation_config": settings, "continuous_batching_config": batching, "progress_bar": False}
    if set(model.config.layer_types) != {"full_attention"} or model.config.alibi is not None:
        with pytest.raises(ValueError, match="generate_batch: expected a model of attention layers alone"):
            model.generate_batch(prompts, **batch)
        return
    for prompt, answer in zip(prompts, model.generate_batch(prompts, **batch).values(), strict=True):
        assert answer.generated_tokens == model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


def generation_settings(model, folder):
    """They are kept apart from the configuration."""
    assert isinstance(model.generation_config, GenerationConfig)
    model.generation_config.max_new_tokens = 3
    assert model.generate(IDS).shape == (2, 21)


def card(model, folder):
    summary = TrainingSummary.from_trainer(trainer(model, folder), model_name="m", finetuned_from="x")
    assert summary.tasks == "text-generation"


def plans(model, folder):
    """No plan of the library's for tensor or pipeline parallelism; the one for FSDP names parts that exist."""
    assert not model.config.base_model_tp_plan
    assert not model.config.base_model_pp_plan
    names = [name.removesuffix(".*") for name in getattr(model.config, "base_model_fsdp_plan", {})]
    assert all(hasattr(model.model, name) for name in names)


def adapters(model, folder):
    from peft import LoraConfig, get_peft_model

    assert get_peft_model(copy.deepcopy(model), LoraConfig(task_type="CAUSAL_LM")).targeted_module_names
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2))
    assert adapted.targeted_module_names
    assert not any("lm_head" in name for name in adapted.targeted_module_names)
    assert_close(adapted(IDS).logits, AutoModelForCausalLM.from_pretrained(folder)(IDS).logits)
    label_smoothing(adapted, folder)


CONVENTIONS = [names_of_classes, auto_classes, label_smoothing, predictions_are_logits, loss_of_parts,
               a_loss_of_ones_own, resuming, parts, tied_weights, blocks_and_devices, supported_kernels,
               text_generation, continuous_batching, generation_settings, card, plans, adapters]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_convention_of_the_library(small_model, tmp_path, kind):
    model = small_model(torch.float32, **KINDS[kind])
    model.save_pretrained(tmp_path)
    word_tokenizer(model.config.vocab_size).save_pretrained(tmp_path)
    for check in CONVENTIONS:
        with torch.no_grad():
            check(AutoModelForCausalLM.from_pretrained(tmp_path).eval(), tmp_path)
