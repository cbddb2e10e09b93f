"""Every mesh, number of micro-batches, schedule and set of cuts: slow, and right by construction.

The oracle for the other planners. A model of n units has binom(n - 1, pp - 1) sets of cuts per
frame and schedule; they are scored many at a time, as rows of stages. Of several stages on a rank
each gets an equal share of the device, as in `dynamic`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, combinations, islice

import numpy as np

from autopipe.errors import AutopipeError
from autopipe.estimate import (
    chunks_of,
    in_flights,
    peak,
    periods,
    pipeline_seconds,
    profile_of,
    reduce_seconds,
    room,
    stage_seconds,
    weights,
)
from autopipe.planners.answer import TOLERANCE, Answer, best_answer
from autopipe.planners.search import Frame, frames, schedules
from autopipe.problem import Decision, Problem
from autopipe.tables import tables

MOST = 2_000_000
"""Candidates: what a few seconds are enough for."""

ROWS = 1 << 16
"""Sets of cuts scored at a time."""


def exhaustive(problem: Problem) -> Answer:
    """Plan by scoring every candidate.

    Raises:
        InfeasibleError: no candidate fits.
        AutopipeError: there are more than `MOST` candidates.
    """
    names = schedules(problem)
    candidates = sum(
        math.comb(problem.units - 1, frame.pp * chunks_of(problem.constraints, name) - 1)
        for frame in frames(problem)
        for name in names
    )
    if candidates > MOST:
        raise AutopipeError(
            f"the planner `exhaustive` would score {candidates:,} candidates for "
            f"{problem.units} units on {problem.devices} devices, and stops at {MOST:,}",
            hint="the planner `dynamic` finds the same optimum; or fix pp, dp and micro_batches",
        )
    return best_answer(problem, _choose)


def _choose(problem: Problem, frame: Frame) -> Decision:
    """The fastest that fits, else the one with the lowest peak; the earliest cuts among equals."""
    choices = [_of_schedule(problem, frame, name) for name in schedules(problem)]
    return min(choices, key=lambda choice: choice[0])[1]


_Rank = tuple[float, float]
"""Bytes too many, then seconds if that is none: a smaller rank is a better candidate."""


def _of_schedule(problem: Problem, frame: Frame, name: str) -> tuple[_Rank, Decision]:
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    ranges = tables(problem, profile)
    held = in_flights(problem, name, frame.pp, frame.micro_batches)
    limit = room(problem, name)

    best: tuple[_Rank, Decision] | None = None
    for bounds in _all_bounds(problem.units, len(held)):
        stages = ranges.at(bounds[:, :-1], bounds[:, 1:])
        peaks = peak(stages, problem, frame.micro_batches, held, frame.dp).max(axis=1)
        seconds = pipeline_seconds(
            stage_seconds(stages, problem, frame.dp),
            periods(stages, problem, name, frame.dp),
            weights(problem, name, frame.micro_batches),
        )
        seconds = seconds + reduce_seconds(stages, problem, frame.dp)[:, 0]
        overflow = np.maximum(peaks - limit, 0)
        nearest = overflow == overflow.min()
        score = np.where(nearest, seconds if overflow.min() == 0 else 0.0, np.inf)
        # Rows are in lexicographic order, so that the first of equals has the earliest cuts.
        row = int(np.argmax(score <= score.min() * (1 + TOLERANCE)))
        rank = float(overflow[row]), float(score[row])
        if best is None or (rank[0], rank[1] * (1 + TOLERANCE)) < best[0]:
            cuts = tuple(int(cut) for cut in bounds[row, 1:-1])
            best = rank, Decision(*frame, name, cuts)
    assert best is not None, "pp is at most the number of units"
    return best


def _all_bounds(units: int, stages: int) -> Iterator[np.ndarray]:
    """Integer arrays (rows, stages + 1) of 0, the cuts, units: all sets of cuts, ROWS at a time."""
    every = combinations(range(1, units), stages - 1)
    while chunk := list(islice(every, ROWS)):
        inner = np.fromiter(chain.from_iterable(chunk), dtype=np.intp).reshape(
            len(chunk), stages - 1
        )
        yield np.pad(inner, ((0, 0), (1, 1)), constant_values=((0, 0), (0, units)))
