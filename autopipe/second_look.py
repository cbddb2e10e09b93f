"""Where the estimate is wrong: other meshes are written down too, and the fastest is taken.

    search      estimate of every mesh ----> the least, A, is written down ----> path of A
                                                                                   |
    second look     paths of B, C ... that are estimated below the path of A <-----+ if it is longer
                                                                                     than estimated

The estimate leaves out what seldom matters: that tensors which skip stages wait for one another on
a slow link, or that a later stage's gradients are still being summed when stage 0 is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

from autopipe.candidate import Candidate
from autopipe.degrees import as_first
from autopipe.draft import Draft
from autopipe.errors import InfeasibleError
from autopipe.numbers import percent, seconds
from autopipe.plan import Alternative, Plan
from autopipe.planners import Answer, Planner, reasons
from autopipe.planners.answer import Scored, bounds
from autopipe.problem import Problem

TRUSTED = 1.01
"""How many times as long as estimated a step may be, by its longest path, for the estimate to be
believed."""

MOST_LOOKS = 10
"""Other meshes of which the longest path is asked for where it is not."""

Mesh = tuple[int, int, int]
"""Stages, replicas, tensor-parallel parts."""


Write = Callable[[Planner, Problem, Draft, Answer], Plan]
"""Writes a planner's answer down, with its longest path."""


def second_look(
    plan: Plan,
    answer: Answer,
    made: Mapping[int, Candidate],
    planner: Planner,
    write: Write,
) -> Plan:
    """The plan, or the one that is faster by its longest path, of those that were looked at.

    Args:
        plan, answer: what the search has found, written down.
        made: of each tensor-parallel degree.
    """
    if plan.prediction.step_seconds <= TRUSTED * answer.estimate.step_seconds:
        return plan
    looked = {_mesh_of(plan): plan}
    least = plan.prediction.step_seconds
    for pp, dp, tp in islice(_others(plan, answer, made), MOST_LOOKS):
        problem, draft = made[tp].whole()
        alone = partial(planner, mesh=(pp, dp))
        with as_first(tp), suppress(InfeasibleError):
            own = alone(problem, (least, least))
            if own.estimate.step_seconds < least:
                best = Scored(own.decision, own.estimate)
                own = replace(own, binding=reasons.binding(problem, best, None))
                looked[pp, dp, tp] = write(alone, problem, draft, own)
                least = min(least, looked[pp, dp, tp].prediction.step_seconds)
    return _fastest_of(looked, plan.planner.bound_seconds, answer.alternatives)


def _mesh_of(of: Plan | Alternative) -> Mesh:
    mesh = of.mesh if isinstance(of, Plan) else of
    return mesh.pp, mesh.dp, mesh.tp


def _others(plan: Plan, answer: Answer, made: Mapping[int, Candidate]) -> Iterator[Mesh]:
    """All meshes that may take less than the plan does: by estimates, as far as there are any, and
    then by bounds."""
    steps = {_mesh_of(a): a.step_seconds for a in answer.alternatives if a.step_seconds is not None}
    for tp, candidate in made.items():
        with suppress(InfeasibleError):  # of this degree there is none
            every = bounds(candidate.timed)
            for frame, least in sorted(every.items(), key=lambda pair: pair[1]):
                steps.setdefault((frame.pp, frame.dp, tp), least)
    for mesh, step in steps.items():
        if step < plan.prediction.step_seconds and mesh != _mesh_of(plan) and mesh[2] in made:
            yield mesh


def _fastest_of(
    looked: Mapping[Mesh, Plan], bound: float, estimated: Sequence[Alternative]
) -> Plan:
    """The fastest by its longest path; the others that were looked at beside it, by theirs, and of
    the rest those that even the estimate has behind it."""
    first, *others = sorted(looked.values(), key=lambda plan: plan.prediction.step_seconds)
    step = first.prediction.step_seconds
    beside = [
        Alternative(
            *_mesh_of(other),
            micro_batches=other.batch.micro_batches,
            schedule=other.schedule,
            step_seconds=other.prediction.step_seconds,
            why=f"{percent(other.prediction.step_seconds / step - 1)} slower by its longest path, "
            f"though the estimate is {seconds(other.planner.step_seconds)}",
            zero=other.zero,
        )
        for other in others
    ]
    for other in estimated:
        if other.step_seconds is not None and _mesh_of(other) not in looked:
            _, _, cause = other.why.partition(" slower")
            why = f"{percent(other.step_seconds / step - 1)} slower{cause}"
            beside += [replace(other, why=why)] if other.step_seconds > step else []
    next_best = beside[0] if beside else None
    note = replace(
        first.planner, bound_seconds=bound, next_best=next_best, others=tuple(beside[1:])
    )
    return replace(first, planner=note)
