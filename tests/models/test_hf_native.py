"""Every kind of model in the usual workflows of transformers: save, load, generate, train, adapt, compile."""

import copy
import pickle
import re

import pytest
import torch
from families import FAMILIES
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch._dynamo.testing import CompileCounter
from torch.testing import assert_close
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    TorchAoConfig,
)
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_for_generation

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.canon import CanonLayer
from canonlm.core.cache_name import CACHE
from canonlm.models import CanonLMModel
from canonlm.models.config import MIXERS

IDS = torch.arange(36).reshape(2, 18) * 7 % 60 + 1
SAME = {"atol": 0, "rtol": 0}
CLOSE = {"atol": 1e-10, "rtol": 1e-10}
BF16 = torch.bfloat16

QUICK, SLOW = ("llama", "moe", "hybrid"), ("gdn", "sites", "window", "alternating", "mla")
every_family = pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
"""The hybrid has a layer of every mixer, so those are not repeated one by one: gdn is a model with a single one."""
MIXERS_ALONE = {"mlp": "none", "canon_set": "AB"}
"""The hybrid for compilers, which take long for its MLPs with Canon layers: llama has one."""


@pytest.fixture
def model(small_model, family):
    return small_model(torch.float32, **FAMILIES[family])


@pytest.fixture
def double_model(small_model, family):
    return small_model(torch.float64, **FAMILIES[family])


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


# Modules made later


def test_embeddings_grow_as_those_of_a_larger_vocabulary(small_model):
    for changes in ({}, {"tie_word_embeddings": True}, {"initializer": "fan_in"}):
        model = CanonLMForCausalLM(CanonLMConfig(vocab_size=20, hidden_size=32, num_hidden_layers=1, **changes))
        larger = CanonLMForCausalLM(CanonLMConfig(vocab_size=30, hidden_size=32, num_hidden_layers=1, **changes))
        model.resize_token_embeddings(30, mean_resizing=False)
        assert_close(state(model), state(larger), **SAME)
        assert model.config.vocab_size == 30


@every_family
def test_weights_are_made_on_a_device_after_the_model(model):
    with torch.device("meta"):
        empty = type(model)(model.config)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(7.0)
    empty.init_weights()
    assert_close(state(empty), state(type(model)(model.config)), **SAME)


# Saving and loading


@every_family
def test_saved_and_loaded_is_the_same(model, tmp_path):
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is CanonLMConfig
    assert {**config.to_dict(), "_name_or_path": ""} == {**model.config.to_dict(), "_name_or_path": ""}
    for options in ({}, {"device_map": "cpu"}, {"device_map": "auto"}):
        if options:
            pytest.importorskip("accelerate")
        loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, **options)
        assert type(loaded) is CanonLMForCausalLM
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert_close(state(loaded), state(model), **SAME)
        assert_close(loaded.eval()(IDS).logits, model(IDS).logits, **SAME)
    decoder = AutoModel.from_pretrained(tmp_path).eval()
    assert type(decoder) is CanonLMModel
    assert_close(decoder(IDS).last_hidden_state, model.model(IDS).last_hidden_state, **SAME)


@every_family
def test_in_bfloat16(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=BF16).eval()
    assert {value.dtype for value in loaded.state_dict().values()} == {BF16}
    exact = model(IDS).logits
    rounded = model.to(BF16)(IDS).logits
    assert rounded.dtype == BF16
    assert_close(loaded(IDS).logits, rounded, **SAME)
    assert 0 < (rounded.float() - exact).norm() / exact.norm() < 0.3


def _with_torchao(monkeypatch):
    from torchao.quantization import Int8WeightOnlyConfig

    return TorchAoConfig(Int8WeightOnlyConfig()), lambda weight: weight.dequantize()


