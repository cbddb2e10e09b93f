"""From a planner's choice in every frame to its answer: the best one, and what comes next.

A planner proper is a `Choice`: given a frame it returns the fastest decision that fits, or, where
none fits, one that is as near to fitting as it can find. Everything else is the same for all
planners and stands here. Frames are tried in the order of what they take at least, by `bound`,

    step >= of_sum * W + of_largest * W / stages        W: the whole model on the fastest device

and once two meshes are known that take less than the next bound, no frame that is left can be the
best or the second best mesh: those are not tried. What the best one takes is then a proved bound
for all plans that the frames allow. Plain data parallelism is tried in any case: it is what people
know, and ask about. Nor is one tried in which nothing can fit (`autopipe.planners.packing`), unless
nothing fits anywhere and the nearest plan is asked for.

A model has a problem for each tensor-parallel degree. What is known of one counts for the next:
its steps are *rivals*, known meshes like any other. A problem where nothing fits that may be among
the best two is `Outdone`, and nobody asks for its reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from autopipe.errors import InfeasibleError
from autopipe.estimate import Estimate, chunks_of, estimate, weights
from autopipe.numbers import percent
from autopipe.plan import Alternative
from autopipe.planners import reasons
from autopipe.planners.packing import left_over
from autopipe.planners.relax import limitless, would_fit
from autopipe.planners.search import frames
from autopipe.problem import Decision, Frame, Problem
from autopipe.progress import phase
from autopipe.stage_costs import gather_seconds

Choice = Callable[[Problem, Frame], Decision]
Fitting = Callable[[Problem, Frame], Decision | None]
"""A choice, or one that may say that nothing fits."""

TOLERANCE = 1e-9
"""Steps whose seconds differ by less, relatively, tie: the order of a sum must decide nothing."""

MOST_TRIED = 24
"""Frames that are looked at again, as if memory had no limit, to say what it costs."""


@dataclass(frozen=True)
class Answer:
    """What a planner returns.

    Args:
        decision: the best decision it knows. Ties go to fewer stages, then more replicas, fewer
            micro-batches, less ZeRO, then `1f1b`.
        estimate: what that costs.
        bound_seconds: by the estimate no plan under the same constraints takes less for a step.
        binding: a sentence on what keeps the step from being faster.
        alternatives: the best decision of each other mesh: those that fit, fastest first, then
            those of which a bound was enough, then those that do not fit, the nearest first.
        plain: the best of a single stage on most devices, data parallelism alone, where that is
            another mesh.
    """

    decision: Decision
    estimate: Estimate
    bound_seconds: float
    binding: str
    alternatives: tuple[Alternative, ...]
    plain: Scored | None = None


Mesh = tuple[int, int]
"""Stages and replicas."""


class Scored(NamedTuple):
    """A decision and what it costs."""

    decision: Decision
    estimate: Estimate

    @property
    def mesh(self) -> Mesh:
        """Stages and replicas."""
        return self.decision.frame[:2]


class Outdone(InfeasibleError):
    """No plan of a problem fits that may be among the best two that are known.

    Attributes:
        frame, bound_seconds: that of the least bound among those not tried, and the bound; None:
            all were tried.
        plain: as in `Answer`.
    """

    def __init__(self, frame: Frame | None, bound_seconds: float, plain: Scored | None) -> None:
        super().__init__("no plan fits and is as fast as those known")
        self.frame, self.bound_seconds, self.plain = frame, bound_seconds, plain


def best_answer(
    problem: Problem,
    choice: Choice,
    *,
    rivals: Sequence[float] = (),
    mesh: Mesh | None = None,
    fitting: Fitting | None = None,
    heuristic: str | None = None,
    thorough: bool = False,
) -> Answer:
    """Choose in every frame that may win and return the best, with its reasons.

    Args:
        choice: see the module.
        rivals: seconds of steps that other meshes of other problems take. What takes longer than
            two of them may be left out; reasons are told only if none of them is faster.
        mesh: the one to look at; None: all.
        fitting: the same where what does not fit is of no interest, if that is quicker.
        heuristic: the planner's name if `choice` is not optimal in every frame; an optimal one
            makes the answer its own bound.
        thorough: whether to try frames that are known to have too little room.

    Raises:
        Outdone: there are rivals, and nothing fits that may be as fast.
        InfeasibleError: the constraints contradict each other, or no decision fits.
    """
    least = bounds(problem)
    if mesh is not None:
        least = {frame: seconds for frame, seconds in least.items() if frame[:2] == mesh}
    looked = _tried(problem, choice, least, 2, rivals, thorough)
    alone = (1, max((frame.dp for frame in least if frame.pp == 1), default=0))
    if problem.tp == 1 or not rivals:
        rest = {f: least[f] for f in least if f[:2] == alone and f not in looked.scored}
        looked = looked.and_of(_tried(problem, choice, rest, 1, (), thorough))
    scored = looked.scored
    best = _best(least, scored)
    untried = [frame for frame in least if frame not in scored and frame not in looked.too_full]
    next_up = min(untried, key=lambda frame: least[frame], default=None)
    beyond = math.inf if next_up is None else least[next_up]
    plain = _by_mesh(scored).get(alone)
    if best is None and rivals:
        raise Outdone(next_up, beyond, plain)
    if best is None:
        for frame in looked.too_full:
            scored[frame] = _score(problem, choice(problem, frame))
        every = [scored[frame] for frame in sorted(least, key=lambda frame: least[frame])]
        helps = would_fit(problem, lambda changed: fastest(changed, fitting or choice))
        raise reasons.nothing_fits(problem, every, helps, heuristic)
    for frame in _nearest_of_rest(looked, untried):
        scored[frame] = _score(problem, choice(problem, frame))
    step = best.estimate.step_seconds
    wins = step <= min(rivals, default=math.inf)
    roomy = _without_limit(problem, choice, least, step) if wins else None
    return Answer(
        decision=best.decision,
        estimate=best.estimate,
        bound_seconds=min(step, beyond) if heuristic is None else min(least.values()),
        binding=reasons.binding(problem, best, roomy),
        alternatives=_alternatives(problem, best, scored, {f: least[f] for f in untried}),
        plain=None if alone == best.mesh else plain,
    )


@lru_cache(maxsize=16)
def bounds(problem: Problem) -> Mapping[Frame, float]:
    """All frames, those that win ties first, and of each the seconds that its step takes at least.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    return {frame: bound(problem, frame) for frame in frames(problem)}


