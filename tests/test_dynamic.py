"""The search of `dynamic`, without and with its reasons; that it is exact is in `test_planners`."""

from dataclasses import replace
from typing import Literal

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.dynamic import dynamic, fastest
from autopipe.planners.exhaustive import exhaustive
from autopipe.problem import Problem
from tests.problems import random_problem, rich_problem


@pytest.mark.parametrize("make", [random_problem, rich_problem])
@pytest.mark.parametrize("seed", range(30))
def test_the_search_alone_finds_what_the_planner_does(make: object, seed: int) -> None:
    problem: Problem = make(seed)  # type: ignore[operator]
    try:
        answer = dynamic(problem)
    except InfeasibleError as refusal:
        if "plan fits" in str(refusal):
            assert fastest(problem) is None
        else:  # a contradiction in what is asked for
            with pytest.raises(InfeasibleError):
                fastest(problem)
    else:
        found = fastest(problem)
        assert found is not None
        assert (found.decision, found.estimate) == (answer.decision, answer.estimate)


@pytest.mark.parametrize("hold", ["all", "none"])
@pytest.mark.parametrize("seed", range(4, 14))
def test_it_is_exact_whatever_is_held_of_what_runs_again(
    seed: int, hold: Literal["all", "none"]
) -> None:
    problem = replace(rich_problem(seed), reruns_hold=hold)
    try:
        expected = exhaustive(problem)
    except InfeasibleError as refusal:
        with pytest.raises(InfeasibleError) as found:
            dynamic(problem)
        assert str(found.value) == str(refusal)
    else:
        step = dynamic(problem).estimate.step_seconds
        assert step == pytest.approx(expected.estimate.step_seconds, rel=1e-9)
