"""Scores every config, order of devices, set of cuts and of blocks that keep less.

The oracle for the other planners: slow, but simple enough to be surely right. A model of n units
has binom(n - 1, pp - 1) sets of cuts; each stage has 2^k sets of its k blocks, and more if blocks
may run again by op or offload. A stage's set does not depend on other stages, so the best set is
found for each range and place. Cuts are scored many at a time, as rows of stages. Several stages on
a rank get equal shares of the device, as in `dynamic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, combinations, islice, product

import numpy as np
from numpy.typing import NDArray

from autopipe.errors import AutopipeError
from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import figures
from autopipe.planners.model.estimate import PipelineDegrees, Scored, estimate
from autopipe.planners.model.keeping_less import may_offload
from autopipe.planners.model.places import StagePlace, places, profile_of, stages_of
from autopipe.planners.model.problem import WHOLE, Again, Config, Decision, Problem, splits
from autopipe.planners.model.range_tables import Bytes, Times, tables
from autopipe.planners.model.recompute_sets import KeptLess
from autopipe.planners.model.stage_costs import StageSeconds, stage_work
from autopipe.planners.model.step_formula import floor_seconds, step_seconds, weights
from autopipe.planners.model.transfers import arriving
from autopipe.planners.search.best import Answer, Known, best_answer
from autopipe.planners.search.configs import configs
from autopipe.planners.search.descent import TOLERANCE
from autopipe.planners.search.device_orders import classes, orders

MOST, MOST_SETS = 5_000_000, 4096
"""Decisions, and sets of blocks: what some seconds are enough for."""

ROWS = 1 << 16
"""Sets of cuts scored at a time."""

AWAY = -2
"""In the place of a level: the block offloads what it keeps."""

Blocks = tuple[Again, ...]
"""Blocks at their levels, or `AWAY`."""


def exhaustive(
    problem: Problem,
    incumbents: Sequence[float] = (),
    mesh: PipelineDegrees | None = None,
    known: Known | None = None,
) -> Answer:
    """Plan by scoring every decision.

    Raises:
        InfeasibleError: no decision fits.
        AutopipeError: there are more than `MOST` decisions, sets of blocks aside.
    """
    decisions = sum(
        math.comb(problem.units - 1, stages_of(problem, config) - 1)
        * len(classes(problem, config)) ** config.pp
        for config in configs(problem)
        if mesh in (None, config[:2])
    )
    sets = math.prod(1 + len(levels) for levels in _levels(problem, away=problem.offloads))
    if decisions > MOST or sets > MOST_SETS:
        raise AutopipeError(
            f"the planner `exhaustive` would score {decisions:,} decisions, of {sets:,} sets of "
            f"blocks, for {problem.units} units on {problem.machine.devices} devices, and stops at "
            f"{MOST:,} of {MOST_SETS:,}",
            hint="the planner `dynamic` finds the same optimum; or fix pp, dp and micro_batches",
        )
    return best_answer(
        problem, _choose, incumbents=incumbents, mesh=mesh, known=known, thorough=True
    )


def every_turns(problem: Problem, config: Config) -> Decision | None:
    """`in_turns.optimum` by scoring every division of the ranks among stages."""
    best: Scored | None = None
    for turns in _divisions(config.pp, config.micro_batches):
        uneven = any(config.micro_batches % of for of in turns)
        if uneven or not 1 < len(turns) <= problem.units:
            continue
        decision = _choose(problem, config._replace(turns=turns))
        found = Scored(decision, estimate(problem, decision))
        if found.estimate.fits and (
            best is None
            or found.estimate.step_seconds < best.estimate.step_seconds * (1 - TOLERANCE)
        ):
            best = found
    return None if best is None else best.decision


def _divisions(ranks: int, most: int) -> Iterator[tuple[int, ...]]:
    """All ways to divide consecutive ranks among stages, with a largest number for each stage."""
    if not ranks:
        yield ()
    for first in range(1, min(ranks, most) + 1):
        for rest in _divisions(ranks - first, most):
            yield (first, *rest)


_Cost = tuple[float, float]
"""Bytes too many, then seconds if that is none: of two decisions the one of less is better."""


def _choose(problem: Problem, config: Config) -> Decision:
    """The fastest decision that fits, else the one with the least bytes beyond its limit; the
    earliest among equals.
    """
    costing = cache(lambda place: _StageRanges(problem, config, place))
    best: tuple[_Cost, Decision] | None = None
    for order in orders(problem, config):
        stages = [costing(place) for place in places(problem, config, order)]
        for bounds in _all_bounds(problem.units, len(stages)):
            cost, row = _least(problem, config, stages, bounds)
            if best is None or (cost[0], cost[1] * (1 + TOLERANCE)) < best[0]:
                found = [int(bound) for bound in bounds[row]]
                kept = [
                    stage.kept_less(first, last)
                    for stage, first, last in zip(stages, found, found[1:], strict=False)
                ]
                again, offload = (tuple(found) for found in zip(*kept, strict=True))
                best = cost, Decision(config, tuple(found[1:-1]), again, order, offload)
    assert best is not None, "pp is at most the number of units"
    return best[1]


def _least(
    problem: Problem, config: Config, stages: list[_StageRanges], bounds: NDArray[np.intp]
) -> tuple[_Cost, int]:
    """The best of some sets of cuts, and its row."""

    def of(name: str) -> NDArray[np.float64]:
        columns = [
            getattr(stage, name)[bounds[:, s], bounds[:, s + 1]] for s, stage in enumerate(stages)
        ]
        return np.stack(columns, axis=1)

    stage = StageSeconds(*map(of, StageSeconds._fields))
    seconds = step_seconds(stage, weights(problem, config), floor_seconds(problem, config))
    overflow = np.maximum(of("beyond").max(axis=1), 0)
    nearest = overflow == overflow.min()
    score = np.where(nearest, seconds if overflow.min() == 0 else 0.0, np.inf)
    # Rows are in lexicographic order, so that the first of equals has the earliest cuts.
    row = int(np.argmax(score <= score.min() * (1 + TOLERANCE)))
    return (float(overflow[row]), float(score[row])), row


class _StageRanges:
    """The costs of every range in a place with its best set of blocks: an entry for each range."""

    whole: Times
    period: Times
    exposed: Times
    beyond: Bytes

    def __init__(self, problem: Problem, config: Config, place: StagePlace) -> None:
        self._problem = problem
        profile = profile_of(problem, config.dp, config.micro_batches)
        assert profile is not None, "a config has a profile"
        ranges = arriving(tables(problem, profile), problem, config, place)
        kind, work = place.group.kind, stage_work(problem, config, place, ranges)
        self._sets = _sets(problem, config, place)
        allowed = {again for blocks in self._sets for again in blocks}
        saves = {again: _parts(problem, profile.rows, kind, again) for again in allowed}
        nothing = np.zeros_like(ranges.saved)
        running = [saved for (_, level), (saved, _) in saves.items() if level != AWAY]
        largest = np.max([nothing, *running], axis=0)
        best: tuple[Times, Times, Times, Bytes] | None = None
        self._chosen = np.zeros_like(ranges.saved)
        for number, blocks in enumerate(self._sets):
            again = [saves[block] for block in blocks if block.level != AWAY]
            away = np.sort([nothing, nothing, *(saves[b][0] for b in blocks if b.level == AWAY)], 0)
            dropped, offloaded = sum((saved for saved, _ in again), nothing), away.sum(axis=0)
            extra = sum((spent for _, spent in again), np.zeros_like(ranges.earlier))
            held, moving = np.where(dropped > 0, largest, 0), away[-2:].sum(axis=0)
            kept_less = dropped + offloaded, held, moving
            shared = place.shared(config)
            held_bytes = memory.estimate(
                *(ranges, problem, shared, place.in_flight, *kept_less), waiting=place.waiting
            )
            peaks = held_bytes.peak
            beyond = np.maximum(memory.excess(peaks, place.room), 0)
            costs = *work.seconds(extra, offloaded), beyond
            if best is None:
                best = costs
                continue
            closer = beyond < best[-1]
            cheaper = (beyond == best[-1]) & (costs[0] < best[0])
            better = closer | cheaper
            best = tuple(np.where(better, new, old) for new, old in zip(costs, best, strict=True))  # type: ignore[assignment]
            self._chosen = np.where(better, number, self._chosen)
        assert best is not None, "there is the empty set"
        self.whole, self.period, self.exposed, self.beyond = best

    def kept_less(self, first: int, last: int) -> KeptLess:
        """The blocks of a range of which something runs again, and those that offload."""
        spans = [
            (again, self._problem.recomputable[again.block])
            for again in self._sets[int(self._chosen[first, last])]
        ]
        in_range = [again for again, (start, stop) in spans if start < last and stop > first]
        return KeptLess(
            tuple(again for again in in_range if again.level != AWAY),
            tuple(again.block for again in in_range if again.level == AWAY),
        )


def _sets(problem: Problem, config: Config, place: StagePlace) -> list[Blocks]:
    """All sets of blocks that may keep less in a place, as far as the user has not fixed them."""
    asked = problem.constraints
    away = tuple(Again(block, AWAY) for block in asked.offload or ())
    if asked.recompute is not None or splits(problem, config.schedule):
        return [(*(asked.recompute or ()), *away)]
    free = _subsets(_levels(problem, away=may_offload(problem, place)))
    offloaded = {block for block, _ in away}
    return [(*blocks, *away) for blocks in free if offloaded.isdisjoint(b for b, _ in blocks)]


def _levels(problem: Problem, *, away: bool) -> list[tuple[int, ...]]:
    """For each block the levels at which it may run again.

    Args:
        away: whether `AWAY`, to offload, is among them.
    """
    between = problem.profiles[0].levels or ((),) * len(problem.recomputable)
    return [(WHOLE, *range(len(levels)), *[AWAY] * away) for levels in between]


def _subsets(levels: Sequence[tuple[int, ...]]) -> Iterator[Blocks]:
    """All sets of some of the blocks, each at one of its levels; small sets first."""
    blocks = range(len(levels))
    for some in chain.from_iterable(combinations(blocks, size) for size in range(len(levels) + 1)):
        for chosen in product(*(levels[block] for block in some)):
            yield tuple(map(Again, some, chosen))


def _parts(problem: Problem, rows: int, kind: int, again: Again) -> tuple[Bytes, Times]:
    """The bytes that the part of a block in each range saves, and the seconds that it costs.

    A block that a range has only in part has no level but `WHOLE`, unless one is asked for; nor
    does it offload.
    """
    block, level = again
    asked = problem.constraints.recompute is not None
    anywhere = level == WHOLE or (asked if level != AWAY else bool(problem.constraints.offload))
    start, stop = problem.recomputable[block]
    saved = np.zeros((problem.units + 1, problem.units + 1), np.int64)
    spent = np.zeros(saved.shape)
    for first in range(stop):
        for last in range(max(first, start) + 1, problem.units + 1):
            part = max(first - start, 0), min(last, stop) - start
            if anywhere or part == (0, stop - start):
                saved[first, last], spent[first, last] = figures(
                    problem, rows, kind, block, part, WHOLE if level == AWAY else level
                )
    return saved, spent


def _all_bounds(units: int, stages: int) -> Iterator[NDArray[np.intp]]:
    """Integer arrays (rows, stages + 1) of 0, the cuts, units: all sets of cuts, ROWS at a time."""
    every = combinations(range(1, units), stages - 1)
    while chunk := list(islice(every, ROWS)):
        inner = np.fromiter(chain.from_iterable(chunk), dtype=np.intp).reshape(
            len(chunk), stages - 1
        )
        yield np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, units)))
