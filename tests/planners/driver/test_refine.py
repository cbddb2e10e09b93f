"""Meshes that the estimate and the longest path put in another order."""

from __future__ import annotations

from dataclasses import replace

import pytest

import autopipe
from autopipe import Plan
from autopipe.cluster.cluster import Cluster, Group, Link, NodeGroup
from autopipe.planfile.parts import Alternative, Prediction
from autopipe.planners.driver.refine import fastest_of
from tests.support.inprocess import machine
from tests.support.plans import example_plan
from tests.support.zoo import ZOO

pytestmark = pytest.mark.usefixtures("traces_remembered")


def planned(pp: int | None = None, dp: int | None = None) -> Plan:
    """The zoo's GPT over three devices that are far from each other."""
    case, far = ZOO["gpt"], Link(2e-3, 1e8)
    nodes = (NodeGroup(3, (Group(1, machine(1).row[0]),)),)
    return autopipe.plan(
        case.model,
        case.inputs,
        loss=case.loss,
        cluster=Cluster("far", nodes, far, far),
        batch_size=8,
        pp=pp,
        dp=dp,
        tp=1,
        zero=0,
        recompute="none",
    )


def test_the_longest_path_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the estimate is not to be believed, all meshes that may be faster are written down: the
    plan is that of the least path, and the others are told with theirs."""
    believed = planned()
    forced = {mesh: planned(*mesh) for mesh in ((1, 1), (2, 1), (3, 1), (1, 2))}
    monkeypatch.setattr("autopipe.planners.driver.refine.TRUSTED", 0.0)
    looked = planned()
    steps = {mesh: plan.prediction.step_seconds for mesh, plan in forced.items()}
    assert looked.prediction.step_seconds == min(steps.values())
    assert looked.prediction.step_seconds <= believed.prediction.step_seconds
    for other in looked.planner.alternatives:
        if "by its longest path" in other.why:
            assert other.step_seconds == pytest.approx(steps[other.pp, other.dp])
            assert other.step_seconds >= looked.prediction.step_seconds


STEPS = (2, 1.0), (3, 1.5)


def plan_of(pp: int) -> Plan:
    """The example with so many stages in its mesh, estimated at 0.9 s."""
    plan = example_plan()
    note = replace(plan.planner, step_seconds=0.9)
    return replace(plan, mesh=replace(plan.mesh, pp=pp), planner=note)


def alternative_of(pp: int, step: float) -> Alternative:
    return Alternative(pp, 1, 1, 4, "1f1b", step, 2.33, "by computing")


def test_the_fastest_by_its_path_is_told_beside_the_others() -> None:
    """One that the estimate has before it, one that it has behind, and one that it takes for faster
    but that was not looked at, of which nothing is known."""
    quick, slow = (replace(plan_of(pp), prediction=Prediction(step, 0.0)) for pp, step in STEPS)
    estimated = [alternative_of(4, 3.0), alternative_of(5, 0.5)]
    looked = {(plan.mesh.pp, 1, 1): plan for plan in (slow, quick)}
    found = fastest_of(looked, 0.25, estimated)
    assert (found.mesh, found.planner.bound_seconds) == (quick.mesh, 0.25)
    assert [(o.pp, o.step_seconds, o.why) for o in found.planner.alternatives] == [
        (3, 1.5, "50 % slower, by its longest path, though the estimate is 900 ms"),
        (4, 3.0, "200 % slower, by computing"),
    ]
