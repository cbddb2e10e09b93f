"""What Piper and Galvatron minimise and count, over the planner's own cost functions.

Piper: not the step is to be the shortest but its period, as in a pipeline that is never drained. A
transfer takes the time of both the stage that sends and the stage that receives, over the link
between the first two groups:

    step = m * max_s (t_s / d_s + reduce_s / m)
    t_s  = F + B + again + (R + R' + S + S') / bandwidth

with d_s the ranks that take turns at a stage.

What a stage recomputes stays until the stage's last backward: of n micro-batches in flight a
recomputed block saves the bytes of n - 1.

Galvatron: the planner's own step. What is recomputed is not counted at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from autopipe.planfile.turns import TAKES_TURNS
from autopipe.planners.model.block_parts import compositions
from autopipe.planners.model.keeping_less import Holding, Pricing, StageCosts
from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.places import StagePlace, places
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.model.range_tables import Bytes, Tables, tables
from autopipe.planners.model.stage_costs import StageSeconds, reduce_seconds, wire_rate
from autopipe.planners.search import in_turns
from autopipe.planners.search.bound import bound
from autopipe.planners.search.configs import configs
from autopipe.planners.search.descent import TOLERANCE
from autopipe.planners.search.dynamic import Objective, optimum
from autopipe.planners.search.room_bound import left_over


def all_recomputed(place: StagePlace, largest: Bytes) -> Holding:
    """Everything that a stage recomputes stays there, of one micro-batch."""
    return Holding(np.zeros_like(largest), place.in_flight - 1)


def none_recomputed(place: StagePlace, largest: Bytes) -> Holding:
    """Nothing is counted of what a stage recomputes."""
    return Holding(np.zeros_like(largest), place.in_flight)


def period_pricing(
    problem: Problem,
    config: Config,
    ranges: Tables,
    numbers: Numbers,
    holding: Callable[[StagePlace, Bytes], Holding] = all_recomputed,
) -> Callable[[StagePlace], StageCosts]:
    """The costs of ranges in a pipeline that is never drained: their periods."""
    priced = Pricing(problem, config, ranges, numbers, holding)

    def at(place: StagePlace) -> StageCosts:
        if config.pp > 1:
            place = place._replace(before=problem.machine.link(config.dp, 0, 1))
        found = priced(place)
        whole = found.seconds.whole
        if place.before is not None:
            sent = ranges.sent + ranges.sent_gradient
            whole = whole + sent / wire_rate(problem, config, place.before)
        reduce = reduce_seconds(ranges, problem, config, place.group)
        period = np.asarray(whole / place.turns + reduce / config.micro_batches)
        return found._replace(seconds=StageSeconds(np.asarray(whole), period, 0 * reduce))

    return at


def by_piper(after: int, of: int) -> tuple[int, int]:
    """Piper's micro-batches in flight on each of `of` ranks of a stage, and the ranks from the
    stage on: these over `of`, rounded up for each stage by itself."""
    return -(-(after + of) // of), after + of


def period_weights(problem: Problem, config: Config) -> tuple[float, float]:
    """A step is as many of the longest period as there are micro-batches."""
    return 0.0, float(config.micro_batches)


PIPER = Objective(period_pricing, period_weights, lambda problem, config: 0.0)

GALVATRON = Objective(partial(Pricing, holding=none_recomputed))


class Found(NamedTuple):
    """A decision and the seconds of its step by an objective."""

    decision: Decision
    seconds: float


def fastest(problem: Problem, objective: Objective) -> Found | None:
    """The decision of the least step by an objective, over all configs; None: nothing fits.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    every = configs(problem)
    least = {config: bound(problem, config, objective.weights) for config in every}
    found: dict[Config, Found] = {}
    best = math.inf
    for config in sorted(every, key=lambda config: least[config]):
        if least[config] > best * (1 + TOLERANCE):
            break
        if left_over(problem, config):
            continue
        decision = optimum(problem, config, objective)
        if decision is not None:
            found[config] = Found(decision, step_seconds(problem, decision, objective))
            best = min(best, found[config].seconds)
    divided = _in_turns(problem, objective)
    if divided is not None and divided.seconds < best * (1 - TOLERANCE):
        return divided
    # Of equals the first, as configs come in the order that decides.
    ties = (found[f] for f in every if f in found and found[f].seconds <= best * (1 + TOLERANCE))
    return next(ties, None)


def _in_turns(problem: Problem, objective: Objective) -> Found | None:
    """The same where ranks of one pipeline over all devices take turns, as far as they divide."""
    ranks, m = problem.machine.devices, problem.batch
    config = Config(ranks, 1, m, 0, TAKES_TURNS)
    if objective is not PIPER or ranks < 3:
        return None
    decision = in_turns.optimum(problem, config, objective, by_piper)
    if decision is None:
        return None
    return Found(decision, step_seconds(problem, decision, objective))


def _piper_flights(turns: Sequence[int]) -> list[int]:
    """The micro-batches in flight at each stage by Piper."""
    return [-(-sum(turns[stage:]) // of) for stage, of in enumerate(turns)]


def step_seconds(problem: Problem, decision: Decision, objective: Objective) -> float:
    """The seconds of a decision's step, if its stages recompute what the objective would."""
    config, numbers = decision.config, compositions(problem).number
    bounds = (0, *decision.cuts, problem.units)
    every = tables(problem, problem.profile(problem.batch // (config.dp * config.micro_batches)))
    placed = [
        place if not config.turns else place._replace(in_flight=_piper_flights(config.turns)[s])
        for s, place in enumerate(places(problem, config, decision.groups or range(config.pp)))
    ]
    stages = [
        objective.pricing(problem, config, every.at(first, end), numbers[first, end])(place).seconds
        for place, first, end in zip(placed, bounds, bounds[1:], strict=False)
    ]
    of_sum, of_largest = objective.weights(problem, config)
    slowest = max(objective.floor(problem, config), *(float(stage.period) for stage in stages))
    through = of_sum * math.fsum(float(stage.whole) for stage in stages) + of_largest * slowest
    return through + max(float(stage.exposed) for stage in stages)
