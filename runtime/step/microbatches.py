"""A rank's part of a batch: its rows, its micro-batches, and the weights of their losses.

16 rows, dp 2, 4 micro-batches       replica 0: rows 0-1 2-3 4-5 6-7
                                     replica 1: rows 8-9 10-11 12-13 14-15

Losses have equal weights, unless they are means over labels (`rewriting.label_counts`):

    labels kept   8 of 8    6 of 8    2 of 8        16 of the batch's 24
    weight        1         0.75      0.25          summed: 2
    loss          sum of weight * loss / 2          each label weighs alike
    backward      begins with weight / 3, and gradients are multiplied by 3 / 2 after the step

Every rank knows before the step that there are 3 micro-batches; the 2 is known when the step ends.
If no label is left out, everything is as for any other mean, bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from autopipe.batch.cut import slice_rows
from autopipe.batch.description import count_rows
from autopipe.batch.tree import Leaf
from autopipe.errors import ModelError
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import shape_at
from autopipe.ir.partition import Stage, partition
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Place
from autopipe.rewriting.label_counts import LabelCounts
from autopipe.stages.lower import Lowered, lower


@dataclass(frozen=True)
class Microbatches:
    """This rank's part of a batch.

    Attributes:
        plan: the plan, which describes the batch's tensors.
        leaves: the batch as it was given, by path.
        first: the first of its rows that is this rank's.
        rows: of a micro-batch.
        count: how many micro-batches this rank has.
        sharded: whether the batch was this data-parallel coordinate's part already.
        seeds: for a loss over the whole batch, the inputs that are gradients of embeddings, by path
            and micro-batch.
    """

    plan: Plan
    leaves: Mapping[str, Leaf]
    first: int
    rows: int
    count: int
    sharded: bool = False
    seeds: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    def of_all_replicas(self) -> Microbatches:
        """The micro-batches of all replicas, if the batch has them; else this one's."""
        if self.sharded:
            return self
        return replace(self, first=0, count=self.plan.mesh.dp * self.count)

    def inputs(self, stage: Stage, k: int, device: torch.device) -> list[Tensor]:
        """A stage's inputs of micro-batch `k`, [rows, ...] each, on `device`.

        Forward may write them in place. All are views of one batch, which share its version for
        autograd; each gets a version of its own by `data`, or a write in one micro-batch would
        invalidate tensors that others have saved.
        """
        start = self.first + k * self.rows
        cut = slice_rows(self.plan.inputs, self.leaves, start, start + self.rows)
        return [
            self.seeds[path][k] if path in self.seeds else _tensor(cut[path]).data.to(device)
            for path in stage.inputs
        ]


def divide(
    plan: Plan,
    place: Place,
    leaves: Mapping[str, Leaf],
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
    rows = count_rows(plan.inputs, leaves)
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


@dataclass(frozen=True)
class LossWeights:
    """The weights of micro-batches' losses, and the divisor of their sum.

    Attributes:
        losses: the weight of each micro-batch's loss; empty: 1 each.
        counts: the count of each micro-batch; empty: 1 each, or the loss's own.
        least, more: the divisor is max(sum of counts, least) + more.
    """

    losses: Sequence[float] = ()
    counts: Sequence[float] = ()
    least: float = 0.0
    more: float = 0.0

    def loss(self, k: int) -> float:
        """The weight of micro-batch `k`'s loss."""
        return self.losses[k] if self.losses else 1.0

    def count(self, k: int) -> float:
        """The count of micro-batch `k`."""
        return self.counts[k] if self.counts else 1.0

    def divisor(self, count: float) -> float:
        """The divisor of weighted losses, from the sum of counts."""
        return max(count, self.least) + self.more


EVEN = LossWeights()


class LabelWeights:
    """Weighs a rank's micro-batches by the labels that the loss is a mean over.

    Args:
        labels: the labels of the graph that is run.
        planned: the labels for the longest rows; they are the unit if replicas have batches of
            their own, whose rows may have other lengths.
        weighs: whether the rank has the last stage; no other needs the weights.
    """

    def __init__(
        self, labels: LabelCounts | None, planned: LabelCounts | None, *, weighs: bool = True
    ) -> None:
        self._found, self._planned, self._weighs = labels, planned, weighs
        self._lowered = cache(self._lower)

    def of(self, parts: Microbatches) -> LossWeights:
        """The weights of a rank's micro-batches.

        Raises:
            ModelError: a term of the loss is a mean over labels, of which they have unequally many.
        """
        found, planned = self._found, self._planned
        if found is None or planned is None:
            return EVEN
        if found.terms:
            _check_even(self._counted(parts.of_all_replicas()), found.place)
            return EVEN
        unit = math.prod(shape_at((planned if parts.sharded else found).labels, parts.rows))
        made = self._counted(parts) if self._weighs else []
        return LossWeights(
            [divisor / unit for divisor, _ in made],
            [count / unit for _, count in made],
            found.least / unit,
            found.more / unit,
        )

    def _counted(self, parts: Microbatches) -> list[tuple[float, ...]]:
        """The divisor and the count of each micro-batch, or the counts of terms."""
        lowered, cpu = self._lowered(parts.rows), torch.device("cpu")
        found = []
        for k in range(parts.count):
            # Copies, as the code of a loss may write to its labels.
            inputs = [tensor.clone() for tensor in parts.inputs(lowered.stage, k, cpu)]
            found.append(tuple(map(float, lowered.module(*inputs))))
        return found

    def _lower(self, rows: int) -> Lowered:
        assert self._found is not None
        graph = self._found.graph
        (stage,) = partition(analyse(graph), [])
        return lower(graph, stage, (), graph.constants, (), rows, last=True)


def _check_even(counts: Sequence[tuple[float, ...]], place: str) -> None:
    """Refuse micro-batches with different numbers of labels."""
    for k, own in enumerate(counts):
        for count, first in zip(own, counts[0], strict=True):
            if count == first:
                continue
            raise ModelError(
                f"{place + ': ' if place else ''}this mean over labels is one of several terms of "
                f"the loss. Micro-batch 0 has {first:.0f} labels, micro-batch {k} {count:.0f}: "
                "the mean of their losses is not the loss of the batch",
                hint='loss_over = "batch" computes it over all rows of the batch, in two passes; '
                'loss_over = "micro-batch" takes the mean of each micro-batch\'s own loss',
            )


def _tensor(leaf: Leaf) -> Tensor:
    assert isinstance(leaf, Tensor), "a stage's inputs are tensors; numbers are in the graph"
    return leaf
