"""The planners against each other and against brute force, on problems made from a seed.

Where a planner may look is in `test_configs` and `test_device_orders`; what it tells besides its
decision in `test_best`, `test_reasons` and `test_relax`.
Problems solved on paper are in `test_planners_by_hand`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planfile.parts import TRANSFERS
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import (
    WHOLE,
    Again,
    Config,
    Constraints,
    Decision,
    Problem,
    splits,
)
from autopipe.planners.search.best import Answer
from autopipe.planners.search.configs import configs
from autopipe.planners.search.device_orders import orders
from autopipe.planners.search.registry import PLANNERS
from autopipe.schedules.registry import SCHEDULES
from tests.support.long import chosen, sampled, share
from tests.support.problems import parted_problem, rich_problem
from tests.support.searched import MAKERS, found_by, found_in, hosted_problem, same

pytestmark = pytest.mark.usefixtures("no_advice")


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
@pytest.mark.parametrize("seed", [188, 56, 98, 133])
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
