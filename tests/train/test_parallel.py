"""One run on many devices: the valid layouts, none of which changes the numbers (`parallel_checks.py`)."""

import functools
import re
from pathlib import Path

import pytest
import torch
from parallel_checks import ALONE, FAMILIES, GROUPS, SIZES, Trained, close, run_config, same
from several_processes import results_of
from torch.distributed import TCPStore
from torch.utils.flop_counter import FlopCounterMode

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.models import tensor_parallel
from canonlm.models.decoder import Decoder
from canonlm.models.mixers import MIXERS
from canonlm.train.machine import deterministic
from canonlm.train.mesh import check_layout, world_of
from canonlm.train.sharding import parallelize

SCRIPT = Path(__file__).with_name("parallel_checks.py")


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_several_processes_equal_one(group, tmp_path):
    """The processes start as torchrun would start them. This one serves the store, as torchrun does: a port that is
    free now may be taken when a process needs it."""
    processes, checks = GROUPS[group]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environment |= {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }
    # It takes a quarter of this time on two idle cores.
    results = results_of(SCRIPT, tmp_path, group, seconds=900, environment=environment)
    assert len(results) == sum(map(len, checks.values()))
    failed = {name: result["errors"] for name, result in results.items() if result["errors"]}
    assert not failed, "\n".join(f"{name}\n{errors[0]}" for name, errors in failed.items())


