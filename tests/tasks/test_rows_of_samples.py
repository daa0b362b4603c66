"""Samples as columns: those of `task.sample`, drawn many at once."""

import numpy as np
import pytest

from canonlm import tasks
from canonlm.tasks.rows import spans

TASKS = {
    "lano": {"grammar": "cfg3b"},
    "lano with short sentences": {"grammar": "s = a b | b a b\na = 1 2 | 2 1 1\nb = 1 1 | 2 2 1 | 1 2\n"},
    "capo": {"N": 20},
    "capo of one person": {"N": 1},
    "capo of few texts": {"N": 7, "variant": "multi", "texts": 2, "permute": False, "fullname": True},
    "capo with questions": {"N": 7, "questions": True},
}


@pytest.mark.parametrize("loss_on", [None, "answer", "all"])
@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("name", TASKS)
def test_columns_are_those_of_samples(name, split, loss_on, monkeypatch):
    task = tasks.get(name.split()[0], **TASKS[name])
    samples = [task.sample(split, 5, index, loss_on=loss_on) for index in range(13, 43)]
    monkeypatch.delattr(type(task), "_read")  # reading a sample takes longer than drawing fifty
    rows = task.sample_rows(split, 5, 13, 30, loss_on=loss_on)
    np.testing.assert_array_equal(rows.tokens, np.concatenate([sample.tokens for sample in samples]))
    np.testing.assert_array_equal(rows.labels, np.concatenate([sample.labels for sample in samples]))
    assert rows.lengths.tolist() == [len(sample.tokens) for sample in samples]
    assert rows.spans.tolist() == [len(spans(sample)) for sample in samples]
    bounds = [span for sample in samples for span in spans(sample)]
    assert list(zip(rows.starts.tolist(), rows.stops.tolist(), strict=True)) == bounds
