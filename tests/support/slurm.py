"""A throw-away Slurm of four nodes on this one host: real daemons, in a folder of its own.

    with cluster(folder) as slurm:
        job = slurm.submit("train.sbatch", folder)
        slurm.until(job, "COMPLETED")

It needs slurmctld, slurmd and munged, and to be root (slurmd starts jobs for others); `why_not`
says what is missing. Nothing outside of the folder is written: a munge key, sockets, spool folders
and logs are there, ports are picked free. No cgroups: processes of a step are found by their
parents.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.shell import LAUNCHED, ROOT

NODES, CPUS = 4, 4

PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol", "sinfo")


def why_not() -> str | None:
    """Why there can be no such cluster here; None: there can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: slurmctld slurmd slurm-client munge)"
    return None if os.geteuid() == 0 else "slurmd starts jobs as root"


@dataclass(frozen=True)
class Slurm:
    """A running cluster: its folder, and the environment in which its commands find it."""

    folder: Path
    environ: Mapping[str, str]

    def run(self, *command: str, cwd: Path | None = None) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            command, env=self.environ, cwd=cwd, text=True, capture_output=True, timeout=60
        )
        assert done.returncode == 0, (command, done.stderr)
        return done.stdout

    def submit(self, script: str, cwd: Path, *options: str) -> str:
        """The id of a job."""
        return self.run("sbatch", "--parsable", *options, script, cwd=cwd).strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm says of a job: JobState, Restarts, NodeList, ..."""
        shown = self.run("scontrol", "show", "job", "-o", job).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def until(self, job: str, *states: str, seconds: float = 120) -> dict[str, str]:
        """Wait for a job to be in one of these states."""
        deadline = time.monotonic() + seconds
        while (found := self.job(job))["JobState"] not in states:
            ended = found["JobState"] in ("FAILED", "COMPLETED", "CANCELLED", "TIMEOUT")
            assert not ended and time.monotonic() < deadline, (found, self.logs())
            time.sleep(0.2)
        return found

    def soon(self, job: str) -> None:
        """Let a job that was put back into the queue begin soon: Slurm waits two minutes.

        Not in the same second, in which the credentials of its first run are revoked.
        """
        time.sleep(3)
        self.run("scontrol", "update", f"jobid={job}", "starttime=now")

    def finish(self, job: str, seconds: float = 400) -> dict[str, str]:
        """Wait for the end of a job, however often it is put back into the queue."""
        deadline = time.monotonic() + seconds
        while (found := self.until(job, "PENDING", "COMPLETED", seconds=seconds))[
            "JobState"
        ] == "PENDING":
            assert time.monotonic() < deadline, found
            self.soon(job)
            self.until(job, "RUNNING", "COMPLETED")
        return found

    def kill(self, node: str) -> None:
        """Kill a node's daemon, as a host dies."""
        pid = int((self.folder / f"run/slurmd-{node}.pid").read_text())
        os.kill(pid, 9)

    def logs(self) -> str:
        """The end of the controller's log."""
        with suppress(OSError):
            return (self.folder / "log/slurmctld.log").read_text()[-2000:]
        return ""


@contextmanager
def cluster(folder: Path, timeout: int = 30) -> Iterator[Slurm]:
    """Start a cluster in `folder`, which is made, and end it.

    Args:
        timeout: seconds after which a node that does not answer is down.
    """
    for name in ("munge", "log", "ctld", "run", *(f"spool-node{n}" for n in range(1, NODES + 1))):
        (folder / name).mkdir(parents=True)
    conf = folder / "slurm.conf"
    conf.write_text(_conf(folder, timeout))
    clean = {name: value for name, value in os.environ.items() if not LAUNCHED.match(name)}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environ = {**clean, "SLURM_CONF": str(conf), "PATH": path, "PYTHONPATH": str(ROOT)}
    slurm = Slurm(folder, environ)
    try:
        _start_munge(folder)
        slurm.run("slurmctld", "-f", str(conf))
        for number in range(1, NODES + 1):
            slurm.run("slurmd", "-N", f"node{number}", "-f", str(conf))
        deadline = time.monotonic() + 30
        while slurm.run("sinfo", "-h", "-N", "-o", "%T").split() != ["idle"] * NODES:
            assert time.monotonic() < deadline, slurm.logs()
            time.sleep(0.1)
        yield slurm
    finally:
        _end(folder)


def _start_munge(folder: Path) -> None:
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    options = {
        "key-file": key,
        "socket": folder / "munge/socket",
        "pid-file": folder / "run/munged.pid",
        "log-file": folder / "log/munged.log",
        "seed-file": folder / "munge/seed",
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    subprocess.run(["munged", "--force", "--num-threads=2", *words], check=True)


def _end(folder: Path) -> None:
    """End all daemons by their pids, and the steps that they have left."""
    pids = []
    for file in (folder / "run").glob("*.pid"):
        with suppress(OSError, ValueError):
            pids.append(int(file.read_text()))
    for step in subprocess.run(
        ["pgrep", "-f", f"slurmstepd.*|{folder}"], capture_output=True, text=True
    ).stdout.split():
        with suppress(OSError):
            own = Path(f"/proc/{step}/environ").read_bytes()
            if str(folder).encode() in own:
                pids.append(int(step))
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, 9)


def _ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _conf(folder: Path, timeout: int) -> str:
    """Its configuration; the first job's number differs, as ports are made of it and another
    cluster may be on this host."""
    host, (controller, *ports) = socket.gethostname().split(".")[0], _ports(1 + NODES)
    nodes = "\n".join(
        f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} "
        "RealMemory=4000 State=UNKNOWN"
        for number, port in enumerate(ports, start=1)
    )
    return f"""\
ClusterName=test
FirstJobId={random.randrange(1, 60_000)}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/ctld
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_min_interval=100000,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
JobRequeue=1
ReturnToService=2
KillWait=5
InactiveLimit=0
SlurmctldTimeout=30
SlurmdTimeout={timeout}
{nodes}
PartitionName=main Nodes=node[1-{NODES}] Default=YES MaxTime=60 DefaultTime=10 State=UP
"""
