"""Shards that differ from what was prepared: a run that reads one never finishes, in any process, at any time."""

import json
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
import torch
import yaml
from prepared_folders import write_prepared

from canonlm.cli import main
from canonlm.core.distributed import World
from canonlm.data import index, verify
from canonlm.data.prepare import prepare
from canonlm.data.shards import Dataset
from canonlm.data.text import TextStream
from canonlm.data.verify import Opened, Verifier
from canonlm.launch.processes import free_port
from canonlm.runs.identity import identity
from canonlm.train import loop, verification
from canonlm.train.config import resolve
from canonlm.train.load_config import merge
from canonlm.train.loop import train
from canonlm.train.signals import Interrupted

SEQ_LEN, BATCH, STEPS = 16, 4, 20


@pytest.fixture(scope="session")
def prepared_text(tmp_path_factory):
    """Six shards to train on, and held-out ones."""
    folder = tmp_path_factory.mktemp("whole")
    draw = np.random.default_rng(7)
    documents = ["".join(draw.choice(list("abcdefgh"), draw.integers(20, 60))) for _ in range(300)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    prepare(folder / "web", [str(folder / "a.jsonl")], tokenizer="bytes", validation=0.2, tasks=6, workers=1)
    return folder / "web"


@pytest.fixture
def web(prepared_text, tmp_path):
    return shutil.copytree(prepared_text, tmp_path / "web")


def raw(web, **changes):
    settings = {
        "arch": "llama",
        "text": {"sources": {"web": {"path": str(web)}}},
        "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2},
        "data": {"seq_len": SEQ_LEN},
        "train": {"steps": STEPS, "batch_size": BATCH, "num_threads": 1, "log_every": 5, "eval_every": 10,
                  "eval_size": 8, "checkpoint_every": 5, "optim": {"lr": 3e-3, "warmup_steps": 5}},
    }  # fmt: skip
    return merge(settings, changes)


def run(web, **changes):
    return resolve(raw(web, **changes))


def flip(path, every=50):
    """Flip one bit in every 50th token, as a bad disk does."""
    content = np.fromfile(path, np.uint8)
    content[:: every * 2] ^= 1
    content.tofile(path)


def assert_damaged(error, path):
    assert str(error.value) == f"{path}: damaged: its sha256 is not the one in index.json"


def shards(web, split="train"):
    return sorted(path.name for path in web.glob(f"{split}-*.ds"))


# -- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.every(4)
@pytest.mark.parametrize("workers", [0, 1, 3])
@pytest.mark.parametrize("name", ["train-00003.ds", "train-00003.ds.index", "valid-00000.ds"])
def test_a_run_that_reads_a_damaged_shard_does_not_finish(web, tmp_path, name, workers):
    flip(web / name, every=4 if name.endswith("index") else 50)
    for _ in range(2):  # nor does it when run again
        with pytest.raises(ValueError) as error:
            train(run(web, data={"workers": workers}), tmp_path / "run")
        assert_damaged(error, web / name)
        assert not (tmp_path / "run" / "result.json").exists()


def test_verifying_changes_no_result_and_is_optional(web, tmp_path, tiny):
    train(run(web), tmp_path / "on")
    train(run(web, data={"verify": False}), tmp_path / "off")
    tiny.same(tmp_path / "on", tmp_path / "off")
    flip(web / "train-00003.ds")
    assert train(run(web, data={"verify": False}), tmp_path / "damaged")["steps"] == STEPS
    # A run of a version without the setting is continued as the same run.
    (tmp_path / "on" / "result.json").unlink()
    config = (tmp_path / "on" / "config.yaml").read_text()
    assert "  verify: true\n" in config
    (tmp_path / "on" / "config.yaml").write_text(config.replace("  verify: true\n", ""))
    assert train(run(web, data={"verify": False}), tmp_path / "on")["steps"] == STEPS
    new = run(web).model_dump()
    old = {**new, "data": {key: value for key, value in new["data"].items() if key != "verify"}}
    assert identity(new) == identity(old) == identity(run(web, data={"verify": False}).model_dump())


class Slow(Verifier):
    """Verifies nothing until the test allows it."""

    let = False

    def _verify(self, opened):
        while not Slow.let and not self._closed:
            time.sleep(0.005)
        return super()._verify(opened) if Slow.let else False


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(verification, "Verifier", Slow)
    monkeypatch.setattr(verification, "SECONDS", 0.01)
    monkeypatch.setattr(verification, "PATIENCE", 0.05)
    monkeypatch.setattr(Slow, "let", False)
    return Slow


def test_waiting_at_the_end_is_reported_and_can_be_interrupted(web, tmp_path, slow, monkeypatch):
    rows = []

    def on_row(row):
        rows.append(row)
        if row["kind"] == "note":
            os.kill(os.getpid(), 15)

    with pytest.raises(Interrupted, match=r"^stopped while the text was verified; run it again to continue$"):
        train(run(web), tmp_path / "run", on_row)
    [note] = [row["why"] for row in rows if row["kind"] == "note"]
    assert note.startswith("the run ends once its text is verified: ")
    assert note.endswith(" to go (data.verify=false skips this)")
    [listed] = json.loads((tmp_path / "run" / verification.NAME).read_text()).values()
    assert listed == sorted([*shards(web), "valid-00000.ds"])  # only the first held-out one is read
    assert not (tmp_path / "run" / "result.json").exists()
    # All steps are done, so the next process reads nothing, but it still verifies the shards that the first one read.
    flip(web / "train-00003.ds")
    monkeypatch.setattr(Slow, "let", True)
    with pytest.raises(ValueError) as error:
        train(run(web), tmp_path / "run")
    assert_damaged(error, web / "train-00003.ds")
    flip(web / "train-00003.ds")  # back
    assert train(run(web), tmp_path / "run")["steps"] == STEPS
    assert not (tmp_path / "run" / verification.NAME).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "expected a JSON object, got list"),
        ('{"text.sources.news.path": []}', 'expected keys such as text.sources.web.path, got "text.sources.news.path"'),
        ('{"text.sources.web.path": ["../x"]}', 'text.sources.web.path: expected names of shards in .*, got "../x"'),
        ('{"text.sources.web.path": 7}', "text.sources.web.path: expected names of shards in .*, got 7"),
        ("[" * 100_000, "unverified.json: expected JSON with at most 100 levels of nesting"),
    ],
)
def test_an_untrusted_list_of_unverified_shards(web, tmp_path, content, message):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / verification.NAME).write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        train(run(web), tmp_path / "run")
    assert "\n" not in str(error.value)


