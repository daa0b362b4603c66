"""Prepared folders as tokens, against the documents as Python lists; and incomplete folders."""

import resource
import tempfile
from itertools import accumulate, chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepared_folders import write_prepared

from canonlm.data import shards
from canonlm.data.shards import Dataset

documents = st.lists(st.integers(0, 999), min_size=1, max_size=12)
splits = st.lists(st.lists(documents, min_size=1, max_size=6), min_size=1, max_size=5)


@given(split=splits, dtype=st.sampled_from(["uint16", "uint32"]), data=st.data())
def test_reading_equals_the_list_of_documents(split, dtype, data):
    large = {"uint16": 65, "uint32": 2**22}[dtype]  # up to about the largest number of this type
    split = [[[token * large for token in document] for document in shard] for shard in split]
    tokens = [*chain(*chain(*split))]
    begins = {0, *accumulate(map(len, chain(*split)))} - {len(tokens)}
    start = data.draw(st.integers(0, len(tokens) - 1), label="start")
    stop = data.draw(st.integers(start, len(tokens)), label="stop")
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset(write_prepared(Path(folder), {"train": split, "valid": []}, dtype, bytes_per_token=3))
        row = dataset.tokens("train")
        out = np.empty(stop - start, np.int64)
        row.prefetch(start, stop)
        row.read(start, out)
        result = [int(begin) for part in row.begins(start, stop) for begin in part]
    assert out.tolist() == tokens[start:stop]
    assert [start + begin for begin in result] == sorted(b for b in begins | {len(tokens)} if start < b <= stop)
    assert len(row) == dataset.num_tokens("train") == len(tokens)
    assert dataset.bytes_per_token("train") == 3
    assert (dataset.num_tokens("valid"), len(dataset.tokens("valid"))) == (0, 0)


def test_contents_of_the_index(tmp_path):
    dataset = Dataset(str(write_prepared(tmp_path / "a", {"train": [[[1, 2]]], "valid": []}, vocab_size=77)))
    assert (dataset.vocab_size, dataset.bos_token_id, dataset.eos_token_id) == (77, 1, None)
    with pytest.raises(ValueError, match=r'unknown split "vaild"\. Did you mean "valid"'):
        dataset.tokens("vaild")


def test_more_shards_than_a_process_may_open(tmp_path):
    """The test lowers this process's limit on open files for a while."""
    count = shards.OPEN_FILES + 200
    row = Dataset(write_prepared(tmp_path, {"train": [[[number, 5]] for number in range(count)]})).tokens("train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(map(int, (path.name for path in Path("/proc/self/fd").iterdir())))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + shards.OPEN_FILES + 20, hard))
    try:
        out = np.empty(2 * count, np.int64)
        for _ in range(2):
            row.read(0, out)
            assert out.tolist() == [*chain(*([number, 5] for number in range(count)))]
            assert sum(len(part) for part in row.begins(0, 2 * count)) == count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_folder_that_was_prepared_again(tmp_path):
    out = np.empty(2, np.int64)
    for token in (3, 4):
        for path in tmp_path.iterdir():
            path.unlink()
        Dataset(write_prepared(tmp_path, {"train": [[[token, token]]]})).tokens("train").read(0, out)
        assert out.tolist() == [token, token]


@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("train-00001.ds", lambda row: row.read(2, np.empty(2, np.int64))),
        ("train-00001.ds.index", lambda row: [*row.begins(2, 4)]),
    ],
)
def test_cut_and_missing_files_also_if_in_use(tmp_path, name, use):
    row = Dataset(write_prepared(tmp_path, {"train": [[[1, 2, 3]], [[4, 5, 6], [7]]], "valid": []})).tokens("train")
    path = tmp_path / name
    full = path.read_bytes()
    path.write_bytes(full[:-2])
    with pytest.raises(ValueError, match=rf"^{path}: damaged: \d+ bytes, where index.json says {len(full)}$"):
        Dataset(tmp_path)
    path.unlink()
    for attempt in (lambda: Dataset(tmp_path), lambda: use(row)):
        with pytest.raises(ValueError, match=f"^{path}: cannot be read: No such file or directory$"):
            attempt()
