"""What of a stage's blocks runs again in backward: the cheapest set that makes the stage fit.

A block b at a level l, which some or all of its ops run again at, costs the seconds c_bl of those,
and saves d_bl bytes in every micro-batch in flight; while they run again, the bytes of one block
are there once. Of a set R of blocks with their levels, n micro-batches being in flight,

    seconds  + sum of c_bl over R          bytes  - n * sum of d_bl over R  + max of d_bl, any b, l

To fit, a set has to save some D a micro-batch: the cheapest is a knapsack. Blocks of a deep model
are alike, so that a range of units is known by how many blocks of each class it has, and which
part of the first and of the last: its *composition*. Of each composition all sets are made that no
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

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from autopipe.planners.model.level_mixes import (
    NOTHING,
    EqualParts,
    Numbers,
    Option,
    Sets,
    of_parts,
    together,
)
from autopipe.planners.model.problem import WHOLE, Again, Problem, Saved
from autopipe.planners.model.range_tables import Bytes, Times, dropped


class BlockPart(NamedTuple):
    """Units [first, last) of a block, counted from its own first unit."""

    kind: int
    first: int
    last: int


@dataclass(frozen=True)
class BlockClasses:
    """Which blocks cost alike.

    Args:
        kinds: of each block the number of its class: those of one class cost alike in every part.
        firsts: of each class the number of its first block.
        wholes: of each class what a whole block is: a part of the first class whose blocks cost as
            much, wherever units divide them.
    """

    kinds: tuple[int, ...]
    firsts: tuple[int, ...]
    wholes: tuple[BlockPart, ...]

    def part(self, problem: Problem, block: int, first: int, last: int) -> BlockPart:
        """The part of a block in the units [first, last)."""
        start, stop = problem.recomputable[block]
        kind = self.kinds[block]
        if first <= start and stop <= last:
            return self.wholes[kind]
        return BlockPart(kind, max(first - start, 0), min(last, stop) - start)


@dataclass(frozen=True, eq=False)
class Compositions:
    """What every range of units is made of.

    Args:
        number: entry [i, j] is the number of the composition of the range [i, j).
        parts: of each composition its parts and how many blocks are such a part.
    """

    classes: BlockClasses
    number: Numbers
    parts: tuple[dict[BlockPart, int], ...]


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
    """

    largest: Bytes
    starts: Numbers
    bytes: Bytes
    seconds: Times
    of_each: tuple[Sets, ...]

    def counts(self, number: int) -> tuple[int, ...]:
        """Of a set, how many blocks of each of its composition's parts are at each of the part's
        levels (`part_levels`)."""
        composition = int(np.searchsorted(self.starts, number, side="right")) - 1
        row = self.of_each[composition].counts[number - self.starts[composition]]
        return tuple(map(int, row))

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
def recompute_sets(problem: Problem, rows: int, kind: int, free: bool) -> RecomputeSets:
    """The sets for the profile of so many rows on a kind of device.

    Args:
        free: whether blocks may be chosen; if not, none is recomputed but those the user has fixed.
    """
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

    for parts in made.parts:
        found = sets(tuple(parts.items()))
        of_each.append(found)
        largest.append(max(map(largest_of, parts), default=0))
        starts.append(starts[-1] + len(found.saved))
    return RecomputeSets(
        np.array(largest, np.int64),
        np.array(starts, np.int64),
        np.concatenate([found.saved for found in of_each]),
        np.concatenate([found.spent for found in of_each]),
        tuple(of_each),
    )


def part_levels(problem: Problem, part: BlockPart) -> tuple[int, ...]:
    """The levels that something of a part of a block may run again at, the last of them `WHOLE`."""
    block = compositions(problem).classes.firsts[part.kind]
    start, stop = problem.recomputable[block]
    levels = problem.profiles[0].levels
    asked = problem.constraints.recompute is not None
    whole = asked or part[1:] == (0, stop - start)
    return (*range(len(levels[block]) if levels and whole else 0), WHOLE)


def blocks_of(problem: Problem, first: int, last: int, counts: Sequence[int]) -> tuple[Again, ...]:
    """The blocks of a set in the units [first, last): of equal parts those that save most first."""
    made, columns = compositions(problem), iter(counts)
    left = {
        part: [level for level in part_levels(problem, part) for _ in range(next(columns))]
        for part in made.parts[made.number[first, last]]
    }
    chosen = []
    for block, (start, stop) in enumerate(problem.recomputable):
        if start < last and stop > first:
            part = made.classes.part(problem, block, first, last)
            if left[part]:
                chosen.append(Again(block, left[part].pop()))
    return tuple(chosen)