def _with_bitsandbytes(monkeypatch):
    from bitsandbytes.functional import dequantize_4bit

    # Where a processor has products of bfloat16, layers would use those, and rearrange their weights for it.
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    return BitsAndBytesConfig(load_in_4bit=True), lambda weight: dequantize_4bit(weight.data, weight.quant_state)


@pytest.mark.peers
@pytest.mark.parametrize("family", ["llama", "gdn", "moe"])
@pytest.mark.parametrize("package", [_with_torchao, _with_bitsandbytes])
def test_a_quantized_folder_loads_again(small_model, family, package, tmp_path, monkeypatch):
    """It computes what its rounded weights do, and a damaged one is refused."""
    settings, exact = package(monkeypatch)
    plain = small_model(torch.float32, **{**FAMILIES[family], "hidden_size": 64, "intermediate_size": 64})
    plain.save_pretrained(tmp_path / "plain")
    quantized = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=settings)
    quantized.save_pretrained(tmp_path / "quantized")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")
    changed = 0
    with torch.no_grad():
        for path, part in again.named_modules():
            if isinstance(part, torch.nn.Linear) and path != "lm_head" and "router" not in path:
                changed += 1
                plain.get_submodule(path).weight.copy_(exact(part.weight))
        assert changed
        assert_close(again(IDS).logits, quantized(IDS).logits, **SAME)
        assert_close(again(IDS).logits, plain(IDS).logits, atol=1e-3, rtol=1e-3)
    file = tmp_path / "quantized" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        notes, tensors = opened.metadata(), load_file(file)
    for name in ("model.norm.weight", next(name for name in tensors if "o_proj" in name)):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, metadata=notes)
        with pytest.raises((ValueError, RuntimeError), match=r"missing: |issues during automatic conversion"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "quantized")


@every_family
def test_missing_keys_are_initialised_as_usual_and_others_are_loaded(model, tmp_path):
    fresh = state(CanonLMForCausalLM(model.config))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    saved = load_file(file)
    for first in range(4):
        keys = set(sorted(saved)[first::4])
        save_file({k: v for k, v in saved.items() if k not in keys}, file, metadata={"format": "pt"})
        torch.manual_seed(99)
        loaded, info = CanonLMForCausalLM.from_pretrained(tmp_path, output_loading_info=True, strict=False)
        assert set(info["missing_keys"]) == keys
        assert_close(state(loaded), {**state(model), **{key: fresh[key] for key in keys}}, **SAME)


@every_family
def test_copies_are_equal_and_independent(model):
    expected = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_close(twin(IDS).logits, expected, **SAME)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
    assert_close(model(IDS).logits, expected, **SAME)


@every_family
def test_hidden_states_and_attentions_on_request(model, family):
    model.set_attn_implementation("eager")
    output = model.model(IDS, output_hidden_states=True, output_attentions=True)
    first, *_, last = output.hidden_states
    assert len(output.hidden_states) == 1 + len(model.model.layers)
    stream = model.model.embed_tokens(IDS)
    assert_close(first, model.model.canonE(stream) if "E" in model.config.sites(0) else stream, **SAME)
    assert_close(last, output.last_hidden_state, **SAME)
    assert len(output.attentions) == sum(MIXERS[mixer].attends for mixer in model.config.mixers)
    assert all(weights.shape == (2, 4, 18, 18) for weights in output.attentions)


# Training


DOC_IDS = torch.tensor([[3] * 5 + [1] * 2 + [3] * 11, [0] * 18])


def loss_and_gradients(model, doc_ids=None, **compiler):
    model.zero_grad()
    call = torch.compile(model, fullgraph=True, **compiler) if compiler else model
    loss = call(input_ids=IDS, labels=IDS, use_cache=False, doc_ids=doc_ids).loss
    loss.backward()
    return {"loss": loss.detach(), **{name: value.grad for name, value in model.named_parameters()}}


