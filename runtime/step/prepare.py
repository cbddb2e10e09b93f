"""From a rank's part of a model to what runs it: `Rank` -> `Prepared` -> `Executor`.

    Rank      its part, its parameters, its transport     once, by `parallelize`
    Prepared  programs proved, stages lowered             once for each number of rows
    Executor  runs a step of `Prepared`                   every step

`training` and `evaluation` make the second and the third; `Ready` keeps what they made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from autopipe.errors import PlanError
from autopipe.frontend import batch as batches
from autopipe.frontend.least_rows import check_rows
from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.joint.split_backward import wanted
from autopipe.joint.split_backward_layouts import joint_for
from autopipe.planfile.again import by_op
from autopipe.planfile.programs import sends_ahead
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step.compile import Compiler, compile_stage
from autopipe.runtime.step.emitted_files import Emitted
from autopipe.runtime.step.engine import AutogradEngine, Engine, JointEngine
from autopipe.runtime.step.executor import Executor
from autopipe.runtime.step.stage import Pool, StageRun
from autopipe.runtime.step.whole_loss import BatchLoss
from autopipe.schedules.generators import forward_only
from autopipe.schedules.instructions import Program, Programs, splits
from autopipe.stages.bind import Split
from autopipe.stages.dry_run import CrossingTensor, Rehearsal, rehearse
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.precision import arithmetic
from autopipe.stages.step_programs import step_programs


@dataclass(frozen=True)
class Rank:
    """What a rank has whatever the batch.

    Attributes:
        part: its place in the plan, and its stages.
        compute: the programs of a training step without transfers, one per pipeline rank.
        transport: its end of its pipeline.
        held: its parameters, buffers and constants.
        emitted: the files that training runs in the place of what it would make itself.
        replicas: as `whole_loss.replicas_of_last_stage` gives it.
    """

    part: RankPart
    compute: Programs
    transport: Transport
    held: HeldParameters
    emitted: Emitted | None = None
    replicas: dist.ProcessGroup | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        """The indices of the stages it holds, ascending."""
        return tuple(stage.index for stage in self.part.stages)


@dataclass(frozen=True)
class Prepared:
    """What a rank runs micro-batches of one number of rows with.

    Attributes:
        rows: of a micro-batch.
        program: this rank's instructions, proved together with the other ranks'.
        first: of a loss over the whole batch, those of the pass before it; they end before the
            loss, which ends before `program` begins, so that each proof is one by itself.
        boundaries: the layout of every tensor that crosses a cut.
        lowered: this rank's stages, ascending.
        engines: what computes each of them.
    """

    rows: int
    program: Program
    first: Program | None
    boundaries: Mapping[Ref, CrossingTensor]
    lowered: tuple[Lowered, ...]
    engines: tuple[Engine, ...]


@dataclass(frozen=True)
class _Task:
    """What is to be prepared: a graph cut into stages, dry run for one number of rows.

    Attributes:
        compute: programs without transfers, of all ranks of a pipeline.
        emitted: files to run in the place of what is made here.
        trains: with gradients, so that blocks are recomputed as the plan says.
    """

    split: Split
    rows: int
    rehearsal: Rehearsal
    compute: Programs
    emitted: Emitted | None
    trains: bool


def training(rank: Rank, rows: int, split: Split | None = None) -> Executor:
    """What runs a training step with micro-batches of `rows` rows.

    Args:
        split: the model with rows of another length, cut as planned; None: the planned one.

    Raises:
        ScheduleError: the programs would wait for each other.
        PlanError: the emitted files cannot be run with so many rows, or rows of this length.
    """
    plan, planned = rank.part.plan, rank.part.split
    if split is not None and split is not planned and rank.emitted is not None:
        raise PlanError(
            "the batch has rows of another length than planned, and emitted files are of one",
            hint="leave --emitted out",
        )
    split = planned if split is None else split
    rehearsal = rehearse(
        split.graph,
        split.stages,
        split.blocks,
        rows,
        recompute=[block for stage in plan.stages for block in stage.recompute],
        precision=plan.precision,
    )
    task = _Task(split, rows, rehearsal, rank.compute, rank.emitted, trains=True)
    return _executor(rank, _prepare(rank, task), trains=True)


def evaluation(rank: Rank, split: Split, rows: int, micro_batches: int) -> Executor:
    """What evaluates a batch of so many micro-batches of `rows` rows.

    Args:
        split: the model in evaluation, cut as in training.

    Raises:
        ScheduleError: the programs would wait for each other.
    """
    rehearsal = rehearse(
        split.graph,
        split.stages,
        split.blocks,
        rows,
        gradients=False,
        precision=rank.part.plan.precision,
    )
    compute = forward_only(rank.part.placed, micro_batches)
    task = _Task(split, rows, rehearsal, compute, None, trains=False)
    return _executor(rank, _prepare(rank, task), trains=False)


def _prepare(rank: Rank, task: _Task) -> Prepared:
    """Prove the programs, and lower each of this rank's stages."""
    programs = _programs(rank, task)
    lowered, engines = [], []
    for index in rank.stages:
        stage = _lower(rank, task, task.split.stages[index])
        lowered.append(stage)
        engines.append(_engine(rank, task, stage))
    return Prepared(
        task.rows,
        programs[rank.part.place.pp],
        _first_pass(rank, task),
        task.rehearsal.boundaries,
        tuple(lowered),
        tuple(engines),
    )