@lru_cache(maxsize=4096)
def figures(
    problem: Problem,
    rows: int,
    kind: int,
    block: int,
    part: tuple[int, int],
    level: int = WHOLE,
) -> tuple[int, float]:
    """Bytes that a part of a block saves if it runs again at a level, and seconds that it takes."""
    profile = problem.profile(rows)
    if level != WHOLE:
        found = profile.levels[block][level]
        own = found.seconds[kind][slice(*part)]
        return found.dropped if len(own) == len(found.seconds[kind]) else 0, sum(own)
    first, last = part
    seconds = sum(profile.recompute[block][kind][first:last])
    return int(_matrices(problem, rows)[block][first, last]), seconds


@lru_cache(maxsize=64)
def _matrices(problem: Problem, rows: int) -> tuple[Bytes, ...]:
    """Of each block the bytes that each of its parts saves: entry [first, last]."""
    items: list[list[Saved]] = [[] for _ in problem.recomputable]
    for saved in problem.profile(rows).saved:
        if saved.block is not None:
            start = problem.recomputable[saved.block][0]
            producer = None if saved.producer is None else saved.producer - start
            savers = tuple(saver - start for saver in saved.savers)
            items[saved.block].append(replace(saved, producer=producer, savers=savers))
    return tuple(
        dropped(stop - start, own)
        for (start, stop), own in zip(problem.recomputable, items, strict=True)
    )


@lru_cache(maxsize=16)
def compositions(problem: Problem) -> Compositions:
    """What the problem's ranges are made of; the last few are remembered."""
    classes = _classes(problem)
    n, blocks = problem.units, np.array(problem.recomputable, np.int64).reshape(-1, 2)
    units = np.arange(n + 1)
    head = np.searchsorted(blocks[:, 1], units, side="right")  # the first block that ends after i
    tail = np.searchsorted(blocks[:, 0], units, side="left") - 1  # the last that begins before j
    number = np.zeros((n + 1, n + 1), np.int64)
    known: dict[tuple[tuple[BlockPart, int], ...], int] = {(): 0}

    def part(block: int, first: int, last: int) -> BlockPart | None:
        return classes.part(problem, block, first, last) if 0 <= block < len(blocks) else None

    ahead = [part(int(head[i]), i, n) for i in range(n + 1)]
    behind = [part(int(tail[j]), 0, j) for j in range(n + 1)]
    whole = frozenset(classes.wholes)
    passed = [Counter[BlockPart]()]
    for kind in classes.kinds:
        passed.append(passed[-1] + Counter([classes.wholes[kind]]))
    between: dict[tuple[int, int], dict[BlockPart, int]] = {}
    for i in range(n):
        for j in range(i + 1, n + 1):
            if head[i] > tail[j]:
                continue
            if head[i] == tail[j]:
                parts = {classes.part(problem, int(head[i]), i, j): 1}
            else:
                inner = (int(head[i]) + 1, int(tail[j]))
                if inner not in between:
                    between[inner] = dict(passed[inner[1]] - passed[inner[0]])
                parts = dict(between[inner])
                for end in (ahead[i], behind[j]):
                    if end is not None:
                        parts[end] = parts.get(end, 0) + 1
            # Whole blocks first: they are what ranges share, and so are their sets.
            key = tuple(sorted(parts.items(), key=lambda item: (item[0] not in whole, item[0])))
            number[i, j] = known.setdefault(key, len(known))
    return Compositions(classes, number, tuple(map(dict, known)))


def _classes(problem: Problem) -> BlockClasses:
    fixed = dict(problem.constraints.recompute or ())
    known: dict[object, int] = {}
    known_wholes: dict[object, BlockPart] = {}
    kinds, firsts, wholes = [], [], []
    for block, (start, stop) in enumerate(problem.recomputable):
        sizes = [_matrices(problem, profile.rows)[block] for profile in problem.profiles]
        spent = [profile.recompute[block] for profile in problem.profiles]
        saves = [int(size[0, -1]) for size in sizes]
        for profile in problem.profiles:
            for level in profile.levels[block] if profile.levels else ():
                saves.append(level.dropped)
                spent.append(level.seconds)
        asked = fixed.get(block), *saves
        alike = (
            *asked,
            *(size.tobytes() for size in sizes),
            *(_rounded(kind) for kinds in spent for kind in kinds),
        )
        as_whole = *asked, _rounded(sum(kind) for kinds in spent for kind in kinds)
        if alike not in known:
            known[alike] = len(known)
            firsts.append(block)
            wholes.append(
                known_wholes.setdefault(as_whole, BlockPart(known[alike], 0, stop - start))
            )
        kinds.append(known[alike])
    return BlockClasses(tuple(kinds), tuple(firsts), tuple(wholes))


def _rounded(seconds: Iterable[float]) -> tuple[str, ...]:
    """Sums of equal terms in another order, which differ in their last bits, are the same here."""
    return tuple(f"{each:.9e}" for each in seconds)
