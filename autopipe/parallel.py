"""`parallelize`: this rank's stage of a model, from a plan that all ranks share."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe import batches, collectives, heap, programs
from autopipe.binding import (
    Split,
    check_loss,
    check_runs,
    dealt_out,
    split_as_planned,
    split_for_evaluation,
    unused_states,
)
from autopipe.errors import LaunchError
from autopipe.losses import Loss
from autopipe.partition import Stage
from autopipe.placed import read_back
from autopipe.placements import I, Sharding
from autopipe.plan import Place, Plan, check
from autopipe.runtime.connect import backend_for, shares_memory, transport_for
from autopipe.runtime.emitted import Emitted
from autopipe.runtime.holding import hold
from autopipe.runtime.launch import World, check_world, start, world_from
from autopipe.runtime.materialize import materialize
from autopipe.runtime.pipe import Pipe
from autopipe.runtime.ready import Rank
from autopipe.runtime.shared import tensor_parallel_axis
from autopipe.runtime.watchdog import Watchdog
from autopipe.schedule import holders
from autopipe.shard import replicated
from autopipe.source import Source, bare, trace_source
from autopipe.trace import trace
from autopipe.transfers import Edge


def parallelize(
    model: Source,
    plan: Plan,
    *,
    inputs: Any = None,
    loss: Loss | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
    compile: bool = False,
    offload: bool = False,
    emitted: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Pipe:
    """Make this rank's part of `model` as `plan` says; every rank calls it.

    Args:
        model: the model, whose parameters of this rank's stage are taken as they are, or the
            function that builds it.
        plan: the same on every rank.
        inputs: an example batch to trace with; None: one made from the plan's description.
        loss: as given to `plan`.
        weights: a checkpoint to read this rank's parameters from: a safetensors file, a state_dict
            that torch.save has written, a folder of either, or of torch.distributed.checkpoint.
        seed: of the initialisation and of dropout.
        compile: whether stages run through torch.compile.
        offload: under ZeRO-3, keep parameters, gradients and optimizer state in host memory.
        emitted: a folder that `autopipe emit` has written for this plan: training steps run its
            stages and its programs, as they stand there now.
        say: gets a line of talk at a time, on rank 0.

    Raises:
        LaunchError: other processes were started than the plan is for.
        PlanError: the plan was made for another model, whose first node that differs is named, or
            with another loss.
        ModelError: the model cannot be captured, or a parameter is not to be had.
        ScheduleError: the programs in `emitted` would wait for each other, or are not whole.
    """
    check(plan)
    check_loss(plan, loss)
    files = Emitted.load(emitted, plan) if emitted is not None else None
    plan = files.plan if files is not None else plan
    check_runs(plan, compiled=compile)
    number, watchdog = _join(plan)
    place = plan.mesh.places[number]
    device = _device(place)
    if device.type == "cpu":
        heap.keep()
    compute = programs.compute(plan)
    skeleton = bare(model)
    example = inputs(2) if callable(inputs) else inputs
    if example is None:
        example = batches.from_specs(plan.inputs, 2)
    else:
        example = batches.two_rows(example, plan.inputs)
    traced = trace(skeleton, example, plan.inputs, loss, reads=plan.reads)
    backend = "gloo" if len(plan.mesh.places) == 1 else backend_for(device)
    sharding = read_back(plan)
    if plan.mesh.tp > 1:
        collectives.attach(
            collectives.TENSOR_PARALLEL,
            tensor_parallel_axis(plan, place, backend, shared=shares_memory(device)),
        )
    split = split_as_planned(traced, plan, place.tp)
    own = [stage for stage in split.stages if holders(compute)[stage.index] == place.pp]
    # What forward does not use is in no stage; rank 0 keeps it, as it is a part of the model.
    unused = unused_states(traced.graph, skeleton)
    kept = list(unused) if place.rank == 0 else []
    model_states = {**traced.graph.states, **unused}
    states = materialize(
        replace(traced.graph, states=model_states),
        [*dict.fromkeys(name for stage in own for name in stage.states), *kept],
        skeleton,
        model,
        weights=weights,
        seed=seed,
        part=partial(_own_part, sharding, place.tp),
        device=device,
        optional=kept,
        say=say if place.rank == 0 else None,
    )
    apart = {name: states.pop(name) for name in kept if name in states}

    def evaluation(batch: Any, outputs: bool) -> Split:
        example = batches.two_rows(batch, plan.inputs)
        found = trace_source(model, example, plan.inputs, loss, training=False, outputs=outputs)
        local, blocks = dealt_out(found, plan, place.tp)
        return split_for_evaluation(local, split, blocks)

    pipelines = [
        [plan.mesh.rank(holder, dp, tp) for holder in holders(compute)]
        for dp in range(plan.mesh.dp)
        for tp in range(plan.mesh.tp)
    ]
    transport = transport_for(device, pipelines, _edges(split.stages))
    gradients, sharded = hold(
        plan,
        place,
        split,
        holders(compute),
        states,
        device,
        backend,
        partial=replicated(sharding),
        offload=offload,
    )
    rank = Rank(plan, place, states, transport, device, compute, sharded, compile, files)
    world = dist.group.WORLD if len(plan.mesh.places) > 1 else None
    return Pipe(
        rank,
        split,
        gradients,
        world,
        evaluation,
        seed,
        watchdog,
        sharding,
        model_states=model_states,
        unused=apart,
    )


def _join(plan: Plan) -> tuple[int, Watchdog]:
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
    opened = contextlib.ExitStack()
    watchdog = opened.enter_context(start(world, rank=rank))
    atexit.register(opened.close)
    return rank, watchdog


def _own_part(sharding: Sharding, rank: int, name: str, tensor: Tensor) -> Tensor:
    """What a rank keeps of a parameter: a copy, so that the rest of its memory can go."""
    lies = sharding.states.get(name, I)
    if not lies.sharded:
        return tensor
    own = collectives.own_part(tensor.detach(), lies, sharding.ranks, rank).clone()
    return nn.Parameter(own.contiguous(), tensor.requires_grad)


def _device(place: Place) -> torch.device:
    if place.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"the plan binds rank {place.rank} to {place.device}, and this machine has no GPU",
            hint="plan for this machine: --cluster local:N",
        )
    return torch.device("cuda", place.local % torch.cuda.device_count())


def _edges(stages: Sequence[Stage]) -> list[Edge]:
    """Every pair of stages that exchange tensors, as if all gradients came back."""
    pairs = {(stage.index, target) for stage in stages for _, target in stage.sends}
    return [Edge(source, target, gradient=True) for source, target in sorted(pairs)]
