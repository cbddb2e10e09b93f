"""Sums of nodes' seconds by unit, and blocks as ranges of units.

node        0    1    2    3    4    5        units start at nodes 0, 2 and 5
seconds     1    1    2    2    2    1
by unit     -- 2 --   ----- 6 -----  1
a block          1    2    2                  nodes 1 to 3: 1 second in unit 0, 4 in unit 1
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.ir.blocks import Block
from autopipe.ir.cut_points import Units
from autopipe.planners.model.problem import Seconds


def by_unit(seconds: NDArray[np.float64], starts: NDArray[np.int64]) -> Seconds:
    """The seconds of each unit, from those of nodes and the units' first nodes."""
    return tuple(np.add.reduceat(seconds, starts).tolist())


def of_block(seconds: NDArray[np.float64], block: Block, units: Units) -> Seconds:
    """The seconds of a block's own nodes in each of the units it is in."""
    first, last = units.of(block.first), units.of(block.stop - 1)
    inside = [start - block.first for start in units.starts[first + 1 : last + 1]]
    own = seconds[block.first : block.stop]
    return tuple(np.add.reduceat(own, np.array([0, *inside])).tolist())


def block_units(units: Units, blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Blocks as ranges of units; one that no cut can separate from the last is left out."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        first, stop = units.of(block.first), units.of(block.stop - 1) + 1
        if units.starts[first] == block.first and (not ranges or ranges[-1][1] <= first):
            ranges.append((first, stop))
    return ranges
