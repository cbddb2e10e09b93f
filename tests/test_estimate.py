"""The estimate: its tables against brute force, its formulas against numbers worked by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopipe.errors import InfeasibleError, ScheduleError
from autopipe.estimate import (
    estimate,
    memory,
    peak,
    pipeline_seconds,
    profile_of,
    reduce_seconds,
    stage_seconds,
    tables,
)
from autopipe.plan import Memory
from autopipe.problem import (
    Constraints,
    Crossing,
    Decision,
    Problem,
    Profile,
    Saved,
    Shared,
)
from autopipe.schedule import SCHEDULES, timeline
from tests.problems import random_problem


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


#   units        0     1     2
#   forward      1 s   2 s   3 s         backward twice that
#   parameters   100   50    100 tied with unit 0's
#   saved        10    20    30          each by its own unit
#   crossings    0 -> 1 and 2: 8 bytes, gradient returns      0 -> 2: 4 bytes, none
#                1 -> 2: 6 bytes, gradient returns
PROFILE = Profile(
    rows=2,
    forward=(1.0, 2.0, 3.0),
    backward=(2.0, 4.0, 6.0),
    saved=(Saved(10, 0, (0,)), Saved(20, 1, (1,)), Saved(30, None, (2,))),
    crossings=(
        Crossing(8, 0, (1, 2), gradient=True),
        Crossing(4, 0, (2,), gradient=False),
        Crossing(6, 1, (2,), gradient=True),
    ),
)
PROBLEM = Problem(
    units=3,
    blocks=(),
    parameters=(Shared(100, (0, 2)), Shared(50, (1,))),
    constants=(Shared(7, (1, 2)),),
    optimizer_factor=2.0,
    profiles=(PROFILE,),
    batch=8,
    devices=2,
    memory=1000,
    latency=0.25,
    bandwidth=4.0,
    window=3,
    constraints=Constraints(),
)
TWO_STAGES = Decision(pp=2, dp=1, micro_batches=4, schedule="1f1b", cuts=(1,))


def test_two_stages_by_hand() -> None:
    found = estimate(PROBLEM, TWO_STAGES)
    first, second = found.stages

    # Stage 0 is unit 0: it sends 8 + 4, and 8 come back; two micro-batches are in flight.
    assert (first.first, first.last, first.in_flight) == (0, 0, 2)
    assert (first.forward_seconds, first.backward_seconds, first.transfer_seconds) == (1, 2, 0)
    assert first.memory == Memory(
        parameters=100,
        gradients=100,
        optimizer=2 * 100,
        buffers=0,
        activations=2 * 10,
        transfers=(3 + 1) * 8 + 2 * 12,  # gradients: 3 posted ahead, and the one in use
    )

    # Stage 1 is units 1 and 2: it receives 8 + 4 once though both units use the 8; 8 go back.
    assert (second.first, second.last, second.in_flight) == (1, 2, 1)
    assert (second.forward_seconds, second.backward_seconds) == (5, 10)
    assert second.transfer_seconds == (12 + 8) / 4 + 2 * 0.25
    assert second.memory == Memory(
        parameters=150,  # The tied 100 are held by both stages.
        gradients=150,
        optimizer=2 * 150,
        buffers=7,
        activations=1 * (20 + 30 + 12),
        transfers=3 * 12 + 2 * 8,
    )

    # t = 3 and 20.5; three more micro-batches follow at the pace of the slower stage.
    assert found.step_seconds == 3 + 20.5 + 3 * 20.5
    assert found.bubble == pytest.approx(1 - 4 * (3 + 20.5) / 2 / (3 + 20.5 + 3 * 20.5))
    assert (found.fits, found.worst, found.overflow, found.reduce_seconds) == (True, 1, 0, 0)


def test_the_worst_stage_says_how_many_bytes_are_missing() -> None:
    peaks = [stage.memory.peak for stage in estimate(PROBLEM, TWO_STAGES).stages]
    tight = estimate(replace(PROBLEM, memory=max(peaks) - 1), TWO_STAGES)
    assert (tight.fits, tight.worst, tight.overflow) == (False, peaks.index(max(peaks)), 1)
    assert estimate(replace(PROBLEM, memory=max(peaks)), TWO_STAGES).fits


def test_gpipe_holds_all_micro_batches_and_is_as_fast() -> None:
    gpipe = estimate(PROBLEM, replace(TWO_STAGES, schedule="gpipe"))
    assert [stage.memory.activations for stage in gpipe.stages] == [4 * 10, 4 * (20 + 30 + 12)]
    assert gpipe.step_seconds == estimate(PROBLEM, TWO_STAGES).step_seconds


def test_no_more_transfers_are_under_way_than_there_are_micro_batches() -> None:
    one = replace(PROBLEM, batch=2)
    found = estimate(one, replace(TWO_STAGES, micro_batches=1))
    assert [stage.memory.transfers for stage in found.stages] == [8 + 12, 12 + 8]


def test_data_parallel_stages_reduce_in_a_ring_and_stage_0_is_exposed() -> None:
    found = estimate(PROBLEM, Decision(pp=2, dp=4, micro_batches=1, schedule="1f1b", cuts=(1,)))
    # 2 * 3 / 4 of 100 bytes at 4 bytes a second, and 2 * 3 times the latency.
    assert found.reduce_seconds == 2 * 3 / 4 * 100 / 4 + 2 * 3 * 0.25
    assert found.step_seconds == 3 + 20.5 + found.reduce_seconds
    whole = tables(PROBLEM, PROFILE).at(0, 3)
    assert reduce_seconds(whole, PROBLEM, 1) == 0


@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 4), (4, 4), (3, 16)])
def test_equal_stages_idle_for_the_bubble_of_the_textbook(p: int, m: int) -> None:
    profile = Profile(1, (1.0,) * p, (2.0,) * p, (), ())
    problem = replace(
        PROBLEM, units=p, profiles=(profile,), batch=m, parameters=(), constants=(), devices=p
    )
    decision = Decision(pp=p, dp=1, micro_batches=m, schedule="1f1b", cuts=tuple(range(1, p)))
    found = estimate(problem, decision)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1))
    for make in SCHEDULES.values():
        assert max(span.end for span in timeline(make(p, m))) == found.step_seconds


def test_the_step_is_the_schedules_own_timeline_or_a_bound_on_it() -> None:
    random = Random(0)
    for _ in range(50):
        p, m = random.randint(1, 5), random.randint(1, 8)
        forward = [random.uniform(0.5, 2) for _ in range(p)]
        predicted = float(pipeline_seconds(3 * np.array(forward), m))
        spans = {
            name: max(s.end for s in timeline(make(p, m), forward, [2 * f for f in forward]))
            for name, make in SCHEDULES.items()
        }
        assert spans["gpipe"] == pytest.approx(predicted)
        assert spans["1f1b"] <= predicted * (1 + 1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_many_ranges_at_once_cost_what_each_costs(seed: int) -> None:
    problem = random_problem(seed)
    every = tables(problem, problem.profiles[0])
    seconds, peaks = stage_seconds(every, problem), peak(every, problem, 3, 2)
    for i, j in zip(*np.triu_indices(problem.units + 1, k=1), strict=True):
        one = every.at(i, j)
        assert stage_seconds(one, problem) == seconds[i, j]
        assert Memory(*map(int, memory(one, problem, 3, 2))).peak == peaks[i, j]


def test_tables_are_made_once_whatever_the_memory() -> None:
    assert tables(PROBLEM, PROFILE) is tables(replace(PROBLEM, memory=1), PROFILE)


def test_micro_batches_need_whole_rows_and_a_profile() -> None:
    assert profile_of(PROBLEM, 2, 2) is PROFILE
    assert profile_of(PROBLEM, 3, 1) is None  # 8 rows do not divide by 3
    assert profile_of(PROBLEM, 1, 2) is None  # 4 rows were not profiled
    for m in (2, 3):
        with pytest.raises(InfeasibleError, match=rf"8 rows over dp=1 and micro_batches={m} "):
            estimate(PROBLEM, replace(TWO_STAGES, micro_batches=m))


@pytest.mark.parametrize("cuts", [(), (0,), (3,), (1, 2)])
def test_cuts_that_make_no_two_stages_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(InfeasibleError, match="pp=2 needs 1 ascending cuts between 1 and 2"):
        estimate(PROBLEM, replace(TWO_STAGES, cuts=cuts))


def test_a_schedule_nobody_knows_is_refused() -> None:
    with pytest.raises(ScheduleError, match="'2f2b'"):
        estimate(PROBLEM, replace(TWO_STAGES, schedule="2f2b"))
