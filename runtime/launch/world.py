"""Reads this process's rank from the environment, and opens the process group and the watchdog.

    torchrun         RANK, WORLD_SIZE, ...      --+
    autopipe --local the same, set by `spawn`   --+-->  World  --start-->  process group, watchdog
    a pod            the same, by `launch.pods` --+
    srun             SLURM_PROCID, ...          --+

This module imports torch only inside `start`: the parent that `--local N` leaves waiting for its
children has no use for it, nor for the seconds that its import takes.
"""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

from autopipe.errors import LaunchError
from autopipe.runtime.launch.address import resolve, towards
from autopipe.runtime.launch.attempt import of_this_attempt
from autopipe.runtime.launch.spawn import cores
from autopipe.runtime.launch.spawn import spawn as spawn
from autopipe.runtime.launch.watchdog import LOCAL, Store, Watchdog, watch

TIMEOUT = 300.0
"""Seconds that a process waits for another one, at the start or in a transfer, before it gives up.

The last resort against a peer that hangs without dying: compiling a stage has to fit within it.
"""


@dataclass(frozen=True)
class World:
    """Which process this is, out of how many, and where the first one listens.

    `rank` (of `size`) counts over all nodes, `local_rank` (of `local_size`) on this one, and `node`
    the nodes.
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

    torchrun comes first because srun may have started it. Ranks are the launcher's own, as a plan
    binds ranks to devices.

    Args:
        environ: usually `os.environ`.
        nodelist: from Slurm's list of nodes (`node[1-4,7]`) to the address of the first one;
            `first_address` unless given. Not called when MASTER_ADDR is set.

    Returns:
        None outside both: the process was started alone.

    Raises:
        LaunchError: a variable is missing or not a number, or the first node has no address.
    """
    if "RANK" in environ:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
        rank, size, local_rank, local_size, node = (_number(environ, name) for name in names)
        address, port = _value(environ, "MASTER_ADDR"), _number(environ, "MASTER_PORT")
        return World(rank, size, local_rank, local_size, node, address, port)
    step = environ.get("SLURM_STEP_ID", "")
    if step.isdecimal() and int(step) < _SPECIAL_STEP and "SLURM_PROCID" in environ:
        names = ("PROCID", "STEP_NUM_TASKS", "LOCALID", "NODEID", "JOB_ID")
        rank, size, local_rank, node, job = (_number(environ, f"SLURM_{name}") for name in names)
        local_size = tasks_per_node(_value(environ, "SLURM_STEP_TASKS_PER_NODE"))[node]
        nodes = _value(environ, "SLURM_STEP_NODELIST")
        address = environ.get("MASTER_ADDR") or (nodelist or first_address)(nodes)
        # Below 32768, where Linux begins to hand out ports by itself, and different for the steps
        # of a job, for jobs that share a node, and for the starts of a job that is requeued: the
        # last one's port may still be taken.
        again = int(environ.get("SLURM_RESTART_COUNT") or 0)
        own = 10000 + (16 * job + int(step) + 4099 * again) % 20000
        port = _number(environ, "MASTER_PORT") if "MASTER_PORT" in environ else own
        return World(rank, size, local_rank, local_size, node, address, port)
    return None


_SPECIAL_STEP = 0xFFFFFFF0
"""Step ids from here on are not srun's but the batch script's or an interactive shell's: one
process, though SLURM_NTASKS counts what the job asked for (slurm.h, SLURM_BATCH_SCRIPT)."""


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


