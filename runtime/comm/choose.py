"""Chooses a run's transport: NCCL between GPUs, direct copies within a host, gloo elsewhere.

    all ranks on different GPUs      nccl, from GPU to GPU
    two ranks on one GPU             gloo, through host memory: NCCL refuses that ("Duplicate GPU")
    some ranks on the CPU            gloo
    all ranks on the CPU             direct within a host, gloo from host to host; gloo alone where
                                     a container lets no process copy into another

AUTOPIPE_TRANSPORT=gloo (or direct, or nccl) in the environment of rank 0 overrides the choice.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from autopipe.errors import LaunchError
from autopipe.runtime.comm.cma_links import make_links
from autopipe.runtime.comm.cma_transport import DirectTransport
from autopipe.runtime.comm.gloo import GlooTransport, in_one_group, make_groups
from autopipe.runtime.comm.nccl import NcclTransport, few_queues, make_lanes
from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.launch.world import TIMEOUT
from autopipe.schedules.transfers import Edge

VARIABLE = "AUTOPIPE_TRANSPORT"
TRANSPORTS = ("gloo", "direct", "nccl")


class Choice(NamedTuple):
    """A transport for a run.

    Attributes:
        transport: one of `TRANSPORTS`. Where "direct" turns out to be impossible, gloo takes its
            place, unless the user asked for it.
        remark: a line for the user; None: there is nothing to say.
        asked: whether the user asked for this transport.
    """

    transport: str
    remark: str | None = None
    asked: bool = False


def choose(gpus: Sequence[str | None], asked: str | None, *, nccl: bool = True) -> Choice:
    """The transport for ranks on these devices.

    Args:
        gpus: for each rank a name of its GPU, unique in the world; None: the rank is on the CPU.
        asked: the value of AUTOPIPE_TRANSPORT; None or "": it is not set.
        nccl: whether every rank's torch is built with NCCL.

    Raises:
        LaunchError: `asked` is no transport, or one that a rank cannot use.
    """
    if asked and asked not in TRANSPORTS:
        expected = f"{', '.join(TRANSPORTS[:-1])} or {TRANSPORTS[-1]}"
        raise LaunchError(f"{VARIABLE} is {asked!r}, expected {expected}")
    on_gpu = next((rank for rank, gpu in enumerate(gpus) if gpu is not None), None)
    if asked == "direct" and on_gpu is not None:
        raise LaunchError(
            f"{VARIABLE} is 'direct', which copies from host memory to host memory, but rank "
            f"{on_gpu} runs on {gpus[on_gpu]}",
            hint=f"unset {VARIABLE}",
        )
    if asked == "nccl" and None in gpus:
        raise LaunchError(
            f"{VARIABLE} is 'nccl', but rank {gpus.index(None)} runs on the CPU",
            hint=f"unset {VARIABLE}, or plan for GPUs",
        )
    if asked == "nccl" and not nccl:
        raise LaunchError(f"{VARIABLE} is 'nccl', but this torch is built without it")
    if asked:
        return Choice(asked, asked=True)
    if on_gpu is None:
        return Choice("direct")
    if None in gpus or not nccl:
        return Choice("gloo")
    first = {gpu: rank for rank, gpu in reversed(list(enumerate(gpus)))}
    shared = next(((first[gpu], rank) for rank, gpu in enumerate(gpus) if first[gpu] != rank), None)
    if shared is None:
        return Choice("nccl")
    a, b = shared
    return Choice(
        "gloo",
        f"ranks {a} and {b} share {gpus[a]}, which NCCL refuses: tensors go over gloo, "
        "through host memory\n"
        "hint: NCCL 2.30 and later allow it with NCCL_MULTI_RANK_GPU_ENABLE=1; then also set "
        f"{VARIABLE}=nccl",
    )


def _agree(device: torch.device, world: dist.ProcessGroup | None) -> Choice:
    """The choice of all ranks together; rank 0 prints its remark on stderr."""
    gpu, nccl = None, dist.is_nccl_available()
    if device.type == "cuda":
        gpu = f"GPU {torch.cuda.get_device_properties(device).uuid}"
    seen: list[tuple[str | None, bool, str | None]] = [(None, nccl, None)] * dist.get_world_size()
    dist.all_gather_object(seen, (gpu, nccl, os.environ.get(VARIABLE)), group=world)
    gpus = [gpu for gpu, _, _ in seen]
    choice = choose(gpus, seen[0][2], nccl=all(nccl for _, nccl, _ in seen))
    if choice.remark is not None and dist.get_rank() == 0:
        print(choice.remark, file=sys.stderr, flush=True)
    return choice


def backend_for(device: torch.device, world: dist.ProcessGroup | None = None) -> str:
    """The backend of torch.distributed for sums of gradients, the same on all ranks.

    Every rank calls it, at the same point of its program.

    Args:
        device: this rank's device.
        world: all ranks, for tensors in host memory; None: the default group is.

    Returns:
        "nccl" or "gloo".

    Raises:
        LaunchError: as `choose`, on every rank.
    """
    return "nccl" if _agree(device, world).transport == "nccl" else "gloo"


def shares_memory(device: torch.device) -> bool:
    """Whether ranks on one host may talk through shared memory, as direct transfers do."""
    return device.type == "cpu" and os.environ.get(VARIABLE, "direct") == "direct"


def transport_for(
    device: torch.device,
    pipelines: Sequence[Sequence[int]],
    edges: Sequence[Edge],
    timeout: float = TIMEOUT,
    world: dist.ProcessGroup | None = None,
) -> Transport:
    """This rank's transport; every rank of the world calls it, at the same point of its program.

    Args:
        device: this rank's device.
        pipelines: for each pipeline (a data-parallel coordinate) the global rank of each stage;
            every rank of the world is in one.
        edges: which stages send to which, in training and in evaluation together.
        timeout: seconds that a transfer waits for its other side.
        world: as of `backend_for`.

    Raises:
        LaunchError: as `choose`; or AUTOPIPE_TRANSPORT is "direct", and two ranks of a host cannot
            copy into each other's memory. Every rank raises it.
    """
    if not dist.is_initialized():
        return local_network(pipelines[0], timeout)[0]
    rank = dist.get_rank()
    stages = next(stages for stages in pipelines if rank in stages)
    world = world or dist.group.WORLD
    assert world is not None
    choice = _agree(device, world)
    if choice.transport == "nccl":
        groups = make_lanes(pipelines, edges, device, timeout=timeout)
        remark = few_queues(len(groups), os.environ)
        if remark is not None:
            print(f"rank {rank}: {remark[0]}\nhint: {remark[1]}", file=sys.stderr, flush=True)
        # A few steps at most use it: a group for each way would cost too many sockets.
        loading = GlooTransport(stages, rank, in_one_group(stages, world), owned=False)
        return NcclTransport(stages, rank, groups, loading)
    if choice.transport == "direct":
        links = make_links(pipelines, edges, world)
        if not isinstance(links, str):
            far = None
            if links.far:
                far = GlooTransport(stages, rank, make_groups(links.far, timeout))
            return DirectTransport(stages, rank, links.wires, far, timeout)
        if choice.asked:
            raise LaunchError(
                f"{VARIABLE} is 'direct', but {links}",
                hint=f"unset {VARIABLE}: gloo does without",
            )
    return GlooTransport(stages, rank, make_groups(pipelines, timeout))
