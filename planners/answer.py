"""From a planner's choice in every frame to its answer: the best one, and the reasons for it.

A planner proper is a `Choice`: given a frame it returns the fastest decision that fits, or, where
none fits, one that is as near to fitting as it can find. Everything else is the same for all
planners and stands here: comparing frames by the shared estimate, what binds the best one, what
keeps each other one from being it, and the sentence when nothing fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from autopipe.errors import InfeasibleError
from autopipe.estimate import Estimate, chunks_of, estimate, peak, profile_of, weights
from autopipe.plan import Alternative, Memory
from autopipe.planners.search import Frame, frames, one_of, schedules
from autopipe.problem import Decision, Problem
from autopipe.tables import tables

Choice = Callable[[Problem, Frame], Decision]

TOLERANCE = 1e-9
"""Steps whose seconds differ by less, relatively, tie: the order of a sum must decide nothing."""

UNLIMITED = 2**62
"""Bytes of a device that holds everything."""

VISIBLE = 5e-4
"""The least relative difference that `percent` does not print as nothing."""


@dataclass(frozen=True)
class Answer:
    """What a planner returns.

    Args:
        decision: the best decision it knows. Ties go to fewer stages, then fewer micro-batches,
            then `1f1b`.
        estimate: what that costs.
        bound_seconds: by the estimate no plan under the same constraints takes less for a step.
        binding: a sentence on what keeps the step from being faster.
        alternatives: the best decision of each other frame: those that fit, fastest first, then
            those that do not, the nearest first.
    """

    decision: Decision
    estimate: Estimate
    bound_seconds: float
    binding: str
    alternatives: tuple[Alternative, ...]


class _Scored(NamedTuple):
    decision: Decision
    estimate: Estimate

    @property
    def frame(self) -> Frame:
        return Frame(self.decision.pp, self.decision.dp, self.decision.micro_batches)


def best_answer(problem: Problem, choice: Choice, *, heuristic: str | None = None) -> Answer:
    """Choose in every frame and return the best, with its reasons.

    Args:
        choice: see the module.
        heuristic: the planner's name if `choice` is not optimal in every frame; an optimal one
            makes the answer its own bound.

    Raises:
        InfeasibleError: the constraints contradict each other, or no decision fits.
    """
    scored = [_score(problem, choice(problem, frame)) for frame in frames(problem)]
    fitting = sorted((s for s in scored if s.estimate.fits), key=lambda s: s.estimate.step_seconds)
    if not fitting:
        raise _nothing_fits(problem, scored, heuristic)
    tied = fitting[0].estimate.step_seconds * (1 + TOLERANCE)
    # Frames come in the order in which ties are decided.
    best = next(s for s in scored if s.estimate.fits and s.estimate.step_seconds <= tied)
    misfits = sorted((s for s in scored if not s.estimate.fits), key=lambda s: s.estimate.overflow)
    step = best.estimate.step_seconds
    # Of several stages on a rank no planner tries unequal shares of the device.
    exact = heuristic is None and best.decision.stages == best.decision.pp
    return Answer(
        decision=best.decision,
        estimate=best.estimate,
        bound_seconds=step if exact else min(_bound(problem, s.frame) for s in scored),
        binding=_binding(problem, choice, best),
        alternatives=tuple(
            _alternative(problem, best, other) for other in fitting + misfits if other is not best
        ),
    )


def beside(answer: Answer, others: Mapping[int, Answer]) -> Answer:
    """A degree's answer with the best of other tensor-parallel degrees among its alternatives.

    Args:
        others: by their degree; none is faster.
    """
    step = answer.estimate.step_seconds
    rivals = [
        Alternative(
            pp=other.decision.pp,
            dp=other.decision.dp,
            tp=tp,
            micro_batches=other.decision.micro_batches,
            schedule=other.decision.schedule,
            step_seconds=other.estimate.step_seconds,
            why=_slower(other.estimate.step_seconds, step),
        )
        for tp, other in others.items()
    ]
    known = (*rivals, *answer.alternatives)
    return replace(
        answer,
        bound_seconds=min([answer.bound_seconds, *(o.bound_seconds for o in others.values())]),
        alternatives=tuple(
            sorted(known, key=lambda a: math.inf if a.step_seconds is None else a.step_seconds)
        ),
    )


def _slower(seconds: float, than: float) -> str:
    if seconds > than * (1 + VISIBLE):
        return f"{percent(seconds / than - 1)} slower"
    return "as fast; ties go to fewer stages, then to fewer micro-batches"


def _score(problem: Problem, decision: Decision) -> _Scored:
    return _Scored(decision, estimate(problem, decision))


def _bound(problem: Problem, frame: Frame) -> float:
    """Seconds of a step with perfect balance, free transfers and a free all-reduce."""
    profile = profile_of(problem, frame.dp, frame.micro_batches)
    assert profile is not None, "a frame has a profile"
    whole = math.fsum(profile.forward + profile.backward)
    steps = []
    for name in schedules(problem):
        of_sum, of_largest = weights(problem, name, frame.micro_batches)
        stages = frame.pp * chunks_of(problem.constraints, name)
        steps.append(whole * (of_sum + of_largest / stages))
    return min(steps)


def _alternative(problem: Problem, best: _Scored, other: _Scored) -> Alternative:
    decision, found = other
    step = best.estimate.step_seconds
    if not found.fits:
        amount = Amount(problem.memory)
        limit = amount.of(problem.memory)
        needing, held = _fullest(found)
        need = amount(held.peak)
        if need == amount(problem.memory):
            why = f"{needing} {found.overflow} bytes more than {limit}"
        else:
            why = f"{needing} {need} of {limit}"
    else:
        why = _slower(found.step_seconds, step)
    return Alternative(
        pp=decision.pp,
        dp=decision.dp,
        tp=problem.tp,
        micro_batches=decision.micro_batches,
        schedule=decision.schedule,
        step_seconds=found.step_seconds if found.fits else None,
        why=why,
    )


def _fullest(found: Estimate) -> tuple[str, Memory]:
    """`stage 0 needs`, and all that the stages of the fullest device hold."""
    parts = [vars(found.stages[stage].memory) for stage in found.worst]
    held = Memory(**{name: sum(part[name] for part in parts) for name in parts[0]})
    *most, last = map(str, found.worst)
    words = f"stages {', '.join(most)} and {last} need" if most else f"stage {last} needs"
    return words, held


def _binding(problem: Problem, choice: Choice, best: _Scored) -> str:
    """What keeps the step from being faster: idle devices, memory, or the balance of stages."""
    reasons = []
    decision, found = best
    used = decision.pp * decision.dp
    if used < problem.devices:
        reasons.append(
            f"{problem.devices - used} of {problem.devices} devices stay idle, as "
            f"pp={decision.pp} dp={decision.dp} was asked for"
        )

    roomy = replace(problem, memory=UNLIMITED)
    visibly_faster = found.step_seconds * (1 - VISIBLE)
    promising = [f for f in frames(problem) if _bound(problem, f) < visibly_faster]
    unlimited = [_score(roomy, choice(roomy, frame)) for frame in promising]
    first = min(unlimited, key=lambda s: s.estimate.step_seconds, default=best)
    if first.estimate.step_seconds < visibly_faster:
        gain = percent(1 - first.estimate.step_seconds / found.step_seconds)
        limit = Amount(problem.memory).of(problem.memory)
        reasons.append(
            f"memory: without the limit of {limit}, {first.frame} would be {gain} faster"
        )

    seconds = [stage.period for stage in found.stages]
    slowest = max(range(decision.stages), key=lambda s: seconds[s])
    mean = sum(seconds) / len(seconds)
    pace = f"stage {slowest} sets the pace with {duration(seconds[slowest])} a micro-batch"
    if decision.pp > 1 and mean > 0:
        pace += f", {percent(seconds[slowest] / mean - 1)} above the mean stage"
    if found.reduce_seconds > VISIBLE * found.step_seconds:
        pace += (
            f"; reducing its gradients takes {percent(found.reduce_seconds / found.step_seconds)}"
        )
    return "; ".join((*reasons, pace))


def _nothing_fits(
    problem: Problem, scored: list[_Scored], heuristic: str | None
) -> InfeasibleError:
    nearest = min(scored, key=lambda s: s.estimate.overflow)
    found = nearest.estimate
    needing, held = _fullest(found)
    amount = Amount(problem.memory)
    in_flight = max(found.stages[stage].in_flight for stage in found.worst)
    flying = f"{in_flight} micro-batch{'' if in_flight == 1 else 'es'}"
    kind = f"{heuristic} plan" if heuristic else "plan"
    parts = [
        (held.parameters + held.gradients + held.optimizer, "parameters, gradients and optimizer"),
        (held.buffers, "buffers"),
        (held.activations, f"activations of {flying} in flight"),
        (held.transfers, "transfers"),
    ]
    listed = ", ".join(
        f"{amount(size)} {what}" for size, what in parts if amount(size) != amount(0)
    )
    of_tp = f" tp={problem.tp}" if problem.tp > 1 else ""
    return InfeasibleError(
        f"no {kind} fits {amount.of(problem.memory)} a device: nearest is "
        f"{nearest.frame}{of_tp}, whose {needing} {amount.of(held.peak)}, "
        f"{found.overflow} bytes too many ({listed}).",
        hint=_what_would_help(problem, scored, nearest, heuristic),
        shortfall=found.overflow,
    )


def _what_would_help(
    problem: Problem, scored: list[_Scored], nearest: _Scored, heuristic: str | None
) -> str:
    asked, helps = problem.constraints, []
    if heuristic:
        helps.append("the planner `dynamic`, which places cuts by memory")
    if _more_stages_could_fit(problem, scored):
        if asked.pp is not None:
            helps.append(f"more stages than pp={asked.pp}")
        elif asked.dp is not None and asked.dp > 1:
            helps.append(f"less than dp={asked.dp}, and so more stages")
        else:
            helps.append(f"more than {problem.devices} devices")
    _, held = _fullest(nearest.estimate)
    in_flight = max(nearest.estimate.stages[stage].in_flight for stage in nearest.estimate.worst)
    rows = problem.batch // (nearest.decision.dp * nearest.decision.micro_batches)
    moving = held.activations + held.transfers > 0
    if asked.micro_batches is not None and moving and problem.profiles[0].rows < rows:
        helps.append(f"more micro-batches than {asked.micro_batches}, which makes them smaller")
    if asked.schedule is not None and asked.schedule != "1f1b" and in_flight > 1:
        helps.append("the schedule 1f1b, which holds fewer micro-batches")
    what = "devices" if asked.memory is None else "a memory limit"
    helps.append(f"{what} of {Amount(problem.memory).ceiling(held.peak)}")
    return one_of(helps)


def _more_stages_could_fit(problem: Problem, scored: list[_Scored]) -> bool:
    """Every unit fits a device of its own, and that has not been tried."""
    if max(s.decision.pp for s in scored) == problem.units:
        return False
    first = np.arange(problem.units)
    alone = tables(problem, problem.profiles[0]).at(first, first + 1)
    dp = problem.constraints.dp or 1
    return bool(peak(alone, problem, 1, 1, dp).max() <= problem.memory)


class Amount:
    """Prints bytes in one unit: the largest of which `scale` bytes are at least a tenth."""

    def __init__(self, scale: int) -> None:
        sizes = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
        fitting = (name for name, size in sizes.items() if 10 * scale >= size)
        self.unit = next(fitting, "bytes")
        self.size = sizes.get(self.unit, 1)

    def __call__(self, size: float) -> str:
        """The bare number: `18.3`."""
        return f"{size / self.size:.1f}" if self.size > 1 else f"{size:.0f}"

    def of(self, size: float) -> str:
        """The number and its unit: `18.3 GiB`."""
        return f"{self(size)} {self.unit}"

    def ceiling(self, size: int) -> str:
        """As `of`, but rounded up, so that what is printed is enough."""
        return self.of(math.ceil(10 * size / self.size) * self.size / 10)


def percent(ratio: float) -> str:
    """`0.3 %`, `12 %`."""
    return f"{100 * max(ratio, 0.0):.{1 if ratio < 0.0995 else 0}f} %"  # never -0.0 %


def duration(seconds: float) -> str:
    """Three digits and a unit: `12.3 ms`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
