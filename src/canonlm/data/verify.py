"""Computes the sha256 of shards while training reads them.

One thread, of the lowest priority, reads each shard from start to end and compares it with `index.json`. It reads in
blocks through a file of its own and releases the interpreter lock while it hashes. After each block it sleeps twice as
long as it computed, so it takes at most a third of a core; once a run waits for it, it no longer sleeps. Blocks that
were not in the page cache before are dropped from it again: reading a terabyte once would push out what the training
reads often.
"""

import hashlib
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from canonlm.core.untrusted import open_regular
from canonlm.data import index

BLOCK = 2**20  # bytes that are read and hashed at a time; the thread stops between two blocks
SLEEP = 2.0  # seconds after each block, per second of CPU time that it took


class Opened(NamedTuple):
    """A shard in a folder."""

    folder: Path
    shard: index.Shard

    @property
    def path(self) -> Path:
        return self.folder / self.shard.name


class Verifier:
    """Verifies the shards passed to `add`, in order. At the first damaged file it stops: `error` is a one-line
    ValueError that names the file, and the remaining shards stay `pending`. It is slow until `wait` is first called."""

    def __init__(self, sleep: Callable[[float], None] = time.sleep, block: int = BLOCK) -> None:
        """block: bytes that are read and hashed at a time."""
        self.error: Exception | None = None
        self.verified_bytes = 0
        self._added: set[Opened] = set()
        self._queue: deque[Opened] = deque()
        self._change = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._awaited = False
        self._sleep, self._block = sleep, block

    def add(self, opened: Opened) -> None:
        """Verify a shard, unless it was added before. Does not wait."""
        with self._change:
            if opened in self._added or self._closed:
                return
            self._added.add(opened)
            self._queue.append(opened)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="verifier", daemon=True)
                self._thread.start()
            self._change.notify_all()

    @property
    def pending(self) -> list[Opened]:
        """The shards that are not verified yet."""
        with self._change:
            return list(self._queue)

    def wait(self, seconds: float) -> bool:
        """Wait until all is verified or damage is detected (True), at most `seconds` (False). From now on the thread
        works at full speed."""
        self._awaited = True
        with self._change:
            return self._change.wait_for(lambda: not self._queue or self.error is not None, seconds)

    def close(self) -> None:
        """Stop, even if shards are left."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        _lower_priority()
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                opened = self._queue[0]
            error: Exception | None = None
            try:
                finished = self._verify(opened)
            except Exception as damage:  # of any class: the training thread raises it
                error, finished = damage, True
            with self._change:
                if not finished:
                    return
                if error is None:
                    self._queue.popleft()
                self.error = error
                self._change.notify_all()
                if error is not None:
                    return

    def _verify(self, opened: Opened) -> bool:
        """True: the shard is undamaged. False: stopped before the end."""
        shard = opened.shard
        for name, sha256 in ((shard.name, shard.sha256), (shard.ends, shard.ends_sha256)):
            actual = self._sha256(opened.folder / name)
            if actual is None:
                return False
            if actual != sha256:
                raise index.damaged(opened.folder / name)
        return True

    def _sha256(self, path: Path) -> str | None:
        digest, block, at = hashlib.sha256(), memoryview(bytearray(self._block)), 0
        try:
            with open_regular(path) as file:
                descriptor = file.fileno()
                cached = []  # checked before the first block is read, as the system reads ahead
                for start in range(0, os.fstat(descriptor).st_size, self._block):
                    if self._closed:
                        return None
                    cached.append(_is_cached(descriptor, start))
                computed = time.thread_time()
                while count := file.readinto(block):
                    if self._closed:
                        return None
                    digest.update(block[:count])
                    self.verified_bytes += count
                    if at // self._block < len(cached) and not cached[at // self._block]:
                        _drop(descriptor, at, count)
                    at += count
                    if not self._awaited:
                        self._sleep(SLEEP * (time.thread_time() - computed))
                    computed = time.thread_time()
        except OSError as error:
            raise index.cannot_be_read(path, error) from None
        return digest.hexdigest()


def _lower_priority() -> None:
    """Lower this thread's priority. Only Linux has priorities of threads."""
    if sys.platform == "linux":
        with suppress(OSError):  # a container may forbid it; then the thread keeps its priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)


def _is_cached(descriptor: int, start: int) -> bool:
    """Whether the file's byte at `start` is in the page cache; True if unknown."""
    if not hasattr(os, "RWF_NOWAIT"):
        return True
    try:
        os.preadv(descriptor, [bytearray(1)], start, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell
        return True
    return True


def _drop(descriptor: int, start: int, count: int) -> None:
    """Drop these bytes from the page cache; mapped pages stay."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)
