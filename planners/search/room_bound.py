"""Rule out configs in which no cuts fit, or no fast ones, by lower bounds and without trying cuts.

A stage holds at least a sum over its units (`planners.model.memory.bound`). Give each stage in turn
the longest range of units that the bound leaves room for: no other cuts reach further. Where even
these do not reach the last unit, nothing fits. Of Llama-3.1-405B on 16384 devices that rules out
nine configs in ten, and trying their cuts takes a hundred times as long.

Where a step is to take S seconds at most, no stage can have a range that takes more than

    P = (S - of_sum * W) / of_largest                        as `planners.search.bound` has a step

for a micro-batch. Cuts that fit are often uneven, and even ones too full: of the configs that have
room for some cuts or other, and may be fast by their bound, most have no cuts that are both. (Of
gpt-oss-120b on 128 H100, with 2 tensor-parallel ranks, 650 of 748.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model.memory import ROUNDED, bound, excess
from autopipe.planners.model.places import in_flights, stages_of
from autopipe.planners.model.problem import Config, Problem
from autopipe.planners.search.bound import longest_period, seconds_before


class RuledOut(NamedTuple):
    """Why a config is ruled out.

    Args:
        units: a lower bound on the number of units without room.
        ever: whether no plan has room for them; else no plan that is fast enough.
    """

    units: int
    ever: bool


def left_over(problem: Problem, config: Config) -> int:
    """A lower bound on the number of units without room in a config; above 0, nothing fits.

    The reverse does not hold: each stage needs a unit, and transfers need buffers.
    """
    found = ruled_out(problem, config)
    return found.units if found else 0


def ruled_out(
    problem: Problem, config: Config, seconds: float = math.inf, more: int = 0
) -> RuledOut | None:
    """The reason if nothing fits in a config, or nothing with a short enough step; None: it may.

    Args:
        seconds: the longest step of interest.
        more: bytes by which each device is assumed to be larger than it is.
    """
    if config.turns:
        return None  # the bound is of shares over dp ranks alone
    least = bound(problem, config)
    beyond = problem.seen_beyond(config)
    largest = max(group.memory for group in problem.machine.groups(config.dp))
    room = largest - beyond + ROUNDED + more
    # One in flight everywhere first: most configs are out by that, and no schedule has been made.
    for flying in (_one_in_flight, in_flights):
        flights = flying(problem, config)
        upto = {in_flight: least.upto(in_flight) for in_flight in {*flights}}
        sums = [upto[in_flight] for in_flight in flights]
        # A device may divide its room among its stages in any way.
        together = [upto[min(flights)]]
        if units := max(_left_over(together, config.pp * room), _left_over(sums, room)):
            return RuledOut(units, ever=True)
        if seconds < math.inf:
            seconds_taken = seconds_before(problem, config)
            longest = longest_period(problem, config, seconds)
            if units := _left_over(sums, room, seconds_taken, longest):
                return RuledOut(units, ever=False)
    return None


def _one_in_flight(problem: Problem, config: Config) -> Sequence[int]:
    return (1,) * stages_of(problem, config)


def _left_over(
    sums: Sequence[NDArray[np.float64]],
    room: int,
    taken: NDArray[np.float64] | None = None,
    longest: float = math.inf,
) -> int:
    """The units without room if each stage in turn takes all units for which it has room and time.

    Args:
        sums: for each stage, the bytes of the units before each unit.
        taken: the seconds of the units before each unit, and a stage's limit on them.
    """
    reached, last = 0, len(sums[0]) - 1
    for upto in sums:
        first = reached
        reached = int(np.searchsorted(excess(upto, room), upto[first], side="right")) - 1
        if taken is not None:
            by_time = int(np.searchsorted(taken, taken[first] + longest, side="right")) - 1
            reached = min(reached, by_time)
    return last - reached
