"""Canonized models with common tools: PEFT, Trainer, accelerate, activation checkpointing, compilers."""

import copy
import functools
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tiny_hosts import PACKED, canonized, differ, host, ids, logits, with_taps
from torch import nn
from torch.utils.checkpoint import checkpoint

import canonlm


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(model: Any, **options: Any) -> dict[str, torch.Tensor]:
    model.train()
    model.zero_grad()
    model(ids(), labels=ids(), **options).loss.backward()
    return gradients(model)


@pytest.mark.parametrize("options", [{}, PACKED], ids=["plain", "packed"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_blocks_get_the_same_layout(options, reentrant):
    model = canonized("llama")
    truth = train(model, **options)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    again = train(model, **options)
    assert max(differ(again[name], truth[name]) for name in truth) < 1e-12


def test_blocks_recomputed_by_others_get_the_same_layout():
    model = canonized("llama")
    truth = train(model, **PACKED)
    for block in model.model.layers:
        block.forward = _recomputed(block.forward)
    again = train(model, **PACKED)
    assert max(differ(again[name], truth[name]) for name in truth) < 1e-12


class Around(nn.Module):
    """A module around a block, like torch's checkpoint_wrapper, which calls the whole block again."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(self.block, **kwargs), *args, use_reentrant=self.reentrant)


OTHER = {"position_ids": torch.cat([torch.arange(7), torch.arange(3)])[None].expand(2, -1), "use_cache": False}


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_forwards_before_one_backward(reentrant):
    """As in preference learning: blocks that are recomputed from outside belong to the right forward."""
    model = canonized("llama").train()

    def both() -> dict[str, torch.Tensor]:
        model.zero_grad()
        losses = [model(ids(), labels=ids(), **options).loss for options in (PACKED, OTHER)]
        (losses[0] - 2 * losses[1]).backward()
        return {name.replace(".block.", "."): tensor for name, tensor in gradients(model).items()}

    truth = both()
    for index, block in enumerate(model.model.layers):
        model.model.layers[index] = Around(block, reentrant)
    again = both()
    assert max(differ(again[name], truth[name]) for name in truth) < 1e-12
    # One tensor read by two forwards says nothing about which of them is recomputed.
    embeddings = model.get_input_embeddings()(ids())
    losses = [model(inputs_embeds=embeddings, labels=ids(), **options).loss for options in (PACKED, OTHER)]
    with pytest.raises(ValueError, match="which one forward only has used"):
        (losses[0] - 2 * losses[1]).backward()


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_threads_at_once(compiled):
    """Rows of the same length with other padding: every thread's layout fits every other's call."""
    model = canonized("llama", "AC" if compiled else None, dtype=torch.float32)
    tokens = [ids(1, 12, seed) for seed in range(4)]
    masks = [(torch.arange(12) >= 3 * row).long()[None] for row in range(4)]
    truth = [logits(model, tokens[row], attention_mask=masks[row]) for row in range(4)]
    call: Any = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    if compiled:
        logits(call, tokens[0], attention_mask=masks[0])
    barrier = threading.Barrier(4)

    def work(row: int) -> float:
        barrier.wait()
        answers = [logits(call, tokens[row], attention_mask=masks[row]) for _ in range(10)]
        return max(differ(answer[:, 3 * row :], truth[row][:, 3 * row :]) for answer in answers)

    with ThreadPoolExecutor(4) as pool:
        assert max(pool.map(work, range(4))) < 1e-5
    torch._dynamo.reset()


def test_a_model_called_within_another_and_after_an_error():
    outer, inner = canonized("llama"), canonized("llama", "AC")
    truth = logits(outer, ids())
    nested: list[torch.Tensor] = []
    hook = outer.model.layers[0].mlp.register_forward_pre_hook(lambda *_: nested.append(logits(inner, ids(1, 5))))
    assert torch.equal(logits(outer, ids()), truth)
    assert torch.equal(nested[0], logits(inner, ids(1, 5)))
    hook.remove()
    with pytest.raises(IndexError):
        outer(ids() + 1000)
    with pytest.raises(ValueError, match="not of a block alone"):
        outer.model.layers[0](torch.randn(2, 10, 32, dtype=torch.float64))
    assert torch.equal(logits(outer, ids()), truth)


def _recomputed(forward: Any) -> Any:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def test_lora_beside_canon_layers(tmp_path):
    """Canon-B comes after the projection with its adapter, so merged weights compute the same."""
    peft = pytest.importorskip("peft")
    model = canonized("llama", "ABCD")
    taps = sorted({name.split(".")[-2] for name, _ in model.named_parameters() if "canon_" in name})
    targets = ["q_proj", "v_proj", "gate_proj"]
    config = peft.LoraConfig(r=2, target_modules=targets, modules_to_save=taps, task_type="CAUSAL_LM")
    tuned: Any = peft.get_peft_model(copy.deepcopy(model), config)
    trained = {name for name, p in tuned.named_parameters() if p.requires_grad}
    assert any("canon_A" in name for name in trained)
    assert all("lora" in name or "canon_" in name for name in trained)
    optimizer = torch.optim.SGD([p for p in tuned.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        tuned.train()
        tuned(ids(), labels=ids()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = logits(tuned.eval(), ids())
    assert differ(after, logits(model, ids())) > 1e-3
    tuned.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()
    assert differ(logits(loaded, ids()), after) < 1e-9
    full = tuned.merge_and_unload()
    assert type(full) is type(model)
    assert differ(logits(full, ids()), after) < 1e-9
    with pytest.raises(ValueError, match="before PEFT"):
        canonlm.canonize(peft.get_peft_model(host("llama"), config), "A")


def test_an_adapter_of_a_model_canonized_in_memory_does_not_name_the_host(tmp_path):
    """Its own folder is a base that gives the same model."""
    from transformers import AutoModelForCausalLM

    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["canon_A"], task_type="CAUSAL_LM")
    host("llama", torch.float32).save_pretrained(tmp_path / "host")
    model = with_taps(canonlm.canonize(AutoModelForCausalLM.from_pretrained(tmp_path / "host"), "ABCD"))
    model.save_pretrained(tmp_path / "canonized")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "wrong")
    with pytest.raises(OSError, match=r"host\+canon=ABCD"):
        peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "wrong")
    tuned = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "canonized"), config)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.1)
    tuned.save_pretrained(tmp_path / "right")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "right").eval()
    assert differ(logits(loaded, ids()), logits(tuned.eval(), ids())) < 1e-6
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "host")
    assert canonlm.decanonize(canonlm.canonize(plain, "A")).name_or_path == str(tmp_path / "host")


class Other(nn.Module):
    """In the place of a linear layer, which is only called."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear, self.out_features, self.in_features = linear, linear.out_features, linear.in_features

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def replaced(model: Any) -> Any:
    """Another module around each projection, and another forward in each MLP."""
    for block in model.model.layers:
        for path in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            block.set_submodule(path, Other(block.get_submodule(path)))
        block.mlp.forward = types.MethodType(plain_mlp, block.mlp)
    return model


def plain_mlp(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    return mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))


def quantised_by_torch(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def quantised_by_torchao(model: Any) -> Any:
    from torchao import quantization

    quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    return model


def parametrized(model: Any) -> Any:
    for block in model.model.layers:
        for name in ("self_attn.q_proj", "mlp.gate_proj"):
            nn.utils.parametrizations.weight_norm(block.get_submodule(name))
    return model


@pytest.mark.parametrize(
    "change", [replaced, parametrized, quantised_by_torch, pytest.param(quantised_by_torchao, marks=pytest.mark.peers)]
)
def test_parts_changed_before_or_after_keep_their_canon_layers(change):
    after = change(canonized("llama", "ABCD", dtype=torch.float32))
    before = with_taps(canonlm.canonize(change(host("llama", torch.float32)), "ABCD"))
    assert torch.equal(logits(after, ids()), logits(before, ids()))
    again = change(canonized("llama", "ABCD", dtype=torch.float32))  # Canon layers are removed before it is called
    assert torch.equal(logits(canonlm.decanonize(again), ids()), logits(change(host("llama", torch.float32)), ids()))


@pytest.mark.peers
@pytest.mark.parametrize("kind", ["torchao", "bitsandbytes"])
def test_quantised_folders(kind, tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        config: Any = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        # Where a processor has products of bfloat16, layers would use those, which need 64 channels.
        monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    canonized("llama", "ABCD", dtype=torch.float32).save_pretrained(tmp_path / "canonized")
    host("llama", torch.float32).save_pretrained(tmp_path / "host")
    load = AutoModelForCausalLM.from_pretrained
    plain, model = (load(tmp_path / name, quantization_config=config) for name in ("host", "canonized"))
    truth = logits(with_taps(canonlm.canonize(plain, "ABCD")).eval(), ids())
    assert torch.equal(logits(model.eval(), ids()), truth)
    model.save_pretrained(tmp_path / "quantised")
    assert torch.equal(logits(load(tmp_path / "quantised").eval(), ids()), truth)


@pytest.mark.parametrize("first", [True, False])
def test_hooks_of_accelerate_before_and_after(first, tmp_path):
    """The weights are on disk until a module is called."""
    accelerate = pytest.importorskip("accelerate")
    truth, model = canonized("llama", "ABCD"), host("llama")
    device_map = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    device_map |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    taps = {name: p for name, p in truth.named_parameters() if "canon_" in name}

    def dispatch() -> None:
        accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)

    if first:
        dispatch()
    canonlm.canonize(model, "ABCD")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "canon_" in name:
                assert parameter.device.type == "cpu"
                parameter.copy_(taps[name])
    if not first:
        dispatch()
    assert differ(logits(model, ids()), logits(truth, ids())) < 1e-12


def test_a_block_with_another_forward_is_refused():
    model: Any = host("llama")
    block = model.model.layers[0]
    block.forward = block.forward
    with pytest.raises(ValueError, match="canonize the model first"):
        canonlm.canonize(model, "A")


def test_the_trainer_trains_saves_and_resumes(tmp_path):
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    rows = [{"input_ids": row, "labels": row} for row in ids(8)]

    def trainer(model: Any) -> Trainer:
        settings: dict[str, Any] = {"max_steps": 4, "save_steps": 2, "learning_rate": 0.05, "report_to": []}
        settings |= {"per_device_train_batch_size": 4, "disable_tqdm": True, "use_cpu": True, "logging_steps": 10}
        return Trainer(model=model, args=TrainingArguments(str(tmp_path), **settings), train_dataset=rows)

    model = canonlm.canonize(host("llama", torch.float32), "ABCD")
    trainer(model).train()
    assert model.model.layers[0].canon_A.weight.abs().max() > 0
    again: Any = canonlm.canonize(host("llama", torch.float32), "ABCD")
    trainer(again).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert differ(again.model.layers[0].canon_A.weight, model.model.layers[0].canon_A.weight) < 1e-6
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4").eval()
    assert differ(logits(loaded, ids()), logits(model.eval().cpu(), ids())) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), [("llama", {"use_cache": False}), ("gpt2", {})])
