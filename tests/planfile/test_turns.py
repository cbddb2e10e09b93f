"""Ranks that take turns at a stage: what a plan's list of stages says of them, and what it may not.

stages    0        1  1       2            turns (1, 2, 1): four entries, of three stages
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopipe.errors import PlanError
from autopipe.planfile import predict, programs, turns
from autopipe.planfile.contents import Plan, check
from autopipe.schedules.instructions import format_programs
from tests.support.plans import chain, in_turns


def test_the_entries_of_each_stage() -> None:
    plan = in_turns()
    assert plan.turns == (1, 2, 1)
    assert [stage.first for stage in plan.once] == ["a", "b", "d"]
    assert [turns.taking_turns(plan.stages, i) for i in range(4)] == [(0,), (1, 2), (1, 2), (3,)]
    assert chain(3, 4).turns == ()
    assert turns.taking_turns(chain(3, 4).stages, 1) == (1,)
    check(plan)


def test_how_many_micro_batches_each_runs() -> None:
    assert [turns.rounds(in_turns().stages, entry, 5) for entry in range(4)] == [5, 3, 2, 5]


def test_the_programs_of_a_plan() -> None:
    """The last rank holds one micro-batch, the two before it two each, and the first one five."""
    assert format_programs(programs.compute(in_turns(5))) == (
        "rank 0: 0F0 0F1 0F2 0F3 0F4 0B0 0B1 0B2 0B3 0B4\n"
        "rank 1: 1F0 1F2 1B0 1F4 1B2 1B4\n"
        "rank 2: 2F1 2F3 2B1 2B3\n"
        "rank 3: 3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4"
    )


def test_a_stage_of_twice_the_seconds_keeps_up() -> None:
    """A forward takes 1 ms and 2 ms in the middle, a backward twice as long, links are free.

    Of eight micro-batches the first comes back after 3 * (1 + 2 + 1) ms, each other 3 ms later; one
    rank in the middle would take 6 ms for each.
    """

    def seconds(plan: Plan) -> float:
        slow = {"b": 2.0}
        stages = [
            replace(
                stage,
                predicted=replace(
                    stage.predicted,
                    forward_seconds=1e-3 * slow.get(stage.first, 1.0),
                    backward_seconds=2e-3 * slow.get(stage.first, 1.0),
                    memory=replace(stage.predicted.memory, gradients=0),
                ),
            )
            for stage in plan.stages
        ]
        return predict.timeline(replace(plan, stages=tuple(stages))).seconds

    assert seconds(in_turns(8)) == pytest.approx(12e-3 + 7 * 3e-3, rel=0.1)


@pytest.mark.parametrize(
    ("entry", "change", "words"),
    [
        (
            1,
            {"turns": 1},
            r"plan.stages\[3\].turns: expected that of the stage with which it takes",
        ),
        (3, {"turns": 2}, r"plan.stages\[3\].turns: expected 1 to 1, one an entry, found 2"),
        (
            2,
            {"last": "c"},
            r"plan.stages\[2\].last: expected that of the stage with which it takes",
        ),
        (2, {"first": "c"}, r"plan.stages\[2\].first: expected that of the stage with which it"),
        (0, {"turns": 0}, r"plan.stages\[0\].turns: expected 1 to 4, one an entry, found 0"),
    ],
)
def test_entries_that_are_not_alike(entry: int, change: dict[str, object], words: str) -> None:
    plan = in_turns()
    stages = list(plan.stages)
    stages[entry] = replace(stages[entry], **change)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=words):
        check(replace(plan, stages=tuple(stages)))


def test_what_takes_no_turns() -> None:
    plan = in_turns()
    for other, words in (
        (replace(plan, schedule="gpipe"), "plan.schedule: expected 1f1b, as ranks take turns"),
        (replace(plan, loss_over="batch"), "plan.loss_over: expected rows or micro-batch"),
        (
            replace(plan, stages=tuple(replace(stage, zero=2) for stage in plan.stages)),
            r"plan.stages\[0\].zero: expected 0 or 1, as ranks take turns",
        ),
        (in_turns(1), "plan.batch.micro_batches: expected at least 2, as so many ranks"),
    ):
        with pytest.raises(PlanError, match=words):
            check(other)
