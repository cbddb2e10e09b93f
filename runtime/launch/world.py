"""Reads this process's rank from the environment, and opens the process group and the watchdog.

    torchrun         RANK, WORLD_SIZE, ...      --+
    autopipe --local the same, set by `spawn`   --+-->  World  --start-->  process group, watchdog
    a pod            the same, by `launch.pods` --+
    srun             SLURM_PROCID, ...          --+

This module imports torch only inside `start`: the parent process of `--local N` waits for its
children and need not spend the seconds that the import takes.
"""

from __future__ import annotations

import ipaddress
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from autopipe.errors import LaunchError
from autopipe.runtime.launch import address as addresses
from autopipe.runtime.launch.address import check_interfaces, listening, resolve, towards
from autopipe.runtime.launch.attempt import of_this_attempt
from autopipe.runtime.launch.slurm import first_address, tasks_per_node
from autopipe.runtime.launch.spawn import cores
from autopipe.runtime.launch.spawn import spawn as spawn
from autopipe.runtime.launch.watchdog import LOCAL, Store, Watchdog, watch
from autopipe.util.numbers import count

TIMEOUT = 300.0
"""Seconds that a process waits for another one, at the start or in a transfer, before it gives up.

It ends a wait for a peer that hangs without dying, and has to be longer than a stage's compilation.
"""


@dataclass(frozen=True)
class World:
    """This process's place in a run, and the host and port on which rank 0 listens.

    Attributes:
        rank, size: this process's number in the run, from 0, and the number of processes.
        local_rank, local_size: the same on this node.
        node: this node's number, from 0.
        master_addr, master_port: where rank 0 listens.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    master_addr: str
    master_port: int


def world_from(
    environ: Mapping[str, str], nodelist: Callable[[str], str] | None = None
) -> World | None:
    """Read who this process is from the variables of torchrun or, without those, of a Slurm step.

    torchrun's variables come first because srun may have started torchrun. A rank keeps the number
    that its launcher gave it, as a plan binds ranks to devices.

    Args:
        environ: usually `os.environ`.
        nodelist: returns the address of the first node of Slurm's list (`node[1-4,7]`); None:
            `first_address`. Not called when MASTER_ADDR is set.

    Returns:
        None: the environment has neither, so the process runs alone.

    Raises:
        LaunchError: a variable is missing or not a number, there is no such rank, or the first node
            has no address.
    """
    found = _world_from(environ, nodelist)
    if found is not None and not (
        found.rank < found.size and found.local_rank < found.local_size <= found.size
    ):
        raise LaunchError(
            f"this is rank {found.rank} of {found.size} in the environment, and rank "
            f"{found.local_rank} of {found.local_size} on its node: there is no such rank",
            hint="start the processes with torchrun or srun, which number them from 0",
        )
    return found


def _world_from(environ: Mapping[str, str], nodelist: Callable[[str], str] | None) -> World | None:
    if "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        rank, size, local_rank, local_size, node = (_number(environ, name) for name in names)
        address, port = _value(environ, "MASTER_ADDR"), _port(environ)
        if not address:
            raise LaunchError("MASTER_ADDR is '' in the environment, expected rank 0's host")
        return World(rank, size, local_rank, local_size, node, address, port)
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEP and "SLURM_PROCID" in environ:
        names = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "JOB_ID")
        rank, size, local_rank, node, job = (_number(environ, f"SLURM_{name}") for name in names)
        counts = tasks_per_node(_value(environ, "SLURM_STEP_TASKS_PER_NODE"))
        if node >= len(counts):
            raise LaunchError(
                f"SLURM_NODEID is {node} in the environment, and SLURM_STEP_TASKS_PER_NODE is of "
                f"{count(len(counts), 'node')}",
                hint="start the processes with srun, which sets both",
            )
        local_size = counts[node]
        nodes = _value(environ, "SLURM_STEP_NODELIST")
        address = environ.get("MASTER_ADDR") or (nodelist or first_address)(nodes)
        # Below 32768, where Linux begins to assign ports by itself. The steps of a job, jobs that
        # share a node, and the starts of a requeued job have different ports, as the port of the
        # start before may still be taken.
        again = int(environ.get("SLURM_RESTART_COUNT") or 0)
        own = 10000 + (16 * job + int(step) + 4099 * again) % 20000
        port = _port(environ) if "MASTER_PORT" in environ else own
        return World(rank, size, local_rank, local_size, node, address, port)
    return None


_SPECIAL_STEP = 0xFFFFFFF0
"""The first step id that is not srun's but a batch script's or an interactive shell's. Such a step
is one process, although SLURM_NTASKS counts the job's tasks (slurm.h, SLURM_BATCH_SCRIPT)."""


def _value(environ: Mapping[str, str], name: str) -> str:
    if name not in environ:
        found = next(key for key in ("RANK", "SLURM_PROCID") if key in environ)
        raise LaunchError(
            f"{found} is {environ[found]!r} in the environment, but {name} is not set",
            hint="start the processes with torchrun or srun, which set both, "
            f"or unset {found} to run alone",
        )
    return environ[name]


def _number(environ: Mapping[str, str], name: str) -> int:
    if not _value(environ, name).isdecimal():
        raise LaunchError(f"{name} is {environ[name]!r} in the environment, expected a number")
    return int(environ[name])


def _port(environ: Mapping[str, str]) -> int:
    port = _number(environ, "MASTER_PORT")
    if not 0 < port < 2**16:
        raise LaunchError(f"MASTER_PORT is {port} in the environment, expected 1 to 65535")
    return port


