"""What blocks offload: by hand, and beside every choice of what runs again, offloads or stays."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest

from autopipe.planners.model import memory
from autopipe.planners.model.block_parts import compositions, figures
from autopipe.planners.model.estimate import settle
from autopipe.planners.model.keeping_less import costs, sets_of
from autopipe.planners.model.offload_ways import MOST_WAYS, offload_ways, spread
from autopipe.planners.model.places import StagePlace, place_of
from autopipe.planners.model.problem import (
    WHOLE,
    BlockLevel,
    Config,
    Constraints,
    Problem,
    Saved,
)
from autopipe.planners.model.range_tables import tables
from autopipe.planners.model.recompute_sets import chosen
from autopipe.planners.model.stage_costs import stage_work
from tests.support.problems import line, machine

STAGE = Config(1, 1, 8, 0, "1f1b")


def chain(
    keeps: tuple[int, ...],
    again: tuple[float, ...],
    levels: tuple[tuple[BlockLevel, ...], ...] = (),
    offload: tuple[int, ...] | None = None,
) -> Problem:
    """A block a unit: forward takes a second and backward two; block b keeps `keeps[b]` bytes, and
    running it again takes `again[b]` seconds."""
    units = len(keeps)
    asked = Constraints(offload=offload)
    problem = line((1.0,) * units, devices=1, batch=8, saved=0, constraints=asked)
    (profile,) = problem.profiles
    return replace(
        problem,
        recomputable=tuple((unit, unit + 1) for unit in range(units)),
        profiles=(
            replace(
                profile,
                backward=((2.0,) * units,),
                saved=tuple(Saved(size, n, (n,), n) for n, size in enumerate(keeps)),
                recompute=tuple(((seconds,),) for seconds in again),
                levels=levels,
            ),
        ),
        offloads=True,
    )


def on(problem: Problem, limit: int, host: float, in_flight: int) -> tuple[Problem, StagePlace]:
    """The problem on one device of so many bytes, whose host's memory takes so many a second."""
    device = replace(machine(1, limit), hosts=(host,))
    problem = replace(problem, machine=device)
    return problem, place_of(problem, STAGE, in_flight, 0, None)


def seconds(problem: Problem, limit: int, host: float, in_flight: int = 8) -> float:
    """Of a micro-batch, in one stage of all units."""
    problem, place = on(problem, limit, host, in_flight)
    every = tables(problem, problem.profiles[0]).at(0, problem.units)
    found = costs(problem, STAGE, place, every, compositions(problem).number[0, problem.units])
    assert found.peaks <= limit
    return float(found.seconds.whole)


def states(problem: Problem) -> int:
    """Bytes of a stage of all units without any activation."""
    every = tables(problem, problem.profiles[0]).at(0, problem.units)
    return int(memory.estimate(every, problem, STAGE, 0).peak)


def test_what_computing_hides_costs_nothing_and_the_rest_its_copies() -> None:
    """Four blocks of 100 bytes: F = 4 s, B = 8 s. On a link of 50 bytes a second

    blocks    copies    beyond F    beyond B
    2         4 s       0           0
    3         6 s       2           0
    4         8 s       4           0           and at 25 bytes a second 12 and 8

    Where running again takes 3 s a block, blocks that are hidden go first, and then those whose 2 s
    of copies are less than 3; at 1 s a block the others run again. What is hidden goes anyway.
    """
    dear, cheap = chain((100,) * 4, (3.0,) * 4), chain((100,) * 4, (1.0,) * 4)
    limit = states(dear) + 8 * 400
    # Of eight micro-batches in flight: each block less saves 800, two on their way take 200 back.
    assert seconds(dear, limit, 50.0) == 12
    assert seconds(dear, limit - 1600 + 200, 50.0) == 12
    assert seconds(dear, limit - 2400 + 200, 50.0) == 12 + 2
    assert seconds(dear, limit - 3200 + 200, 50.0) == 12 + 4
    # One block runs again and has its 100 back; two are away, whose copies are hidden.
    assert seconds(cheap, limit - 2400 + 300, 50.0) == 12 + 1
    assert seconds(cheap, limit - 3200 + 300, 50.0) == 12 + 2


def test_a_slow_link_is_no_use() -> None:
    """At 10 bytes a second a block's copy takes 10 s, 6 beyond F and 2 beyond B; running it again
    takes 3."""
    problem = chain((100,) * 4, (3.0,) * 4)
    limit = states(problem) + 8 * 400
    assert seconds(problem, limit - 800 + 100, 10.0) == 12 + 3
    assert seconds(problem, limit - 800 + 100, 100.0) == 12
    assert seconds(problem, limit - 800 + 100, 0.0) == 12 + 3, "there is no link"


