"""A checkpoint restores every bit, on any number of processes, or is skipped; nothing harms the one before."""

import errno
import json
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from canonlm import CanonLMConfig, CanonLMForCausalLM
from canonlm.core.distributed import World
from canonlm.core.files import Stamp, write_text
from canonlm.runs.folder import checkpoint_steps
from canonlm.train import checkpoint
from canonlm.train.checkpoint import Checkpoints, load_model, load_weights, path_of
from canonlm.train.load_config import load

SIZES = {"vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
FORMS = {
    "llama": {"canon_set": "ABCD"},
    "tied": {"tie_word_embeddings": True},
    "frozen": {"canon_set": "AC", "canon_frozen": True},
    "gla": {"mixers": ["gla"], "canon_set": "AbC", "linear_num_heads": 2},
    "gdn": {"mixers": ["gdn"], "linear_num_heads": 2},
    "mamba2": {"mixers": ["mamba2"]},
    "experts": {"mlp": "moe", "num_experts": 4},
}
ALONE = World(torch.device("cpu"))


def open_at(folder, keep=9, keep_every=None, world=ALONE, **options):
    return Checkpoints(folder, keep, keep_every, world, **options)


def build(form="llama", seed=0):
    return CanonLMForCausalLM(CanonLMConfig(**SIZES, **FORMS[form], init_seed=seed))


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)


