"""Which bytes a graph keeps for backward, at each number of rows that a plan may have.

    Saving --at(units, rows)--> KeptBytes: by rows the bytes of storages, by the units that make and
                                read them

Bytes are a straight line in the rows nearly everywhere, so two runs mostly tell all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Ref
from autopipe.ir.repeats import Short, Storage
from autopipe.planners.model.problem import Saved
from autopipe.planners.saved.observe import Levels, Seen, eager_levels, observe_saved
from autopipe.planners.saved.other_rows import JointGraphs

Made = Mapping[Ref, torch.dtype]
"""The dtypes of the graph's values; in mixed precision they differ from the model's own."""


class KeptBytes(NamedTuple):
    """The bytes that a graph keeps, at each number of rows.

    Attributes:
        saved: the saved storages, by the rows.
        made, waiting: as `Profile` has them, by the rows.
        made_in: the dtypes of the nodes' results, by position.
        low: the parameters of which there are copies in low precision.
        levels: as `Seen` has them, at the fewest rows.
    """

    saved: dict[int, tuple[Saved, ...]]
    made: dict[int, tuple[int, ...]]
    waiting: dict[int, tuple[int, ...]]
    made_in: Made
    low: frozenset[str]
    levels: Levels


@dataclass(frozen=True)
class Saving:
    """Finds the bytes that a graph saves, from runs of a shorter graph.

    Args:
        check: whether to check that bytes are a straight line in the rows.
        segments: the block of each node of the short graph.
        compiled: whether stages run compiled and keep the least (`joint.run_again`); else they keep
            what autograd saves.
        seconds: the seconds, at the fewest rows, of the short graph's nodes in blocks that may run
            again, by position.
        ample: if the fewest rows keep no more bytes than this, nothing has to run again, and no
            levels are made. (Levels of compiled stages come along with their kept bytes.)
    """

    flow: Dataflow
    short: Short
    precision: str
    check: bool
    segments: Sequence[str | None]
    compiled: bool
    seconds: Mapping[int, float]
    ample: float

    def at(self, units: Units, rows: Sequence[int], again: NDArray[np.int64]) -> KeptBytes:
        """The kept bytes at each number of rows.

        Bytes are a straight line in the rows for nearly every model, except that the smallest
        number of rows may be off it. Two runs give the line; a third checks it if asked to. Where
        compiled stages keep other storages at other rows, `other_rows` has their joint graphs.

        Args:
            again: for each node the number of the block with which it may run again, or -1.

        Raises:
            Uneven: the short graph's bytes do not hold for the whole graph.
        """
        observe = cache(partial(self._observe, rows[0], JointGraphs(self.check)))
        first, by_unit = observe(rows[0]), cache(partial(self._by_unit, units, again))
        saved: dict[int, tuple[Saved, ...]] = {}
        made: dict[int, tuple[int, ...]] = {}
        waiting: dict[int, tuple[int, ...]] = {}
        like, starts = self.short.like, np.array(units.starts)
        for size, line in self._lines(observe, rows).items():
            saved[size] = tuple(
                Saved(sum(line.bytes[number] for number in numbers), *place)
                for place, numbers in by_unit(line.seen.storages).items()
            )
            if self.compiled:
                made[size] = tuple(np.maximum.reduceat(line.made[like], starts).tolist())
                waiting[size] = tuple(np.add.reduceat(line.waiting[like], starts).tolist())
        nodes, kept = self.flow.graph.nodes, self.short.kept
        made_in = {
            Ref(node.name, number): dtype
            for node, standing in zip(nodes, like.tolist(), strict=True)
            for number, dtype in enumerate(first.made_in.get(kept[standing], ()))
            if dtype is not None
        }
        low, levels = set(first.copies), first.levels
        if not self.compiled and sum(item.bytes for item in saved[rows[0]]) > self.ample:
            levels = eager_levels(self.short, self.precision, rows[0], self.segments, self.seconds)
        return KeptBytes(
            saved=saved,
            made=made,
            waiting=waiting,
            made_in=made_in,
            low=frozenset(n for n, known in self.short.states.items() if known in low),
            levels=levels,
        )

    def _observe(self, fewest: int, known: JointGraphs, rows: int) -> Seen:
        return observe_saved(
            self.short,
            self.precision,
            rows,
            segments=self.segments,
            compiled=self.compiled,
            seconds=self.seconds if self.compiled and rows == fewest else {},
            known=known,
        )

    def _lines(self, observe: Callable[[int], Seen], rows: Sequence[int]) -> dict[int, _SavedLine]:
        """The storages at each number of rows, and their bytes.

        Rows that are left out at the small end until the others are on a line, and the last three
        if none are, are run themselves.
        """
        if len(rows) <= 3:
            return {size: _as_it_is(observe(size)) for size in rows}
        if (line := self._line(observe, rows)) is not None:
            return line
        return {rows[0]: _as_it_is(observe(rows[0]))} | self._lines(observe, rows[1:])

    def _line(
        self, observe: Callable[[int], Seen], rows: Sequence[int]
    ) -> dict[int, _SavedLine] | None:
        """The bytes at all these rows, from a run of the first and one of the last.

        None: their storages differ, or the bytes are on no line.
        """
        small, between, large = rows[0], rows[len(rows) // 2], rows[-1]
        low, high = observe(small), observe(large)
        same_storages = low.storages == high.storages
        # Where storages differ, the middle one still tells whether joint graphs are on lines.
        middle = observe(between) if self.check and (same_storages or self.compiled) else None
        if not same_storages or (middle and middle.storages != low.storages):
            return None
        found: dict[int, _SavedLine] = {}
        for size in rows:
            line = _on_line(low, high, size - small, large - small)
            if line is None or (middle and size == between and line.bytes != [*middle.bytes]):
                return None
            found[size] = line
        return found

    def _by_unit(
        self, units: Units, again: NDArray[np.int64], storages: tuple[Storage, ...]
    ) -> dict[tuple[int | None, tuple[int, ...], int | None], list[int]]:
        """The numbers of the storages that the same units keep, by these units."""
        found: dict[tuple[int | None, tuple[int, ...], int | None], list[int]] = defaultdict(list)
        for number, seen in enumerate(storages):
            for made, savers in self.short.along(seen):
                alone = {int(again[made]), *again[list(savers)].tolist()}
                rerun = alone.pop() if len(alone) == 1 else -1
                place = (
                    None if self.flow.local[made] else units.of(made),
                    tuple(sorted({units.of(position) for position in savers})),
                    rerun if rerun >= 0 else None,
                )
                found[place].append(number)
        return found


class _SavedLine(NamedTuple):
    """The bytes of a run at a number of rows: of saved storages, made in backward, and waiting
    between its halves."""

    seen: Seen
    bytes: Sequence[int]
    made: NDArray[np.int64]
    waiting: NDArray[np.int64]


def _as_it_is(seen: Seen) -> _SavedLine:
    return _SavedLine(seen, seen.bytes, seen.made, seen.waiting)


def _on_line(low: Seen, high: Seen, part: int, of: int) -> _SavedLine | None:
    """The bytes at `part` of the `of` rows from one run to another that keeps the same storages.

    None: those of a storage are no whole number there.
    """
    more, rest = np.divmod((np.array(high.bytes) - np.array(low.bytes)) * part, of)
    if rest.any():
        return None
    # A maximum of sums is convex: never above the line between two of its points. So rounded up.
    made = low.made - (low.made - high.made) * part // of
    waiting = low.waiting + (high.waiting - low.waiting) * part // of
    return _SavedLine(low, (np.array(low.bytes) + more).tolist(), made, waiting)
