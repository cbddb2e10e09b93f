"""Sentences about a plan: its decisions, its fullest device, devices without work."""

from dataclasses import replace

import pytest

from autopipe.cluster.cluster import Group, NodeGroup
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Boundary, Place
from autopipe.report import facts
from tests.support.plans import chain, example_plan, in_turns, on


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


def said(plan: Plan, term: str) -> str:
    return dict(facts.decided(plan))[term]


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
    assert facts.decided(unusual)[6:] == [
        ("precision", "bf16 in matrix products, fp32 in all that is kept"),
        ("zero", "3: parameters, gradients and optimizer state are sharded over the replicas"),
        ("recompute", "2 blocks run a second time in backward"),
        ("window", "3: receives posted ahead between a stage and the next"),
        ("depth", "1: micro-batches in flight there beyond those of 1f1b"),
    ]
    away = replace(plan, stages=tuple(replace(s, offload=("block.0",)) for s in plan.stages))
    kept = "1 block keeps what backward needs in the host's memory; computing hides the copies"
    assert said(away, "offload") == kept and "offload" not in dict(facts.decided(plan))
    low = replace(plan, precision="bf16", low_buffers=("positions", "h.0.mask", "h.1.mask"))
    assert said(low, "buffers") == "positions and 2 more: read in bf16, where they meet activations"
    slow = replace(chain(3, 4, schedule="eager-1f1b"), boundaries=(Boundary(3, 1), Boundary(2, 0)))
    assert (said(slow, "window")[:4], said(slow, "depth")[:4]) == ("3 2:", "1 0:")
    turns = replace(in_turns(), stages=tuple(replace(s, zero=1) for s in in_turns().stages))
    over = "1: optimizer state is sharded over ranks that take turns at a stage"
    assert said(turns, "zero") == over and turns.mesh.dp == 1


@pytest.mark.parametrize(
    ("zero", "words"),
    [
        (0, "to sum the gradients of parameters"),
        (1, "to scatter the gradients of parameters and gather these (ZeRO-1)"),
        # Bug: what ZeRO-3 gathers was called a sum too.
        (3, "to gather parameters twice and scatter their gradients in every micro-batch (ZeRO-3)"),
    ],
)
def test_what_replicas_send_between_nodes(zero: int, words: str) -> None:
    plan = on("2x1xA100-80GB", [(0, 0), (1, 0)])
    (stage, *_) = plan.stages
    held = replace(stage.predicted, memory=replace(stage.predicted.memory, gradients=2 * 10**9))
    mesh = replace(
        plan.mesh,
        pp=1,
        dp=2,
        places=tuple(replace(place, pp=0, dp=place.rank) for place in plan.mesh.places),
    )
    plan = replace(
        plan,
        mesh=mesh,
        boundaries=(),
        stages=(replace(stage, zero=zero, sends=(), predicted=held),),
    )
    told = facts.crossing(plan)
    assert told is not None and told.endswith(f" GB {words}")


def test_what_stages_of_a_tied_parameter_send_between_nodes() -> None:
    """Both have a gigabyte of its gradients: they go there and back."""
    plan = on("2x1xA100-80GB", [(0, 0), (1, 0)])
    stages = (replace(s, predicted=replace(s.predicted, tied=10**9)) for s in plan.stages)
    told = facts.crossing(replace(plan, stages=tuple(stages)))
    assert told is not None and told.endswith("; 2.0 GB to sum the gradients of parameters")


def test_a_plan_that_meets_its_bound_has_no_gap() -> None:
    plan = example_plan()
    met = replace(plan, planner=replace(plan.planner, step_seconds=0.0155, bound_seconds=0.0155))
    assert "none less than 15.5 ms, a gap of 0.0 %;" in facts.searched(met)
    nothing = replace(plan, planner=replace(plan.planner, step_seconds=0.0, bound_seconds=0.0))
    assert "a gap of 0.0 %;" in facts.searched(nothing)
