"""Where kernels replace calls of modules, and where they must not; compilers, checkpointing, folders."""

import copy
import warnings

import pytest
import torch
from kernel_cases import Case, small_tiles
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from wired_models import documents, kernels, left_padded, tiny_model, tokens

from canonlm import CanonLayer, canonize
from canonlm.ops import selftest
from canonlm.ops.kernels import dispatch, gated
from canonlm.ops.selftest import Errors, judge


def logits(model, on=True, **call):
    with kernels(on=on) as count, torch.no_grad():
        return model(tokens(2, 5), use_cache=False, **call).logits, count


class Wrapped(torch.nn.Module):
    """A wrapper such as training adapters put around a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.kernel_size = layer, layer.kernel_size

    def forward(self, *args, **kwargs):
        return 2 * self.layer(*args, **kwargs)


@pytest.mark.parametrize("path", ["input_layernorm", "canonC", "mlp.canonD_up", "mlp.act_fn", "self_attn.canonB_k"])
def test_hooks_run(path):
    model = tiny_model("llama+canon")
    model.model.layers[0].get_submodule(path).register_forward_hook(lambda module, args, y: 2 * y)
    assert_close(logits(model)[0], logits(model, on=False)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("path", ["canonA", "mlp.canonD_gate", "self_attn.canonB_v", "post_attention_layernorm"])
def test_replaced_modules_are_called(path):
    model = tiny_model("llama+canon")
    block, canon = model.model.layers[0], model.model.layers[0].get_submodule(path)
    other = Wrapped(canon) if isinstance(canon, CanonLayer) else torch.nn.LayerNorm(16)
    block.set_submodule(path, other)
    plain, (with_kernels, count) = logits(model, on=False)[0], logits(model)
    assert_close(with_kernels, plain, atol=2e-5, rtol=0)
    assert count


def test_a_replaced_forward_runs():
    model = tiny_model("llama+canon")
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: 2 * type(norm).forward(norm, x)
    assert_close(logits(model)[0], logits(model, on=False)[0], atol=2e-5, rtol=0)


@pytest.mark.parametrize("selective", [False, True])
def test_activations_computed_again(selective):
    from canonlm.train.recompute import recomputed

    model, ids = tiny_model("llama+canon"), tokens(1, 6)

    def gradients():
        model.zero_grad()
        with kernels():
            model(ids, labels=ids, doc_ids=documents(1, 6), use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    kept, block = gradients(), model.model.layers[0]
    block.forward = recomputed(block.forward, selective)
    assert all(torch.equal(a, b) for a, b in zip(gradients(), kept, strict=True))


def test_compiled_without_a_graph_break():
    model, ids = tiny_model("llama+canon"), tokens(1, 6)
    block = model.model.layers[0]

    def gradients():
        model.zero_grad()
        model(ids, labels=ids, doc_ids=documents(1, 6), use_cache=False).loss.backward()
        return [parameter.grad for parameter in model.parameters()]

    with kernels():
        eager = gradients()
    with small_tiles(Case()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_JUDGES", {name: judge(kernel) for name, kernel in dispatch.KERNELS.items()})
        patch.setattr(selftest, "known", lambda *_: Errors(0, 0))
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
        compiled = gradients()
    for a, b in zip(compiled, eager, strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_compiled_step_moves_static_states_in_place():
    model, ids = tiny_model("llama+canon"), tokens(2, 6)
    results = []
    with torch.no_grad(), small_tiles(Case()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_JUDGES", {name: judge(kernel) for name, kernel in dispatch.KERNELS.items()})
        patch.setattr(selftest, "known", lambda *_: Errors(0, 0))
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            cache = StaticCache(config=model.config, max_cache_len=8)
            model(ids[:, :4], past_key_values=cache)
            steps = [
                call(ids[:, t : t + 1], position_ids=torch.full((2, 1), t), past_key_values=cache).logits
                for t in (4, 5)
            ]
            results.append((torch.cat(steps, dim=1), cache.layers[0].conv_states))
    (eager, states), (compiled, compiled_states) = results
    assert_close(compiled, eager)
    assert_close(compiled_states, states)


def kept_for_the_backward(name):
    """The bytes of all saved tensors but parameters, each counted once."""
    model, ids, kept = tiny_model(name), tokens(), {}

    def pack(x):
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()
        return x

    with kernels(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(ids, labels=ids, use_cache=False)
    weights = {parameter.data_ptr() for parameter in model.parameters()}
    return sum(storage.nbytes() for place, storage in kept.items() if place not in weights)


def test_memory_for_the_backward():
    """A norm keeps its input and a number per token, not its output; Canon keeps nothing; act(gate) is recomputed. That
    saves more than Canon-B adds, which keeps q, k and v before it, as attention keeps them after it."""
    assert kept_for_the_backward("llama+canon") < kept_for_the_backward("")


def test_under_autocast():
    model = tiny_model("llama+canon")
    with torch.autocast("cpu", torch.bfloat16):
        plain, (with_kernels, count) = logits(model, on=False)[0], logits(model)
    assert with_kernels.dtype == plain.dtype
    assert_close(with_kernels, plain, atol=0.1, rtol=0)
    assert count == {"normed": 2, "rotary": 1, "gated": 1}


def test_double_precision_is_left_to_pytorch():
    model = tiny_model("llama+canon").double()
    with_kernels, count = logits(model, attention_mask=left_padded(2, 5))
    assert not count
    assert torch.equal(with_kernels, logits(model, on=False, attention_mask=left_padded(2, 5))[0])


def test_a_wrong_kernel_is_not_used_and_is_named(monkeypatch, tmp_path):
    """Its gradients are off by a tenth, so it is used for decoding and not for training."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(dispatch, "SHAPE", (2, 12, 2))
    monkeypatch.setattr(selftest, "SHAPE", (2, 12, 2))
    real = gated.run_backward
    monkeypatch.setattr(gated, "run_backward", lambda *a, **k: [1.1 * x for x in real(*a, **k)])
    is_right = judge(dispatch.KERNELS["gated"])
    model, ids = tiny_model("llama+canon"), tokens(1, 5)
    with warnings.catch_warnings(record=True) as caught, kernels() as count:
        warnings.simplefilter("always")
        dispatch._JUDGES["gated"] = is_right
        model(ids, use_cache=False)
        trained = dict(count)
        count.clear()
        with torch.inference_mode():
            model(ids, use_cache=False)
    assert trained == {"normed": 2, "conv": 1, "rotary": 1}
    assert count == {"normed": 2, "rotary": 1, "gated": 1}
    assert [str(each.message).partition(" so ")[0] for each in caught if "is wrong" in str(each.message)] == [
        "Triton Canon, act(gate) * up is wrong on this machine (its gradients are off),"
    ]


