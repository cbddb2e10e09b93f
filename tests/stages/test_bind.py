"""A plan's cuts found again in a traced model, or refused with the field that is wrong."""

from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe import Plan, PlanError, ScheduleError
from autopipe.frontend import batch as batches
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.partition import partition
from autopipe.planfile.parts import BlockClass, Sharding, StagePlan
from autopipe.stages.bind import (
    Dealt,
    Split,
    check_loss,
    check_runs,
    split_as_planned,
    split_for_evaluation,
)
from autopipe.tracing.source import trace_source
from tests.support.inprocess import traced
from tests.support.long import chosen
from tests.support.models import WIDTH
from tests.support.pipes import ZOO, planned
from tests.support.zoo import Case, entropy

PLAN = planned("gpt", 2, 1, 2)
FIRST, LAST = PLAN.stages


def bound(plan: Plan, name: str = "gpt") -> Split:
    return split_as_planned(traced(name)[0], plan)


def stages(*stages: StagePlan) -> Plan:
    return replace(PLAN, stages=stages)


def test_the_stages_are_the_plans() -> None:
    split = bound(PLAN)
    for stage, written in zip(split.stages, PLAN.stages, strict=True):
        nodes = split.graph.nodes[stage.first : stage.stop]
        assert (nodes[0].name, nodes[-1].name) == (written.first, written.last)
        assert len(stage.nodes) == written.nodes
        assert [str(ref) for ref, _ in stage.sends] == [sent.name for sent in written.sends]
    assert [block.path for block in split.blocks] == [*PLAN.blocks[0].members]


