"""`parallelize`: this rank's stage of a model, from a plan that all ranks share."""

from __future__ import annotations

import atexit
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autopipe import batches, fingerprint
from autopipe.blocks import find_blocks
from autopipe.capture import Loss
from autopipe.dataflow import analyse
from autopipe.errors import LaunchError, PlanError
from autopipe.graph import Graph
from autopipe.partition import Stage, partition, tied_states
from autopipe.plan import Place, Plan, check
from autopipe.planning import Factory, bare, batches_for_tracing
from autopipe.runtime.launch import World, check_world, start, world_from
from autopipe.runtime.materialize import materialize
from autopipe.runtime.pipe import Groups, Pipe, Split
from autopipe.runtime.transport import GlooTransport, Transport, local_network, make_groups
from autopipe.trace import Trace, trace


def parallelize(
    model: nn.Module | Factory,
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
    rank = _join(plan)
    place = plan.mesh.places[rank]
    device = _device(place)
    skeleton = bare(model)
    example = inputs(2) if callable(inputs) else inputs
    if example is None:
        example = batches.from_specs(plan.inputs, 2)
    else:
        example = batches_for_tracing(example, plan.inputs)
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
        example = batches_for_tracing(batch, plan.inputs)
        real: Callable[[], nn.Module] = lambda: model if isinstance(model, nn.Module) else model()  # noqa: E731
        found = trace(skeleton, example, plan.inputs, loss, training=False, real=real)
        skeleton.train()
        return split_for_evaluation(found, split)

    transport, groups = _connect(plan, place, split)
    return Pipe(plan, place, split, states, transport, groups, evaluation, seed, device)


def split_as_planned(traced: Trace, plan: Plan) -> Split:
    """Cut a traced model where the plan says.

    Raises:
        PlanError: the plan is of another model, or names nodes that are no place to cut.
    """
    graph = traced.graph
    if fingerprint.fingerprint(graph) != plan.fingerprint:
        planned = ", ".join(f"{name} {version}" for name, version in plan.versions.items())
        raise PlanError(
            "plan.fingerprint: the plan was made for another model, another loss, or by other "
            f"versions (planned with {planned}; here torch {torch.__version__}). First "
            f"difference: {fingerprint.first_difference(graph, plan.trail)}",
            hint="plan again with `autopipe plan`",
        )
    starts = []
    for index, stage in enumerate(plan.stages):
        for word, name in (("first", stage.first), ("last", stage.last)):
            if name not in graph.index:
                raise PlanError(f"plan.stages[{index}].{word}: the model has no node {name!r}")
        starts.append(graph.index[stage.first])
    ends = [*(graph.index[stage.last] + 1 for stage in plan.stages)]
    expected = [0, *ends[:-1]]
    for index, (start_, end) in enumerate(zip(starts, expected, strict=True)):
        if start_ != end:
            raise PlanError(
                f"plan.stages[{index}].first: stage {index} begins with "
                f"{plan.stages[index].first!r}, expected {graph.nodes[end].name!r}: the stages "
                "must hold every node once, in order"
            )
    if ends[-1] != len(graph.nodes):
        raise PlanError(
            f"plan.stages[{len(ends) - 1}].last: the last stage ends with "
            f"{plan.stages[-1].last!r}, the model with {graph.nodes[-1].name!r}"
        )
    return Split(traced, partition(analyse(graph), starts[1:]), find_blocks(graph))


def split_for_evaluation(found: Trace, training: Split) -> Split:
    """Cut the graph of evaluation so that every stage needs the parameters it has.

    The two graphs differ by dropout and the like. A node's stage is that of the node of the same
    name in training, or that of the node before it.
    """
    graph, flow = found.graph, analyse(found.graph)
    stages = training.stages
    owner = {p: stage.index for stage in stages for p in range(stage.first, stage.stop)}
    planned = {node.name: owner[position] for position, node in enumerate(training.graph.nodes)}
    cuts: list[int] = []
    current = 0
    for position, node in enumerate(graph.nodes):
        index = planned.get(node.name, current)
        if flow.local[position] or index <= current:
            continue
        cuts += [position] * (index - current)
        current = index
    if len(set(cuts)) != len(stages) - 1:
        raise PlanError(
            "the model computes nothing in some stages when it evaluates, so it cannot be "
            "evaluated with this plan",
            hint="cut the model elsewhere",
        )
    split = Split(found, partition(flow, cuts), find_blocks(graph))
    for stage, trained in zip(split.stages, stages, strict=True):
        missing = [
            name
            for name in stage.states
            if name not in trained.states and graph.states[name].kind != "constant"
        ]
        if missing:
            raise PlanError(
                f"in evaluation stage {stage.index} needs {missing[0]!r}, which it does not hold "
                "in training",
                hint="cut the model elsewhere",
            )
    return split


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
