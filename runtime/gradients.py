"""Summing gradients over the ranks that hold the same parameter, once per step.

Ranks hold the same parameter when they are the same stage of another data-parallel coordinate, or
another stage that a tied parameter stands in. A parameter's group is all of them, so one all-reduce
does both sums. Losses are seeded with their share of the whole batch: sums need no division.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_BYTES = 25 * 2**20
"""How much goes in one all-reduce: large enough for the link's bandwidth, small enough that the
copy it needs is small beside a model (the default of torch's DistributedDataParallel)."""


class GradientSum:
    """Sums the gradients of a rank's parameters.

    Args:
        parameters: by name, those with a gradient.
        groups: the process group of each name whose parameter stands on more than this rank.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup],
        tied: frozenset[str],
    ) -> None:
        self._parameters = parameters
        self._groups = groups
        self._tied = tied

    def __call__(self) -> None:
        pending: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        for group, gradients in self._by_group():
            for bucket in _buckets(gradients):
                flat = torch.cat([gradient.flatten() for gradient in bucket])
                work = dist.all_reduce(flat, group=group, async_op=True)
                pending.append((work, flat, bucket))
        for work, flat, bucket in pending:
            work.wait()
            for gradient, summed in zip(
                bucket, torch.split(flat, [g.numel() for g in bucket]), strict=True
            ):
                gradient.copy_(summed.view(gradient.shape))

    def _by_group(self) -> list[tuple[dist.ProcessGroup, list[Tensor]]]:
        """Gradients by group, in the order in which every rank of a group knows them."""
        found: dict[dist.ProcessGroup, list[Tensor]] = {}
        for name in sorted(self._groups):
            parameter = self._parameters[name]
            if parameter.grad is None and name in self._tied:
                parameter.grad = torch.zeros_like(parameter)  # another stage may have one
            if parameter.grad is not None:
                found.setdefault(self._groups[name], []).append(parameter.grad)
        return list(found.items())


def _buckets(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Consecutive gradients of one dtype, about `BUCKET_BYTES` each."""
    buckets: list[list[Tensor]] = []
    size = 0
    for gradient in gradients:
        if not buckets or size > BUCKET_BYTES or buckets[-1][0].dtype != gradient.dtype:
            buckets.append([])
            size = 0
        buckets[-1].append(gradient)
        size += gradient.numel() * gradient.element_size()
    return buckets