def optimize(model, optimizer, seed):
    ids = torch.randint(SIZES["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(seed))
    model.train()
    model(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def everything(model, optimizer):
    """Every tensor that training continues from, unsharded, by parameter, without torch's state dictionaries."""
    result = {}
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter, {})
        for key, tensor in {"": parameter.detach(), **state}.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            result[f"{name} {key}"] = full.clone()
    return result


@pytest.fixture
def warnings(caplog):
    """`warnings()`: the log lines about checkpoints, without torch's many others."""
    return lambda: [record.getMessage() for record in caplog.records if record.name.startswith("canonlm")]


def same(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


class Numbers:
    """The smallest object with a state: three numbers, and their moments."""

    def __init__(self):
        self.model = torch.nn.Linear(3, 1, bias=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model.weight.sum().backward()
        self.optimizer.step()

    def tensors(self):
        return [self.model.weight.data, *self.optimizer.state[self.model.weight].values()]

    def set(self, step):
        for tensor in self.tensors():
            tensor.fill_(step)

    def are(self, step):
        return all((tensor == step).all() for tensor in self.tensors())

    def save(self, checkpoints, step, then=None):
        self.set(step)
        checkpoints.save(step, self.model, self.optimizer, then)

    def load(self, folder, **kwargs):
        self.set(-1)
        return open_at(folder, **kwargs).load_latest(self.model, self.optimizer)


def saved(folder, *at, keep=9):
    """Write checkpoints of these steps, one after the other."""
    numbers, checkpoints = Numbers(), open_at(folder, keep)
    for step in at:
        numbers.save(checkpoints, step)
    checkpoints.close()
    return numbers


@pytest.mark.every(3)
@pytest.mark.parametrize("form", FORMS)
def test_every_bit_comes_back(form, tmp_path):
    model = build(form)
    optimizer = optimizer_of(model)
    for seed in range(3):
        optimize(model, optimizer, seed)
    checkpoints = open_at(tmp_path)
    checkpoints.save(3, model, optimizer)
    at_3 = everything(model, optimizer)
    checkpoints.wait()
    optimize(model, optimizer, 3)
    at_4 = everything(model, optimizer)

    other = build(form, seed=1)
    again = optimizer_of(other)
    assert open_at(tmp_path).load_latest(other, again) == 3
    same(everything(other, again), at_3)
    optimize(other, again, 3)
    same(everything(other, again), at_4)


def test_no_checkpoint_means_step_0(tmp_path):
    numbers = Numbers()
    numbers.set(7)
    for folder in (tmp_path, tmp_path / "none"):
        assert open_at(folder).load_latest(numbers.model, numbers.optimizer) == 0
    assert numbers.are(7)


def test_the_newest_of_steps_with_eight_and_more_digits(tmp_path):
    numbers, checkpoints = Numbers(), open_at(tmp_path, 2)
    for step in (99_999_990, 99_999_999, 100_000_000, 2**31 - 1):
        numbers.save(checkpoints, step)
    checkpoints.close()
    assert checkpoint_steps(tmp_path) == [100_000_000, 2**31 - 1]
    assert numbers.load(tmp_path) == 2**31 - 1
    for name in ("step-000000100", "step-0100000001", "step-600", "step-99999999999", "step-٠٠٠٠٠٠٠٩"):  # not ours
        (tmp_path / name).mkdir()
    assert len(checkpoint_steps(tmp_path)) == 2


def test_a_checkpoint_has_the_state_when_save_was_called(tmp_path, monkeypatch):
    go, write = threading.Event(), checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", lambda *args, **kwargs: go.wait(30) and write(*args, **kwargs))
    numbers, checkpoints = Numbers(), open_at(tmp_path)
    numbers.save(checkpoints, 1)
    numbers.set(100)  # before the thread has written a byte
    assert checkpoint_steps(tmp_path) == []
    go.set()
    checkpoints.wait()
    assert numbers.load(tmp_path) == 1
    assert numbers.are(1)


def test_a_stager_that_works_once(tmp_path, monkeypatch):
    """As in torch 2.11 and 2.12, where each empties its tables after its first use."""
    stage = checkpoint.DefaultStager.stage

    def stage_and_close(stager, state):
        staged = stage(stager, state)
        stager.close()
        return staged

    monkeypatch.setattr(checkpoint.DefaultStager, "stage", stage_and_close)
    monkeypatch.setattr(checkpoint, "STAGERS_WORK_ONCE", True)
    numbers, checkpoints = Numbers(), open_at(tmp_path)
    for step in (1, 2):
        numbers.save(checkpoints, step)
    checkpoints.close()
    assert numbers.load(tmp_path) == 2
    assert numbers.are(2)


def test_one_save_at_a_time_and_the_callback_after_completion(tmp_path):
    numbers, checkpoints, seen, go = Numbers(), open_at(tmp_path), [], threading.Event()

    def slow(path):
        go.wait(60)
        seen.append((path.name, (path / "manifest.json").exists(), threading.current_thread().name))

    numbers.save(checkpoints, 1, slow)
    assert seen == []  # it did not wait
    threading.Timer(0.1, go.set).start()
    numbers.save(checkpoints, 2)
    assert seen == [("step-00000001", True, "checkpoint_0")]  # this one did
    checkpoints.close()
    assert checkpoint_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("finish", ["save", "wait", "close"])
def test_an_error_of_the_thread_is_raised_once(tmp_path, finish):
    def fail(path):
        raise RuntimeError("then failed")

    numbers, checkpoints = Numbers(), open_at(tmp_path)
    numbers.save(checkpoints, 1, fail)
    acts = {"save": lambda: numbers.save(checkpoints, 2), "wait": checkpoints.wait, "close": checkpoints.close}
    for _ in range(10_000):
        if checkpoints.failed:
            break
        time.sleep(0.01)
    with pytest.raises(RuntimeError, match="then failed"):
        acts[finish]()
    assert not checkpoints.failed
    checkpoints.wait()
    assert checkpoint_steps(tmp_path) == [1]


@settings(max_examples=15)
@given(gaps=st.lists(st.integers(1, 4), min_size=1, max_size=9), keep=st.integers(1, 3),
       every=st.none() | st.integers(1, 5))  # fmt: skip
def test_kept_checkpoints(tmp_path_factory, gaps, keep, every):
    folder, numbers = tmp_path_factory.mktemp("kept"), Numbers()
    checkpoints, done = open_at(folder, keep, every), []
    for gap in gaps:
        done.append(gap + (done[-1] if done else 0))
        numbers.save(checkpoints, done[-1])
    checkpoints.close()
    multiples = {step for step in done if every and step % every == 0}
    assert set(checkpoint_steps(folder)) == multiples | set(done[-keep:])
    assert {path.name for path in folder.iterdir()} == {f"step-{step:08d}" for step in checkpoint_steps(folder)}


def count_plans(monkeypatch):
    """A list that grows with every plan that the first process makes for all."""
    plans, plan = [], DefaultSavePlanner.create_global_plan
    count = lambda planner, parts: plans.append(parts) or plan(planner, parts)  # noqa: E731
    monkeypatch.setattr(DefaultSavePlanner, "create_global_plan", count)
    return plans


def test_a_save_is_planned_again_if_the_state_has_changed(tmp_path, monkeypatch):
    plans, numbers, model = count_plans(monkeypatch), Numbers(), build()
    one, other = open_at(tmp_path / "one", keep=2), open_at(tmp_path / "other")
    optimizer = optimizer_of(model)
    for step in (1, 2, 3):
        numbers.save(one, step)
        optimize(model, optimizer, step)
        other.save(step, model, optimizer)
        one.wait()
        other.wait()
        assert len(plans) == 2  # two runs in one process share nothing
    assert checkpoint_steps(tmp_path / "one") == [2, 3]
    numbers.model.double()  # names and shapes are the same
    numbers.save(one, 4)
    one.close()
    assert len(plans) == 3
    for step, dtype in ((3, torch.float32), (4, torch.float64)):
        assert torch.equal(
            load_weights(path_of(tmp_path / "one", step))["weight"], torch.full((1, 3), step, dtype=dtype)
        )
    assert numbers.load(tmp_path / "one") == 4
    assert numbers.are(4)
    at_3, again = everything(model, optimizer), build(seed=1)
    optimizer = optimizer_of(again)
    assert open_at(tmp_path / "other").load_latest(again, optimizer) == 3
    same(everything(again, optimizer), at_3)


# Damage


SHARD, MANIFEST = "__0_0.distcp", "manifest.json"


def flip(path):
    content = bytearray((path / SHARD).read_bytes())
    content[len(content) // 2] ^= 1
    (path / SHARD).write_bytes(content)


def truncate_by_one(path):
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 1)


def change_step(path):
    (path / MANIFEST).write_text((path / MANIFEST).read_text().replace('"step": 3', '"step": 2'))


DAMAGES = {
    "flip": (flip, f"sha256 of {SHARD} differs"),
    "truncated": (truncate_by_one, f"{SHARD} is truncated, "),
    "empty": (lambda path: os.truncate(path / SHARD, 0), f"{SHARD} is truncated, 0 of "),
    # a sparse file of 32 GB, which takes minutes to read
    "grown": (lambda path: os.truncate(path / SHARD, 2**35), f"{SHARD} has 34359738368 bytes, not "),
    "shard": (lambda path: (path / SHARD).unlink(), f"{SHARD} is missing"),
    "metadata": (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
    "manifest": (lambda path: (path / MANIFEST).unlink(), "no manifest.json"),
    "half a manifest": (lambda path: (path / MANIFEST).write_text("{"), "manifest.json cannot be read"),
    "step": (change_step, "manifest.json is of step 2"),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_is_skipped_and_kept(kind, tmp_path, caplog, warnings):
    numbers, (damage, what) = saved(tmp_path, 1, 2, 3), DAMAGES[kind]
    damage(tmp_path / "step-00000003")
    before = Numbers()
    assert numbers.load(tmp_path, keep=1) == 2
    assert numbers.are(2)
    [line] = warnings()
    assert line.startswith(f"damaged checkpoint skipped, step 2 is used: {tmp_path}/step-00000003: {what}")
    assert "\n" not in line
    assert checkpoint_steps(tmp_path) == [2, 3]  # one intact one is kept; the damaged one does not count

    checkpoints = open_at(tmp_path, keep=1)
    before.save(checkpoints, 3)  # training reaches this step again
    checkpoints.close()
    caplog.clear()
    assert numbers.load(tmp_path, keep=1) == 3
    assert numbers.are(3)
    assert warnings() == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]


def test_all_checkpoints_are_damaged(tmp_path):
    numbers = saved(tmp_path, 1, 2)
    flip(tmp_path / "step-00000001")
    (tmp_path / "step-00000002" / MANIFEST).unlink()
    with pytest.raises(ValueError, match=r"all checkpoints are damaged \(.*/step-00000002: no manifest.json; "
                       r".*/step-00000001: sha256 of __0_0.distcp differs\)"):  # fmt: skip
        numbers.load(tmp_path)
    assert numbers.are(-1)
    assert checkpoint_steps(tmp_path) == [1, 2]


def test_one_flipped_bit_anywhere(tmp_path):
    """Either the older checkpoint is used, or the newer one, intact (for a bit outside the state)."""
    original = tmp_path / "original"
    saved(original, 1, 2)
    files = sorted(path.name for path in (original / "step-00000002").iterdir())
    assert files == [".metadata", SHARD, MANIFEST]

    @settings(max_examples=60, suppress_health_check=[HealthCheck.differing_executors])
    @given(name=st.sampled_from(files), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip_bit(name, where, bit):
        path, numbers = original / "step-00000002" / name, Numbers()
        content = path.read_bytes()
        flipped = bytearray(content)
        flipped[int(where * len(content))] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            step = numbers.load(original)
        finally:
            path.write_bytes(content)
        assert step == 1 or name == MANIFEST
        assert numbers.are(step)

    flip_bit()


@pytest.mark.parametrize(
    ("there", "second", "complaint"),
    [
        ({}, {"canon_set": "A"}, r"canonA.weight is missing there and of shape \(16, 1, 4\) here"),
        ({"canon_set": "A"}, {}, r"canonA.weight is of shape \(16, 1, 4\) there and missing here"),
        ({}, {"intermediate_size": 8}, r"mlp.gate_proj.weight is of shape \(42, 16\) there and of shape"),
    ],
    ids=["missing", "surplus", "mismatch"],
)
def test_a_checkpoint_of_another_model(there, second, complaint, tmp_path):
    model, other = (CanonLMForCausalLM(CanonLMConfig(**SIZES, **settings)) for settings in (there, second))
    optimizer, again = optimizer_of(model), optimizer_of(other)
    optimize(model, optimizer, 0)
    checkpoints = open_at(tmp_path)
    checkpoints.save(1, model, optimizer)
    checkpoints.wait()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ValueError, match=rf"step-00000001: a checkpoint of another model: model.layers.0.{complaint}"):
        checkpoints.load_latest(other, again)
    same(dict(other.state_dict()), before)


# Several processes


def _process(rank, size, rendezvous, act, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    act(World(torch.device("cpu"), rank, size), *args)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture
def together(start, tmp_path):
    """`together(2, act, *args)`: act(world, *args) in that number of processes."""

    def run(size, act, *args):
        rendezvous = tmp_path / f"rendezvous-{time.monotonic_ns()}"
        processes = [start(_process, rank, size, rendezvous, act, args) for rank in range(size)]
        for process in processes:
            process.join(600)
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
        assert codes == [0] * size

    return run


def spread(size, layout, seed=0):
    """The decoder over processes, or without a layout in one; its weights are those of the single process."""
    model = CanonLMForCausalLM(CanonLMConfig(**SIZES, canon_set="AC", init_seed=seed))
    if layout is None:
        return model
    sizes = {"fsdp": (1, size, 1), "tp": (1, 1, size), "hsdp": (2, size // 2, 1), "fsdp+tp": (1, size // 2, 2)}[layout]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard", "tp"))
    if "tp" in layout:
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for layer in model.model.layers:
            parallelize_module(layer.mlp, mesh["tp"], plan)
    if layout != "tp":
        data = mesh["replicate", "shard"] if layout == "hsdp" else mesh["shard"]
        for layer in model.model.layers:
            fully_shard(layer, mesh=data)
        fully_shard(model, mesh=data)
    return model


def _save(world, layout, folder, expected):
    model = spread(world.size, layout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpoints = open_at(folder, world=world)
    for step in (1, 2):
        optimize(model, optimizer, step)
        checkpoints.save(step, model, optimizer)
        now = everything(model, optimizer)  # collectives of the training thread while the other thread writes
        if world.rank == 0:
            torch.save(now, f"{expected}-{step}.pt")
    checkpoints.close()


def _load(world, layout, folder, expected, step):
    model = spread(world.size, layout, seed=9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert open_at(folder, world=world).load_latest(model, optimizer) == step
    same(everything(model, optimizer), torch.load(expected))


@pytest.mark.slow
def test_written_by_some_read_by_any(together, tmp_path, warnings):
    for size, layout, other, layout_there in (
        (2, "fsdp", 4, "hsdp"),
        (4, "hsdp", 4, "fsdp+tp"),
        (4, "fsdp+tp", 2, "tp"),
    ):
        folder, expected = tmp_path / f"by-{size}-{layout}", tmp_path / f"expected-{size}-{layout}"
        together(size, _save, layout, folder, expected)
        together(other, _load, layout_there, folder, f"{expected}-2.pt", 2)
        _load(ALONE, None, folder, f"{expected}-2.pt", 2)
    fsdp = tmp_path / "by-2-fsdp"
    (fsdp / "step-00000002" / "__1_0.distcp").unlink()
    _load(ALONE, None, fsdp, tmp_path / "expected-2-fsdp-1.pt", 1)
    assert "step-00000002: __1_0.distcp is missing" in warnings()[-1]
    together(2, _load, "fsdp", fsdp, tmp_path / "expected-2-fsdp-1.pt", 1)


def _no_room(*_):
    raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))


def _fail(world, folder):
    numbers, checkpoints = Numbers(), open_at(folder, world=world)
    numbers.save(checkpoints, 1)
    checkpoints.wait()
    for place, name in ((os, "fsync"), (Stamp, "of")):  # while it writes its tensors, and while it reads them again
        full = getattr(place, name)
        if world.rank == 1:
            setattr(place, name, _no_room)
        numbers.save(checkpoints, 2)
        with pytest.raises(ValueError, match=f"{os.strerror(errno.EDQUOT)}; step 1 is the newest complete one"):
            numbers.save(checkpoints, 3)
        setattr(place, name, full)
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == ["step-00000001"]
        dist.barrier()

    def then(path):
        raise RuntimeError("then failed")

    numbers.save(checkpoints, 3, then)
    with pytest.raises(RuntimeError, match="then failed"):
        checkpoints.wait()
    for step in (1, 3):
        if world.rank == 0:
            (folder / f"step-0000000{step}" / "__1_0.distcp").write_bytes(b"no tensors")
    dist.barrier()
    with pytest.raises(ValueError, match="all checkpoints are damaged"):
        checkpoints.load_latest(numbers.model, numbers.optimizer)
    other = torch.nn.Linear(4, 1)
    other.weight.sum().backward()
    checkpoints.save(4, numbers.model, numbers.optimizer)
    checkpoints.wait()
    with pytest.raises(ValueError, match="a checkpoint of another model: weight is of shape"):
        checkpoints.load_latest(other, torch.optim.AdamW(other.parameters()))
    checkpoints.close()


def test_an_error_in_one_process_is_raised_in_all(together, tmp_path):
    together(2, _fail, tmp_path / "run")


def _change(world, folder):
    """A state that changes in one process, and a save that fails in one."""
    numbers, checkpoints = Numbers(), open_at(folder, world=world)
    with pytest.MonkeyPatch.context() as patch:
        plans, counts = count_plans(patch), []
        for step in (1, 2, 3, 4, 5, 6):
            if step == 3 and world.rank == 1:
                numbers.model.register_buffer("extra", torch.ones(2))
            with pytest.MonkeyPatch.context() as full:
                if step == 5 and world.rank == 1:
                    full.setattr(os, "fsync", _no_room)
                numbers.save(checkpoints, step)
                try:
                    checkpoints.wait()
                except ValueError:
                    assert step == 5
            counts.append(len(plans))
    checkpoints.close()
    assert counts == ([1, 1, 2, 2, 2, 3] if world.rank == 0 else [0] * 6)
    for step in (1, 2, 3, 4, 6):
        weights = load_weights(path_of(folder, step))
        assert torch.equal(weights["weight"], torch.full((1, 3), float(step)))
        assert ("extra" in weights) == (step > 2)


def test_plans_of_several_processes(together, tmp_path):
    together(2, _change, tmp_path / "run")


# A run's model


def a_run(tiny, folder, seed=0, **fields):
    """A run folder with checkpoints of steps 1 and 2, and the model of each."""
    run = tiny(model={"fields": fields}, train={"seed": seed})
    folder.mkdir(exist_ok=True)
    write_text(folder / "config.yaml", run.to_yaml())
    model = checkpoint.build_model(run).module
    optimizer, models = optimizer_of(model), {}
    checkpoints = open_at(folder / "checkpoints", run=run.model_dump())
    for step in (1, 2):
        ids = torch.arange(8)[None] % 7
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        checkpoints.save(step, model, optimizer)
        models[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    checkpoints.close()
    return models


def test_a_checkpoint_of_another_run_is_refused(tiny, tmp_path):
    """Two runs that differ only in the seed, with their checkpoints swapped; those of earlier versions open."""
    for seed in (1, 2):
        a_run(tiny, tmp_path / f"seed{seed}", seed)
    (tmp_path / "seed1" / "checkpoints").rename(tmp_path / "kept")
    (tmp_path / "seed2" / "checkpoints").rename(tmp_path / "seed1" / "checkpoints")
    message = "step-00000002: of another run than config.yaml: train.seed is 2 there, and 1 here"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "seed1")
    run = load(tmp_path / "seed1" / "config.yaml")
    model = checkpoint.build_model(run).module
    with pytest.raises(ValueError, match=message):
        open_at(tmp_path / "seed1" / "checkpoints", run=run.model_dump()).load_latest(model, optimizer_of(model))
    for step in (1, 2):
        path = tmp_path / "seed1" / "checkpoints" / f"step-{step:08d}" / "manifest.json"
        manifest = json.loads(path.read_text())
        del manifest["run"]
        path.write_text(json.dumps(manifest))
    assert load_model(tmp_path / "seed1").num_parameters


@pytest.mark.parametrize("tied", [False, True])
def test_load_model(tiny, tied, tmp_path, warnings):
    models = a_run(tiny, tmp_path, tie_word_embeddings=tied)
    model = load_model(tmp_path).module
    same(dict(model.state_dict()), models[2])
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert not model.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    same(dict(load_model(tmp_path, 1).module.state_dict()), models[1])
    ids = torch.arange(6)[None]
    with torch.no_grad():
        first = load_model(tmp_path, 1).module(ids).logits
        model.load_state_dict(models[1])
        assert torch.equal(model(ids).logits, first)

    flip(tmp_path / "checkpoints" / "step-00000002")
    same(dict(load_model(tmp_path).module.state_dict()), models[1])
    assert "step 1 is used" in warnings()[-1]
    with pytest.raises(ValueError, match=r"step-00000002: sha256 of __0_0.distcp differs"):
        load_model(tmp_path, 2)
    with pytest.raises(ValueError, match=r"--step: expected a step that has a checkpoint \(1, 2\), got 3"):
        load_model(tmp_path, 3)
    for step in range(100, 3000, 100):
        (tmp_path / "checkpoints" / f"step-{step:08d}").mkdir()
    near = ", ".join(str(step) for step in range(1100, 1900, 100))
    with pytest.raises(ValueError, match=rf"\({near} and 23 more\), got 1499"):
        load_model(tmp_path, 1499)
    with pytest.raises(ValueError, match="RUN: expected the folder of a run that has saved a checkpoint"):
        load_model(tmp_path / "none")
