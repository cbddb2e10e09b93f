"""The best plan over all tensor-parallel degrees.

    1  cost      candidate_at      each degree's seconds, and a lower bound of its steps
    2  search    searched          in the order of the bounds: a degree's bytes, then an Answer
    3  write     plan_that_fits    the fastest Answer as a Plan with exact bytes
    4  refine    fastest_by_path   other meshes written too, if the estimate was wrong

Four values pass between them:

    incumbents               the steps of the best two meshes of the degrees that were searched; a
                             degree that is slower than both is not searched (`Outdone`)
    Profiled.repeats_equal   whether repeated blocks were seen to make tensors that look the same;
                             if not, the dry run of 3 runs each of them
    Estimate.spare           bytes of the fullest device that the estimate leaves free
    Problem.beyond           by schedule and ZeRO stage, bytes that the search may not use: if a
                             plan's exact bytes do not fit, 3 adds the excess, or `spare` plus one
                             if that is more, and searches again
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.frontend import user_lines
from autopipe.ir.graph import REGION_OP
from autopipe.ir.opaque_ops import OPAQUE
from autopipe.joint.joint_graph import CannotSplit
from autopipe.planfile.contents import Plan
from autopipe.planners.costs.tp_degrees import degrees
from autopipe.planners.driver.candidate import Candidate, candidate_at
from autopipe.planners.driver.refine import fastest_by_path, plan_that_fits, recomputing_less
from autopipe.planners.driver.request import Job
from autopipe.planners.model.problem import Config
from autopipe.planners.search.best import (
    Answer,
    Outdone,
    best_two,
    out_of_the_best_two,
    steps_of,
    with_other_degrees,
)
from autopipe.planners.search.configs import TooFewUnits
from autopipe.planners.search.dynamic import fastest
from autopipe.planners.search.reasons import NothingFits
from autopipe.planners.search.relax import Help
from autopipe.tracing.traced import Trace
from autopipe.util.progress import phase
from autopipe.util.stopwatch import Stopwatch

Refusals = dict[int, InfeasibleError]
"""By tensor-parallel degree, why there is no answer."""


@dataclass(frozen=True, eq=False)
class Searched:
    """What the planner found at each tensor-parallel degree.

    Attributes:
        candidates: the degrees that were searched or left out by their bounds.
        answers: the best decision of each degree at which something fits.
        refusals: of the other degrees; `Outdone` where a bound was enough.
    """

    candidates: Mapping[int, Candidate]
    answers: Mapping[int, Answer]
    refusals: Refusals

    @property
    def best(self) -> int:
        """The degree with the fastest answer; of equal ones the lowest."""
        return min(self.answers, key=lambda tp: (self.answers[tp].estimate.step_seconds, tp))

    def best_answer(self) -> Answer:
        """The fastest answer, with the best of each other degree among its alternatives."""
        best = self.best
        others: dict[int, Answer | Outdone] = {
            tp: error for tp, error in self.refusals.items() if isinstance(error, Outdone)
        }
        others |= {tp: answer for tp, answer in self.answers.items() if tp != best}
        return with_other_degrees(self.answers[best], dict(sorted(others.items())))

    def without(self, tp: int) -> Searched:
        """The search of all degrees but one."""
        return searched({other: c for other, c in self.candidates.items() if other != tp})

    def outdone(self, tp: int) -> bool:
        """Whether no plan of a degree can take less than the best answer."""
        bound = self.candidates[tp].least_step()[1] if tp in self.candidates else math.inf
        return tp != self.best and bound >= self.answers[self.best].estimate.step_seconds


class Chosen(NamedTuple):
    """A plan, and the search that has found it."""

    plan: Plan
    search: Searched


def best_of_engines(job: Job, watch: Stopwatch) -> Chosen:
    """The best plan with compiled stages or without, where the user leaves it open.

    Stages are compiled on GPUs.

    Raises:
        InfeasibleError: no plan fits; of the refusals the one with the least shortfall.
        AutopipeError: compiled stages are asked for, and the model has an op that cannot be.
    """
    if job.request.compiled is not None:
        try:
            return best_plan(job.on_engine(compiled=job.request.compiled), watch)
        except CannotSplit as error:
            raise AutopipeError(
                f"compiled stages were asked for, and {_not_compiled(job) or _with_line(error)}",
                hint="leave out --compile",
            ) from error
    if not _may_compile(job):
        return best_plan(job.on_engine(compiled=False), watch)
    try:
        return best_plan(job.on_engine(compiled=True), watch)
    except CannotSplit:
        return best_plan(job.on_engine(compiled=False), watch)


def _may_compile(job: Job) -> bool:
    """Whether all devices are GPUs, and all of the model can be compiled."""
    opaque = any(node.op in OPAQUE for node in job.traced.graph.nodes)
    return job.cluster.all_gpus and not opaque


def _not_compiled(job: Job) -> str:
    """The first op of the model that no compiler looks into, and where it stands; "": none."""
    graph = job.traced.graph
    node = next((node for node in graph.nodes if node.op in OPAQUE), None)
    if node is None:
        return ""
    if node.op == REGION_OP:
        region = graph.called(node).region
        return f"{region.name} is not compiled, since it runs as it is: {region.why}"
    place = f"{node.place}: " if node.place else ""
    return f"{place}no compiler looks into {node.op}"


def _with_line(error: CannotSplit) -> str:
    """What went wrong, behind the user's line where it did: one of an op's own backward."""
    place = user_lines.of_error(error.__cause__) if error.__cause__ else ""
    return f"{place} is not compiled: {error}" if place else str(error)


def best_plan(job: Job, watch: Stopwatch, rival: Chosen | None = None) -> Chosen:
    """The best plan of all tensor-parallel degrees; of equal ones the lowest degree's.

    Args:
        rival: of a variant of the model that is faster in each config, but may need more memory: a
            degree that is outdone there is outdone here too, and no plan is written that the
            estimate does not find faster.

    Raises:
        Outdone: there is a rival, and by the estimate no plan is faster.
        InfeasibleError: no plan fits; of the refusals the one with the least shortfall.
    """
    try:
        return _fitting_plan(_first_that_answer(job, watch, rival))
    except InfeasibleError:
        asked = job.constraints
        free = (asked.dp, asked.micro_batches, asked.micro_batch_size) == (None,) * 3
        if rival is not None or job.beyond or free:
            raise
    return best_plan(replace(job, beyond=True), watch)  # which says what would fit


def _fitting_plan(search: Searched) -> Chosen:
    """The plan of the fastest answer whose exact bytes fit.

    Raises:
        InfeasibleError: there is none.
    """
    while True:
        answer, candidate = search.best_answer(), search.candidates[search.best]
        try:
            plan = recomputing_less(plan_that_fits(candidate, answer), answer, candidate)
            break
        except InfeasibleError:
            # A degree that this one has outdone may be the best without it.
            search = search.without(candidate.tp)
            if not search.answers:
                raise
    return Chosen(fastest_by_path(plan, answer, search.candidates), search)


def _first_that_answer(job: Job, watch: Stopwatch, rival: Chosen | None) -> Searched:
    """The search of the preferred degrees, and of the others if nothing fits at those.

    Raises:
        Outdone: there is a rival, and nothing is faster.
        InfeasibleError: nothing fits at any.
    """
    candidates: dict[int, Candidate] = {}
    refusals: Refusals = {}
    for preferred in degrees(job.cluster, job.constraints.tp, job.traced.graph):
        remaining = [tp for tp in preferred if rival is None or not rival.search.outdone(tp)]
        costed, errors = _costed(job, remaining, watch)
        candidates |= costed
        if rival is not None and not _may_win(candidates, rival.plan.planner.step_seconds):
            if rival.search.best in preferred:
                raise Outdone(None, rival.plan.planner.step_seconds, None)
            continue
        search = searched(candidates)
        refusals |= errors | search.refusals
        if search.answers:
            return Searched(candidates, search.answers, refusals)
    raise _nothing_fits(job, refusals, watch)


def _costed(
    job: Job, tps: Sequence[int], watch: Stopwatch
) -> tuple[dict[int, Candidate], Refusals]:
    """The candidates of some degrees, and the refusals of the others."""
    candidates: dict[int, Candidate] = {}
    refusals: Refusals = {}
    with phase("timing each tensor-parallel degree", of=len(tps)) as done:
        for tp in tps:
            try:
                candidates[tp] = candidate_at(job, tp, watch)
            except InfeasibleError as error:
                refusals[tp] = error
            done()
    return candidates, refusals


def _may_win(candidates: Mapping[int, Candidate], step: float) -> bool:
    """Whether something that fits takes less than `step` seconds.

    Nothing else is searched. What is found is remembered: a whole search repeats nothing of it.
    """
    answers = searched(candidates, (step, step)).answers.values()
    return any(answer.estimate.step_seconds < step for answer in answers)


def searched(candidates: Mapping[int, Candidate], known: Sequence[float] = ()) -> Searched:
    """The answer of each degree, or its refusal.

    The degree of the lowest bound is searched first: the steps it finds are incumbents to the
    others.

    Args:
        known: seconds of steps of other models' meshes, which are incumbents to all.
    """
    answers: dict[int, Answer] = {}
    refusals: Refusals = {}
    least: dict[int, tuple[Config, float]] = {}
    for tp, candidate in candidates.items():
        try:
            least[tp] = candidate.least_step()
        except InfeasibleError as error:
            refusals[tp] = error
    order = sorted(least, key=lambda tp: (least[tp][1], tp))
    for tp in order:
        incumbents = best_two((*known, *steps_of(answers.values())))
        config, seconds = least[tp]
        # Degree 1 is always searched: its data parallelism alone is among the alternatives.
        outdone = tp > 1 and out_of_the_best_two(seconds, incumbents)
        if outdone:
            refusals[tp] = Outdone(config, seconds, None)
            continue
        try:
            problem = candidates[tp].counted(check=tp == order[0]).problem
            answers[tp] = candidates[tp].search(problem, incumbents)
        except InfeasibleError as error:
            refusals[tp] = error
    return Searched(candidates, answers, refusals)


def _nothing_fits(
    job: Job, refusals: Mapping[int, InfeasibleError], watch: Stopwatch
) -> InfeasibleError:
    """The refusal to raise.

    It is that of the degree which lacks the least memory, together with the other degrees' words on
    devices and a degree at which a plan fits. If no degree lacks memory, the constraints contradict
    each other: then it is that of the lowest degree.
    """
    known = [refusals[tp] for tp in sorted(refusals)]
    wanting = [error for error in known if error.shortfall]
    nearest = min(wanting or known[:1], key=lambda error: error.shortfall)
    if isinstance(nearest, TooFewUnits):
        return _with_what_is_never_cut(nearest, job.traced.trace)
    if not isinstance(nearest, NothingFits):
        return nearest
    others = [e for e in wanting if isinstance(e, NothingFits) and e is not nearest]
    return nearest.beside(others, _help_of_other_degrees(job, watch))


def _with_what_is_never_cut(refusal: TooFewUnits, trace: Trace) -> InfeasibleError:
    """The refusal, with the call that runs as it is and has most parameters, and its line."""
    trained = {name for name, state in trace.graph.states.items() if state.trainable}
    counts = {region: len(trained.intersection(region.states)) for region in trace.regions}
    most = max(counts, key=lambda region: counts[region], default=None)
    if most is None or counts[most] < 2:
        return refusal
    return InfeasibleError(
        f"{refusal.message}, and none of them cuts {most.name}, which runs as it is with "
        f"{counts[most]} of the {len(trained)} parameters ({most.why})",
        hint=f"{refusal.hint}; or move what no graph has into a smaller method or module of its "
        "own: it alone runs as it is then",
    )


def _help_of_other_degrees(job: Job, watch: Stopwatch) -> list[Help]:
    """If a degree was asked for, a sentence with the lowest other degree at which a plan fits."""
    asked = job.constraints.tp
    if asked is None or "tp" in job.constraints.ruled_out:
        return []
    for tp in degrees(job.cluster, None, job.traced.graph)[0]:
        with suppress(AutopipeError):  # it may not divide the batch, or the model
            if tp != asked and fastest(candidate_at(job, tp, watch).counted().problem) is not None:
                return [Help(f"tp={tp}")]
    return []
