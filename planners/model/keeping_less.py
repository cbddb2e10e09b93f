"""Choose, for every range of units, the cheapest way to make it fit in its place.

For each way to offload some blocks (`planners.model.offload_ways`), the cheapest set of other
blocks that have to run again to make the range fit is looked up (`planners.model.recompute_sets`).
The quickest of the ways is taken or, if nothing fits, the one nearest to fitting. A range that fits
anyway needs neither.
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
from autopipe.planners.model.stage_costs import StageSeconds, StageWork, stage_work
from autopipe.planners.model.transfers import arriving


class StageCosts(NamedTuple):
    """Costs of possible stages: their seconds, bytes, and blocks that keep less.

    `recomputed` are numbers of sets in `planners.model.recompute_sets`; a set also says what is
    offloaded.
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
        """The costs made of these arrays."""
        *seconds, peaks, recomputed = arrays
        return cls(StageSeconds(*seconds), peaks, recomputed)


class Holding(NamedTuple):
    """How recomputed blocks count in a stage's bytes.

    Args:
        once: bytes that are there once if any block is recomputed.
        times: in how many of the micro-batches in flight a recomputed block's bytes are not saved.
    """

    once: Bytes
    times: int


def largest_block(place: StagePlace, largest: Bytes) -> Holding:
    """The usual rule: a block frees its recomputed tensors after its backward, so the bytes of one
    block count.

    Args:
        largest: for each range the bytes of its largest block.
    """
    return Holding(largest, place.in_flight)


