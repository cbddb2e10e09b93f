"""Collectives over the ranks of an axis, through a process group of torch.distributed.

    mesh pp=2 dp=1 tp=2      stage 0: ranks 0 1      stage 1: ranks 2 3       a group for each stage

Parts may be of unequal size where a long dim does not divide; for collectives that need equal parts
shorter ones are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from autopipe.sharding.torch_names import all_gather_single, reduce_scatter_single

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class GroupAxis:
    """A `collectives.Axis` over a group of torch.distributed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def all_reduce(self, x: Tensor, op: str) -> Tensor:
        """As `Axis.all_reduce`, in place."""
        dist.all_reduce(x, _OPS[op], group=self.group)
        return x

    def begin_all_reduce(self, x: Tensor) -> Callable[[], None]:
        """As `Axis.begin_all_reduce`; it runs while the caller computes."""
        work = dist.all_reduce(x, group=self.group, async_op=True)
        assert work is not None
        return lambda: work.wait() and None

    def all_gather(self, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """As `Axis.all_gather`."""
        most = max(sizes)
        found = x.new_empty(most * self.size)
        all_gather_single(found, _filled(x, most), group=self.group)
        return [part[:size] for part, size in zip(torch.split(found, most), sizes, strict=True)]

    def reduce_scatter(self, parts: Sequence[Tensor]) -> Tensor:
        """As `Axis.reduce_scatter`."""
        most = max(part.numel() for part in parts)
        whole = torch.cat([_filled(part, most) for part in parts])
        own = whole.new_empty(most)
        reduce_scatter_single(own, whole, group=self.group)
        return own[: parts[self.rank].numel()]

    def all_to_all(self, parts: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        """As `Axis.all_to_all`."""
        found = parts[0].new_empty(sum(sizes))
        given = [part.numel() for part in parts]
        dist.all_to_all_single(found, torch.cat(list(parts)), list(sizes), given, self.group)
        return list(torch.split(found, list(sizes)))


def _filled(x: Tensor, size: int) -> Tensor:
    if x.numel() == size:
        return x
    return torch.cat([x, x.new_zeros(size - x.numel())])