def test_several_stages_on_a_rank() -> None:
    plan = planned("gpt", 2, 1, 4, "zb-v")
    assert [stage.index for stage in bound(plan).stages] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            replace(PLAN, fingerprint="5f1d0c"),
            "plan.fingerprint: the plan was made for another model",
        ),
        (
            stages(FIRST, replace(LAST, first="nowhere")),
            "plan.stages[1].first: the model has no node 'nowhere'",
        ),
        (
            stages(FIRST, replace(LAST, last="nowhere")),
            "plan.stages[1].last: the model has no node 'nowhere'",
        ),
        (
            stages(FIRST, replace(LAST, first=FIRST.first)),
            f"plan.stages[1].first: stage 1 begins with {FIRST.first!r}, expected {LAST.first!r}",
        ),
        (
            stages(FIRST, replace(LAST, last=LAST.first)),
            f"plan.stages[1].last: the last stage ends with {LAST.first!r}, the model with ",
        ),
        (
            stages(replace(FIRST, last=LAST.last), LAST),
            f"plan.stages[1].first: stage 1 begins with {LAST.first!r}, expected nothing after the",
        ),
        (
            stages(replace(FIRST, parameters=FIRST.parameters[1:]), LAST),
            f"plan.stages[0].parameters: the stage from {FIRST.first!r} to {FIRST.last!r} has "
            f"{len(FIRST.parameters)} of them, the plan {len(FIRST.parameters) - 1}; they differ "
            f"in {FIRST.parameters[0]}",
        ),
        (
            stages(replace(FIRST, sends=()), LAST),
            "plan.stages[0].sends: the stage from ",
        ),
        (
            stages(FIRST, replace(LAST, receives=(replace(LAST.receives[0], name="x"),))),
            "plan.stages[1].receives: the stage from ",
        ),
    ],
)
def test_a_plan_that_does_not_fit(plan: Plan, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        bound(plan)
    assert str(refused.value).startswith(sentence)


def test_a_plan_of_another_model() -> None:
    """The first node that differs; versions only if they differ."""
    was = "plan.fingerprint: the plan was made for another model or another loss"
    first = ". First difference: dropout/dropout/0 = "
    with pytest.raises(PlanError) as refused:
        bound(PLAN, "dropout")
    assert refused.value.message.startswith(f"{was}{first}")
    assert refused.value.hint == "plan again with `autopipe plan`"

    versions = {"torch": "2.1.0", "sympy": metadata.version("sympy"), "gone": "7"}
    with pytest.raises(PlanError) as refused:
        bound(replace(PLAN, versions=versions), "dropout")
    assert refused.value.message.startswith(
        f"{was}, or with other versions (planned with torch 2.1.0, here {torch.__version__}; "
        f"planned with gone 7, here none){first}"
    )


def test_the_loss_that_a_plan_was_made_with() -> None:
    """Or without: nobody has to read torch's traceback to find out."""

    def loss(outputs: Any, batch: Any) -> Any:
        return outputs

    check_loss(replace(PLAN, loss=True), loss)
    check_loss(replace(PLAN, loss=False), None)
    for given in (loss, None):
        check_loss(replace(PLAN, loss=None), given)
    with pytest.raises(PlanError) as refused:
        check_loss(replace(PLAN, loss=True), None)
    assert str(refused.value) == (
        "plan.loss: the plan was made with a loss function, and none is given\n"
        "hint: parallelize(model, plan, loss=loss), with the loss that plan() was given; in a "
        "model file it is def loss(outputs, batch)"
    )
    with pytest.raises(PlanError) as refused:
        check_loss(replace(PLAN, loss=False), loss)
    assert str(refused.value) == (
        "plan.loss: the plan was made without a loss function, and one is given\n"
        "hint: leave it out, as the model's own output is the loss; or plan again, with it"
    )


# What a plan can say and this version cannot do


def each(plan: Plan, **change: object) -> Plan:
    """The plan with something else in every stage."""
    return replace(plan, stages=tuple(replace(stage, **change) for stage in plan.stages))  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["naive", "gpipe", "1f1b", "eager-1f1b", "zb-h1"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16-autocast"])
@pytest.mark.parametrize("zero", [0, 1])
def test_what_runs(schedule: str, precision: str, zero: int) -> None:
    check_runs(each(replace(PLAN, schedule=schedule, precision=precision), zero=zero))


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            replace(PLAN, precision="fp8"),
            "plan.precision: 'fp8' was asked for; this version runs "
            "'fp32' or 'bf16' or 'fp16' or 'bf16-autocast' or 'fp16-autocast'",
        ),
        (
            each(PLAN, zero=4),
            "plan.stages[0].zero: 4 was asked for; this version runs 0 or 1 or 2 or 3 only",
        ),
        (
            replace(PLAN, blocks=(BlockClass("h", ("h.0",), (Sharding("w", "S(0)"),)),)),
            "plan.blocks[0].states: (Sharding(",
        ),
        (
            stages(FIRST, replace(LAST, zero=1)),
            "plan.stages[1].zero: 1, but 0 in stage 0; all stages of a pipeline are held alike",
        ),
        (
            each(replace(PLAN, schedule="zb-h1"), zero=3),
            "zb-h1 and zero=3 do not go together: it gathers for both at once",
        ),
    ],
)
def test_what_does_not(plan: Plan, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        check_runs(plan)
    assert str(refused.value).startswith(sentence)


def test_a_schedule_that_is_none() -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'zb-h3'"):
        check_runs(replace(PLAN, schedule="zb-h3"))


# Evaluation


def names(split: Split) -> list[set[str]]:
    """The nodes of each stage."""
    return [{split.graph.nodes[p].name for p in stage.nodes} for stage in split.stages]


@pytest.mark.parametrize("name", chosen(("dropout", "unet", "gpt2"), now=("unet",)))
def test_evaluation_is_cut_at_the_same_nodes(name: str) -> None:
    """What both graphs have is in the same stage, with no other parameters."""
    training = bound(planned(name, 2, 1, 2), name)
    case = ZOO[name]
    specs = training.trace.inputs
    found = trace_source(case.model, case.inputs(2), specs, case.loss, training=False)
    split = split_for_evaluation(Dealt(found, find_blocks(found.graph)), training)
    first, last = names(training)
    for mine, theirs, others in zip(names(split), (first, last), (last, first), strict=True):
        assert mine & theirs and not mine & others
    for stage, trained in zip(split.stages, training.stages, strict=True):
        assert {*stage.states} <= {*trained.states, *split.graph.constants}


def test_evaluation_that_reaches_over_a_cut() -> None:
    """Out of training this model uses the last layer first."""
    case = Case(Turncoat, ZOO["linear"].inputs, entropy)
    specs = batches.describe(case.inputs(2), case.inputs(3), 2, 3)
    found, other = (
        trace_source(case.model, case.inputs(2), specs, case.loss, training=training)
        for training in (True, False)
    )
    flow = analyse(found.graph)
    stages_ = partition(flow, [found.graph.index["last/linear/0"]])
    training = Split(found, stages_, ())
    with pytest.raises(PlanError) as refused:
        split_for_evaluation(Dealt(other, ()), training)
    assert str(refused.value).startswith("in evaluation stage 0 needs 'last.")


class Turncoat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return self.last(self.first(input))
        return self.last(self.first(input @ self.last.weight))
