"""A pod of Kubernetes -> the ranks that run in it, each with torchrun's variables.

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
        --pod_from-->  Pod  --environments-->  RANK, WORLD_SIZE, ... of each process

Kubeflow's operators say these to the one container of a node (torchrun reads them too). They also
set RANK and WORLD_SIZE in some versions, to the number of the pod: what a pod says comes first,
until there is a LOCAL_RANK, which a process has that somebody has started in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.errors import LaunchError

PATIENCE = 120.0
"""Seconds that a pod waits for the name of the first one: Kubernetes may say it late."""


@dataclass(frozen=True)
class Pod:
    """One node of a job, in which no rank has been started yet.

    Attributes:
        nodes, node: how many there are, and which this one is, from 0.
        processes: ranks in this pod; None: as the plan has it.
        master_addr, master_port: where rank 0 listens.
    """

    nodes: int
    node: int
    processes: int | None
    master_addr: str
    master_port: int


def pod_from(environ: Mapping[str, str]) -> Pod | None:
    """What a pod's environment says of it; None outside of a pod, and in its ranks.

    Raises:
        LaunchError: a variable is missing, is no number, or allows for several numbers of nodes.
    """
    if "PET_NNODES" not in environ or "LOCAL_RANK" in environ:
        return None
    nodes, processes = _number(environ, "NNODES"), environ.get("PET_NPROC_PER_NODE", "auto")
    counted = None if processes in _AUTOMATIC else _number(environ, "NPROC_PER_NODE")
    node = _number(environ, "NODE_RANK") if nodes > 1 else 0
    if not 0 <= node < nodes:
        raise LaunchError(f"PET_NODE_RANK is {node} in the environment, of {nodes} nodes from 0")
    address = environ.get("PET_MASTER_ADDR", "")
    if not address:
        if nodes > 1:
            raise _missing("MASTER_ADDR", environ)
        address = "127.0.0.1"  # one node has no other to be found by
    port = _number(environ, "MASTER_PORT") if "PET_MASTER_PORT" in environ else _PORT
    return Pod(nodes, node, counted, address, port)


_AUTOMATIC = ("auto", "gpu", "cpu")
"""torchrun's words for as many processes as there are devices."""

_PORT = 29500
"""torchrun's own default."""


def _number(environ: Mapping[str, str], name: str) -> int:
    found = environ.get(f"PET_{name}")
    if found is None:
        raise _missing(name, environ)
    if not (found.isascii() and found.isdecimal() and len(found) < 10):
        elastic = ": a plan is for one number of nodes" if ":" in found else ""
        raise LaunchError(f"PET_{name} is {found!r} in the environment, expected a number{elastic}")
    return int(found)


def _missing(name: str, environ: Mapping[str, str]) -> LaunchError:
    return LaunchError(
        f"PET_NNODES is {environ['PET_NNODES']!r} in the environment, but PET_{name} is not set",
        hint="unset PET_NNODES to run without Kubeflow's variables",
    )


def environments(pod: Pod, counts: Sequence[int]) -> list[dict[str, str]]:
    """Torchrun's variables for each rank of a pod.

    Args:
        counts: how many ranks the plan has on each of its nodes.

    Raises:
        LaunchError: the job has other nodes, or another number of ranks in this one.
    """
    if pod.nodes != len(counts):
        asked = f"{len(counts)} node{'s' * (len(counts) > 1)}"
        raise LaunchError(f"the plan is for {asked}, but PET_NNODES is {pod.nodes}")
    mine = counts[pod.node]
    if pod.processes not in (None, mine):
        raise LaunchError(
            f"the plan has {mine} processes on node {pod.node}, "
            f"but PET_NPROC_PER_NODE is {pod.processes}"
        )
    first = sum(counts[: pod.node])
    return [
        {
            "RANK": str(first + local),
            "WORLD_SIZE": str(sum(counts)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(mine),
            "GROUP_RANK": str(pod.node),
            "MASTER_ADDR": pod.master_addr,
            "MASTER_PORT": str(pod.master_port),
        }
        for local in range(mine)
    ]
