"""The fullest device of a plan: which it is, what it holds by part, and when."""

from dataclasses import replace

from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Memory
from autopipe.report import fullest
from tests.support.plans import chain, example_plan, on

GIB = 2**30


def held(plan: Plan, *gibs: int) -> Plan:
    """The plan with so many GiB in each of its stages."""
    stages = tuple(
        replace(
            stage, predicted=replace(stage.predicted, memory=Memory(gib * 2**30, 0, 0, 0, 0, 0))
        )
        for stage, gib in zip(plan.stages, gibs, strict=True)
    )
    return replace(plan, stages=stages)


def test_the_fullest_device_is_that_with_least_room_for_its_size() -> None:
    """30 of the 74.3 GiB of one are less than 25 of the 32.7 GiB of the other."""
    plan = held(on("1xA100-80GB+1xA100-40GB", [(0, 0), (1, 0)]), 30, 25)
    found = fullest.fullest(plan)
    assert (found.rank, found.stages, found.held, found.device.kind) == (
        1,
        (1,),
        25 * 2**30,
        "A100-40GB",
    )
    assert fullest.room(plan).startswith("25.0 GiB of the ")
    assert fullest.room(plan).endswith(
        " that tensors may fill, on the fullest device (stage 1, A100-40GB)"
    )


def test_a_device_of_several_stages_holds_their_sum() -> None:
    found = fullest.fullest(chain(2, 4, schedule="zb-v", chunks=2))
    assert (found.stages, found.held) == ((0, 3), 140 * 2**30)


def test_a_limit_that_was_asked_for() -> None:
    plan = held(example_plan(), 1, 1)
    one, two = (
        replace(plan, planner=replace(plan.planner, limits=limits))
        for limits in ((2**31,), (2**31, 2**32))
    )
    assert fullest.room(one) == (
        "1.0 GiB of the 2.0 GiB that were asked for as its limit, on the fullest device (stage 0)"
    )
    assert fullest.room(two) == (
        "1.0 GiB on the fullest device (stage 0); limits that were asked for: 2.0 GiB, 4.0 GiB"
    )


FULL = Memory(
    parameters=12 * GIB,
    gradients=12 * GIB,
    optimizer=6 * GIB,
    buffers=0,
    activations=28 * GIB,
    transfers=GIB,
    passing=GIB // 2,
    copies=6 * GIB,
)


def holding(at: str = "0B3", **changes: object) -> str:
    """What is said of a plan whose stage 0 holds `FULL`."""
    plan = example_plan()
    first, second = plan.stages
    full = replace(first, predicted=replace(first.predicted, memory=FULL, fullest=at))
    return fullest.holding(replace(plan, stages=(full, second), **changes))  # type: ignore[arg-type]


def test_what_it_holds_when_it_is_fullest() -> None:
    """In 1f1b the first of two stages has two micro-batches in flight. Of the 79.1 GiB of an
    A100-80GB tensors may fill 74.3."""
    assert holding(precision="bf16") == (
        "at B3 of stage 0, in GiB: 12.0 fp32 master weights, 6.0 bf16 weights, 12.0 gradients, "
        "6.0 optimizer state, 28.0 activations (2 micro-batches in flight), 1.0 transfers, "
        "0.5 gradients on their way; besides, 4.8 GiB of margin"
    )
    assert "12.0 parameters, 6.0 fp16 weights, " in holding(precision="fp16-autocast")


def test_the_moment_need_not_be_one_of_computing() -> None:
    assert holding("0REDUCE").startswith("at sum of gradients, stage 0, in GiB: ")
    assert holding("0WAIT_B2<1").startswith("at wait for gradients 2, stage 0, in GiB: ")
    assert holding("").startswith("in GiB: 12.0 parameters, ")


def test_a_limit_of_ones_own_leaves_more_than_a_margin() -> None:
    plan = example_plan()
    limited = replace(plan, planner=replace(plan.planner, limits=(2**31,)))
    assert "margin" in fullest.holding(plan)
    assert "margin" not in fullest.holding(limited)


def test_stages_of_a_device_are_added_up() -> None:
    """Of four stages on two ranks rank 0 has the first and the last."""
    found = fullest.holding(chain(2, 4, schedule="zb-v", chunks=2))
    assert found.startswith("in GiB: 40.0 parameters, 40.0 gradients, 20.0 optimizer state, 38.0 ")
    assert " micro-batches in flight, in all its stages), 2.0 transfers" in found


def test_each_rank_has_its_share_and_all_its_stages() -> None:
    """In their order, so that one finds the rank that a stage is on."""
    plan = held(on("1xA100-80GB+1xA100-40GB", [(0, 0), (1, 0)]), 30, 25)
    found = fullest.shares(plan)
    assert [(full.rank, full.stages, full.held) for _, full in found] == [
        (0, (0,), 30 * GIB),
        (1, (1,), 25 * GIB),
    ]
    assert max(found, key=lambda each: each[0])[1] == fullest.fullest(plan)