def rivals_of(answers: Iterable[Answer]) -> tuple[float, ...]:
    """The steps of the best two meshes of other problems' answers, or of as many as there are."""
    steps = [
        step
        for answer in answers
        for step in (
            answer.estimate.step_seconds,
            *(other.step_seconds for other in answer.alternatives),
        )
        if step is not None
    ]
    return tuple(sorted(steps)[:2])


def fastest(problem: Problem, fitting: Fitting) -> Scored | None:
    """The best decision alone, without reasons or other meshes; None: nothing fits.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    least = bounds(problem)
    return _best(least, _tried(problem, fitting, least, 1).scored)


def _best(every: Iterable[Frame], scored: Mapping[Frame, Scored]) -> Scored | None:
    """The fastest that fits; of equals the first, as frames come in the order that decides."""
    fitting = [scored[f] for f in every if f in scored and scored[f].estimate.fits]
    least = min((found.estimate.step_seconds for found in fitting), default=0.0)
    return next((s for s in fitting if s.estimate.step_seconds <= least * (1 + TOLERANCE)), None)


class _Looked(NamedTuple):
    """The frames that were tried, and of those with too little room the units that find none."""

    scored: dict[Frame, Scored]
    too_full: dict[Frame, int]

    def and_of(self, other: _Looked) -> _Looked:
        """Both together."""
        return _Looked(self.scored | other.scored, self.too_full | other.too_full)


def _tried(
    problem: Problem,
    choice: Fitting,
    least: Mapping[Frame, float],
    meshes: int,
    rivals: Sequence[float] = (),
    thorough: bool = False,
) -> _Looked:
    """Frames by their bounds, until none of the so many best meshes can be another."""
    scored: dict[Frame, Scored] = {}
    too_full: dict[Frame, int] = {}
    quickest: dict[Mesh, float] = {}
    with phase("searching meshes and schedules", of=len(least)) as done:
        for frame in sorted(least, key=lambda frame: least[frame]):
            if _outdone(least[frame], (*rivals, *quickest.values()), meshes):
                break
            done()
            if not thorough and (units := left_over(problem, frame)):
                too_full[frame] = units
                continue
            decision = choice(problem, frame)
            if decision is None:
                continue
            found = _score(problem, decision)
            scored[frame] = found
            if found.estimate.fits:
                step = found.estimate.step_seconds
                quickest[found.mesh] = min(step, quickest.get(found.mesh, math.inf))
    return _Looked(scored, too_full)


def _outdone(seconds: float, known: Iterable[float], meshes: int) -> bool:
    """Whether so many meshes are known to take less."""
    best = sorted(known)[meshes - 1 : meshes]
    return bool(best) and seconds > best[0] * (1 + TOLERANCE)


def out_of_the_best_two(seconds: float, rivals: Sequence[float]) -> bool:
    """Whether no mesh whose steps take at least so long can be the best or the second best."""
    return _outdone(seconds, rivals, 2)


def _nearest_of_rest(looked: _Looked, untried: Iterable[Frame]) -> Iterable[Frame]:
    """Of each mesh of which nothing else will be told the frame that has most nearly room."""
    told = {frame[:2] for frame in (*looked.scored, *untried)}
    nearest: dict[Mesh, Frame] = {}
    for frame in sorted(looked.too_full, key=lambda frame: looked.too_full[frame]):
        if frame[:2] not in told:
            nearest.setdefault(frame[:2], frame)
    return nearest.values()


def _without_limit(
    problem: Problem,
    choice: Choice,
    least: Mapping[Frame, float],
    step: float,
) -> Scored | None:
    """The best decision if devices held everything, if that is visibly faster than `step`."""
    roomy, best = limitless(problem), None
    order = sorted(least, key=lambda frame: least[frame])
    for frame in order[:MOST_TRIED]:
        if least[frame] >= step * (1 - reasons.VISIBLE):
            break
        found = _score(roomy, choice(roomy, frame))
        if found.estimate.step_seconds < step * (1 - reasons.VISIBLE):
            best, step = found, found.estimate.step_seconds
    return best


def bound(problem: Problem, frame: Frame) -> float:
    """Seconds of a step with perfect balance, free transfers and a free all-reduce."""
    whole = _whole_seconds(problem, problem.batch // (frame.dp * frame.micro_batches))
    if frame.fully_sharded and problem.machine.alike:
        size = sum(parameter.bytes for parameter in problem.parameters)
        group = problem.machine.groups(frame.dp)[0]
        whole += 3 * float(gather_seconds(size, problem, frame, group))
    of_sum, of_largest = weights(problem, frame)
    stages = frame.pp * chunks_of(problem.constraints, frame.schedule)
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


def beside(answer: Answer, others: Mapping[int, Answer | Outdone]) -> Answer:
    """A degree's answer with the best of other tensor-parallel degrees among its alternatives.

    Args:
        others: by their degree; none is faster.
    """
    best = Scored(answer.decision, answer.estimate)
    rivals = []
    for tp, other in others.items():
        if isinstance(other, Answer):
            rivals.append(alternative(tp, best, Scored(other.decision, other.estimate)))
        elif other.frame is not None:
            rivals.append(_bounded(tp, best, other.frame, other.bound_seconds))
    if 1 in others and (plain := others[1].plain) is not None:
        rivals.append(alternative(1, best, plain))
    known = (*rivals, *answer.alternatives)
    return replace(
        answer,
        bound_seconds=min([answer.bound_seconds, *(o.bound_seconds for o in others.values())]),
        alternatives=tuple(
            sorted(known, key=lambda a: math.inf if a.step_seconds is None else a.step_seconds)
        ),
    )


def _score(problem: Problem, decision: Decision) -> Scored:
    return Scored(decision, estimate(problem, decision))


def _by_mesh(scored: Mapping[Frame, Scored]) -> dict[Mesh, Scored]:
    """The fastest that fits of each mesh; where none does, the one that is nearest to it."""

    def order(found: Scored) -> tuple[float, float]:
        return found.estimate.overflow, found.estimate.step_seconds

    found: dict[Mesh, Scored] = {}
    for one in scored.values():
        known = found.get(one.mesh)
        if known is None or order(one) < order(known):
            found[one.mesh] = one
    return found


def _alternatives(
    problem: Problem,
    best: Scored,
    scored: Mapping[Frame, Scored],
    untried: Mapping[Frame, float],
) -> tuple[Alternative, ...]:
    """All meshes but the best one's. A frame that was not tried may still fit, and be faster than
    those of its mesh that were: then its bound is told."""
    rest = [found for mesh, found in _by_mesh(scored).items() if mesh != best.mesh]
    fitting = {found.mesh: found for found in rest if found.estimate.fits}
    quicker: dict[Mesh, Frame] = {}
    for frame, seconds in untried.items():
        mesh = frame[:2]
        known = fitting[mesh].estimate.step_seconds if mesh in fitting else math.inf
        if mesh != best.mesh and seconds < known:
            if mesh not in quicker or seconds < untried[quicker[mesh]]:
                quicker[mesh] = frame
    exact = [found for mesh, found in fitting.items() if mesh not in quicker]
    steps = sorted(exact, key=lambda found: found.estimate.step_seconds)
    misfits = [f for f in rest if f.mesh not in fitting and f.mesh not in quicker]
    return (
        *(alternative(problem.tp, best, found) for found in steps),
        *(
            _bounded(problem.tp, best, frame, untried[frame])
            for frame in sorted(quicker.values(), key=lambda frame: untried[frame])
        ),
        *(
            alternative(problem.tp, best, found)
            for found in sorted(misfits, key=lambda found: found.estimate.overflow)
        ),
    )


def alternative(tp: int, best: Scored, other: Scored) -> Alternative:
    """A decision beside the best one."""
    frame, found = other.decision.frame, other.estimate
    return Alternative(
        pp=frame.pp,
        dp=frame.dp,
        tp=tp,
        micro_batches=frame.micro_batches,
        schedule=frame.schedule,
        step_seconds=found.step_seconds if found.fits else None,
        why=reasons.slower(best.estimate, found) if found.fits else reasons.misfit(found),
        zero=frame.zero,
    )


def _bounded(tp: int, best: Scored, frame: Frame, least: float) -> Alternative:
    """A mesh that was not tried, as even its bound is too slow."""
    more = percent(least / best.estimate.step_seconds - 1)
    return Alternative(
        pp=frame.pp,
        dp=frame.dp,
        tp=tp,
        micro_batches=frame.micro_batches,
        schedule=frame.schedule,
        step_seconds=None,
        why=f"at least {more} slower, by its bound",
        zero=frame.zero,
    )