def test_what_is_asked_for_is_offloaded_and_nothing_else() -> None:
    problem = chain((100,) * 4, (3.0,) * 4, offload=(1, 2))
    assert seconds(problem, 10**6, 20.0) == 12 + (10 - 4) + (10 - 8)
    found, _ = on(problem, 10**6, 20.0, 8)
    assert settle(found, STAGE, (), (0,)).offload == ((1, 2),)
    # Where devices have no link they copy within their own memory, and wait.
    without, place = on(problem, 10**6, 0.0, 8)
    without = replace(without, machine=replace(without.machine, copying=100.0))
    every = tables(without, without.profiles[0]).at(0, 4)
    assert stage_work(without, STAGE, place, every).copying(0.0, 200) == (2, 2)


def test_those_that_offload_are_spread_and_the_last_is_among_them_only_if_all_are() -> None:
    assert spread(3, 8) == (0, 2, 5)
    assert spread(1, 8) == (0,)
    assert spread(4, 4) == (0, 1, 2, 3)
    problem = chain((100,) * 8, (3.0,) * 8)
    limit = states(problem) + 8 * 800 - 8 * 300 + 200
    problem, place = on(problem, limit, 1000.0, 8)
    every, number = tables(problem, problem.profiles[0]), compositions(problem).number[0, 8]
    found = costs(problem, STAGE, place, every.at(0, 8), number)
    sets = sets_of(problem, STAGE, place)
    assert chosen(problem, 0, 8, sets, int(found.recomputed)) == ((), (0, 2, 5))


def test_of_long_ranges_some_numbers_are_looked_at() -> None:
    ways = offload_ways(chain((100,) * 100, (3.0,) * 100), 1, 0, True)
    assert ways.most == MOST_WAYS + 1
    whole = ways.numbers[compositions(chain((100,) * 100, (3.0,) * 100)).number[0, 100]]
    counts = [sum(ways.away[number]) for number in whole]
    assert counts[0] == 0 and counts[-1] == 100 and max(np.diff(counts)) <= -(-100 // MOST_WAYS)
    none = offload_ways(chain((100,) * 4, (3.0,) * 4), 1, 0, False)
    assert none.most == 1 and not none.left


STAYS, AWAY = -3, -2


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("seed", range(40))
def test_no_choice_of_what_every_block_does_is_quicker(seed: int) -> None:
    """Four blocks, of one class or of two, with a level or none; each stays, is away, runs again
    by op or whole."""
    chance = Random(f"offload {seed}")
    alike = chance.random() < 0.5
    sizes = (100,) * 4 if alike else chance.choice(((100, 40, 100, 40), (10, 20, 30, 40)))
    again = tuple(size * chance.choice((0.01, 0.04)) for size in sizes)
    level = chance.random() < 0.5
    levels = tuple(
        (BlockLevel(size // 2, ((spent / 4,),)),) for size, spent in zip(sizes, again, strict=True)
    )
    problem = chain(sizes, again, levels if level else ())
    most = states(problem) + 8 * sum(sizes)
    limit = states(problem) + int((most - states(problem)) * chance.uniform(0.3, 1.0))
    problem, place = on(problem, limit, chance.choice((10.0, 40.0, 160.0)), 8)
    every = tables(problem, problem.profiles[0]).at(0, 4)
    found = costs(problem, STAGE, place, every, compositions(problem).number[0, 4])

    def scored(choice: tuple[int, ...]) -> tuple[int, float]:
        """Bytes beyond the limit, and seconds."""
        pairs = [(b, of) for b, of in enumerate(choice) if of not in (STAYS, AWAY)]
        less = [figures(problem, 1, 0, b, (0, 1), of) for b, of in pairs]
        gone = sorted(sizes[b] for b, of in enumerate(choice) if of == AWAY)
        dropped, spent = sum(d for d, _ in less), sum(s for _, s in less)
        held = max(sizes) if dropped else 0
        kept = dropped + sum(gone), held, sum(gone[-2:])
        peak = int(memory.estimate(every, problem, STAGE, 8, *kept).peak)
        took = stage_work(problem, STAGE, place, every).seconds(spent, sum(gone)).whole
        return max(0, peak - limit), float(took)

    ways = (STAYS, AWAY, WHOLE, *((0,) if level else ()))
    beyond, least = min(map(scored, product(ways, repeat=4)))
    assert (max(0, int(found.peaks) - limit), float(found.seconds.whole)) == (
        beyond,
        pytest.approx(least, rel=1e-9),
    )
