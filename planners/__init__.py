"""Search: a planner is a function from a problem to an answer, scored by one shared estimate.

    PLANNERS["dynamic"](problem)  ->  Answer(decision, estimate, bound_seconds, binding, ...)

A planner may be told the steps that are known of other problems' plans, `rivals` of
`answer.best_answer`: what cannot be among the best two is then left out. With a `mesh` it looks at
that one alone.

`dynamic` is exact and quick, `exhaustive` is its oracle, `uniform` the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autopipe.planners.answer import Answer, Mesh
from autopipe.planners.dynamic import dynamic
from autopipe.planners.exhaustive import exhaustive
from autopipe.planners.uniform import uniform
from autopipe.problem import Problem


class Planner(Protocol):
    """A function from a problem to an answer."""

    def __call__(
        self, problem: Problem, rivals: Sequence[float] = (), mesh: Mesh | None = None
    ) -> Answer: ...


PLANNERS: dict[str, Planner] = {
    "dynamic": dynamic,
    "exhaustive": exhaustive,
    "uniform": uniform,
}

__all__ = ["PLANNERS", "Answer", "Mesh", "Planner"]
