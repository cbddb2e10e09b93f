"""Turn a planner's choice in each config into its answer: the best decision, and the next best.

A planner proper is a `Choice`: for a config it returns the fastest decision that fits or, if none
fits, one as near to fitting as it can find. Everything else is the same for all planners and is in
this file. Configs are tried in the order of their bounds (`planners.search.bound`). Once two meshes
are faster than the next bound, no remaining config can be the best or the second best mesh, so none
is tried. The best step is then a proved bound for all plans that the configs allow. Configs in
which nothing can fit (`planners.search.room_bound`) are not tried either, unless nothing fits
anywhere and the nearest plan is wanted. Plain data parallelism is always tried: people know it, and
ask about it.

A model has a problem for each tensor-parallel degree. The steps found for one degree are
*incumbents* for the next. If nothing fits that can be among the best two of all, `Outdone` is
raised instead of an answer with its reasons.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopipe.errors import InfeasibleError
from autopipe.planfile.parts import Alternative
from autopipe.planners.model.estimate import Estimate, PipelineDegrees, Scored, estimate
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.search import reasons
from autopipe.planners.search.alternatives import alternative, alternatives_of, bounded, by_mesh
from autopipe.planners.search.bound import bounds
from autopipe.planners.search.descent import TOLERANCE
from autopipe.planners.search.relax import Relaxations, limitless
from autopipe.planners.search.room_bound import ruled_out
from autopipe.util.numbers import VISIBLE
from autopipe.util.progress import phase

Choice = Callable[[Problem, Config], Decision]
Fitting = Callable[[Problem, Config], Decision | None]
"""A choice, or one that may say that nothing fits."""

Known = dict[tuple[Config, int | None], Scored | None]
"""What a choice found in each config, and with how many bytes that it might not use; None: as if
devices held everything. It holds for a problem and all that differ in `Problem.beyond` alone."""

Look = Callable[[Config], Scored | None]
"""What a choice finds in a config; None: nothing fits."""

MOST_TRIED = 24
"""Configs that are searched a second time, as if memory had no limit, to say what it costs."""


@dataclass(frozen=True)
class Answer:
    """What a planner returns.

    Args:
        decision: the best decision found. Ties go to fewer stages, then more replicas, fewer
            micro-batches, less ZeRO, then `1f1b`.
        estimate: its estimate.
        bound_seconds: by the estimate no plan without turns, under the same constraints, has a
            shorter step.
        binding: a sentence on what keeps the step from being faster.
        alternatives: the best decision of each other mesh: those that fit, fastest first; then
            those known by their bound only; then those that do not fit, the nearest first.
        plain: the best decision of data parallelism alone, on most devices, if that is another
            mesh.
    """

    decision: Decision
    estimate: Estimate
    bound_seconds: float
    binding: str
    alternatives: tuple[Alternative, ...]
    plain: Scored | None = None


class Outdone(InfeasibleError):
    """Raised where no plan of a problem fits and can be among the best two that are known.

    Attributes:
        config, bound_seconds: the untried config with the lowest bound, and that bound; None: all
            were tried.
        plain: as in `Answer`.
    """

    def __init__(self, config: Config | None, bound_seconds: float, plain: Scored | None) -> None:
        super().__init__("no plan fits and is as fast as those known")
        self.config, self.bound_seconds, self.plain = config, bound_seconds, plain


def best_answer(
    problem: Problem,
    choice: Choice,
    *,
    incumbents: Sequence[float] = (),
    mesh: PipelineDegrees | None = None,
    fitting: Fitting | None = None,
    heuristic: str | None = None,
    thorough: bool = False,
    known: Known | None = None,
) -> Answer:
    """Choose in every config that may win and return the best, with its reasons.

    Args:
        choice: see the module.
        incumbents: seconds of the steps found for other problems' meshes. Decisions slower than two
            of them may be left out; reasons are given only if none of them is faster.
        mesh: the one mesh to try; None: all.
        fitting: a quicker choice that returns only decisions that fit, if there is one.
        heuristic: the planner's name if `choice` is not optimal in every config; an optimal one
            makes the answer its own bound.
        thorough: whether to try configs that are known to have too little room.
        known: what earlier searches found; what this one finds is added.

    Raises:
        Outdone: there are incumbents, and nothing that fits can be as fast.
        InfeasibleError: the constraints contradict each other or the mesh, or no decision fits.
    """
    # In tie order: lower bounds that hold whatever memory there is.
    anywhere = {config: s for config, s in bounds(problem).items() if mesh in (None, config[:2])}
    if not anywhere and mesh is not None:
        raise InfeasibleError(f"pp={mesh[0]} dp={mesh[1]} is none of the meshes to look at")
    known = {} if known is None else known
    look = _look(problem, choice, known)
    looked = _tried(problem, look, anywhere, 2, incumbents, thorough)
    # Data parallelism alone, on most devices, is tried even where it cannot win.
    alone = (1, max((config.dp for config in anywhere if config.pp == 1), default=0))
    if problem.tp == 1 or not incumbents:
        rest = {f: anywhere[f] for f in anywhere if f[:2] == alone and f not in looked.scored}
        looked = looked.and_of(_tried(problem, look, rest, 1, (), thorough))
    scored = looked.scored
    least = {**anywhere, **looked.too_slow}  # lower bounds for plans that fit, in the same order
    best = _best(least, scored)
    untried = [config for config in least if config not in scored and config not in looked.too_full]
    next_up = min(untried, key=lambda config: least[config], default=None)
    beyond = math.inf if next_up is None else least[next_up]
    plain = by_mesh(scored).get(alone)
    if best is None and incumbents:
        raise Outdone(next_up, beyond, plain)
    if best is None:
        near = _near_to_fitting(problem, look, looked)
        in_order = sorted(least, key=lambda config: least[config])
        every = [near[config] for config in in_order if config in near]
        changes = Relaxations(problem, lambda changed: fastest(changed, fitting or choice))
        raise reasons.nothing_fits(problem, every, changes, heuristic)
    for config in _nearest_of_rest(looked, untried):
        scored[config] = _found(look, config)
    step = best.estimate.step_seconds
    wins = step <= min(incumbents, default=math.inf)
    roomy = _without_limit(problem, choice, known, anywhere, step) if wins else None
    return Answer(
        decision=best.decision,
        estimate=best.estimate,
        bound_seconds=min(step, beyond) if heuristic is None else min(least.values()),
        binding=reasons.binding(problem, best, roomy),
        alternatives=alternatives_of(problem, best, scored, {f: least[f] for f in untried}),
        plain=None if alone == best.mesh else plain,
    )


def steps_of(answers: Iterable[Answer]) -> Iterator[float]:
    """Seconds of the steps of all meshes that problems' answers know to fit."""
    for answer in answers:
        yield answer.estimate.step_seconds
        for other in answer.alternatives:
            if other.step_seconds is not None:
                yield other.step_seconds


