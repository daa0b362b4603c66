"""Leases: which worker has which run, on a file system that several machines share.

A lease is a file `NAME.G.json` with its owner in it. G, the generation, starts at 1. The owner updates the file's
time every few seconds, as a heartbeat. A lease without a heartbeat for SILENT of its intervals is stale, and may be
taken over: by creating generation G + 1, then removing the older ones. Only then does the new owner begin.

- Creating is exclusive (a hard link, which is atomic on NFS too), so one worker succeeds with each generation. A worker
  that decided slowly creates an old generation, sees the newer one, and withdraws.
- A worker detects the loss of a lease by opening it: it is gone, or belongs to another worker. File systems with
  close-to-open consistency, such as NFS, open the newest version, while they may answer `stat` from a cache.
- Clocks of machines are never compared. A worker counts, on its own clock, how long it has seen no change; a pause
  between two checks counts as one interval, so that a machine that slept does not take others for dead.

So at any moment at most one worker finds itself the owner. No lease can prevent a process from pausing between this
check and the write after it, and continuing after another worker has taken over.
"""

import errno
import json
import math
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

from canonlm.core.errors import expected, writing
from canonlm.core.files import create, time_in
from canonlm.core.untrusted import open_regular, parse_json
from canonlm.runs.rows import DAMAGE, one_line

SILENT = 5
"""Intervals without a heartbeat after which a lease may be taken over."""

VARIABLE = "CANONLM_LEASE"
"""The environment variable with the lease of a process's run."""

MAX_INTERVAL = 3600.0
"""Max seconds between heartbeats. A lease with a longer interval is not ours."""

_MAX_BYTES = 2**16
_SUFFIX = ".json"
_GONE = (errno.ENOENT, errno.ESTALE)  # ESTALE: another machine has removed the file (NFS)


@dataclass(frozen=True)
class Owner:
    """The content of a lease. Each claim has a random `id`."""

    id: str
    host: str
    pid: int
    start: float  # seconds since 1970, by the owner's clock: for display
    interval: float  # seconds between heartbeats


NOBODY = Owner("", "?", 0, 0.0, 0.0)
"""The owner in a damaged lease: no process can hold it, so anyone may take it over."""


@dataclass(frozen=True)
class Lease:
    """A successful claim. It may have been lost since."""

    path: Path
    id: str

    @classmethod
    def of_environment(cls) -> "Lease | None":
        """The lease of the worker that started this process."""
        id, _, path = os.environ.get(VARIABLE, "").partition(":")
        return cls(Path(path), id) if path else None

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process with this lease."""
        return {VARIABLE: f"{self.id}:{self.path.absolute()}"}

    def held(self) -> bool:
        """Whether this is still the run's lease. OSError if the file system does not answer."""
        return self._open(lambda descriptor: None)

    def beat(self) -> bool:
        """Send a heartbeat; False if the lease is lost. OSError as in `held`."""
        return self._open(os.utime)  # by the descriptor: the name may become another worker's in between

    def release(self) -> None:
        if self.held():
            self.path.unlink(missing_ok=True)

    def _open(self, act: Callable[[int], None]) -> bool:
        try:
            with open_regular(self.path) as file:
                if _owner(file).id != self.id:
                    return False
                act(file.fileno())
                return True
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise


Listing = Mapping[str, Mapping[int, Path]]
"""The files of leases, by the name of the run and the generation."""


@dataclass
class _Sighting:
    """When a lease was last checked, and how long it has been unchanged."""

    mark: tuple[str, int]
    looked: float
    unchanged: float = 0.0


