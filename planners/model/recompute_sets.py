"""Find the cheapest set of blocks that run again in backward and make a stage fit.

A block b at a level l, at which some or all of its ops run again, costs the seconds c_bl of these
ops and saves d_bl bytes in every micro-batch in flight; while it runs again, the bytes of one block
are held once. A set R of blocks with their levels, with n micro-batches in flight, adds

    seconds  + sum of c_bl over R          bytes  - n * sum of d_bl over R  + max of d_bl, any b, l

To fit, a set has to save some D bytes a micro-batch: finding the cheapest is a knapsack. Blocks of
a deep model are alike, so many ranges of units have one composition (`planners.model.block_parts`).
For each composition all sets are made that no other set beats in both seconds and bytes (Pareto),
one class after the other; a range looks up the first one that saves enough. For L blocks of one
class that run again whole or not there are L + 1 such sets. With more levels there are many: if
there are more than `MOST_MIXES` assignments of levels to L equal blocks
(`planners.model.level_mixes`), only those with two neighbouring levels of the lower convex hull of
(d, c) are made. Each of these is the cheapest for what it saves, so the result costs at most one
block's step between two levels too much.

The bytes held once are those of the range's largest block, not of the set's: the same whatever the
set, and no difference if blocks are equal.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from autopipe.planners.model.offload_ways import Parts, Ways, offload_ways, spread
from autopipe.planners.model.problem import Again, Problem
from autopipe.planners.model.range_tables import Bytes, Times

PLACES = 2**16
"""Numbers that each composition has for its sets; most of them are of none."""

LAST = PLACES - 1
"""The place of the last set of a composition, however many there are."""


class RecomputeSets:
    """The sets of every composition, for one profile and one kind of device.

    A set's number is its position among the sets of its composition, plus `PLACES` times the number
    of the composition. By ascending number sets save more and cost more; the first one saves
    nothing, unless the user has fixed what runs again.

    The sets of a composition are made when one of its ranges first asks for a set that is neither
    the first nor the last (`_MadeSets`): for most compositions that never happens.

    Args:
        largest: bytes of the largest part of each composition.
        ways: the ways to offload; they number the compositions of the blocks that are left.
        most_saved, most_spent: bytes saved and seconds of the last set of each composition.
        nothing_first: whether the first set of each composition saves nothing and costs nothing.
        make: makes the sets of a composition.
    """

    def __init__(
        self,
        largest: Bytes,
        ways: Ways,
        most_saved: Bytes,
        most_spent: Times,
        nothing_first: bool,
        make: Callable[[int], Sets],
    ) -> None:
        self.largest, self.ways = largest, ways
        self._most_saved, self._most_spent = most_saved, most_spent
        self.nothing_first = nothing_first
        self._made = _MadeSets(make, len(largest), int(most_saved.max()) + 1)

    def numbers(self, composition: int) -> range:
        """The numbers of the sets of a composition."""
        first = composition * PLACES
        return range(first, first + len(self._made.of(composition).saved))

    def first(self, compositions: Numbers) -> Numbers:
        """The numbers of the first sets of compositions."""
        return np.asarray(compositions * PLACES)

    def saved(self, numbers: Numbers) -> Bytes:
        """Bytes of a micro-batch that sets save."""
        return self._figures(numbers, self._made.saved, self._most_saved)

    def spent(self, numbers: Numbers) -> Times:
        """Seconds of a micro-batch that sets cost."""
        return self._figures(numbers, self._made.spent, self._most_spent)

    def counts(self, number: int) -> tuple[int, ...]:
        """A set as numbers of blocks: for each part of its composition, how many of the part's
        blocks are at each of the part's levels (`part_levels`)."""
        composition, place = divmod(number, PLACES)
        counts = self._made.of(composition).counts
        return tuple(map(int, counts[-1 if place == LAST else place]))

    def cheapest(self, compositions: Numbers, needed: Bytes) -> Numbers:
        """The number of the first set of each composition that saves at least `needed` bytes.

        If none does, it is the last set, which saves most.
        """
        kinds, needs = np.asarray(compositions), np.asarray(needed)
        beyond = needs > self._most_saved[kinds]
        found = np.array(self.first(kinds) + np.where(beyond, LAST, 0))
        asked = ~beyond & (needs > 0) if self.nothing_first else ~beyond
        if asked.any():  # mostly few do: only those are searched for
            found[asked] += self._made.first_saving(kinds[asked], np.maximum(needs[asked], 0))
        return found

    def _figures(self, numbers: Numbers, made: NDArray[Any], most: NDArray[Any]) -> NDArray[Any]:
        kinds, places = np.divmod(numbers, PLACES)
        last = places == LAST
        begins = self._made.begins[kinds]
        return np.where(last, most[kinds], made[begins + np.where(last, 0, places)])


