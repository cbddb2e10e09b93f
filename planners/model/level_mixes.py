"""Assign levels to equal parts of blocks, and keep the assignments that no other one beats.

    parts    3 blocks of 10 bytes and 6 seconds, with a level of 4 bytes and a second
    sets     0 in 0 s; 4 in 1; 8 in 2; 12 in 3; 14 in 7; 18 in 8; 20 in 12; 24 in 13; 30 in 18

For parts of one kind `of_parts` tries every assignment of levels. Kind after kind, `together` adds
these to each set so far, and keeps the sets that none beats in both bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from math import comb
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model.range_tables import Bytes, Times

Numbers = NDArray[np.int64]

MOST_SETS = 128
"""Sets of a composition that are kept. Where blocks are so different that there are more, some in
between are left out: what is then found saves up to a 128th of all that can be saved too much."""

MOST_MIXES = 256
"""Ways to deal levels out to equal blocks that are all looked at."""


class Option(NamedTuple):
    """A level of a part: its bytes saved, its seconds, and whether all such parts must have it."""

    size: int
    seconds: float
    always: bool


class EqualParts(NamedTuple):
    """Equal parts: their number, and the levels that each may have."""

    parts: int
    options: tuple[Option, ...]


class Sets(NamedTuple):
    """All sets that no other beats: their bytes and seconds, ascending, and counts by level."""

    saved: Bytes
    spent: Times
    counts: NDArray[np.uint16]


NOTHING = Sets(np.zeros(1, np.int64), np.zeros(1), np.zeros((1, 0), np.uint16))


def together(sets: Sets, own: Sets) -> Sets:
    """The unbeaten combinations of a set of the first parts and a set of the others."""
    saved = (sets.saved[:, None] + own.saved).ravel()
    spent = (sets.spent[:, None] + own.spent).ravel()
    kept = _unbeaten(saved, spent)
    if len(kept) > MOST_SETS:
        kept = kept[np.arange(MOST_SETS) * (len(kept) - 1) // (MOST_SETS - 1)]
    before, last = np.divmod(kept, len(own.saved))
    counts = np.concatenate((sets.counts[before], own.counts[last]), axis=1)
    return Sets(saved[kept], spent[kept], counts)


@lru_cache(maxsize=1024)
def of_parts(group: EqualParts) -> Sets:
    """The unbeaten sets of one group; a beaten one is in no unbeaten set of more groups either."""
    mixes = _mixes(group)
    saved = mixes @ np.array([option.size for option in group.options], np.int64)
    spent = mixes @ np.array([option.seconds for option in group.options])
    kept = _unbeaten(saved, spent)
    return Sets(saved[kept], spent[kept], mixes[kept].astype(np.uint16))


def _unbeaten(saved: Bytes, spent: Times) -> Numbers:
    """The numbers of sets that none beats in both, by ascending bytes saved."""
    order = np.lexsort((-saved, spent))
    best = np.maximum.accumulate(saved[order])
    return np.asarray(order[np.concatenate(([True], best[1:] > best[:-1]))])


def _mixes(group: EqualParts) -> Numbers:
    """Assignments of levels to equal parts: for each one, the number of parts at each level."""
    count, options = group
    always = [number for number, option in enumerate(options) if option.always]
    if always:
        return np.array([[count * (number in always) for number in range(len(options))]], np.int64)
    useful = [number for number, option in enumerate(options) if option.size > 0]
    if comb(count + len(useful), count) <= MOST_MIXES:
        mixes = _all_mixes(count, len(useful))
    else:
        useful = _hull([options[number] for number in useful], useful)
        mixes = _neighbours(count, len(useful))
    found = np.zeros((len(mixes), len(options)), np.int64)
    found[:, useful] = mixes
    return found


@cache
def _all_mixes(count: int, levels: int) -> Numbers:
    """Every assignment of `levels` levels, or of none, to equal parts."""
    found = [mix for mix in product(range(count + 1), repeat=levels) if sum(mix) <= count]
    return np.array(found, np.int64).reshape(len(found), levels)


@cache
def _neighbours(count: int, levels: int) -> Numbers:
    """The assignments that use only two neighbouring levels, or one level and none."""
    found = [(0,) * levels]
    for level in range(levels):
        for number in range(1, count + 1):
            mix = [0] * levels
            mix[level] = number
            if level:
                mix[level - 1] = count - number
            found.append(tuple(mix))
    return np.array(found, np.int64).reshape(len(found), levels)


def _hull(options: Sequence[Option], numbers: Sequence[int]) -> list[int]:
    """The numbers of the options on the lower convex hull of seconds over bytes, from (0, 0) on."""
    found: list[tuple[int, float, int]] = [(0, 0.0, -1)]
    for (size, seconds, _), number in sorted(zip(options, numbers, strict=True)):
        while len(found) > 1 and _above(found[-2], found[-1], (size, seconds)):
            found.pop()
        if size > found[-1][0]:
            found.append((size, seconds, number))
    return [number for _, _, number in found[1:]]


def _above(
    before: tuple[int, float, int], point: tuple[int, float, int], after: tuple[int, float]
) -> bool:
    """Whether a point lies on or above the line between its neighbours."""
    rise = (point[1] - before[1]) * (after[0] - before[0])
    return rise >= (after[1] - before[1]) * (point[0] - before[0])
