"""The estimate: its formulas against numbers worked by hand and against simulated schedules."""

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
    placement,
    profile_of,
    reduce_seconds,
    room,
    stage_seconds,
    weights,
)
from autopipe.plan import Memory
from autopipe.problem import (
    WRITTEN,
    Constraints,
    Crossing,
    Decision,
    Problem,
    Profile,
    Saved,
    Shared,
)
from autopipe.schedules import make
from autopipe.simulate import Costs, simulate
from autopipe.tables import tables
from tests.problems import random_problem

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
        transfers=(3 + 1) * 8 + 12,  # gradients: 3 posted ahead, and the one in use
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
    assert (first.period, second.period) == (3, 20.5)
    assert found.step_seconds == 3 + 20.5 + 3 * 20.5
    assert (found.fits, found.worst, found.overflow, found.reduce_seconds) == (True, (1,), 0, 0)


def test_the_worst_stage_says_how_many_bytes_are_missing() -> None:
    peaks = [stage.memory.peak for stage in estimate(PROBLEM, TWO_STAGES).stages]
    tight = estimate(replace(PROBLEM, memory=max(peaks) - 1), TWO_STAGES)
    assert (tight.fits, tight.worst, tight.overflow) == (False, (peaks.index(max(peaks)),), 1)
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


def alike(stages: int, micro_batches: int, constraints: Constraints | None = None) -> Problem:
    """Units whose F is 1 and whose B is 2, one a stage, and nothing else that costs."""
    profile = Profile(1, (1.0,) * stages, (2.0,) * stages, (), ())
    return replace(
        PROBLEM,
        units=stages,
        profiles=(profile,),
        batch=micro_batches,
        parameters=(),
        constants=(),
        devices=stages,
        constraints=constraints or Constraints(),
    )


@pytest.mark.parametrize(
    ("name", "chunks", "micro_batches"),
    [
        ("naive", 1, (1, 3, 5)),
        ("gpipe", 1, (1, 3, 5)),
        ("1f1b", 1, (1, 3, 5)),
        ("eager-1f1b", 1, (1, 3, 5)),
        ("interleaved", 2, (3, 6, 9)),  # full rounds
        ("interleaved", 4, (3, 6, 9)),
        ("zb-h1", 1, (3, 5)),
        ("zb-v", 2, (6, 7, 9)),  # at least 2 p
    ],
)
def test_equal_stages_take_what_their_schedule_takes(
    name: str, chunks: int, micro_batches: tuple[int, ...]
) -> None:
    """Three ranks; F = I = W = 1, links that take no time: the formula is exact."""
    stages = 3 * chunks
    for m in micro_batches:
        problem = alike(stages, m, Constraints(chunks=chunks))
        decision = Decision(3, 1, m, name, tuple(range(1, stages)))
        programs = make(name, 3, m, chunks=chunks)
        simulated = simulate(programs, Costs.even(stages)).seconds
        assert estimate(problem, decision).step_seconds == pytest.approx(simulated, rel=1e-12)


def test_a_written_schedule_is_scored_as_1f1b_of_as_many_stages() -> None:
    programs = make("gpipe", 2, 4)
    problem = replace(PROBLEM, constraints=Constraints(programs=programs, schedule=WRITTEN))
    assert weights(problem, WRITTEN, 4) == weights(PROBLEM, "1f1b", 4) == (1, 3)
    found = estimate(problem, replace(TWO_STAGES, schedule=WRITTEN))
    assert [stage.in_flight for stage in found.stages] == [4, 4]  # read off its programs
    twice = Constraints(programs=make("zb-v", 2, 4, chunks=2), schedule=WRITTEN)
    assert weights(replace(PROBLEM, constraints=twice), WRITTEN, 4) == (1 / 2, 2 * 4 - 1)


def test_eager_hides_its_links_behind_computing_or_the_slower_wire() -> None:
    """Stage 1 computes for 15 s, and gets 12 bytes and sends 8 back at 4 bytes a second."""
    found = estimate(PROBLEM, replace(TWO_STAGES, schedule="eager-1f1b"))
    assert [stage.period for stage in found.stages] == [3, 15]
    assert found.step_seconds == 3 + 20.5 + 3 * 15
    slow = estimate(replace(PROBLEM, bandwidth=0.5), replace(TWO_STAGES, schedule="eager-1f1b"))
    assert [stage.period for stage in slow.stages] == [3, 12 / 0.5]


def test_the_step_is_the_schedules_own_timeline_or_a_bound_on_it() -> None:
    random = Random(0)
    for _ in range(50):
        p, m = random.randint(1, 5), random.randint(1, 8)
        forward = [random.uniform(0.5, 2) for _ in range(p)]
        seconds = 3 * np.array(forward)
        predicted = float(pipeline_seconds(seconds, seconds, (1, m - 1)))
        costs = Costs.of(forward, [2 * f for f in forward])
        assert simulate(make("gpipe", p, m), costs).seconds == pytest.approx(predicted)
        assert simulate(make("1f1b", p, m), costs).seconds <= predicted * (1 + 1e-12)


