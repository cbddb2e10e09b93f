"""The planners by name: each is a function from a problem to an answer.

    PLANNERS["dynamic"](problem)  ->  Answer(decision, estimate, bound_seconds, binding, ...)

`dynamic` is exact and quick, `exhaustive` is its oracle, `uniform` the baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autopipe.planners.model.estimate import Mesh
from autopipe.planners.model.problem import Problem
from autopipe.planners.search.best import Answer
from autopipe.planners.search.dynamic import dynamic
from autopipe.planners.search.exhaustive import exhaustive
from autopipe.planners.search.uniform import uniform


class Planner(Protocol):
    """A function from a problem to an answer.

    Args of a call:
        incumbents: step seconds found for other problems (`best.best_answer`): what cannot be among
            the best two is left out.
        mesh: the one mesh to look at.
    """

    def __call__(
        self, problem: Problem, incumbents: Sequence[float] = (), mesh: Mesh | None = None
    ) -> Answer: ...


PLANNERS: dict[str, Planner] = {
    "dynamic": dynamic,
    "exhaustive": exhaustive,
    "uniform": uniform,
}