def _programs(rank: Rank, task: _Task) -> Programs:
    """The programs of all ranks of a pipeline, with transfers, proved."""
    if task.emitted is not None:
        return task.emitted.programs
    plan = rank.part.plan
    windows = [boundary.window for boundary in plan.boundaries]
    boundaries = task.rehearsal.boundaries
    return step_programs(task.compute, task.split.stages, boundaries, windows, sends_ahead(plan))


def _first_pass(rank: Rank, task: _Task) -> Program | None:
    """This rank's program of the forward pass before a loss over the whole batch."""
    plan, split = rank.part.plan, task.split
    if split.whole is None or not task.trains:
        return None
    forwards = forward_only(rank.part.placed, plan.batch.micro_batches)
    boundaries = {r: replace(b, gradients={}) for r, b in task.rehearsal.boundaries.items()}
    windows = [boundary.window for boundary in plan.boundaries]
    every = step_programs(forwards, split.stages, boundaries, windows, sends_ahead(plan))
    return every[rank.part.place.pp]


def _lower(rank: Rank, task: _Task, stage: Stage) -> Lowered:
    """A stage's code over this rank's tensors, or the emitted file's code over them."""
    part, plan, split = rank.part, rank.part.plan, task.split
    lowered = lower(
        split.graph,
        stage,
        split.blocks,
        {name: rank.held.states[name] for name in stage.states},
        split.trace.reads,
        task.rows,
        last=_is_last(stage, split),
        device=part.device,
        recompute=plan.stages[stage.index].recompute if task.trains else (),
        precision=plan.precision,
    )
    if task.emitted is None:
        return lowered
    return task.emitted.read(
        lowered,
        task.rehearsal.boundaries,
        part.device,
        part=part.place.tp,
        as_graph=plan.compiled or by_op(plan) or stage.index in rank.held.sharded,
    )


def _engine(rank: Rank, task: _Task, lowered: Lowered) -> Engine:
    """What computes a stage: autograd, or graphs, which may be compiled.

    A stage without a joint graph is run by autograd, and is not compiled: what the compiler would
    keep for backward nobody has counted.
    """
    plan, joint = rank.part.plan, None
    how = wanted(splits(task.compute), compiled=plan.compiled, by_op=by_op(plan))
    if how is not None and task.trains:
        joint = joint_for(
            task.split.graph,
            lowered,
            task.rehearsal,
            last=_is_last(lowered.stage, task.split),
            precision=plan.precision,
            device=rank.part.device,
            wanted=how,
        )
    if plan.compiled and not task.trains:
        compile_stage(lowered.module)
    sharded = rank.held.sharded.get(lowered.stage.index)
    module: nn.Module = lowered.module if sharded is None else sharded.bind(lowered.module)
    if joint is None:
        return AutogradEngine(module)
    return JointEngine(module, joint, *([Compiler()] if plan.compiled else []))