def tasks_per_node(text: str) -> list[int]:
    """Slurm's run-length form, spelled out: "2(x2),1" -> [2, 2, 1].

    Raises:
        LaunchError: `text` is of another form.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(f"tasks per node of a Slurm step: expected '2(x2),1', found {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_address(nodelist: str) -> str:
    """Ask Slurm for an address of the first node of `nodelist`.

    A node's name usually is its host name. Where it does not resolve (containers, several nodes on
    one host), Slurm's configuration says where the node is: NodeAddr.

    Raises:
        LaunchError: scontrol is missing or fails.
    """
    name = _scontrol("show", "hostnames", nodelist).split()[0]
    try:
        resolve(name)
    except LaunchError:
        found = re.search(r"\bNodeAddr=(\S+)", _scontrol("show", "node", name))
        return found[1] if found else name
    return name


def _scontrol(*arguments: str) -> str:
    command = ("scontrol", *arguments)
    try:
        return subprocess.check_output(command, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"no address of the first node: `{' '.join(command)}` failed: {error}",
            hint="export MASTER_ADDR, the address of the first node, before srun",
        ) from error


def check_world(world: World, expected: int, plan: str = "plan.json") -> None:
    """Refuse to go on with another number of processes than the plan's.

    Args:
        plan: its file, for the commands that the error names.

    Raises:
        LaunchError: `world.size` is not `expected`.
    """
    if world.size != expected:
        file = shlex.quote(plan)
        raise LaunchError(
            f"the plan is for {expected} processes, found {world.size} "
            f"(this is rank {world.rank}, on node {world.node})",
            hint=f"torchrun --nproc-per-node {expected} -m autopipe run {file}\n"
            f"  or: autopipe run {file} --local {expected}\n"
            f"  or: srun -n {expected} autopipe run {file}",
        )


@contextmanager
def start(world: World, timeout: float = TIMEOUT, *, rank: int | None = None) -> Iterator[Watchdog]:
    """Open torch's default process group (gloo) for the time of the block, under a watchdog.

    Args:
        world: as the launcher has it.
        rank: this process's rank in the group, where the plan gives it another one.

    At its end rank 0 waits for the other ranks: their store lives in its process. Every rank has to
    come in within `timeout` seconds. The processes of a node share out its cores.

    Raises:
        LaunchError: rank 0's host has no address, or gloo would announce one of this host that the
            other nodes cannot reach.
    """
    import torch
    import torch.distributed as dist

    if world.local_size < world.size:
        resolve(world.master_addr)  # torch would look for it until the timeout
    device = interface(world, os.environ)
    torch.set_num_threads(max(1, cores() // world.local_size))
    limit = timedelta(seconds=timeout)
    # As torch's own rendezvous does: torchrun says so if its agent listens there in rank 0's stead.
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    planned = world if rank is None else replace(world, rank=rank)
    with _gloo_over(device), _group_ended():
        tcp = dist.TCPStore(  # type: ignore[attr-defined]  # public all the same
            world.master_addr,
            world.master_port,
            world.size,
            is_master=world.rank == 0 and not agent,
            timeout=limit,
            multi_tenant=not agent,
        )
        # torchrun's store outlives the workers that it starts again: it still has the addresses of
        # those that are gone.
        store = tcp if not agent else of_this_attempt(tcp, planned.rank, world.size, timeout)
        with _watch(planned, store) as watchdog:
            dist.init_process_group(
                "gloo", store=store, rank=planned.rank, world_size=world.size, timeout=limit
            )
            yield watchdog


@contextmanager
def _gloo_over(device: str | None) -> Iterator[None]:
    """Let gloo announce a network interface; the environment is the only way to tell it.

    For as long as the process group is open, as each further group asks for it again.
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
    """Destroy the process groups that the block has opened, however it ends."""
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
    """The network interface that gloo has to be told of; None where it finds one by itself.

    gloo announces the address that the host's own name resolves to. Debian maps that name to
    127.0.1.1, which no other host can reach: the run would hang before its first step. Then it is
    the interface from which this host talks to rank 0's.

    Args:
        world: who this process is.
        environ: usually `os.environ`; a GLOO_SOCKET_IFNAME in it is left alone.
        resolve: from a host name to its address.
        towards: from an address to this host's interface towards it.

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
        found = towards(master)
        if found is not None:
            return found
        raise LaunchError(
            f"rank {world.rank}: this host's own name resolves to {own}, which the other nodes "
            f"cannot reach (rank 0 is at {world.master_addr}, {master})",
            hint="export GLOO_SOCKET_IFNAME, the network interface towards the other nodes "
            "(`ip route` lists them)",
        )
    return None