# -- the thread -------------------------------------------------------------------------------------------------------


def opened(web):
    return [Opened(web, shard) for shard in index.read(web).splits["train"]]


def test_every_single_bit_is_seen(web):
    draw = np.random.default_rng(0)
    for _ in range(30):
        one = opened(web)[draw.integers(6)]
        full = one.path.read_bytes()
        where, bit = draw.integers(len(full)), draw.integers(8)
        one.path.write_bytes(full[:where] + bytes([full[where] ^ (1 << bit)]) + full[where + 1 :])
        verifier = Verifier()
        verifier.add(one)
        assert verifier.wait(300)
        assert str(verifier.error) == f"{one.path}: damaged: its sha256 is not the one in index.json"
        verifier.close()
        one.path.write_bytes(full)


def test_shards_are_read_once_in_order_and_blocks_add_up(web):
    verifier = Verifier(block=100)
    for one in opened(web) * 3:
        verifier.add(one)
    assert verifier.wait(300)
    assert verifier.error is None
    assert verifier.pending == []
    sizes = [(web / name).stat().st_size for one in opened(web) for name in (one.shard.name, one.shard.ends)]
    assert verifier.verified_bytes == sum(sizes)
    verifier.close()


class Sleeps:
    """Replaces `time.sleep`: records the durations, and sleeps until `go` is set."""

    def __init__(self):
        self.seconds, self.began, self.go = [], threading.Event(), threading.Event()

    def __call__(self, seconds):
        self.seconds.append(seconds)
        self.began.set()
        assert self.go.wait(60)


@pytest.fixture
def sleeps(monkeypatch):
    """The clock of the thread that verifies: each block takes it a second."""
    ticks = count()
    monkeypatch.setattr(verify.time, "thread_time", lambda: next(ticks))
    return Sleeps()


