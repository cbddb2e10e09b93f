"""A plan's cuts found again in a traced model, or refused with the field that is wrong."""

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopipe import Plan, PlanError, ScheduleError
from autopipe.batch.description import describe
from autopipe.ir.blocks import find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.partition import partition
from autopipe.planfile.parts import BlockClass, StagePlan, WrittenPlacement
from autopipe.stages.bind import (
    RankTrace,
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

Change = Callable[[Plan], Plan]
"""What makes another plan of the right one."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GPT in two stages."""
    return planned("gpt", 2, 1, 2)


def bound(plan: Plan, name: str = "gpt") -> Split:
    return split_as_planned(traced(name)[0], plan)


def stages(change: Callable[[StagePlan, StagePlan], tuple[StagePlan, ...]]) -> Change:
    """Other stages, made of the two that are right."""
    return lambda plan: replace(plan, stages=change(*plan.stages))


def test_the_stages_are_the_plans(plan: Plan) -> None:
    split = bound(plan)
    for stage, written in zip(split.stages, plan.stages, strict=True):
        nodes = split.graph.nodes[stage.first : stage.stop]
        assert (nodes[0].name, nodes[-1].name) == (written.first, written.last)
        assert len(stage.nodes) == written.nodes
        assert [str(ref) for ref, _ in stage.sends] == [sent.name for sent in written.sends]
    assert [block.path for block in split.blocks] == [*plan.blocks[0].members]


def test_several_stages_on_a_rank() -> None:
    plan = planned("gpt", 2, 1, 4, "zb-v")
    assert [stage.index for stage in bound(plan).stages] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda plan: replace(plan, fingerprint="5f1d0c"),
            "plan.fingerprint: the plan was made for another model",
        ),
        (
            stages(lambda first, last: (first, replace(last, first="nowhere"))),
            "plan.stages[1].first: the model has no node 'nowhere'",
        ),
        (
            stages(lambda first, last: (first, replace(last, last="nowhere"))),
            "plan.stages[1].last: the model has no node 'nowhere'",
        ),
        (
            stages(lambda first, last: (first, replace(last, first=first.first))),
            "plan.stages[1].first: stage 1 begins with {first.first!r}, expected {last.first!r}",
        ),
        (
            stages(lambda first, last: (first, replace(last, last=last.first))),
            "plan.stages[1].last: the last stage ends with {last.first!r}, the model with ",
        ),
        (
            stages(lambda first, last: (replace(first, last=last.last), last)),
            "plan.stages[1].first: stage 1 begins with {last.first!r}, expected nothing after the",
        ),
        (
            stages(lambda first, last: (replace(first, parameters=first.parameters[1:]), last)),
            "plan.stages[0].parameters: the stage from {first.first!r} to {first.last!r} has "
            "{all} of them, the plan {fewer}; they differ in {first.parameters[0]}",
        ),
        (
            stages(lambda first, last: (replace(first, sends=()), last)),
            "plan.stages[0].sends: the stage from ",
        ),
        (
            stages(
                lambda first, last: (
                    first,
                    replace(last, receives=(replace(last.receives[0], name="x"),)),
                )
            ),
            "plan.stages[1].receives: the stage from ",
        ),
    ],
)
def test_a_plan_that_does_not_fit(plan: Plan, change: Change, sentence: str) -> None:
    first, last = plan.stages
    count = len(first.parameters)
    with pytest.raises(PlanError) as refused:
        bound(change(plan))
    said = sentence.format(first=first, last=last, all=count, fewer=count - 1)
    assert str(refused.value).startswith(said)


