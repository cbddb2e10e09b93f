"""Rules out configs in which no cuts fit, by a lower bound on memory and without trying cuts.

A stage holds at least a sum over its units (`planners.model.memory.bound`). Give each stage in turn
the longest range of units that the bound leaves room for: no other cuts reach further. Where even
these do not reach the last unit, nothing fits. Of Llama-3.1-405B on 16384 devices that rules out
nine configs in ten, and trying their cuts takes a hundred times as long.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model.memory import ROUNDED, bound, excess
from autopipe.planners.model.places import in_flights, stages_of
from autopipe.planners.model.problem import Config, Problem


def left_over(problem: Problem, config: Config) -> int:
    """The units that find no room in a config, at least: where there are any, nothing fits.

    Not the other way round: cuts have to leave each stage a unit, transfers their buffers.
    """
    if config.turns:
        return 0  # the bound is of shares over dp ranks alone
    least = bound(problem, config)
    stages = stages_of(problem, config)
    beyond = problem.seen_beyond(config)
    most = max(group.memory for group in problem.machine.groups(config.dp)) - beyond
    # One in flight everywhere first: most configs are out by that, and no schedule has been made.
    for in_flight in ([1] * stages, in_flights(problem, config)):
        # A device with several stages may deal out its room among them as it likes.
        together = least.upto(min(in_flight))
        left = max(
            _left_over([together], config.pp * (most + ROUNDED)),
            _left_over([least.upto(held) for held in in_flight], most + ROUNDED),
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
        reached = int(np.searchsorted(excess(upto, room), upto[reached], side="right")) - 1
    return last - reached
