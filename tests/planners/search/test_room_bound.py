"""Configs that are known to exceed memory before their cuts are tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planners.model.estimate import estimate
from autopipe.planners.model.problem import (
    Again,
    Config,
    Constraints,
    Crossing,
    Decision,
    Problem,
    Saved,
)
from autopipe.planners.search.configs import configs
from autopipe.planners.search.dynamic import choose
from autopipe.planners.search.room_bound import RuledOut, left_over, ruled_out
from tests.support.long import sampled, share
from tests.support.problems import line, random_problem, rich_problem


def at(memory: int, saved: int = 0, schedule: str = "1f1b") -> int:
    """Six units of 100 bytes of parameters, which take 400 with gradients and Adam's state, on
    three stages with four micro-batches."""
    asked = Constraints(pp=3, schedule=schedule)
    problem = line((1.0,) * 6, devices=3, memory=memory, saved=saved, constraints=asked)
    return left_over(problem, Config(3, 1, 4, 0, schedule))


@pytest.mark.parametrize(
    ("memory", "units"),
    [(800, 0), (799, 0), (780, 3), (400, 3), (380, 6)],
    ids=["two each", "16 bytes are for rounding", "one each", "one each", "none"],
)
def test_each_stage_takes_what_it_has_room_for(memory: int, units: int) -> None:
    assert at(memory) == units


def test_with_more_in_flight_there_is_less_room() -> None:
    """Stages of 1f1b hold 3, 2 and 1 micro-batches: of units that save 100 bytes a device of 1000
    bytes has room for 1 (400 + 300), 1 (400 + 200) and 2 (400 + 100)."""
    assert at(1000, saved=100) == 2
    assert at(1000, saved=100, schedule="gpipe") == 3  # 4 each: one unit each


def test_a_tensor_from_an_earlier_unit_is_kept_or_received() -> None:
    """The second unit keeps 300 bytes that the first has made, and which cross in 200: at least
    those 200 are there, wherever the cut is."""
    problem = line((1.0, 1.0), devices=2, memory=580, saved=0)
    (profile,) = problem.profiles
    crossing = (Crossing(200, 0, (1,), gradient=False),)
    handed = replace(profile, saved=(Saved(300, 0, (1,)),), crossings=crossing)
    problem = replace(problem, profiles=(handed,))
    assert left_over(problem, Config(2, 1, 4, 0, "1f1b")) == 1
    assert left_over(replace(problem, profiles=(profile,)), Config(2, 1, 4, 0, "1f1b")) == 0


@pytest.mark.parametrize("again", [(), (Again(0),)], ids=["none again", "one again"])
def test_what_is_asked_to_offload_takes_no_room(again: tuple[Again, ...]) -> None:
    """Bug: with --recompute none --offload all, what blocks keep on the host counted here too, and
    a plan that fits was refused. Six blocks keep 1000 bytes each, and two are on their way."""
    away = tuple(range(len(again), 6))
    asked = Constraints(pp=1, schedule="1f1b", recompute=again, offload=away)
    problem = line((1.0,) * 6, devices=1, memory=10**6, saved=0, constraints=asked)
    (profile,) = problem.profiles
    kept = tuple(Saved(1000, unit, (unit,), block=unit) for unit in range(6))
    profile = replace(profile, saved=kept, recompute=(((1.0,),),) * 6)
    blocks = tuple((unit, unit + 1) for unit in range(6))
    problem = replace(problem, profiles=(profile,), recomputable=blocks, offloads=True)
    config = Config(1, 1, 4, 0, "1f1b")
    decision = Decision(config, (), (again,), (), (away,))
    held = estimate(problem, decision).stages[0].memory.peak
    full = replace(problem, machine=replace(problem.machine, memory=(held,)))
    assert estimate(full, decision).fits and not ruled_out(full, config)


@pytest.mark.sweep(of=2)
@pytest.mark.parametrize("make", [random_problem, rich_problem], ids=["plain", "rich"])
def test_what_is_told_to_have_no_room_has_none(make) -> None:
    """Whatever the cuts, the order of devices, what runs again, the schedule and ZeRO stage.

    60 problems of each kind; 20 by default.
    """
    told = 0
    for seed in sampled(range(60), of=3):
        problem: Problem = make(seed)
        less = replace(
            problem.machine, memory=tuple(memory // 2 for memory in problem.machine.memory)
        )
        problem = replace(problem, machine=less)
        try:
            every = configs(problem)
        except InfeasibleError:
            continue
        for config in every:
            if left_over(problem, config):
                told += 1
                assert not estimate(problem, choose(problem, config)).fits
    assert told > share(100, of=3)


@pytest.mark.parametrize("make", [random_problem, rich_problem], ids=["plain", "rich"])
def test_what_is_told_to_be_too_slow_is_or_has_no_room(make) -> None:
    """Of limits around the step of the best cuts: none is said to be missed that they meet.

    60 problems of each kind; 10 by default.
    """
    told = 0
    for seed in sampled(range(60), of=6):
        problem: Problem = make(seed)
        try:
            every = configs(problem)
        except InfeasibleError:
            continue
        for config in every:
            found = estimate(problem, choose(problem, config))
            assert not found.fits or not ruled_out(problem, config, found.step_seconds)
            for share_of_it in (0.7, 0.9, 0.999):
                if ruled_out(problem, config, share_of_it * found.step_seconds):
                    told += found.fits
    assert told > share(1000, of=6)


def test_uneven_cuts_that_fit_may_be_too_slow() -> None:
    """Four units of a second; the first of two stages holds two micro-batches, the last one. Only
    one unit fits on the first, and three units on the last make a step of 4 + 3 seconds."""
    problem = line((1.0,) * 4, batch=2, saved=100, parameter=0, memory=320)
    config = Config(2, 1, 2, 0, "1f1b")
    assert estimate(problem, choose(problem, config)).step_seconds == 7.0
    assert ruled_out(problem, config) is None and ruled_out(problem, config, 7.0) is None
    assert ruled_out(problem, config, 6.9) == RuledOut(1, ever=False)
