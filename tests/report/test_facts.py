"""What is said of a plan: what was decided, its fullest device, those that have no work."""

from dataclasses import replace

import pytest

from autopipe.cluster import spec
from autopipe.cluster.cluster import Cluster, Group, NodeGroup
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Boundary, Memory, Place
from autopipe.report import facts
from tests.support.plans import chain, example_plan


def on(cluster: str | Cluster, places: list[tuple[int, int]]) -> Plan:
    """The example's stages at these (node, local) of a cluster."""
    plan = example_plan()
    found = spec.parse(cluster) if isinstance(cluster, str) else cluster
    assert isinstance(found, Cluster)
    own = tuple(Place(rank, rank, 0, 0, *at, "A100-80GB") for rank, at in enumerate(places))
    return replace(plan, cluster=found, mesh=replace(plan.mesh, places=own))


@pytest.mark.parametrize(
    ("cluster", "places", "words"),
    [
        ("2xA100-80GB", [(0, 0), (0, 1)], None),
        ("3xA100-80GB", [(0, 0), (0, 2)], "1 of 3 devices have no work (node 0: device 1)"),
        ("6xA100-80GB", [(0, 0), (0, 1)], "4 of 6 devices have no work (node 0: devices 2-5)"),
        (
            "2000x8xA100-80GB",
            [(0, 0), (0, 1)],
            "15,998 of 16,000 devices have no work "
            "(node 0: devices 2-7; nodes 1-1999: devices 0-7)",
        ),
    ],
)
def test_devices_that_have_no_work(
    cluster: str, places: list[tuple[int, int]], words: str | None
) -> None:
    assert facts.idle(on(cluster, places)) == words


def held(plan: Plan, *gibs: int) -> Plan:
    """The plan with so many GiB in each of its stages."""
    stages = tuple(
        replace(
            stage, predicted=replace(stage.predicted, memory=Memory(gib * 2**30, 0, 0, 0, 0, 0))
        )
        for stage, gib in zip(plan.stages, gibs, strict=True)
    )
    return replace(plan, stages=stages)


def said(plan: Plan, term: str) -> str:
    return dict(facts.decided(plan))[term]


def test_the_fullest_device_is_that_with_least_room_for_its_size() -> None:
    """30 of the 66.5 GiB of one are less than 25 of the 32.7 GiB of the other."""
    plan = held(on("1xA100-80GB+1xA100-40GB", [(0, 0), (1, 0)]), 30, 25)
    found = facts.fullest(plan)
    assert (found.rank, found.stages, found.held, found.kind) == (1, (1,), 25 * 2**30, "A100-40GB")
    assert said(plan, "memory").startswith("25.0 GiB of the ")
    assert said(plan, "memory").endswith(
        " that tensors may fill, on the fullest device (stage 1, A100-40GB)"
    )


def test_a_device_of_several_stages_holds_their_sum() -> None:
    found = facts.fullest(chain(2, 4, schedule="zb-v", chunks=2))
    assert (found.stages, found.held) == ((0, 3), 140 * 2**30)


def test_a_limit_that_was_asked_for() -> None:
    plan = held(example_plan(), 1, 1)
    one, two = (
        replace(plan, planner=replace(plan.planner, limits=limits))
        for limits in ((2**31,), (2**31, 2**32))
    )
    assert said(one, "memory") == (
        "1.0 GiB of the 2.0 GiB that were asked for as its limit, on the fullest device (stage 0)"
    )
    assert said(two, "memory") == (
        "1.0 GiB on the fullest device (stage 0); limits that were asked for: 2.0 GiB, 4.0 GiB"
    )


def test_what_is_not_as_usual() -> None:
    plan = example_plan()
    stages = tuple(replace(s, zero=3, recompute=("block.0", "block.1")) for s in plan.stages)
    unusual = replace(
        plan,
        precision="bf16-autocast",
        schedule="eager-1f1b",
        boundaries=(Boundary(window=3, depth=1),),
        stages=stages,
    )
    assert "zero" not in dict(facts.decided(unusual)), "there are no replicas to deal out to"
    places = tuple(Place(rank, rank // 2, rank % 2, 0, 0, rank, "A100-80GB") for rank in range(4))
    device = plan.cluster.row[0]
    unusual = replace(
        unusual,
        mesh=replace(plan.mesh, dp=2, places=places),
        cluster=replace(plan.cluster, nodes=(NodeGroup(1, (Group(4, device),)),)),
    )
    assert facts.decided(unusual)[4:] == [
        ("precision", "bf16 in matrix products, fp32 in all that is kept"),
        ("zero", "3: parameters, gradients and optimizer state are dealt out over the replicas"),
        ("recompute", "2 blocks run a second time in backward"),
        ("window", "3: receives posted ahead between a stage and the next"),
        ("depth", "1: micro-batches in flight there besides those that 1f1b has"),
    ]
    slow = replace(chain(3, 4, schedule="eager-1f1b"), boundaries=(Boundary(3, 1), Boundary(2, 0)))
    assert (said(slow, "window")[:4], said(slow, "depth")[:4]) == ("3 2:", "1 0:")


def test_a_plan_that_meets_its_bound_has_no_gap() -> None:
    plan = example_plan()
    met = replace(plan, planner=replace(plan.planner, step_seconds=0.0155, bound_seconds=0.0155))
    assert "none less than 15.5 ms, a gap of 0.0 %;" in facts.searched(met)
    nothing = replace(plan, planner=replace(plan.planner, step_seconds=0.0, bound_seconds=0.0))
    assert "a gap of 0.0 %;" in facts.searched(nothing)
