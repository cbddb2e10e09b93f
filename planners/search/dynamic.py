"""The fastest plan, exactly, by dynamic programs over stages from the last one backwards.

**Variables.** A config (pp, dp, m, zero, schedule, depth, chunks, turns) is fixed: configs are
tried one after the other. Left are the cuts 0 = c_0 < c_1 < ... < c_p = n of n units into p stages,
the group of devices g_s that holds stage s, and the blocks R_s that are recomputed in it.

**Constraints.** Stage s holds in_flight(s) micro-batches, a number that its place alone decides;
no group holds two stages, and those of one class are used in rank order;

    peak_s(c_s, c_{s+1}, R_s) <= room(g_s)          else t_s = infinity    -> `keeping_less.costs`

R_s matters to its own stage alone: of all that fit the cheapest is taken before anything else
(`planners.model.recompute_sets`), and t_s(i, j) is a number for every place and range.

**Objective.** By `planners.model.estimate`, with t_s the seconds of a micro-batch in stage s,

    step = T + (m - 1) * M + E,    T = sum_s t_s,    M = max_s t_s,    E = max_s exposed_s

or with other weights than 1 and m - 1, another t_s for M, or M no less than a constant, where the
schedule asks for them; what follows holds for any. exposed_s is, as t_s, a number for every place
and range: what of the stage's sum of gradients the backwards before it do not hide.

How the least step over all cuts and orders is found is in `planners.search.descent`.

Where no cuts fit, the maximum program over the bytes beyond what a group may hold finds those
whose fullest stage is the least too full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopipe.planners.model import keeping_less, memory, step_formula
from autopipe.planners.model.block_parts import compositions
from autopipe.planners.model.estimate import PipelineDegrees, Scored
from autopipe.planners.model.level_mixes import Numbers
from autopipe.planners.model.places import (
    StagePlace,
    in_flights,
    place_of,
    profile_of,
    ranks_of,
    waitings,
)
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.model.range_tables import Ranges, Tables, tables
from autopipe.planners.model.recompute_sets import KeptLess, chosen
from autopipe.planners.search import best as answer
from autopipe.planners.search.best import Answer, Known, best_answer
from autopipe.planners.search.descent import (
    Arc,
    GroupsUsed,
    Layers,
    RangeCosts,
    StagePath,
    best_path,
)
from autopipe.planners.search.descent import fastest as fastest_path
from autopipe.planners.search.device_orders import Classes, classes

CostsAt = Callable[[StagePlace], keeping_less.StageCosts]


@dataclass(frozen=True)
class Objective:
    """The objective of a search: how stages are priced, and how a step follows from them.

    The planner's own is `STEP`. A comparison with other planners uses their objectives.

    Args:
        pricing: prices ranges of units, with their compositions, in a place.
        weights: the weights of T and M, the sum and the maximum over stages.
        floor: seconds that M counts as at least.
    """

    pricing: Callable[[Problem, Config, Tables, Numbers], CostsAt] = keeping_less.Pricing
    weights: Callable[[Problem, Config], tuple[float, float]] = step_formula.weights
    floor: Callable[[Problem, Config], float] = step_formula.floor_seconds


STEP = Objective()
"""The seconds of a step by `planners.model.step_formula`."""


def dynamic(
    problem: Problem,
    incumbents: Sequence[float] = (),
    mesh: PipelineDegrees | None = None,
    known: Known | None = None,
) -> Answer:
    """Plan exactly, where each rank has one stage; where it has several, each stage gets an equal
    share of its device and the devices stand in rank order, and what only other shares or another
    order would fit is not found.

    Of equally fast cuts in a config it takes some with the least maximum, M*, if those are among
    them, and then the earliest: the first stages, where most is in flight, have the least to hold.

    Raises:
        InfeasibleError: no plan fits; the message carries the one that comes nearest.
    """
    return best_answer(
        problem, choose, incumbents=incumbents, mesh=mesh, known=known, fitting=optimum
    )


def fastest(problem: Problem) -> Scored | None:
    """The decision of `dynamic`, without reasons, which is quicker; None: nothing fits."""
    return answer.fastest(problem, optimum)


def optimum(problem: Problem, config: Config, objective: Objective = STEP) -> Decision | None:
    """The decision of a config that fits and minimises an objective; None: nothing fits."""
    path = _fastest(problem, config, _arcs(problem, config, objective), objective)
    return None if path is None else _decision(problem, config, path)


def choose(problem: Problem, config: Config) -> Decision:
    """The fastest decision of a config that fits, else the one that is nearest to fitting."""
    arcs = _arcs(problem, config, STEP)
    path = _fastest(problem, config, arcs, STEP)
    if path is None:
        path = best_path(np.maximum, arcs, lambda arc: arc.costs.beyond)
    return _decision(problem, config, path)


def _fastest(
    problem: Problem, config: Config, arcs: Layers, objective: Objective
) -> StagePath | None:
    return fastest_path(arcs, objective.weights(problem, config), objective.floor(problem, config))


def _decision(problem: Problem, config: Config, path: StagePath) -> Decision:
    """A path's cuts and groups, with the blocks that must keep less."""
    ranks = ranks_of(problem, config)
    groups = dict(zip(ranks, path.groups, strict=True))
    kept = [kept_less(problem, arc, taken) for arc, taken in path.ranges]
    return Decision(
        config,
        path.cuts,
        tuple(blocks.again for blocks in kept),
        () if config.turns else tuple(groups[rank] for rank in range(config.pp)),
        tuple(blocks.offload for blocks in kept),
    )