def blocks(web):
    files = [web / name for one in opened(web) for name in (one.shard.name, one.shard.ends)]
    return sum(-(-file.stat().st_size // 100) for file in files)


def test_sleeps_two_thirds_of_the_time_during_training(web, sleeps):
    sleeps.go.set()
    verifier = Verifier(sleeps, block=100)
    for one in opened(web):
        verifier.add(one)
    deadline = time.monotonic() + 300
    while verifier.pending and time.monotonic() < deadline:
        time.sleep(0.005)
    assert verifier.pending == []
    assert sleeps.seconds == [2.0] * blocks(web)
    verifier.close()


def test_does_not_sleep_once_the_run_waits(web, sleeps):
    verifier = Verifier(sleeps, block=100)
    for one in opened(web):
        verifier.add(one)
    assert sleeps.began.wait(300)
    assert not verifier.wait(0)
    sleeps.go.set()
    assert verifier.wait(300)
    assert verifier.error is None
    assert sleeps.seconds == [2.0]  # the current sleep
    verifier.close()


def test_it_stops_at_once(tmp_path):
    (tmp_path / "a.ds").touch()
    os.truncate(tmp_path / "a.ds", 2**36)  # a hole: some minutes of hashing
    verifier = Verifier()
    verifier.add(Opened(tmp_path, index.Shard("a.ds", 2**35, 1, 0, "0" * 64, "0" * 64)))
    time.sleep(0.05)
    start = time.monotonic()
    verifier.close()
    assert time.monotonic() - start < 30
    assert [one.shard.name for one in verifier.pending] == ["a.ds"]


@pytest.mark.parametrize("kind", ["gone", "fifo", "device", "folder"])
def test_a_shard_that_is_no_longer_a_file(web, kind):
    one = opened(web)[0]
    one.path.unlink()
    {
        "gone": lambda: None,
        "fifo": lambda: os.mkfifo(one.path),
        "device": lambda: one.path.symlink_to("/dev/zero"),
        "folder": one.path.mkdir,
    }[kind]()
    verifier = Verifier()
    verifier.add(one)
    assert verifier.wait(300)
    assert str(verifier.error).startswith(f"{one.path}: cannot be read: ")
    verifier.close()


# -- several processes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOfThem(World):
    """A thread that acts as a process. All share the list and the barrier."""

    values: list | None = None
    barrier: threading.Barrier | None = None

    def gather(self, value):
        self.values[self.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def max(self, numbers):
        return [max(column) for column in zip(*self.gather(numbers), strict=True)]


@pytest.mark.parametrize("once", [False, True], ids=["each machine", "all machines"])
def test_each_shard_is_verified_once(web, tmp_path, monkeypatch, once):
    """By two processes of machine a, and one of machine b."""
    monkeypatch.setattr(verification.socket, "gethostname", lambda: threading.current_thread().name)
    values, barrier = [None] * 3, threading.Barrier(3, timeout=300)

    def work(rank):
        threading.current_thread().name = "aab"[rank]
        world = OneOfThem(torch.device("cpu"), rank, 3, values=values, barrier=barrier)
        made = verification.Verification({"web": Dataset(web)}, tmp_path, world, once=once)
        if rank != 1:  # rank 1 owns some, and learns of them by `note`
            for one in opened(web):
                made.opened(*one)
        made.note()
        made.finish(None, 1, print)  # no signal comes
        made.close()
        return made._verifier._added

    with ThreadPoolExecutor(3) as pool:
        first, second, other = pool.map(work, range(3))
    shared = (first, second, other) if once else (first, second)
    assert set().union(*shared) == set(opened(web))
    assert sum(map(len, shared)) == len(opened(web))
    assert all(shared)
    assert once or other == set(opened(web))
    assert not (tmp_path / verification.NAME).exists()


def _train(rank, port, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
    raise SystemExit(main(["train", str(folder / "run.yaml"), "--out", str(folder / "run")]))


@pytest.mark.slow
def test_two_processes_report_damage_once(web, tmp_path, start):
    flip(web / "train-00003.ds")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(raw(web, train={"steps": 200})))
    port = free_port()
    processes = [start(_train, rank, port, tmp_path) for rank in (0, 1)]
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [2, 2]
    first, second = ((tmp_path / f"{rank}.txt").read_text() for rank in (0, 1))
    message = f"canonlm: {web / 'train-00003.ds'}: damaged: its sha256 is not the one in index.json\n"
    assert first.endswith(message)
    assert second == ""
    assert not (tmp_path / "run" / "result.json").exists()


# -- tokens and document ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_beyond_the_vocabulary_is_refused_with_its_position(tmp_path, dtype):
    documents = [[1, 2, 3], [4, 5, 6, 7]], [[8, 9, 12], [10]]
    write_prepared(tmp_path, {"train": documents}, dtype, vocab_size=12)
    for _ in range(2):
        with pytest.raises(ValueError) as error:
            TextStream({"a": (Dataset(tmp_path), "train", 1)}, 0, 5, False).rows(0, 2)
        where = f"{tmp_path / 'train-00001.ds'}: damaged: token 2 is 12"
        if str(error.value) != f"{where}, where vocab_size of index.json is 12":
            pytest.fail(str(error.value))
    write_prepared(tmp_path, {"train": documents}, dtype, vocab_size=13)
    TextStream({"a": (Dataset(tmp_path), "train", 1)}, 0, 5, False).rows(0, 2)


ENDS = {
    "descending": ([3, 2, 6, 8], "document 1 ends before the one before it"),
    "beyond": ([3, 5, 6, 9], "the last document ends at 9, where index.json says 8 tokens"),
    "short": ([3, 5, 6, 7], "the last document ends at 7, where index.json says 8 tokens"),
    "negative": ([-3, 5, 6, 8], "document 0 ends before the one before it"),
    "huge": ([2**63 - 1, 5, 6, 8], "document 1 ends before the one before it"),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("block", [2, 2**17])
def test_invalid_document_ends(tmp_path, monkeypatch, name, block):
    from canonlm.data import shards

    monkeypatch.setattr(shards, "BLOCK", block)
    write_prepared(tmp_path, {"train": [[[1, 2, 3], [4, 5], [6], [7, 8]]]})
    ends, message = ENDS[name]
    np.array(ends, "<i8").tofile(tmp_path / "train-00000.ds.index")
    path = tmp_path / "train-00000.ds.index"
    with pytest.raises(ValueError, match=rf"^{path}: damaged: {message}$"):
        TextStream({"a": (Dataset(tmp_path), "train", 1)}, 0, 4, True).rows(0, 1)


def test_the_largest_token_and_empty_documents_are_accepted(tmp_path):
    write_prepared(tmp_path / "large", {"train": [[[65_535] * 20]]}, vocab_size=65_536)
    stream = TextStream({"a": (Dataset(tmp_path / "large"), "train", 1)}, 0, 4, False)
    assert int(stream.rows(0, 3).input_ids.max()) == 65_535
    write_prepared(tmp_path, {"train": [[[], [1, 2, 3], [], [], [4, 5]]]})
    rows = TextStream({"a": (Dataset(tmp_path), "train", 1)}, 0, 4, True).rows(0, 1)
    assert rows.documents.ids.tolist() == [[0, 0, 0, 1]]


def test_a_file_truncated_after_it_was_checked(tmp_path):
    """Reading the mapped memory beyond its end would kill the process."""
    dataset = Dataset(write_prepared(tmp_path, {"train": [[list(range(5000))]]}, vocab_size=5000))
    os.truncate(tmp_path / "train-00000.ds", 100)
    with pytest.raises(ValueError, match=r"train-00000\.ds: damaged: 100 bytes, where index\.json says 10,000$"):
        dataset.tokens("train").read(4000, np.empty(10, np.int64))
    os.truncate(tmp_path / "train-00000.ds", 0)
    with pytest.raises(ValueError, match=r"damaged: 0 bytes"):
        dataset.tokens("train").prefetch(0, 10)


# -- index.json -------------------------------------------------------------------------------------------------------


def changed(folder, change):
    path = write_prepared(folder, {"train": [[[1, 2, 3]]], "valid": []}) / "index.json"
    content = json.loads(path.read_text())
    change(content, content["splits"]["train"][0])
    path.write_text(json.dumps(content))
    return folder


SHARD = "splits.train.0"
INDEX = {
    "negative tokens": (lambda i, s: s.update(tokens=-1), f"{SHARD}.tokens: expected greater than 0, got -1"),
    "huge tokens": (lambda i, s: s.update(tokens=10**200), f"{SHARD}.tokens: expected less than 281474976710656"),
    "float tokens": (lambda i, s: s.update(tokens=1e308), f"{SHARD}.tokens: expected an integer, got 1e+308"),
    "no tokens": (lambda i, s: s.pop("tokens"), f"{SHARD}.tokens: missing"),
    "true documents": (lambda i, s: s.update(documents=True), f"{SHARD}.documents: expected an integer, got True"),
    "no sha256": (lambda i, s: s.update(sha256=""), f"{SHARD}.sha256: expected a sha256 of 64 hexadecimal digits"),
    "no hex": (lambda i, s: s.update(ends_sha256="g" * 64), f"{SHARD}.ends_sha256: expected a sha256 of 64"),
    "up": (lambda i, s: s.update(name="../train-00000.ds"), f"{SHARD}.name: expected the name of a file in"),
    "name of a number": (lambda i, s: s.update(name=3), f"{SHARD}.name: expected a string, got 3"),
    "more keys": (lambda i, s: s.update(color="red"), f"{SHARD}.color: unknown key"),
    "floats": (lambda i, s: i.update(dtype="float16"), "dtype: expected 'uint16' or 'uint32', got \"float16\""),
    "structures": (lambda i, s: i.update(dtype=[["a", "u2"]]), "dtype: expected 'uint16' or 'uint32', got [["),
    "huge vocabulary": (lambda i, s: i.update(vocab_size=2**40), "vocab_size: expected less than or equal to 16777216"),
    "no vocabulary": (lambda i, s: i.update(vocab_size=0), "vocab_size: expected greater than 0, got 0"),
    "two bytes": (lambda i, s: i.update(vocab_size=65_537), "vocab_size: expected at most 65,536 with dtype uint16"),
    "bos": (lambda i, s: i.update(bos_id=1000), "bos_id: expected null or a token below vocab_size = 1000, got 1000"),
    "eos": (lambda i, s: i.update(eos_id=-1), "eos_id: expected greater than or equal to 0, got -1"),
    "tokenizer": (lambda i, s: i["tokenizer"].update(name="../x"), "tokenizer.name: expected the name of a file in"),
    "tokenizers": (lambda i, s: i.update(tokenizer=["x"]), "tokenizer: expected an object, got ['x']"),
    "a list of splits": (lambda i, s: i.update(splits=[]), "splits: expected an object, got []"),
    "other splits": (lambda i, s: i["splits"].update(test=[]), "splits.test.[key]: expected 'train' or 'valid'"),
    "a text of shards": (lambda i, s: i["splits"].update(train="a" * 10**6), "splits.train: expected a list, got"),
    "a number": (lambda i, s: i["splits"].update(train=[1]), f"{SHARD}: expected an object, got 1"),
    "inputs": (lambda i, s: i.update(inputs={}), "inputs: expected a list"),
    "a key more": (lambda i, s: i.update(more=1), "more: unknown key"),
}  # fmt: skip


@pytest.mark.parametrize("name", INDEX)
def test_an_untrusted_index(tmp_path, name):
    change, message = INDEX[name]
    with pytest.raises(ValueError) as error:
        Dataset(changed(tmp_path, change))
    assert str(error.value).startswith(f"{tmp_path / 'index.json'}: {message}")
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


def test_all_texts_of_a_run_share_one_vocabulary(web, prepared_text, tmp_path):
    content = json.loads((web / "index.json").read_text())
    (web / "index.json").write_text(json.dumps({**content, "vocab_size": 300}))
    both = {"a": {"path": str(prepared_text)}, "b": {"path": str(web)}}
    with pytest.raises(ValueError, match=r"text\.sources\.b\.path: expected text with a vocabulary of 258 tokens"):
        loop.data.complete(run(web, text={"sources": both | {"web": {"path": str(prepared_text)}}}))
