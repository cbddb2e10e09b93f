"""Other planners' objectives over autopipe's cost functions, by hand and by brute force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import InfeasibleError
from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import compositions, figures
from autopipe.planners.model.keeping_less import largest_block
from autopipe.planners.model.places import StagePlace, places
from autopipe.planners.model.problem import Config, Problem, splits
from autopipe.planners.model.range_tables import Tables, tables
from autopipe.planners.model.stage_costs import reduce_seconds, stage_work, wire_rate
from autopipe.planners.search.configs import configs
from autopipe.planners.search.device_orders import orders
from autopipe.planners.search.dynamic import Objective
from benchmarks.planners.objective import (
    PIPER,
    all_recomputed,
    fastest,
    none_recomputed,
    period_pricing,
    period_weights,
)
from tests.support.problems import line, rich_problem

HELD: dict[str, Callable[[int, int], int]] = {
    "one": lambda dropped, largest: largest if dropped else 0,
    "all": lambda dropped, largest: dropped,
    "none": lambda dropped, largest: 0,
}
"""Bytes that are there of recomputed blocks: of those that drop so many, the largest so large."""

HOLDING = {"one": largest_block, "all": all_recomputed, "none": none_recomputed}


def test_a_transfer_keeps_both_who_sends_and_who_receives_busy() -> None:
    """Three units on three stages: 8 bytes go on from the first, 6 from the second, 4 B/s.

    Two micro-batches of 3 s, and of 8 and 6 bytes for the stage in the middle.
    """
    problem = line((1.0, 3.0, 2.0), devices=3, batch=2, crossing=(8, 6), link=Link(0.25, 4.0))
    found = fastest(problem, PIPER)
    assert found is not None
    assert found.decision.cuts == (1, 2)
    assert found.seconds == 2 * (3 + (8 + 6) / 4 + 2 * 0.25)


def test_all_micro_batches_pay_for_the_sum_of_gradients() -> None:
    """One stage on two replicas, two micro-batches each: 2 * 1/2 * 100 bytes at 1 B/s."""
    problem = line((3.0,), devices=2, batch=4)
    config = Config(1, 2, 2, 0, "1f1b")
    (place,) = places(problem, config, (0,))
    ranges = tables(problem, problem.profiles[0]).at(0, 1)
    numbers = compositions(problem).number[0, 1]
    found = period_pricing(problem, config, ranges, numbers)(place).seconds
    assert (found.whole, found.period, found.exposed) == (3, 3 + 100 / 2, 0)
    assert period_weights(problem, config) == (0, 2)


def period(
    problem: Problem, config: Config, place: StagePlace, first: int, last: int, held: str
) -> float:
    """The least period of a stage over all sets of recomputed blocks that fit; else infinite."""
    rows = problem.batch // (config.dp * config.micro_batches)
    ranges: Tables = tables(problem, problem.profile(rows)).at(first, last)
    if config.pp > 1:
        place = place._replace(before=problem.machine.link(config.dp, 0, 1))
    inside = [
        b for b, (start, stop) in enumerate(problem.recomputable) if start < last and stop > first
    ]
    parts = {}
    for block in inside if not splits(problem, config.schedule) else ():
        start, stop = problem.recomputable[block]
        part = max(first - start, 0), min(last, stop) - start
        parts[block] = figures(problem, rows, place.group.kind, block, part)
    largest = max((size for size, _ in parts.values()), default=0)
    best = math.inf
    for count in range(len(parts) + 1):
        for chosen in itertools.combinations(parts, count):
            dropped = sum(parts[block][0] for block in chosen)
            extra = sum(parts[block][1] for block in chosen)
            there = HELD[held](dropped, largest)
            of = memory.estimate(
                *(ranges, problem, config, place.in_flight, dropped, there), waiting=place.waiting
            )
            if memory.excess(int(of.peak), place.room) <= 0:
                seconds = float(stage_work(problem, config, place, ranges).seconds(extra).whole)
                if place.before is not None:
                    sent = ranges.sent + ranges.sent_gradient
                    seconds += float(sent) / wire_rate(problem, config, place.before)
                reduce = float(reduce_seconds(ranges, problem, config, place.group))
                best = min(best, seconds + reduce / config.micro_batches)
    return best


def brute_force(problem: Problem, held: str) -> float:
    """The least step of all configs, orders of devices, cuts and sets of blocks."""
    best = math.inf
    for config in configs(problem):
        for order in orders(problem, config):
            row = places(problem, config, order)
            known = {
                (place, first, last): period(problem, config, place, first, last, held)
                for place in set(row)
                for first, last in itertools.combinations(range(problem.units + 1), 2)
            }
            for cuts in itertools.combinations(range(1, problem.units), len(row) - 1):
                bounds = (0, *cuts, problem.units)
                slowest = max(known[row[s], bounds[s], bounds[s + 1]] for s in range(len(row)))
                best = min(best, config.micro_batches * slowest)
    return best


@pytest.mark.parametrize("held", ["one", "all", "none"])
def test_a_pipeline_that_is_never_drained_is_planned_exactly(held: str) -> None:
    """Whatever of the recomputed blocks is counted as held."""
    pricing = partial(period_pricing, holding=HOLDING[held])
    objective = Objective(pricing, period_weights, lambda problem, config: 0.0)
    planned = 0
    for seed in range(40):
        problem = rich_problem(seed)
        if problem.units > 5 or problem.machine.devices > 4:
            continue
        problem = replace(problem, constraints=replace(problem.constraints, schedule="1f1b"))
        try:
            best = brute_force(problem, held)
        except InfeasibleError:
            continue
        found = fastest(problem, objective)
        assert (found is None) == math.isinf(best)
        if found is not None:
            assert found.seconds == pytest.approx(best, rel=1e-9)
            planned += 1
    assert planned > 3


def test_recomputed_blocks_that_stay_save_one_micro_batch_less() -> None:
    (place,) = places(line((1.0,), devices=1), Config(1, 1, 4, 0, "gpipe"), (0,))
    assert all_recomputed(place, np.array(50)) == (0, 3)
    assert none_recomputed(place, np.array(50)) == (0, 4)
