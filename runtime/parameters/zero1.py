"""ZeRO-1: each rank of a parameter's group updates its own rows, and has optimizer state for those
rows only.

    backward      gradient, whole            n ranks, each with the sum over its micro-batches
    STEP          gradient of own rows       reduce-scatter, bucket by bucket
    optimizer     own rows += ...            the user's own, on `shards()`
    next step     parameter, whole           all-gather, bucket by bucket

Where a parameter is the fp32 master of a 16-bit one, gradients are added and summed in fp32, or in
16 bits where that is asked for, and 16 bits are gathered, as Megatron-LM's distributed optimizer
does; `row_shards` says which rank has which rows.

Bytes of a rank, with P those of its shared trainable parameters, G of their gradients, O optimizer
bytes per byte of parameter, n ranks in the group, b = max(25 MB, the largest parameter):

    parameters    P                     always; with masters, P/n + L, where L is of 16 bits
                  P + P/n               of those whose rows lie in several pieces
    gradients     G                     in backward
                  G + G/n + b           at most, while the buckets are summed
                  G/n                   from STEP to the next step
    optimizer     O P/n
    gathering     2 b (1 + 1/n)         at the start of a step, before anything else is held; gloo
                                        holds b more for each of the two
    on the link   G scattered, and P, or L, gathered, once a step

P/n stands for sum(ceil(rows/n) * bytes of a row), what the first rank has. From "ZeRO: Memory
Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al., 2020,
arXiv:1910.02054), section 5.1; masters are part of what it calls optimizer state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch.distributed as dist
from torch import Tensor, nn

from autopipe.planfile.placements import OwnRows
from autopipe.runtime.parameters.gradient_sum import GradientSum
from autopipe.runtime.parameters.row_shards import RowShards


class OptimizerShards:
    """The gradients of a rank's parameters, summed once a step, to each rank its rows.

    Args:
        parameters, groups, stages, varying: as of `GradientSum`.
        masters: as of `RowShards`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Mapping[str, dist.ProcessGroup],
        stages: Mapping[int, Iterable[str]],
        masters: Mapping[str, nn.Parameter] | None = None,
        varying: Collection[str] = (),
    ) -> None:
        self._held = RowShards(parameters, groups, masters)
        scatter = self._held.scatter
        self._sum = GradientSum(parameters, groups, stages, scatter, varying=varying)

    @property
    def rows(self) -> Mapping[str, OwnRows]:
        """As of `RowShards`."""
        return self._held.rows

    def shards(self) -> Mapping[str, nn.Parameter]:
        """As of `RowShards`."""
        return self._held.shards

    def begin(self, stage: int) -> None:
        """Nothing: micro-batches are added up before they are summed over ranks."""

    def arm(self, stage: int) -> None:
        """The next backward of `stage` is its last: sum its gradients as they are made."""
        self._sum.arm(stage)

    def finish(self) -> None:
        """Wait for the sums; the shards have their gradients, the parameters none.

        Raises:
            LaunchError, ScheduleError: as `GradientSum.finish`.
        """
        self._sum.finish()

    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank's shards, by name."""
        return {n: s.grad for n, s in self._held.shards.items() if s.grad is not None}

    def gather(self) -> None:
        """Fetch the rows that the other ranks have updated."""
        self._held.gather()

    def master(self, name: str) -> Tensor | None:
        """All of a master; every rank that has rows of it calls this. None: there is none."""
        return self._held.master(name)