@pytest.mark.parametrize("reentrant", [True, False])
@every_family
def test_gradient_checkpointing_changes_nothing(double_model, reentrant):
    double_model.train()
    expected = loss_and_gradients(double_model, DOC_IDS)
    double_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    double_model.enable_input_require_grads()
    assert_close(loss_and_gradients(double_model, DOC_IDS), expected, **CLOSE)


@pytest.mark.parametrize("taps", [{"modules_to_save": ["canonA"]}, {"target_parameters": ["canonA.weight"]}])
@every_family
def test_lora(double_model, tmp_path, taps):
    """On PEFT's default modules, and on taps."""
    peft = pytest.importorskip("peft")
    plain = double_model(IDS).logits.detach()
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=4, **taps)
    adapted = peft.get_peft_model(copy.deepcopy(double_model), lora)
    assert_close(adapted(IDS).logits, plain, **CLOSE)
    optimizer = torch.optim.Adam(adapted.parameters(), lr=0.01)
    for _ in range(2):  # one of the two factors starts at zero, so the other only changes in the second step
        adapted(IDS, labels=IDS).loss.backward()
        optimizer.step()
    trained = {name for name, parameter in adapted.named_parameters() if parameter.grad is not None}
    assert any("proj.lora_A" in name for name in trained)
    has_taps = any("canonA." in name for name, _ in double_model.named_parameters())  # an average has none
    assert any("canonA." in name for name in trained) == has_taps
    assert all(".lora_" in name or "canonA.modules_to_save" in name for name in trained)
    expected = adapted.eval()(IDS).logits.detach()
    assert (expected - plain).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(copy.deepcopy(double_model), tmp_path)
    assert_close(reloaded.eval()(IDS).logits, expected, **CLOSE)
    assert_close(adapted.merge_and_unload()(IDS).logits, expected, **CLOSE)


# Precision


@every_family
@pytest.mark.parametrize("stream", [BF16, torch.float32])
def test_under_autocast_canon_never_widens_the_stream(model, stream):
    """Canon layers in mixers and MLPs stay in the bfloat16 of the products around them. float32 embeddings keep the
    stream in float32, as in transformers' Llama."""
    seen = {stream: set(), BF16: set()}
    for name, module in model.named_modules():
        if isinstance(module, CanonLayer) or type(module).__name__ == "DecoderLayer":
            kind = seen[BF16 if re.search("canon[BDOM]|conv1d", name) else stream]
            module.register_forward_hook(
                lambda m, i, out, kind=kind: kind.add((out if torch.is_tensor(out) else out[0]).dtype)
            )
    embeds = model.get_input_embeddings()(IDS).to(stream)
    with torch.autocast("cpu", BF16):
        loss = model.train()(inputs_embeds=embeds, labels=IDS, use_cache=False).loss
    loss.backward()
    assert {dtype: {dtype} for dtype in seen} == seen
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


# Compilers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "doc_ids", "backend"),
    [
        ("hybrid", MIXERS_ALONE, None, "aot_eager"),
        ("sites", {"num_hidden_layers": 1, "alibi": "hard"}, DOC_IDS, "aot_eager"),
        ("moe", {"num_hidden_layers": 1, "alibi": "alibi"}, DOC_IDS, "inductor"),
        ("llama", {"num_hidden_layers": 1}, DOC_IDS, "inductor"),
    ],
)
def test_compiles_forward_and_backward_without_graph_breaks(
    small_model, monkeypatch, family, changes, doc_ids, backend
):
    monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda text, *_, **__: pytest.fail(text), False)
    model = small_model(**{**FAMILIES[family], **changes}).train()
    expected = loss_and_gradients(model, doc_ids)
    torch._dynamo.reset()
    got = loss_and_gradients(model, doc_ids, backend=backend)
    torch._dynamo.reset()
    assert_close(got, expected, atol=1e-9, rtol=1e-9)


# Requirements of transformers' own model tests


