"""Ranks that take turns at a stage, against brute force, and by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import InfeasibleError
from autopipe.planfile.turns import TAKES_TURNS
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Config, Constraints, Problem
from autopipe.planners.search.exhaustive import every_turns
from autopipe.planners.search.in_turns import optimum
from autopipe.planners.search.registry import PLANNERS
from tests.support.long import share
from tests.support.problems import line, machine, random_problem, rich_problem


def alike(seed: int, rich: bool) -> Problem:
    """A random problem on devices that are alike, three at least."""
    problem = rich_problem(seed) if rich else random_problem(seed)
    own = problem.machine
    devices = max(own.devices, 3)
    return replace(
        problem, machine=machine((0,) * devices, own.memory[0], (own.topology.within[0],) * 3)
    )


@pytest.mark.parametrize("rich", [False, True], ids=["plain", "rich"])
@pytest.mark.parametrize(
    "seed", [pytest.param(0, marks=pytest.mark.long), *range(1, share(40, of=8))]
)
def test_the_division_of_ranks_is_that_of_brute_force(seed: int, rich: bool) -> None:
    problem = alike(seed, rich)
    tried = 0
    for profile in problem.profiles:
        m, rest = divmod(problem.batch, profile.rows)
        if rest:
            continue
        for zero in {min(problem.zeros), min(1, max(problem.zeros))} & {0, 1}:
            config = Config(min(problem.machine.devices, 5), 1, m, zero, TAKES_TURNS)
            found, expected = optimum(problem, config), every_turns(problem, config)
            assert (found is None) == (expected is None)
            if found is None or expected is None:
                continue
            steps = [estimate(problem, each).step_seconds for each in (found, expected)]
            assert steps[0] == pytest.approx(steps[1], rel=1e-9)
            assert estimate(problem, found).fits
            tried += 1
    assert tried or problem.units < 3 or problem.machine.memory[0] < 10**5


def test_a_stage_that_takes_twice_as_long_gets_two_ranks() -> None:
    """Units of 1, 4 and 1 seconds on four devices that hold one of them each; eight micro-
    batches.

    one rank each    T = 6,  M = 4    6 + 7 * 4 = 34 s
    turns (1, 2, 1)  T = 6,  M = 2    6 + 7 * 2 = 20 s
    """
    free = Constraints(schedule=TAKES_TURNS, dp=1, micro_batches=8, zero=0)
    problem = line(
        (1.0, 4.0, 1.0), devices=4, batch=8, parameter=1000, memory=6000,
        link=Link(0.0, 1e12), constraints=free,
    )  # fmt: skip
    answer = PLANNERS["dynamic"](problem)
    assert answer.decision.config.turns == (1, 2, 1)
    assert answer.decision.cuts == (1, 2)
    assert answer.estimate.step_seconds == pytest.approx(20.0)
    off = replace(problem, constraints=replace(free, turns=()))
    assert PLANNERS["dynamic"](off).estimate.step_seconds == pytest.approx(34.0)


def test_micro_batches_in_flight() -> None:
    """With ranks (1, 2, 1): 1 on the last, 2 on each of the two before it, and 5 on the first.

    A micro-batch takes 10 bytes in each stage, and 100 stay: 150, 120, 120 and 110 bytes.
    """
    free = Constraints(turns=(1, 2, 1), micro_batches=8)
    problem = line((1.0, 4.0, 1.0), devices=4, batch=8, parameter=25, constraints=free)
    stages = PLANNERS["dynamic"](problem).estimate.stages
    assert [stage.in_flight for stage in stages] == [5, 2, 1]
    assert [stage.memory.activations for stage in stages] == [50, 20, 10]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"turns": (1, 2), "pp": 2}, "are 3 ranks of a pipeline, and pp=2"),
        ({"turns": (1, 2), "schedule": "gpipe"}, "the schedule gpipe"),
        ({"turns": (1, 3), "micro_batches": 2}, "micro_batches=2: each rank"),
        # Bug: "a batch of 8 rows does not divide into micro-batches of 8 rows".
        ({"turns": (1, 2), "micro_batch_size": 8}, "micro_batch_size=8 of a batch of 8 rows"),
        ({"turns": (4, 4)}, "needs 8 devices, found 4"),
    ],
)
def test_what_contradicts_turns(asked: dict[str, object], words: str) -> None:
    problem = line((1.0, 1.0, 1.0), devices=4, batch=8, constraints=Constraints(**asked))  # type: ignore[arg-type]
    with pytest.raises(InfeasibleError, match=words):
        PLANNERS["dynamic"](problem)


def test_each_rank_that_takes_turns_needs_a_micro_batch() -> None:
    """Bug: it was said that a batch of two rows does not divide into micro-batches of one row."""
    problem = line((1.0, 1.0), devices=4, batch=2, constraints=Constraints(turns=(1, 3)))
    said = "2 rows over dp=1 makes no more than 2 micro-batches of 1 rows: each rank that takes"
    with pytest.raises(InfeasibleError, match=said):
        PLANNERS["dynamic"](problem)


def test_devices_that_differ_take_no_turns() -> None:
    asked = Constraints(turns=(1, 2), micro_batches=4)
    problem = line((1.0, 1.0), kinds=(0, 0, 1), batch=4, constraints=asked)
    with pytest.raises(InfeasibleError, match="devices differ"):
        PLANNERS["dynamic"](problem)
