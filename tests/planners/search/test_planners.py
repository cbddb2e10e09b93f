"""The planners against each other, against brute force, and by hand: dynamic, exhaustive, uniform.

Where a planner may look is `test_search`'s and `test_orders`', what it tells besides its decision
`test_answer`'s, `test_reasons`' and `test_relax`'s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from autopipe.cluster.cluster import Link
from autopipe.errors import AutopipeError, InfeasibleError
from autopipe.planfile.parts import TRANSFERS, Alternative
from autopipe.planners.model import memory
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import (
    WHOLE,
    Again,
    Config,
    Constraints,
    Decision,
    Problem,
    Shared,
    splits,
)
from autopipe.planners.search.best import Answer
from autopipe.planners.search.configs import configs
from autopipe.planners.search.device_orders import orders
from autopipe.planners.search.registry import PLANNERS
from autopipe.planners.search.relax import Relaxations
from autopipe.planners.search.uniform import even_cuts
from autopipe.schedules.registry import SCHEDULES
from tests.support.long import chosen, sampled, share
from tests.support.problems import (
    line,
    machine,
    parted_problem,
    random_problem,
    rich_problem,
)

Found = Answer | InfeasibleError
Make = Callable[[int], Problem]


def tight_problem(seed: int) -> Problem:
    """A rich problem whose devices hold a tenth less than its fastest plan without limits needs."""
    problem, peak = rich_problem(seed), most_needed(seed)
    if peak is None:
        return problem
    limits = tuple(9 * peak // 10 + kind for kind in problem.machine.kinds)
    return replace(problem, machine=replace(problem.machine, memory=limits))


@functools.cache
def most_needed(seed: int) -> int | None:
    """Bytes on the fullest device, by the fastest plan of a rich problem without limits."""
    problem = rich_problem(seed)
    devices = problem.machine
    roomy = replace(problem, machine=replace(devices, memory=(2**40,) * devices.devices))
    found = found_by("dynamic", roomy)
    if isinstance(found, InfeasibleError):
        return None
    return max(stage.memory.peak for stage in found.estimate.stages)


def hosted_problem(seed: int) -> Problem:
    """A tight problem whose devices have a link to their host, slow or fast."""
    problem = tight_problem(seed)
    kinds = range(max(problem.machine.kinds) + 1)
    hosts = tuple(50.0 * 4 ** ((seed + kind) % 5) for kind in kinds)
    return replace(problem, machine=replace(problem.machine, hosts=hosts), offloads=True)


MAKERS = {"plain": random_problem, "rich": rich_problem, "tight": tight_problem}
"""Plain problems are of equal devices on one link; in rich ones up to three kinds of devices, with
limits of their own, stand in nodes and sites, blocks may run again and states be dealt out. In
tight ones that is what must be."""


@pytest.fixture(autouse=True)
def no_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would fit is looked for by the same code whoever plans; most of the time goes there."""
    monkeypatch.setattr(Relaxations, "that_help", lambda self: [])


def found_by(planner: str, problem: Problem) -> Found:
    try:
        return PLANNERS[planner](problem)
    except InfeasibleError as refusal:
        return refusal


@functools.cache
def found_in(planner: str, make: str, seed: int) -> Found:
    return found_by(planner, MAKERS[make](seed))


def of_meshes(alternatives: tuple[Alternative, ...]) -> dict[tuple[int, int], Alternative]:
    """What is told of each other mesh."""
    return {(a.pp, a.dp): a for a in alternatives}


def same(dynamic: Found, exhaustive: Found) -> None:
    """The same step, the same steps of the other meshes, or the same refusal.

    Of a mesh that is not among the best two a bound may be told that is no longer than its step:
    exhaustive search tries also what cannot be as fast.
    """
    if isinstance(exhaustive, InfeasibleError):
        assert str(dynamic) == str(exhaustive)
        return
    assert isinstance(dynamic, Answer)
    step = exhaustive.estimate.step_seconds
    assert dynamic.estimate.fits and exhaustive.estimate.fits
    assert dynamic.estimate.step_seconds == pytest.approx(step, rel=1e-9)
    told, every = of_meshes(dynamic.alternatives), of_meshes(exhaustive.alternatives)
    assert told.keys() == every.keys()
    steps = sorted(a.step_seconds for a in every.values() if a.step_seconds is not None)
    for mesh, other in every.items():
        found = told[mesh]
        if found.step_seconds is not None:
            assert found.step_seconds == pytest.approx(other.step_seconds, rel=1e-9)
        elif other.step_seconds is not None:
            assert other.step_seconds > steps[0] and found.slower is not None
            assert found.slower <= other.step_seconds / step - 1 + 1e-9