@every_family
def test_generation_from_embeddings(double_model):
    model, prompt = double_model.eval(), IDS[:, :5]
    for options in ({}, {"attention_mask": torch.tensor([[0, 1, 1, 1, 1]]).expand(len(prompt), -1)}):
        options = {"max_new_tokens": 6, "do_sample": False, **options}
        embeds = model.get_input_embeddings()(prompt)
        assert torch.equal(model.generate(inputs_embeds=embeds, **options), model.generate(prompt, **options)[:, 5:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes"), [("llama", {}), ("moe", {"num_hidden_layers": 1}), ("hybrid", MIXERS_ALONE)]
)
def test_a_static_cache_compiles_once(small_model, family, changes):
    """As with the library's Llama: once for the prompt, once for all tokens after it."""
    model = small_model(**{**FAMILIES[family], **changes}).eval()
    counter = CompileCounter()
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static"}
    plain = {**options, "cache_implementation": None}
    torch.compiler.reset()
    expected = model.generate(IDS[:, :5], **plain)
    model.forward = torch.compile(model.forward, backend=counter, dynamic=False)
    assert torch.equal(model.generate(IDS[:, :5], **options), expected)
    assert counter.frame_count == 2
    del model.forward
    padded = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1]] * (len(IDS) - 1) + [[1] * 5])}
    assert torch.equal(model.generate(IDS[:, :5], **padded, **options), model.generate(IDS[:, :5], **padded, **plain))


def test_hooks_and_adapters_of_the_router_are_not_bypassed(small_model, tmp_path):
    """Offloaded weights return in a hook on the module, and LoRA wraps it."""
    accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
    model = small_model(torch.float32, **FAMILIES["moe"])
    with torch.no_grad():
        expected = model(IDS).logits
        offloaded = accelerate.cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
        assert_close(offloaded(IDS).logits, expected, rtol=0, atol=0)
        on_disk = accelerate.disk_offload(copy.deepcopy(model), str(tmp_path), execution_device=torch.device("cpu"))
        assert_close(on_disk(IDS).logits, expected, rtol=0, atol=0)
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["router"], init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(model), lora)
    assert (adapted(IDS).logits - expected).abs().max() > 1e-3
    adapted.train()(IDS, labels=IDS).loss.backward()
    gradients = [p.grad for name, p in adapted.named_parameters() if "lora_" in name]
    assert gradients
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.slow
def test_exported_steps_with_a_static_cache(small_model):
    """`make test-peers` does not run the library's tests of export, one of which failed here: the length of a filled
    static cache is a tensor, whose value an exported graph cannot read."""
    model = small_model(torch.float32, canon_set="A", num_hidden_layers=1)
    static = GenerationConfig(cache_implementation="static", max_length=24, max_new_tokens=None)
    given = {"input_ids": IDS[:, :6]}
    for name, stage in decompose_for_generation(model, given, static, multi_token_decode=True).items():
        forward, inputs = stage
        expected = forward(**copy.deepcopy(inputs)).logits
        exported = DynamoExporter().export(forward, inputs, config=DynamoConfig(dynamic=True))
        exported = getattr(exported, "program", exported).module()  # transformers 5.17 returns the program itself
        assert_close(
            exported(**copy.deepcopy(inputs)).logits,
            expected,
            rtol=1e-5,
            atol=1e-6,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize(("config", "works"), [({}, True), ({"canon_set": "A"}, False), ({"mixers": ["gla"]}, False)])
def test_prefix_tuning_is_refused_where_states_have_no_prefix(small_model, config, works):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(
        small_model(**config), peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    if works:
        tuned(IDS, labels=IDS).loss.backward()
    else:
        with pytest.raises(ValueError, match=rf"^{CACHE}: expected a cache made with config=model.config"):
            tuned(IDS, labels=IDS)


def test_copies_of_layers_are_refused(small_model):
    """As PEFT's layer_replication makes them."""
    model = small_model(canon_set="A")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    with pytest.raises(ValueError, match=r"^layers: expected 2, as in the configuration, got 3"):
        model(IDS)
