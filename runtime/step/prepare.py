"""Prepare a rank's part of a model to run: `Rank` -> `Prepared` -> `Executor`.

    Rank      its part, its parameters, its transport     once, by `parallelize`
    Prepared  programs proved, stages lowered             once for each number of rows
    Executor  runs a step of `Prepared`                   every step

`training` and `evaluation` make the second and the third; `ready.Ready` keeps what they made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch.distributed as dist

from autopipe.errors import PlanError
from autopipe.ir.graph import Ref
from autopipe.ir.partition import Stage
from autopipe.joint.split_backward_layouts import (
    cannot_offload,
    check_offload,
    check_offload_there,
    joint_for,
)
from autopipe.joint.wanted import wanted
from autopipe.planfile.again import by_op, offloaded
from autopipe.planfile.programs import sends_ahead
from autopipe.rewriting.for_gpus import for_gpus
from autopipe.runtime.comm.host_copies import HostCopies
from autopipe.runtime.comm.nccl import NcclTransport
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.parameters.hold import HeldParameters
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.step.compile import Compiler, compile_stage
from autopipe.runtime.step.emitted_files import Emitted
from autopipe.runtime.step.engine import AutogradEngine, Engine, GatheredEngine, JointEngine
from autopipe.runtime.step.executor import Executor, clock_of
from autopipe.runtime.step.stage import Pool, StageRun
from autopipe.schedules.generators import forward_only
from autopipe.schedules.instructions import Program, Programs, splits
from autopipe.stages.bind import Split
from autopipe.stages.dry_run import CrossingTensor, Rehearsal, rehearse
from autopipe.stages.gathering import with_gathers
from autopipe.stages.lower import Lowered, lower
from autopipe.stages.precision import arithmetic
from autopipe.stages.step_programs import step_programs


@dataclass(frozen=True)
class Rank:
    """A rank's part, parameters and transport, for any batch.

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
    """A rank's proved programs and lowered stages, for one number of rows of a micro-batch.

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
        PlanError: the emitted files cannot be run with this number of rows, or rows of this length.
    """
    plan, planned = rank.part.plan, rank.part.split
    if split is not None and split is not planned and rank.emitted is not None:
        raise PlanError(
            "the batch has rows of another length than planned, and emitted files are of one",
            hint="run the plan itself: autopipe run plan.json",
        )
    split = planned if split is None else split
    with for_gpus(rank.part.device.type == "cuda"):
        rehearsal = rehearse(
            split.graph,
            split.once,
            split.blocks,
            rows,
            recompute=[block for stage in plan.stages for block in stage.recompute],
            precision=plan.precision,
        ).in_turns(plan.turns)
    task = _Task(split, rows, rehearsal, rank.compute, rank.emitted, trains=True)
    return _executor(rank, task)


def evaluation(rank: Rank, split: Split, rows: int, micro_batches: int) -> Executor:
    """What evaluates a batch of so many micro-batches of `rows` rows.

    Args:
        split: the model in evaluation, cut as in training.

    Raises:
        ScheduleError: the programs would wait for each other.
    """
    plan = rank.part.plan
    with for_gpus(rank.part.device.type == "cuda"):
        rehearsal = rehearse(
            split.graph, split.once, split.blocks, rows, gradients=False, precision=plan.precision
        ).in_turns(plan.turns)
    compute = forward_only(rank.part.placed, micro_batches, plan.turns)
    task = _Task(split, rows, rehearsal, compute, None, trains=False)
    return _executor(rank, task)


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
    boundaries, ahead = task.rehearsal.boundaries, sends_ahead(plan)
    return step_programs(task.compute, task.split.stages, boundaries, windows, ahead, plan.turns)


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
        last=stage.is_last(split.graph),
        device=part.device,
        recompute=plan.stages[stage.index].recompute if task.trains else (),
        precision=plan.precision,
    )
    if task.emitted is None:
        return lowered
    return task.emitted.read(
        lowered,
        task.rehearsal.boundaries,
        {name: split.graph.states[name].held for name in stage.states},
        part.device,
        part=part.place.tp,
        as_graph=plan.compiled or by_op(plan) or plan.fully_sharded or bool(offloaded(plan)),
    )


def _engine(rank: Rank, task: _Task, lowered: Lowered) -> Engine:
    """What computes a stage: autograd, or graphs, which may be compiled.

    A stage without a joint graph is run by autograd, and is not compiled: what the compiler would
    keep for backward nobody has counted.
    """
    plan, joint, stage = rank.part.plan, None, lowered.stage
    anywhere = offloaded(plan) if task.trains else ()
    here = plan.stages[stage.index].offload if task.trains else ()
    check_offload(task.split.graph, stage, task.split.blocks, anywhere)
    check_offload_there(task.split.graph, stage, task.split.blocks, here)
    gathered = rank.held.gathered.get(stage.index)
    joint_as = wanted(
        splits(task.compute),
        compiled=plan.compiled,
        by_op=by_op(plan),
        gathers=gathered is not None,
        offload=anywhere,
    )
    if joint_as is not None and task.trains:
        joint = joint_for(
            task.split.graph,
            lowered,
            task.rehearsal,
            last=stage.is_last(task.split.graph),
            precision=plan.precision,
            device=rank.part.device,
            wanted=joint_as,
        )
    module = lowered.module
    if joint is None and here:
        raise cannot_offload(stage)
    if joint is None and task.trains:
        engine = AutogradEngine(module)
        return engine if gathered is None else GatheredEngine(engine, gathered)
    if gathered is not None:
        gather = partial(
            with_gathers, units=gathered.units, parameters=gathered.parameters, gathering=gathered
        )
        module, joint = gather(module), joint and joint.mapped(gather)
    if joint is None:
        if plan.compiled:
            compile_stage(module)
        return AutogradEngine(module)
    copies = HostCopies(rank.part.device) if anywhere else None
    finish = {"finish": Compiler()} if plan.compiled else {}
    return JointEngine(module, joint, offloader=copies, **finish)


def _executor(rank: Rank, task: _Task) -> Executor:
    """What runs the rank's program over its stages, both prepared."""
    prepared = _prepare(rank, task)
    device, states = rank.part.device, rank.held.states
    pool, transport = Pool(device), rank.transport
    begins = transport.loading if isinstance(transport, NcclTransport) else transport
    runs, low = [], list[str]()
    for lowered, engine in zip(prepared.lowered, prepared.engines, strict=True):
        stage = lowered.stage
        owned = [states[name] for name in stage.states]
        runs.append(StageRun(stage, prepared.boundaries, engine, begins, owned, pool))
        low += lowered.low if not rank.held.gathered else ()
    parameters = [states[name] for name in dict.fromkeys(low)]
    begin = partial(arithmetic, rank.part.plan.precision, device, parameters)
    sums, clock = rank.held.gradients if task.trains else None, clock_of(device)
    made = Executor(runs, prepared.program, sums, begin, clock, rank.transport)
    if prepared.first is not None:
        made.first = Executor(runs, prepared.first, None, begin, clock)
    return made
