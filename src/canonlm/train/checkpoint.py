"""Checkpoints of a run, from which training resumes on any number of processes. `checkpoints/step-00000600/` contains

__0_0.distcp, __1_0.distcp, …   tensors as torch.distributed.checkpoint writes them, a file per process
.metadata                       the positions of tensors in these files
manifest.json                   written last: step, number of processes, size and sha256 of every other file

Tensors are `model.<parameter>` and `optimizer.<parameter>.<exp_avg, exp_avg_sq or step>`. Nothing else is saved: the
learning rate, random numbers and data are functions of the step, and the run's configuration has all other settings.
"""

import logging
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.torch_version import TorchVersion

from canonlm.core import user_code
from canonlm.core.distributed import World
from canonlm.core.errors import expected
from canonlm.core.files import Stamp, damage, put_in_place, remove_folder, temporary_folder, write_text
from canonlm.core.limits import check_memory
from canonlm.core.untrusted import path_inside, read_json
from canonlm.models.interface import LanguageModel
from canonlm.runs.folder import checkpoint_steps
from canonlm.runs.identity import check_label, label
from canonlm.train.build import build_model
from canonlm.train.checkpoint_reader import METADATA, Reader
from canonlm.train.config import RunConfig
from canonlm.train.load_config import load as load_config

T = TypeVar("T")
State = dict[str, dict[str, Tensor]]

MANIFEST = "manifest.json"
_log = logging.getLogger(__name__)

LISTED_STEPS = 8
"""Max number of steps in an error, the nearest ones."""

STAGERS_WORK_ONCE = TorchVersion(torch.__version__) < "2.13"
"""torch 2.11 and 2.12 empty a stager's tables after its first use. Later ones keep its pinned memory for the next."""

# torch warns at every save and load in a single process, where this is intended.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")


class Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    step: int
    processes: int
    files: dict[str, Stamp]
    run: dict[str, Any] = {}  # `canonlm.runs.identity.label`; earlier versions did not write it


