"""Find the cut points that a planner considers; a unit is the nodes between two of them.

nodes    embed | norm  q  k  v  attention  add | norm  up  gelu  down  add | ...
units    0       1     2  3  4                   5     6         7            one parameter each
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Ref, State, bytes_at
from autopipe.ir.partition import legal_cuts

MOST_UNITS = 128
"""About the largest number of units: the time of planning grows with its square."""


@dataclass(frozen=True)
class Units:
    """The units of a graph: `starts[u]` is the position of unit u's first node, ascending."""

    starts: tuple[int, ...]

    def of(self, position: int) -> int:
        """The unit of the node at `position`; positions after the last node are in the last."""
        return min(bisect_right(self.starts, position), len(self.starts)) - 1


def find_units(
    flow: Dataflow, blocks: Sequence[Block] = (), at_least: int = 1, most: int = MOST_UNITS
) -> Units:
    """Cut a graph into units with a trainable parameter each, so that every stage can train.

    Between two consecutive nodes that use parameters there is one cut, where the fewest bytes
    cross; among equals it is at the beginning of a block, else at the first place. If that gives
    fewer than `at_least` units, further legal cuts are added, those with the fewest bytes first. If
    it gives more than `most`, each group of equally many cuts keeps the one with the fewest bytes,
    and so does the beginning of each block: units of one and of two layers side by side would make
    equal stages impossible. Only of more than 2 `most` blocks some are joined.
    """
    width = _crossing_bytes(flow)
    beginnings = {block.first for block in blocks}

    def narrowest(cuts: Sequence[int]) -> int:
        return min(cuts, key=lambda cut: (width[cut], cut not in beginnings, cut))

    legal = legal_cuts(flow)
    users = sorted(
        {flow.users[State(name)][0] for name, state in flow.graph.states.items() if state.trainable}
    )
    ends = [bisect_right(legal, user) for user in users]
    gaps = [legal[left:right] for left, right in pairwise(ends)]
    cuts = sorted({narrowest(gap) for gap in gaps if gap})
    if len(cuts) >= most:
        stretch = -(-len(cuts) // (most - 1))
        kept = {narrowest(cuts[i : i + stretch]) for i in range(0, len(cuts), stretch)}
        block_cuts = beginnings.intersection(cuts)
        cuts = sorted(kept | block_cuts if len(block_cuts) <= 2 * most else kept)
    missing = at_least - 1 - len(cuts)
    if missing > 0:
        others = sorted(set(legal) - set(cuts), key=lambda cut: (width[cut], cut))
        cuts = sorted([*cuts, *others[:missing]])
    return Units((0, *cuts))


def _crossing_bytes(flow: Dataflow) -> list[int]:
    """For each node, the bytes that would cross a cut before it, at one row."""
    change = [0] * (len(flow.graph.nodes) + 2)
    for value, users in flow.users.items():
        if isinstance(value, Ref) and not flow.local[flow.position(value)]:
            size = bytes_at(flow.graph.spec(value), 1)
            change[flow.position(value) + 1] += size
            change[users[-1] + 1] -= size
    width, total = [], 0
    for step in change:
        total += step
        width.append(total)
    return width
