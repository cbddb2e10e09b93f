"""`parallelize`: this rank's stage of a model, from a plan that all ranks share."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopipe import batches
from autopipe.binding import Split, check_runs, split_as_planned, split_for_evaluation
from autopipe.capture import Loss
from autopipe.errors import LaunchError
from autopipe.graph import Graph
from autopipe.partition import Stage, tied_states
from autopipe.plan import Place, Plan, check
from autopipe.runtime.launch import World, check_world, start, world_from
from autopipe.runtime.materialize import materialize
from autopipe.runtime.pipe import Groups, Pipe
from autopipe.runtime.transport import GlooTransport, Transport, local_network, make_groups
from autopipe.source import Source, bare, trace_source
from autopipe.trace import trace


def parallelize(
    model: Source,
    plan: Plan,
    *,
    inputs: Any = None,
    loss: Loss | None = None,
    weights: str | Path | None = None,
    seed: int = 0,
) -> Pipe:
    """Make this rank's part of `model` as `plan` says; every rank calls it.

    Args:
        model: the model, whose parameters of this rank's stage are taken as they are, or the
            function that builds it.
        plan: the same on every rank.
        inputs: an example batch to trace with; None: one made from the plan's description.
        loss: as given to `plan`.
        weights: a checkpoint to read this rank's parameters from.
        seed: of the initialisation and of dropout.

    Raises:
        LaunchError: other processes were started than the plan is for.
        PlanError: the plan was made for another model; names the first node that differs.
        ModelError: the model cannot be captured, or a parameter is not to be had.
    """
    check(plan)
    check_runs(plan)
    rank = _join(plan)
    place = plan.mesh.places[rank]
    device = _device(place)
    skeleton = bare(model)
    example = inputs(2) if callable(inputs) else inputs
    if example is None:
        example = batches.from_specs(plan.inputs, 2)
    else:
        example = batches.two_rows(example, plan.inputs)
    traced = trace(skeleton, example, plan.inputs, loss, reads=plan.reads)
    split = split_as_planned(traced, plan)
    states = materialize(
        traced.graph,
        split.stages[place.pp].states,
        skeleton,
        model,
        weights=weights,
        seed=seed,
        device=device,
    )

    def evaluation(batch: Any) -> Split:
        example = batches.two_rows(batch, plan.inputs)
        found = trace_source(model, example, plan.inputs, loss, training=False)
        return split_for_evaluation(found, split)

    transport, groups = _connect(plan, place, split)
    return Pipe(plan, place, split, states, transport, groups, evaluation, seed, device)


def _join(plan: Plan) -> int:
    """This process's rank; opens the default process group unless the caller has."""
    world_size = len(plan.mesh.places)
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), 0, 1, 0, "", 0)
    else:
        found = world_from(os.environ)
        world = found or World(0, 1, 0, 1, 0, "localhost", 0)
    check_world(world, world_size)
    if world_size > 1 and not dist.is_initialized():
        opened = contextlib.ExitStack()
        opened.enter_context(start(world))
        atexit.register(opened.close)
    return world.rank


def _device(place: Place) -> torch.device:
    if place.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise LaunchError(
            f"the plan binds rank {place.rank} to {place.device}, and this machine has no GPU",
            hint="plan for this machine: --cluster local:N",
        )
    return torch.device("cuda", place.local % torch.cuda.device_count())


def _connect(plan: Plan, place: Place, split: Split) -> tuple[Transport, Groups]:
    """Open every process group, on all ranks in one order."""
    mesh = plan.mesh
    if len(mesh.places) == 1:
        return local_network(1)[0], Groups(None, None, {})
    transport: Transport | None = None
    pipeline: dist.ProcessGroup | None = None
    flows = make_groups(len(mesh.places))
    for dp in range(mesh.dp):
        ranks = [p.rank for p in mesh.places if p.dp == dp]
        group = dist.new_group(ranks)
        if dp == place.dp:
            transport, pipeline = GlooTransport(ranks, flows), group
    shared = _shared_groups(mesh.places, split.stages, place, split.graph)
    assert transport is not None
    return transport, Groups(dist.group.WORLD, pipeline, shared)


def _shared_groups(
    places: Sequence[Place], stages: Sequence[Stage], place: Place, graph: Graph
) -> Mapping[str, dist.ProcessGroup]:
    """For each of this rank's parameters that others hold too: the group of all who do."""
    trainable = [name for name, state in graph.states.items() if state.trainable]
    tied = tied_states(stages, trainable)
    holders = {
        name: tied.get(name, (stage.index,))
        for stage in stages
        for name in stage.states
        if name in set(trainable)
    }
    groups: dict[str, dist.ProcessGroup] = {}
    for owners in sorted(set(holders.values())):
        ranks = [p.rank for p in places if p.pp in owners]
        if len(ranks) < 2:
            continue
        group = dist.new_group(ranks)
        if place.pp in owners:
            groups |= {name: group for name, held in holders.items() if held == owners}
    return groups
