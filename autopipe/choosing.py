"""Of all tensor-parallel degrees the best plan.

    Candidates --least--> in order of their bounds --planner--> Answers --Draft.plan--> Plan

What one degree's answer takes is a rival to the next. Exact bytes have the last word: an answer
whose programs hold more than the estimate said is asked for again, for less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest

from autopipe.candidate import Candidate
from autopipe.degrees import as_first
from autopipe.draft import Draft, Overflow
from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.plan import Plan
from autopipe.planners import Answer, Planner
from autopipe.planners.answer import Outdone, beside, out_of_the_best_two, rivals_of
from autopipe.planners.dynamic import fastest
from autopipe.planners.reasons import NothingFits
from autopipe.planners.relax import Help
from autopipe.problem import Frame, Problem
from autopipe.progress import phase
from autopipe.second_look import second_look
from autopipe.stopwatch import Stopwatch


def best_degree(
    tried: Sequence[Sequence[int]],
    at: Callable[[int], Candidate],
    planner: Planner,
    watch: Stopwatch,
    besides: Sequence[int] = (),
) -> Plan:
    """The best answer of all tensor-parallel degrees written down; of equal ones the lowest's.

    Args:
        tried: degrees to try, and others to try only where nothing fits at those.
        besides: degrees that are not to be had, and that a refusal may speak of.

    Raises:
        InfeasibleError: no plan fits; of those there could be, the one with the least shortfall.
    """
    made: dict[int, Candidate] = {}
    answers: dict[int, Answer] = {}
    refused: dict[int, InfeasibleError] = {}
    for further in tried:
        if answers:
            break
        with phase("timing each tensor-parallel degree", of=len(further)) as done:
            for tp in further:
                try:
                    made[tp] = at(tp)
                    if len(made) == 1 and tp != further[-1]:  # while the others are sharded
                        made[tp].look_ahead(check=True)
                except InfeasibleError as error:
                    refused[tp] = error
                done()
        answers, errors = _answers(made, planner, watch)
        refused |= errors
    if not answers:
        raise _nothing_fits(refused, at, besides)
    while True:
        tp = min(answers, key=lambda tp: (answers[tp].estimate.step_seconds, tp))
        others: dict[int, Answer | Outdone] = {
            other: error for other, error in refused.items() if isinstance(error, Outdone)
        }
        others |= {other: found for other, found in answers.items() if other != tp}
        told = beside(answers[tp], dict(sorted(others.items())))
        try:
            with as_first(tp):
                found = _plan_that_fits(planner, *made[tp].whole(), told, watch)
        except InfeasibleError:
            # Without it, what it has outdone may be the best.
            made.pop(tp)
            answers, refused = _answers(made, planner, watch)
            if not answers:
                raise
            continue

        def write(planner: Planner, problem: Problem, draft: Draft, answer: Answer) -> Plan:
            return _plan_that_fits(planner, problem, draft, answer, watch)

        return second_look(found, told, made, planner, write)


def _answers(
    made: Mapping[int, Candidate], planner: Planner, watch: Stopwatch
) -> tuple[dict[int, Answer], dict[int, InfeasibleError]]:
    """What the planner says of each degree's problem: its answer, or why there is none.

    The degree of the lowest bound is asked first: what it takes is a rival to the others.
    """
    answers: dict[int, Answer] = {}
    refused: dict[int, InfeasibleError] = {}
    least: dict[int, tuple[Frame, float]] = {}
    for tp, candidate in made.items():
        try:
            with watch("search"):
                least[tp] = candidate.least()
        except InfeasibleError as error:
            refused[tp] = error
    order = sorted(least, key=lambda tp: (least[tp][1], tp))
    for tp, following in zip_longest(order, order[1:]):
        rivals, (frame, seconds) = rivals_of(answers.values()), least[tp]
        # Plain data parallelism, which is told in any case, is at degree 1.
        if tp > 1 and out_of_the_best_two(seconds, rivals):
            refused[tp] = Outdone(frame, seconds, None)
            continue
        try:
            problem, _ = made[tp].whole(check=tp == order[0])
            if following is not None and not answers:
                made[following].look_ahead()
            answers[tp] = planner(problem, rivals)
        except InfeasibleError as error:
            refused[tp] = error
    return answers, refused


def _nothing_fits(
    refused: Mapping[int, InfeasibleError], at: Callable[[int], Candidate], besides: Sequence[int]
) -> InfeasibleError:
    """Of the degrees that want memory the nearest one's refusal, with what the others know of
    devices and with a degree that would do; else what contradicts itself at the lowest degree."""
    known = [refused[tp] for tp in sorted(refused)]
    wanting = [error for error in known if error.shortfall]
    nearest = min(wanting or known[:1], key=lambda error: error.shortfall)
    if not isinstance(nearest, NothingFits):
        return nearest
    others = [e for e in wanting if isinstance(e, NothingFits) and e is not nearest]
    return nearest.beside(others, _first_that_fits(at, besides))


def _first_that_fits(at: Callable[[int], Candidate], degrees: Sequence[int]) -> list[Help]:
    """The lowest of some degrees at which a plan fits, in words; none if there is none."""
    for tp in degrees:
        with suppress(AutopipeError):  # it may not divide the batch, or the model
            problem, _ = at(tp).whole()
            if fastest(problem) is not None:
                return [Help(f"tp={tp}")]
    return []


def _plan_that_fits(
    planner: Planner, problem: Problem, draft: Draft, answer: Answer, watch: Stopwatch
) -> Plan:
    """The planner's answer written down; asked again for less where its exact bytes are too many.

    Raises:
        InfeasibleError: no plan fits.
    """
    while True:
        try:
            with watch("rehearsed"):
                return draft.plan(answer)
        except Overflow as overflow:
            # So much less that this very answer is none: else it would come again, byte by byte.
            less = max(overflow.shortfall, answer.estimate.spare + 1)
            schedule = answer.decision.frame.schedule
            beyond = problem.beyond.get(schedule, 0) + less
            problem = replace(problem, beyond={**problem.beyond, schedule: beyond})
            try:
                answer = planner(problem)
            except InfeasibleError:
                # Its numbers would be of a limit that nobody has set.
                raise overflow from None
