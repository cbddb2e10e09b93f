"""Find the entries of a tensor that a rank holds, by the plan alone; join parts to whole tensors.

    tp      its shard of a sharded parameter
    ZeRO    its rows of that shard: shared over replicas, under ZeRO-1 also over tied stages and
            over tensor-parallel ranks that each have a part of the gradient

A part is found by the positions of its entries, so one rule both divides and joins a tensor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import I, Sharding, own_rows
from autopipe.schedules.instructions import holders
from autopipe.sharding.collectives import in_rows, own_part
from autopipe.sharding.local_graph import replicated
from autopipe.sharding.plan_io import read_back


@dataclass(frozen=True)
class RankLayout:
    """How tensors lie over the ranks of a plan.

    Attributes:
        sharding: the sharding over tensor-parallel ranks.
        placed: the pipeline rank of each stage.
        partial: parameters whose gradients are partial sums on tensor-parallel ranks.
        frozen: parameters that are not trained; only ZeRO-3 shards them.
    """

    plan: Plan
    sharding: Sharding
    placed: tuple[int, ...]
    partial: frozenset[str]
    frozen: frozenset[str]

    @classmethod
    def of(cls, plan: Plan, frozen: Collection[str]) -> RankLayout:
        """The layout of a plan.

        Raises:
            ScheduleError, PlanError: the plan has no programs.
        """
        sharding = read_back(plan)
        placed = holders(programs.compute(plan))
        return cls(plan, sharding, placed, replicated(sharding), frozenset(frozen))

    def shard(self, name: str, whole: Tensor, place: Place) -> Tensor:
        """A tensor-parallel rank's part of a parameter or buffer."""
        placement = self.sharding.states.get(name, I)
        return (
            own_part(whole, placement, self.plan.mesh.tp, place.tp) if placement.sharded else whole
        )

    def trained(self, name: str, whole: Tensor, place: Place) -> Tensor:
        """The part of a parameter, or of its gradient, that a rank's optimizer has."""
        part, mesh = self.shard(name, whole, place), self.plan.mesh
        if not self.plan.deals and not self.plan.scatters:
            return part
        if name in self.frozen and not self.plan.fully_sharded:
            return part
        if self.plan.scatters:
            return in_rows(part, own_rows(part.shape, mesh.dp, place.dp))
        having = zip(self.plan.stages, self.placed, strict=True)
        sharing = sorted({rank for stage, rank in having if name in stage.parameters})
        ranks, position = len(sharing) * mesh.dp, sharing.index(place.pp) * mesh.dp + place.dp
        if name in self.partial:
            ranks, position = ranks * mesh.tp, position * mesh.tp + place.tp
        return in_rows(part, own_rows(part.shape, ranks, position))

    def whole(self, name: str, like: Tensor, parts: Iterable[tuple[Place, Tensor]]) -> Tensor:
        """A parameter or gradient as large as `like`, from the parts that ranks' optimizers have.

        Entries that no rank has are taken from `like`; entries of several ranks from one of them.
        """
        positions = torch.arange(like.numel()).view(like.shape)
        found = like.detach().clone().contiguous()
        for place, part in parts:
            at = self.trained(name, positions, place)
            if at.shape == part.shape:
                found.view(-1)[at.reshape(-1)] = part.reshape(-1).to(found.dtype)
        return found
