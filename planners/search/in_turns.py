"""The fastest division of a pipeline's ranks among its stages, where several may take turns at one.

    ranks     0     1     2     3     4     5
             |-----|-----------|-----|-----------|
    stages      0        1        2        3            turns (1, 2, 1, 2): 6 ranks, 4 stages

A config has P ranks in a pipeline, all of devices that are alike, under 1f1b. A stage with the
ranks [k, k + d), after which h micro-batches are in flight, has 1 + ceil(h / d) in flight on each
of them, sums its gradients over d * dp devices, and a further micro-batch takes t / d of it
(`planners.model.stage_costs`). Let V[k, g, i] be the least value of the units [i, n) on the ranks
[k, P) with g micro-batches in flight on them:

    V[P, 0, n] = 0
    V[k, g, i] = min over d, h and j > i of  t(k, d, h, i, j) (+) V[k + d, h, j]
                 with d <= P - k and g = d (1 + ceil(h / d))

d divides the micro-batches, so that ranks have equally many. This is the recurrence of
`planners.search.descent` with one layer a rank: a state has the first rank that is left and what is
in flight from it on, and passes the layers between k and k + d without units. Such a recurrence,
and what a replicated stage costs, are in Piper (Tarnawski et al., NeurIPS 2021, sections 3 and 4),
whose objective is the slowest stage alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from autopipe.planfile.turns import TAKES_TURNS
from autopipe.planners.model.estimate import PipelineDegrees, Scored, estimate
from autopipe.planners.model.places import place_of, profile_of
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.search import reasons
from autopipe.planners.search.alternatives import alternative
from autopipe.planners.search.best import Answer
from autopipe.planners.search.bound import bound
from autopipe.planners.search.configs import micro_batches
from autopipe.planners.search.descent import Arc, GroupsUsed, Layers, fastest
from autopipe.planners.search.dynamic import STEP, Objective, costing, kept_less
from autopipe.schedules.generators import held_before
from autopipe.util.numbers import VISIBLE

MOST_RANKS, MOST_CONFIGS = 16, 8
"""Ranks of the longest pipeline, and configs, that `improved` looks at: their ranges of ranks grow
with the square."""

CARRIED = -1
"""In the place of a group: no stage begins at this rank."""


InFlight = Callable[[int, int], tuple[int, int]]
"""The micro-batches in flight on each rank of a stage, and on all of them and after it together,
from those after it and the number of its ranks."""


def by_the_schedule(after: int, of: int) -> tuple[int, int]:
    """The micro-batches in flight under 1f1b."""
    held = held_before(after, of)
    return held, of * held


def improved(
    problem: Problem,
    answer: Answer,
    choose: Callable[[Problem, Config], Decision | None],
    mesh: PipelineDegrees | None = None,
) -> Answer:
    """The answer, or a visibly faster one whose ranks take turns.

    The answer is returned unchanged if the user has asked for stages, a schedule or turns, or if
    devices differ.

    Args:
        choose: `optimum`, or its oracle.
        mesh: the one mesh to try; None: all.
    """
    for config in _configs(problem, answer.estimate.step_seconds, mesh):
        least = answer.estimate.step_seconds * (1 - VISIBLE)
        if bound(problem, config) >= least:
            continue
        decision = choose(problem, config)
        if decision is None or not any(of > 1 for of in decision.config.turns):
            continue
        scored = Scored(decision, estimate(problem, decision))
        if not scored.estimate.fits or scored.estimate.step_seconds >= least:
            continue
        before = alternative(problem.tp, scored, Scored(answer.decision, answer.estimate))
        others = (before, *answer.alternatives)
        answer = replace(
            answer,
            decision=decision,
            estimate=scored.estimate,
            bound_seconds=min(answer.bound_seconds, scored.estimate.step_seconds),
            binding=reasons.binding(problem, scored, None),
            alternatives=tuple(a for a in others if (a.pp, a.dp) != scored.mesh),
        )
    return answer


def _configs(problem: Problem, step: float, mesh: PipelineDegrees | None) -> list[Config]:
    """The configs whose ranks may take turns, those of the least bounds first."""
    asked, machine = problem.constraints, problem.machine
    free = asked.turns is None and asked.pp is None and not asked.programs
    if not free or asked.schedule not in (None, TAKES_TURNS) or not machine.alike:
        return []
    zeros = [zero for zero in problem.zeros if zero <= 1]
    possible = [
        Config(ranks, dp, m, zero, TAKES_TURNS)
        for ranks in range(3, min(MOST_RANKS, machine.devices) + 1)
        for dp in [machine.devices // ranks]
        if dp * ranks == machine.devices and asked.dp in (None, dp) and mesh in (None, (ranks, dp))
        for m in micro_batches(problem, dp)
        if m > 1
        for zero in zeros[:1] + zeros[-1:]
    ]
    bounds = {config: bound(problem, config) for config in possible}
    likely = [config for config in bounds if bounds[config] < step * (1 - VISIBLE)]
    return sorted(likely, key=lambda config: bounds[config])[:MOST_CONFIGS]


def optimum(
    problem: Problem, config: Config, objective: Objective = STEP, law: InFlight = by_the_schedule
) -> Decision | None:
    """The decision, with turns, that minimises an objective; None: nothing fits.

    Args:
        config: a config without turns, whose pp are the ranks to divide.
        law: gives the micro-batches in flight.
    """
    layers = _layers(problem, config, objective, law)
    path = fastest(layers, objective.weights(problem, config), objective.floor(problem, config))
    if path is None:
        return None
    taken = [(arc, span) for arc, span in path.ranges if arc.group != CARRIED]
    kept = [kept_less(problem, arc, span) for arc, span in taken]
    return Decision(
        config._replace(turns=tuple(arc.target.used[0] - arc.group for arc, _ in taken)),
        tuple(first for _, (first, _) in taken[1:]),
        tuple(blocks.again for blocks in kept),
        (),
        tuple(blocks.offload for blocks in kept),
    )


class _Begun(NamedTuple):
    """A stage on the ranks [first, first + of), with micro-batches in flight on and after it."""

    first: int
    of: int
    held: int
    flying: int
    after: int


def _stages(config: Config, law: InFlight) -> list[list[_Begun]]:
    """For each rank the stages that may begin there, whatever comes after them."""
    ranks, m = config.pp, config.micro_batches
    # One stage for all ranks is data parallelism, which is known by that name.
    dividing = [of for of in range(1, ranks) if m % of == 0]
    by_first: list[list[_Begun]] = [[] for _ in range(ranks)]
    flying: list[set[int]] = [*(set() for _ in range(ranks)), {0}]
    for first in reversed(range(ranks)):
        for of in dividing:
            for after in sorted(flying[first + of]) if first + of <= ranks else ():
                held, together = law(after, of)
                begun = _Begun(first, of, min(held, m // of), min(together, m), after)
                by_first[first].append(begun)
                flying[first].add(begun.flying)
    return by_first


def _layers(problem: Problem, config: Config, objective: Objective, law: InFlight) -> Layers:
    """For each rank the arcs that may begin there: a stage on some of the next ranks, or none."""
    assert profile_of(problem, config.dp, config.micro_batches) is not None, "a config has one"
    priced, every = costing(problem, config, objective), _stages(config, law)
    units = problem.units + 1
    nothing = np.where(np.eye(units, dtype=bool), 0.0, np.inf)
    unhidden = np.zeros((units, units))

    def state(first: int, flying: int) -> GroupsUsed:
        return GroupsUsed((first, flying if first else 0), 0)

    def arc(begun: _Begun) -> Arc:
        first, of, held, flying, after = begun
        place = place_of(problem, config, held, first, first - 1 if first else None, of)
        return Arc(state(first, flying), state(first + of, after), first, priced(place))

    layers = [[arc(begun) for begun in stages] for stages in every]
    free = layers[0][0].costs._replace(
        seconds=nothing, periods=nothing, exposed=unhidden, beyond=nothing
    )
    begun = sorted({one.source for arcs in layers[1:] for one in arcs}) + [state(config.pp, 0)]
    for first in range(1, config.pp):
        layers[first] += [
            Arc(later, later, CARRIED, free) for later in begun if later.used[0] > first
        ]
    return layers
