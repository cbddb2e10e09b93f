"""The planners by name: each is a function from a problem to an answer.

    PLANNERS["dynamic"](problem)  ->  Answer(decision, estimate, bound_seconds, binding, ...)

`dynamic` is exact and quick, `exhaustive` is its oracle, `uniform` the baseline.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from autopipe.planners.model.estimate import PipelineDegrees
from autopipe.planners.model.problem import Config, Decision, Problem
from autopipe.planners.search.best import Answer, Known
from autopipe.planners.search.dynamic import dynamic
from autopipe.planners.search.exhaustive import every_turns, exhaustive
from autopipe.planners.search.in_turns import improved, optimum
from autopipe.planners.search.uniform import uniform


class Planner(Protocol):
    """A function from a problem to an answer.

    Args of a call:
        incumbents: step seconds found for other problems (`best.best_answer`): decisions that
            cannot be among the best two are left out.
        mesh: the one mesh to try; None: all.
        known: what earlier searches found in each config, for `best.best_answer`.
    """

    def __call__(
        self,
        problem: Problem,
        incumbents: Sequence[float] = (),
        mesh: PipelineDegrees | None = None,
        known: Known | None = None,
    ) -> Answer: ...


@dataclass(frozen=True)
class _WithTurns:
    """A planner whose answer is replaced if ranks that take turns are faster."""

    planner: Planner
    choose: Callable[[Problem, Config], Decision | None]

    def __call__(
        self,
        problem: Problem,
        incumbents: Sequence[float] = (),
        mesh: PipelineDegrees | None = None,
        known: Known | None = None,
    ) -> Answer:
        answer = self.planner(problem, incumbents, mesh, known)
        return improved(problem, answer, self.choose, mesh)


PLANNERS: dict[str, Planner] = {
    "dynamic": _WithTurns(dynamic, optimum),
    "exhaustive": _WithTurns(exhaustive, every_turns),
    "uniform": uniform,
}
