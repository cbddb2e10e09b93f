"""What makes a rank ready: which stages, engines and programs it gets; nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

from autopipe import Plan, ScheduleError
from autopipe.planfile import programs
from autopipe.runtime.comm.threads import local_network
from autopipe.runtime.parameters.gradient_sum import GradientSum
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step import prepare
from autopipe.runtime.step.engine import AutogradEngine, JointEngine
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.prepare import Rank
from autopipe.schedules.instructions import Kind, Program, holders
from autopipe.stages.bind import Split, split_as_planned
from autopipe.stages.recompute import Recomputed
from tests.support.inprocess import traced
from tests.support.pipes import ZOO, once, planned

CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def rehearsed_once() -> Iterator[None]:
    """No test asks how a rehearsal goes."""
    with once():
        yield


def rank_of(plan: Plan, name: str, number: int) -> tuple[Rank, Split]:
    """Rank `number` of a plan without replicas."""
    split, compute = split_as_planned(traced(name)[0], plan), programs.compute(plan)
    model, placed = ZOO[name].model(), holders(compute)
    named = {**split.graph.constants, **dict(model.named_parameters())}
    own = [s for s in split.stages if placed[s.index] == number]
    states = {key: named[key] for stage in own for key in stage.states}
    transport = local_network(placed)[number]
    part = RankPart(plan, plan.mesh.places[number], split, placed, CPU)
    held = HeldParameters(states, GradientSum({}, {}, {}), {})
    return Rank(part, compute, transport, held), split


def training(plan: Plan, name: str = "gpt", number: int = 1) -> Executor:
    rank, _ = rank_of(plan, name, number)
    return prepare.training(rank, 2)


def evaluation(plan: Plan, name: str = "gpt", number: int = 1, micro_batches: int = 3) -> Executor:
    rank, split = rank_of(plan, name, number)
    return prepare.evaluation(rank, split, 2, micro_batches)


def kinds(program: Program) -> set[Kind]:
    return {instruction.kind for instruction in program if instruction.flow is None}


@pytest.mark.parametrize(
    ("schedule", "stages"),
    [
        ("1f1b", [(0,), (1,)]),
        pytest.param("interleaved", [(0, 2), (1, 3)], marks=pytest.mark.long),
        ("zb-v", [(0, 3), (1, 2)]),
    ],
)
def test_the_stages_of_a_rank(schedule: str, stages: list[tuple[int, ...]]) -> None:
    plan = planned("gpt", 2, 1, 4, schedule, chunks=2 if schedule == "interleaved" else None)
    for number, expected in enumerate(stages):
        assert rank_of(plan, "gpt", number)[0].stages == expected
        assert tuple(training(plan, "gpt", number).stages) == expected


def test_whole_backwards_are_autograds() -> None:
    executor = training(planned("gpt", 2, 1, 4))
    assert kinds(executor.program) == {Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE, Kind.STEP}
    assert [type(run.engine) for run in executor.stages.values()] == [AutogradEngine]


def test_split_backwards_are_the_joint_graphs() -> None:
    executor = training(planned("gpt", 2, 1, 4, "zb-v"))
    halves = {Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}
    assert halves < kinds(executor.program)
    assert [type(run.engine) for run in executor.stages.values()] == [JointEngine, JointEngine]


def test_an_evaluation_has_forwards_alone() -> None:
    """As many as are asked for, whatever the schedule and the plan's micro-batches."""
    for schedule, expected in (
        ("1f1b", ["1F0", "1F1", "1F2"]),
        ("zb-v", ["1F0", "1F1", "1F2", "2F0", "2F1", "2F2"]),
    ):
        executor = evaluation(planned("gpt", 2, 1, 4, schedule))
        assert kinds(executor.program) == {Kind.FORWARD}
        assert sorted(str(i) for i in executor.program if i.kind is Kind.FORWARD) == expected
        assert all(type(run.engine) is AutogradEngine for run in executor.stages.values())


WAITS = (
    "rank 0: 0F0 0B0 0F1 0B1",
    "rank 1: 1F0 1F1 1B0 1B1",
)
"""Rank 0 has no second micro-batch before the first comes back, rank 1 wants both first."""


def test_programs_that_wait_for_each_other_are_refused() -> None:
    plan = replace(planned("gpt", 2, 1, 2), programs=WAITS)
    with pytest.raises(ScheduleError, match="deadlock"):
        training(plan)


def blocks(executor: Executor) -> Iterator[nn.Module]:
    for run in executor.stages.values():
        yield from run.engine.module.modules()  # type: ignore[attr-defined]


def test_blocks_run_again_in_training_alone() -> None:
    plan = planned("gpt", 2, 1, 2, recompute="all")
    found = [module for module in blocks(training(plan)) if isinstance(module, Recomputed)]
    assert len(found) == len(plan.stages[1].recompute) > 0
    assert not [module for module in blocks(evaluation(plan)) if isinstance(module, Recomputed)]


def test_compiled_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward as graphs, each through the compiler; in evaluation the module."""
    graphs: list[fx.GraphModule] = []
    modules: list[fx.GraphModule] = []

    def compiler() -> Callable[[fx.GraphModule], fx.GraphModule]:
        return lambda graph: graphs.append(graph) or graph  # type: ignore[func-returns-value]

    monkeypatch.setattr(prepare, "Compiler", compiler)
    monkeypatch.setattr(prepare, "compile_stage", modules.append)
    plan = planned("gpt", 2, 1, 2)
    training(plan)
    assert graphs == modules == []
    (run,) = training(replace(plan, compiled=True)).stages.values()
    assert isinstance(run.engine, JointEngine) and len(graphs) == 2 and modules == []
    (run,) = evaluation(replace(plan, compiled=True)).stages.values()
    assert [run.engine.module] == modules  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [training, evaluation])
def test_copies_in_low_precision_are_made_once_a_step(make: Callable[[Plan], Executor]) -> None:
    """Of what matrix products read: the weights and biases of linear layers."""
    plan = replace(planned("gpt", 2, 1, 4, "zb-v"), precision="bf16-autocast")
    how = make(plan)._begin()
    rank, _ = rank_of(plan, "gpt", 1)
    assert how.dtype is torch.bfloat16
    linear = [name for name in rank.held.states if re.search(r"\.(qkv|out|up|down)\.", name)]
    assert len(how.copies) == len(linear) > 0
    assert make(replace(plan, precision="fp32"))._begin().copies == {}
