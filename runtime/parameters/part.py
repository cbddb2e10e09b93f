"""A rank's part of a planned model: its place in the plan, and its stages.

plan.mesh.places[3]   pp 1, dp 1, tp 0   --placed = (0, 1, 1, 0)-->   stages 1 and 2
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.ir.partition import Stage
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.sharding.collectives import Axis
from autopipe.stages.bind import Split


@dataclass(frozen=True)
class RankPart:
    """A rank's part of a planned model, without any values.

    Attributes:
        split: the model in training, of this rank's tensor-parallel coordinate, all stages.
        placed: the pipeline rank of each stage.
        device: where this rank's tensors are.
        axis: its tensor-parallel ranks; None: it has none.
    """

    plan: Plan
    place: Place
    split: Split
    placed: tuple[int, ...]
    device: torch.device
    axis: Axis | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages on this rank, ascending."""
        return tuple(s for s in self.split.stages if self.placed[s.index] == self.place.pp)

    @property
    def rows(self) -> int:
        """Rows of a micro-batch of the plan's own batch size."""
        return self.plan.batch.microbatch_rows(self.plan.mesh.dp)