def best_two(steps: Iterable[float]) -> tuple[float, ...]:
    """The incumbents of a search: the two shortest steps, or as many as there are."""
    return tuple(sorted(steps)[:2])


def fastest(problem: Problem, fitting: Fitting) -> Scored | None:
    """The best decision alone, without reasons or other meshes; None: nothing fits.

    Raises:
        InfeasibleError: the constraints contradict each other.
    """
    least = bounds(problem)
    return _best(least, _tried(problem, _look(problem, fitting, {}), least, 1).scored)


def _look(problem: Problem, choice: Fitting, known: Known, *, limited: bool = True) -> Look:
    """A function that chooses in a config; what it has found is remembered in `known`."""

    def look(config: Config) -> Scored | None:
        key = config, problem.seen_beyond(config) if limited else None
        if key not in known:
            decision = choice(problem, config)
            known[key] = None if decision is None else _score(problem, decision)
        return known[key]

    return look


def _found(look: Look, config: Config) -> Scored:
    """What a look by a `Choice` finds in a config: a decision, whether or not it fits."""
    found = look(config)
    assert found is not None, "a choice returns a decision that does not fit if there is no other"
    return found


def _best(every: Iterable[Config], scored: Mapping[Config, Scored]) -> Scored | None:
    """The fastest decision that fits; of equal ones the first, since configs are in tie order."""
    fitting = [scored[f] for f in every if f in scored and scored[f].estimate.fits]
    least = min((found.estimate.step_seconds for found in fitting), default=0.0)
    return next((s for s in fitting if s.estimate.step_seconds <= least * (1 + TOLERANCE)), None)


class _Looked(NamedTuple):
    """The configs that were looked at.

    Args:
        scored: those that were searched.
        too_full: those ruled out by the memory bound, with the number of units that fit on no
            stage.
        too_slow: those in which what fits takes longer than these seconds.
    """

    scored: dict[Config, Scored]
    too_full: dict[Config, int]
    too_slow: dict[Config, float]

    def and_of(self, other: _Looked) -> _Looked:
        """The configs of two looks together; of one in both, what the other look has found."""
        scored, too_full = self.scored | other.scored, self.too_full | other.too_full
        return _Looked(scored, too_full, self.too_slow | other.too_slow)


