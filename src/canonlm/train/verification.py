"""Verifies the shards that a run reads against their checksums, during training.

On each machine, one process is responsible for each shard, so a machine verifies a shard once; with `data.verify:
once`, one process of all machines is. At every checkpoint and
at the end, processes exchange the lists of shards that they have opened; usually the responsible process has opened the
shard itself by then.

Damage ends the run, in every process, after the step in which it is detected. A run does not end before all that it
read is verified. A checkpoint does not wait: `unverified.json` beside it lists the shards that are not verified when it
is saved, and a process that continues from it verifies them, too. So a run that read a damaged shard never writes a
`result.json`, unless `data.verify` is false.
"""

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zlib import crc32

from canonlm.core.distributed import World
from canonlm.core.errors import expected
from canonlm.core.files import write_json
from canonlm.core.untrusted import read_object
from canonlm.data.index import Shard
from canonlm.data.shards import Dataset
from canonlm.data.verify import Opened, Verifier
from canonlm.train.signals import Interrupted, Signals

NAME = "unverified.json"
SECONDS = 0.2  # between two checks of the signals while a run waits
PATIENCE = 2.0  # seconds of waiting without a message


class Verification:
    """Verifies the texts of a run (by key of the setting; {}: nothing is verified). once: all machines read the same
    files. All processes create one, and call `check`, `note` and `finish` at the same steps.

    ValueError, in all of them: `unverified.json` in `folder` is damaged.
    """

    def __init__(self, texts: dict[str, Dataset], folder: Path, world: World, *, once: bool = False) -> None:
        self._texts, self._path, self._world = texts, folder / NAME, world
        self._verifier = Verifier()
        self._name = "all" if once else socket.gethostname()
        machines = world.gather(self._name) if texts else []
        self._machine = [rank for rank, name in enumerate(machines) if name == machines[world.rank]]
        self._others: dict[Opened, None] = {}  # for other processes, which may not have opened them
        with world.all_or_none():
            listed = self._read() if texts else []
        for opened in listed:
            self.opened(*opened)

    def opened(self, folder: Path, shard: Shard) -> None:
        """Add a shard to those to verify, as the run reads its tokens. Called from the threads that read."""
        if not self._texts:
            return
        opened = Opened(folder, shard)
        if self._is_mine(opened):
            self._verifier.add(opened)
        else:
            self._others[opened] = None

    @property
    def failed(self) -> bool:
        """Whether `check` would raise. It may differ between processes: they must agree on it first."""
        return self._verifier.error is not None

    def check(self) -> None:
        """ValueError, in every process, if one of them has detected damage."""
        if self._texts:
            self._world.raise_on_any_rank(self._verifier.error)

    def note(self) -> None:
        """List the shards that are not verified yet; to be called before a checkpoint is saved."""
        if self._texts:
            pending = self._exchange()
            if self._world.main:
                self._write(pending)

    def finish(self, signals: Signals, step: int, on_row: Callable[[dict[str, Any]], None]) -> None:
        """Wait until all is verified. ValueError: damage. Interrupted: stopped by a signal; checkpoints are saved."""
        if not self._texts:
            return
        world, verifier, start, silent = self._world, self._verifier, time.monotonic(), True
        self._exchange()
        while world.any(not verifier.wait(SECONDS)):
            if silent and world.any(time.monotonic() - start > PATIENCE):
                silent = False
                unverified = [shard.tokens for pending in world.gather(verifier.pending) for _, shard in pending]
                why = f"the run ends once its text is verified: {len(unverified):,} shards, {sum(unverified):,} tokens"
                if world.main:
                    on_row({"kind": "note", "step": step, "why": f"{why} to go (data.verify=false skips this)"})
            if world.any(signals.received is not None or self.failed):
                self.check()
                self.note()
                raise Interrupted(
                    f"stopped while the text was verified; {world.broadcast(signals.next_step(world.main))}"
                )
        self.check()
        if world.main:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Stop, even if shards are left."""
        self._verifier.close()

    def _is_mine(self, opened: Opened) -> bool:
        return self._machine[crc32(opened.shard.name.encode()) % len(self._machine)] == self._world.rank

    def _exchange(self) -> dict[Opened, None]:
        """Send shards to the processes that verify them. Returns all that are not verified yet, of all processes."""
        new = [self._others.popitem()[0] for _ in range(len(self._others))]
        everyone = self._world.gather((self._name, new, self._verifier.pending))
        for name, new_shards, _ in everyone:
            for opened in new_shards if name == self._name else ():
                if self._is_mine(opened):
                    self._verifier.add(opened)
        return dict.fromkeys(opened for _, new_shards, pending in everyone for opened in (*new_shards, *pending))

    def _write(self, pending: dict[Opened, None]) -> None:
        listed = {
            key: sorted(opened.shard.name for opened in pending if opened.folder == text.folder)
            for key, text in self._texts.items()
        }
        if pending:
            write_json(self._path, {key: names for key, names in listed.items() if names})
        else:
            self._path.unlink(missing_ok=True)

    def _read(self) -> list[Opened]:
        if not self._path.exists():
            return []
        unverified = []
        for key, names in read_object(self._path).items():
            if (text := self._texts.get(key)) is None:
                raise expected(str(self._path), f"keys such as {next(iter(self._texts))}", key)
            shards = {shard.name: shard for part in text.index.splits.values() for shard in part}
            for name in names if isinstance(names, list) else [names]:
                if not isinstance(name, str) or name not in shards:
                    raise expected(f"{self._path}: {key}", f"names of shards in {text.folder}", name)
                unverified.append(Opened(text.folder, shards[name]))
        return unverified