def test_a_trial_passes_for_right_kernels(monkeypatch):
    monkeypatch.setattr(dispatch, "SHAPE", (1, 9, 2))
    monkeypatch.setattr(selftest, "SHAPE", (1, 9, 2))
    monkeypatch.setattr(selftest, "_documents", lambda: (torch.arange(9) >= 4).long()[None])
    with small_tiles(Case(), channels=32):
        for name, kernel in dispatch.KERNELS.items():
            errors = selftest.attempt(kernel, torch.device("cpu"), torch.float32)
            assert max(errors.values, errors.gradients) <= 0.1, (name, errors)


def test_a_transformers_model_with_canon_layers():
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=20,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    torch.manual_seed(0)
    model, mask = canonize(LlamaForCausalLM(config), sites="ABCD").eval(), left_padded(2, 6)
    call = {"attention_mask": mask, "max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    plain = copy.deepcopy(model)
    with kernels(on=False):
        expected, output = plain.generate(tokens(2, 6), **call), plain(tokens(), labels=tokens())
        output.loss.backward()
    with kernels() as count:
        assert torch.equal(model.generate(tokens(2, 6), **call), expected)
        again = model(tokens(), labels=tokens())
        again.loss.backward()
    assert_close(again.logits, output.logits, atol=2e-5, rtol=0)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(one.grad, other.grad, atol=1e-5, rtol=1e-3)
    assert count.keys() == {"conv", "conv_with_state", "conv_backward", "gated_with_state"}
