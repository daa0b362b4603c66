"""The processes of a run and the mesh that they form: devices = dp_replicate x dp_shard x tp.

With context parallelism, dp_shard is a number of shares of a batch times cp: as many neighbours share their windows.
"""

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from canonlm.core.distributed import World
from canonlm.core.errors import expected
from canonlm.core.extras import needed
from canonlm.core.ranks import ranks
from canonlm.train import heartbeats
from canonlm.train.build import pick_device
from canonlm.train.config import RunConfig
from canonlm.train.signals import recording_failure

TIMEOUT = timedelta(minutes=30)
"""How long an exchange between processes may take. A process that is frozen is noticed earlier: `heartbeats`."""

DIMS = ("dp_replicate", "dp_shard", "tp")


@contextmanager
def world_of(config: RunConfig) -> Iterator[World]:
    """Join the processes that `torchrun`, or another launcher with its variables, has started; leave them at the end.

    ValueError, in every process: the layout does not fit the number of processes, a device is missing or cannot do what
    the configuration needs, or a process has not joined within `parallel.start_timeout`. Within this context, a process
    that sends no heartbeat for `parallel.timeout` ends the run.
    """
    rank, size, local_rank = ranks()
    check_layout(config, size)
    device = torch.device(pick_device(config.train.device))
    if size == 1:
        _check_device(device, config)
        if not uses_mesh_of_one(config) or device.type != "cuda":
            yield World(device)
            return
        with mesh_of_one(device) as mesh:
            yield World(device, mesh=mesh)
        return
    if device.index is not None:
        raise expected("train.device", "auto, cuda or cpu, with several processes", config.train.device)
    allow_open_files()
    with recording_failure():  # not around the rest: leaving the group makes other processes fail
        store = heartbeats.join(rank, size, config.parallel.start_timeout)
    dist.init_process_group(_backend(device), timeout=TIMEOUT, store=store, rank=rank, world_size=size)
    mesh, beating = None, heartbeats.Heartbeats(rank, size, config.parallel.timeout)
    try:
        with World(device, rank, size).all_or_none():  # one machine may have fewer devices than another
            if device.type == "cuda":
                device = torch.device(pick_device(f"cuda:{local_rank}"))
                torch.cuda.set_device(device)
            _check_device(device, config)
        tp, cp, copies = config.parallel.tp, config.parallel.cp, config.parallel.dp_replicate
        with beating:
            mesh = init_device_mesh(device.type, (copies, size // (tp * copies), tp), mesh_dim_names=DIMS)
            yield World(device, rank, size, local_rank, tp, mesh, cp, _cp_group(size, tp, cp))
    except (RuntimeError, OSError):
        # Perhaps only this process has failed (out of memory, a disk error) and the others wait for it within NCCL.
        # Leaving the group would wait for them, and they only end once this process has ended.
        if device.type != "cuda":
            _leave(mesh)
        raise
    except BaseException:
        _leave(mesh)
        raise
    _leave(mesh)


def _cp_group(size: int, tp: int, cp: int) -> str:
    """The name of the group of processes with which this one shares its windows; "": none."""
    if cp == 1:
        return ""
    groups = torch.arange(size).view(-1, cp, tp).transpose(1, 2).reshape(-1, cp)
    own, _ = dist.new_subgroups_by_enumeration(groups.tolist(), timeout=TIMEOUT)
    return str(own.group_name)


def allow_open_files() -> None:
    """As many open files as the system allows this process. gloo opens two sockets to every other process, and the
    usual limit of 1,024 files would end a run of 512."""
    with suppress(ImportError, ValueError, OSError):  # not a Unix; a system that does not allow it
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def uses_mesh_of_one(config: RunConfig) -> bool:
    """Whether one GPU works as a mesh of one device.

    In a mesh, blocks are gathered in bfloat16, and the residual stream is bfloat16 from the embedding on. Without one,
    autocast leaves the embedding, and so the stream and every pass over it, in float32: twice the bytes, and a speed
    that does not predict a cluster's. A mesh of one sends nothing; it casts a block's weights once per forward and
    backward. Runs on tasks are small and generate token by token: they would only pay for the casts.
    """
    return config.text is not None and config.train.precision == "bf16"


@contextmanager
def mesh_of_one(device: torch.device) -> Iterator[DeviceMesh]:
    """A mesh of one device (1 x 1 x 1), in a process group that needs no address."""
    if device.index is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(_backend(device), store=dist.HashStore(), rank=0, world_size=1)
    mesh = None
    try:
        mesh = init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=DIMS)
        yield mesh
    finally:
        _leave(mesh)


def _backend(device: torch.device) -> str:
    return "cuda:nccl,cpu:gloo" if device.type == "cuda" else "gloo"


def _leave(mesh: DeviceMesh | None) -> None:
    """Leave all groups and end gloo's threads. A thread drops the tensors of its last collective some time later, for
    which it needs the interpreter: if that has ended meanwhile, the process crashes.

    The threads of a group end with its last reference. DTensor keeps meshes forever, and a mesh its groups; FSDP's
    modules, which have groups too, are garbage or, after an error, referenced by the traceback until it is printed.
    """
    dist.destroy_process_group()
    if mesh is not None and hasattr(mesh, "_pg_registry"):  # torch 2.10 has one for all
        mesh._pg_registry.clear()
    gc.collect()
    atexit.unregister(gc.collect)
    atexit.register(gc.collect)


def check_layout(config: RunConfig, processes: int) -> None:
    """InvalidSetting if the work cannot be divided among this number of processes by `config.parallel`."""
    parallel, batch_size = config.parallel, config.train.batch_size
    if processes % parallel.tp:
        what = f"a divisor of {processes}, the number of processes (torchrun starts several)"
        raise expected("parallel.tp", what, parallel.tp)
    groups, divided = processes // parallel.tp, "the number of processes / parallel.tp"
    if groups % parallel.cp:
        raise expected("parallel.cp", f"a divisor of {groups}, {divided}", parallel.cp)
    data_parallel, divided = groups // parallel.cp, divided + " / parallel.cp" * (parallel.cp > 1)
    if data_parallel % parallel.dp_replicate:
        raise expected("parallel.dp_replicate", f"a divisor of {data_parallel}, {divided}", parallel.dp_replicate)
    if batch_size % data_parallel:
        raise expected("train.batch_size", f"a multiple of {data_parallel}, {divided}", batch_size)
    if config.data.seq_len % parallel.cp:
        what = f"a multiple of parallel.cp = {parallel.cp}, into which every window is cut"
        raise expected("data.seq_len", what, config.data.seq_len)
    local_batch, micro_batch = batch_size // data_parallel, parallel.micro_batch_size
    if micro_batch is not None and local_batch % micro_batch:
        what = f"a divisor of {local_batch}, a device's share of train.batch_size = {batch_size}"
        raise expected("parallel.micro_batch_size", what, micro_batch)
    if parallel.float8 and parallel.tp > 1:
        raise expected("parallel.float8", "false with parallel.tp > 1", True)


def _check_device(device: torch.device, config: RunConfig) -> None:
    if not config.parallel.float8:
        return
    needed("torchao", "parallel.float8")
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        what = "false: only GPUs of compute capability 8.9 or higher multiply in float8"
        raise expected("parallel.float8", what, True)
