"""Keeps what a rank has prepared: the model traced and lowered once for each length of rows.

                 kept for each                               what is made once for it
    split        tokens of a row, training or evaluation     traced and cut
    executor     split, rows of a micro-batch, their number  lowered, dry run, its programs proved
    loss         split                                       the loss of the whole batch
    weights      split                                       the divisors of micro-batches' losses

The planned split stays; of the others the `LENGTHS` that were used last, with all that is theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autopipe.batch import row_length
from autopipe.batch.tree import flatten
from autopipe.rows.least_rows import ONE, check_rows, least_rows, or_two
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.microbatches import LabelWeights
from autopipe.runtime.step.prepare import Rank, evaluation, training
from autopipe.runtime.step.whole_loss import BatchLoss
from autopipe.schedules.instructions import Program
from autopipe.stages.bind import Split

LENGTHS = 32
"""Lengths of rows for which a rank keeps what it has traced and lowered."""

Key = tuple[int | None, bool | None]
"""Tokens of a row; None for training, else whether the model is evaluated with its outputs."""


class Ready:
    """The model as it is run, for each length of rows: traced, cut and lowered once.

    Args:
        at_length, evaluation: as `Pipe` has them.
        learn: tells the watchdog of a program.
    """

    def __init__(
        self,
        rank: Rank,
        at_length: Callable[[Any, int], Split],
        evaluation: Callable[[Any, bool], Split],
        learn: Callable[[Program], Callable[[int], None]],
    ) -> None:
        self._rank, self._learn = rank, learn
        self._at_length, self._evaluation = at_length, evaluation
        self._planned = row_length.length_of(rank.part.plan.inputs)
        self._splits: dict[Key, Split] = {(self._planned, None): rank.part.split}
        self._executors: dict[tuple[int, int, int], Executor] = {}
        self._losses: dict[int, BatchLoss] = {}
        self._weights: dict[int, LabelWeights] = {}

    def split(self, batch: Any, outputs: bool | None = None) -> Split:
        """The model for rows as long as a batch's; `outputs`: as `Key` has it.

        Raises:
            ModelError: the model cannot be run at this length; names the user's line.
        """
        length = row_length.length_in(self._rank.part.plan.inputs, flatten(batch))
        key = length, outputs
        if key not in self._splits:
            if outputs is not None:
                self._splits[key] = self._evaluation(batch, outputs)
            else:
                assert length is not None, "a batch without a sequence is as planned"
                self._splits[key] = self._at_length(batch, length)
            self._forget()
        elif key != next(iter(self._splits)):
            self._splits[key] = self._splits.pop(key)  # the one used last is let go last
        return self._splits[key]

    def executor(self, split: Split, rows: int, count: int, *, trains: bool) -> Executor:
        """What runs `count` micro-batches of so many rows; made once for each number of them."""
        key = id(split), rows, count
        if key not in self._executors:
            least = least_rows(split.graph) if trains else ONE
            check_rows(or_two(least, self._rank.part.plan.asks_for_one_row), rows)
            if trains:
                made = training(self._rank, rows, split)
            else:
                made = evaluation(self._rank, split, rows, count)
            made.watch = self._learn(made.program)
            if made.first is not None:
                made.first.watch = self._learn(made.first.program)
            self._executors[key] = made
        return self._executors[key]

    def loss(self, split: Split) -> BatchLoss:
        """What computes a split's loss of the whole batch."""
        if id(split) not in self._losses:
            self._losses[id(split)] = BatchLoss(self._rank.part, split, self._rank.replicas)
        return self._losses[id(split)]

    def weights(self, split: Split) -> LabelWeights:
        """What weighs the micro-batches' losses of a split."""
        if id(split) not in self._weights:
            own = {stage.index for stage in self._rank.part.stages}
            last = any(s.is_last(split.graph) for s in split.stages if s.index in own)
            planned = self._rank.part.split.labels
            self._weights[id(split)] = LabelWeights(split.labels, planned, weighs=last)
        return self._weights[id(split)]

    def _forget(self) -> None:
        """Keep the planned split and the `LENGTHS` used last, and what runs them."""
        while len(self._splits) > LENGTHS + 1:
            oldest = self._splits.pop([*self._splits][1])
            self._losses.pop(id(oldest), None)
            self._weights.pop(id(oldest), None)
            others = {
                key: executor for key, executor in self._executors.items() if key[0] != id(oldest)
            }
            self._executors = others
