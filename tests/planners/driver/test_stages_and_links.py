"""Several stages on a rank, schedules from files, windows and depths, links between devices."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopipe import AutopipeError, InfeasibleError, ScheduleError
from autopipe.cluster.cluster import Cluster, Link
from autopipe.planfile import programs
from autopipe.planfile.parts import Boundary
from autopipe.planners.driver.arguments import WINDOW
from autopipe.schedules.instructions import holders
from autopipe.schedules.registry import make
from tests.support.gpt_plans import NEAR, nodes_of, parts, planned
from tests.support.inprocess import machine
from tests.support.long import chosen
from tests.support.zoo import ZOO

pytestmark = pytest.mark.usefixtures("traces_remembered")


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("interleaved", 2), pytest.param("interleaved", 3, marks=pytest.mark.long), ("zb-v", 2)],
)
def test_several_stages_on_a_rank(schedule: str, chunks: int) -> None:
    plan = planned(pp=2, schedule=schedule, chunks=chunks, micro_batches=4)
    assert len(plan.stages) == 2 * chunks and len(plan.boundaries) == 2 * chunks - 1
    assert (
        holders(programs.compute(plan))
        == {
            ("interleaved", 2): (0, 1, 0, 1),
            ("interleaved", 3): (0, 1, 0, 1, 0, 1),
            ("zb-v", 2): (0, 1, 1, 0),
        }[schedule, chunks]
    )


@pytest.mark.parametrize("schedule", chosen(["interleaved", "zb-v"], now=("zb-v",)))
def test_a_device_has_room_for_all_its_stages(schedule: str) -> None:
    """Their peaks together are what fits, to the byte, and one byte less does not."""
    shape: dict[str, Any] = {"pp": 2, "schedule": schedule, "micro_batches": 4}
    plan = planned(**shape)
    ranks = holders(programs.compute(plan))
    held = [0, 0]
    for stage, rank in zip(plan.stages, ranks, strict=True):
        held[rank] += stage.predicted.memory.peak
    assert planned(**shape, memory=max(held)).stages
    least = max(held)
    try:  # with less there may be other cuts, which then hold less
        less = planned(**shape, memory=least - 1)
    except InfeasibleError as refused:
        assert re.search(r"stages \d and \d need", refused.message)
    else:
        sums = [0, 0]
        for stage, rank in zip(less.stages, ranks, strict=True):
            sums[rank] += stage.predicted.memory.peak
        assert max(sums) < least


@pytest.mark.long
def test_a_parameter_of_two_stages_of_a_rank_is_held_once() -> None:
    """GPT-2's embedding is its head: under zb-v rank 0 has the first stage and the last.

    Bug: its copy in 16 bits, which a step makes once, was counted with both. On two ranks both sum
    its gradient."""
    case = ZOO["gpt2"]
    tied = {"model": case.model, "inputs": case.inputs, "loss": case.loss}
    plan = planned(**tied, pp=2, schedule="zb-v", micro_batches=4)
    name = "transformer.wte.weight"
    assert [name in stage.parameters for stage in plan.stages] == [True, False, False, True]
    whole = sum(p.numel() * 4 for p in case.model().parameters())
    assert sum(parts(plan, "gradients")) == whole
    two = planned(**tied, pp=2, schedule="1f1b", micro_batches=4)
    shared = case.model().get_parameter(name).numel() * 4
    assert sum(parts(two, "gradients")) == whole + shared
    assert [stage.predicted.tied for stage in two.stages] == [shared, shared]
    assert not any(stage.predicted.tied for stage in plan.stages)
    held, held_twice = (
        sum(parts(planned(**tied, pp=2, schedule=s, micro_batches=4, precision="bf16"), "copies"))
        for s in ("zb-v", "1f1b")
    )
    assert (held, held_twice) == (whole // 2, (whole + shared) // 2)


def test_split_backwards_hold_what_the_second_half_needs() -> None:
    """zb-h1 on two ranks: as many in flight as under 1F1B, and the last rank one more."""
    usual, split = (
        planned(pp=2, schedule=name, micro_batches=4, planner="uniform")
        for name in ("1f1b", "zb-h1")
    )
    assert [s.first for s in usual.stages] == [s.first for s in split.stages]
    before, after = parts(usual, "activations"), parts(split, "activations")
    assert after[0] >= before[0] * 0.9 and after[1] > before[1] * 1.5
    assert split.prediction.step_seconds < usual.prediction.step_seconds


def test_a_schedule_from_a_file(tmp_path: Path) -> None:
    """It says how many ranks and micro-batches there are; the plan has its lines."""
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: 0F0 0F1 0B0 0B1\n# the last stage\nrank 1: 1F0 1B0 1F1 1B1\n")
    plan = planned(schedule=str(path))
    assert (plan.schedule, plan.mesh.pp, plan.batch.micro_batches) == ("written", 2, 2)
    assert plan.programs == ("rank 0: 0F0 0F1 0B0 0B1", "rank 1: 1F0 1B0 1F1 1B1")
    named = planned(schedule="1f1b", pp=2, micro_batches=2)
    assert plan.prediction == named.prediction
    assert parts(plan, "peak") == parts(named, "peak")
    for name, other, is_for in (("pp", 3, 2), ("micro_batches", 4, 2)):
        with pytest.raises(AutopipeError) as refused:
            planned(schedule=str(path), **{name: other})
        assert refused.value.message == (
            f"{name}={other} was asked for, and the schedule is written for {name}={is_for}"
        )


def test_a_written_schedule_that_waits_for_itself(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1\n")
    with pytest.raises(ScheduleError, match="wait"):
        planned(schedule=str(path))


def test_windows_and_depths_as_asked_for() -> None:
    for window in (1, 3):
        plan = planned(pp=2, window=window, micro_batches=4)
        assert plan.boundaries == (Boundary(window, 0),)
    assert planned(pp=2).boundaries == (Boundary(WINDOW, 0),)
    deep = planned(pp=2, schedule="eager-1f1b", depth=1, micro_batches=4)
    assert deep.boundaries == (Boundary(WINDOW, 1),)
    assert programs.compute(deep) == make("eager-1f1b", 2, 4, depths=(1,))
    shallow = planned(pp=2, schedule="eager-1f1b", depth=0, micro_batches=4)
    assert parts(deep, "activations")[0] > parts(shallow, "activations")[0]


def slow(processes: int, latency: float) -> Cluster:
    link = Link(latency, 1e9)
    return replace(machine(processes), within=link, between=link)


def test_a_slow_link_gets_depth_where_memory_allows() -> None:
    shape: dict[str, Any] = {"pp": 2, "micro_batches": 8, "cluster": slow(2, 1e-3)}
    eager, usual = (planned(schedule=name, **shape) for name in ("eager-1f1b", "1f1b"))
    assert eager.boundaries[0].depth > 0
    assert eager.prediction.step_seconds < usual.prediction.step_seconds * 0.8
    fixed = planned(schedule="eager-1f1b", window=2, **shape)
    assert fixed.boundaries[0].window == 2 and fixed.boundaries[0].depth > 0
    shape["planner"] = "uniform"  # the same cuts, whatever the memory
    least = planned(schedule="eager-1f1b", depth=0, window=1, **shape)
    tight = planned(schedule="eager-1f1b", memory=max(parts(least, "peak")), **shape)
    assert tight.boundaries == (Boundary(1, 0),)
    near = planned(schedule="eager-1f1b", **{**shape, "cluster": slow(2, 1e-9)})
    assert near.boundaries[0].depth == 0


def test_tensor_parallel_ranks_are_as_far_from_each_other_as_their_own_node_says() -> None:
    """Of the second node the link is slow; the stage there takes longer with the same layers."""
    shape: dict[str, Any] = {"tp": 2, "pp": 2, "dp": 1, "planner": "uniform", "micro_batches": 2}
    near, far = (
        planned(**shape, cluster=nodes_of(2, 2, within=(NEAR, link))).stages
        for link in (NEAR, Link(1e-3, 1e10))
    )
    assert near[0].predicted.forward_seconds == far[0].predicted.forward_seconds
    assert near[1].predicted.forward_seconds + 1e-3 < far[1].predicted.forward_seconds


@pytest.mark.long
def test_tensor_parallel_ranks_at_two_sites_send_over_what_joins_the_sites() -> None:
    shape: dict[str, Any] = {"tp": 2, "pp": 1, "dp": 1, "micro_batches": 1}
    near, far = (
        planned(**shape, cluster=nodes_of(1, 1, within=(NEAR, NEAR), site=site))
        for site in (False, True)
    )
    assert far.blocks[0].collectives == near.blocks[0].collectives != ()
    assert far.prediction.step_seconds > near.prediction.step_seconds + 0.1


def test_of_nodes_that_a_degree_does_not_divide_some_devices_stay_idle() -> None:
    """tp=2 on a node of three and a node of two: no pair stands on both."""
    plan = planned(tp=2, cluster=nodes_of(3, 2, within=(NEAR, NEAR)))
    places = [(place.node, place.local) for place in plan.mesh.places]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    with pytest.raises(
        InfeasibleError, match="needs 6 devices, found 5, of which tp=2 leaves 1 idle"
    ):
        planned(tp=2, pp=3, cluster=nodes_of(3, 2, within=(NEAR, NEAR)))
    assert plan.planner.binding.startswith(
        "1 of 5 devices stays idle, as fewer than tp=2 stand beside each other"
    )
