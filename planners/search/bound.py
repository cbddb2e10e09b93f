"""A lower bound on the seconds of a step, before any cuts are known.

    step >= of_sum * W + of_largest * W / stages

W are the seconds of one micro-batch through the whole model, each unit on the device that is
fastest at it; of_sum and of_largest are the weights of `planners.model.step_formula`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import lru_cache

from autopipe.planners.model.places import stages_of
from autopipe.planners.model.problem import Config, Problem
from autopipe.planners.model.stage_costs import exchanged, least_with
from autopipe.planners.model.step_formula import weights
from autopipe.planners.search.configs import configs

Weights = Callable[[Problem, Config], tuple[float, float]]


@lru_cache(maxsize=16)
def bounds(problem: Problem) -> Mapping[Config, float]:
    """All configs, those that win ties first, and of each the seconds that its step takes at least.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    return {config: bound(problem, config) for config in configs(problem)}


def bound(problem: Problem, config: Config, weights: Weights = weights) -> float:
    """Seconds of a step with perfect balance, free transfers and a free all-reduce.

    Args:
        weights: of the sum and of the largest of the stages in the step.
    """
    whole = _whole_seconds(problem, config.microbatch_rows(problem.batch))
    if config.scatters and problem.machine.alike:
        held = sum(parameter.bytes for parameter in problem.parameters)
        low = held - sum(copy.bytes for copy in problem.copies)
        summed = low if problem.low_gradients else held
        read = low + sum(parameter.bytes for parameter in problem.frozen)
        group = problem.machine.groups(config.dp)[0]
        own = exchanged(read, summed, problem, config, group)
        waiting = float(2 * own.gathers + own.scatters)
        whole = least_with(whole, waiting, overlaps=problem.machine.overlaps)
    of_sum, of_largest = weights(problem, config)
    stages = config.pp if config.turns else stages_of(problem, config)
    return whole * (of_sum + of_largest / stages)


@lru_cache(maxsize=256)
def _whole_seconds(problem: Problem, rows: int) -> float:
    """Seconds of a micro-batch, forward and backward, each unit on the device it likes best."""
    profile = problem.profile(rows)
    quickest = (
        map(min, zip(*profile.forward, strict=True)),
        map(min, zip(*profile.backward, strict=True)),
    )
    return math.fsum(seconds for kind in quickest for seconds in kind)
