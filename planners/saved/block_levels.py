"""Derive the levels of a graph's blocks from those measured in a short graph of it.

    Seen.levels --levels_of--> BlockLevels: which nodes of a block run again at each level, the
                               bytes that this saves, and its seconds

Bytes are measured at the fewest rows and grow with the rows, since a block's own ops make a part
for each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.blocks import Block
from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import Dataflow, obstacle
from autopipe.ir.graph import READ_OP
from autopipe.ir.repeats import Short
from autopipe.joint.levels import OpLevel
from autopipe.planners.model.problem import BlockLevel, Seconds

Times = NDArray[np.float64]

MOST = 5
"""Levels of a block that a search gets. Where there are more, those are left out beside which the
others cost the least more."""


class _Found(NamedTuple):
    """A level of a block: offsets of its nodes in the block, bytes dropped at the fewest rows, and
    the part of them that does not grow with the rows (weights that are gathered and kept)."""

    offsets: tuple[int, ...]
    dropped: int
    fixed: int

    def at(self, rows: int, fewest: int) -> int:
        """Bytes dropped at a number of rows."""
        return self.fixed + (self.dropped - self.fixed) * rows // fewest


@dataclass(frozen=True)
class BlockLevels:
    """The levels of one block of the whole graph, without those that keep all or repeat all.

    Attributes:
        first, last: the positions of its first and last node.
        standing: the position in the short graph of the first node's counterpart.
        fewest: the rows at which bytes were measured.
    """

    first: int
    last: int
    standing: int
    fewest: int
    found: tuple[_Found, ...]

    def nodes(self) -> tuple[tuple[int, ...], ...]:
        """The positions of the nodes that run again, level by level."""
        return tuple(tuple(self.first + n for n in own.offsets) for own in self.found)

    def at(self, rows: int, forward: Sequence[Times], units: Units) -> tuple[BlockLevel, ...]:
        """The bytes that the levels save and the seconds that they cost.

        Args:
            forward: of each kind of device the forward seconds of the short graph's nodes.
        """
        return tuple(
            BlockLevel(
                own.at(rows, self.fewest),
                tuple(self._by_unit(own.offsets, kind, units) for kind in forward),
            )
            for own in self.found
        )

    def _by_unit(self, offsets: Sequence[int], seconds: Times, units: Units) -> Seconds:
        """Seconds of some of the block's nodes in each of the units that it is in."""
        first, last = units.of(self.first), units.of(self.last)
        found = [0.0] * (last - first + 1)
        for offset in offsets:
            found[units.of(self.first + offset) - first] += float(seconds[self.standing + offset])
        return tuple(found)


def may_run_again(
    flow: Dataflow, short: Short, inside: Sequence[int], seconds: Times
) -> dict[int, float]:
    """The seconds of the short graph's nodes that may run again, by position.

    Args:
        flow: the whole graph's data flow.
        inside: for each node of the whole graph the number of the block with which it may run
            again, or -1.
        seconds: the seconds of the short graph's nodes.
    """
    nodes = flow.graph.nodes
    return {
        position: float(seconds[position])
        for position, whole in enumerate(short.kept)
        if inside[whole] >= 0 and nodes[whole].op != READ_OP and obstacle(flow, [whole]) is None
    }


def levels_of(
    short: Short,
    segments: Sequence[str | None],
    seen: Mapping[str, tuple[OpLevel, ...]],
    fewest: int,
    blocks: Sequence[Block],
) -> list[BlockLevels]:
    """The levels of some blocks of the whole graph.

    Args:
        segments: the block of each node of the short graph.
        seen: the short graph's levels by block path; their groups are positions in it.
        fewest: the rows at which they were measured.
    """
    found = []
    for block in blocks:
        standing = int(short.like[block.first])
        most, *others = _most(seen.get(segments[standing] or "", ())) or (None,)
        own = tuple(
            _Found(
                tuple(sorted(p - standing for p in level.again)),
                most.kept - level.kept,
                most.fixed - level.fixed,
            )
            for level in others
            if most is not None
        )
        found.append(BlockLevels(block.first, block.stop - 1, standing, fewest, own))
    return found


def _most(levels: Sequence[OpLevel]) -> list[OpLevel]:
    """The first level, the last level, and some between: at most `MOST` after the first."""
    left = [*levels]
    while len(left) > MOST + 1:
        del left[
            min(range(1, len(left) - 1), key=lambda place: _loss(*left[place - 1 : place + 2]))
        ]
    return left


def _loss(before: OpLevel, level: OpLevel, after: OpLevel) -> float:
    """The cost of leaving out a level: twice the area, in bytes times seconds, of the triangle that
    it makes with its neighbours."""
    across = after.seconds - before.seconds, after.kept - before.kept
    to = level.seconds - before.seconds, level.kept - before.kept
    return abs(across[0] * to[1] - across[1] * to[0])