def _tried(
    problem: Problem,
    look: Look,
    least: Mapping[Config, float],
    meshes: int,
    incumbents: Sequence[float] = (),
    thorough: bool = False,
) -> _Looked:
    """Try configs by ascending bound, until no further one can change the best meshes."""
    scored: dict[Config, Scored] = {}
    too_full: dict[Config, int] = {}
    too_slow: dict[Config, float] = {}
    quickest: dict[PipelineDegrees, float] = {}
    # It ends when none that is left can win: no share of all tells how much longer it takes.
    with phase(f"searching up to {len(least):,} meshes and schedules") as done:
        for config in sorted(least, key=lambda config: least[config]):
            slowest = _slowest((*incumbents, *quickest.values()), meshes)
            longest = slowest * (1 + TOLERANCE)
            if least[config] > longest:
                break
            done()
            if not thorough and (out := ruled_out(problem, config, slowest)):
                if out.ever:
                    too_full[config] = out.units
                else:
                    too_slow[config] = longest
                continue
            found = look(config)
            if found is None:
                continue
            scored[config] = found
            if found.estimate.fits:
                step = found.estimate.step_seconds
                quickest[found.mesh] = min(step, quickest.get(found.mesh, math.inf))
    return _Looked(scored, too_full, too_slow)


def _slowest(known: Iterable[float], meshes: int) -> float:
    """Seconds of the slowest of the best `meshes` meshes; infinite if fewer are known."""
    return next(iter(sorted(known)[meshes - 1 : meshes]), math.inf)


def out_of_the_best_two(seconds: float, incumbents: Sequence[float]) -> bool:
    """Whether no mesh whose steps take at least so long can be the best or the second best."""
    return seconds > _slowest(incumbents, 2) * (1 + TOLERANCE)


def _near_to_fitting(problem: Problem, look: Look, looked: _Looked) -> Mapping[Config, Scored]:
    """If nothing fits: the configs nearest to fitting, and others that were searched.

    For DeepSeek-V3 on 128 H100, with 4 tensor-parallel ranks, none of 7186 configs has room. A
    config is not searched if it would not fit even on devices larger by what the nearest lacks.
    """
    near = dict(looked.scored)
    lacking = min((scored.estimate.overflow for scored in near.values()), default=None)
    for config in sorted(looked.too_full, key=lambda config: looked.too_full[config]):
        if lacking is None or not ruled_out(problem, config, more=lacking):
            near[config] = scored = _found(look, config)
            lacks = scored.estimate.overflow
            lacking = lacks if lacking is None else min(lacks, lacking)
    return near


def _nearest_of_rest(looked: _Looked, untried: Iterable[Config]) -> Iterable[Config]:
    """For each mesh without another result, the config that is nearest to having room."""
    listed = {config[:2] for config in (*looked.scored, *untried)}
    nearest: dict[PipelineDegrees, Config] = {}
    for config in sorted(looked.too_full, key=lambda config: looked.too_full[config]):
        if config[:2] not in listed:
            nearest.setdefault(config[:2], config)
    return nearest.values()


def _without_limit(
    problem: Problem,
    choice: Choice,
    known: Known,
    least: Mapping[Config, float],
    step: float,
) -> Scored | None:
    """The best decision if devices held everything, if that is visibly faster than `step`."""
    look, best = _look(limitless(problem), choice, known, limited=False), None
    order = sorted(least, key=lambda config: least[config])
    for config in order[:MOST_TRIED]:
        if least[config] >= step * (1 - VISIBLE):
            break
        scored = _found(look, config)
        if scored.estimate.step_seconds < step * (1 - VISIBLE):
            best, step = scored, scored.estimate.step_seconds
    return best


def with_other_degrees(answer: Answer, others: Mapping[int, Answer | Outdone]) -> Answer:
    """A degree's answer with the best of other tensor-parallel degrees among its alternatives.

    Args:
        others: by their degree; none is faster.
    """
    best = Scored(answer.decision, answer.estimate)
    incumbents = []
    for tp, other in others.items():
        if isinstance(other, Answer):
            incumbents.append(alternative(tp, best, Scored(other.decision, other.estimate)))
        elif other.config is not None:
            incumbents.append(bounded(tp, best, other.config, other.bound_seconds))
    if 1 in others and (plain := others[1].plain) is not None:
        incumbents.append(alternative(1, best, plain))
    known = (*incumbents, *answer.alternatives)
    return replace(
        answer,
        bound_seconds=min([answer.bound_seconds, *(o.bound_seconds for o in others.values())]),
        alternatives=tuple(
            sorted(known, key=lambda a: math.inf if a.step_seconds is None else a.step_seconds)
        ),
    )


def _score(problem: Problem, decision: Decision) -> Scored:
    return Scored(decision, estimate(problem, decision))