def check_world(world: World, expected: int, plan: str | None = None) -> None:
    """Refuse a run that has another number of processes than the plan.

    Args:
        expected: the plan's number of processes.
        plan: the file that `autopipe run` is to run; None: a script calls `parallelize`. The hint
            has the commands that start the one or the other.

    Raises:
        LaunchError: `world.size` is not `expected`.
    """
    if world.size != expected:
        raise LaunchError(
            f"the plan is for {count(expected, 'process', 'processes')}, found {world.size} "
            f"(this is rank {world.rank}, on node {world.node})",
            hint=_starts(expected, plan),
        )


def _starts(processes: int, plan: str | None) -> str:
    """The commands that start so many processes of what this process is one of."""
    torchrun, srun = f"torchrun --nproc-per-node {processes}", f"  or: srun -n {processes}"
    if plan is None:
        known = Path(sys.argv[0]).is_file()  # not in a notebook, or under `python -c`
        script = shlex.quote(os.path.relpath(sys.argv[0])) if known else "SCRIPT.py"
        return f"{torchrun} {script}\n{srun} python {script}"
    run = f"autopipe run {shlex.quote(plan)}"
    return f"{torchrun} -m {run}\n  or: {run} --local {processes}\n{srun} {run}"


@contextmanager
def start(world: World, timeout: float = TIMEOUT, *, rank: int | None = None) -> Iterator[Watchdog]:
    """Within, torch's default process group (gloo) is open and a watchdog runs.

    It sets torch's threads to this process's share of the node's cores. At the end of the block
    rank 0 waits for the other ranks, since its process holds their store.

    Args:
        world: this process's place in the run, as the launcher has it.
        timeout: seconds in which every rank has to call it, and the limit of later waits.
        rank: this process's rank in the group, if the plan gives it another one; None: the
            launcher's.

    Raises:
        LaunchError: rank 0's host has no address, or its port is taken; or gloo would announce an
            address of this host that the other nodes cannot reach, or an interface that is none.
    """
    import torch
    import torch.distributed as dist

    resolve(world.master_addr)  # torch would retry until the timeout
    device = interface(world, os.environ)
    check_interfaces(os.environ)
    torch.set_num_threads(max(1, cores() // world.local_size))
    limit = timedelta(seconds=timeout)
    # As in torch's own rendezvous: with this variable the agent holds the store, not rank 0.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    planned = world if rank is None else as_planned(world, rank)
    with _gloo_over(device), _group_ended():
        with listening(world.master_port):
            tcp = dist.TCPStore(  # type: ignore[attr-defined]  # public all the same
                world.master_addr,
                world.master_port,
                world.size,
                is_master=world.rank == 0 and not agent,
                timeout=limit,
                multi_tenant=not agent,
            )
        # An agent's store outlives the workers, and may still have the addresses of dead ones.
        store = tcp if not agent else of_this_attempt(tcp, planned.rank, world.size, timeout)
        with _watch(planned, store) as watchdog:
            dist.init_process_group(
                "gloo", store=store, rank=planned.rank, world_size=world.size, timeout=limit
            )
            yield watchdog


def as_planned(
    world: World, rank: int, own_address: Callable[[str], str] = addresses.own_address
) -> World:
    """A process's place if the plan gives it another rank: the plan may begin on another node than
    the launcher, and its rank 0 then listens at that node's own address towards the launcher's."""
    host = world.master_addr
    if rank == 0 != world.node:
        with suppress(OSError):  # no way leads there: the other ranks will say so
            host = own_address(host)
    return replace(world, rank=rank, master_addr=host)


@contextmanager
def _gloo_over(device: str | None) -> Iterator[None]:
    """Within, gloo announces this network interface; None: one that it finds by itself.

    Only an environment variable tells gloo so, and it is read for each new process group.
    """
    if device is None:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = device
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


@contextmanager
def _group_ended() -> Iterator[None]:
    """Afterwards the process groups that the block has opened are destroyed, even on an error."""
    import torch.distributed as dist

    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _watch(world: World, store: Store) -> Watchdog:
    if world.size == 1:
        return Watchdog()
    return watch(
        store,
        rank=world.rank,
        size=world.size,
        node=world.node,
        local_rank=world.local_rank,
        host=LOCAL if world.local_size == world.size else world.master_addr,
    )


def interface(
    world: World,
    environ: Mapping[str, str],
    resolve: Callable[[str], str] = resolve,
    towards: Callable[[str], str | None] = towards,
) -> str | None:
    """The network interface that gloo has to announce; None: gloo finds one by itself.

    gloo announces the address that the host's own name resolves to. Debian maps that name to
    127.0.1.1, which no other host can reach, and the run would hang before its first step. In that
    case this function returns the interface from which this host talks to rank 0's host. If all
    ranks are on one host, it returns the loopback interface.

    Args:
        world: this process's place in the run.
        environ: usually `os.environ`; a GLOO_SOCKET_IFNAME in it is left alone.
        resolve: returns the address of a host name.
        towards: returns this host's interface towards an address, or None.

    Raises:
        LaunchError: a name has no address; or there are several hosts, gloo would announce a
            loopback address, and no interface leads to rank 0.
    """
    if "GLOO_SOCKET_IFNAME" in environ:
        return None
    if world.local_size == world.size:
        return "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None
    own, master = resolve(socket.gethostname()), resolve(world.master_addr)
    # Nodes that all are this host (a simulated cluster) reach each other by loopback too.
    if ipaddress.ip_address(own).is_loopback and not ipaddress.ip_address(master).is_loopback:
        outward = towards(master)
        if outward is not None:
            return outward
        raise LaunchError(
            f"rank {world.rank}: this host's own name resolves to {own}, which the other nodes "
            f"cannot reach (rank 0 is at {world.master_addr}, {master})",
            hint="export GLOO_SOCKET_IFNAME, the network interface towards the other nodes "
            "(`ip route` lists them)",
        )
    return None
