"""Frames in which no cuts fit, told without a look at cuts: too little room for the units at best.

What a stage holds is at least a sum over its units,

    peak_s >= sum over its units u of  w_u + n_s * a_u

    w_u     states, each with the first unit that uses it; gradients and optimizer state besides
    a_u     what u is the first to keep for backward, and no block that may run again would drop
    n_s     micro-batches in flight

so that the longest ranges that this leaves room for, stage after stage, reach as far as any stages
can. Where they do not reach the end, nothing fits. Of Llama-3.1-405B on 16384 devices nine frames
in ten are such, and a look at their cuts takes a hundred times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.estimate import chunks_of, in_flights
from autopipe.problem import Frame, Problem, splits

ROUNDED = 16
"""Bytes: more than a stage's exact peak may lie below the sum, whose parts are not rounded."""


def left_over(problem: Problem, frame: Frame) -> int:
    """The units that find no room in a frame, at least: where there are any, nothing fits.

    Not the other way round: cuts have to leave each stage a unit, transfers their buffers.
    """
    states, kept = _states(problem, frame.dp, frame.zero), _kept(problem, frame)
    stages = frame.pp * chunks_of(problem.constraints, frame.schedule)
    beyond = problem.beyond.get(frame.schedule, 0)
    most = max(group.memory for group in problem.machine.groups(frame.dp)) - beyond
    # One in flight everywhere first: most frames are out by that, and no schedule has been made.
    for in_flight in ([1] * stages, in_flights(problem, frame)):
        # A device with several stages may deal out its room among them as it likes.
        together = states + min(in_flight) * kept
        left = max(
            _left_over([together], frame.pp * (most + ROUNDED)),
            _left_over([states + held * kept for held in in_flight], most + ROUNDED),
        )
        if left:
            return left
    return 0


def _left_over(sums: Sequence[NDArray[np.float64]], room: int) -> int:
    """The units that find no room if each stage in turn takes all that it has room for.

    Args:
        sums: of each stage, the bytes of the units before each unit.
    """
    reached, last = 0, len(sums[0]) - 1
    for upto in sums:
        reached = int(np.searchsorted(upto, upto[reached] + room, side="right")) - 1
    return last - reached


@lru_cache(maxsize=64)
def _states(problem: Problem, dp: int, zero: int) -> NDArray[np.float64]:
    """Bytes of the states that units before each unit are the first to use, as a rank holds them:
    shape (units + 1,)."""
    factor = problem.optimizer_factor
    held = (2 + factor) / dp if zero == 3 else 2 + factor / (dp if zero else 1)
    sizes = np.zeros(problem.units + 1)
    for states, times in ((problem.parameters, held), (problem.constants, 1.0)):
        for state in states:
            sizes[state.units[0] + 1] += times * state.bytes
    return np.cumsum(sizes)


@lru_cache(maxsize=64)
def _kept_at(problem: Problem, rows: int, may_drop: bool) -> NDArray[np.float64]:
    """Bytes that units before each unit keep in any case of a micro-batch: shape (units + 1,)."""
    fixed = problem.constraints.recompute
    profile = problem.profile(rows)
    sizes = np.zeros(problem.units + 1)
    handed: Counter[tuple[int, int]] = Counter()
    for saved in profile.saved:
        unit, maker = saved.savers[0], saved.producer
        if saved.rerun is not None and (may_drop if fixed is None else saved.rerun in fixed):
            continue
        if maker is None or maker == unit:
            sizes[unit + 1] += saved.bytes
        else:
            handed[maker, unit] += saved.bytes
    crossing: Counter[tuple[int, int]] = Counter()
    for tensor in profile.crossings:
        crossing[tensor.producer, tensor.consumers[0]] += tensor.bytes
    # What an earlier unit has made is kept, or received: whichever is less.
    for way, size in (handed & crossing).items():
        sizes[way[1] + 1] += size
    return np.cumsum(sizes)


def _kept(problem: Problem, frame: Frame) -> NDArray[np.float64]:
    rows = problem.batch // (frame.dp * frame.micro_batches)
    return _kept_at(problem, rows, not splits(problem, frame.schedule))
