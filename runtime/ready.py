"""From a rank's part of a model to what runs it: the stages lowered, the programs proved.

Everything here is for one number of rows a micro-batch; another one is made ready anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from autopipe import assemble
from autopipe.binding import Split
from autopipe.halves import halves
from autopipe.lower import lower
from autopipe.plan import Place, Plan
from autopipe.precision import arithmetic
from autopipe.programs import sends_ahead
from autopipe.rehearsal import Rehearsal, rehearse
from autopipe.runtime.compile import compile_stage
from autopipe.runtime.emitted import Emitted
from autopipe.runtime.engine import AutogradEngine, Engine, JointEngine
from autopipe.runtime.executor import Executor
from autopipe.runtime.gradients import Gradients
from autopipe.runtime.stage import Pool, StageRun
from autopipe.runtime.transport import Transport
from autopipe.schedule import Programs, holders, splits
from autopipe.schedules import forward_only

if TYPE_CHECKING:
    from autopipe.runtime.fully_sharded import ShardedStage


@dataclass(frozen=True)
class Rank:
    """What a rank has whatever the batch.

    Attributes:
        states: its parameters, buffers and constants, of all its stages.
        compute: the programs of a step without transfers, one per pipeline rank.
        sharded: those of its stages whose parameters are dealt out, under ZeRO-3.
        compiled: whether its stages run through torch.compile.
        emitted: the files that training runs in the place of what it would make itself.
    """

    plan: Plan
    place: Place
    states: Mapping[str, Tensor]
    transport: Transport
    device: torch.device
    compute: Programs
    sharded: Mapping[int, ShardedStage]
    compiled: bool = False
    emitted: Emitted | None = None

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages it holds, ascending."""
        ranks = enumerate(holders(self.compute))
        return tuple(stage for stage, rank in ranks if rank == self.place.pp)


def training(rank: Rank, split: Split, rows: int, gradients: Gradients) -> Executor:
    """What runs a training step with micro-batches of `rows` rows.

    Raises:
        ScheduleError: the programs would wait for each other.
    """
    plan = rank.plan
    rehearsal = rehearse(
        split.graph,
        split.stages,
        split.blocks,
        rows,
        recompute=[block for stage in plan.stages for block in stage.recompute],
        precision=plan.precision,
    )
    return _executor(rank, split, rehearsal, rank.compute, rows, gradients)


def evaluation(rank: Rank, split: Split, rows: int, micro_batches: int) -> Executor:
    """What evaluates a batch of so many micro-batches of `rows` rows.

    Raises:
        ScheduleError: the programs would wait for each other.
    """
    rehearsal = rehearse(
        split.graph,
        split.stages,
        split.blocks,
        rows,
        gradients=False,
        precision=rank.plan.precision,
    )
    compute = forward_only(holders(rank.compute), micro_batches)
    return _executor(rank, split, rehearsal, compute, rows, None)


def _executor(
    rank: Rank,
    split: Split,
    rehearsal: Rehearsal,
    compute: Programs,
    rows: int,
    gradients: Gradients | None,
) -> Executor:
    plan = rank.plan
    windows = [boundary.window for boundary in plan.boundaries]
    programs = assemble.step_programs(
        compute, split.stages, rehearsal.boundaries, windows, sends_ahead(plan)
    )
    emitted = rank.emitted if gradients is not None else None
    if emitted is not None:
        programs = emitted.programs
    pool = Pool(rank.device)
    runs, low = [], list[str]()
    for index in rank.stages:
        stage = split.stages[index]
        last = index == len(split.stages) - 1
        lowered = lower(
            split.graph,
            stage,
            split.blocks,
            {name: rank.states[name] for name in stage.states},
            split.trace.reads,
            rows,
            last=last,
            device=rank.device,
            recompute=plan.stages[index].recompute if gradients is not None else (),
            precision=plan.precision,
        )
        dealt = rank.sharded.get(index)
        if emitted is not None:
            lowered = emitted.read(
                lowered,
                rehearsal.boundaries,
                rank.device,
                part=rank.place.tp,
                as_graph=rank.compiled or dealt is not None,
            )
        joint = None
        if splits(compute):
            joint = halves(
                split.graph,
                lowered,
                rehearsal,
                last=last,
                precision=plan.precision,
                device=rank.device,
            )
        if rank.compiled:
            compile_stage(lowered.module)
        module = lowered.module if dealt is None else dealt.bind(lowered.module)
        engine: Engine = AutogradEngine(module) if joint is None else JointEngine(module, joint)
        owned = [rank.states[name] for name in stage.states]
        runs.append(StageRun(stage, rehearsal.boundaries, engine, rank.transport, owned, pool))
        low += lowered.low if dealt is None else ()
    parameters = [rank.states[name] for name in dict.fromkeys(low)]
    begin = partial(arithmetic, plan.precision, rank.device, parameters)
    return Executor(runs, programs[rank.place.pp], gradients, begin)
