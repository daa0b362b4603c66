"""The host does not wait for a GPU: between log rows, the loop reads no value from the device."""

import pytest
import torch
from host_waits import Calls, Waits

from canonlm.data.windows import Batch
from canonlm.ops.varlen import Documents, documents_of
from canonlm.train import loop
from canonlm.train.loop import train
from canonlm.train.micro_batches import prepare


@pytest.fixture
def waits(monkeypatch):
    """The waits in steps 5 and 6 of a run, which `train` adds."""
    result = Waits()
    calls = Calls(result.seen)

    class Watching(loop.Clock):
        def tick(self):
            super().tick()
            if self._steps == 4:
                result.__enter__()
                calls.__enter__()
            elif self._steps == 6:
                calls.__exit__(None, None, None)
                result.__exit__(None, None, None)

    monkeypatch.setattr(loop, "Clock", Watching)
    return result


MODELS = {
    "llama+canon": {"arch": "llama+canon"},
    "experts": {"arch": "llama+mlp=moe", "model": {"fields": {"num_experts": 4}}},
    "hybrid": {"arch": "gdn2.llama+canon", "model": {"num_hidden_layers": 2}},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", MODELS)
def test_a_training_step_does_not_synchronize(tiny, tmp_path, waits, name):
    """Two complete steps of the loop: batch, micro-batches, clipping, optimizer, and checks of what is due."""
    often = {"log_every": 100, "eval_every": 100, "checkpoint_every": 100}
    config = tiny(
        **MODELS[name],
        data={"isolate_documents": True},
        train={"steps": 7, "optim": {"grad_clip": 0.1}, **often},
        parallel={"micro_batch_size": 2},
    )
    train(config, tmp_path)
    assert waits.ops > 200, "the steps were not watched"
    assert waits.seen == []


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: float(x.sum()),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.masked_select(x > 0),
        lambda x: x.unique(),
        lambda x: torch.arange(3).repeat_interleave(torch.tensor([1, 2, 3])),
        lambda x: torch.autograd.grad((x.requires_grad_() * Waiting.apply(x)).sum(), x),
    ],
)
def test_synchronizations_are_detected(wait):
    with Waits() as result, Calls(result.seen):
        wait(torch.randn(4))
    assert result.seen


class Waiting(torch.autograd.Function):
    """Waits in its backward only."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx * dx.sum().item()


def test_a_gpu_reads_from_pinned_memory(monkeypatch):
    pinned = []

    def pin(tensor):
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    ids = torch.arange(24).view(6, 4)
    batch = Batch(ids, ids.masked_fill(ids % 5 == 0, -100), Documents(ids // 3))
    for device, places in (("cpu", 0), ("cuda", 12)):
        pinned.clear()
        portion = prepare(batch, 2, torch.device(device))
        assert portion.num_targets == 19
        assert len(pinned) == places
        parts = [x for part in portion.micro_batches for x in (part.input_ids, part.targets, part.documents.ids)]
        memory = {tensor.untyped_storage().data_ptr() for tensor in pinned}
        assert len(parts) == 9
        assert {part.untyped_storage().data_ptr() in memory for part in parts} == {device == "cuda"}
        assert torch.equal(torch.cat([part.input_ids for part in portion.micro_batches]), ids)
        borders = [part.documents.cu_seqlens for part in portion.micro_batches]
        if device == "cpu":
            assert borders == [None] * 3
            continue
        assert {part.untyped_storage().data_ptr() for part in borders} < memory
        counted = [documents_of(ids[rows : rows + 2] // 3).cu_seqlens for rows in (0, 2, 4)]
        assert all(map(torch.equal, borders, counted))
