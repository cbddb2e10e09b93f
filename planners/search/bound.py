"""A lower bound on the seconds of a step, before any cuts are known.

    step >= of_sum * W + of_largest * W / stages

W are the seconds of one micro-batch through the whole model, each unit on the device that is
fastest at it; of_sum and of_largest are the weights of `planners.model.step_formula`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model.places import stages_of
from autopipe.planners.model.problem import Config, Problem
from autopipe.planners.model.stage_costs import exchanged, least_with
from autopipe.planners.model.step_formula import weights
from autopipe.planners.search.configs import configs
from autopipe.planners.search.descent import TOLERANCE

Weights = Callable[[Problem, Config], tuple[float, float]]


@lru_cache(maxsize=16)
def bounds(problem: Problem) -> Mapping[Config, float]:
    """All configs in tie order, each with a lower bound on the seconds of its step.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    return {config: bound(problem, config) for config in configs(problem)}


def bound(problem: Problem, config: Config, weights: Weights = weights) -> float:
    """Seconds of a step with perfect balance, free transfers and a free all-reduce.

    Args:
        weights: the step's weights on the sum and on the maximum over stages.
    """
    of_sum, of_largest = weights(problem, config)
    stages = config.pp if config.turns else stages_of(problem, config)
    return _through(problem, config) * (of_sum + of_largest / stages)


def longest_period(problem: Problem, config: Config, step: float) -> float:
    """An upper bound on the slowest stage's seconds of a micro-batch, from one on the step.

    A step that is longer by no more than `descent.TOLERANCE` counts as equal.
    """
    of_sum, of_largest = weights(problem, config)
    if of_largest <= 0:  # the largest is no part of the step
        return math.inf
    return (step * (1 + TOLERANCE) - of_sum * _through(problem, config)) / of_largest


def seconds_before(problem: Problem, config: Config) -> NDArray[np.float64]:
    """Seconds of a micro-batch in the units before each unit, at least: shape (units + 1,)."""
    return np.cumsum((0.0, *_quickest(problem, config.microbatch_rows(problem.batch))))


def _through(problem: Problem, config: Config) -> float:
    """Seconds of a micro-batch through all units and back, with what ZeRO moves in each."""
    through = math.fsum(_quickest(problem, config.microbatch_rows(problem.batch)))
    if config.scatters and problem.machine.alike:
        trained = sum(parameter.bytes for parameter in problem.parameters)
        low = trained - sum(copy.bytes for copy in problem.copies)
        summed = low if problem.low_gradients else trained
        read = low + sum(parameter.bytes for parameter in problem.frozen)
        group = problem.machine.groups(config.dp)[0]
        exchanges = exchanged(read, summed, problem, config, group)
        waiting = float(2 * exchanges.gathers + exchanges.scatters)
        through = least_with(through, waiting, overlaps=problem.machine.overlaps)
    return through


@lru_cache(maxsize=256)
def _quickest(problem: Problem, rows: int) -> tuple[float, ...]:
    """Seconds of a micro-batch in each unit, forward and backward, on its fastest device."""
    profile = problem.profile(rows)
    forward, backward = (zip(*way, strict=True) for way in (profile.forward, profile.backward))
    return tuple(min(f) + min(b) for f, b in zip(forward, backward, strict=True))