def test_a_process_with_hashes_of_its_own_may_have_another_model(
    plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that torchrun starts; the command line sees to it itself."""
    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(PlanError) as refused:
        bound(plan, "dropout")
    assert refused.value.hint == (
        "plan again with `autopipe plan`; if the model goes through a set of texts, start each "
        "process with PYTHONHASHSEED=0"
    )


def test_a_plan_of_another_model(plan: Plan) -> None:
    """The first node that differs; versions only if they differ."""
    was = "plan.fingerprint: the plan was made for another model or another loss"
    first = ". First difference: dropout/dropout/0 = "
    with pytest.raises(PlanError) as refused:
        bound(plan, "dropout")
    assert refused.value.message.startswith(f"{was}{first}")
    assert refused.value.hint == "plan again with `autopipe plan`"

    versions = {"torch": "2.1.0", "sympy": metadata.version("sympy"), "gone": "7"}
    with pytest.raises(PlanError) as refused:
        bound(replace(plan, versions=versions), "dropout")
    assert refused.value.message.startswith(
        f"{was}, or with other versions (planned with torch 2.1.0, here {torch.__version__}; "
        f"planned with gone 7, here none){first}"
    )


def test_the_loss_that_a_plan_was_made_with(plan: Plan) -> None:
    """Or without: nobody has to read torch's traceback to find out."""

    def loss(outputs: Any, batch: Any) -> Any:
        return outputs

    check_loss(replace(plan, loss=True), loss)
    check_loss(replace(plan, loss=False), None)
    for given in (loss, None):
        check_loss(replace(plan, loss=None), given)
    with pytest.raises(PlanError) as refused:
        check_loss(replace(plan, loss=True), None)
    assert str(refused.value) == (
        "plan.loss: the plan was made with a loss function, and none is given\n"
        "hint: parallelize(model, plan, loss=loss); in a model file, def loss(outputs, batch)"
    )
    with pytest.raises(PlanError) as refused:
        check_loss(replace(plan, loss=False), loss)
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
def test_what_runs(plan: Plan, schedule: str, precision: str, zero: int) -> None:
    check_runs(each(replace(plan, schedule=schedule, precision=precision), zero=zero))


WITH_A_STATE = BlockClass("h", ("h.0",), (WrittenPlacement("w", "S(0)"),))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda plan: replace(plan, precision="fp8"),
            "plan.precision: 'fp8' was asked for; this version runs "
            "'fp32' or 'bf16' or 'fp16' or 'bf16-autocast' or 'fp16-autocast'",
        ),
        (
            lambda plan: each(plan, zero=4),
            "plan.stages[0].zero: 4 was asked for; this version runs 0 or 1 or 2 or 3 only",
        ),
        (
            lambda plan: replace(
                plan, blocks=(BlockClass("h", ("h.0",), (WrittenPlacement("w", "S(0)"),)),)
            ),
            "plan.blocks[0].states: (WrittenPlacement(",
        ),
        (
            stages(lambda first, last: (first, replace(last, zero=1))),
            "plan.stages[1].zero: 1, but 0 in stage 0; all stages of a pipeline are held alike",
        ),
        (
            lambda plan: each(replace(plan, schedule="zb-h1"), zero=3),
            "zb-h1 and zero=3 do not go together: it gathers for both at once",
        ),
    ],
)
def test_what_does_not(plan: Plan, change: Change, sentence: str) -> None:
    with pytest.raises(PlanError) as refused:
        check_runs(change(plan))
    assert str(refused.value).startswith(sentence)


def test_a_schedule_that_is_none(plan: Plan) -> None:
    with pytest.raises(ScheduleError, match="there is no schedule 'zb-h3'"):
        check_runs(replace(plan, schedule="zb-h3"))


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
    split = split_for_evaluation(RankTrace(found, find_blocks(found.graph)), training)
    first, last = names(training)
    for mine, theirs, others in zip(names(split), (first, last), (last, first), strict=True):
        assert mine & theirs and not mine & others
    for stage, trained in zip(split.stages, training.stages, strict=True):
        assert {*stage.states} <= {*trained.states, *split.graph.constants}


def test_evaluation_that_reaches_over_a_cut() -> None:
    """Out of training this model uses the last layer first."""
    case = Case(Turncoat, ZOO["linear"].inputs, entropy)
    specs = describe(case.inputs(2), case.inputs(3), 2, 3)
    found, other = (
        trace_source(case.model, case.inputs(2), specs, case.loss, training=training)
        for training in (True, False)
    )
    flow = analyse(found.graph)
    stages_ = partition(flow, [found.graph.index["last/linear/0"]])
    training = Split(found, stages_, ())
    with pytest.raises(PlanError) as refused:
        split_for_evaluation(RankTrace(other, ()), training)
    assert str(refused.value).startswith("in evaluation stage 0 needs 'last.")


class Turncoat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return self.last(self.first(input))
        return self.last(self.first(input @ self.last.weight))
