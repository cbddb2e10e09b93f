"""A rank of several stages recomputes no more than its room asks for."""

from dataclasses import replace

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Constraints, Decision, Problem
from autopipe.planners.search.registry import PLANNERS
from autopipe.planners.search.spare_room import filled
from tests.support.problems import rich_problem


def tight(seed: int) -> tuple[Problem, Decision] | None:
    """A problem in which stages must recompute, and the planner's decision; None: it is not so."""
    asked = Constraints(schedule="interleaved", chunks=2)
    problem = replace(rich_problem(seed), constraints=asked)
    devices = problem.machine
    try:
        free = PLANNERS["dynamic"](
            replace(problem, machine=replace(devices, memory=(2**40,) * devices.devices))
        )
        peak = max(stage.memory.peak for stage in free.estimate.stages)
        limits = tuple(17 * peak // 10 for _ in devices.memory)
        problem = replace(problem, machine=replace(devices, memory=limits))
        found = PLANNERS["dynamic"](problem).decision
    except InfeasibleError:  # too little room for anything, or no such pipeline
        return None
    return (problem, found) if any(found.recompute) else None


@pytest.mark.long
def test_fewer_stages_recompute_and_all_fits() -> None:
    changed = 0
    for case in filter(None, map(tight, range(60))):
        problem, before = case
        after = filled(problem, before)
        assert estimate(problem, after).fits
        assert replace(after, recompute=before.recompute) == before
        pairs = zip(after.recompute, before.recompute, strict=True)
        assert all(now in ((), earlier) for now, earlier in pairs)
        for stage, blocks in enumerate(after.recompute):  # none of the others would fit
            fewer = (*after.recompute[:stage], (), *after.recompute[stage + 1 :])
            assert not blocks or not estimate(problem, replace(after, recompute=fewer)).fits
        changed += after != before
    assert changed


def test_what_was_asked_for_stays() -> None:
    problem, decision = next(filter(None, map(tight, range(60))))
    blocks = tuple(sorted({again for stage in decision.recompute for again in stage}))
    asked = replace(problem, constraints=replace(problem.constraints, recompute=blocks))
    assert filled(asked, decision) == decision