def kept_less(problem: Problem, arc: Arc, taken: tuple[int, int]) -> KeptLess:
    """The blocks that keep less where an arc has a range of units."""
    return chosen(problem, *taken, arc.costs.sets, int(arc.costs.recomputed[taken]))


def costing(problem: Problem, config: Config, objective: Objective) -> Callable[..., RangeCosts]:
    """The costs of ranges of units in a place: of all ranges, or for the first and the last stage
    only of those that it may hold. Each place is priced once."""
    profile = profile_of(problem, config.dp, config.micro_batches)
    assert profile is not None, "a config has a profile"
    ranges, numbers = tables(problem, profile), compositions(problem).number
    units = np.arange(problem.units + 1)
    empty = units[:, None] >= units[None, :]

    @cache
    def of(first: bool, last: bool) -> CostsAt:
        ranges_of = _ranges(first, last)
        return objective.pricing(problem, config, ranges.rectangle(ranges_of), numbers[ranges_of])

    @cache
    def priced(place: StagePlace, first: bool = False, last: bool = False) -> RangeCosts:
        held_ranges = _ranges(first, last)
        costs = of(first, last)(place)
        beyond = memory.excess(costs.peaks, place.room)
        misfit = (beyond > 0) | empty[held_ranges]

        def among_all(values: NDArray[Any], elsewhere: float) -> NDArray[Any]:
            matrix = np.full(empty.shape, elsewhere, values.dtype)
            matrix[held_ranges] = values
            return matrix

        return RangeCosts(
            seconds=among_all(np.where(misfit, np.inf, costs.seconds.whole), np.inf),
            periods=among_all(np.where(misfit, np.inf, costs.seconds.period), np.inf),
            exposed=among_all(costs.seconds.exposed, np.inf),
            beyond=among_all(np.where(empty[held_ranges], np.inf, beyond), np.inf),
            recomputed=among_all(costs.recomputed, 0),
            sets=keeping_less.sets_of(problem, config, place),
        )

    return priced


def _arcs(problem: Problem, config: Config, objective: Objective) -> Layers:
    """All arcs of a config's stages."""
    priced = costing(problem, config, objective)
    held, steps = in_flights(problem, config), _steps(problem, config)
    between = waitings(problem, config)
    turns = config.turns or (1,) * len(held)

    def arc(stage: int, step: _Step) -> Arc:
        source, target, group, earlier = step
        place = place_of(
            *(problem, config, held[stage], group, earlier, turns[stage]), waiting=between[stage]
        )
        return Arc(source, target, group, priced(place, stage == 0, stage == len(held) - 1))

    return [[arc(stage, step) for step in taken] for stage, taken in enumerate(steps)]


def _ranges(first: bool, last: bool) -> Ranges:
    """The ranges of units that a stage may hold: the first begins with unit 0, the last ends with
    the last unit."""
    return slice(0, 1 if first else None), slice(-1 if last else None, None)


_Step = tuple[GroupsUsed, GroupsUsed, int, int | None]
"""From a state to the next one, the group that takes the stage, and the one before it."""


def _steps(problem: Problem, config: Config) -> list[list[_Step]]:
    """For each stage, all steps that any order of groups takes there."""
    known = classes(problem, config)
    if len(known) == 1:
        ranks = ranks_of(problem, config)
        states = [GroupsUsed((stage,), 0) for stage in range(len(ranks) + 1)]
        earlier = [None, *ranks]
        return [
            [(states[stage], states[stage + 1], rank, earlier[stage])]
            for stage, rank in enumerate(ranks)
        ]
    layers: list[list[_Step]] = []
    reached = [GroupsUsed((0,) * len(known), None)]
    for _ in range(config.pp):
        layers.append([step for state in reached for step in _further(known, state)])
        reached = list(dict.fromkeys(target for _, target, _, _ in layers[-1]))
    return layers


def _further(known: Classes, state: GroupsUsed) -> Iterator[_Step]:
    """The steps from a state: one to each class that has a group left."""
    used, last = state
    earlier = None if last is None else known[last][used[last] - 1]
    for kind, groups in enumerate(known):
        if used[kind] < len(groups):
            taken = (*used[:kind], used[kind] + 1, *used[kind + 1 :])
            yield state, GroupsUsed(taken, kind), groups[used[kind]], earlier
