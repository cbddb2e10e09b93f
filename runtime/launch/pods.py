"""A pod of Kubernetes -> the ranks that run in it, each with torchrun's variables.

    PET_NNODES, PET_NODE_RANK, PET_NPROC_PER_NODE, PET_MASTER_ADDR, PET_MASTER_PORT
        --pod_from-->  Pod  --environments-->  RANK, WORLD_SIZE, ... of each process

Kubeflow's operators set the PET variables in a node's one container (torchrun reads them too). Some
versions also set RANK and WORLD_SIZE, to the number of the pod and of all pods. So the PET
variables decide, unless LOCAL_RANK is set: only a rank that was started in the pod has that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopipe.errors import LaunchError

PATIENCE = 120.0
"""Seconds that a pod waits for the address of the first pod: Kubernetes may publish it late."""


@dataclass(frozen=True)
class Pod:
    """One node of a job, in which no rank has been started yet.

    Attributes:
        nodes, node: how many nodes the job has, and the number of this one, from 0.
        processes: ranks in this pod; None: as many as the plan has there.
        master_addr, master_port: host and port on which rank 0 listens.
    """

    nodes: int
    node: int
    processes: int | None
    master_addr: str
    master_port: int


def pod_from(environ: Mapping[str, str]) -> Pod | None:
    """The pod that an environment describes; None: this is no pod, or a rank in one.

    Raises:
        LaunchError: a variable is missing, is no number, or is a range of nodes (`1:4`).
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
        address = "127.0.0.1"  # there is no other node that has to find this one
    port = _number(environ, "MASTER_PORT") if "PET_MASTER_PORT" in environ else _PORT
    return Pod(nodes, node, counted, address, port)


_AUTOMATIC = ("auto", "gpu", "cpu")
"""Values of PET_NPROC_PER_NODE by which torchrun starts one process a device."""

_PORT = 29500
"""torchrun's own default."""


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(f"PET_{name}")
    if text is None:
        raise _missing(name, environ)
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        elastic = ": a plan is for one number of nodes" if ":" in text else ""
        raise LaunchError(f"PET_{name} is {text!r} in the environment, expected a number{elastic}")
    return int(text)


def _missing(name: str, environ: Mapping[str, str]) -> LaunchError:
    return LaunchError(
        f"PET_NNODES is {environ['PET_NNODES']!r} in the environment, but PET_{name} is not set",
        hint="unset PET_NNODES to run without Kubeflow's variables",
    )


def environments(pod: Pod, counts: Sequence[int]) -> list[dict[str, str]]:
    """torchrun's variables for each rank of a pod.

    Args:
        counts: the plan's number of ranks on each node.

    Raises:
        LaunchError: the plan has another number of nodes than the job, or another number of ranks
            on this node than the pod.
    """
    if pod.nodes != len(counts):
        nodes = f"{len(counts)} node{'s' * (len(counts) > 1)}"
        raise LaunchError(f"the plan is for {nodes}, but PET_NNODES is {pod.nodes}")
    processes = counts[pod.node]
    if pod.processes not in (None, processes):
        raise LaunchError(
            f"the plan has {processes} processes on node {pod.node}, "
            f"but PET_NPROC_PER_NODE is {pod.processes}"
        )
    first = sum(counts[: pod.node])
    return [
        {
            "RANK": str(first + local),
            "WORLD_SIZE": str(sum(counts)),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(processes),
            "GROUP_RANK": str(pod.node),
            "MASTER_ADDR": pod.master_addr,
            "MASTER_PORT": str(pod.master_port),
        }
        for local in range(processes)
    ]
