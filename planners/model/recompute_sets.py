"""What of a stage's blocks runs again in backward: the cheapest set that makes the stage fit.

A block b at a level l, which some or all of its ops run again at, costs the seconds c_bl of those,
and saves d_bl bytes in every micro-batch in flight; while they run again, the bytes of one block
are there once. Of a set R of blocks with their levels, n micro-batches being in flight,

    seconds  + sum of c_bl over R          bytes  - n * sum of d_bl over R  + max of d_bl, any b, l

To fit, a set has to save some D a micro-batch: the cheapest is a knapsack. Blocks of a deep model
are alike, so that many ranges of units have one composition (`planners.model.block_parts`). Of each
composition all sets are made that no
other one beats in both seconds and bytes (Pareto), one class after the other; a range looks up the
first that saves enough. For L blocks of one class that run again whole or not there are L + 1 such
sets. With more levels there are many: of more than `MOST_MIXES` ways to deal levels out to L equal
blocks (`planners.model.level_mixes`) those are taken in which two levels stand that are neighbours
on the lower convex hull of (d, c). Each of these is the cheapest for what it saves, so that what is
found costs less than one block's step between two levels more than it must.

In place of the largest block of the set the largest of the range is taken: so it is the same
block whatever the set, and of equal blocks that is no difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from autopipe.planners.model.block_parts import (
    BlockPart,
    compositions,
    figures,
    part_levels,
)
from autopipe.planners.model.level_mixes import (
    NOTHING,
    EqualParts,
    Numbers,
    Option,
    Sets,
    of_parts,
    together,
)
from autopipe.planners.model.offload_ways import Ways, offload_ways, spread
from autopipe.planners.model.problem import Again, Problem
from autopipe.planners.model.range_tables import Bytes, Times


@dataclass(frozen=True, eq=False)
class RecomputeSets:
    """The sets of every composition, for one profile and one kind of device.

    Args:
        largest: bytes of the largest part of each composition.
        starts: where the sets of each composition begin in `bytes` and `seconds`, and the end of
            the last.
        bytes, seconds: what the sets save a micro-batch and what they cost, both ascending within a
            composition; the first saves nothing, unless the user has fixed what is recomputed.
        of_each: the sets of each composition.
        ways: how many blocks offload; compositions of what is left then are numbered on by them.
    """

    largest: Bytes
    starts: Numbers
    bytes: Bytes
    seconds: Times
    of_each: tuple[Sets, ...]
    ways: Ways

    def counts(self, number: int) -> tuple[int, ...]:
        """Of a set, how many blocks of each of its composition's parts are at each of the part's
        levels (`part_levels`)."""
        composition = self.composition(number)
        row = self.of_each[composition].counts[number - self.starts[composition]]
        return tuple(map(int, row))

    def composition(self, number: int) -> int:
        """The composition of a set."""
        return int(np.searchsorted(self.starts, number, side="right")) - 1

    def cheapest(self, compositions: Numbers, needed: Bytes) -> Numbers:
        """The number of the first set of each composition that saves at least so many bytes.

        Where none does it is the last, which saves most.
        """
        found = np.array(self.starts[compositions])
        short = np.asarray(needed > self.bytes[found])
        if short.any():  # mostly few are: only those are searched for
            kinds, needs = np.asarray(compositions)[short], np.asarray(needed)[short]
            keys = kinds * self._reach + np.minimum(needs, self._reach - 1)
            first = np.searchsorted(self._keys, keys)
            found[short] = np.minimum(first, self.starts[kinds + 1] - 1)
        return found

    @cached_property
    def _reach(self) -> int:
        """More than any set saves."""
        return int(self.bytes.max(initial=0)) + 2

    @cached_property
    def _keys(self) -> Numbers:
        """The sets' bytes, ascending over all compositions."""
        owner = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        return np.asarray(owner * self._reach + self.bytes)


@lru_cache(maxsize=32)
def recompute_sets(
    problem: Problem, rows: int, kind: int, free: bool, offloading: bool = False
) -> RecomputeSets:
    """The sets for the profile of so many rows on a kind of device.

    Args:
        free: whether blocks may be chosen; if not, none is recomputed but those the user has fixed.
        offloading: whether blocks may be chosen to offload what they keep; if not, none does but
            those the user has fixed.
    """
    ways = offload_ways(problem, rows, kind, offloading)
    made, fixed = compositions(problem), problem.constraints.recompute
    largest, starts = [], [0]
    of_each: list[Sets] = []

    @cache
    def sets(parts: tuple[tuple[BlockPart, int], ...]) -> Sets:
        """Of a range those of all its blocks but the last are those of a shorter range."""
        return together(sets(parts[:-1]), of_equal(*parts[-1])) if parts else NOTHING

    @cache
    def of_equal(part: BlockPart, count: int) -> Sets:
        return of_parts(EqualParts(count, options(part)))

    @cache
    def largest_of(part: BlockPart) -> int:
        return max(one.size for one in options(part))

    @cache
    def options(part: BlockPart) -> tuple[Option, ...]:
        """What each of a part's levels saves and costs; one that must not be saves nothing."""
        block = made.classes.firsts[part.kind]
        found = []
        for level in part_levels(problem, part):
            size, seconds = figures(problem, rows, kind, block, part[1:], level)
            always = fixed is not None and Again(block, level) in fixed
            may = always if fixed is not None else free
            found.append(Option(size if may else 0, seconds, always))
        return tuple(found)

    for parts in (*(tuple(parts.items()) for parts in made.parts), *ways.left):
        found = sets(parts)
        of_each.append(found)
        largest.append(max((largest_of(part) for part, _ in parts), default=0))
        starts.append(starts[-1] + len(found.saved))
    return RecomputeSets(
        np.array(largest, np.int64),
        np.array(starts, np.int64),
        np.concatenate([found.saved for found in of_each]),
        np.concatenate([found.spent for found in of_each]),
        tuple(of_each),
        ways,
    )


class KeptLess(NamedTuple):
    """Blocks of a range that keep less: those of which something runs again, and those that
    offload what they keep."""

    again: tuple[Again, ...]
    offload: tuple[int, ...]


def chosen(problem: Problem, first: int, last: int, sets: RecomputeSets, number: int) -> KeptLess:
    """The blocks of a set in the units [first, last).

    Of equal parts those that offload are spread, and of the others those that save most first.
    """
    made = compositions(problem)
    there: dict[BlockPart, list[int]] = {p: [] for p in made.parts[made.number[first, last]]}
    for block, (start, stop) in enumerate(problem.recomputable):
        if start < last and stop > first:
            there[made.classes.part(problem, block, first, last)].append(block)
    columns, away = iter(sets.counts(number)), sets.ways.away[sets.composition(number)]
    again, offload = list[Again](), list[int]()
    for (part, blocks), gone in zip(there.items(), away, strict=True):
        going = [blocks[place] for place in spread(gone, len(blocks))]
        staying = [block for block in blocks if block not in going]
        levels = [level for level in part_levels(problem, part) for _ in range(next(columns))]
        again += map(Again, staying, reversed(levels))
        offload += going
    return KeptLess(tuple(sorted(again)), tuple(sorted(offload)))
