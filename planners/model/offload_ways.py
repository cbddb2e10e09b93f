"""How many blocks of a range offload what they keep: the ways that a planner looks at.

A block that offloads keeps nothing of a micro-batch on the device, and nothing of it runs again.
The copies go beside what the stage computes (`stage_costs.StageWork.copying`), so that the first
blocks cost nothing and the others the seconds of their bytes on the link. With c seconds of what
runs again,

    O bytes offloaded        max(0, O / host - F)  +  max(0, O / host - B - c)   seconds more

What the others keep or run again is the best of a range without the blocks that offload:

    8 blocks, 3 of which offload    8 = 3 away + 5 left    the sets of 5 (`recompute_sets`)

Where there are at most `MOST_WAYS` such ways, every number of blocks of every class is tried, so
that both are chosen together and exactly. Of longer ranges so many numbers are, evenly spread, and
of several classes those blocks go first that take longest a byte to run again: what is found then
is near the best. Only blocks that a range has whole are offloaded, unless they are asked for.
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
        left: compositions of what does not offload, numbered on from those of the ranges; all parts
            stand in them, some with no block.
        numbers: entry [composition, way] is the number of what is left: its own number where
            nothing offloads, -1 where it has no such way.
        away: by the number of what is left, how many blocks of each part offload.
        bytes: by that number, those of a micro-batch that are offloaded.
        moving: by that number, bytes that are there once, on their way: of two blocks.
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
    """The ways for the profile of so many rows on a kind of device.

    Args:
        free: whether blocks may be chosen; if not, none offloads but those that are asked for.
    """
    made = compositions(problem)
    left: list[Parts] = []
    away = [(0,) * len(parts) for parts in made.parts]
    bytes, moving = [0] * len(made.parts), [0] * len(made.parts)
    rowwise: list[list[int]] = []
    for number, parts in enumerate(made.parts):
        sizes = {part: _size(problem, made, rows, kind, part) for part in parts}
        mine = []
        for gone in _gone(problem, made, rows, kind, parts, free):
            counts = tuple(gone.get(part, 0) for part in parts)
            if not any(counts):
                mine.append(number)
                continue
            mine.append(len(away))
            left.append(tuple((part, n - gone.get(part, 0)) for part, n in parts.items()))
            away.append(counts)
            bytes.append(sum(sizes[part] * n for part, n in gone.items()))
            largest = sorted(size for part, n in gone.items() for size in [sizes[part]] * min(n, 2))
            moving.append(sum(largest[-2:]))
        rowwise.append(mine)
    numbers = np.full((len(rowwise), max(map(len, rowwise))), -1, np.int64)
    for number, mine in enumerate(rowwise):
        numbers[number, : len(mine)] = mine
    return Ways(
        tuple(left), numbers, tuple(away), np.array(bytes, np.int64), np.array(moving, np.int64)
    )


def _gone(
    problem: Problem,
    made: Compositions,
    rows: int,
    kind: int,
    parts: Mapping[BlockPart, int],
    free: bool,
) -> Iterator[dict[BlockPart, int]]:
    """How many blocks of each part offload, way by way."""
    asked = problem.constraints.offload
    if asked is not None or not free:
        fixed = {*(asked or ())}
        yield {part: n for part, n in parts.items() if made.classes.firsts[part.kind] in fixed}
        return

    whole = {*made.classes.wholes}
    may = [p for p in parts if p in whole and _size(problem, made, rows, kind, p) > 0]
    if prod(parts[part] + 1 for part in may) <= MOST_WAYS + 1:
        for counts in product(*(range(parts[part] + 1) for part in may)):
            yield dict(zip(may, counts, strict=True))
        return

    def price(part: BlockPart) -> float:
        """Seconds a byte of running all of a block again."""
        size, seconds = figures(problem, rows, kind, made.classes.firsts[part.kind], part[1:])
        return seconds / size

    row = [part for part in sorted(may, key=price, reverse=True) for _ in range(parts[part])]
    ways = min(len(row), MOST_WAYS)
    for way in range(ways + 1):
        going = row[: way * len(row) // ways]
        yield {part: going.count(part) for part in dict.fromkeys(going)}


def _size(problem: Problem, made: Compositions, rows: int, kind: int, part: BlockPart) -> int:
    """Bytes that a part of a block keeps for itself alone."""
    return figures(problem, rows, kind, made.classes.firsts[part.kind], part[1:])[0]


def spread(many: int, of: int) -> tuple[int, ...]:
    """So many numbers out of `of`, as far apart as they can be, 0 first.

    So each copy has the blocks up to the next one to hide behind, and the last block, which
    backward begins with, is among them only if all are.
    """
    return tuple(number * of // many for number in range(many))