@pytest.mark.sweep(of=6)
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_dynamic_is_exhaustive(make: str, first: int) -> None:
    """On 600 problems (24 by default): every mesh, schedule, depth, ZeRO stage, set of blocks and
    order of devices."""
    for seed in sampled(range(first, first + 50), of=40):
        same(found_in("dynamic", make, seed), found_in("exhaustive", make, seed))


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("transfers", [None, *TRANSFERS])
def test_where_tensors_may_go_in_parts(transfers: str | None) -> None:
    """To each stage by the faster way, or by that which is asked for. 40 problems, 1 by default."""
    for seed in sampled(range(40), of=40):
        asked = replace(parted_problem(seed), constraints=Constraints(transfers=transfers))
        found = found_by("dynamic", asked)
        same(found, found_by("exhaustive", asked))


@pytest.mark.parametrize("make", chosen(["plain", "rich"], now=("plain",)))
def test_where_sums_of_gradients_are_long(make: str) -> None:
    """Devices ten times as fast on the same links: sums of later stages are not hidden any more, in
    one config of ten, and the step has three parts. 40 problems, 2 by default."""

    def tenth(of: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(seconds / 10 for seconds in kind) for kind in of)

    for seed in sampled(range(40), of=20):
        problem = MAKERS[make](seed)
        profiles = (
            replace(p, forward=tenth(p.forward), backward=tenth(p.backward))
            for p in problem.profiles
        )
        problem = replace(problem, profiles=tuple(profiles))
        same(found_by("dynamic", problem), found_by("exhaustive", problem))


@pytest.mark.sweep(of=9)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("make", MAKERS)
def test_under_every_schedule_that_is_asked_for(make: str, schedule: str) -> None:
    """Of several stages on a rank, both look at those alone that fit an equal share each.

    15 problems, 2 by default.
    """
    for seed in sampled(range(15), of=8):
        problem = MAKERS[make](seed)
        asked = replace(problem, constraints=Constraints(schedule=schedule))
        same(found_by("dynamic", asked), found_by("exhaustive", asked))


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("seed", [21, 56, 98, 133])
def test_where_blocks_may_offload_what_they_keep(seed: int) -> None:
    """Four problems in whose fastest plans some do; of one stage, of two and of three."""
    dynamic = found_by("dynamic", hosted_problem(seed))
    same(dynamic, found_by("exhaustive", hosted_problem(seed)))
    assert isinstance(dynamic, Answer) and any(dynamic.decision.offload)


@pytest.mark.sweep(of=4)
@pytest.mark.parametrize("zeros", [(1,), (2,), (3,)])
@pytest.mark.parametrize(
    "again",
    chosen([None, 0, 1, 2], now=(0, 1, 2)),
)
def test_where_zero_and_what_runs_again_are_asked_for(
    zeros: tuple[int, ...], again: int | None
) -> None:
    """The first so many blocks are to run again, and no others. 20 problems, 2 by default."""
    for seed in sampled(range(20), of=10):
        problem = rich_problem(seed)
        every = tuple(map(Again, range(len(problem.recomputable))))
        blocks = None if again is None else every[:again]
        asked = replace(problem, zeros=zeros, constraints=Constraints(recompute=blocks))
        same(found_by("dynamic", asked), found_by("exhaustive", asked))


@pytest.mark.long
def test_the_problems_are_of_all_kinds() -> None:
    """What the oracle was asked: enough of everything that makes planning hard.

    Of each kind 200 problems, 40 by default.
    """
    for make in MAKERS:
        every = [found_in("dynamic", make, seed) for seed in sampled(range(200), of=10)]
        decisions = [found.decision for found in every if isinstance(found, Answer)]
        refused = [str(found) for found in every if isinstance(found, InfeasibleError)]
        if make != "tight":
            assert sum("plan fits" in sentence for sentence in refused) >= share(40, of=10)
        assert sum(decision.config.pp > 1 for decision in decisions) >= share(10, of=10)
        assert {decision.config.schedule for decision in decisions} >= {"1f1b", "zb-h1"}
        if make == "rich":
            assert sum(list(d.groups) != sorted(d.groups) for d in decisions) >= share(3, of=10)
        if make == "tight":
            assert sum(decision.config.zero > 0 for decision in decisions) >= share(5, of=10)
            assert sum(any(decision.recompute) for decision in decisions) >= share(10, of=10)


