"""PEFT's methods on our models: train, save, load, merge and generate, or refuse in words."""

from dataclasses import fields

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import canonlm
from canonlm import CanonLMConfig, CanonLMForCausalLM

pytestmark = pytest.mark.peers

SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "initializer_range": 0.3, "pad_token_id": 0}  # fmt: skip
OURS = {
    "attention": {"canon_set": "ABCD"},
    "gdn,attention": {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"]},
    "moe": {"canon_set": "AC", "mlp": "moe", "num_experts": 4},
}
IDS = torch.randint(3, 32, (2, 8), generator=torch.Generator().manual_seed(1))

MERGED = {
    "LoRA": peft.LoraConfig(r=2),
    "DoRA": peft.LoraConfig(r=2, use_dora=True),
    "rsLoRA": peft.LoraConfig(r=2, use_rslora=True),
    "LoRA of all linear layers": peft.LoraConfig(r=2, target_modules="all-linear"),
    "LoRA of embeddings and head": peft.LoraConfig(r=2, target_modules=["embed_tokens", "lm_head"]),
    "LoRA with tokens": peft.LoraConfig(r=2, trainable_token_indices=[3, 4]),
    "AdaLoRA": peft.AdaLoraConfig(init_r=4, total_step=10),
    "BOFT": peft.BOFTConfig(boft_block_size=4),
    "C3A": peft.C3AConfig(block_size=8),
    "DeLoRA": peft.DeloraConfig(r=2),
    "FourierFT": peft.FourierFTConfig(n_frequency=20),
    "HRA": peft.HRAConfig(r=2),
    "IA3": peft.IA3Config(feedforward_modules=["o_proj"]),
    "LN tuning": peft.LNTuningConfig(target_modules=["input_layernorm", "norm"]),
    "LoHa": peft.LoHaConfig(r=2),
    "LoKr": peft.LoKrConfig(r=2),
    "MiSS": peft.MissConfig(r=2),
    "OFT": peft.OFTConfig(r=0, oft_block_size=4),
    "RandLora": peft.RandLoraConfig(r=2),
    "RoAd": peft.RoadConfig(group_size=8),
    "SHiRA": peft.ShiraConfig(r=2),
    "trainable tokens": peft.TrainableTokensConfig(token_indices=[3, 4, 5], target_modules=["embed_tokens"]),
    "VB-LoRA": peft.VBLoRAConfig(vector_length=8, num_vectors=8),
    "VeRA": peft.VeraConfig(r=4),
    "WaveFT": peft.WaveFTConfig(n_frequency=20),
}
PROMPTS = {
    "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=3),
    "p-tuning": peft.PromptEncoderConfig(num_virtual_tokens=3),
}
REFUSED = {
    "prefix tuning": (peft.PrefixTuningConfig(num_virtual_tokens=3), "expected a cache"),
    "cartridge": (peft.CartridgeConfig(num_virtual_tokens=3), "expected a cache"),
    "adaption prompt": (
        peft.AdaptionPromptConfig(adapter_layers=1, adapter_len=3, target_modules="self_attn"),
        "Unsupported model type|Canon layer",
    ),
    "LoRA with copies of layers": (
        peft.LoraConfig(layer_replication=[(0, 2), (1, 2)]),
        "layers: expected 2|of a block",
    ),
}


def small(kind):
    """The same weights every time, in double precision."""
    torch.manual_seed(0)
    if kind == "canonized":
        model = canonlm.canonize(LlamaForCausalLM(LlamaConfig(**SIZES)), "ABCD", init="uniform")
    else:
        model = CanonLMForCausalLM(CanonLMConfig(**SIZES, **OURS[kind]))
    return model.double().eval()


def adapted(kind, config):
    config = type(config)(**{field.name: getattr(config, field.name) for field in fields(config) if field.init})
    config.task_type = "CAUSAL_LM"
    if getattr(config, "target_modules", "") is None:
        config.target_modules = {"q_proj", "v_proj", "o_proj"}
    return peft.get_peft_model(small(kind), config)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits[:, -IDS.shape[1] :]


kinds = pytest.mark.parametrize("kind", [*OURS, "canonized"])


@kinds
@pytest.mark.parametrize("method", [*MERGED, *PROMPTS])
def test_trained_saved_loaded_merged(kind, method, tmp_path):
    tuned = adapted(kind, (MERGED | PROMPTS)[method])
    # PEFT 0.21 leaves AdaLoRA's ranknum trainable, on every model, and does not save it.
    parameters = [p for name, p in tuned.named_parameters() if p.requires_grad and "ranknum" not in name]
    optimizer = torch.optim.Adam(parameters, 0.05)
    for _ in range(2):  # of two factors one may start at zero
        tuned.train()(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    truth = logits(tuned)
    assert (truth - logits(small(kind))).abs().max() > 1e-3
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(small(kind), tmp_path)
    torch.testing.assert_close(logits(loaded), truth, atol=1e-9, rtol=0)
    tokens = IDS
    for _ in range(3):
        tokens = torch.cat([tokens, loaded(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(loaded.generate(input_ids=IDS, max_new_tokens=3, do_sample=False, eos_token_id=-1), tokens)
    if method in MERGED:
        torch.testing.assert_close(logits(tuned.merge_and_unload()), truth, atol=1e-5, rtol=0)


@kinds
@pytest.mark.parametrize("method", REFUSED)
def test_refused_in_words(kind, method):
    config, message = REFUSED[method]
    with pytest.raises(ValueError, match=message):
        adapted(kind, config)(input_ids=IDS, labels=IDS)
