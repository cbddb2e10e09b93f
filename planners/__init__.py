"""Search: a planner is a function from a problem to an answer, scored by one shared estimate.

    PLANNERS["dynamic"](problem)  ->  Answer(decision, estimate, bound_seconds, binding, ...)

`dynamic` is exact and quick, `exhaustive` is its oracle, `uniform` the baseline.
"""

from __future__ import annotations

from collections.abc import Callable

from autopipe.planners.answer import Answer
from autopipe.planners.dynamic import dynamic
from autopipe.planners.exhaustive import exhaustive
from autopipe.planners.uniform import uniform
from autopipe.problem import Problem

Planner = Callable[[Problem], Answer]

PLANNERS: dict[str, Planner] = {
    "dynamic": dynamic,
    "exhaustive": exhaustive,
    "uniform": uniform,
}

__all__ = ["PLANNERS", "Answer", "Planner"]
