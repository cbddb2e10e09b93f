"""The estimate: its formulas against numbers worked by hand and against simulated schedules."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import InfeasibleError, ScheduleError
from autopipe.planfile.parts import Memory
from autopipe.planners.model.estimate import estimate, settle
from autopipe.planners.model.places import placement, places, profile_of
from autopipe.planners.model.problem import (
    WRITTEN,
    Again,
    Config,
    Constraints,
    Decision,
    Problem,
    Profile,
    Saved,
    Shared,
)
from autopipe.planners.model.stage_costs import StageSeconds
from autopipe.planners.model.step_formula import (
    MOST_RANKS,
    filling_of,
    floor_seconds,
    named_filling,
    step_seconds,
    weights,
)
from autopipe.schedules.instructions import Kind, holders
from autopipe.schedules.registry import SCHEDULES, make
from autopipe.schedules.simulate import Costs, simulate
from tests.support.problems import line, machine, rich_problem
from tests.support.two_stages import FOUR_REPLICAS, LINK, PROBLEM, PROFILE, TWO_STAGES, UNTIED

TWO = Decision(TWO_STAGES, (1,))
"""Unit 0, and units 1 and 2."""


TIED = 2 * (100 / 2 / 4 + 0.25)
"""Seconds of summing 100 bytes that both stages have: half of them there and back at 4 a second,
after 0.25 s each time."""


def limited(problem: Problem, *memory: int) -> Problem:
    """The problem with one limit for all devices, or with one for each."""
    each = memory * problem.machine.devices if len(memory) == 1 else memory
    return replace(problem, machine=replace(problem.machine, memory=each))


def test_two_stages_by_hand() -> None:
    found = estimate(PROBLEM, TWO)
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

    # t = 3 and 20.5; three more micro-batches follow at the pace of the slower stage. Then the tied
    # 100 are summed.
    assert (first.period, second.period) == (3, 20.5)
    assert found.step_seconds == 3 + 20.5 + 3 * 20.5 + TIED
    assert (found.fits, found.worst, found.limit, found.overflow) == (True, (1,), 1000, 0)


def test_tied_gradients_take_as_long_whichever_of_unlike_devices_comes_first() -> None:
    """Bug: the first stage on the last device was taken for the last stage, which sums nothing."""
    problem = line((1.0, 1.0, 1.0), kinds=(0, 1), link=Link(0.0, 100.0))
    problem = replace(problem, parameters=(Shared(300, (0, 2)), Shared(100, (1,))))
    config = Config(2, 1, 4, 0, "1f1b")
    one, other = (
        estimate(problem, Decision(config, (1,), groups=groups)).spent["reducing gradients"]
        for groups in ((0, 1), (1, 0))
    )
    assert one == other > 0


def test_where_the_seconds_of_a_step_go() -> None:
    """On average over both devices, four micro-batches each; what is left they wait."""
    found = estimate(PROBLEM, TWO)
    assert found.spent == {
        "computing": 4 * (3 + 15) / 2,
        "running blocks again": 0,
        "tensor-parallel exchanges": 0,
        "gathering and scattering": 0,
        "copies to the host and back": 0,
        "transfers": 4 * 5.5 / 2,
        "reducing gradients": TIED,
        "the bubble": 85 - 36 - 11,
    }


def test_seconds_of_exchanging_are_told_apart_from_computing() -> None:
    exchanging = replace(PROFILE, exchange=((0.5, 0.0, 1.5),))
    spent = estimate(replace(PROBLEM, profiles=(exchanging,)), TWO).spent
    assert spent["tensor-parallel exchanges"] == 4 * 2.0 / 2
    assert spent["computing"] == 4 * (18 - 2) / 2


def test_the_worst_stage_says_how_many_bytes_are_missing() -> None:
    peaks = [stage.memory.peak for stage in estimate(PROBLEM, TWO).stages]
    tight = estimate(limited(PROBLEM, max(peaks) - 1), TWO)
    assert (tight.fits, tight.worst, tight.overflow) == (False, (peaks.index(max(peaks)),), 1)
    assert estimate(limited(PROBLEM, max(peaks)), TWO).fits


def test_each_device_has_its_own_limit() -> None:
    """Stage 0 needs less than stage 1, but has less still."""
    first, second = (stage.memory.peak for stage in estimate(PROBLEM, TWO).stages)
    assert first < second
    own = limited(replace(PROBLEM, machine=machine(2, 1, (LINK,) * 3)), first - 1, second)
    found = estimate(own, TWO)
    assert (found.worst, found.limit, found.overflow) == ((0,), first - 1, 1)
    swapped = estimate(own, replace(TWO, groups=(1, 0)))
    assert (swapped.worst, swapped.overflow) == ((1,), second - (first - 1))


def test_gpipe_holds_all_micro_batches_and_is_as_fast() -> None:
    gpipe = estimate(PROBLEM, Decision(TWO_STAGES._replace(schedule="gpipe"), (1,)))
    assert [stage.memory.activations for stage in gpipe.stages] == [4 * 10, 4 * (20 + 30 + 12)]
    assert gpipe.step_seconds == estimate(PROBLEM, TWO).step_seconds


def test_no_more_transfers_are_under_way_than_there_are_micro_batches() -> None:
    one = replace(PROBLEM, batch=2)
    found = estimate(one, Decision(Config(2, 1, 1, 0, "1f1b"), (1,)))
    assert [stage.memory.transfers for stage in found.stages] == [8 + 12, 12 + 8]


def test_of_all_sums_of_gradients_the_one_that_ends_last_is_exposed() -> None:
    """Four replicas: 3 / 4 of 150 bytes there and back at 4 a second, and 2 latencies each way, for
    stage 1, which begins when stage 0 has 2 s of backward left. The 100 of stage 0 are stage 1's
    too: 7 / 8 of them there and back over eight devices, and 3 latencies each way."""
    found = estimate(PROBLEM, Decision(FOUR_REPLICAS, (1,)))
    sums = 2 * (7 / 8 * 100 / 4 + 3 * 0.25), 2 * (3 / 4 * 150 / 4 + 2 * 0.25)
    assert found.spent["reducing gradients"] == sums[1] - 2
    assert found.step_seconds == 3 + 20.5 + sums[1] - 2
    slow = replace(PROFILE, backward=((40.0, 4.0, 6.0),))
    hidden = estimate(replace(PROBLEM, profiles=(slow,)), Decision(FOUR_REPLICAS, (1,)))
    assert hidden.spent["reducing gradients"] == sums[0] > sums[1] - 40


def test_under_zero_3_a_forward_gathers_and_a_backward_gathers_and_scatters() -> None:
    """Two stages of 100 and 150 bytes, four replicas. At the end each replica sums its 25 bytes of
    the 100 that both stages have."""
    found = estimate(PROBLEM, Decision(FOUR_REPLICAS._replace(zero=3), (1,)))
    copying = PROBLEM.machine.copying
    once = [3 / 4 * size / 4 + 3 * 0.25 + 3 * size / copying for size in (100, 150)]
    assert [stage.forward_seconds for stage in found.stages] == [1 + once[0], 5 + once[1]]
    assert [stage.backward_seconds for stage in found.stages] == [2 + 2 * once[0], 10 + 2 * once[1]]
    tied = 2 * (25 / 2 / 4 + 0.25)
    assert found.spent["reducing gradients"] == tied
    assert found.spent["gathering and scattering"] == 3 * sum(once) / 2
    assert found.step_seconds == 3 + 20.5 + 3 * sum(once) + tied
    alone, usual = (Decision(TWO_STAGES._replace(zero=zero), (1,)) for zero in (3, 0))
    assert estimate(PROBLEM, alone).stages == estimate(PROBLEM, usual).stages


# The schedules' own steps.


def alike(stages: int, micro_batches: int, constraints: Constraints | None = None) -> Problem:
    """Units whose F is 1 and whose B is 2, one a stage, and nothing else that costs."""
    return replace(
        PROBLEM,
        units=stages,
        profiles=(Profile(1, ((1.0,) * stages,), ((2.0,) * stages,), (), ()),),
        batch=micro_batches,
        parameters=(),
        constants=(),
        machine=machine(stages, 1000),
        constraints=constraints or Constraints(),
    )


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("name", "chunks"),
    [
        ("naive", 1),
        ("gpipe", 1),
        ("1f1b", 1),
        ("eager-1f1b", 1),
        ("interleaved", 2),
        ("interleaved", 4),
        ("zb-h1", 1),
        ("zb-v", 2),
    ],
)
def test_equal_stages_take_what_their_schedule_takes(name: str, chunks: int, ranks: int) -> None:
    """F = I = W = 1, links that take no time: the formula is exact, whatever divides what."""
    stages = ranks * chunks
    for m in (*range(1, 4 * ranks), 7 * ranks + 1):
        problem = alike(stages, m, Constraints(chunks=chunks))
        config = Config(ranks, 1, m, 0, name, 1 if name == "eager-1f1b" else 0)
        programs = make(
            name, ranks, m, chunks=chunks, depths=(1,) * (ranks - 1) if config.depth else ()
        )
        simulated = simulate(programs, Costs.even(stages)).seconds
        found = estimate(problem, Decision(config, tuple(range(1, stages))))
        assert found.step_seconds == pytest.approx(simulated, rel=1e-12)


def test_what_filling_and_draining_costs() -> None:
    """Of a rank's 3 seconds a micro-batch: all of them, or a third where W fills the bubble.

    1f1b      rank 0: F0 F1 F2    B0--- F3 B1--- ...
    zb-h1     rank 0: F0 F1 F2       I0 F3 W0 ...
    naive     all other ranks wait while one works
    """
    for m in (1, 4, 9):
        assert named_filling("1f1b", 3, m, 1) == pytest.approx(1)
        assert named_filling("gpipe", 3, m, 1) == pytest.approx(1)
        assert named_filling("naive", 3, m, 1) == pytest.approx(m)
    assert named_filling("zb-h1", 3, 9, 1) == pytest.approx(1 / 3)
    assert named_filling("zb-h1", 3, 1, 1) == pytest.approx(2 / 3)  # nothing is there to fill with


def test_long_pipelines_fill_as_short_ones_do() -> None:
    """Counted in `MOST_RANKS` ranks with as many micro-batches a rank: no program of 64 is made."""
    for name, chunks in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2)):
        for m in (64, 256):
            problem = alike(64 * chunks, m, Constraints(chunks=chunks))
            short = weights(problem, Config(MOST_RANKS, 1, m // 8, 0, name))[0]
            assert weights(problem, Config(64, 1, m, 0, name))[0] == pytest.approx(short)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)]
)
def test_from_two_micro_batches_a_rank_on_it_repeats(schedule: str, chunks: int) -> None:
    """So `weights` need not simulate more of them than three a rank."""
    for ranks in (2, 3, 4):
        for m in range(3 * ranks, 5 * ranks + 2):
            fewer = named_filling(schedule, ranks, 2 * ranks + m % ranks, chunks)
            assert filling_of(make(schedule, ranks, m, chunks=chunks), m) == pytest.approx(fewer)


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_laws_are_what_is_counted(schedule: str, chunks: int, ranks: int) -> None:
    """The bubble that the papers give, and that of the schedule's own programs."""
    for m in range(1, 3 * ranks + 1):
        counted = filling_of(make(schedule, ranks, m, chunks=chunks), m)
        assert named_filling(schedule, ranks, m, chunks) == pytest.approx(counted)


