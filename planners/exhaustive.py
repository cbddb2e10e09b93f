"""Every frame, order of devices, set of cuts and of blocks that run again: slow, and surely right.

The oracle for the other planners. A model of n units has binom(n - 1, pp - 1) sets of cuts, each
stage 2^k sets of its k blocks. A stage's sets are its own affair, so that the best is taken for
each range and place; cuts are scored many at a time, as rows of stages. Of several stages on a rank
each gets an equal share of the device, as in `dynamic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, combinations, islice

import numpy as np
from numpy.typing import NDArray

from autopipe.errors import AutopipeError
from autopipe.estimate import (
    chunks_of,
    floor_seconds,
    places,
    profile_of,
    step_seconds,
    weights,
)
from autopipe.planners.answer import TOLERANCE, Answer, Mesh, best_answer
from autopipe.planners.orders import classes, orders
from autopipe.planners.search import frames
from autopipe.problem import Decision, Frame, Problem, splits
from autopipe.reruns import figures
from autopipe.stage_costs import Place, Seconds, memory, stage_seconds, sum_of
from autopipe.tables import Bytes, Times, tables

MOST, MOST_SETS = 5_000_000, 1024
"""Candidates, and sets of blocks: what some seconds are enough for."""

ROWS = 1 << 16
"""Sets of cuts scored at a time."""

Blocks = tuple[int, ...]


def exhaustive(problem: Problem, rivals: Sequence[float] = (), mesh: Mesh | None = None) -> Answer:
    """Plan by scoring every candidate.

    Raises:
        InfeasibleError: no candidate fits.
        AutopipeError: there are more than `MOST` candidates.
    """
    candidates = sum(
        math.comb(problem.units - 1, frame.pp * chunks_of(problem.constraints, frame.schedule) - 1)
        * len(classes(problem, frame)) ** frame.pp
        for frame in frames(problem)
        if mesh in (None, frame[:2])
    )
    sets = 2 ** len(problem.reruns)
    if candidates > MOST or sets > MOST_SETS:
        raise AutopipeError(
            f"the planner `exhaustive` would score {candidates:,} candidates, of {sets:,} sets of "
            f"blocks, for {problem.units} units on {problem.machine.devices} devices, and stops at "
            f"{MOST:,} of {MOST_SETS:,}",
            hint="the planner `dynamic` finds the same optimum; or fix pp, dp and micro_batches",
        )
    return best_answer(problem, _choose, rivals=rivals, mesh=mesh, thorough=True)


_Rank = tuple[float, float]
"""Bytes too many, then seconds if that is none: a smaller rank is a better candidate."""


def _choose(problem: Problem, frame: Frame) -> Decision:
    """The fastest that fits, else the one with the least beyond; the earliest among equals."""
    costing = cache(lambda place: _Stage(problem, frame, place))
    best: tuple[_Rank, Decision] | None = None
    for order in orders(problem, frame):
        stages = [costing(place) for place in places(problem, frame, order)]
        for bounds in _all_bounds(problem.units, len(stages)):
            rank, row = _least(problem, frame, stages, bounds)
            if best is None or (rank[0], rank[1] * (1 + TOLERANCE)) < best[0]:
                found = [int(bound) for bound in bounds[row]]
                again = tuple(
                    stage.again(first, last)
                    for stage, first, last in zip(stages, found, found[1:], strict=False)
                )
                best = rank, Decision(frame, tuple(found[1:-1]), again, order)
    assert best is not None, "pp is at most the number of units"
    return best[1]


def _least(
    problem: Problem, frame: Frame, stages: list[_Stage], bounds: NDArray[np.intp]
) -> tuple[_Rank, int]:
    """The best of some sets of cuts, and its row."""

    def of(name: str) -> NDArray[np.float64]:
        columns = [
            getattr(stage, name)[bounds[:, s], bounds[:, s + 1]] for s, stage in enumerate(stages)
        ]
        return np.stack(columns, axis=1)

    stage = Seconds(*map(of, Seconds._fields))
    seconds = step_seconds(stage, weights(problem, frame), floor_seconds(problem, frame))
    overflow = np.maximum(of("beyond").max(axis=1), 0)
    nearest = overflow == overflow.min()
    score = np.where(nearest, seconds if overflow.min() == 0 else 0.0, np.inf)
    # Rows are in lexicographic order, so that the first of equals has the earliest cuts.
    row = int(np.argmax(score <= score.min() * (1 + TOLERANCE)))
    return (float(overflow[row]), float(score[row])), row


class _Stage:
    """What every range costs in a place, with the best of all sets of blocks: an entry a range."""

    whole: Times
    period: Times
    exposed: Times
    beyond: Bytes

    def __init__(self, problem: Problem, frame: Frame, place: Place) -> None:
        self._problem = problem
        profile = profile_of(problem, frame.dp, frame.micro_batches)
        assert profile is not None, "a frame has a profile"
        ranges, kind = tables(problem, profile), place.group.kind
        fixed = problem.constraints.recompute
        free = fixed is None and not splits(problem, frame.schedule)
        may = fixed if fixed is not None else range(len(problem.reruns)) if free else ()
        self._sets = list(_subsets(may)) if free else [tuple(may)]
        saves = {b: _parts(problem, profile.rows, kind, b) for b in may}
        nothing = np.zeros_like(ranges.saved)
        largest = np.max([nothing, *(saved for saved, _ in saves.values())], axis=0)
        best: tuple[Times, Times, Times, Bytes] | None = None
        self._chosen = np.zeros_like(ranges.saved)
        for number, blocks in enumerate(self._sets):
            dropped = sum((saves[block][0] for block in blocks), nothing)
            extra = sum((saves[block][1] for block in blocks), np.zeros_like(ranges.earlier))
            held = {
                "one": np.where(dropped > 0, largest, 0),
                "all": dropped,
                "none": nothing,
            }[problem.reruns_hold]
            peaks = sum_of(memory(ranges, problem, frame, place.in_flight, dropped, held))
            beyond = np.maximum(peaks - place.room, 0)
            mine = *stage_seconds(problem, frame, place, ranges, extra), beyond
            if best is None:
                best = mine
                continue
            closer = beyond < best[-1]
            cheaper = (beyond == best[-1]) & (mine[0] < best[0])
            taken = closer | cheaper
            best = tuple(np.where(taken, new, old) for new, old in zip(mine, best, strict=True))  # type: ignore[assignment]
            self._chosen = np.where(taken, number, self._chosen)
        assert best is not None, "there is the empty set"
        self.whole, self.period, self.exposed, self.beyond = best

    def again(self, first: int, last: int) -> Blocks:
        """The blocks that run again in a range."""
        blocks = self._sets[int(self._chosen[first, last])]
        spans = [(block, self._problem.reruns[block]) for block in blocks]
        return tuple(b for b, (start, stop) in spans if start < last and stop > first)


def _subsets(blocks: range | Blocks) -> Iterator[Blocks]:
    """All sets of some of the blocks, small ones first."""
    return chain.from_iterable(combinations(blocks, size) for size in range(len(blocks) + 1))


def _parts(problem: Problem, rows: int, kind: int, block: int) -> tuple[Bytes, Times]:
    """What the part of a block in each range saves, and costs."""
    start, stop = problem.reruns[block]
    saved = np.zeros((problem.units + 1, problem.units + 1), np.int64)
    spent = np.zeros(saved.shape)
    for first in range(stop):
        for last in range(max(first, start) + 1, problem.units + 1):
            part = max(first - start, 0), min(last, stop) - start
            saved[first, last], spent[first, last] = figures(problem, rows, kind, block, part)
    return saved, spent


def _all_bounds(units: int, stages: int) -> Iterator[NDArray[np.intp]]:
    """Integer arrays (rows, stages + 1) of 0, the cuts, units: all sets of cuts, ROWS at a time."""
    every = combinations(range(1, units), stages - 1)
    while chunk := list(islice(every, ROWS)):
        inner = np.fromiter(chain.from_iterable(chunk), dtype=np.intp).reshape(
            len(chunk), stages - 1
        )
        yield np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, units)))
