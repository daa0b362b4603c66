"""The two steps of `canonlm data prepare` as datatrove runs them, on this machine, on SLURM or on Ray.

A task reads its share of the inputs and writes at most one shard per split (canonlm.data.index), by datatrove's
`TokenizedFile`. We do not use its `DocumentTokenizer`: that has no splits, obeys all settings in the tokenizer's file
(truncation, special tokens in the text), takes 10 000 documents at once, of any length, and keeps what the library's
slower `encode_batch` returns about each token.

Files get their names when they are complete, so a killed task leaves no damaged files, and two processes of a task (one
of them left over from a killed command) do not disturb each other.
"""

import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from io import TextIOWrapper
from pathlib import Path
from struct import pack

from datatrove.data import Document, DocumentsPipeline
from datatrove.pipeline.base import PipelineStep
from datatrove.pipeline.tokens.tokenizer import TokenizedFile

from canonlm.core.files import create, temporary_name, write_json
from canonlm.data import tokenizers
from canonlm.data.encode import Encoder
from canonlm.data.index import Shard, file_sha256
from canonlm.data.reading import Bad, Input, read, total

BATCH = 2**20  # characters that are encoded at once: up to some 130 MB of the library's data about tokens
MAX_LISTED = 1000  # bad lines beyond the allowed number that a task lists before it gives up
EVERY = 0.5  # seconds between two reports of progress


@dataclass(frozen=True)
class Places:
    """Paths in a folder that is being prepared."""

    out: Path

    @property
    def work(self) -> Path:
        return self.out / "work"

    @property
    def tokenizer(self) -> Path:
        return self.out / "tokenizer.json"

    def task(self, kind: str, rank: int) -> Path:
        """`kind`: bad (lines), done (the task's shards) or progress."""
        return self.work / kind / f"{rank:05d}.json"


class TooManyBadLines(ValueError):
    """`canonlm.data.prepare` turns this into an error with the first line of the list."""


