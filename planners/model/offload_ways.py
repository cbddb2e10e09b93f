"""List the ways of a range to offload: how many of its blocks keep their tensors on the host.

A block that offloads keeps nothing of a micro-batch on the device, and does not run again. Copies
run beside computing (`stage_costs.StageWork.copying`), so the first blocks cost nothing, and the
others cost the seconds of their bytes on the link. With c seconds of ops that run again,

    O bytes offloaded        max(0, O / host - F)  +  max(0, O / host - B - c)   seconds more

The other blocks keep tensors or run again as is best for a range without those that offload:

    8 blocks, 3 of which offload    8 = 3 away + 5 left    the sets of 5 (`recompute_sets`)

If there are at most `MOST_WAYS` such ways, every number of blocks of every class is tried: both are
then chosen together and exactly. For longer ranges `MOST_WAYS` numbers are tried, evenly spread;
of several classes, the blocks that take longest a byte to run again offload first. The result is
then near the best. Only whole blocks are offloaded, unless the user asks for others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

import numpy as np

from autopipe.planners.model.block_parts import BlockPart, Compositions, compositions, figures
from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.problem import Problem
from autopipe.planners.model.range_tables import Bytes

MOST_WAYS = 32
"""Ways of a range that are looked at, beside that in which nothing offloads."""

Parts = tuple[tuple[BlockPart, int], ...]
"""Parts of blocks, and how many blocks are such a part."""


@dataclass(frozen=True, eq=False)
class Ways:
    """The ways of every composition.

    Args:
        left: compositions of the blocks that do not offload, numbered after those of the ranges;
            they have all parts, some of them with 0 blocks.
        numbers: entry [composition, way] is the number of the composition that is left: its own
            number if nothing offloads, -1 if it has no such way.
        away: by that number, how many blocks of each part offload.
        bytes: by that number, the offloaded bytes of a micro-batch.
        moving: by that number, bytes held once, on their way: those of two blocks.
    """

    left: tuple[Parts, ...]
    numbers: Numbers
    away: tuple[tuple[int, ...], ...]
    bytes: Bytes
    moving: Bytes

    @property
    def most(self) -> int:
        """The most ways that a composition has."""
        return int(self.numbers.shape[1])


@lru_cache(maxsize=64)
def offload_ways(problem: Problem, rows: int, kind: int, free: bool) -> Ways:
    """The ways for a profile on a kind of device.

    Args:
        free: whether the planner may choose blocks; if not, only those asked for offload.
    """
    composed = compositions(problem)
    left: list[Parts] = []
    away = [(0,) * len(parts) for parts in composed.parts]
    bytes, moving = [0] * len(composed.parts), [0] * len(composed.parts)
    rowwise: list[list[int]] = []
    for number, parts in enumerate(composed.parts):
        sizes = {part: _size(problem, composed, rows, kind, part) for part in parts}
        row = []
        for offloaded in _choices(problem, composed, rows, kind, parts, free):
            counts = tuple(offloaded.get(part, 0) for part in parts)
            if not any(counts):
                row.append(number)
                continue
            row.append(len(away))
            left.append(tuple((part, n - offloaded.get(part, 0)) for part, n in parts.items()))
            away.append(counts)
            bytes.append(sum(sizes[part] * n for part, n in offloaded.items()))
            largest = sorted(
                size for part, n in offloaded.items() for size in [sizes[part]] * min(n, 2)
            )
            moving.append(sum(largest[-2:]))
        rowwise.append(row)
    numbers = np.full((len(rowwise), max(map(len, rowwise))), -1, np.int64)
    for number, row in enumerate(rowwise):
        numbers[number, : len(row)] = row
    return Ways(
        tuple(left), numbers, tuple(away), np.array(bytes, np.int64), np.array(moving, np.int64)
    )


def _choices(
    problem: Problem,
    composed: Compositions,
    rows: int,
    kind: int,
    parts: Mapping[BlockPart, int],
    free: bool,
) -> Iterator[dict[BlockPart, int]]:
    """How many blocks of each part offload, way by way."""
    requested = problem.constraints.offload
    if requested is not None or not free:
        fixed = {*(requested or ())}
        yield {part: n for part, n in parts.items() if composed.classes.firsts[part.kind] in fixed}
        return

    wholes = {*composed.classes.wholes}
    may = [p for p in parts if p in wholes and _size(problem, composed, rows, kind, p) > 0]
    if prod(parts[part] + 1 for part in may) <= MOST_WAYS + 1:
        for counts in product(*(range(parts[part] + 1) for part in may)):
            yield dict(zip(may, counts, strict=True))
        return

    def price(part: BlockPart) -> float:
        """Seconds a byte of running all of a block again."""
        size, seconds = figures(problem, rows, kind, composed.classes.firsts[part.kind], part[1:])
        return seconds / size

    by_price = [part for part in sorted(may, key=price, reverse=True) for _ in range(parts[part])]
    ways = min(len(by_price), MOST_WAYS)
    for way in range(ways + 1):
        offloaded = by_price[: way * len(by_price) // ways]
        yield {part: offloaded.count(part) for part in dict.fromkeys(offloaded)}


def _size(problem: Problem, composed: Compositions, rows: int, kind: int, part: BlockPart) -> int:
    """Bytes that a part of a block keeps and no other block reads."""
    return figures(problem, rows, kind, composed.classes.firsts[part.kind], part[1:])[0]


def spread(many: int, of: int) -> tuple[int, ...]:
    """`many` numbers below `of`, as far apart as possible, beginning with 0.

    Each copy can then hide behind the blocks up to the next one; the last block, with which
    backward begins, is chosen only if all are.
    """
    return tuple(number * of // many for number in range(many))