def test_a_written_schedule_is_counted_too() -> None:
    """Of one that is gpipe by another name the step is gpipe's, whatever 1f1b would take."""
    programs = make("gpipe", 2, 4)
    problem = replace(PROBLEM, constraints=Constraints(programs=programs, schedule=WRITTEN))
    config = TWO_STAGES._replace(schedule=WRITTEN)
    assert weights(problem, config) == pytest.approx((1, 3))
    found = estimate(problem, Decision(config, (1,)))
    assert [stage.in_flight for stage in found.stages] == [4, 4]  # read off its programs
    turns = Constraints(programs=make("naive", 2, 4), schedule=WRITTEN)
    assert weights(replace(PROBLEM, constraints=turns), config) == pytest.approx((4, 0))
    twice = Constraints(programs=make("zb-v", 2, 4, chunks=2), schedule=WRITTEN)
    zb_v = weights(PROBLEM, TWO_STAGES._replace(schedule="zb-v"))
    assert weights(replace(PROBLEM, constraints=twice), config) == pytest.approx(zb_v)


def test_the_step_is_the_schedules_own_timeline_or_a_bound_on_it() -> None:
    random = Random(0)
    for _ in range(50):
        p, m = random.randint(1, 5), random.randint(1, 8)
        forward = [random.uniform(0.5, 2) for _ in range(p)]
        seconds = 3 * np.array(forward)
        stages = StageSeconds(seconds, seconds, np.zeros(p))
        predicted = float(step_seconds(stages, (1, m - 1)))
        costs = Costs.of(forward, [2 * f for f in forward])
        assert simulate(make("gpipe", p, m), costs).seconds == pytest.approx(predicted)
        assert simulate(make("1f1b", p, m), costs).seconds <= predicted * (1 + 1e-12)


BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "naive", "interleaved", "zb-h1"])
@pytest.mark.parametrize("m", [4, 8])
def test_what_hides_a_sum_of_gradients_is_what_its_timeline_has_left(schedule: str, m: int) -> None:
    """From a stage's last backward on to stage 0's: the backwards of all stages before it; nothing
    where backwards are split."""
    programs = make(schedule, 4, m, chunks=2 if schedule == "interleaved" else 1)
    timeline = simulate(programs, Costs.even(len(holders(programs)), backward=2.0))
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.instruction.kind in BACKWARDS:
            ends[span.instruction.stage] = span.end
    split = schedule == "zb-h1"
    for stage, end in ends.items():
        assert ends[0] - end == pytest.approx(0 if split else 2 * stage)


def test_eager_is_no_faster_than_its_depth_lets_it() -> None:
    """18 s there and back, and two latencies: of depth e there are 2 + e micro-batches under way.

    From e = 1 on, stage 1 is slower than that: 15 s.
    """
    for depth, least in ((0, 18.5 / 2), (1, 18.5 / 3), (2, 18.5 / 4)):
        config = Config(2, 1, 4, 0, "eager-1f1b", depth)
        assert floor_seconds(UNTIED, config) == least
        assert estimate(UNTIED, Decision(config, (1,))).step_seconds == 3 + 20.5 + 3 * 15
    far = replace(UNTIED, machine=machine(2, 1000, (Link(12.0, 4.0),) * 3))
    steps = []
    for depth in (1, 2):
        config = Config(2, 1, 4, 0, "eager-1f1b", depth)
        steps.append(estimate(far, Decision(config, (1,))).step_seconds)
    # t_1 = 15 + 5 + 2 * 12; of (18 + 24) / 3 = 14 stage 1 is no faster, at any depth.
    assert steps == [3 + 44 + 3 * 15] * 2
    farther = replace(UNTIED, machine=machine(2, 1000, (Link(30.0, 4.0),) * 3))
    for depth, pace in ((1, 78 / 3), (2, 78 / 4), (4, 15)):
        config = Config(2, 1, 4, 0, "eager-1f1b", depth)
        found = estimate(farther, Decision(config, (1,)))
        assert found.step_seconds == 3 + 80 + 3 * pace
    assert floor_seconds(UNTIED, TWO_STAGES) == 0


