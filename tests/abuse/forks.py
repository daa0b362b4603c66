"""Run one command in a forked process that has everything imported, and watch it from outside.

A fork takes milliseconds where a new interpreter takes five seconds, so that a minute tries hundreds of commands.
"""

import contextlib
import faulthandler
import gc
import os
import resource
import shutil
import signal
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import canonlm

# Before torch and its like are imported: a process with threads cannot be forked.
os.environ |= {"OMP_NUM_THREADS": "1", "POLARS_MAX_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
               "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1", "NO_COLOR": "1", "COLUMNS": "120"}  # fmt: skip

SECONDS = 10.0  # of processor time
PATIENCE = 30.0  # seconds of the clock: the machine may be busy
GIGABYTES = 2.0  # above what the process began with
FILE_SIZE = 2**30
MARK = "CANONLM_ABUSE"

SOURCE = Path(canonlm.__file__).parent
PYTHONS = (sys.prefix, sys.base_prefix, sysconfig.get_path("purelib"), SOURCE)  # .venv may be a link
READABLE = tuple(
    sorted(
        {f"{place}/" for place in PYTHONS}
        | {f"{os.path.realpath(place)}/" for place in PYTHONS}
        | {f"{Path(__file__).parent}/", "/proc/", "/sys/", "/usr/", "/lib/", "/dev/null", "/dev/urandom"}
        | {"/dev/shm/torch_", "/etc/localtime", "/etc/mime.types", "/etc/os-release", "/etc/apache", "/etc/httpd"}
    )
)
"""Where any command may read: Python, this package, the system."""

PROCESSES = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty")
WRITES = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.symlink", "os.link", "os.chmod", "os.truncate")
NETWORK = ("socket.connect", "socket.getaddrinfo", "urllib.Request")
CLASSES = (
    "torch", "collections", "builtins", "_codecs", "numpy", "_io", "datetime", "pathlib", "canonlm", "copyreg",
    "numba", "llvmlite",
)  # fmt: skip
"""Modules whose classes `pickle` may look up; which of them it may use is torch's weights-only list."""


@dataclass
class Outcome:
    """The outcome of a command. `code` is None if it was killed from outside; `ended` is then the reason."""

    code: int | None
    out: str
    err: str
    ended: str = ""
    events: list[str] = field(default_factory=list)  # recorded by the audit hook
    stack: str = ""  # of a command that hung
    seconds: float = 0.0
    leftovers: list[int] = field(default_factory=list)  # processes that outlived it


def run(work: Callable[[], int], folder: Path, notes: Path, limit: float = SECONDS) -> Outcome:
    """`work()` in a fork whose current folder is `folder`; its output goes to files in `notes`."""
    began, mark = time.monotonic(), str(time.monotonic_ns())
    pid = start(work, folder, notes, mark)
    status, ended = _watch(pid, began, limit)
    seconds, code = time.monotonic() - began, os.waitstatus_to_exitcode(status)
    if not ended and code < 0:
        ended = f"died of {signal.Signals(-code).name}"
    leftovers = family(pid, mark)
    for process in leftovers:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    texts = {name: (notes / name).read_text(errors="replace") for name in ("out", "err", "events", "stack")}
    shutil.rmtree(notes / "tmp", ignore_errors=True)
    return Outcome(
        None if ended else code, texts["out"], texts["err"], ended, texts["events"].splitlines(),
        texts["stack"], seconds, leftovers,
    )  # fmt: skip


def start(work: Callable[[], int], folder: Path, notes: Path, mark: str) -> int:
    """Start a process that runs `work()`. `mark` is in its environment, by which `family` finds its processes."""
    for name in ("out", "err", "events", "stack"):
        (notes / name).write_bytes(b"")
    (notes / "tmp").mkdir(exist_ok=True)
    gc.freeze()  # the fork does not search for garbage in what is imported
    if (pid := os.fork()) == 0:
        _live(work, folder, notes, mark)
    return pid


