"""Checks on several processes, which are forks of one, so that they share its imports.

    WORLD_SIZE=2 … python parallel_checks.py folder two 900

Every check compares with a single process. The folder gets `results.json` and the output of each process, which ends
after this many seconds and then prints where it was.
"""

import faulthandler
import gc
import json
import os
import sys
import time
import traceback
from collections import defaultdict
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from packaging.version import Version
from torch.utils._python_dispatch import TorchDispatchMode

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.core.distributed import World
from canonlm.models import initialize, modeling
from canonlm.models.build import build
from canonlm.models.decoder import Decoder
from canonlm.models.interface import Sizes
from canonlm.ops.varlen import Documents
from canonlm.train import mesh
from canonlm.train.clipping import clip_grad_norm
from canonlm.train.config import resolve
from canonlm.train.mesh import world_of
from canonlm.train.optim import build_optimizer
from canonlm.train.sharding import last_micro_batch, parallelize
from canonlm.train.traffic import traffic

SIZES = {"vocab_size": 62, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MAMBA = {"mixers": ["mamba2"], "mamba_state_size": 8, "mamba_n_groups": 2, "initializer": "normal"}
FAMILIES = {
    "llama": {"canon_set": "ABCD", "qk_norm": True, "num_key_value_heads": 2},
    "gla": {"mixers": ["gla"], "canon_set": "AbBCD"},
    "gdn": {"mixers": ["gdn"], "canon_set": "AbBCD"},
    "mamba2": {**MAMBA, "canon_set": "AbBCD"},
    "hybrid": {"mixers": ["gdn", "attention"], "canon_sets": ["AbCD", "ABCD"], "canon_frozen": True},
    "moe": {"mlp": "moe", "num_experts": 4, "intermediate_size": 24, "canon_set": "ABC"},
    "tied": {"canon_set": "AC", "tie_word_embeddings": True},
    "attnres": {
        "attention_residuals": True,
        "mixers": ["mamba3", "attention"],
        "mamba_state_size": 8,
        "canon_sets": ["B", "AC"],
    },
    "sites": {"canon_set": "E:smear,A:avg,Q:k3,KV:dynamic:scaled,OM:scaled,D:k2:id", "num_key_value_heads": 2},
}
DEEP = {"num_hidden_layers": 4}
TENSOR_PARALLEL = {
    "llama": FAMILIES["llama"],
    "biases": {
        "canon_set": "ABCD",
        "canon_bias": True,
        "canon_activation": True,
        "attention_bias": True,
        "mlp_bias": True,
        "mlp": "standard",
        "z_loss": "logsumexp",
        "attention_gate": True,
        "attention_sink": True,
        "sliding_window": 7,
    },
    "tied": {**FAMILIES["tied"], "qk_norm": True, "canon_frozen": True, "rope_dim": 4},
    "sites": {"canon_set": "E:smear,Q:bias,K:offset,V:dynamic:k3,OM:scaled,D:avg", "num_key_value_heads": 2},
    # All mixers that are split, four in a hybrid: with short convolutions and Canon layers beside them or without.
    "delta": {
        "mixers": ["gdn", "kda", "delta_vec", "attention"],
        "canon_sets": ["AbBCD", "bACD", "ABCD", "ABCD"],
        **DEEP,
    },
    "product": {"mixers": ["deltaproduct"], "mixer_options": {"deltaproduct": {"steps": 3}}, "canon_set": "AbBCD"},
    "linear": {"mixers": ["gla", "retention", "gated_retention", "rwkv7"], "canon_set": "AbBCD", **DEEP},
    "rwkv7": {
        **{"mixers": ["rwkv7", "mla"], "canon_set": "ABCD", **DEEP},
        "mixer_options": {"rwkv7": {"value_residual": True}},
        "attention_gate": True,
        "attention_sink": True,
    },
    "latent": {
        "mixers": ["mla"],
        "mixer_options": {"mla": {"q_lora_rank": 12}},
        "canon_set": "ABCD",
        "attention_bias": True,
    },
    "mamba": {
        "mixers": ["mamba3", "mamba2"],
        "mixer_options": {"mamba3": {"state_size": 8, "mimo_rank": 2}, "mamba2": {"state_size": 8}},
        "canon_sets": ["AbBCD", "ACD"],
    },
    "groups": {
        "mixers": ["mamba2", "mamba3"],
        "mixer_options": {"mamba2": {"state_size": 8, "n_groups": 2}, "mamba3": {"state_size": 8, "n_groups": 2}},
        "canon_sets": ["AbBCD", "ABCD"],
    },
}
ROWS, TIME, STEPS = 8, 12, 12
RUN = {
    "arch": "llama",
    "task": {"name": "copying", "N": 8},
    "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
    "data": {"seq_len": 18, "loss_on": "all"},
    "train": {
        "steps": STEPS,
        "batch_size": ROWS,
        "eval_every": STEPS,
        "eval_size": 1,
        "checkpoint_every": STEPS,
        "device": "cpu",
        "optim": {"lr": 1e-2, "warmup_steps": 5},
    },
}
FOREIGN = {"qwen3": "hf:qwen3+canon=ABCD", "mamba2": "hf:mamba2"}
ALONE = World(torch.device("cpu"))


def run_config(train=None, **layout):
    return resolve(RUN | {"train": RUN["train"] | (train or {}), "parallel": layout})


def batch(step, vocab=SIZES["vocab_size"]):
    """Rows with different numbers of targets, some with packed documents."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(vocab, (ROWS, TIME), generator=generator)
    targets = torch.where(
        torch.rand(ROWS, TIME, generator=generator) < torch.rand(ROWS, 1, generator=generator), ids, -100
    )
    targets[0, 0] = ids[0, 0]
    documents = (torch.rand(ROWS, TIME, generator=generator) < 0.2).cumsum(1)
    return ids, targets, documents


def decoder(config, device):
    with torch.device(device):
        return Decoder(CanonLMForCausalLM(config))


def foreign(arch, device):
    sizes = Sizes(2, SIZES["hidden_size"], 4, SIZES["vocab_size"], TIME)
    with torch.device(device):
        return build(arch, sizes, seed=3)


class Trained:
    """A model in training, from a configuration or the name of an architecture; all numbers are for the global
    batch."""

    def __init__(self, fields, config, world, dtype=torch.float32):
        torch.set_default_dtype(dtype)
        self.config, self.world = config, world
        known = (
            partial(foreign, fields) if isinstance(fields, str) else partial(decoder, CanonLMConfig(**SIZES | fields))
        )
        self.spread = parallelize(known, config, world)
        self.model = self.spread.module
        torch.set_default_dtype(torch.float32)
        self.optimizer = build_optimizer(self.model, config.train.optim)

    def gradients(self, step):
        """The loss; gradients are left on the parameters."""
        world = self.world
        ids, targets, documents = batch(step)
        share = ROWS // world.dp_size
        items = (targets != -100).sum() / world.dp_size
        part = slice(world.dp_rank * share, (world.dp_rank + 1) * share)
        micro = self.config.parallel.micro_batch_size or share
        parts = list(zip(*(x[part].split(micro) for x in (ids, targets, documents)), strict=True))
        loss = 0.0
        for index, (ids, targets, documents) in enumerate(parts):
            last_micro_batch(self.model, index == len(parts) - 1)
            with torch.autocast("cpu", torch.bfloat16, enabled=self.config.train.precision == "bf16"):
                total = self.spread.loss(ids, targets, Documents(documents), items).total
            total.backward()
            loss += float(total.detach())
        return world.sum([loss])[0] / world.dp_size

    def losses(self, steps=STEPS):
        collected = []
        for step in range(steps):
            collected.append(self.gradients(step))
            clip_grad_norm(self.model, 1.0, self.world)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return collected

    def weights(self):
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def whole_gradients(self):
        return {name: None if p.grad is None else whole(p.grad) for name, p in self.model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same(found, wanted):
    """Assert equal names and equal bits."""
    assert list(found) == list(wanted)
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def close(found, wanted, tolerance):
    """Assert that every gradient is close, relative to its largest entry."""
    assert list(found) == list(wanted)
    for name, gradient in wanted.items():
        if gradient is None:
            assert found[name] is None, name
        else:
            error = (found[name] - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)
            assert error < tolerance, f"{name}: {error:.2e}"


@cache
def alone(family, fields_of="FAMILIES", micro=None):
    """The losses of a single process."""
    return Trained(globals()[fields_of][family], run_config(micro_batch_size=micro), ALONE).losses()


def micro_of(family, world):
    """Experts depend on the tokens of a call, so for them the single process uses the batches of one of several."""
    return ROWS // world.dp_size if family == "moe" else None


def expected_losses(world, family, fields_of="FAMILIES"):
    """The losses of a single process, which one computes for all."""
    return world.broadcast(alone(family, fields_of, micro_of(family, world)) if world.main else None)


def follows(world, family, fields_of="FAMILIES", **layout):
    result = Trained(globals()[fields_of][family], run_config(**layout), world).losses()
    expected = expected_losses(world, family, fields_of)
    assert expected[-1] < expected[0] - 0.2, f"the single process does not learn: {expected[0]} to {expected[-1]}"
    for step, (a, b) in enumerate(zip(result, expected, strict=True)):
        assert abs(a / b - 1) < 1e-4, f"step {step}: {a} against {b}"


def starts_alike(world, family, fields_of="FAMILIES", **layout):
    """Weights, names, gradients and clipped gradients, in float64."""
    fields = globals()[fields_of][family]
    ours = Trained(fields, run_config(**layout), world, torch.float64)
    single = Trained(fields, run_config(micro_batch_size=micro_of(family, world)), ALONE, torch.float64)
    same(ours.weights(), single.weights())
    expected = {name: p.requires_grad for name, p in single.model.named_parameters()}
    assert {name: p.requires_grad for name, p in ours.model.named_parameters()} == expected
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in ours.model.parameters())
    if world.tp == world.size and family != "groups":  # a group of B and C for every device, which has both
        held = sum(p.to_local().numel() for p in ours.model.parameters())
        assert held == single.spread.part_of(world.tp).num_parameters
    assert abs(ours.gradients(0) - single.gradients(0)) < 1e-12
    close(ours.whole_gradients(), single.whole_gradients(), 1e-9)
    norm = torch.cat([g.flatten() for g in single.whole_gradients().values() if g is not None]).norm()
    result = clip_grad_norm(ours.model, float(norm) / 7, world)
    assert type(result) is torch.Tensor
    assert result.shape == ()
    torch.testing.assert_close(result, norm)
    clip_grad_norm(single.model, float(norm) / 7, ALONE)
    close(ours.whole_gradients(), single.whole_gradients(), 1e-9)
    after = torch.cat([g.flatten() for g in ours.whole_gradients().values() if g is not None]).norm()
    torch.testing.assert_close(after, norm / 7, rtol=1e-4, atol=0)


def draws_a_share(world, **layout):
    """Each process draws some of the initial weights, and none if a checkpoint will overwrite them."""
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        draw = initialize.generator_for
        patch.setattr(initialize, "generator_for", lambda *args: drawn.append(args[1]) or draw(*args))
        config = CanonLMConfig(**SIZES | FAMILIES["llama"])
        ours = parallelize(partial(decoder, config), run_config(**layout), world).module
        shares = world.gather([*drawn])
        assert all(shares)
        assert sorted(chain(*shares)) == sorted(initialize.canonical_name(name) for name in ours.state_dict())
        drawn.clear()
        parallelize(partial(decoder, config), run_config(**layout), world, resumed=True)
        assert not drawn


def accumulates(world, **layout):
    """Each micro-batch reduces gradients to shards, and only the last one sums these over copies."""
    fields = FAMILIES["llama"]
    small = Trained(fields, run_config(micro_batch_size=1, **layout), world, torch.float64)
    big = Trained(fields, run_config(**layout), world, torch.float64)
    often, once = sent_by(lambda: small.gradients(0)), sent_by(lambda: big.gradients(0))
    assert len(often["_reduce_scatter_base_"]) == ROWS // world.dp_size * len(once["_reduce_scatter_base_"]) > 0
    assert len(often["allreduce_"]) == len(once["allreduce_"]) > 0
    close(small.whole_gradients(), big.whole_gradients(), 1e-9)


class sent_by(TorchDispatchMode):
    """The collectives of `step()`: the sizes of their larger sides, by name."""

    def __init__(self, step):
        super().__init__()
        self.sizes = defaultdict(list)
        with self:
            step()

    def __getitem__(self, name):
        return self.sizes[name]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            sides = [sum(x.numel() for x in side if isinstance(x, torch.Tensor)) for side in map(tensors_of, args[:2])]
            self.sizes[func._schema.name.partition("::")[2]].append(max(sides))
        return func(*args, **(kwargs or {}))


def tensors_of(argument):
    return argument if isinstance(argument, list | tuple) else [argument]


def sends(world, **layout):
    """Bytes of weights and gradients as the plan has them, but for FSDP's padding."""
    config = run_config(micro_batch_size=1, **layout)
    run = Trained(FAMILIES["llama"], config, world)
    freed = []
    for layer in run.model.model.layers:
        layer.register_forward_pre_hook(lambda *_: freed.append(run.model.get_input_embeddings().weight))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling, "loss_of_logits", None)  # the loss never has all logits
        sent = sent_by(lambda: run.gradients(0))
    with torch.device("meta"):
        planned = traffic(decoder(CanonLMConfig(**SIZES | FAMILIES["llama"]), "meta"), config, world.size, 1)
    shards = world.size // (world.tp * config.parallel.dp_replicate)
    assert freed
    assert all(isinstance(weight, torch.distributed.tensor.DTensor) for weight in freed)
    micro_batches, units = ROWS // world.dp_size, 2 * SIZES["num_hidden_layers"] + (3 if world.tp == 1 else 2)
    assert len(sent["_allgather_base_"]) == micro_batches * units
    for name, expected in (("_allgather_base_", planned.gathers), ("_reduce_scatter_base_", planned.reductions)):
        assert abs(4 * sum(sent[name]) * (shards - 1) / shards / expected - 1) < 0.02, (name, sent.sizes, planned)


