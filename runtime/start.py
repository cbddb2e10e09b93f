"""The start of a rank, phase by phase; `parallelize` calls them in this order.

    check_plan      a plan, this run's options   ->  CheckedPlan  refused, or its programs
    join            the environment              ->  JoinedRank   a rank among the others
    trace_planned   the model                    ->  TracedModel  its graph, the plan's
    own_part        the trace, the plan's cuts   ->  RankPart     this rank's stages
    own_states      a model, or a checkpoint     ->  ModelStates  this rank's parameters
    connect         the plan's mesh              ->  Transport    sends and receives

Every rank calls each of them: `join`, `own_part`, `own_states` and `connect` exchange messages.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.batch.cut import example_to_trace
from autopipe.batch.tree import has_own
from autopipe.errors import LaunchError, ModelError
from autopipe.frontend.loss import Loss
from autopipe.ir.dataflow import written_states
from autopipe.ir.graph import StateSpec
from autopipe.ir.partition import Stage
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan, check
from autopipe.planfile.parts import Place
from autopipe.planfile.placements import I, Sharding
from autopipe.runtime.comm.choose import backend_for, shares_memory, transport_for
from autopipe.runtime.comm.shared_memory_axis import tensor_parallel_axis
from autopipe.runtime.comm.transport import Transport
from autopipe.runtime.launch.watchdog import Watchdog
from autopipe.runtime.launch.world import TIMEOUT, World, check_world, start, world_from
from autopipe.runtime.parameters.materialize import Origin, materialize
from autopipe.runtime.parameters.model_states import ModelStates, unused_states
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.same_values import SameValues
from autopipe.runtime.step.emitted_files import Emitted
from autopipe.runtime.step.same_batch import check_same_plan
from autopipe.schedules.instructions import Programs, holders
from autopipe.schedules.transfers import Edge, edges_of
from autopipe.sharding import collectives
from autopipe.sharding.plan_io import read_back
from autopipe.stages.bind import (
    check_loss,
    check_runs,
    split_as_planned,
)
from autopipe.tracing.source import Source, bare, trace_as_planned
from autopipe.tracing.traced import Trace
from autopipe.util import host_memory


@dataclass(frozen=True)
class CheckedPlan:
    """A plan that this run can carry out, and facts derived from it once.

    Attributes:
        plan: the plan, with the schedule of the emitted programs, if there are any.
        compute: the programs of a step without transfers, one per pipeline rank.
        placed: the pipeline rank of each stage.
        sharding: how parameters and nodes lie over tensor-parallel ranks.
        emitted: emitted files to run, instead of stages that are lowered here.
    """

    plan: Plan
    compute: Programs
    placed: tuple[int, ...]
    sharding: Sharding
    emitted: Emitted | None


@dataclass(frozen=True)
class JoinedRank:
    """This process as a rank of the run, connected to the others.

    Attributes:
        place: which rank of the plan it is.
        device: where its tensors are.
        backend: the backend of torch.distributed for sums over ranks.
        world: all ranks, for tensors in host memory; None if there is one rank.
        watchdog: is told where this rank is.
    """

    place: Place
    device: torch.device
    backend: str
    world: dist.ProcessGroup | None
    watchdog: Watchdog


@dataclass(frozen=True)
class TracedModel:
    """The model as every rank sees it: whole, without values.

    Attributes:
        skeleton: the model with fake parameters and real buffers.
        trace: its graph in training, with the loss.
        unused: the parameters and persistent buffers that the graph does not read.
        example: the rows that it was traced with.
    """

    skeleton: nn.Module
    trace: Trace
    unused: Mapping[str, StateSpec]
    example: Any

    @property
    def states(self) -> dict[str, StateSpec]:
        """All parameters, buffers and constants of the model, by name; parameters in its order."""
        known = {**self.trace.graph.states, **self.unused}
        order = [name for name, _ in self.skeleton.named_parameters() if name in known]
        return {name: known[name] for name in dict.fromkeys((*order, *known))}


def check_plan(plan: Plan, loss: Loss | None, emitted: str | Path | None) -> CheckedPlan:
    """Check the plan's own consistency, and that it fits the loss, emitted files and this version.

    Raises:
        PlanError, ScheduleError: the plan cannot be run; the sentence names the field.
    """
    check(plan)
    check_loss(plan, loss)
    files = Emitted.load(emitted, plan) if emitted is not None else None
    plan = files.plan if files is not None else plan
    compute = files.compute if files is not None else programs.compute(plan)
    check_runs(plan, compute)
    return CheckedPlan(plan, compute, holders(compute), read_back(plan), files)


def join(plan: Plan) -> JoinedRank:
    """Find this process's rank, open the process group unless the caller has, agree on a backend.

    Raises:
        LaunchError: other processes were started than the plan is for, or the device is not here.
        PlanError: the ranks were given different plans.
    """
    number, watchdog = _join_group(plan)
    place = plan.mesh.places[number]
    device = _device(place)
    if device.type == "cpu":
        host_memory.keep()
    else:  # not on the CPU: a process that has set a GPU holds memory on it
        torch.cuda.set_device(device)
    alone = len(plan.mesh.places) == 1
    world = None if alone else _all_ranks()
    check_same_plan(plan, world)
    backend = "gloo" if alone else backend_for(device, world)
    return JoinedRank(place, device, backend, world, watchdog)


def trace_planned(model: Source, inputs: Any, loss: Loss | None, plan: Plan) -> TracedModel:
    """Trace the model in training; no parameter is allocated.

    Args:
        inputs: an example batch, or a function that makes one of given rows; None: made from the
            plan.

    Raises:
        ModelError: the model cannot be captured, or the example is not what the plan describes.
    """
    skeleton = bare(model)
    example = example_to_trace(inputs, plan.inputs, plan.traced_rows)
    try:
        traced = trace_as_planned(model, skeleton, example, loss, plan)
    except ModelError as error:
        if inputs is None and has_own(plan.inputs):
            error.hint = (
                "batches have containers of your own classes, or with keys that are no texts, and "
                "a plan has plain ones in their place: parallelize(model, plan, inputs=batch) is "
                "given one to trace with"
            )
            raise
        planned = f"is it {plan.source or 'the model of the plan'}, as it was planned?"
        error.hint = planned if error.hint is None else f"{planned} if so: {error.hint}"
        raise
    return TracedModel(skeleton, traced, unused_states(traced.graph, skeleton), example)


def own_part(checked: CheckedPlan, joined: JoinedRank, traced: Trace) -> RankPart:
    """Cut the model as the plan says, for this rank's tensor-parallel coordinate.

    Under tensor parallelism it opens the axis that the stages' collectives go over.

    Raises:
        PlanError: the plan is of another model, whose first node that differs is named.
    """
    plan, place, device, axis = checked.plan, joined.place, joined.device, None
    if plan.mesh.tp > 1:
        shared = shares_memory(device)
        axis = tensor_parallel_axis(plan, place, joined.backend, device, shared=shared)
        collectives.attach(collectives.TENSOR_PARALLEL, axis)
    split = split_as_planned(traced, plan, place.tp, checked.sharding)
    return RankPart(plan, place, split, checked.placed, device, axis)


def own_states(
    joined: JoinedRank, part: RankPart, traced: TracedModel, sharding: Sharding, origin: Origin
) -> ModelStates:
    """This rank's parameters, buffers and constants, on its device.

    Tensors that forward does not use are in no stage; rank 0 keeps them, as parts of the model.

    Raises:
        ModelError: a parameter's values are missing, or differ between ranks.
    """
    same_values = SameValues(traced.states)
    unused = list(traced.unused) if part.place.rank == 0 else []
    tensors = materialize(
        replace(traced.trace.graph, states=traced.states),
        [*dict.fromkeys(name for stage in part.stages for name in stage.states), *unused],
        origin,
        device=part.device,
        part=partial(_own_rows, same_values, sharding, part.place.tp),
        optional=unused,
    )
    same_values.check(joined.world, len(part.plan.mesh.places))
    unused_tensors = {name: tensors.pop(name) for name in unused if name in tensors}
    written = frozenset(written_states(traced.trace.graph))
    return ModelStates(traced.states, tensors, unused_tensors, sharding, written)


def connect(joined: JoinedRank, part: RankPart) -> Transport:
    """This rank's end of its pipeline.

    Raises:
        LaunchError: AUTOPIPE_TRANSPORT asks for one that the ranks cannot use.
    """
    mesh = part.plan.mesh
    pipelines = [
        [mesh.rank(holder, dp, tp) for holder in part.placed]
        for dp in range(mesh.dp)
        for tp in range(mesh.tp)
    ]
    edges = _edges(part.split.stages)
    return transport_for(part.device, pipelines, edges, world=joined.world)


def _join_group(plan: Plan) -> tuple[int, Watchdog]:
    """This process's rank and its watchdog; opens the default group unless the caller has."""
    world_size = len(plan.mesh.places)
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), 0, 1, 0, "", 0)
    else:
        found = world_from(os.environ)
        world = found or World(0, 1, 0, 1, 0, "localhost", 0)
    check_world(world, world_size)
    # Launchers count ranks node by node. A plan that gives slow devices other stages does not.
    in_order = sorted(plan.mesh.places, key=lambda place: (place.node, place.local))
    rank = in_order[world.rank].rank
    if world_size == 1 or dist.is_initialized():
        if rank != world.rank:
            raise LaunchError(
                f"the plan has rank {rank} where the process group that is open has rank "
                f"{world.rank}: its stages are not in the order of the devices",
                hint="leave opening the process group to parallelize",
            )
        return rank, Watchdog()
    opened = ExitStack()
    watchdog = opened.enter_context(start(world, rank=rank))
    # The group is open for as long as the process lives: a user's script has no block for it.
    atexit.register(opened.close)
    return rank, watchdog