# Several stages on a rank.


def test_a_device_holds_all_its_stages() -> None:
    """zb-v: rank 0 has stages 0 and 3 of four, rank 1 has 1 and 2; a unit has 100 bytes."""
    problem = replace(alike(4, 4), parameters=tuple(Shared(100, (unit,)) for unit in range(4)))
    decision = Decision(Config(2, 1, 4, 0, "zb-v"), (1, 2, 3))
    assert placement(problem.constraints, "zb-v", 2) == (0, 1, 1, 0)
    assert placement(problem.constraints, "interleaved", 2) == (0, 1, 0, 1)
    found = estimate(problem, decision)
    assert [stage.memory.peak for stage in found.stages] == [400] * 4  # weights, gradients, Adam
    assert (found.fits, found.worst) == (True, (0, 3))
    tight = estimate(limited(problem, 799), decision)
    assert (tight.fits, tight.worst, tight.overflow) == (False, (0, 3), 1)
    heavy = replace(problem, parameters=(*problem.parameters, Shared(1, (2,))))
    assert estimate(heavy, decision).worst == (1, 2)


def test_nothing_is_sent_from_one_stage_of_a_device_to_the_next() -> None:
    """zb-v: stages 1 and 2 are both on rank 1, so that one link lies before 1 and one before 3."""
    config = Config(2, 1, 4, 0, "zb-v")
    before = [place.before is not None for place in places(PROBLEM, config, (0, 1))]
    assert before == [False, True, False, True]


# Groups of devices, and what runs again.


