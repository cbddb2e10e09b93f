"""autopipe's runtime on modules written by hand: what `Pipe` does, without tracing and planning.

A stage of the benchmark takes one tensor and makes one, so each boundary is one `Ref`; programs,
proof, engines, executor and transport are those of every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, fx, nn

from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.joint.joint_graph import Layout
from autopipe.joint.split_backward import split
from autopipe.planners.costs.eager_depths import choose
from autopipe.planners.model.eager_period import EagerPipeline
from autopipe.planners.model.eager_period import StageLink as Between
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.step.engine import AutogradEngine, Engine, JointEngine
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.stage import Pool, StageRun, StepInput
from autopipe.schedules import deadlock
from autopipe.schedules.instructions import Programs, holders
from autopipe.schedules.lanes import sends_for
from autopipe.schedules.registry import SCHEDULES
from autopipe.schedules.registry import make as make_schedule
from autopipe.schedules.transfers import Edge, insert
from autopipe.stages.dry_run import CrossingTensor
from autopipe.stages.lower import Lowered
from benchmarks.pipeline.case import Case
from benchmarks.pipeline.stages import Model, loss


class _Alone:
    """The gradients of a pipeline without replicas: they are their own sums."""

    def begin(self, stage: int) -> None:
        return

    def arm(self, stage: int) -> None:
        return

    def finish(self) -> None:
        return


def chunks_of(schedule: str) -> int:
    """Stages of a rank: as many as the schedule says, or 2 where that is free."""
    return SCHEDULES[schedule].chunks or 2


def layout(model: Model) -> tuple[tuple[Stage, ...], dict[Ref, CrossingTensor]]:
    """A chain of stages: each but the first receives one tensor, each but the last sends one."""
    count = len(model.stages)
    refs = [Ref(f"boundary {index}") for index in range(count - 1)]
    stages = tuple(
        Stage(
            index,
            first=index,
            stop=index + 1,
            nodes=(),
            inputs=("batch",) * (index == 0) + ("target",) * (index == count - 1),
            states=(),
            receives=((refs[index - 1], index - 1),) if index > 0 else (),
            sends=((refs[index], index + 1),) if index < count - 1 else (),
            copied=frozenset(),
        )
        for index in range(count)
    )
    example = model.batch[: model.rows]
    shape, strides = tuple(example.shape), example.stride()
    boundaries = {
        ref: CrossingTensor(shape, strides, example.dtype, {index + 1: strides})
        for index, ref in enumerate(refs)
    }
    return stages, boundaries


def edges_of(count: int) -> list[Edge]:
    """Those of a chain of `count` stages."""
    return [Edge(index, index + 1, gradient=True) for index in range(count - 1)]


def programs_of(
    schedule: str, model: Model, ranks: int, window: int, depths: tuple[int, ...]
) -> Programs:
    """The proved programs of one step.

    Args:
        window: receives posted ahead at every boundary.
        depths: micro-batches in flight besides, per boundary, for a schedule that takes them.
    """
    count = len(model.stages)
    compute = make_schedule(
        schedule,
        ranks,
        model.micro_batches,
        chunks=count // ranks,
        depths=depths if SCHEDULES[schedule].depths else (),
    )
    ahead = sends_for(depths if SCHEDULES[schedule].depths else ())
    programs = insert(compute, edges_of(count), [window] * (count - 1), ahead)
    deadlock.check(programs)
    return programs


def depths_for(case: Case, transfer: float) -> tuple[int, ...]:
    """What autopipe's model of the step chooses, were there no limit to memory.

    Args:
        transfer: seconds that a boundary tensor takes one way.
    """
    stages = [case.ms / 1e3] * case.ranks
    between = [Between(transfer, 1e15, 1, 1, 0)] * (case.ranks - 1)
    free = [2**60] * case.ranks
    thirds = [seconds / 3 for seconds in stages], [2 * seconds / 3 for seconds in stages]
    return choose(
        EagerPipeline(*thirds, between, case.micro_batches, held=[1] * case.ranks, room=free)
    ).depths


def make(
    schedule: str, model: Model, programs: Programs, rank: int, transport: Transport
) -> Callable[[], None]:
    """One training step of autopipe's `schedule` over the model's batch.

    Args:
        programs: as `programs_of` makes them, for the same schedule and model.
        transport: for these programs at least.
    """
    stages, boundaries = layout(model)
    ranks_of = holders(programs)
    pool = Pool(torch.device("cpu"))
    splits = SCHEDULES[schedule].splits
    runs = [
        StageRun(
            stage,
            boundaries,
            _engine(model, stage, splits=splits),
            transport,
            list(model.stages[stage.index].parameters()),
            pool,
        )
        for stage, holder in zip(stages, ranks_of, strict=True)
        if holder == rank
    ]
    executor = Executor(runs, programs[rank], _Alone())
    whole = {"batch": model.batch, "target": model.target}

    def inputs(stage: Stage, k: int) -> list[Tensor]:
        return [whole[name][k * model.rows : (k + 1) * model.rows] for name in stage.inputs]

    def step() -> None:
        executor.run(StepInput(inputs, seed=1.0, stream=(0, 0, 0)))

    return step


def _engine(model: Model, stage: Stage, *, splits: bool) -> Engine:
    """The joint engine for a schedule that splits backward, else autograd's."""
    last = stage.index == len(model.stages) - 1
    wrapped = (_LastStage if last else _InnerStage)(model.stages[stage.index])
    module = fx.symbolic_trace(wrapped)
    if not splits:
        return AutogradEngine(module)
    x = model.batch[: model.rows]
    received = replace(Layout.of(x), gradient=stage.index > 0)
    arguments = [received, Layout.of(x)] if last else [received]
    made = Layout.of(x.new_zeros(())) if last else Layout.of(x)
    joint = split(Lowered(stage, module, model.rows), arguments, [replace(made, gradient=True)])
    return JointEngine(module, joint)


class _InnerStage(nn.Module):
    """A stage as the runtime calls it; traced, it is the one flat module that lowering makes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.module(x),)


class _LastStage(_InnerStage):
    """The last one makes the loss."""

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor]:  # type: ignore[override]
        return (loss(self.module(x), target),)