# Several stages on a rank.


def test_a_device_holds_all_its_stages() -> None:
    """zb-v: rank 0 has stages 0 and 3 of four, rank 1 has 1 and 2; a unit has 100 bytes."""
    problem = replace(alike(4, 4), parameters=tuple(Shared(100, (unit,)) for unit in range(4)))
    decision = Decision(2, 1, 4, "zb-v", (1, 2, 3))
    assert placement(problem.constraints, "zb-v", 2) == (0, 1, 1, 0)
    assert placement(problem.constraints, "interleaved", 2) == (0, 1, 0, 1)
    found = estimate(problem, decision)
    assert [stage.memory.peak for stage in found.stages] == [400] * 4  # weights, gradients, Adam
    assert (found.fits, found.worst) == (True, (0, 3))
    tight = estimate(replace(problem, memory=799), decision)
    assert (tight.fits, tight.worst, tight.overflow) == (False, (0, 3), 1)
    heavy = replace(problem, parameters=(*problem.parameters, Shared(1, (2,))))
    assert estimate(heavy, decision).worst == (1, 2)


def test_each_of_several_stages_has_an_equal_share_of_its_device() -> None:
    for name, share in (("1f1b", 1000), ("interleaved", 500), ("zb-v", 500)):
        assert room(PROBLEM, name) == share
    four = replace(PROBLEM, constraints=Constraints(chunks=4))
    assert [room(four, name) for name in ("1f1b", "interleaved", "zb-v")] == [1000, 250, 500]


# ZeRO.


def test_zero_1_deals_out_optimizer_state() -> None:
    """Two stages of 100 and 150 bytes, four replicas: a quarter each, rounded up."""
    decision = Decision(pp=2, dp=4, micro_batches=1, schedule="1f1b", cuts=(1,))
    usual, dealt = (estimate(replace(PROBLEM, zero=zero), decision) for zero in (0, 1))
    for stage, other, own in zip(usual.stages, dealt.stages, (25, 38), strict=True):
        assert other.memory == replace(stage.memory, optimizer=2 * own)
    assert usual.step_seconds == dealt.step_seconds
    alone = replace(decision, dp=1, micro_batches=4)
    assert estimate(replace(PROBLEM, zero=1), alone) == estimate(PROBLEM, alone)


def test_zero_3_deals_out_everything_and_gathers_what_runs() -> None:
    """Unit 1 is a block; the 100 bytes that units 0 and 2 share are of none.

    Stage 0, unit 0:  a quarter of 100, and 2 * 100 gathered
    Stage 1:          a quarter of 150, and 2 * 100 + 7 * 50

    A ring takes 2 * 3 / 4 of the bytes at 4 a second and 2 * 3 latencies of 0.25 s. Forward gathers
    for half of that, backward gathers and scatters for a whole; at the end nothing is left to sum.
    """
    problem = replace(PROBLEM, zero=3, blocks=((1, 2),))
    decision = Decision(pp=2, dp=4, micro_batches=1, schedule="1f1b", cuts=(1,))
    found = estimate(problem, decision)
    memories = [stage.memory for stage in found.stages]
    assert [memory.parameters for memory in memories] == [25 + 200, 38 + 200 + 350]
    assert [memory.gradients for memory in memories] == [25, 38]
    assert [memory.optimizer for memory in memories] == [50, 76]
    rings = [1.5 * size / 4 + 1.5 for size in (100, 150)]
    assert [stage.forward_seconds for stage in found.stages] == [1 + rings[0] / 2, 5 + rings[1] / 2]
    assert [stage.backward_seconds for stage in found.stages] == [2 + rings[0], 10 + rings[1]]
    assert found.reduce_seconds == 0
    assert found.step_seconds == 3 + 20.5 + 1.5 * sum(rings)
    alone = replace(decision, dp=1, micro_batches=4)
    assert estimate(problem, alone).stages == estimate(PROBLEM, alone).stages


@pytest.mark.parametrize("seed", range(10))
def test_many_ranges_at_once_cost_what_each_costs(seed: int) -> None:
    problem = random_problem(seed)
    every = tables(problem, problem.profiles[0])
    seconds, peaks = stage_seconds(every, problem), peak(every, problem, 3, 2)
    for i, j in zip(*np.triu_indices(problem.units + 1, k=1), strict=True):
        one = every.at(i, j)
        assert stage_seconds(one, problem) == seconds[i, j]
        assert Memory(*map(int, memory(one, problem, 3, 2))).peak == peaks[i, j]


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