def test_a_stage_is_as_fast_and_as_large_as_its_group_of_devices() -> None:
    """Two kinds, the second half as fast: the order of groups says who has which stage."""
    slower = replace(
        PROFILE,
        forward=(*PROFILE.forward, tuple(2 * s for s in PROFILE.forward[0])),
        backward=(*PROFILE.backward, tuple(2 * s for s in PROFILE.backward[0])),
    )
    problem = replace(PROBLEM, profiles=(slower,), machine=machine((0, 1), 1000, (LINK,) * 3))
    in_order, swapped = (estimate(problem, replace(TWO, groups=g)) for g in ((0, 1), (1, 0)))
    assert [stage.period for stage in in_order.stages] == [3, 30 + 5.5]
    assert [stage.period for stage in swapped.stages] == [6, 15 + 5.5]
    assert estimate(problem, TWO) == in_order


def test_what_runs_again_takes_its_seconds_in_backward_and_lets_its_bytes_go() -> None:
    """Unit 0 keeps 10 bytes of a block, which two micro-batches had; unit 2 those 30 of another."""
    again = replace(
        PROFILE,
        saved=(Saved(10, 0, (0,), 0), Saved(20, 1, (1,)), Saved(30, None, (2,), 1)),
        recompute=(((0.75,),), ((2.5,),)),
    )
    problem = replace(PROBLEM, profiles=(again,), recomputable=((0, 1), (2, 3)))
    usual, both = (
        estimate(problem, replace(TWO, recompute=blocks))
        for blocks in (((), ()), ((Again(0),), (Again(1),)))
    )
    assert [stage.backward_seconds for stage in both.stages] == [2 + 0.75, 10 + 2.5]
    activations = [stage.memory.activations for stage in both.stages]
    assert activations == [2 * (10 - 10) + 10, 1 * (62 - 30) + 30]
    assert both.step_seconds == usual.step_seconds + 0.75 + 4 * 2.5
    assert both.spent["running blocks again"] == 4 * 3.25 / 2


@pytest.mark.parametrize("seed", range(40))
def test_a_settled_decision_runs_again_what_must(seed: int) -> None:
    """What `settle` adds up is what `estimate` counts: it fits where anything does."""
    problem = rich_problem(seed)
    random = Random(seed)
    rows = random.choice(problem.profiles).rows
    pp = random.randint(1, min(problem.machine.devices, problem.units))
    config = Config(pp, 1, problem.batch // rows, 0, "1f1b")
    cuts = tuple(sorted(random.sample(range(1, problem.units), pp - 1)))
    groups = tuple(random.sample(range(problem.machine.devices), pp))
    found = settle(problem, config, cuts, groups)
    usual = estimate(problem, Decision(config, cuts, (), groups))
    settled = estimate(problem, found)
    assert settled.overflow <= usual.overflow
    assert settled.step_seconds >= usual.step_seconds * (1 - 1e-12)
    if usual.fits:
        assert not any(found.recompute)
    if usual.fits or not problem.recomputable:
        assert math.isclose(settled.step_seconds, usual.step_seconds)


# What is refused.


def test_micro_batches_need_whole_rows_and_a_profile() -> None:
    assert profile_of(PROBLEM, 2, 2) is PROFILE
    assert profile_of(PROBLEM, 3, 1) is None  # 8 rows do not divide by 3
    assert profile_of(PROBLEM, 1, 2) is None  # 4 rows were not profiled
    for m in (2, 3):
        with pytest.raises(InfeasibleError, match=rf"8 rows over dp=1 and micro_batches={m} "):
            estimate(PROBLEM, Decision(TWO_STAGES._replace(micro_batches=m), (1,)))


@pytest.mark.parametrize("cuts", [(), (0,), (3,), (1, 2)])
def test_cuts_that_make_no_two_stages_are_refused(cuts: tuple[int, ...]) -> None:
    with pytest.raises(InfeasibleError, match="pp=2 needs 1 ascending cuts between 1 and 2"):
        estimate(PROBLEM, Decision(TWO_STAGES, cuts))


def test_a_schedule_nobody_knows_is_refused() -> None:
    assert "2f2b" not in SCHEDULES
    with pytest.raises(ScheduleError, match="'2f2b'"):
        estimate(PROBLEM, Decision(TWO_STAGES._replace(schedule="2f2b"), (1,)))