def _watch(pid: int, began: float, limit: float) -> tuple[int, str]:
    """Wait for a process; end it if it takes too much time or memory. Returns its status, and why it was ended."""
    base = _resident(pid)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status, ""
        clock, memory = time.monotonic() - began, _resident(pid) - base
        if memory > GIGABYTES * 1e9:
            ended = f"took more than {GIGABYTES:g} GB"
        elif _processor(pid) > limit or clock > PATIENCE + limit:
            ended = f"took more than {limit:g} s"
        else:
            time.sleep(0.002 if clock < 0.5 else 0.02)
            continue
        os.kill(pid, signal.SIGUSR1)  # prints its stack before it ends
        time.sleep(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        return os.waitpid(pid, 0)[1], ended


def _resident(pid: int) -> int:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource.getpagesize()


def _processor(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(leader: int, mark: str) -> list[int]:
    """The live processes of a command: those in its session, and those whose environment has its mark."""
    collected = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            ours = int(fields[3]) == leader or f"{MARK}={mark}".encode() in (place / "environ").read_bytes().split(
                b"\0"
            )
        except OSError:
            continue
        if ours and fields[0] != "Z":
            collected.append(int(place.name))
    return collected


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ").strip()
    except OSError:
        return "ended meanwhile"


def _live(work: Callable[[], int], folder: Path, notes: Path, mark: str) -> None:
    """The main function of the fork; it never returns."""
    code = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(notes / name, os.O_WRONLY), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= {"TMPDIR": str(notes / "tmp"), MARK: mark}
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_SIZE, FILE_SIZE))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # gives an OSError, as after Python's own start
        stack = (notes / "stack").open("w")
        faulthandler.enable(stack)
        faulthandler.register(signal.SIGUSR1, stack)
        sys.addaudithook(_hook(os.open(notes / "events", os.O_WRONLY | os.O_APPEND), folder, notes))
        try:
            code = work()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _is_inner(path: str) -> bool:
    """Whether a file lies in a folder that the command names: a file that it names may be a link."""
    return os.path.basename(path) not in {os.path.basename(each.rpartition("=")[2]) for each in sys.argv}


def _place(path: str) -> str:
    """The path of a file or of a link itself, without links to its folder."""
    return os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))


def _hook(events: int, folder: Path, notes: Path) -> Callable:
    own = (f"{folder}/", f"{notes}/")
    near = (f"{notes.parent}/",)  # a run refers to the folder of its text in the base

    def note(event: str, what: object) -> None:
        os.write(events, f"{event} {' '.join(str(what).split())[:300]}\n".encode(errors="replace"))

    def outside(path: object, allowed: tuple[str, ...]) -> bool:
        if not isinstance(path, str | bytes | os.PathLike):
            return False  # an open descriptor
        text = os.path.normpath(os.path.join(folder, os.fsdecode(path)))
        return not f"{text}/".startswith(allowed)

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            path, mode, flags = args
            changes = (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            writes = bool(changes) or not set("wax+").isdisjoint(mode or "")
            if outside(path, own + READABLE if writes else own + near + READABLE):
                note("writes" if writes else "reads", path)
            elif writes and isinstance(path, str) and outside(os.path.realpath(path), (*own, "/dev/null", *READABLE)):
                note("writes through a link", path)
            elif isinstance(path, str) and _is_inner(path) and outside(os.path.realpath(path), own + near + READABLE):
                note("reads through a link", path)
        elif event in PROCESSES:
            note(event, args[0] if args else "")
        elif event in NETWORK:
            note(event, args)
        elif event == "pickle.find_class" and str(args[0]).split(".")[0] not in CLASSES:
            note(event, f"{args[0]}.{args[1]}")
        elif event in WRITES and outside(args[0], (*own, *READABLE)):
            note(event, args[0])
        elif event in WRITES and isinstance(args[0], str) and outside(_place(args[0]), (*own, *READABLE)):
            note(f"{event} through a link", args[0])
        elif event == "exec" and str(getattr(args[0], "co_filename", "")).startswith(own):
            note("runs", args[0].co_filename)

    return hook
