"""The search of `dynamic`, without and with its reasons; that it is exact is in `test_planners`."""

from collections.abc import Callable

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.model.problem import Problem
from autopipe.planners.search.dynamic import dynamic, fastest
from tests.support.problems import random_problem, rich_problem


@pytest.mark.parametrize("make", [random_problem, rich_problem])
@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=() if seed % 6 == 0 else pytest.mark.long) for seed in range(30)],
)
def test_the_search_alone_finds_what_the_planner_does(
    make: Callable[[int], Problem], seed: int
) -> None:
    problem = make(seed)
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