class Checkpoints:
    """The checkpoints in `folder`, written while training continues. Every process of `world` calls the same methods in
    the same order. Leftovers of killed processes must be removed from `folder` first.

    The `keep` newest are kept, and all whose step is a multiple of `keep_every`. may_write: called in the first process
    before a checkpoint gets its name; `wait` raises its exceptions. run: the configuration that they belong to.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        keep_every: int | None,
        world: World,
        may_write: Callable[[], None] = lambda: None,
        run: Mapping[str, Any] | None = None,
    ) -> None:
        self._run = label(run or {})
        self.folder, self._keep, self._keep_every, self._may_write = folder, keep, keep_every, may_write
        self._ranks = _Ranks(world.rank, world.size)
        pinned = world.device.type == "cuda"
        self._staging = StagingOptions(
            use_pinned_memory=pinned,
            use_non_blocking_copy=pinned,
            use_shared_memory=False,
            use_async_staging=False,  # the next step overwrites what is copied
        )
        self._stager = DefaultStager(self._staging)
        self._plans: _Plans | None = None  # of the last save, if it succeeded
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(
        self,
        step: int,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        then: Callable[[Path], Any] | None = None,
    ) -> None:
        """Copy the state after `step` optimizer steps, and write it in a thread. `then(path)` is called in that thread
        of the first process, once the checkpoint is complete.

        Waits for the previous save, and raises its exceptions (`wait`).
        """
        self.wait()
        if STAGERS_WORK_ONCE:
            self._stager = DefaultStager(self._staging)
        state = self._stager.stage(_parts(*get_state_dict(model, optimizer)))
        self._writing = self._thread.submit(self._write, step, state, then)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete. ValueError, in every process, if it could not be written (a full
        disk, say); also raises exceptions of `then`."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    @property
    def failed(self) -> bool:
        """Whether `wait` would raise at once. It may differ between processes: they must agree on it before waiting."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def close(self) -> None:
        """Wait, and end the thread: nothing can be saved after this."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._stager.close()

    def load_latest(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore model and optimizer in place from the newest undamaged checkpoint, and return its step; 0 if there is
        no checkpoint.

        ValueError: all checkpoints are damaged, or that one is of another model.
        """
        if (step := _newest_complete(self.folder, self._ranks)) == 0:
            return 0
        self._ranks.first(lambda: _check_run(self.folder, step, self._run))
        of_model, of_optimizer = get_state_dict(model, optimizer)
        _read(path_of(self.folder, step), _parts(of_model, of_optimizer), self._ranks)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        self._ranks.first(lambda: self._prune(step))  # an earlier process may have been killed before it did
        return step

    def _write(self, step: int, state: Any, then: Callable[[Path], Any] | None) -> None:
        path = path_of(self.folder, step)
        ranks, made = self._ranks, ExitStack()
        planner, self._plans = _Planner(state, ranks.rank == 0, self._plans), None
        try:
            temporary = ranks.first(lambda: made.enter_context(temporary_folder(path)))  # all processes write there
            planner.repeats = all(ranks.gather(planner.may_repeat))
            with _unwrapped_errors():
                dcp.save(
                    state, storage_writer=_Writer(temporary), planner=planner, process_group=ranks.group,
                    no_dist=ranks.size == 1,
                )  # fmt: skip
            self._plans = planner.plans
            files = ranks.gather(lambda: _stamps(temporary, ranks.rank))
            ranks.first(lambda: self._finish(step, temporary, {name: s for part in files for name, s in part.items()}))
        except OSError as error:
            older = [old for old in checkpoint_steps(self.folder) if old < step]
            left = f"step {older[-1]} is the newest complete one" if older else "there is none yet"
            raise ValueError(
                f"checkpoint of step {step} could not be written to {path}: {error.strerror}; {left}"
            ) from None
        finally:
            made.close()
        if then is not None:
            ranks.first(lambda: then(path))

    def _finish(self, step: int, temporary: Path, files: dict[str, Stamp]) -> None:
        manifest = Manifest(step=step, processes=self._ranks.size, files=files, run=self._run)
        write_text(temporary / MANIFEST, manifest.model_dump_json(indent=1) + "\n")
        self._may_write()
        put_in_place(temporary, path_of(self.folder, step))
        self._prune(step)

    def _prune(self, newest: int) -> None:
        # Checkpoints after `newest` are damaged ones that training skipped: they do not count, and are not removed.
        past = [step for step in checkpoint_steps(self.folder) if step <= newest]
        for step in past[: -self._keep]:
            if self._keep_every is None or step % self._keep_every:
                try:
                    remove_folder(path_of(self.folder, step))
                except OSError as error:  # on some file systems, because an evaluation is reading it
                    _log.warning("%s could not be removed: %s", path_of(self.folder, step), error.strerror)


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def newest_step(run: Path) -> int:
    """The step of the newest undamaged checkpoint of a run. ValueError: there is none."""
    folder = path_inside(run, "checkpoints")
    if not checkpoint_steps(folder):
        raise expected("RUN", "the folder of a run that has saved a checkpoint", str(run))
    return _newest_complete(folder, _ALONE)


def newest(run: Path) -> Path:
    """The newest checkpoint of a run, perhaps a damaged one. ValueError if it has none."""
    folder = path_inside(run, "checkpoints")
    if not (saved_steps := checkpoint_steps(folder)):
        raise expected("RUN", "the folder of a run that has saved a checkpoint", str(run))
    return path_of(folder, saved_steps[-1])


def load_weights(checkpoint: Path) -> dict[str, Tensor]:
    """The model's tensors in a checkpoint, on the CPU, by name; its model is not built. ValueError: it is damaged."""
    if (found := _damage(checkpoint.parent, int(checkpoint.name.removeprefix("step-")), _ALONE)) is not None:
        raise ValueError(f"{checkpoint}: {found}")
    entries = Reader(checkpoint).read_metadata().state_dict_metadata
    shapes = {name.removeprefix("model."): entry for name, entry in entries.items() if name.startswith("model.")}
    values = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in shapes.items()}  # type: ignore[union-attr]
    _read(checkpoint, {"model": values}, _ALONE)
    return values


