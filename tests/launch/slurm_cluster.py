"""A SLURM cluster of one node on this machine, for tests: the real daemons, in a folder that is removed at the end.

Needs root and Debian's slurm-wlm and munge. Two partitions share the same two CPUs: a job in `high` preempts one in
`low`, which returns to the queue. `python tests/launch/slurm_cluster.py` starts a cluster to look at.
"""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAMS = ["munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol"]

CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job's ticket is valid for 60 s otherwise, and so long a requeued job would wait before it starts again.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
# Neither systemd nor cgroups nor a database: a container has none of them.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait={kill_wait}
InactiveLimit=0
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=low Nodes={host} Default=YES MaxTime=60 PriorityTier=1 State=UP
PartitionName=high Nodes={host} MaxTime=60 PriorityTier=2 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """The programs that must be installed first."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


@contextmanager
def cluster(folder: Path, kill_wait: int = 60) -> Iterator[Path]:
    """Start a cluster in `folder` (empty, with a short path); yields the `slurm.conf` to export as SLURM_CONF.

    `kill_wait`: seconds from SIGTERM to SIGKILL.
    """
    host = socket.gethostname().partition(".")[0]
    with socket.socket() as a, socket.socket() as b:  # two free ports
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        ports = {"controller_port": a.getsockname()[1], "node_port": b.getsockname()[1]}
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=host, folder=folder, kill_wait=kill_wait, **ports))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    munge = [f"--key-file={key}", f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"]
    munge += [f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    with ExitStack() as daemons:
        for command in (
            ["munged", "--foreground", "--force", *munge],
            ["slurmctld", "-D", "-f", str(conf)],
            ["slurmd", "-D", "-f", str(conf)],
        ):
            daemons.enter_context(_daemon(command, folder))
            if command[0] == "munged":
                _until(lambda: (folder / "munge.socket").exists(), "munged", folder)
        _until(lambda: _ask(conf, "sinfo", "--noheader", "--format=%T", "--partition=low") == "idle", "slurmd", folder)
        try:
            yield conf
        finally:
            _ask(conf, "scancel", "--full", "--signal=KILL", "--state=RUNNING", "--user=root")


@contextmanager
def _daemon(command: list[str], folder: Path) -> Iterator[None]:
    with (folder / f"{command[0]}.out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ask(conf: Path, *command: str) -> str:
    environment = {**os.environ, "SLURM_CONF": str(conf)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20).stdout.strip()


def _until(ready: Callable[[], bool], what: str, folder: Path, seconds: float = 40) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            logs = [*folder.glob("*.log"), *folder.glob("*.out")]
            message = "\n".join(f"-- {path.name}\n{path.read_text()[-2000:]}" for path in logs)
            raise RuntimeError(f"{what} did not come up\n{message}")
        time.sleep(0.2)


if __name__ == "__main__":
    with TemporaryDirectory(prefix="slurm-") as made, cluster(Path(made)) as conf:
        print(f"export SLURM_CONF={conf}    # Ctrl-C ends it", flush=True)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(1)
