"""Sums over ranges beside brute force: item by item, for every range of random problems."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autopipe.problem import Crossing, Problem, Profile, Shared
from autopipe.tables import tables
from tests.problems import random_problem

Range = tuple[int, int]


def block_of(problem: Problem, item: Shared) -> Range | None:
    """The block that has all the units of a parameter."""
    inside = (b for b in problem.blocks if all(unit in range(*b) for unit in item.units))
    return next(inside, None)


def own(problem: Problem, block: Range) -> int:
    return sum(item.bytes for item in problem.parameters if block_of(problem, item) == block)


def meets(block: Range, i: int, j: int) -> bool:
    return any(unit in range(i, j) for unit in range(*block))


def brute_force(problem: Problem, profile: Profile, i: int, j: int) -> tuple[float, ...]:
    """What the stage [i, j) pays, item by item, in the order of the fields of `Tables`."""
    stage = range(i, j)

    def held(items: tuple[Shared, ...]) -> int:
        return sum(item.bytes for item in items if any(unit in stage for unit in item.units))

    def received(crossing: Crossing) -> bool:
        return crossing.producer < i and any(unit in stage for unit in crossing.consumers)

    def sent(crossing: Crossing) -> bool:
        return crossing.producer in stage and any(unit >= j for unit in crossing.consumers)

    return (
        sum(profile.forward[i:j]),
        sum(profile.backward[i:j]),
        held(problem.parameters),
        held(problem.constants),
        2 * held(tuple(item for item in problem.parameters if block_of(problem, item) is None))
        + 7
        * max((own(problem, block) for block in problem.blocks if meets(block, i, j)), default=0),
        sum(
            item.bytes
            for item in profile.saved
            if any(unit in stage for unit in item.savers)
            and (item.producer is None or i <= item.producer)
        ),
        sum(c.bytes for c in profile.crossings if received(c)),
        sum(c.bytes for c in profile.crossings if received(c) and c.gradient),
        sum(c.bytes for c in profile.crossings if sent(c)),
        sum(c.bytes for c in profile.crossings if sent(c) and c.gradient),
    )


@pytest.mark.parametrize("seed", range(40))
def test_tables_are_sums_over_every_range(seed: int) -> None:
    problem = random_problem(seed)
    for profile in problem.profiles[:2]:
        every = tables(problem, profile)
        for i in range(problem.units):
            for j in range(i + 1, problem.units + 1):
                one = every.at(i, j)
                found = [float(value) for value in vars(one).values()]
                assert found == pytest.approx(brute_force(problem, profile, i, j), rel=1e-12)


def test_tables_are_zero_for_what_is_no_range() -> None:
    problem = random_problem(7)
    every = tables(problem, problem.profiles[0])
    assert all(not np.tril(values).any() for values in vars(every).values())


def test_tables_are_made_once_whatever_the_memory() -> None:
    problem = random_problem(7)
    profile = problem.profiles[0]
    assert tables(problem, profile) is tables(replace(problem, memory=1), profile)


def test_what_zero_3_gathers_by_hand() -> None:
    """Blocks of units 1 and 2, and of unit 3; parameters of 10, 20, 4, 5 and 100 bytes.

        units        0    1    2    3    4
        blocks            |-------| |--|
        parameters   10   |- 20 -|  4    5      and 100 of units 2 and 3, so of no block

    All of it: 2 * (10 + 5 + 100) + 7 * 20. Unit 3 alone: 2 * 100 + 7 * 4. Unit 1 has a part of a
    block, which stands for all of it: 7 * 20.
    """
    problem = replace(
        random_problem(7),
        units=5,
        blocks=((1, 3), (3, 4)),
        parameters=tuple(
            Shared(size, units)
            for size, units in ((10, (0,)), (20, (1, 2)), (4, (3,)), (5, (4,)), (100, (2, 3)))
        ),
        constants=(),
    )
    gathered = tables(problem, Profile(1, (1.0,) * 5, (1.0,) * 5, (), ())).gathered
    assert gathered[0, 5] == 2 * (10 + 5 + 100) + 7 * 20
    assert gathered[3, 4] == 2 * 100 + 7 * 4
    assert gathered[1, 2] == 7 * 20
    assert (gathered[0, 1], gathered[4, 5], gathered[2, 2]) == (2 * 10, 2 * 5, 0)
