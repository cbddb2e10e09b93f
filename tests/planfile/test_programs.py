"""A plan's programs: the schedule it names, or the lines it has, for its own stages and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.errors import PlanError, ScheduleError
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan, check
from autopipe.planfile.parts import Boundary
from autopipe.schedules.instructions import format_programs, holders
from autopipe.schedules.registry import make
from autopipe.schedules.transfers import Edge
from tests.support.plans import chain


def written(plan: Plan, name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Plan:
    """The plan with the lines of a schedule instead of its name."""
    lines = format_programs(make(name, ranks, micro_batches, chunks=chunks)).splitlines()
    return replace(plan, schedule="written", programs=tuple(lines))


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [("naive", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)],
)
def test_a_named_schedule_of_as_many_stages_a_rank_as_the_plan_has(
    schedule: str, chunks: int
) -> None:
    plan = chain(2, 4, schedule=schedule, chunks=chunks)
    found = programs.compute(plan)
    assert found == make(schedule, 2, 4, chunks=chunks)
    assert len(holders(found)) == len(plan.stages) == 2 * chunks


def test_the_depths_of_eager_1f1b_are_those_of_the_boundaries() -> None:
    plan = replace(chain(3, 8, schedule="eager-1f1b"), boundaries=(Boundary(4, 2), Boundary(2, 1)))
    assert programs.compute(plan) == make("eager-1f1b", 3, 8, depths=(2, 1))
    with pytest.raises(ScheduleError, match="1f1b takes no depths, found 2, 1"):
        programs.compute(replace(plan, schedule="1f1b"))


def test_a_written_schedule_is_read_from_the_plan() -> None:
    plan = written(chain(2, 4, chunks=2), "zb-v", 2, 4, chunks=2)
    assert programs.compute(plan) == make("zb-v", 2, 4, chunks=2)


@pytest.mark.parametrize(
    ("ranks", "micro_batches", "chunks", "sentence"),
    [
        (3, 4, 1, "they are for 3 ranks, the plan has 2"),
        (2, 4, 2, "they are for 4 stages, the plan has 2"),
        (2, 5, 1, "they are for 5 micro-batches, the plan has 4"),
    ],
)
def test_a_written_schedule_of_another_pipeline_is_refused(
    ranks: int, micro_batches: int, chunks: int, sentence: str
) -> None:
    name = "1f1b" if chunks == 1 else "interleaved"
    with pytest.raises(PlanError) as refused:
        programs.compute(written(chain(2, 4), name, ranks, micro_batches, chunks))
    assert refused.value.message == f"plan.programs: {sentence}"


def test_micro_batches_are_counted() -> None:
    assert programs.micro_batches(make("gpipe", 3, 7)) == 7


def test_an_edge_for_each_pair_of_stages_that_share_a_tensor() -> None:
    """Stage 0 sends two tensors to stage 1, and one of them to stage 2 without a gradient."""
    plan = chain(3, 2)
    (hidden,) = plan.stages[0].sends
    mask = replace(hidden, name="mask", gradient=False)
    first = replace(plan.stages[0], sends=(mask, hidden, replace(mask, peer=2)))
    plan = replace(plan, stages=(first, *plan.stages[1:]))
    assert programs.edges(plan) == (
        Edge(0, 1, gradient=True),
        Edge(0, 2, gradient=False),
        Edge(1, 2, gradient=True),
    )


def test_a_step_has_transfers_between_ranks() -> None:
    plan = replace(chain(2, 1), boundaries=(Boundary(1, 0),))
    assert format_programs(programs.step(plan)).splitlines() == [
        "rank 0: 0POST_B0<1 0F0 0SEND_F0>1 0WAIT_B0<1 0FREE_F0>1 0REDUCE 0B0 0STEP",
        "rank 1: 1POST_F0<0 1WAIT_F0<0 1F0 1REDUCE 1B0 1SEND_B0>0 1FREE_B0>0 1STEP",
    ]


def test_an_edit_that_cannot_be_is_told_with_its_place_and_a_hint() -> None:
    """Bug: neither: `rank 0: 0B0 is missing; ...`, and no word of what to do."""
    plan = chain(2, 4)
    with pytest.raises(ScheduleError) as lines:
        programs.compute(replace(plan, programs=("rank 0: 0F0",)))
    assert lines.value.message.startswith("plan.programs: rank 0: 0B0 is missing")
    assert lines.value.hint == (
        "mend that place in the plan file, or make the plan again with `autopipe plan`"
    )
    with pytest.raises(ScheduleError, match="^plan.schedule: there is no schedule 'mine'") as name:
        programs.compute(replace(plan, schedule="mine"))
    assert "the schedules are naive, " in str(name.value.hint)
    with pytest.raises(PlanError, match=r"^plan.boundaries: expected 1") as parts:
        check(replace(plan, boundaries=()))
    assert parts.value.hint == lines.value.hint