class Leases:
    """The leases in a folder, as one worker sees them. clock: seconds, of this machine only."""

    def __init__(self, folder: Path, interval: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.folder, self.interval, self._clock = folder, interval, clock
        self._sightings: dict[Path, _Sighting] = {}

    def claim(self, name: str, listing: Listing | None = None) -> Lease | None:
        """Claim a run that has no owner, or whose owner sends no heartbeats; None if another worker has it.

        listing: what `listed` returned before, where many runs are claimed. An old one is safe, as a worker may pause
        after it has listed the folder anyway: a claim that creates a lease lists the folder again.
        """
        generations = (self.listed() if listing is None else listing).get(name, {})
        top = max(generations, default=0)
        if top and not self._is_stale(generations[top]):
            return None
        lease = self._create(name, top + 1)
        if lease is None:
            return None
        generations = self.listed().get(name, {})
        if max(generations, default=0) > top + 1:
            lease.release()
            return None
        for generation, path in generations.items():
            if generation <= top:
                with suppress(IsADirectoryError):
                    path.unlink(missing_ok=True)
        return lease

    def listed(self) -> Listing:
        """All leases of the folder."""
        listing: dict[str, dict[int, Path]] = {}
        for name, generation, path in _leases_in(self.folder):
            listing.setdefault(name, {})[generation] = path
        return listing

    def owners(self) -> dict[str, tuple[Owner, float]]:
        """The owner of every run that has one, and seconds since its last heartbeat, by the file system's clock."""
        listing = self.listed()
        now, ages = _now(self.folder), {}
        for name, generations in listing.items():
            with suppress(FileNotFoundError):  # released in between
                owner, status = _read(generations[max(generations)])
                ages[name] = owner, max(0.0, now - status.st_mtime)
        return ages

    def remove(self, names: set[str]) -> None:
        """Remove leases of runs that no longer need one, and leftovers of killed workers' claims."""
        for name, _, path in _leases_in(self.folder):
            if name in names:
                path.unlink(missing_ok=True)
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)

    def _is_stale(self, path: Path) -> bool:
        now = self._clock()  # before the file is read, so that a pause in between does not make an owner look dead
        try:
            owner, status = _read(path)
            mark = status.st_mtime_ns
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        if owner == NOBODY:
            return True
        sighting = self._sightings.get(path)
        if sighting is None or sighting.mark != (owner.id, mark):
            self._sightings[path] = _Sighting((owner.id, mark), now)
            return False
        sighting.unchanged += min(now - sighting.looked, owner.interval)
        sighting.looked = now
        return sighting.unchanged > SILENT * owner.interval

    def _create(self, name: str, generation: int) -> Lease | None:
        lease = Lease(self.folder / f"{name}.{generation}{_SUFFIX}", uuid.uuid4().hex)
        owner = Owner(lease.id, socket.gethostname(), os.getpid(), time.time(), self.interval)
        temporary = self.folder / f".{lease.id}.tmp"
        with writing("leases", self.folder), create(temporary) as file:
            file.write(json.dumps(asdict(owner)).encode() + b"\n")
        try:
            os.link(temporary, lease.path)
        except (FileExistsError, FileNotFoundError):
            # NFS may make the link and lose the reply; the repeated request then fails, as the link exists.
            if not temporary.exists() or temporary.stat().st_nlink != 2:
                return None
        except OSError as error:
            what = f"a file system with hard links ({error.strerror})"
            raise expected("leases", what, str(self.folder)) from None
        finally:
            temporary.unlink(missing_ok=True)
        return lease


def _leases_in(folder: Path) -> list[tuple[str, int, Path]]:
    """(name of the run, generation, file) of every lease."""
    leases = []
    for file in os.listdir(folder) if folder.is_dir() else ():
        name, _, generation = file.removesuffix(_SUFFIX).rpartition(".")
        if file.endswith(_SUFFIX) and not file.startswith(".") and generation.isdecimal():
            leases.append((name, int(generation), folder / file))
    return leases


def _read(path: Path) -> tuple[Owner, os.stat_result]:
    """The owner in a lease, and the status of its file."""
    if path.is_symlink():
        return NOBODY, os.lstat(path)
    try:
        with open_regular(path) as file:
            return _owner(file), os.fstat(file.fileno())
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.EINVAL, errno.ENXIO, errno.ELOOP):  # not a regular file
            return NOBODY, os.lstat(path)
        raise


def _owner(file: BinaryIO) -> Owner:
    """The owner in a lease; NOBODY if no worker can have written it. For a lease that a crash left empty, an owner
    without heartbeats."""
    if not (content := file.read(_MAX_BYTES)):
        return Owner("", "?", 0, 0.0, 60.0)
    try:
        raw = parse_json(content, "")
        start, interval = float(raw["start"]), float(raw["interval"])
        possible = math.isfinite(start) and 0 < interval <= MAX_INTERVAL
        return (
            Owner(str(raw["id"]), one_line(str(raw["host"])), int(raw["pid"]), start, interval) if possible else NOBODY
        )
    except DAMAGE:
        return NOBODY


def _now(folder: Path) -> float:
    """Seconds since 1970 by the file system's clock; by this machine's if nothing can be written."""
    try:
        return time_in(folder)
    except OSError:
        return time.time()
