"""One device as a mesh of one, as on a single GPU with text in bfloat16; tested here on the CPU."""

import resource
from contextlib import contextmanager

import pytest
import torch
from parallel_checks import ALONE, FAMILIES, Trained, run_config

from canonlm.core.distributed import World
from canonlm.train import loop
from canonlm.train.loop import train
from canonlm.train.mesh import allow_open_files, mesh_of_one

CPU = torch.device("cpu")


@contextmanager
def alone(config=None):
    with mesh_of_one(CPU) as mesh:
        yield World(CPU, mesh=mesh)


@pytest.mark.slow
def test_a_run_is_the_same_and_resumes_without_the_mesh(tiny, reference, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(loop, "world_of", alone)
        train(tiny(), tmp_path)
    assert not torch.distributed.is_initialized()
    tiny.back_to(tmp_path, 30)
    train(tiny(), tmp_path)
    rows, expected = tiny.rows(tmp_path), tiny.rows(reference)
    assert [(row["kind"], row["step"]) for row in rows] == [(row["kind"], row["step"]) for row in expected]
    for row, other in zip(rows, expected, strict=True):  # the gradient norm is summed in another order
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_stream_is_bfloat16_as_on_a_cluster():
    def stream(world):
        run, seen = Trained(FAMILIES["llama"], run_config(train={"precision": "bf16"}), world), set()
        for block in run.spread.blocks.values():
            block.register_forward_pre_hook(lambda _, args: seen.add(args[0].dtype))
        losses = run.losses(2)
        assert {p.dtype for p in run.model.parameters()} == {torch.float32}
        return seen, losses

    with alone() as world:
        result, losses = stream(world)
    assert result == {torch.bfloat16}
    by_autocast, others = stream(ALONE)
    assert by_autocast == {torch.float32}
    assert losses == pytest.approx(others, rel=0.02)


def test_a_process_of_many_may_open_as_many_files_as_the_system_allows():
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
        allow_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