class Reader(PipelineStep):
    """Documents of the task's share; bad lines go to the task's list."""

    type, name = "reader", "canonlm"

    def __init__(self, out: Path, inputs: list[Input], text_key: str, max_bad: int) -> None:
        super().__init__()
        self.places, self.inputs, self.text_key, self.max_bad = Places(out), inputs, text_key, max_bad

    def run(self, data: DocumentsPipeline = None, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        start, stop = share(self.inputs, rank, world_size)
        count = 0
        for kind in ("bad", "progress"):  # leftovers of a stopped task
            self.places.task(kind, rank).unlink(missing_ok=True)
        with TextIOWrapper(create(self.places.task("bad", rank)), encoding="utf-8") as bad_lines:
            for item in read(self.inputs, start, stop, self.text_key):
                if isinstance(item, Bad):
                    count += 1
                    bad_lines.write(json.dumps(asdict(item)) + "\n")
                    bad_lines.flush()
                    if count >= self.max_bad + MAX_LISTED:
                        raise TooManyBadLines(f"task {rank}: {count} bad lines")
                else:
                    yield Document(text=item.text, id="", metadata={"position": item.position})


def share(inputs: list[Input], rank: int, tasks: int) -> tuple[int, int]:
    """[start, stop) of a task in the inputs laid end to end."""
    length = total(inputs)
    return rank * length // tasks, (rank + 1) * length // tasks


class Writer(PipelineStep):
    """Writes the tokens of the documents, one shard per split.

    bos and eos are ids, or None. A hash of (seed, text) alone decides whether a document belongs to `valid`. So no
    document of `valid` is in `train`, not even as a duplicate.
    """

    type, name = "writer", "canonlm"

    def __init__(
        self, out: Path, inputs: list[Input], dtype: str, bos: int | None, eos: int | None, validation: float, seed: int
    ) -> None:
        super().__init__()
        self.places, self.inputs, self.validation, self.seed = Places(out), inputs, validation, seed
        self.format = "I" if dtype == "uint32" else "H"
        self.bos, self.eos = (b"" if id is None else pack(f"<{self.format}", id) for id in (bos, eos))

    def run(self, data: DocumentsPipeline, rank: int = 0, world_size: int = 1) -> DocumentsPipeline:
        encoder = Encoder(tokenizers.from_file(self.places.tokenizer), self.places.tokenizer)
        start, stop = share(self.inputs, rank, world_size)
        shards: dict[str, _OpenShard] = {}
        reported = 0.0
        try:
            for batch in _batches(data):
                tokens = [bytearray(self.bos) for _ in batch]
                for number, ids in encoder.encode(document.text for document in batch):
                    tokens[number] += pack(f"<{len(ids)}{self.format}", *ids)
                for document, content in zip(batch, tokens, strict=True):
                    text = document.text.encode("utf-8")
                    split = self.split(text)
                    if split not in shards:
                        shards[split] = _OpenShard(self.places.out, f"{split}-{rank:05d}.ds", self.format)
                    shards[split].add(bytes(content + self.eos), len(text))
                for shard in shards.values():
                    shard.flush()
                if time.monotonic() - reported >= EVERY:
                    reported = time.monotonic()
                    self._report(rank, batch[-1].metadata["position"] - start, shards)
            done = {split: shard.close() for split, shard in shards.items()}
        finally:
            for shard in shards.values():
                shard.remove_temporary()
        self._report(rank, stop - start, shards)
        write_json(self.places.task("done", rank), {split: asdict(shard) for split, shard in done.items() if shard})
        yield from ()

    def split(self, text: bytes) -> str:
        key = self.seed.to_bytes(8, "little")
        number = int.from_bytes(blake2b(text, digest_size=8, key=key).digest(), "little")
        return "valid" if number < self.validation * 2.0**64 else "train"

    def _report(self, rank: int, read_bytes: int, shards: "dict[str, _OpenShard]") -> None:
        counts = sum((shard.counts for shard in shards.values()), Counter())
        write_json(self.places.task("progress", rank), [read_bytes, counts["documents"], counts["tokens"]])


def _batches(data: Iterator[Document]) -> Iterator[list[Document]]:
    """Groups of documents of about BATCH characters."""
    batch: list[Document] = []
    length = 0
    for document in data:
        batch.append(document)
        length += len(document.text) + 1
        if length >= BATCH:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


class _OpenShard:
    """A shard that is being written, under a temporary name."""

    def __init__(self, out: Path, name: str, format: str) -> None:
        self.path, self.size = out / name, 4 if format == "I" else 2
        self.temporary = temporary_name(self.path)
        self.file = TokenizedFile(str(out), self.temporary.name, token_size=self.size)
        self.counts = Counter(documents=0, tokens=0, bytes=0)
        self._tokens: list[bytes] = []
        self._ends: list[int] = []
        self._length = 0

    def add(self, tokens: bytes, text_bytes: int) -> None:
        """One document."""
        self._tokens.append(tokens)
        self._length += len(tokens) // self.size
        self._ends.append(self._length)
        self.counts.update(documents=1, tokens=len(tokens) // self.size, bytes=text_bytes)

    def flush(self) -> None:
        self.file.write_bytes(b"".join(self._tokens), self._ends)
        self._tokens, self._ends, self._length = [], [], 0

    def close(self) -> Shard | None:
        """Rename it to its final name. None: no document has a token, and no file is left."""
        self.file.close()
        if not self.counts["tokens"]:
            return None
        sha256 = []
        for temporary, path in self._files():
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            sha256.append(file_sha256(temporary))
            temporary.replace(path)
        return Shard(self.path.name, **self.counts, sha256=sha256[0], ends_sha256=sha256[1])

    def remove_temporary(self) -> None:
        """Remove temporary files after a failure; those that `close` has renamed stay."""
        with suppress(OSError):  # it writes what is left, which a full disk refuses again
            self.file.tokens_file.close()
        for temporary, _ in self._files():
            temporary.unlink(missing_ok=True)

    def _files(self) -> list[tuple[Path, Path]]:
        return [
            (path.with_name(path.name + end), self.path.with_name(self.path.name + end))
            for path, end in ((self.temporary, ""), (self.temporary, ".index"))
        ]
