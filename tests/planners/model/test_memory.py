"""The bound and the estimate of a stage's bytes, beside each other; and what fits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import compositions
from autopipe.planners.model.places import profile_of
from autopipe.planners.model.problem import Config, Problem, splits
from autopipe.planners.model.range_tables import tables
from autopipe.planners.model.recompute_sets import recompute_sets
from autopipe.planners.search.configs import configs
from tests.support.problems import line, random_problem, rich_problem


def least_estimate(problem: Problem, config: Config, in_flight: int) -> np.ndarray:
    """The estimate of each range of units with the set of recomputed blocks that holds least."""
    profile = profile_of(problem, config.dp, config.micro_batches)
    assert profile is not None
    ranges, numbers = tables(problem, profile), compositions(problem).number
    sets = recompute_sets(problem, profile.rows, 0, not splits(problem, config.schedule))
    least = np.full(numbers.shape, np.iinfo(np.int64).max)
    for number in range(len(sets.largest)):
        for chosen in sets.numbers(number):
            dropped = int(sets.saved(chosen))
            held = int(sets.largest[number]) if dropped else 0
            parts = memory.estimate(ranges, problem, config, in_flight, dropped, held)
            here = numbers == number
            least[here] = np.minimum(least, parts.peak)[here]
    return least


def uses_again(problem: Problem, stage: range) -> bool:
    """Whether several units of a stage use a parameter: no bound has what they make together."""
    return any(sum(unit in stage for unit in item.units) > 1 for item in problem.parameters)


@pytest.mark.parametrize("make", [random_problem, rich_problem], ids=["plain", "rich"])
def test_the_bound_is_no_more_than_the_estimate(make) -> None:
    """For every range of units, whatever is recomputed, in flight or sharded; up to rounding."""
    looked = close = 0
    for seed in range(20):
        problem = make(seed)
        try:
            every = {(f.dp, f.micro_batches, f.zero): f for f in configs(problem)}
        except InfeasibleError:
            continue
        for config in list(every.values())[::3]:
            bound = memory.bound(problem, config)
            for in_flight in (1, 2, config.micro_batches):
                found = least_estimate(problem, config, in_flight)
                for first, end in itertools.combinations(range(problem.units + 1), 2):
                    least = bound.bytes(first, end, in_flight)
                    assert least - memory.ROUNDED <= found[first, end]
                    if not uses_again(problem, range(first, end)):
                        looked, close = looked + 1, close + (least >= 0.9 * found[first, end])
    assert looked > 1000 and close > looked / 20, "the bound is of use"


def test_of_units_without_transfers_the_bound_is_the_estimate() -> None:
    """Three units of 100 bytes of parameters, as many of gradients, Adam's 200, 10 saved."""
    problem = line((1.0,) * 3)
    config = Config(1, 1, 4, 0, "1f1b")
    ranges = tables(problem, problem.profiles[0])
    for first, end in itertools.combinations(range(4), 2):
        found = memory.estimate(ranges.at(first, end), problem, config, 2).peak
        assert memory.bound(problem, config).bytes(first, end, 2) == found == 420 * (end - first)


def test_what_is_held_fits_up_to_the_limit() -> None:
    assert [memory.excess(held, 100) for held in (99, 100, 103)] == [-1, 0, 3]
    assert memory.excess(np.array([90, 120]), 100).tolist() == [-10, 20]


def test_zero_3_gathers_a_unit_while_the_one_before_runs() -> None:
    """T + 2 U + U/n: a unit and the table that it comes out of, of which a rank gives its rows."""
    assert memory.gathered_bytes(10, 3, 4) == 3 + 2 * 10 + 3
    assert memory.gathered_bytes(np.array([8, 0]), np.array([0, 5]), 2).tolist() == [20, 2 * 5 + 3]


def test_a_large_tied_table_is_fullest_while_it_comes_itself() -> None:
    """Bug: plans of Gemma 3 27B under ZeRO-3 were rehearsed five times: each was 1.2 GiB fuller
    than estimated, since its embedding is larger than three of its blocks."""
    assert memory.gathered_bytes(10, 100, 4) == 2 * 100 + 25
