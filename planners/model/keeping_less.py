"""What the blocks of a stage do to fit in its place: for every range of units, the cheapest.

Of each way to offload what some blocks keep (`planners.model.offload_ways`) the cheapest set of the
others that runs again and makes the range fit is looked up (`planners.model.recompute_sets`), and
the quickest of the ways is taken; where nothing fits, what is nearest to it. A range that fits as
it is needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model import memory
from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.places import StagePlace
from autopipe.planners.model.problem import Config, Problem, splits
from autopipe.planners.model.range_tables import Bytes, Tables
from autopipe.planners.model.recompute_sets import RecomputeSets, recompute_sets
from autopipe.planners.model.stage_costs import StageSeconds, stage_seconds
from autopipe.planners.model.transfers import arriving


class StageCosts(NamedTuple):
    """Of stages that might be: their seconds, bytes, and what is recomputed.

    `recomputed` are numbers of sets in `planners.model.recompute_sets`, which say what is offloaded
    too.
    """

    seconds: StageSeconds
    peaks: Bytes
    recomputed: Bytes

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """All figures, as `of` takes them."""
        return [*self.seconds, self.peaks, self.recomputed]

    @classmethod
    def of(cls, arrays: Sequence[NDArray[Any]]) -> StageCosts:
        """The costs with these figures."""
        *seconds, peaks, recomputed = arrays
        return cls(StageSeconds(*seconds), peaks, recomputed)


class Holding(NamedTuple):
    """What recomputed blocks count for in a stage's bytes.

    Args:
        once: bytes that are there once if any block is recomputed.
        times: in how many of the micro-batches in flight a recomputed block's bytes are not saved.
    """

    once: Bytes
    times: int


def largest_block(place: StagePlace, largest: Bytes) -> Holding:
    """A block lets go of what it recomputed when its backward is over: one block's bytes are there.

    Args:
        largest: of each range the bytes of its largest block.
    """
    return Holding(largest, place.in_flight)


def costs(
    problem: Problem,
    config: Config,
    place: StagePlace,
    ranges: Tables,
    numbers: Numbers,
    holding: Callable[[StagePlace, Bytes], Holding] = largest_block,
) -> StageCosts:
    """The costs of ranges in a place, with the cheapest set of recomputed blocks that fits.

    Args:
        numbers: the ranges' compositions (`planners.model.recompute_sets`).
        holding: what recomputed blocks count for in bytes. (A comparison with planners that count
            in another way passes theirs.)
    """
    sets, ranges = sets_of(problem, config, place), arriving(ranges, problem, config, place)
    best = _of_way(problem, config, place, ranges, numbers, 0, holding)
    short = memory.excess(best.without, place.room) > 0
    if sets.ways.most == 1 or not short.any():
        return best.costs
    # Only where something is missing may another way than the first be better.
    some, own = ranges.only(short), numbers[short]
    arrays = [np.array(each) for each in best.costs.arrays]
    least = StageCosts.of([each[short] for each in arrays])
    for way in range(1, sets.ways.most):
        found = _of_way(problem, config, place, some, own, way, holding).costs
        least = _nearer(found, least, place.room, sets.ways.numbers[own, way] >= 0)
    for whole, entries in zip(arrays, least.arrays, strict=True):
        whole[short] = entries
    return StageCosts.of(arrays)


def _nearer(
    found: StageCosts, least: StageCosts, room: int, there: NDArray[np.bool_]
) -> StageCosts:
    """Of two costs of each range those that fit, or are nearer to it; of equal ones the shorter.

    Args:
        there: whether a range has the first of them.
    """
    beyond, before = (np.maximum(memory.excess(c.peaks, room), 0) for c in (found, least))
    shorter = found.seconds.whole < least.seconds.whole
    better = there & ((beyond < before) | ((beyond == before) & shorter))
    pairs = zip(found.arrays, least.arrays, strict=True)
    return StageCosts.of([np.where(better, new, old) for new, old in pairs])


class _OfWay(NamedTuple):
    """Costs where so many blocks offload, and the bytes without any that keeps less."""

    costs: StageCosts
    without: Bytes


def _of_way(
    problem: Problem,
    config: Config,
    place: StagePlace,
    ranges: Tables,
    numbers: Numbers,
    way: int,
    holding: Callable[[StagePlace, Bytes], Holding],
) -> _OfWay:
    """Costs of ranges whose blocks offload in a way, with the cheapest set of the others."""
    sets = sets_of(problem, config, place)
    left = sets.ways.numbers[numbers, way]
    left = np.where(left < 0, numbers, left)  # a range without such a way
    offloaded = sets.ways.bytes[left]
    without = memory.peak(memory.estimate(ranges, problem, place.shared(config), place.in_flight))
    held, stays = holding(place, sets.largest[numbers])
    held = np.maximum(held - ranges.made, 0)  # beyond what is made anyway
    peaks = without - stays * offloaded + sets.ways.moving[left]
    missing = memory.excess(peaks, place.room)
    missing = np.where(missing > 0, missing + held, 0)
    recomputed = sets.cheapest(left, -(-missing // max(stays, 1)))
    saves = sets.saved(recomputed)
    with_them = peaks - stays * saves + np.where(saves > 0, held, 0)
    # Where nothing fits anyway, what is nearest to it.
    recomputed = np.where(with_them < peaks, recomputed, sets.first(left))
    seconds = stage_seconds(
        problem, config, place, ranges, sets.spent(recomputed), offloaded=offloaded
    )
    return _OfWay(StageCosts(seconds, np.minimum(with_them, peaks), recomputed), without)


def sets_of(problem: Problem, config: Config, place: StagePlace) -> RecomputeSets:
    """The sets of blocks that may be recomputed in a place, or offload what they keep."""
    rows = config.microbatch_rows(problem.batch)
    free = not splits(problem, config.schedule)
    may = free and may_offload(problem, place)
    return recompute_sets(problem, rows, place.group.kind, free, may)


def may_offload(problem: Problem, place: StagePlace) -> bool:
    """Whether blocks may be chosen to offload what they keep; not where the user says which do, or
    what runs again."""
    asked = problem.constraints
    chosen = asked.offload is None and asked.recompute is None
    return chosen and problem.offloads and place.group.host > 0
