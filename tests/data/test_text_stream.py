"""Windows of text, against lists of documents, and the guarantees of their order."""

import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from fractions import Fraction
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prepared_folders import write_prepared

from canonlm.data import index
from canonlm.data.shards import Dataset
from canonlm.data.text import Mix, TextStream, TextWindows
from canonlm.data.windows import batches

documents = st.lists(st.integers(0, 999), min_size=1, max_size=12)
shards = st.lists(st.lists(documents, min_size=1, max_size=6), min_size=1, max_size=4)
weights = st.one_of(st.floats(1e-3, 1e3), st.integers(1, 5))


def brute_windows(split, seq_len, isolate):
    """(input_ids, targets, doc_ids) of every window, one token at a time."""
    row = [(token, number) for number, document in enumerate(chain(*split)) for token in document]
    collected = []
    for start in range(0, len(row) - seq_len, seq_len):
        part = row[start : start + seq_len + 1]
        inputs = [token for token, _ in part[:-1]]
        same = [a == b for (_, a), (_, b) in pairwise(part)]
        targets = [token if not isolate or kept else -100 for (token, _), kept in zip(part[1:], same, strict=True)]
        collected.append((inputs, targets, [number - part[0][1] for _, number in part[:-1]]))
    return collected


def as_lists(batch):
    docs = [None] * len(batch.input_ids) if batch.documents is None else batch.documents.ids.tolist()
    return list(zip(batch.input_ids.tolist(), batch.targets.tolist(), docs, strict=True))


@given(split=shards, seq_len=st.integers(1, 20), isolate=st.booleans(), dtype=st.sampled_from(["uint16", "uint32"]))
@settings(max_examples=80)
def test_windows_in_order(split, seq_len, isolate, dtype):
    expected = brute_windows(split, seq_len, isolate)
    with tempfile.TemporaryDirectory() as folder:
        dataset = Dataset(write_prepared(Path(folder), {"train": split}, dtype))
        if not expected:
            with pytest.raises(ValueError, match=f"tokens in its split train, and one window has {seq_len + 1}"):
                TextWindows(dataset, "train", seq_len, isolate)
            return
        windows = TextWindows(dataset, "train", seq_len, isolate)
        batch = windows.rows(0, len(windows))
        last = windows.rows(len(windows) - 1, 1)
    assert as_lists(batch) == [(x, y, docs if isolate else None) for x, y, docs in expected]
    assert as_lists(last) == as_lists(batch)[-1:]
    assert batch.input_ids.dtype == batch.targets.dtype == torch.int64
    assert batch.input_ids.is_contiguous()
    assert batch.targets.is_contiguous()
    assert not isolate or batch.documents.ids.dtype == torch.int64