def load_model(
    run: Path, step: int | None = None, *, config: RunConfig | None = None, trust_remote_code: bool | None = None
) -> LanguageModel:
    """The model of a run from its newest undamaged checkpoint, or that of `step`: in float32, on the CPU, in evaluation
    mode.

    For one process; any number of processes may have written it. The optimizer's state is not read. config: the run's,
    if the caller has read it. trust_remote_code: whether code from outside that the run names may run (None: as in a
    surrounding `user_code.of_run`, else not).

    ValueError: no run, no such checkpoint, a damaged one.
    """
    folder = path_inside(run, "checkpoints")
    saved_steps = checkpoint_steps(folder)
    if not saved_steps or not (run / "config.yaml").is_file():
        raise expected("RUN", "the folder of a run that has saved a checkpoint", str(run))
    if step is None:
        step = newest_step(run)
    elif step not in saved_steps:
        near = sorted(sorted(saved_steps, key=lambda saved: abs(saved - step))[:LISTED_STEPS])
        more = f" and {len(saved_steps) - len(near):,} more" if len(saved_steps) > len(near) else ""
        raise expected("--step", f"a step that has a checkpoint ({', '.join(map(str, near))}{more})", step)
    elif (damage := _damage(folder, step, _ALONE)) is not None:
        raise ValueError(f"{path_of(folder, step)}: {damage}")
    with user_code.of_run(run, trust_remote_code):
        config = config or load_config(run / "config.yaml")
        _check_run(folder, step, label(config.model_dump()))
        # Before anything is allocated: the model of the configuration may have any size.
        _check_saved(path_of(folder, step), build_model(config, "meta", saved=True))
        model = build_model(config, saved=True)
    values = {name: torch.empty_like(tensor, device="cpu") for name, tensor in model.module.state_dict().items()}
    _read(path_of(folder, step), {"model": values}, _ALONE)
    model.module.load_state_dict(values, assign=True)
    model.module.tie_weights()
    model.module.eval()
    return model


def _check_saved(path: Path, model: LanguageModel) -> None:
    """ValueError unless the checkpoint holds the tensors of the model."""
    _check_names(path, Reader(path), {"model": model.module.state_dict()})
    check_memory(str(path), 4 * model.num_parameters)


def _parts(model: dict[str, Any], optimizer: Any) -> State:
    """The two parts of a checkpoint, from state dictionaries. (Not one flat dictionary, as torch logs its keys.)"""
    moments = {f"{name}.{key}": tensor for name, state in optimizer["state"].items() for key, tensor in state.items()}
    return {"model": model, "optimizer": moments}


def _read(path: Path, state: State, ranks: "_Ranks") -> None:
    """Fill the tensors of `state` in place. ValueError if a part of `state` has other tensors than the checkpoint."""
    reader = Reader(path)
    _check_names(path, reader, state)
    with _unwrapped_errors():
        dcp.load(state, storage_reader=reader, process_group=ranks.group, no_dist=ranks.size == 1)


def _check_names(path: Path, reader: Reader, state: State) -> None:
    entries: dict[str, Any] = reader.read_metadata().state_dict_metadata
    saved_shapes = {name: tuple(entry.size) for name, entry in entries.items() if name.partition(".")[0] in state}
    model_shapes = {f"{part}.{name}": tuple(t.shape) for part, tensors in state.items() for name, t in tensors.items()}
    for name in [*model_shapes, *saved_shapes]:
        if saved_shapes.get(name) != model_shapes.get(name):
            old, new = (f"of shape {of[name]}" if name in of else "missing" for of in (saved_shapes, model_shapes))
            parameter = name.partition(".")[2]
            raise ValueError(f"{path}: a checkpoint of another model: {parameter} is {old} there and {new} here")


def _newest_complete(folder: Path, ranks: "_Ranks") -> int:
    """The newest step with an undamaged checkpoint, the same in every process; 0 if there is no checkpoint."""
    saved_steps = ranks.first(lambda: checkpoint_steps(folder))
    skipped: list[str] = []
    for step in reversed(saved_steps):
        if (damage := _damage(folder, step, ranks)) is None:
            if ranks.rank == 0:
                for line in skipped:
                    _log.warning("damaged checkpoint skipped, step %d is used: %s", step, line)
            return step
        skipped.append(f"{path_of(folder, step)}: {damage}")
    if skipped:
        raise ValueError(f"all checkpoints are damaged ({'; '.join(skipped)}); to start from scratch, move them away")
    return 0