def _all_ranks() -> dist.ProcessGroup:
    """The default group; or another one, if a script has opened that for GPUs alone, as by
    `init_process_group("nccl")`: ranks also exchange what is in host memory."""
    world = dist.group.WORLD
    if "cpu:" not in dist.get_backend_config():
        world = dist.new_group(timeout=timedelta(seconds=TIMEOUT), backend="gloo")
    assert world is not None
    return world


def _device(place: Place) -> torch.device:
    if place.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"the plan binds rank {place.rank} to {place.device}, and this machine has no GPU",
            hint="plan for this machine: --cluster local:N",
        )
    return torch.device("cuda", place.local % torch.cuda.device_count())


def _own_rows(same: SameValues, sharding: Sharding, rank: int, name: str, tensor: Tensor) -> Tensor:
    """The rows of a parameter that a rank keeps: a copy, so that the rest of the memory is freed.

    A plain tensor: weights from a file do not say whether they are trained.
    """
    same.note(name, tensor)
    lies = sharding.states.get(name, I)
    if not lies.sharded:
        return tensor
    return collectives.own_part(tensor.detach(), lies, sharding.ranks, rank).clone().contiguous()


def _edges(stages: Sequence[Stage]) -> tuple[Edge, ...]:
    """Every pair of stages that exchange tensors, as if all gradients came back."""
    return edges_of(
        Edge(stage.index, target, gradient=True) for stage in stages for _, target in stage.sends
    )