@given(
    mix=st.dictionaries(st.sampled_from("abcdef"), st.tuples(shards, weights), min_size=1, max_size=4),
    seed=st.integers(0, 2**63 - 1),
    seq_len=st.integers(1, 3),
    isolate=st.booleans(),
    first=st.integers(0, 200),
)
def test_a_window_is_the_one_described(mix, seed, seq_len, isolate, first):
    brute = {name: brute_windows(split, seq_len, isolate) for name, (split, _) in mix.items()}
    if not all(brute.values()):
        return
    with tempfile.TemporaryDirectory() as folder:
        sources = {
            name: (Dataset(write_prepared(Path(folder) / name, {"train": split})), "train", weight)
            for name, (split, weight) in mix.items()
        }
        stream = TextStream(sources, seed, seq_len, isolate)
        rows = as_lists(stream.rows(first, 40))
        again = TextStream(dict(reversed(sources.items())), seed, seq_len, isolate)
        assert as_lists(again.rows(first + 5, 3)) == rows[5:8]
    for window, row in enumerate(rows, start=first):
        source, epoch, position = stream.describe(window)
        inputs, targets, docs = brute[source][position]
        assert row == (inputs, targets, docs if isolate else None)
    # Every epoch of a source has all of its windows once, one epoch after the other.
    seen = defaultdict(list)
    for window in range(first + 40):
        source, epoch, position = stream.describe(window)
        assert epoch == len(seen[source]) // len(brute[source])
        seen[source].append(position)
    for source, positions in seen.items():
        size = len(brute[source])
        for start in range(0, len(positions) - size + 1, size):
            assert sorted(positions[start : start + size]) == list(range(size))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two sources of 300 and 50 windows of 4 tokens."""
    folder = tmp_path_factory.mktemp("two")
    lengths = {"web": 1201, "code": 201}
    return {
        name: Dataset(write_prepared(folder / name, {"train": [[[i % 1000 for i in range(length)]]]}))
        for name, length in lengths.items()
    }


def stream(two, seed=0, web=3.0, code=1.0, **options):
    sources = {"web": (two["web"], "train", web), "code": (two["code"], "train", code)}
    return TextStream(sources, seed, 4, **{"isolate_documents": False, **options})


def orders(made, source, windows):
    """{epoch: positions} of one source in the first windows."""
    result = defaultdict(list)
    for place in map(made.describe, range(windows)):
        if place.source == source:
            result[place.epoch].append(place.position)
    return result


def test_epochs_seeds_and_sources_have_different_orders(two):
    epochs = orders(stream(two), "code", 800)
    other_seed = orders(stream(two, seed=1), "code", 200)
    other_name = orders(TextStream({"x": (two["code"], "train", 1)}, 0, 4, False), "x", 50)
    result = [*(epochs[e] for e in range(4)), other_seed[0], other_name[0]]
    assert all(sorted(order) == list(range(50)) for order in result)
    assert len(set(map(tuple, result))) == len(result)
    for a in result:
        for b in result:  # two random orders of 50 agree in one place on average
            assert a is b or sum(x == y for x, y in zip(a, b, strict=True)) < 6


def test_the_order_of_a_source_does_not_depend_on_the_others(two):
    alone = TextStream({"code": (two["code"], "train", 0.2)}, 0, 4, False)
    assert orders(alone, "code", 100) == orders(stream(two), "code", 400) == orders(stream(two, web=1.0), "code", 200)


@given(values=st.lists(weights, min_size=1, max_size=12), first=st.one_of(st.just(0), st.integers(0, 10**15)))
def test_the_mix_counts_without_gaps_and_keeps_its_shares(values, first):
    values = sorted(values, reverse=True)
    total = sum(map(Fraction, values))
    bound = [Fraction(1, 2) * (1 + sum(Fraction(1, j) for j in range(1, i + 1))) for i in range(len(values))]
    mix, counts = Mix(values), {}
    for window in range(first, first + 300):
        source, before = mix.pick(window)
        assert before == counts.get(source, before)  # the first one seen may be at any position, then one by one
        counts[source] = before + 1
        assert abs(before + 1 - (window + 1) * Fraction(values[source]) / total) <= bound[source]
        assert abs(before - window * Fraction(values[source]) / total) <= bound[source]
    if first == 0:
        assert sum(counts.values()) == 300


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("isolate", [False, True])
def test_the_ranks_parts_are_the_batch(two, ranks, workers, isolate):
    made = stream(two, isolate_documents=isolate)
    full = [as_lists(made.rows(step * 8, 8)) for step in range(5, 9)]
    parts = [batches(made, 5, 9, 8, workers, rank=rank, ranks=ranks) for rank in range(ranks)]
    assert [[*chain(*map(as_lists, step))] for step in zip(*parts, strict=True)] == full


def test_distant_rows_are_read_as_fast_as_the_first(two):
    made = stream(two)
    made.rows(0, 1)
    start = time.process_time()
    far = made.rows(10**12, 1)
    assert time.process_time() - start < 5
    source, epoch, position = made.describe(10**12)
    size = {"web": 300, "code": 50}[source]
    assert epoch == pytest.approx({"web": 0.75, "code": 0.25}[source] * 10**12 / size, abs=1)
    begin = position * 4
    assert far.input_ids.tolist() == [[i % 1000 for i in range(begin, begin + 4)]]


@pytest.mark.slow
def test_two_gigabytes_are_not_held_in_memory(tmp_path):
    """32 sparse files of full length, and windows from all over them, in a separate process.

    The system may keep or drop the files' pages; other memory of the process must not grow with the corpus.
    """
    count = 2**25  # tokens a file
    shards = tuple(index.Shard(f"train-{i:05}.ds", count, 2**16, count, "0" * 64, "0" * 64) for i in range(32))
    for shard in shards:
        with (tmp_path / shard.name).open("wb") as file:
            file.truncate(2 * count)
        (np.arange(1, 2**16 + 1, dtype="<u8") * (count >> 16)).tofile(tmp_path / shard.ends)
    tokenizer = {"name": "tokenizer.json", "sha256": "0" * 64}
    index.write(tmp_path, index.Index(10, "uint16", tokenizer, None, None, {"train": shards}, (), 0, {}))
    code = """
import sys
from pathlib import Path
from canonlm.data.shards import Dataset
from canonlm.data.text import TextStream

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

stream = TextStream({"a": (Dataset(sys.argv[1]), "train", 1)}, 0, 4096, True)
stream.rows(0, 64)
before, peak, shards = held(), 0, set()
for batch in range(256):
    stream.rows(64 * batch, 64)
    peak = max(peak, held())
    shards |= {stream.describe(window).position // 2**13 for window in range(64 * batch, 64 * batch + 64)}
print(len(shards), peak - before)
"""
    made = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    touched, growth = map(int, made.stdout.split())
    assert touched == 32
    assert growth < 16 * 2**20  # the 2**26 tokens that were read are 2**29 bytes as int64


def test_the_stream_is_the_same_in_every_process_and_release(two):
    """A change here would change the data of continued runs: it needs a reason, and a line in the changelog. (Computed
    with Python's integers and fractions.)"""
    first = [tuple(stream(two, seed=5).describe(window)) for window in range(6)]
    assert first == [
        ("web", 0, 149),
        ("web", 0, 154),
        ("code", 0, 18),
        ("web", 0, 191),
        ("web", 0, 114),
        ("web", 0, 180),
    ]