class _MadeSets:
    """The sets of the compositions that were asked for, side by side: one search serves many.

        composition    none   7                2
        turn            0     1                2           in which the composition was made
        saved           0     0    3    8      0    2    5
        keys            0     10   13   18     20   22   25      10 * turn + saved
                        |     |                |
        begins          of    of 7             of 2
                        all others

    Here `reach` is 10. The set of composition 2 that saves at least 4 is where 24 belongs in the
    keys: 2 after where 2 begins, so its third one.

    Args:
        make: makes the sets of a composition.
        compositions: how many there are.
        reach: more than any set saves.
    """

    def __init__(self, make: Callable[[int], Sets], compositions: int, reach: int) -> None:
        self._make, self._reach = make, reach
        self._of_each: dict[int, Sets] = {}
        self.begins, self._turns = np.zeros((2, compositions), np.int64)
        self.saved, self.spent, self._keys = (np.zeros(1, t) for t in (np.int64, float, np.int64))

    def of(self, composition: int) -> Sets:
        """The sets of a composition."""
        self._have(np.array([composition]))
        return self._of_each[composition]

    def first_saving(self, compositions: Numbers, needed: Bytes) -> Numbers:
        """The place of the first set of each composition that saves so much; one does."""
        self._have(compositions)
        found = np.searchsorted(self._keys, self._turns[compositions] * self._reach + needed)
        return np.asarray(found - self.begins[compositions])

    def _have(self, compositions: Numbers) -> None:
        """Make the sets of compositions that have none yet."""
        new = np.unique(compositions[self.begins[compositions] == 0]).tolist()
        if not new:
            return
        saved, spent, keys = [self.saved], [self.spent], [self._keys]
        end = len(self.saved)
        for composition in new:
            sets = self._of_each[composition] = self._make(composition)
            turn = len(self._of_each)
            self.begins[composition], self._turns[composition] = end, turn
            end += len(sets.saved)
            saved.append(sets.saved)
            spent.append(sets.spent)
            keys.append(turn * self._reach + sets.saved)
        self.saved, self.spent, self._keys = map(np.concatenate, (saved, spent, keys))


@lru_cache(maxsize=32)
def recompute_sets(
    problem: Problem, rows: int, kind: int, free: bool, offloading: bool = False
) -> RecomputeSets:
    """The sets for a profile on a kind of device.

    Args:
        free: whether the planner may choose blocks to run again; if not, only those that the user
            has fixed do.
        offloading: whether the planner may choose blocks to offload; if not, only those that the
            user has fixed do.
    """
    ways = offload_ways(problem, rows, kind, offloading)
    composed, fixed = compositions(problem), problem.constraints.recompute
    every = (*(tuple(parts.items()) for parts in composed.parts), *ways.left)

    @cache
    def sets(parts: Parts) -> Sets:
        """The sets of some parts, by recursion: without its last part a range is a shorter range,
        whose sets are known."""
        return together(sets(parts[:-1]), of_equal(*parts[-1])) if parts else NOTHING

    @cache
    def most(parts: Parts) -> tuple[int, float]:
        """Bytes and seconds of the last of `sets`, which has the last set of every part."""
        if not parts:
            return 0, 0.0
        (saved, spent), last = most(parts[:-1]), of_equal(*parts[-1])
        return saved + int(last.saved[-1]), spent + float(last.spent[-1])

    @cache
    def of_equal(part: BlockPart, count: int) -> Sets:
        return of_parts(EqualParts(count, options(part)))

    @cache
    def options(part: BlockPart) -> tuple[Option, ...]:
        """Bytes and seconds of each of a part's levels; one that is not allowed saves nothing."""
        block = composed.classes.firsts[part.kind]
        choices = []
        for level in part_levels(problem, part):
            size, seconds = figures(problem, rows, kind, block, part[1:], level)
            always = fixed is not None and Again(block, level) in fixed
            may = always if fixed is not None else free
            choices.append(Option(size if may else 0, seconds, always))
        return tuple(choices)

    @cache
    def largest(part: BlockPart) -> int:
        return max(option.size for option in options(part))

    present = {part for parts in every for part, _ in parts}
    any_useful = any(o.always or o.size > 0 >= o.seconds for part in present for o in options(part))
    ends = list(map(most, every))
    return RecomputeSets(
        np.array([max((largest(p) for p, _ in parts), default=0) for parts in every], np.int64),
        ways,
        np.array([saved for saved, _ in ends], np.int64),
        np.array([spent for _, spent in ends]),
        not any_useful,
        lambda composition: sets(every[composition]),
    )


class KeptLess(NamedTuple):
    """The blocks of a range that keep less: those that run again, whole or in part, and those that
    offload."""

    again: tuple[Again, ...]
    offload: tuple[int, ...]


def chosen(problem: Problem, first: int, last: int, sets: RecomputeSets, number: int) -> KeptLess:
    """The blocks of a set in the units [first, last).

    Among equal parts, those that offload are spread out; of the others the first ones save most.
    """
    composed = compositions(problem)
    parts = composed.parts[composed.number[first, last]]
    members: dict[BlockPart, list[int]] = {part: [] for part in parts}
    for block, (start, stop) in enumerate(problem.recomputable):
        if start < last and stop > first:
            members[composed.classes.part(problem, block, first, last)].append(block)
    columns, away = iter(sets.counts(number)), sets.ways.away[number // PLACES]
    again, offload = list[Again](), list[int]()
    for (part, blocks), n in zip(members.items(), away, strict=True):
        offloading = [blocks[place] for place in spread(n, len(blocks))]
        staying = [block for block in blocks if block not in offloading]
        levels = [level for level in part_levels(problem, part) for _ in range(next(columns))]
        again += map(Again, staying, reversed(levels))
        offload += offloading
    return KeptLess(tuple(sorted(again)), tuple(sorted(offload)))
