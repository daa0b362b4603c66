"""Windows as tensors: a pure function of their number, in any thread."""

import threading
import time

import pytest
import torch

from canonlm import tasks
from canonlm.data.windows import AHEAD, WindowStream, batches

COPYING = tasks.get("copying", N=8, min_items=2)


def stream(task=COPYING, seq_len=40, **changes):
    settings = {"split": "train", "seed": 0, "seq_len": seq_len, "loss_on": "answer", "isolate_documents": False}
    return WindowStream(task, **{**settings, **changes})


def ids_of(batch):
    return batch.documents and batch.documents.ids


def equal(a, b):
    tensors = ((a.input_ids, b.input_ids), (a.targets, b.targets), (ids_of(a), ids_of(b)))
    return all((x is None and y is None) or torch.equal(x, y) for x, y in tensors)


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("isolate", [False, True])
def test_batches_are_rows(workers, isolate):
    it = stream(isolate_documents=isolate)
    made = list(batches(it, 3, 20, 4, workers))
    assert len(made) == 17
    assert all(equal(batch, it.rows(index * 4, 4)) for index, batch in enumerate(made, start=3))
    assert list(batches(it, 5, 5, 4, workers)) == []


def test_threads_end_when_the_consumer_stops_early_or_fails():
    before = threading.active_count()
    made = batches(stream(), 0, 10_000, 4, workers=3)
    next(made)
    assert threading.active_count() > before
    made.close()
    assert threading.active_count() == before

    def consume():
        for _ in batches(stream(), 0, 10_000, 4, workers=2):
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop") as caught:
        consume()
    del caught
    assert threading.active_count() == before


def test_prefetching_is_bounded(monkeypatch):
    drawn = []
    monkeypatch.setattr(WindowStream, "rows", lambda self, first, count: drawn.append(first))
    made = batches(stream(), 0, 10_000, 4, workers=2)
    next(made)
    time.sleep(0.05)
    assert len(drawn) <= 2 * AHEAD + 1
    made.close()


def test_an_error_in_a_sampler_is_raised(monkeypatch):
    def fail(self, first, count):
        raise ValueError("no such window")

    monkeypatch.setattr(WindowStream, "rows", fail)
    with pytest.raises(ValueError, match="no such window"):
        list(batches(stream(), 0, 10, 4, workers=2))


@pytest.mark.parametrize("loss_on", ["answer", "all"])
def test_the_first_token_of_an_isolated_document_is_not_a_target(loss_on):
    mano = tasks.get("mano", L=2)
    together = stream(mano, 60, loss_on=loss_on).rows(0, 8)
    apart = stream(mano, 60, loss_on=loss_on, isolate_documents=True).rows(0, 8)
    assert together.documents is None
    assert together.input_ids.dtype == together.targets.dtype == torch.int64
    assert torch.equal(together.input_ids, apart.input_ids)
    docs = torch.from_numpy(mano.windows("train", 0, 0, 8, seq_len=60, loss_on=loss_on).doc_ids)
    assert torch.equal(apart.documents.ids, docs)
    after_the_first = docs[:, 1:] != docs[:, :-1]
    assert after_the_first.sum() > 8
    assert (apart.targets[:, :-1][after_the_first] == -100).all()
    assert torch.equal(apart.targets[:, :-1][~after_the_first], together.targets[:, :-1][~after_the_first])
    if loss_on == "all":
        assert (together.targets[:, :-1][after_the_first] != -100).all()
