"""The planners: against each other, against brute force, and what they say."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import combinations

import pytest

from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.estimate import estimate
from autopipe.planners import PLANNERS, Answer
from autopipe.planners.answer import Amount, duration, percent
from autopipe.planners.search import Frame, frames, schedules, undominated
from autopipe.planners.uniform import even_cuts
from autopipe.problem import Constraints, Crossing, Decision, Problem, Profile, Saved, Shared
from autopipe.schedules import SCHEDULES
from tests.problems import random_problem

SEEDS = range(200)


@functools.cache
def answer_or_refusal(
    planner: str, seed: int, schedule: str | None = None, zero: int = 0
) -> Answer | InfeasibleError:
    problem = replace(random_problem(seed), zero=zero, constraints=Constraints(schedule=schedule))
    try:
        return PLANNERS[planner](problem)
    except InfeasibleError as refusal:
        return refusal


def steps(answer: Answer) -> dict[Frame, float | None]:
    """Seconds of the best decision of every frame; None where none fits."""
    decision = answer.decision
    best = Frame(decision.pp, decision.dp, decision.micro_batches)
    others = {Frame(a.pp, a.dp, a.micro_batches): a.step_seconds for a in answer.alternatives}
    return {best: answer.estimate.step_seconds, **others}


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("seed", SEEDS)
def test_dynamic_is_exhaustive_in_every_frame(seed: int, schedule: str | None) -> None:
    same_in_every_frame(seed, schedule)


@pytest.mark.parametrize("schedule", [n for n in SCHEDULES if n not in ("1f1b", "gpipe")])
@pytest.mark.parametrize("seed", range(30))
def test_under_every_schedule_too(seed: int, schedule: str) -> None:
    """Of several stages on a rank, both look at those alone that fit an equal share each."""
    same_in_every_frame(seed, schedule)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("seed", range(40))
def test_and_under_zero(seed: int, zero: int) -> None:
    same_in_every_frame(seed, None, zero)


def same_in_every_frame(seed: int, schedule: str | None, zero: int = 0) -> None:
    dynamic = answer_or_refusal("dynamic", seed, schedule, zero)
    exhaustive = answer_or_refusal("exhaustive", seed, schedule, zero)
    if isinstance(exhaustive, InfeasibleError):
        assert str(dynamic) == str(exhaustive)
        return
    assert isinstance(dynamic, Answer)
    assert dynamic.estimate.step_seconds == pytest.approx(
        exhaustive.estimate.step_seconds, rel=1e-9
    )
    expected = steps(exhaustive)
    assert {f: s for f, s in steps(dynamic).items() if s is None} == {
        f: s for f, s in expected.items() if s is None
    }
    for frame, seconds in steps(dynamic).items():
        assert seconds == (None if seconds is None else pytest.approx(expected[frame], rel=1e-9))


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_is_never_better_than_dynamic(seed: int) -> None:
    uniform, dynamic = answer_or_refusal("uniform", seed), answer_or_refusal("dynamic", seed)
    if isinstance(uniform, Answer):
        assert isinstance(dynamic, Answer)
        assert dynamic.estimate.step_seconds <= uniform.estimate.step_seconds * (1 + 1e-9)
        assert uniform.bound_seconds <= dynamic.estimate.step_seconds * (1 + 1e-9)


def test_the_random_problems_are_of_all_kinds() -> None:
    answers = [answer_or_refusal("dynamic", seed) for seed in SEEDS]
    found = [answer for answer in answers if isinstance(answer, Answer)]
    refused = [str(answer) for answer in answers if isinstance(answer, InfeasibleError)]
    assert sum("plan fits" in sentence for sentence in refused) >= 20
    assert sum("does not divide" in sentence for sentence in refused) >= 5
    assert sum(None in steps(answer).values() for answer in found) >= 20
    assert sum(answer.decision.pp > 1 for answer in found) >= 10
    pipelines = [s for answer in found for frame, s in steps(answer).items() if frame.pp > 1]
    assert sum(seconds is not None for seconds in pipelines) >= 100


@pytest.mark.parametrize("seed", range(12))
def test_exhaustive_is_the_best_of_all_that_the_estimate_scores(seed: int) -> None:
    problem = random_problem(seed)
    scored = [
        estimate(problem, Decision(*frame, name, cuts))
        for frame in all_frames(problem)
        for name in ("1f1b", "gpipe")
        for cuts in combinations(range(1, problem.units), frame.pp - 1)
    ]
    fitting = [found.step_seconds for found in scored if found.fits]
    answer = answer_or_refusal("exhaustive", seed)
    if fitting:
        assert isinstance(answer, Answer)
        assert answer.estimate.step_seconds == pytest.approx(min(fitting), rel=1e-9)
    elif scored:
        nearest = min(found.overflow for found in scored)
        assert f"{nearest} bytes too many" in str(answer)
    else:
        assert "does not divide" in str(answer)


def all_frames(problem: Problem) -> list[Frame]:
    sizes = {profile.rows for profile in problem.profiles}
    return [
        Frame(pp, problem.devices // pp, m)
        for pp in range(1, min(problem.devices, problem.units) + 1)
        if problem.devices % pp == 0
        for m in range(1, problem.batch + 1)
        if problem.batch in {problem.devices // pp * m * rows for rows in sizes}
    ]


def model(
    forward: tuple[float, ...],
    *,
    devices: int = 2,
    batch: int = 4,
    memory: int = 10**6,
    parameter: int = 100,
    saved: int = 10,
    crossing: tuple[int, ...] = (),
    constraints: Constraints | None = None,
) -> Problem:
    """A chain of units; one-row micro-batches; links of one byte a second without latency.

    Each unit has `parameter` bytes of parameters and saves `saved` bytes; `crossing[u]` bytes go
    from unit u to the next, and nothing comes back.
    """
    units = len(forward)
    return Problem(
        units=units,
        blocks=(),
        parameters=tuple(Shared(parameter, (unit,)) for unit in range(units)),
        constants=(),
        optimizer_factor=2.0,
        profiles=(
            Profile(
                rows=1,
                forward=forward,
                backward=(0.0,) * units,
                saved=tuple(Saved(saved, unit, (unit,)) for unit in range(units)),
                crossings=tuple(
                    Crossing(size, unit, (unit + 1,), gradient=False)
                    for unit, size in enumerate(crossing)
                ),
            ),
        ),
        batch=batch,
        devices=devices,
        memory=memory,
        latency=0.0,
        bandwidth=1.0,
        window=1,
        constraints=constraints or Constraints(pp=devices),
    )


def test_dynamic_stops_between_the_least_sum_and_the_least_maximum() -> None:
    """Two stages, three micro-batches.

    units       1    2    4    8
    crossing      0    1    4

    cuts (1,)   t = 1, 14    15 + 2 * 14 = 43    the least sum
    cuts (2,)   t = 3, 13    16 + 2 * 13 = 42    the fastest
    cuts (3,)   t = 7, 12    19 + 2 * 12 = 43    the least maximum
    """
    answer = PLANNERS["dynamic"](model((1.0, 2.0, 4.0, 8.0), crossing=(0, 1, 4), batch=3))
    assert (answer.decision.cuts, answer.estimate.step_seconds) == ((2,), 42)


def test_memory_moves_the_cut() -> None:
    """A unit takes 4 * 100 bytes and 10 more per micro-batch, of which stage 0 has two in flight.

    cuts (2,)   840 and 410 bytes    t = 2, 2
    cuts (1,)   420 and 820 bytes    t = 1, 3
    """
    forward = (1.0, 1.0, 2.0)
    assert PLANNERS["dynamic"](model(forward, memory=840)).decision.cuts == (2,)
    assert PLANNERS["dynamic"](model(forward, memory=839)).decision.cuts == (1,)
    with pytest.raises(InfeasibleError):
        PLANNERS["dynamic"](model(forward, memory=819))


def test_ties_go_to_fewer_stages_then_fewer_micro_batches_then_1f1b() -> None:
    # No cost but compute: with one micro-batch, two stages in turn are as slow as one device.
    free = replace(model((1.0, 1.0), batch=2, constraints=Constraints()), devices=1)
    assert PLANNERS["dynamic"](free).decision == Decision(1, 1, 2, "1f1b", ())
    nothing = model((0.0, 0.0), parameter=0, batch=4, constraints=Constraints())
    for planner in PLANNERS.values():
        assert planner(nothing).decision == Decision(1, 2, 2, "1f1b", ())


def test_equal_units_are_cut_early_whatever_the_order_of_sums() -> None:
    # Ten units of 0.1 s over four stages: at best 3 units at most in one, and the first is small.
    problem = model((0.1,) * 10, devices=4)
    assert PLANNERS["dynamic"](problem).decision.cuts == (1, 4, 7)
    assert PLANNERS["exhaustive"](problem).decision.cuts == (1, 4, 7)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_same_problem_has_the_same_answer(planner: str) -> None:
    for seed in range(20):
        try:
            assert PLANNERS[planner](random_problem(seed)) == answer_or_refusal(planner, seed)
        except InfeasibleError as refusal:
            assert str(refusal) == str(answer_or_refusal(planner, seed))


@pytest.mark.parametrize(
    ("blocks", "pp", "cuts"),
    [
        # units:  e | 0 0 | 1 1 | 2 2 | 3 3 | 4 4 | h       e, h: before and after the blocks
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 1, ()),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 2, (7,)),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 3, (5, 9)),
        ([(1, 3), (3, 5), (5, 7), (7, 9), (9, 11)], 5, (3, 5, 7, 9)),
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
    problem = replace(model((1.0,) * 12), blocks=tuple(blocks))
    assert even_cuts(problem, pp) == cuts


def test_gpipe_is_considered_only_where_it_holds_less_than_1f1b_in_some_stage() -> None:
    """GPipe holds no less than 1F1B anywhere; asked for, it is what there is."""
    problem = model((1.0,) * 4, devices=4, batch=8)
    assert schedules(problem) == ("1f1b", "gpipe")
    assert undominated(problem, Frame(4, 1, 8)) == ("1f1b",)
    gpipe = replace(problem, constraints=Constraints(schedule="gpipe"))
    assert undominated(gpipe, Frame(4, 1, 8)) == ("gpipe",)


@pytest.mark.parametrize(
    ("constraints", "expected"),
    [
        (Constraints(), [(1, 4, 1), (2, 2, 2), (4, 1, 4)]),
        (Constraints(pp=2), [(2, 2, 2)]),
        (Constraints(dp=1), [(4, 1, 4)]),
        (Constraints(pp=1, dp=2), [(1, 2, 2)]),
        (Constraints(micro_batches=4), [(4, 1, 4)]),
        (Constraints(tp=1, pp=4), [(4, 1, 4)]),
    ],
)
def test_frames_use_all_devices_unless_both_degrees_are_fixed(
    constraints: Constraints, expected: list[tuple[int, int, int]]
) -> None:
    problem = model((1.0,) * 5, devices=4, constraints=constraints)
    assert list(frames(problem)) == expected


@pytest.mark.parametrize(
    ("constraints", "sentence", "hint"),
    [
        (Constraints(pp=0), "pp=0 was asked for, and the least is 1", None),
        (
            Constraints(pp=4, dp=2),
            "pp=4 dp=2 needs 8 devices, found 6",
            "leave out pp or dp, and the other one follows",
        ),
        (
            Constraints(pp=4),
            "pp=4 was asked for and does not divide the 6 devices",
            "pp of 1, 2 or 3; or fix both",
        ),
        (
            Constraints(dp=4),
            "dp=4 was asked for and does not divide the 6 devices",
            "dp of 2, 3 or 6; or fix both",
        ),
        (
            Constraints(pp=6),
            "pp=6 dp=1 needs a model of at least 6 units, one a stage; this one has 5",
            "pp of at most 5",
        ),
        (
            Constraints(pp=3, micro_batches=5),
            "micro_batches=5 was asked for, and a batch of 12 rows over dp=2 does not divide into "
            "5 micro-batches of 1, 2 or 4 rows",
            "the nearest that does is micro_batches=3 or 6",
        ),
        (
            Constraints(pp=1, dp=5),
            "a batch of 12 rows over dp=5 does not divide into micro-batches of 1, 2 or 4 rows",
            "a batch of 10 or 15 rows divides",
        ),
        (
            Constraints(schedule="2f2b"),
            "schedule='2f2b' was asked for, and there is none of that name",
            "schedule is naive, gpipe, 1f1b, eager-1f1b, interleaved, zb-h1 or zb-v, or a file",
        ),
    ],
)
@pytest.mark.parametrize("planner", PLANNERS)
def test_constraints_that_contradict_are_refused_in_their_own_terms(
    planner: str, constraints: Constraints, sentence: str, hint: str | None
) -> None:
    problem = model((1.0,) * 5, devices=6, batch=12, constraints=constraints)
    one_row = problem.profiles[0]
    problem = replace(problem, profiles=tuple(replace(one_row, rows=rows) for rows in (1, 2, 4)))
    with pytest.raises(InfeasibleError) as refusal:
        PLANNERS[planner](problem)
    assert refusal.value.message.startswith(sentence)
    assert hint is None or (refusal.value.hint or "").startswith(hint)


GIB = 2**30


def test_nothing_fits_names_the_nearest_and_what_it_lacks() -> None:
    """Two units a stage: 4 * 2 * 1.5 GiB of parameters, and 2 * 2 * 1.25 GiB of activations."""
    problem = model(
        (1.0,) * 4, parameter=3 * GIB // 2, saved=5 * GIB // 4, memory=16 * GIB, batch=8
    )
    with pytest.raises(InfeasibleError) as refusal:
        PLANNERS["dynamic"](problem)
    assert str(refusal.value) == (
        "no plan fits 16.0 GiB a device: nearest is pp=2 dp=1 micro_batches=8, whose stage 0 needs "
        "17.0 GiB, 1073741824 bytes too many (12.0 parameters, gradients and optimizer, 5.0 "
        "activations of 2 micro-batches in flight).\n"
        "hint: more stages than pp=2 or devices of 17.0 GiB"
    )


@pytest.mark.parametrize(
    ("constraints", "unit_fits", "hint"),
    [
        (Constraints(), True, "more than 2 devices or devices of"),
        (Constraints(), False, "devices of"),
        (Constraints(dp=2, memory=1), True, "less than dp=2, and so more stages or a memory limit"),
        (Constraints(micro_batches=1), True, "more than 2 devices, more micro-batches than 1"),
        (Constraints(pp=2, schedule="gpipe"), True, "more stages than pp=2, the schedule 1f1b"),
    ],
)
def test_the_hint_names_only_what_could_help(
    constraints: Constraints, unit_fits: bool, hint: str
) -> None:
    problem = model((1.0,) * 8, batch=4, saved=100, constraints=constraints)
    one_row = problem.profiles[0]
    two_rows = replace(one_row, rows=2, saved=tuple(Saved(200, u, (u,)) for u in range(8)))
    problem = replace(problem, profiles=(one_row, two_rows), memory=500 if unit_fits else 499)
    with pytest.raises(InfeasibleError) as refusal:
        PLANNERS["dynamic"](problem)
    assert (refusal.value.hint or "").startswith(hint)


def test_uniform_says_that_it_is_not_the_last_word() -> None:
    # Three units of 4 * 100 bytes and a heavy one: equal counts put too much on the last stage.
    problem = model((1.0,) * 4, memory=1300, saved=0)
    heavy = replace(problem, parameters=(*problem.parameters, Shared(225, (3,))))
    assert PLANNERS["dynamic"](heavy).decision.cuts == (3,)
    with pytest.raises(InfeasibleError, match="no uniform plan fits 1.3 KiB") as refusal:
        PLANNERS["uniform"](heavy)
    assert "the planner `dynamic`" in (refusal.value.hint or "")


def test_the_answer_says_what_binds_and_what_else_there_was() -> None:
    """One device for each of two replicas would be best, but holds all 3200 bytes of parameters."""
    problem = model((1.0, 1.0, 1.0, 1.0), memory=1000, constraints=Constraints())
    answer = PLANNERS["dynamic"](problem)
    assert answer.decision == Decision(2, 1, 4, "1f1b", (2,))
    assert answer.bound_seconds == answer.estimate.step_seconds == 4 + 3 * 2
    assert answer.binding.startswith("stage 0 sets the pace with 2 s a micro-batch, 0.0 % above")
    (other,) = answer.alternatives
    assert (other.pp, other.dp, other.tp, other.micro_batches) == (1, 2, 1, 2)
    assert (other.step_seconds, other.why) == (None, "stage 0 needs 1.6 of 1.0 KiB")


def test_the_limit_binds_where_a_plan_without_it_is_faster() -> None:
    # Free links: two replicas take 2 * 4 = 8 seconds, two stages 4 + 3 * 2 = 10.
    problem = replace(
        model((1.0,) * 4, memory=1000, constraints=Constraints()), bandwidth=float(10**12)
    )
    binding = PLANNERS["dynamic"](problem).binding
    assert binding.startswith(
        "memory: without the limit of 1.0 KiB, pp=1 dp=2 micro_batches=2 would be 20 % faster; "
    )


def test_devices_that_the_user_leaves_idle_are_mentioned() -> None:
    problem = model((1.0,) * 4, devices=3, constraints=Constraints(pp=2, dp=1))
    assert PLANNERS["dynamic"](problem).binding.startswith(
        "1 of 3 devices stay idle, as pp=2 dp=1 was asked for; stage 0 sets the pace"
    )


def test_a_few_bytes_too_many_are_not_rounded_away() -> None:
    problem = model((1.0,) * 2, parameter=GIB, memory=8 * GIB, saved=0, constraints=Constraints())
    one_short = replace(problem, memory=8 * GIB - 1)
    (other,) = PLANNERS["dynamic"](one_short).alternatives
    assert other.why == "stage 0 needs 1 bytes more than 8.0 GiB"


def test_alternatives_are_the_best_first() -> None:
    for seed in SEEDS:
        answer = answer_or_refusal("dynamic", seed)
        if isinstance(answer, Answer):
            found = [a.step_seconds for a in answer.alternatives]
            fitting = [seconds for seconds in found if seconds is not None]
            assert fitting == sorted(fitting)
            assert found == fitting + [None] * (len(found) - len(fitting))


def test_exhaustive_refuses_what_would_take_for_ever() -> None:
    problem = model((1.0,) * 60, devices=6)
    with pytest.raises(AutopipeError, match="would score 10,012,772 candidates for 60 units"):
        PLANNERS["exhaustive"](problem)


def test_dynamic_plans_a_deep_model_as_a_greedy_bound_says() -> None:
    """200 equal units over 8 stages: 25 each is perfect, so the bound is met."""
    answer = PLANNERS["dynamic"](model((1.0,) * 200, devices=8, batch=64))
    assert answer.decision.cuts == tuple(range(25, 200, 25))
    assert answer.estimate.step_seconds == 200 + 63 * 25


def test_a_rank_of_several_stages_needs_that_many_units() -> None:
    constraints = Constraints(pp=2, schedule="interleaved", chunks=3)
    answer = PLANNERS["dynamic"](model((1.0,) * 6, constraints=constraints))
    assert answer.decision == Decision(2, 1, 4, "interleaved", (1, 2, 3, 4, 5))
    for planner in PLANNERS.values():
        with pytest.raises(InfeasibleError) as refusal:
            planner(model((1.0,) * 5, constraints=constraints))
        assert str(refusal.value) == (
            "pp=2 dp=1 needs a model of at least 6 units, one a stage; this one has 5 to cut "
            "between\nhint: pp of at most 1"
        )


def test_a_device_that_several_stages_overfill_is_told_by_all_of_them() -> None:
    """Four units of 4 GiB; stages 0 and 3 hold four micro-batches and one, of a quarter each."""
    constraints = Constraints(pp=2, schedule="zb-v", micro_batches=4)
    problem = model(
        (1.0,) * 4, parameter=GIB, saved=GIB // 4, memory=8 * GIB, constraints=constraints
    )
    for planner in ("dynamic", "exhaustive"):
        with pytest.raises(InfeasibleError) as refusal:
            PLANNERS[planner](problem)
        assert str(refusal.value) == (
            "no plan fits 8.0 GiB a device: nearest is pp=2 dp=1 micro_batches=4, whose stages 0 "
            "and 3 need 9.2 GiB, 1342177280 bytes too many (8.0 parameters, gradients and "
            "optimizer, 1.2 activations of 4 micro-batches in flight).\n"
            "hint: more stages than pp=2, the schedule 1f1b, which holds fewer micro-batches or "
            "devices of 9.3 GiB"
        )


def test_unequal_shares_of_a_device_are_not_looked_for() -> None:
    """Units of 400, 800, 400 and 400 bytes: under zb-v 800 on rank 0, 1200 on rank 1.

    Half of 1200 has no room for unit 1. The nearest is found, and fits after all; and its bound is
    that of perfect balance, not its own step.
    """
    constraints = Constraints(pp=2, schedule="zb-v", micro_batches=4)
    problem = model((1.0, 1.0, 1.0, 2.0), memory=1200, saved=0, constraints=constraints)
    problem = replace(problem, parameters=(*problem.parameters, Shared(100, (1,))))
    answer = PLANNERS["dynamic"](problem)
    assert answer.decision.cuts == (1, 2, 3)
    # 1 / 6 of the sum of 5, and 8 - 1 / 3 times the longest stage, or an equal one.
    assert answer.estimate.step_seconds == pytest.approx(5 / 6 + (8 - 1 / 3) * 2)
    assert answer.bound_seconds == pytest.approx(5 / 6 + (8 - 1 / 3) * 5 / 4)


def test_naive_has_nothing_to_balance() -> None:
    """Four micro-batches in turn through 4 seconds, wherever the cut is: it is in the middle."""
    answer = PLANNERS["dynamic"](model((1.0,) * 4, constraints=Constraints(2, schedule="naive")))
    assert (answer.decision.cuts, answer.estimate.step_seconds) == ((2,), 16)


def test_zero_makes_room() -> None:
    """Two replicas of two units: 2 * 4 * 100 bytes of states, of which Adam has half.

    With ZeRO-1 a device holds 400 and 200, with ZeRO-3 100, 100 and 200 and 2 * 200 gathered.
    """
    problem = model((1.0, 1.0), saved=0, constraints=Constraints(pp=1, dp=2))
    for zero, least in ((0, 800), (1, 600), (3, 800)):
        dealt = replace(problem, zero=zero, memory=least)
        assert PLANNERS["dynamic"](dealt).decision == Decision(1, 2, 2, "1f1b", ())
        with pytest.raises(InfeasibleError):
            PLANNERS["dynamic"](replace(dealt, memory=least - 1))


def test_schedules_prefer_1f1b() -> None:
    assert schedules(model((1.0,)))[0] == "1f1b"
    assert schedules(model((1.0,), constraints=Constraints(schedule="gpipe"))) == ("gpipe",)


def test_numbers_are_printed_for_people() -> None:
    assert Amount(16 * GIB).of(18.3 * GIB) == "18.3 GiB"
    assert Amount(900 * 2**20)(2**30) == "1.0"
    assert Amount(100).of(101) == "101 bytes"
    assert Amount(16 * GIB).ceiling(17 * GIB + 1) == "17.1 GiB"
    assert (percent(0.004), percent(0.0999), percent(0.5), percent(-1e-17)) == (
        "0.4 %",
        "10 %",
        "50 %",
        "0.0 %",
    )
    assert [duration(s) for s in (2.0, 0.0123, 5e-6, 0.0)] == ["2 s", "12.3 ms", "5 us", "0 us"]