def repeats(world, **layout):
    """With the same seed and world, losses and weights are equal to the bit."""
    first, second = (Trained(FAMILIES["llama"], run_config(**layout), world) for _ in range(2))
    assert first.losses(5) == second.losses(5)
    same(first.weights(), second.weights())


def recomputes(world, mode, **layout):
    """Selective checkpointing sends nothing twice; full checkpointing repeats the messages of tensor and context
    parallelism."""
    ours = Trained(FAMILIES["llama"], run_config(activation_checkpointing=mode, **layout), world, torch.float64)
    plain = Trained(FAMILIES["llama"], run_config(**layout), world, torch.float64)
    losses = []
    again, once = (sent_by(lambda run=run: losses.append(run.gradients(0))) for run in (ours, plain))
    assert losses[0] == losses[1]
    close(ours.whole_gradients(), plain.whole_gradients(), 1e-12)
    messages = [sum(len(sent[name]) for name in ("all_reduce", "all_to_all_single")) for sent in (again, once)]
    assert (messages[0] > messages[1]) == (mode == "full" and world.tp * world.cp > 1)
    assert messages[0] >= messages[1]


def computes_in_bf16(world, family, **layout):
    """Weights and gradients stay in float32; blocks compute in bfloat16, close enough to float32."""
    ours = Trained(FAMILIES[family], run_config(train={"precision": "bf16"}, **layout), world)
    dtypes = set()
    for layer in ours.model.model.layers:
        layer.register_forward_hook(lambda module, args, output: dtypes.add((args[0].dtype, output[0].dtype)))
    single = Trained(FAMILIES[family], run_config(), ALONE)
    assert abs(ours.gradients(0) / single.gradients(0) - 1) < 2e-3
    assert dtypes == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in ours.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in ours.model.parameters() if p.requires_grad} == {torch.float32}
    close(ours.whole_gradients(), single.whole_gradients(), 0.1)
    ours.optimizer.step()