class Pricing:
    """Prices ranges in the places of a config, with the cheapest set of blocks that fits there.

    Most figures of a range are the same in all places with one link and kind of device, whatever is
    in flight there, and are computed once. In each place only the ranges that do not fit as they
    are need more.

    Args:
        ranges, numbers: the ranges, and their compositions (`planners.model.recompute_sets`).
        holding: how recomputed blocks count in bytes. (A comparison with planners that count in
            another way passes their rule.)
    """

    def __init__(
        self,
        problem: Problem,
        config: Config,
        ranges: Tables,
        numbers: Numbers,
        holding: Callable[[StagePlace, Bytes], Holding] = largest_block,
    ) -> None:
        self.problem, self.config = problem, config
        self._ranges, self._numbers, self._holding = ranges, np.asarray(numbers), holding
        self._known: dict[StagePlace, _Anywhere] = {}

    def __call__(self, place: StagePlace) -> StageCosts:
        """The costs of all ranges in a place."""
        sets, anywhere = sets_of(self.problem, self.config, place), self._anywhere(place)
        as_it_is = anywhere.costs(place)
        short = memory.excess(as_it_is.peaks, place.room) > 0
        if not anywhere.first_is_nothing:
            short = np.ones_like(short)
        if not short.any():
            return as_it_is
        lacking = anywhere.only(short)
        least = self._of_way(place, lacking, 0)
        # Another way than the first can be better only for ranges that do not fit.
        for way in range(1, sets.ways.most):
            of_way = self._of_way(place, lacking, way)
            has_way = sets.ways.numbers[lacking.numbers, way] >= 0
            least = _nearer(of_way, least, place.room, has_way)
        arrays = [np.array(each) for each in as_it_is.arrays]
        for array, entries in zip(arrays, least.arrays, strict=True):
            array[short] = entries
        return StageCosts.of(arrays)

    def _anywhere(self, place: StagePlace) -> _Anywhere:
        """The figures of the ranges in places like this one, whatever is in flight there."""
        alike = place._replace(in_flight=0, waiting=0)
        if alike not in self._known:
            problem, config = self.problem, self.config
            ranges = arriving(self._ranges, problem, config, alike)
            sets, work = sets_of(problem, config, alike), stage_work(problem, config, alike, ranges)
            # Fixed by the user, the first set of blocks may run some again, or offload some.
            offloaded = sets.ways.bytes[_staying(sets, self._numbers, 0)]
            self._known[alike] = _Anywhere(
                numbers=self._numbers,
                work=work,
                fixed=memory.estimate(ranges, problem, alike.shared(config), 0).peak,
                each=ranges.saved + ranges.received,
                waiting=ranges.waiting,
                made=ranges.made,
                seconds=work.seconds(0.0),
                none=sets.first(self._numbers),
                first_is_nothing=sets.nothing_first and not offloaded.any(),
            )
        return self._known[alike]

    def _of_way(self, place: StagePlace, ranges: _Anywhere, way: int) -> StageCosts:
        """Costs of ranges under one way to offload, with the cheapest set of the other blocks."""
        sets = sets_of(self.problem, self.config, place)
        staying = _staying(sets, ranges.numbers, way)
        offloaded = sets.ways.bytes[staying]
        held, stays = self._holding(place, sets.largest[ranges.numbers])
        held = np.maximum(held - ranges.made, 0)  # beyond what is made anyway
        peaks = ranges.held(place) - stays * offloaded + sets.ways.moving[staying]
        lacking = memory.excess(peaks, place.room)
        lacking = np.where(lacking > 0, lacking + held, 0)
        recomputed = sets.cheapest(staying, -(-lacking // max(stays, 1)))
        saves = sets.saved(recomputed)
        with_them = peaks - stays * saves + np.where(saves > 0, held, 0)
        # If nothing fits, the way that is nearest to fitting.
        recomputed = np.where(with_them < peaks, recomputed, sets.first(staying))
        seconds = ranges.work.seconds(sets.spent(recomputed), offloaded)
        return StageCosts(seconds, np.minimum(with_them, peaks), recomputed)


def costs(
    problem: Problem, config: Config, place: StagePlace, ranges: Tables, numbers: Numbers
) -> StageCosts:
    """The costs of ranges in one place, as `Pricing` has them."""
    return Pricing(problem, config, ranges, numbers)(place)


class _Anywhere(NamedTuple):
    """The figures of ranges that do not depend on the micro-batches in flight.

    Args:
        numbers: their compositions.
        work: the seconds of their stages' work.
        fixed: bytes that are held whatever is in flight, if no block keeps less.
        each: bytes that each micro-batch in flight holds.
        waiting: bytes that it holds more between the halves of its backward.
        made: as in `Tables`.
        seconds: seconds of the stages if nothing runs again or is offloaded.
        none: numbers of the sets in which nothing runs again.
        first_is_nothing: whether those are the first sets that may be chosen.
    """

    numbers: Numbers
    work: StageWork
    fixed: Bytes
    each: Bytes
    waiting: Bytes
    made: Bytes
    seconds: StageSeconds
    none: Numbers
    first_is_nothing: bool

    def held(self, place: StagePlace) -> Bytes:
        """Bytes that are held in a place where nothing keeps less."""
        held = self.fixed + place.in_flight * self.each + place.waiting * self.waiting
        return np.asarray(held)

    def costs(self, place: StagePlace) -> StageCosts:
        """The costs in a place where nothing keeps less."""
        return StageCosts(self.seconds, self.held(place), self.none)

    def only(self, wanted: NDArray[np.bool_]) -> _Anywhere:
        """The figures of some ranges, in a row."""
        return self._replace(
            numbers=self.numbers[wanted],
            work=self.work.only(wanted),
            fixed=self.fixed[wanted],
            each=self.each[wanted],
            waiting=self.waiting[wanted],
            made=self.made[wanted],
            seconds=StageSeconds(*(array[wanted] for array in self.seconds)),
            none=self.none[wanted],
        )


def _staying(sets: RecomputeSets, numbers: Numbers, way: int) -> Numbers:
    """The compositions of the blocks that do not offload, under a way."""
    compositions = sets.ways.numbers[numbers, way]
    return np.where(compositions < 0, numbers, compositions)  # a range without such a way


def _nearer(
    of_way: StageCosts, least: StageCosts, room: int, has_way: NDArray[np.bool_]
) -> StageCosts:
    """For each range the better of two costs: the one that fits or is nearer to fitting; of two
    that are equal in this, the one with fewer seconds.

    Args:
        has_way: whether a range has the first cost at all.
    """
    beyond, before = (np.maximum(memory.excess(c.peaks, room), 0) for c in (of_way, least))
    shorter = of_way.seconds.whole < least.seconds.whole
    better = has_way & ((beyond < before) | ((beyond == before) & shorter))
    pairs = zip(of_way.arrays, least.arrays, strict=True)
    return StageCosts.of([np.where(better, new, old) for new, old in pairs])


def sets_of(problem: Problem, config: Config, place: StagePlace) -> RecomputeSets:
    """The sets of blocks that may be recomputed in a place, or offload what they keep."""
    rows = config.microbatch_rows(problem.batch)
    free = not splits(problem, config.schedule)
    may = free and may_offload(problem, place)
    return recompute_sets(problem, rows, place.group.kind, free, may)


def may_offload(problem: Problem, place: StagePlace) -> bool:
    """Whether the planner may choose blocks to offload: not if the user says which offload or run
    again."""
    asked = problem.constraints
    chosen = asked.offload is None and asked.recompute is None
    return chosen and problem.offloads and place.group.host > 0