def all_again(problem: Problem, config: Config, first: int, last: int) -> list[tuple[Again, ...]]:
    """Every set of blocks of a stage, each at every level that it may have there."""
    if splits(problem, config.schedule):
        return [()]  # what has backward in halves cannot run again
    between = problem.profiles[0].levels or ((),) * len(problem.recomputable)
    choices: list[list[Again | None]] = []
    for block, (start, stop) in enumerate(problem.recomputable):
        if start < last and stop > first:
            whole = first <= start and stop <= last and not config.fully_sharded
            levels = [WHOLE, *range(len(between[block]) if whole else 0)]
            choices.append([None, *(Again(block, level) for level in levels)])
    return [tuple(filter(None, chosen)) for chosen in product(*choices)]


def decisions_of(problem: Problem, config: Config) -> Iterator[Decision]:
    """Every order of the groups, every set of cuts, all that may run again in every stage."""
    for order in orders(problem, config):
        for cuts in combinations(range(1, problem.units), config.pp - 1):
            bounds = (0, *cuts, problem.units)
            sets = [all_again(problem, config, *pair) for pair in pairwise(bounds)]
            for again in product(*sets):
                yield Decision(config, cuts, again, order)


@pytest.mark.parametrize(
    "make",
    chosen(MAKERS, now=("plain", "rich")),
)
def test_exhaustive_is_the_best_of_all_that_the_estimate_scores(make: str) -> None:
    """On problems so small that every decision is scored, without a table and without a sum.

    Those of 120 seeds, of 15 by default.
    """
    tried = 0
    for seed in sampled(range(120), of=8):
        problem = MAKERS[make](seed)
        if problem.units > 5 or problem.machine.devices > 3:
            continue
        for schedule in ("1f1b", "zb-h1"):
            asked = replace(problem, constraints=Constraints(schedule=schedule))
            exhaustive = found_by("exhaustive", asked)
            try:
                every = configs(asked)
            except InfeasibleError as refusal:
                assert str(exhaustive) == str(refusal)
                continue
            scored = [estimate(asked, d) for config in every for d in decisions_of(asked, config)]
            fitting = [found.step_seconds for found in scored if found.fits]
            if fitting:
                assert isinstance(exhaustive, Answer)
                step = exhaustive.estimate.step_seconds
                assert step == pytest.approx(min(fitting), rel=1e-9)
            else:
                nearest = min(found.overflow for found in scored)
                assert isinstance(exhaustive, InfeasibleError)
                assert exhaustive.shortfall == nearest
            tried += 1
    assert tried >= share(30, of=8)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("make", MAKERS)
def test_uniform_is_never_better_than_dynamic(make: str) -> None:
    """On 150 problems of each kind, 30 by default."""
    for seed in sampled(range(150), of=10):
        uniform, dynamic = found_in("uniform", make, seed), found_in("dynamic", make, seed)
        if isinstance(uniform, Answer):
            assert isinstance(dynamic, Answer)
            assert dynamic.estimate.step_seconds <= uniform.estimate.step_seconds * (1 + 1e-9)
            assert uniform.bound_seconds <= dynamic.estimate.step_seconds * (1 + 1e-9)


@pytest.mark.sweep(of=3)
@pytest.mark.parametrize("planner", PLANNERS)
def test_the_same_problem_has_the_same_answer(planner: str) -> None:
    """Made again from its seed, so that nothing that is remembered of it is met again.

    30 problems, 6 by default.
    """
    for seed in sampled(range(30), of=10):
        found = found_by(planner, rich_problem(seed))
        if isinstance(found, Answer):
            assert found == found_in(planner, "rich", seed)
        else:
            assert str(found) == str(found_in(planner, "rich", seed))


# --- by hand


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


def test_exhaustive_refuses_what_would_take_for_ever() -> None:
    problem = line((1.0,) * 60, devices=6)
    with pytest.raises(AutopipeError) as refusal:
        PLANNERS["exhaustive"](problem)
    assert str(refusal.value) == (
        "the planner `exhaustive` would score 5,006,386 candidates, of 1 sets of blocks, for 60 "
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
