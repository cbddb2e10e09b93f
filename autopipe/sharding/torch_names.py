"""What torch versions call collectives of torch.distributed, and how they open groups of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

reduce_scatter_single = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)
all_gather_single = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)


def group_of(ranks: Sequence[int], backend: str, device: torch.device) -> dist.ProcessGroup:
    """Open a group of ranks for tensors on `device`; all ranks of the run call it, in one order.

    NCCL's communicator is made here, on this rank's GPU. Since torch 2.15 it is made here in any
    case; if no GPU is named, it is on the one of the launcher's LOCAL_RANK, or of the rank in the
    run, and a plan may have given the rank another one.
    """
    gpu = device if backend == "nccl" else None
    made: dist.ProcessGroup = dist.new_group(list(ranks), backend=backend, device_id=gpu)
    return made