def _damage(folder: Path, step: int, ranks: "_Ranks") -> str | None:
    """The damage of a checkpoint, or None. Each process reads its share of the files."""

    def check() -> str | None:
        path = path_of(folder, step)
        try:
            manifest = Manifest.model_validate(read_json(path / MANIFEST))
            if manifest.step != step:
                return f"{MANIFEST} is of step {manifest.step}"
            return damage(path, dict([*manifest.files.items()][ranks.rank :: ranks.size]))
        except ValueError:
            return f"{MANIFEST} cannot be read" if (path / MANIFEST).exists() else f"no {MANIFEST}"

    return next(filter(None, ranks.gather(check)), None)


def _check_run(folder: Path, step: int, run: Mapping[str, Any]) -> None:
    path = path_of(folder, step)
    check_label(Manifest.model_validate(read_json(path / MANIFEST)).run, run, str(path))


def _stamps(folder: Path, rank: int) -> dict[str, Stamp]:
    """The files that a process wrote; the first process also wrote METADATA."""
    files = [*sorted(folder.glob(f"__{rank}_*")), *([folder / METADATA] if rank == 0 else [])]
    return {file.name: Stamp.of(file) for file in files}


class _Ranks:
    """Communication about checkpoints, over a process group of its own: sharing the training thread's group would
    deadlock."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.group = dist.new_group(backend="gloo") if size > 1 else None

    def gather(self, act: Callable[[], T]) -> list[T]:
        """The results of `act` from all processes. An exception in one of them is raised in all."""
        outcome: T | Exception
        try:
            outcome = act()
        except Exception as error:
            outcome = error
        outcomes: list[Any] = [outcome]
        if self.size > 1:
            outcomes *= self.size
            dist.all_gather_object(outcomes, outcome, group=self.group)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def first(self, act: Callable[[], T]) -> T:
        """Call `act` in the first process alone, and return its result in all."""
        return self.gather(lambda: act() if self.rank == 0 else None)[0]  # type: ignore[return-value]


_ALONE = _Ranks(0, 1)


class _Writer(dcp.FileSystemWriter):
    """torch's writer, which raises "unexpected pos 704 vs 598" for a full disk. This one raises the OSError behind
    it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # what it writes is on the CPU already

    def write_data(self, *args, **kwargs):
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__context__
            raise cause or error from None


@dataclass
class _Plans:
    """The plans of a save. metadata: in the first process, pickled (at 256 processes, 9 MB rather than a million
    objects, which each search for garbage would visit)."""

    own: dcp.SavePlan
    final: dcp.SavePlan | None = None
    metadata: bytes | None = None


class _Planner(dcp.DefaultSavePlanner):
    """Plans a save, or `repeats` the plans of the last one, if all processes `may_repeat` them.

    Planning takes the first process about 25 s for 873 tensors at 256 processes, and its training waits for the
    interpreter. torch's own `enable_plan_caching` does not notice another dtype, and shares its plans between all runs
    of a Python process.
    """

    def __init__(self, state: State, first: bool, last: _Plans | None) -> None:
        super().__init__()
        self.plans, self.repeats = last, False
        self._state, self._first = state, first

    def may_repeat(self) -> bool:
        """Whether nothing but the values of this process's tensors has changed since the last save."""
        if self.plans is None:
            return False
        self.set_up_planner(self._state, is_coordinator=self._first)
        return super().create_local_plan() == self.plans.own

    def create_local_plan(self) -> dcp.SavePlan:
        if self.repeats:
            return dcp.SavePlan([])
        self.plans = _Plans(super().create_local_plan())
        return self.plans.own

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        assert self.plans is not None
        if self.repeats:
            assert self.plans.metadata is not None
            return all_plans, pickle.loads(self.plans.metadata)
        plans, metadata = super().create_global_plan(all_plans)
        self.plans.metadata = pickle.dumps(metadata)
        return plans, metadata

    def finish_plan(self, new_plan: dcp.SavePlan) -> dcp.SavePlan:
        assert self.plans is not None
        if not self.repeats:
            self.plans.final = new_plan
        assert self.plans.final is not None
        return super().finish_plan(self.plans.final)


@contextmanager
def _unwrapped_errors() -> Iterator[None]:
    """Raise the original error, which torch wraps into an exception that is not an `Exception`."""
    try:
        yield
    except dcp.CheckpointException as wrapped:
        raise next(error for error, _ in wrapped.failures.values()) from None
