"""Problems that are searched by several planners, and when two answers are the same."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from autopipe.errors import InfeasibleError
from autopipe.planfile.parts import Alternative
from autopipe.planners.model.problem import Problem
from autopipe.planners.search.best import Answer
from autopipe.planners.search.registry import PLANNERS
from tests.support.problems import random_problem, rich_problem

Found = Answer | InfeasibleError


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
