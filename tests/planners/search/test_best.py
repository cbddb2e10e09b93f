"""From every config's best to one answer: its bound, its ties, and its alternatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import Config, Constraints, Decision, Problem
from autopipe.planners.search.best import Answer, Outdone, best_answer, with_other_degrees
from autopipe.planners.search.bound import bound
from autopipe.planners.search.configs import configs
from autopipe.planners.search.dynamic import choose
from autopipe.planners.search.registry import PLANNERS
from tests.support.long import chosen, sampled
from tests.support.problems import line, random_problem, rich_problem

pytestmark = pytest.mark.usefixtures("no_advice")

MAKERS = {"plain": random_problem, "rich": rich_problem}


def limited(devices: Machine, memory: int) -> Machine:
    return replace(devices, memory=(memory,) * devices.devices)


def answers(make: Callable[[int], Problem], count: int) -> list[tuple[Problem, Answer]]:
    """Of so many problems those that have a plan; by default of every fourth."""
    found = []
    for seed in sampled(range(count), of=8):
        try:
            found.append((problem := make(seed), PLANNERS["dynamic"](problem)))
        except InfeasibleError:
            continue
    return found


@pytest.mark.parametrize("make", chosen(MAKERS.values(), now=(MAKERS["rich"],)), ids=MAKERS)
def test_nothing_is_faster_than_a_frames_bound(make: Callable[[int], Problem]) -> None:
    """Else a config would not be tried that has the best plan.

    In 39, 99 and 138 gradients of 16 bits are scattered: their bound was of twice the bytes.
    """
    for seed in (*sampled(range(25), of=6), 39, 99, 138):
        problem = make(seed)
        for config in configs(problem):
            found = estimate(problem, choose(problem, config))
            assert bound(problem, config) <= found.step_seconds * (1 + 1e-12)


@pytest.mark.parametrize("make", chosen(MAKERS.values(), now=(MAKERS["plain"],)), ids=MAKERS)
def test_what_an_exact_planner_finds_is_its_own_bound(make: Callable[[int], Problem]) -> None:
    """All was searched, or has a bound above it: the gap is 0."""
    for _, found in answers(make, 60):
        assert found.bound_seconds == found.estimate.step_seconds


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_the_next_best_is_the_best_of_all_other_meshes(make: Callable[[int], Problem]) -> None:
    """Every other mesh is asked for by itself, of the oracle."""
    for problem, found in answers(make, 45):
        best = found.decision.config
        steps = {}
        for pp, dp in {config[:2] for config in configs(problem)} - {best[:2]}:
            asked = replace(problem, constraints=Constraints(pp=pp, dp=dp))
            try:
                steps[pp, dp] = PLANNERS["exhaustive"](asked).estimate.step_seconds
            except InfeasibleError:
                continue
        told = found.alternatives[0] if found.alternatives else None
        if not steps:
            assert told is None or told.step_seconds is None
            continue
        assert told is not None and told.step_seconds is not None
        assert told.step_seconds == pytest.approx(min(steps.values()), rel=1e-9)
        assert told.step_seconds == pytest.approx(steps[told.pp, told.dp], rel=1e-9)
        assert told.step_seconds >= found.estimate.step_seconds * (1 - 1e-9)


@pytest.mark.parametrize("make", chosen(MAKERS.values(), now=(MAKERS["plain"],)), ids=MAKERS)
def test_alternatives_are_one_a_mesh_and_the_best_first(make: Callable[[int], Problem]) -> None:
    """Those that fit by their steps; then those of which a bound was enough, then misfits."""
    for problem, found in answers(make, 60):
        every = {config[:2] for config in configs(problem)}
        others = [(a.pp, a.dp) for a in found.alternatives]
        assert len(set(others)) == len(others)
        assert set(others) == every - {found.decision.config[:2]}
        steps = [a.step_seconds for a in found.alternatives]
        fitting = [seconds for seconds in steps if seconds is not None]
        assert fitting == sorted(fitting)
        assert steps == fitting + [None] * (len(steps) - len(fitting))
        bounded = ["by its bound" in a.why for a in found.alternatives[len(fitting) :]]
        assert bounded == sorted(bounded, reverse=True)


def test_a_mesh_that_even_its_bound_rules_out_is_not_tried() -> None:
    """Six equal units, four micro-batches, at best 6 + 3 * 6 / p seconds on p stages.

    p       6     5     4     3     2     1
    step    9    12    12    12    15    24        bound    9  9.6  10.5  12  15  24

    Two meshes are known below 15, so that two stages need not be tried. One is always: it is data
    parallelism alone, which people ask about.
    """
    problem = line((1.0,) * 6, devices=6, constraints=Constraints(schedule="1f1b", dp=1))
    found = PLANNERS["dynamic"](problem)
    assert (found.decision.config.pp, found.estimate.step_seconds) == (6, 9)
    *others, two = found.alternatives
    assert {a.pp: a.step_seconds for a in others} == {5: 12, 4: 12, 3: 12, 1: 24}
    assert (two.pp, two.step_seconds, two.why) == (2, None, "at least 67 % slower, by its bound")
    assert found.plain is not None and found.plain.estimate.step_seconds == 24


def test_ties_go_to_fewer_stages_then_fewer_micro_batches_then_1f1b() -> None:
    # No cost but compute, and with one micro-batch two stages in turn are as slow as one device.
    free = line((1.0, 1.0), batch=1, parameter=0, constraints=Constraints(schedule="1f1b"))
    nothing = line((0.0, 0.0), parameter=0, constraints=Constraints())
    for planner in PLANNERS.values():
        assert planner(nothing).decision.config[:5] == (1, 2, 2, 0, "1f1b")
        assert planner(free).decision.config[:5] == (1, 1, 1, 0, "1f1b")


def test_the_bound_of_a_heuristic_is_that_of_perfect_balance() -> None:
    """Units 1 1 4 over two devices: 6 / 2 s a micro-batch, and one has 4."""
    problem = line((1.0, 1.0, 4.0), batch=10, parameter=0)
    found = PLANNERS["uniform"](problem)
    assert found.estimate.step_seconds == 6 + 9 * 4  # 1 1 | 4
    assert found.bound_seconds == 6 + 9 * 3


def test_the_answer_says_what_binds_and_what_else_there_was() -> None:
    """One device for each of two replicas would be best, but holds all 3200 bytes of parameters."""
    problem = line((1.0,) * 4, memory=1000, constraints=Constraints(schedule="1f1b"))
    found = PLANNERS["dynamic"](problem)
    assert found.decision.config == Config(2, 1, 4, 0, "1f1b") and found.decision.cuts == (2,)
    assert found.bound_seconds == found.estimate.step_seconds == 4 + 3 * 2
    assert found.binding.startswith("stage 0 sets the pace with 2 s a micro-batch, 0.0 % above")
    told = {(a.pp, a.dp): (a.step_seconds, a.why) for a in found.alternatives}
    assert told == {
        (1, 2): (None, "stage 0 needs 1640 of 1000 bytes"),
        (1, 1): (None, "stage 0 needs 1640 of 1000 bytes"),
    }


@pytest.mark.long
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_rivals_that_are_no_faster_change_nothing(make: Callable[[int], Problem]) -> None:
    """What is as good as the best two known is found; what is told of the others still holds."""
    for problem, found in answers(make, 60):
        step = found.estimate.step_seconds
        told = PLANNERS["dynamic"](problem, (step, step))
        assert (told.decision, told.bound_seconds) == (found.decision, found.bound_seconds)
        assert told.binding == found.binding


@pytest.mark.parametrize("make", chosen(MAKERS.values(), now=(MAKERS["plain"],)), ids=MAKERS)
def test_what_rivals_leave_out_is_slower_than_they_are(make: Callable[[int], Problem]) -> None:
    """Of a problem whose best is slower it is its best, or no better; or a bound above both."""
    outdone = 0
    for problem, found in answers(make, 60):
        step = found.estimate.step_seconds
        above = step * (1 + 1e-9)  # sums in another order
        incumbents = (0.5 * step, 0.9 * step)
        try:
            told = PLANNERS["dynamic"](replace(problem, tp=2), incumbents)
        except Outdone as error:
            outdone += 1
            assert error.config is not None
            assert incumbents[1] < error.bound_seconds <= above
        else:
            assert told.bound_seconds <= above and told.estimate.step_seconds * (1 + 1e-9) >= step
    assert outdone > 0


def test_a_problem_where_nothing_can_fit_is_outdone_without_a_bound() -> None:
    """Two devices of 10 bytes for 3200 bytes of parameters: no config has room."""
    problem = line((1.0,) * 4, memory=10)
    with pytest.raises(Outdone) as caught:
        PLANNERS["dynamic"](problem, (1e9, 1e9))
    assert caught.value.config is None and caught.value.bound_seconds == float("inf")


def test_an_outdone_degree_is_told_by_its_bound() -> None:
    problem = line((1.0,) * 4, parameter=0)
    best = PLANNERS["dynamic"](problem)
    step = best.estimate.step_seconds
    outdone = Outdone(Config(1, 1, 1, 0, "1f1b"), 1.5 * step, None)
    nowhere = Outdone(None, float("inf"), None)
    found = with_other_degrees(best, {2: outdone, 4: nowhere})
    (told,) = [a for a in found.alternatives if a.tp > 1]
    assert (told.tp, told.step_seconds, told.why) == (2, None, "at least 50 % slower, by its bound")


def test_the_best_of_other_degrees_stands_among_the_alternatives() -> None:
    """Of tp = 2 and 4 the answers are slower; they are sorted in, and the bound is of all."""
    problem = line((1.0,) * 4, parameter=0)
    best = PLANNERS["dynamic"](problem)
    slower = {
        tp: PLANNERS["dynamic"](line((1.0 + tp,) * 4, parameter=0, constraints=problem.constraints))
        for tp in (2, 4)
    }
    found = with_other_degrees(best, slower)
    assert (found.decision, found.bound_seconds) == (best.decision, best.bound_seconds)
    first, second, *rest = found.alternatives
    assert [(a.tp, a.step_seconds) for a in (first, second)] == [(2, 30), (4, 50)]
    assert tuple(rest) == best.alternatives
    assert first.why == "200 % slower, by computing"


def test_the_most_that_a_device_may_hold_is_held_to_the_byte() -> None:
    """An answer fits; with a byte less on each device it does not, and what does is no faster."""
    for problem, found in answers(random_problem, 40):
        peak = max(stage.memory.peak for stage in found.estimate.stages)
        ranks = found.decision.config.pp
        if found.decision.stages > ranks or not problem.machine.alike:
            continue
        less = replace(problem, machine=limited(problem.machine, peak - 1))
        try:
            other = PLANNERS["dynamic"](less)
        except InfeasibleError:
            continue
        assert max(stage.memory.peak for stage in other.estimate.stages) < peak
        assert other.estimate.step_seconds >= found.estimate.step_seconds * (1 - 1e-9)


@pytest.mark.long
@pytest.mark.parametrize("planner", PLANNERS)
def test_one_mesh_alone_is_what_asking_for_it_gives(planner: str) -> None:
    for seed in sampled(range(10), of=3):
        problem = random_problem(seed)
        for mesh in dict.fromkeys(config[:2] for config in configs(problem)):
            pp, dp = mesh
            asked = replace(problem, constraints=replace(problem.constraints, pp=pp, dp=dp))
            try:
                expected = PLANNERS[planner](asked)
            except InfeasibleError:
                with pytest.raises(InfeasibleError):
                    PLANNERS[planner](problem, mesh=mesh)
                continue
            found = PLANNERS[planner](problem, mesh=mesh)
            assert found.decision == expected.decision
            assert found.estimate == expected.estimate and not found.alternatives


def test_a_mesh_that_is_not_looked_at_is_refused() -> None:
    """Bug: it ended in a ValueError, as of a mesh that another tensor-parallel degree has."""
    with pytest.raises(InfeasibleError, match="pp=3 dp=1 is none of the meshes"):
        PLANNERS["dynamic"](line((1.0, 1.0)), mesh=(3, 1))


def test_where_nothing_fits_what_is_farther_from_it_is_not_searched() -> None:
    """Four units of 4000 bytes on four devices: that with a stage each is nearest, and of no other
    config may one be nearer. Each of them was searched for the sentence, thousands in a large
    model."""
    problem = line(
        (1.0,) * 4, devices=4, memory=2000, parameter=1000, batch=4, constraints=Constraints()
    )
    tried = []

    def choice(problem: Problem, config: Config) -> Decision:
        tried.append(config)
        return choose(problem, config)

    with pytest.raises(InfeasibleError, match="nearest is pp=4 dp=1") as refusal:
        best_answer(problem, choice)
    lacking = {c: estimate(problem, choose(problem, c)).overflow for c in configs(problem)}
    least = min(lacking.values())
    assert refusal.value.shortfall == least
    assert {config for config in lacking if lacking[config] == least} <= {*tried}
    assert len(tried) < len(lacking) / 2
