"""ZeRO-2: each rank has gradients of its own rows alone, and updates those; parameters are whole.

    every backward    gradient, whole, of a bucket     made, reduce-scattered, let go of
                      gradient of own rows += ...      the sum over micro-batches
    STEP              copies of the same rows          their gradients are summed
    optimizer         own rows += ...                  the user's own, on `shards()`
    next step         parameter, whole                 all-gather, bucket by bucket

A rank's rows are sharded over the replicas of its stage, which run side by side. Stages of other
ranks and tensor-parallel ranks that share a parameter have copies of the same rows (`hold`).

Bytes of a rank, with P, O, n and b as under ZeRO-1, G and b of gradients as they are summed:

    parameters    P                     always; with masters, P/n + L, where L is of 16 bits
    gradients     P/n                   from the first backward to the next step
                  2 b + b/n             beside them in a backward: a bucket is being filled, and the
                                        one before it is on its way, in a table and in its own rows
    optimizer     O P/n
    on the link   G scattered in every micro-batch; P, or L, gathered once a step

From "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (Rajbhandari et al.,
2020, arXiv:1910.02054), section 5.2.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.planfile.placements import OwnRows
from autopipe.runtime.parameters.buckets import Bucket, BucketQueue, agreed, unexpected
from autopipe.runtime.parameters.gradient_sum import GradientSum
from autopipe.runtime.parameters.row_shards import RowShards


class GradientShards:
    """The gradients of a rank's parameters: of each micro-batch summed, to each rank its rows.

    Args:
        held: the parameters and their shards, over `replicas`.
        parameters: this rank's, by name, in the model's order.
        replicas: the ranks that hold this rank's stages.
        stages: the names that each stage of this rank uses.
        copies: the group of each of these names, which is of ranks that have the same rows of one
            data-parallel coordinate: stages on several ranks that use it, and tensor-parallel ranks
            that each have a part of its gradient.
        varying: as of `GradientSum`.
    """

    def __init__(
        self,
        held: RowShards,
        parameters: Mapping[str, nn.Parameter],
        replicas: dist.ProcessGroup,
        stages: Mapping[int, Iterable[str]],
        copies: Mapping[str, dist.ProcessGroup],
        varying: Collection[str] = (),
    ) -> None:
        self._held = held
        self._parameters = parameters
        self._replicas = replicas
        self._copies = copies
        sharded = {name: parameters[name] for name in held.rows if parameters[name].requires_grad}
        self._stages = {
            stage: _StageSum(
                {n: sharded[n] for n in names if n in sharded}, replicas, held, varying
            )
            for stage, names in stages.items()
        }
        self._now: _StageSum | None = None
        copied = {name: shard for name, shard in held.shards.items() if name in copies}
        self._sum = GradientSum(copied, copies, {}, varying=varying)

    @property
    def rows(self) -> Mapping[str, OwnRows]:
        """As of `RowShards`."""
        return self._held.rows

    def shards(self) -> Mapping[str, nn.Parameter]:
        """As of `RowShards`."""
        return self._held.shards

    def begin(self, stage: int) -> None:
        """A backward of `stage` follows: scatter its gradients as they are made.

        Raises:
            LaunchError, ScheduleError: as `GradientSum.finish`, of the backward before.
        """
        self._end()
        self._now = self._stages[stage]
        self._now.begin()

    def arm(self, stage: int) -> None:
        """Do nothing: the gradients of every micro-batch are scattered."""

    def finish(self) -> None:
        """Wait for the scatters, and sum the gradients of copies.

        Raises:
            LaunchError, ScheduleError: as `GradientSum.finish`.
        """
        self._end()
        self._sum.finish()

    def gather(self) -> None:
        """Fetch the rows that the other ranks have updated."""
        self._held.gather()

    def master(self, name: str) -> Tensor | None:
        """All of a master; every rank that has rows of it calls this. None: there is none."""
        return self._held.master(name)

    def owned_gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank's shards; those of a copied shard on its first rank alone."""
        return {
            name: shard.grad
            for name, shard in self._held.shards.items()
            if shard.grad is not None
            and (name not in self._copies or dist.get_rank(self._copies[name]) == 0)
        }

    def _end(self) -> None:
        if self._now is not None:
            self._now.end()
            self._now = None


class _StageSum:
    """The gradients of one stage in one backward, scattered while they are made.

    Which parameters get a gradient is learnt in the first backward, by one small exchange. Until
    then buckets wait for every trainable parameter, and one without a gradient holds back the
    buckets after its own. If parameters vary in this, every backward is like the first one.

    Args:
        parameters: the sharded parameters of the stage.
        group: the ranks over which they are sharded.
        varying: as of `GradientSum`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup,
        held: RowShards,
        varying: Collection[str],
    ) -> None:
        self._varies = any(name in varying for name in parameters)
        self._parameters = parameters
        self._group = group
        self._held = held
        self._trained: list[str] | None = None
        self._queue: BucketQueue | None = None  # made by what is learnt, or by what may be
        self._learnt = False
        self._runs = False
        self._made: set[str] = set()
        self._fresh: list[str] = []
        self._under_way: Callable[[], None] | None = None
        for name, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                self._hook(name)
            )

    def begin(self) -> None:
        """The stage's backward follows."""
        trained = [name for name, p in self._parameters.items() if p.requires_grad]
        if trained != self._trained:
            self._trained, self._learnt = trained, False
            self._queue = self._queue_of(trained, trained)
        self._made.clear()
        self._fresh = [name for name in trained if self._held.shards[name].grad is None]
        self._runs = True

    @torch.no_grad()
    def end(self) -> None:
        """The backward is over: scatter what is left, and wait for all of it."""
        assert self._queue is not None and self._trained is not None, "it has begun"
        self._runs = False
        self._queue.end()
        self._wait()
        if not self._learnt and self._trained:
            used = agreed(self._group, self._trained, self._parameters, self._made)
            for name in {*self._fresh} - {*used}:
                self._held.shards[name].grad = None  # zeros of parameters that no rank uses
            if self._varies:
                return
            self._queue = self._queue_of(used, self._made)
        self._learnt = True

    def _queue_of(self, names: list[str], used: Collection[str]) -> BucketQueue:
        return BucketQueue(self._group, names[::-1], self._parameters, used, self._scatter)

    def _hook(self, name: str) -> Callable[[Tensor], None]:
        def arrived(_: Tensor) -> None:
            if not self._runs:
                return  # another stage of this rank uses it too, and runs
            assert self._queue is not None
            if name not in self._queue.names:
                raise unexpected(name)
            self._made.add(name)
            self._queue.final(name)

        return arrived

    def _scatter(self, bucket: Bucket) -> None:
        self._wait()
        self._under_way = self._held.scatter(bucket)

    def _wait(self) -> None:
        if self._under_way is not None:
            self._under_way()
        self._under_way = None
