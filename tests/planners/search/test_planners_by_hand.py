"""What each planner decides on problems that are solved on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.planners.model import memory
from autopipe.planners.model.problem import Config, Constraints, Shared
from autopipe.planners.search.registry import PLANNERS
from autopipe.planners.search.uniform import even_cuts
from tests.support.problems import line, machine

pytestmark = pytest.mark.usefixtures("no_advice")


def test_dynamic_stops_between_the_least_sum_and_the_least_maximum() -> None:
    """Two stages, three micro-batches.

    units       1    2    4    8
    crossing      0    1    4

    cuts (1,)   t = 1, 14    15 + 2 * 14 = 43    the least sum
    cuts (2,)   t = 3, 13    16 + 2 * 13 = 42    the fastest
    cuts (3,)   t = 7, 12    19 + 2 * 12 = 43    the least maximum
    """
    found = PLANNERS["dynamic"](line((1.0, 2.0, 4.0, 8.0), crossing=(0, 1, 4), batch=3))
    assert (found.decision.cuts, found.estimate.step_seconds) == ((2,), 42)


def test_memory_moves_the_cut() -> None:
    """A unit takes 4 * 100 bytes and 10 more per micro-batch, of which stage 0 has two in flight.

    cuts (2,)   840 and 410 bytes    t = 2, 2
    cuts (1,)   420 and 820 bytes    t = 1, 3
    """
    forward = (1.0, 1.0, 2.0)
    assert PLANNERS["dynamic"](line(forward, memory=840)).decision.cuts == (2,)
    assert PLANNERS["dynamic"](line(forward, memory=839)).decision.cuts == (1,)
    with pytest.raises(InfeasibleError):
        PLANNERS["dynamic"](line(forward, memory=819))


@pytest.mark.parametrize("planner", ["dynamic", "exhaustive"])
def test_a_slow_device_gets_less_and_stands_where_the_link_is_cheapest(planner: str) -> None:
    """Six units of a second, and a device that is half as fast: it gets two of them, 4 s.

    fast   4 units, 4 s         it may be before or behind; 30 bytes cross at a third,
    slow   2 units, 4 s         1 byte at any other cut: behind the four it is cheaper
    """
    problem = line((1.0,) * 6, kinds=(0, 1), crossing=(1, 30, 1, 1, 1), link=Link(0.0, 10.0))
    decision = PLANNERS[planner](problem).decision
    assert (decision.cuts, decision.groups) == ((4,), (0, 1))
    turned = line((1.0,) * 6, kinds=(0, 1), crossing=(1, 1, 1, 30, 1), link=Link(0.0, 10.0))
    decision = PLANNERS[planner](turned).decision
    assert (decision.cuts, decision.groups) == ((2,), (1, 0))


def test_the_one_large_device_has_the_stage_that_holds_most() -> None:
    """Unit 3 has 1000 bytes of parameters, 4000 of states: the last device alone has room."""
    problem = line((1.0,) * 4, memory=(2000, 5000), saved=0)
    heavy = replace(problem, parameters=(*problem.parameters[:3], Shared(1000, (3,))))
    assert PLANNERS["dynamic"](heavy).decision.groups == (0, 1)
    first = replace(problem, parameters=(Shared(1000, (0,)), *problem.parameters[1:]))
    assert PLANNERS["dynamic"](first).decision.groups == (1, 0)


def test_equal_units_are_cut_early_whatever_the_order_of_sums() -> None:
    # Ten units of 0.1 s over four stages: at best 3 units at most in one, and the first is small.
    problem = line((0.1,) * 10, devices=4)
    assert PLANNERS["dynamic"](problem).decision.cuts == (1, 4, 7)
    assert PLANNERS["exhaustive"](problem).decision.cuts == (1, 4, 7)


@pytest.mark.parametrize(
    ("blocks", "pp", "cuts"),
    [
        # units:  e | 0 0 | 1 1 | 2 2 | 3 3 | 4 4 | h       e, h: before and after the blocks
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 1, ()),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 2, (7,)),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 3, (5, 9)),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 5, (3, 5, 7, 9)),
        # Four blocks over 3 stages: e and h count as a block each, as 6 things over 3 stages.
        ([(1, 3), (3, 5), (5, 7), (7, 11)], 3, (3, 7)),
        ([(1, 3), (3, 5), (5, 7), (7, 11)], 6, (1, 3, 5, 7, 11)),
        # Nothing before the first block: it is 2 1 1 then.
        ([(0, 3), (3, 5), (5, 7), (7, 11)], 3, (5, 7)),
        # Fewer blocks than stages: 12 units over 5 stages are 3 3 2 2 2.
        ([(1, 3)], 5, (3, 6, 8, 10)),
        ([], 4, (3, 6, 9)),
        # Units 4 and 5 between two blocks stay with the earlier one.
        ([(1, 4), (6, 9)], 2, (6,)),
    ],
)
def test_uniform_gives_equal_shares_of_blocks(
    blocks: list[tuple[int, int]], pp: int, cuts: tuple[int, ...]
) -> None:
    problem = replace(line((1.0,) * 12), blocks=tuple(blocks))
    assert even_cuts(problem, pp) == cuts


def test_uniform_counts_the_first_block_where_no_cut_is_before_it() -> None:
    """Units: e and block 0 | 1 | 2 | 3.  Four blocks, of which two stages get two each, though only
    three are ranges of units of their own."""
    blocks = (0, 1), (1, 2), (2, 3), (3, 4)
    problem = replace(line((1.0,) * 4), blocks=blocks[1:], recomputable=blocks)
    assert even_cuts(problem, 2) == (2,)
    assert even_cuts(problem, 4) == (1, 2, 3)
    # A unit before the blocks is no block.
    problem = replace(problem, recomputable=blocks[1:])
    assert problem.repeated == blocks[1:]


def test_exhaustive_refuses_what_would_take_for_ever() -> None:
    problem = line((1.0,) * 60, devices=6)
    with pytest.raises(AutopipeError) as refusal:
        PLANNERS["exhaustive"](problem)
    assert str(refusal.value) == (
        "the planner `exhaustive` would score 5,006,386 decisions, of 1 sets of blocks, for 60 "
        "units on 6 devices, and stops at 5,000,000 of 4,096\n"
        "hint: the planner `dynamic` finds the same optimum; or fix pp, dp and micro_batches"
    )


def test_dynamic_plans_a_deep_model_as_a_greedy_bound_says() -> None:
    """200 equal units over 8 stages: 25 each is perfect, so the bound is met."""
    found = PLANNERS["dynamic"](line((1.0,) * 200, devices=8, batch=64))
    assert found.decision.cuts == tuple(range(25, 200, 25))
    assert found.estimate.step_seconds == 200 + 63 * 25


def test_naive_has_nothing_to_balance() -> None:
    """Four micro-batches in turn through 4 seconds, wherever the cut is: it is in the middle."""
    found = PLANNERS["dynamic"](line((1.0,) * 4, constraints=Constraints(2, schedule="naive")))
    assert (found.decision.cuts, found.estimate.step_seconds) == ((2,), 16)


def test_unequal_shares_of_a_device_are_not_looked_for() -> None:
    """Units of 400, 800, 400 and 400 bytes: under zb-v 800 on rank 0, 1200 on rank 1.

    Half of 1200 has no room for unit 1. The nearest is found, and fits after all.
    """
    constraints = Constraints(pp=2, schedule="zb-v", micro_batches=4)
    problem = line((1.0, 1.0, 1.0, 2.0), memory=1200, saved=0, constraints=constraints)
    problem = replace(problem, parameters=(*problem.parameters, Shared(100, (1,))))
    found = PLANNERS["dynamic"](problem)
    assert found.decision.cuts == (1, 2, 3)
    # 1 / 6 of the sum of 5, and 8 - 1 / 3 times the longest stage, or an equal one.
    assert found.estimate.step_seconds == pytest.approx(5 / 6 + (8 - 1 / 3) * 2)


def test_zero_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two units: 2 * 4 * 100 bytes of states, of which Adam has half.

    With ZeRO-1 a device holds 400 and 200, with ZeRO-2 200, 100 and 200, and 2 1/2 times a bucket
    of 20 bytes, with ZeRO-3 100, 100 and 200, those of the bucket, and 2 1/2 times a unit of 100
    that is gathered. What is asked for is taken, else the least that fits: between replicas bytes
    take their time.
    """
    monkeypatch.setattr(memory, "BUCKET_BYTES", 20)
    one = Constraints(pp=1, dp=2)
    problem = line((1.0, 1.0), saved=0, constraints=one)
    for zero, least in ((0, 800), (1, 600), (2, 550), (3, 700)):
        dealt = replace(problem, zeros=(zero,), machine=machine(2, least))
        assert PLANNERS["dynamic"](dealt).decision.config == Config(1, 2, 2, zero, "1f1b")
        with pytest.raises(InfeasibleError):
            PLANNERS["dynamic"](replace(dealt, machine=machine(2, least - 1)))
    for limit, zero in ((800, 0), (799, 1), (599, 2)):
        free = replace(problem, zeros=(0, 1, 2, 3), machine=machine(2, limit))
        assert PLANNERS["dynamic"](free).decision.config.zero == zero