@pytest.mark.parametrize(
    ("processes", "layout", "message"),
    [
        (1, {"tp": 2},
         "parallel.tp: expected a divisor of 1, the number of processes (torchrun starts several), got 2"),
        (1, {"dp_replicate": 2},
         "parallel.dp_replicate: expected a divisor of 1, the number of processes / parallel.tp, got 2"),
        (4, {"tp": 3},
         "parallel.tp: expected a divisor of 4, the number of processes (torchrun starts several), got 3"),
        (4, {"tp": 2, "dp_replicate": 4}, "parallel.dp_replicate: expected a divisor of 2"),
        (4, {"tp": 2, "cp": 4},
         "parallel.cp: expected a divisor of 2, the number of processes / parallel.tp, got 4"),
        (8, {"cp": 4, "dp_replicate": 4},
         "parallel.dp_replicate: expected a divisor of 2, the number of processes / parallel.tp / parallel.cp"),
        (4, {"cp": 4},
         "data.seq_len: expected a multiple of parallel.cp = 4, into which every window is cut, got 18"),
        (6, {"tp": 2},
         "train.batch_size: expected a multiple of 3, the number of processes / parallel.tp, got 8"),
        (2, {"micro_batch_size": 3},
         "parallel.micro_batch_size: expected a divisor of 4, a device's share of train.batch_size"),
        (2, {"tp": 2, "float8": True}, "parallel.float8: expected false with parallel.tp > 1, got True"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_divide(processes, layout, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_layout(run_config(**layout), processes)


def test_layouts_that_divide():
    for processes, layout in ((8, {}), (8, {"tp": 2, "dp_replicate": 2}), (16, {"tp": 2}), (2, {"micro_batch_size": 2}),
                              (48, {"tp": 2, "cp": 3, "dp_replicate": 4})):  # fmt: skip
        check_layout(run_config(**layout), processes)


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (FAMILIES["gdn"], "a divisor of gdn's num_heads = 2, got 4"),
        (
            {"mixers": ["mamba2"], "mixer_options": {"mamba2": {"num_heads": 4, "n_groups": 2}}},
            "a divisor of mamba2's n_groups = 2, got 4",
        ),
        (FAMILIES["moe"], "1 with experts"),
        ({"alibi": "alibi"}, "1 where heads differ"),
        ({"rope_heads": 2}, "1 where heads differ"),
        ({"attention_dropout": 0.1}, "1 with attention_dropout"),
        ({"attention_residuals": True}, "1 with attention residuals"),
        ({"num_attention_heads": 2}, "a divisor of num_attention_heads = 2, got 4"),
        ({"num_key_value_heads": 2}, "a divisor of num_key_value_heads = 2, got 4"),
        ({"intermediate_size": 42}, "a divisor of intermediate_size = 42, got 4"),
        ({"vocab_size": 62}, "a divisor of vocab_size = 62, got 4"),
    ],
)
def test_a_model_that_cannot_be_sharded(fields, what):
    with pytest.raises(ValueError, match=f"^parallel.tp: expected {what}"):
        tensor_parallel.check(CanonLMConfig(**SIZES | {"vocab_size": 64} | fields), 4)


def test_a_subclass_says_itself_how_it_is_split(monkeypatch):
    class Mine(MIXERS["gdn"]):
        pass

    monkeypatch.setitem(MIXERS, "mine", Mine)
    with pytest.raises(ValueError, match="1 with mine: its layers are not split by heads"):
        tensor_parallel.check(CanonLMConfig(**SIZES | {"mixers": ["mine"]}), 2)


def test_one_process_needs_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with world_of(run_config()) as world:
        assert not torch.distributed.is_initialized()
        assert (world.rank, world.size, world.dp_rank, world.dp_size) == (0, 1, 0, 1)
        assert (world.mesh, world.main) == (None, True)
        assert (world.sum([1.5]), world.any(True), world.broadcast("x")) == ([1.5], True, "x")
        with pytest.raises(KeyError), world.all_or_none():
            raise KeyError
        config = CanonLMConfig(**SIZES)
        spread = parallelize(lambda device: Decoder(CanonLMForCausalLM(config)), run_config(), world)
        same(spread.module.state_dict(), CanonLMForCausalLM(config).state_dict())


def test_a_wrong_start_is_reported_before_any_process_waits(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"train\.batch_size: expected a multiple of 3"), world_of(run_config()):
        pass
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"train\.device"), world_of(run_config(train={"device": "cuda:99"})):
        pass


@pytest.mark.parametrize(
    ("installed", "what"), [(False, r"pip install 'canonlm\[float8\]'"), (True, "compute capability 8.9")]
)
def test_float8_needs_hardware_and_torchao(monkeypatch, installed, what):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    with pytest.raises(ValueError, match=what), world_of(run_config(float8=True)):
        pass


@pytest.mark.parametrize("family", ["llama", "gdn", "mamba2", "moe"])
def test_activation_checkpointing_saves_the_expected_memory(family):
    """Full: everything is computed twice. Selective: all but linear layers and attention."""
    gradients, flops, norms = {}, {}, {}
    for mode in ("none", "selective", "full"):
        run = Trained(FAMILIES[family], run_config(activation_checkpointing=mode), ALONE, torch.float64)
        calls = []
        run.model.model.layers[1].input_layernorm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        with FlopCounterMode(display=False) as counter:
            run.gradients(0)
        gradients[mode], flops[mode], norms[mode] = run.whole_gradients(), counter.get_flop_counts(), len(calls)
    assert norms == {"none": 1, "selective": 2, "full": 2}
    total = {mode: count["Global"][torch.ops.aten.mm] for mode, count in flops.items()}
    assert total["none"] == total["selective"] < total["full"]
    for mode in ("selective", "full"):
        close(gradients[mode], gradients["none"], 1e-12)


@pytest.mark.slow
def test_blocks_that_all_differ_are_all_compiled(monkeypatch):
    """With attention residuals a block reads as many outputs as there are before it."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fields = {"attention_residuals": True, "num_hidden_layers": 10}
    with torch._dynamo.config.patch(recompile_limit=8):
        Trained(fields, run_config({"compile": True}), ALONE).gradients(0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 10


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mixer_has_deterministic_operators(family):
    with deterministic(True):
        Trained(FAMILIES[family], run_config(), ALONE).gradients(0)


@pytest.mark.slow
def test_the_compiler_keeps_a_share_of_activations(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager_decomp_partition"))
    saved, gradients = [], []
    for mode in ("none", 0.3, "none"):
        torch._dynamo.reset()
        config = run_config({"compile": True}, activation_checkpointing=mode)
        run = Trained(FAMILIES["llama"], config, ALONE, torch.float64)
        kept = {}

        def pack(x, kept=kept):
            kept[x.untyped_storage()._cdata] = x
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            run.gradients(0)
        saved.append(sum(x.untyped_storage().nbytes() for x in kept.values()))
        gradients.append(run.whole_gradients())
    assert saved[1] < 0.8 * saved[0] == 0.8 * saved[2]
    close(gradients[1], gradients[0], 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mode"), [("llama", "selective"), ("gdn", "none")])
def test_blocks_are_compiled_once_for_all(monkeypatch, family, mode):
    """Ten equal blocks, one graph without a break; names stay; evaluation runs as written."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    fields = FAMILIES[family] | {"num_hidden_layers": 10}
    compiled = Trained(fields, run_config({"compile": True}, activation_checkpointing=mode), ALONE, torch.float64)
    plain = Trained(fields, run_config(), ALONE, torch.float64)
    for step in range(2):
        assert abs(compiled.gradients(step) - plain.gradients(step)) < 1e-10
    close(compiled.whole_gradients(), plain.whole_gradients(), 1e-8)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]
    same(compiled.weights(), plain.weights())
    with torch.compiler.set_stance("force_eager"), torch.no_grad():
        compiled.model(torch.zeros(3, 5, dtype=torch.long))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
