"""New names of the collectives that torch 2.13 renamed, on all torch versions."""

from __future__ import annotations

import torch.distributed as dist

reduce_scatter_single = (
    dist.reduce_scatter_single
    if hasattr(dist, "reduce_scatter_single")
    else dist.reduce_scatter_tensor
)
all_gather_single = (
    dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
)
