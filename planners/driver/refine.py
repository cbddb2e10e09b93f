"""Correct the search's choice where its estimate was wrong, by exact bytes and longest paths.

    plan_that_fits    exact bytes of the plan do not fit  ->  search again, with less room, by the
                                                              excess or more
    recomputing_less  a rank of several stages has room left  ->  recompute fewer blocks
    fastest_by_path   the longest path of the plan A is longer than estimated  ->  write the meshes
                      B, C ... that are estimated below it, and take the one with the shortest path

The estimate leaves out effects that seldom matter: tensors that skip stages and wait for one
another on a slow link, or a later stage's gradients that are still summed when stage 0 is ready.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice

from autopipe.errors import InfeasibleError
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Alternative
from autopipe.planners.costs.plan_memory import Overflow
from autopipe.planners.driver.candidate import Candidate
from autopipe.planners.driver.write_plan import write_plan
from autopipe.planners.model.estimate import PipelineDegrees, Scored, estimate
from autopipe.planners.search import reasons
from autopipe.planners.search.best import Answer
from autopipe.planners.search.bound import bounds
from autopipe.planners.search.spare_room import filled
from autopipe.util.numbers import seconds

TRUSTED = 1.01
"""How many times as long as estimated a step may be, by its longest path, for the estimate to be
believed."""

MOST_WRITTEN = 10
"""Other meshes that are written down to compare their longest paths."""

MeshDegrees = tuple[int, int, int]
"""Pipeline ranks, replicas, tensor-parallel ranks."""


def plan_that_fits(
    candidate: Candidate, answer: Answer, mesh: PipelineDegrees | None = None
) -> Plan:
    """The answer as a plan; where its exact bytes do not fit, the next answer that does.

    Args:
        mesh: the mesh in which to search again; None: all.

    Raises:
        InfeasibleError: no plan fits.
    """
    problem = candidate.counted().problem
    while True:
        try:
            with candidate.watch("rehearsed"), candidate.on_first_rank():
                return write_plan(candidate, answer)
        except Overflow as overflow:
            # So much less that this very answer is none: else it would come again, byte by byte.
            less = max(overflow.shortfall, answer.estimate.spare + 1)
            config = answer.decision.config
            way = config.schedule, config.zero
            beyond = problem.seen_beyond(config) + less
            problem = replace(problem, beyond={**problem.beyond, way: beyond})
            try:
                answer = candidate.search(problem, mesh=mesh)
            except InfeasibleError:
                # Its numbers would be about a limit that the user has not set.
                raise overflow from None


def recomputing_less(plan: Plan, answer: Answer, candidate: Candidate) -> Plan:
    """The plan, or one that recomputes less where a rank of several stages has room left.

    The estimate sees no gain in that, since it takes all stages of a rank for as slow as the
    slowest: the longest path decides.
    """
    problem = candidate.counted().problem
    decision = filled(problem, answer.decision)
    if decision == answer.decision:
        return plan
    with suppress(Overflow), candidate.watch("rehearsed"), candidate.on_first_rank():
        scored = estimate(problem, decision)
        bound = min(answer.bound_seconds, scored.step_seconds)
        fuller = replace(answer, decision=decision, estimate=scored, bound_seconds=bound)
        alternative = write_plan(candidate, fuller)
        if alternative.prediction.step_seconds < plan.prediction.step_seconds:
            return alternative
    return plan


def fastest_by_path(plan: Plan, answer: Answer, candidates: Mapping[int, Candidate]) -> Plan:
    """The plan, or one of another mesh whose longest path is shorter.

    Args:
        plan, answer: the search's answer, and the plan written from it.
        candidates: the candidates by tensor-parallel degree.
    """
    if plan.prediction.step_seconds <= TRUSTED * answer.estimate.step_seconds:
        return plan
    written = {_degrees_of(plan): plan}
    least = plan.prediction.step_seconds
    for pp, dp, tp in islice(_others(plan, answer, candidates), MOST_WRITTEN):
        candidate, mesh = candidates[tp], (pp, dp)
        with suppress(InfeasibleError):
            problem = candidate.counted().problem
            answer_there = candidate.search(problem, (least, least), mesh)
            if answer_there.estimate.step_seconds < least:
                best = Scored(answer_there.decision, answer_there.estimate)
                answer_there = replace(answer_there, binding=reasons.binding(problem, best, None))
                written[pp, dp, tp] = plan_that_fits(candidate, answer_there, mesh)
                least = min(least, written[pp, dp, tp].prediction.step_seconds)
    return fastest_of(written, plan.planner.bound_seconds, answer.alternatives)


def _degrees_of(of: Plan | Alternative) -> MeshDegrees:
    mesh = of.mesh if isinstance(of, Plan) else of
    return mesh.pp, mesh.dp, mesh.tp


def _others(
    plan: Plan, answer: Answer, candidates: Mapping[int, Candidate]
) -> Iterator[MeshDegrees]:
    """Other meshes that may be faster than the plan: first those with an estimate, then those with
    only a bound."""
    steps = {
        _degrees_of(a): a.step_seconds for a in answer.alternatives if a.step_seconds is not None
    }
    for tp, candidate in candidates.items():
        with suppress(InfeasibleError):  # of this degree there is none
            every = bounds(candidate.timed)
            for config, least in sorted(every.items(), key=lambda pair: pair[1]):
                steps.setdefault((config.pp, config.dp, tp), least)
    for mesh, step in steps.items():
        if step < plan.prediction.step_seconds and mesh != _degrees_of(plan):
            if mesh[2] in candidates:
                yield mesh


def fastest_of(
    written: Mapping[MeshDegrees, Plan], bound: float, estimated: Sequence[Alternative]
) -> Plan:
    """The plan with the shortest longest path, and the others as its alternatives.

    Args:
        written: plans by mesh.
        bound: the estimate's lower bound on the seconds of any plan.
        estimated: alternatives that were not written. Those with a faster estimate are left out,
            since their longest paths are not known.
    """
    first, *others = sorted(written.values(), key=lambda plan: plan.prediction.step_seconds)
    step = first.prediction.step_seconds
    alternatives = [
        Alternative(
            *_degrees_of(other),
            micro_batches=other.batch.micro_batches,
            schedule=other.schedule,
            step_seconds=other.prediction.step_seconds,
            slower=other.prediction.step_seconds / step - 1,
            cause="by its longest path, "
            f"though the estimate is {seconds(other.planner.step_seconds)}",
            zero=other.zero,
        )
        for other in others
    ]
    for other in estimated:
        if other.step_seconds is not None and _degrees_of(other) not in written:
            longer = other.step_seconds / step - 1
            alternatives += [replace(other, slower=longer)] if longer > 0 else []
    next_best = alternatives[0] if alternatives else None
    note = replace(
        first.planner, bound_seconds=bound, next_best=next_best, others=tuple(alternatives[1:])
    )
    return replace(first, planner=note)
