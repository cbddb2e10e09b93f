"""A batch as a rank sees it: which rows are its own, in micro-batches.

16 rows, dp 2, 4 micro-batches       replica 0: rows 0-1 2-3 4-5 6-7
                                     replica 1: rows 8-9 10-11 12-13 14-15
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopipe.errors import ModelError
from autopipe.frontend import batch as batches
from autopipe.ir.partition import Stage
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place


@dataclass(frozen=True)
class Microbatches:
    """This rank's part of a batch.

    Attributes:
        plan: describes the batch's tensors.
        leaves: the batch as it was given, by path.
        first: the first of its rows that is this rank's.
        rows: of a micro-batch.
        count: how many micro-batches this rank has.
        sharded: the batch was this data-parallel coordinate's part already.
        seeds: of a loss over the whole batch, the inputs that are gradients of embeddings, by path
            and micro-batch.
    """

    plan: Plan
    leaves: Mapping[str, batches.Leaf]
    first: int
    rows: int
    count: int
    sharded: bool = False
    seeds: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    def inputs(self, stage: Stage, k: int, device: torch.device) -> list[Tensor]:
        """What a stage takes of micro-batch `k`, [rows, ...] each, on `device`.

        Forward may write it in place. All are views of one batch, whose version autograd counts:
        `data` has one of its own, or a write in one micro-batch would spoil what others keep.
        """
        start = self.first + k * self.rows
        cut = batches.slice_rows(self.plan.inputs, self.leaves, start, start + self.rows)
        return [
            self.seeds[path][k] if path in self.seeds else _tensor(cut[path]).data.to(device)
            for path in stage.inputs
        ]


def divide(
    plan: Plan,
    place: Place,
    leaves: Mapping[str, batches.Leaf],
    micro_batches: int | None,
    *,
    sharded: bool,
) -> Microbatches:
    """Cut a batch into micro-batches.

    Args:
        micro_batches: how many on each rank; None: as many as divide, up to the plan's.
        sharded: the batch is this data-parallel coordinate's part already.

    Raises:
        ModelError: the rows do not divide, or not into micro-batches of as many as the plan fixes.
    """
    rows = batches.rows_of(plan.inputs, leaves)
    dp = 1 if sharded else plan.mesh.dp
    if plan.rows_fixed:
        micro_batches = micro_batches or max(rows // (dp * plan.traced_rows), 1)
        wanted = dp * micro_batches * plan.traced_rows
        if rows != wanted:
            raise ModelError(
                f"the batch has {rows} rows, and the graph of this model is one of micro-batches "
                f"of {plan.traced_rows} rows alone",
                hint=f"give {wanted} rows",
            )
    elif micro_batches is None and rows % dp == 0:
        most = min(plan.batch.micro_batches, rows // dp)
        micro_batches = max(m for m in range(1, most + 1) if rows // dp % m == 0)
    count = micro_batches or 1
    parts = dp * count
    if rows % parts:
        into = f"{count} micro-batches" + (f" on each of {dp} data-parallel ranks" * (dp > 1))
        raise ModelError(
            f"the batch has {rows} rows, which do not divide into {into}",
            hint=f"give {max(parts, rows - rows % parts)} rows, or another multiple of {parts}",
        )
    first = 0 if sharded else place.dp * (rows // dp)
    return Microbatches(plan, leaves, first, rows // parts, count, sharded)


def _tensor(leaf: batches.Leaf) -> Tensor:
    assert isinstance(leaf, Tensor), "a stage's inputs are tensors; numbers are in the graph"
    return leaf