def compiles(world, family, **layout):
    """The blocks once for all. With tensor or context parallelism, all of the compiler but its generated code, which
    FSDP's check runs."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    backend = "aot_eager" if world.tp * world.cp > 1 else "inductor"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", partial(torch.compile, backend=backend))
        ours = Trained(FAMILIES[family], run_config(train={"compile": True}, **layout), world)
    for result, expected in zip(ours.losses(3), expected_losses(world, family), strict=False):
        assert abs(result / expected - 1) < 1e-4
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert list(ours.weights()) == list(Trained(FAMILIES[family], run_config(), ALONE).weights())


def talks(world):
    """Sums are over data-parallel processes, and an error in one is raised in all, with the same message."""
    assert world.sum([float(world.dp_rank), 1.0]) == [sum(range(world.dp_size)), world.dp_size]
    assert world.sum_on_device(float(world.dp_rank)) == sum(range(world.dp_size))
    assert world.by_rank([float(world.rank), 7.0]) == [[float(rank), 7.0] for rank in range(world.size)]
    assert world.any(world.rank == world.size - 1)
    assert not world.any(False)
    assert world.broadcast(f"from {world.rank}") == "from 0"
    part, tp_rank = divmod(world.rank, world.tp)
    assert (world.dp_rank, world.cp_rank, world.tp_rank) == (*divmod(part, world.cp), tp_rank)
    for failing in range(world.size):
        expectation = pytest.raises(ValueError, match="model: missing")
        with expectation, world.all_or_none():
            resolve(RUN if world.rank != failing else {"arch": "llama"})
    with world.all_or_none():
        pass


Checks = list[tuple]


GROUPS: dict[str, tuple[int, dict[tuple[int, ...], Checks]]] = {
    # name: (processes, {(tp, dp_replicate) or (tp, dp_replicate, cp): checks})
    "two": (
        2,
        {
            (1, 1): [
                *((starts_alike, family) for family in FAMILIES),
                *((follows, family) for family in ("llama", "moe", "attnres")),
                *((follows, arch, "FOREIGN") for arch in FOREIGN),
                *((computes_in_bf16, family) for family in ("llama", "mamba2")),
                *((recomputes, mode) for mode in ("selective", "full")),
                (draws_a_share,),
                (accumulates,),
                (sends,),
                (repeats,),
                (talks,),
                (compiles, "tied"),
            ],
            (2, 1): [
                *((starts_alike, family, "TENSOR_PARALLEL") for family in TENSOR_PARALLEL),
                *((follows, family, "TENSOR_PARALLEL") for family in ("biases", "rwkv7")),
                *((recomputes, mode) for mode in ("selective", "full")),
                (computes_in_bf16, "llama"),
                (repeats,),
                (talks,),
                (compiles, "llama"),
            ],
            (1, 1, 2): [
                *((starts_alike, family) for family in ("llama", "mamba2", "hybrid", "attnres", "sites")),
                (follows, "llama"),
                *((recomputes, mode) for mode in ("selective", "full")),
                (computes_in_bf16, "llama"),
                (accumulates,),
                (repeats,),
                (talks,),
                (compiles, "llama"),
            ],
        },
    ),
    "four": (
        4,
        {
            (1, 2): [
                *((starts_alike, family) for family in ("hybrid", "moe", "tied")),
                (follows, "gdn"),
                (accumulates,),
                (sends,),
                (repeats,),
                (talks,),
            ],
            (1, 4): [(starts_alike, "llama")],
            (2, 1): [
                *((starts_alike, family, "TENSOR_PARALLEL") for family in ("biases", "tied", "rwkv7")),
                (follows, "llama", "TENSOR_PARALLEL"),
                (talks,),
            ],
            (2, 2): [(starts_alike, "llama", "TENSOR_PARALLEL")],
            (1, 1, 2): [(starts_alike, "tied"), (follows, "gdn"), (sends,), (talks,)],
            (1, 2, 2): [(starts_alike, "hybrid"), (talks,)],
            (2, 1, 2): [*((starts_alike, family, "TENSOR_PARALLEL") for family in ("biases", "tied")), (talks,)],
        },
    ),
}


def threads_of_gloo():
    """A thread that outlives its process group may free tensors after the interpreter has ended: a rare crash."""
    tasks = Path("/proc/self/task")
    names = [(task / "comm").read_text() for task in tasks.iterdir()] if tasks.is_dir() else []
    return [name for name in names if "gloo" in name]


def main(results: Path, group: str) -> None:
    """Every layout joins and leaves a separate process group."""
    mesh.TIMEOUT = timedelta(seconds=600)  # compiling on a busy machine takes a minute
    torch.set_num_threads(1)
    result = {}
    for index, (numbers, checks) in enumerate(GROUPS[group][1].items()):
        layout = dict(zip(("tp", "dp_replicate", "cp"), numbers, strict=False))
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(index)  # keys of its own in the store
        with world_of(run_config(**layout)) as world:
            for check, *args in checks:
                start, errors = time.perf_counter(), [None] * world.size
                try:
                    check(world, *args, **({} if check is talks else layout))
                except Exception:
                    errors[world.rank] = traceback.format_exc()
                dist.all_gather_object(errors, errors[world.rank])
                name = f"{layout}: {' '.join([check.__name__, *args])}"
                result[name] = {"seconds": time.perf_counter() - start, "errors": [e for e in errors if e]}
            has_names = sys.platform == "linux" and Version(torch.__version__) >= Version("2.11")
            assert threads_of_gloo() or not has_names
        # Compiled code keeps its groups and their threads to the end of the process: see docs/roadmap.md.
        assert not threads_of_gloo() or any(
            compiles is check for each in GROUPS[group][1].values() for check, *_ in each
        )
    if world.main:
        results.write_text(json.dumps(result, indent=1))


def fork(rank, folder, group, seconds):
    """The id of a new process that runs the checks."""
    if (child := os.fork()) != 0:
        return child
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    faulthandler.dump_traceback_later(seconds, exit=True)
    sys.exit(main(folder / "results.json", group))


if __name__ == "__main__":
    folder, group, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    gc.freeze()  # the children do not search for garbage in what is imported
    children = [fork(rank, folder, group, seconds) for rank in range(int(os.environ["WORLD_SIZE"]))]
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children))