def _is_last(stage: Stage, split: Split) -> bool:
    return stage.index == len(split.stages) - 1


def _executor(rank: Rank, prepared: Prepared, *, trains: bool) -> Executor:
    """What runs the rank's program over its prepared stages."""
    device, states = rank.part.device, rank.held.states
    pool = Pool(device)
    runs, low = [], list[str]()
    for lowered, engine in zip(prepared.lowered, prepared.engines, strict=True):
        stage = lowered.stage
        owned = [states[name] for name in stage.states]
        runs.append(StageRun(stage, prepared.boundaries, engine, rank.transport, owned, pool))
        low += lowered.low if stage.index not in rank.held.sharded else ()
    parameters = [states[name] for name in dict.fromkeys(low)]
    begin = partial(arithmetic, rank.part.plan.precision, device, parameters)
    made = Executor(runs, prepared.program, rank.held.gradients if trains else None, begin)
    if prepared.first is not None:
        made.first = Executor(runs, prepared.first, None, begin)
    return made


LENGTHS = 32
"""Lengths of rows for which a rank keeps what it has traced and lowered."""

Key = tuple[int | None, bool | None]
"""Tokens of a row; None for training, else whether the model is evaluated with its outputs."""


class Ready:
    """The model as it is run, for each length of rows: traced, cut and lowered once.

    `at_length`, `evaluation`: as `Pipe` has them. `learn` tells the watchdog of a program.
    """

    def __init__(
        self,
        rank: Rank,
        at_length: Callable[[Any, int], Split],
        evaluation: Callable[[Any, bool], Split],
        learn: Callable[[Program], Callable[[int], None]],
    ) -> None:
        self._rank, self._learn = rank, learn
        self._at_length, self._evaluation = at_length, evaluation
        self._planned = batches.length_of(rank.part.plan.inputs)
        self._splits: dict[Key, Split] = {(self._planned, None): rank.part.split}
        self._executors: dict[tuple[int, int, int], Executor] = {}
        self._losses: dict[int, BatchLoss] = {}

    def split(self, batch: Any, outputs: bool | None = None) -> Split:
        """The model for rows as long as a batch's; `outputs`: as `Key` has it.

        Raises:
            ModelError: the model cannot be run at this length; names the user's line.
        """
        length = batches.length_in(self._rank.part.plan.inputs, batches.flatten(batch))
        key = length, outputs
        if key not in self._splits:
            if outputs is not None:
                self._splits[key] = self._evaluation(batch, outputs)
            else:
                assert length is not None, "a batch without a sequence is as planned"
                self._splits[key] = self._at_length(batch, length)
            self._forget()
        return self._splits[key]

    def executor(self, split: Split, rows: int, count: int, *, trains: bool) -> Executor:
        """What runs `count` micro-batches of so many rows; made once for each number of them."""
        key = id(split), rows, count
        if key not in self._executors:
            if trains:
                check_rows(split.graph, rows)
                made = training(self._rank, rows, split)
            else:
                made = evaluation(self._rank, split, rows, count)
            made.watch = self._learn(made.program)
            if made.first is not None:
                made.first.watch = self._learn(made.first.program)
            self._executors[key] = made
        return self._executors[key]

    def loss(self, split: Split) -> BatchLoss:
        """What computes a split's loss of the whole batch."""
        if id(split) not in self._losses:
            self._losses[id(split)] = BatchLoss(self._rank.part, split, self._rank.replicas)
        return self._losses[id(split)]

    def _forget(self) -> None:
        """Keep the planned split and the `LENGTHS` made last, and what runs them."""
        while len(self._splits) > LENGTHS + 1:
            gone = self._splits.pop([*self._splits][1])
            self._losses.pop(id(gone), None)
            kept = {key: made for key, made in self._executors.items() if key[0] != id(gone)}
            self._executors = kept