def test_compiles_without_graph_breaks(kind, options):
    """With a mask: test_threads_at_once."""
    model = canonized(kind, "ABCD", dtype=torch.float32)
    torch._dynamo.reset()
    full = torch.compile(model, backend="eager", fullgraph=True)
    assert differ(logits(full, ids(), **options), logits(model, ids(), **options)) < 1e-5
    torch._dynamo.reset()


def test_states_of_a_static_cache_are_contiguous_and_never_move():
    """There is one tensor per block; after rows are reordered, results equal those with a dynamic cache."""
    from transformers import DynamicCache, StaticCache

    model = canonized("llama", "ABCD", dtype=torch.float32)
    caches = [StaticCache(config=model.config, max_cache_len=16), DynamicCache(config=model.config)]
    answers = []
    for cache in caches:
        logits(model, ids(), past_key_values=cache, use_cache=True)
        if isinstance(cache, StaticCache):
            places = [packed.data_ptr() for packed in cache.canon_packed.values()]
            assert len(places) == model.config.num_hidden_layers
            assert not cache.canon_states
        logits(model, ids(2, 1), past_key_values=cache, use_cache=True)
        if isinstance(cache, StaticCache):
            assert [packed.data_ptr() for packed in cache.canon_packed.values()] == places
        cache.reorder_cache(torch.tensor([1, 0]))
        answers.append(logits(model, ids(2, 1), past_key_values=cache, use_cache=True))
    torch.testing.assert_close(*answers, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
def test_a_compiled_step_is_not_much_more_than_the_hosts():
    """Counts operations per Canon layer in the graph of a token's step, and its input tensors: apart from weights, one
    state per block."""
    from transformers import StaticCache

    sizes = []

    def measured(graph: Any, _: Any) -> Any:
        inputs = [node for node in graph.graph.nodes if node.op == "placeholder" and "canon_packed" in node.name]
        sizes.append((sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes), len(inputs)))
        return graph.forward

    for model in (host("llama", torch.float32), canonized("llama", "ABCD", dtype=torch.float32)):
        torch._dynamo.reset()
        cache = StaticCache(config=model.config, max_cache_len=16)
        logits(model, ids(), past_key_values=cache, use_cache=True)
        step: Any = torch.compile(model, backend=measured, fullgraph=True)
        logits(step, ids(2, 1), past_key_values=cache, use_cache=True)
    torch._dynamo.reset()
    assert len(sizes) == 2
    (plain, none), (with_canon, states) = sizes
    assert with_canon - plain <= 22 * 14  # seven layers in each of two blocks
    assert (none, states) == (0, 2)


def test_data_parallel_is_refused():
    """As nn.DataParallel does it, with its replicas on the CPU."""
    model = canonized("llama", "A")
    parts = list(model.modules())
    replicas = {part: part._replicate_for_data_parallel() for part in parts}
    for part in parts:
        for name, child in part._modules.items():
            replicas[part]._modules[name] = replicas.get(child)
        for name, parameter in part._parameters.items():
            setattr(replicas[part], name, parameter)
    with pytest.raises(ValueError, match=r"^forward: nn.DataParallel is not supported; use torchrun$"):
        replicas[model](ids())
