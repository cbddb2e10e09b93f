"""How a rank holds its parameters, by the plan's ZeRO stage, and which ranks it shares them with.

    zero  parameters            gradients             optimizer state
    0     whole                 whole, summed         whole             GradientSum
    1     whole                 own rows of the sum   of own rows       OptimizerShards
    2     whole                 own rows              of own rows       GradientShards
    3     own rows              own rows              of own rows       ParameterShards

fp32 masters of 16-bit parameters are optimizer state. A parameter is shared by the ranks of a stage
in all data-parallel coordinates, by stages that are tied to each other, and by tensor-parallel
ranks that each make a part of its gradient. ZeRO-1 shards it over all of them. ZeRO-2 and 3, which
exchange rows in every micro-batch, shard it over the replicas of a stage only, since these run side
by side. Tied stages and tensor-parallel ranks then have copies of the same rows, whose gradients
are summed once a step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from autopipe.ir import partition
from autopipe.ir.graph import REGION_OP, Graph, State
from autopipe.ir.partition import Stage
from autopipe.runtime.parameters.gradient_sum import Gradients, GradientSum
from autopipe.runtime.parameters.part import RankPart
from autopipe.runtime.parameters.row_shards import RowShards, deal, in_pieces
from autopipe.runtime.parameters.zero1 import OptimizerShards
from autopipe.runtime.parameters.zero2 import GradientShards
from autopipe.runtime.parameters.zero3 import GatheredStage, ParameterShards, in_shards
from autopipe.sharding.torch_names import group_of
from autopipe.stages.bind import Split
from autopipe.stages.gathering import check_written, units_of
from autopipe.stages.lower import Lowered, lower


@dataclass(frozen=True)
class HeldParameters:
    """What a rank holds of the model's parameters while it trains.

    Attributes:
        states: its parameters, buffers and constants by name, on its device, as forward reads
            them; under ZeRO-3 parameters have memory only while they are gathered.
        gradients: sums the gradients over the ranks that share a parameter.
        gathered: under ZeRO-3, its stages by their index; empty otherwise.
    """

    states: Mapping[str, Tensor]
    gradients: Gradients
    gathered: Mapping[int, GatheredStage]


def hold(
    part: RankPart,
    states: MutableMapping[str, Tensor],
    backend: str,
    *,
    partial: Collection[str] = (),
    offload: bool = False,
) -> HeldParameters:
    """Open the groups that share parameters, and shard what the plan's ZeRO stage shards.

    Every rank calls it, at the same point of its program.

    Args:
        states: this rank's own, by name. Under ZeRO-3 each parameter is replaced here, and under
            ZeRO-1 and 2 each master, so that the memory of whole ones goes at once.
        backend: of the groups.
        partial: names of those whose gradient on each tensor-parallel rank is a part of a sum.
        offload: under ZeRO-3, keep shards in the host's memory.
    """
    if not part.plan.scatters:
        return _hold_whole(part, states, backend, partial)
    replicas = _replicas(part, backend)
    copies = _groups(part, backend, partial, [(dp,) for dp in range(part.plan.mesh.dp)])
    if part.plan.fully_sharded:
        return _hold_shards(part, states, replicas, copies, offload)
    return _hold_gradient_shards(part, states, replicas, copies)


def _hold_whole(
    part: RankPart,
    states: MutableMapping[str, Tensor],
    backend: str,
    partial: Collection[str],
) -> HeldParameters:
    """Parameters whole on every rank: ZeRO 0 and 1."""
    mesh = part.plan.mesh
    groups = _groups(part, backend, partial, [range(mesh.dp)])
    masters = _deal(part.split.graph, states, groups) if part.plan.deals else {}
    parameters, stages = _parameters(part, states)
    varying = _varying(part.split.graph)
    if part.plan.deals:
        by_rows = OptimizerShards(parameters, groups, stages, masters, varying)
        return HeldParameters(states, by_rows, {})
    specs = part.split.graph.states
    low = {n: dtype for n in parameters if (dtype := specs[n].gradient) is not None}
    summed = GradientSum(parameters, groups, stages, low=low, varying=varying)
    return HeldParameters(states, summed, {})


def _hold_gradient_shards(
    part: RankPart,
    states: MutableMapping[str, Tensor],
    replicas: dist.ProcessGroup,
    copies: Mapping[str, dist.ProcessGroup],
) -> HeldParameters:
    """ZeRO-2: parameters whole, and shards of them over the replicas of each stage."""
    graph = part.split.graph
    groups = {n: replicas for n in graph.states if graph.states[n].trainable and n in states}
    masters = _deal(graph, states, groups)
    parameters, stages = _parameters(part, states)
    held = RowShards(parameters, groups, masters)
    varying = _varying(graph)
    shards = GradientShards(held, parameters, replicas, stages, copies, varying)
    return HeldParameters(states, shards, {})


def _parameters(
    part: RankPart, states: Mapping[str, Tensor]
) -> tuple[dict[str, nn.Parameter], dict[int, list[str]]]:
    """This rank's parameters, and the names of those that each of its stages uses.

    They are in the order of the graph, which is the same on every rank.
    """
    names = part.split.graph.states
    parameters = {n: p for n in names if isinstance(p := states.get(n), nn.Parameter)}
    stages = {stage.index: [n for n in stage.states if n in parameters] for stage in part.stages}
    return parameters, stages


def _varying(graph: Graph) -> frozenset[str]:
    """The states that a part which runs as it is reads: values may decide which of them, as of
    experts that no row has chosen."""
    regions = (node for node in graph.nodes if node.op == REGION_OP)
    return frozenset(v.name for node in regions for v in node.values() if isinstance(v, State))


def _deal(
    graph: Graph, states: MutableMapping[str, Tensor], groups: Mapping[str, dist.ProcessGroup]
) -> dict[str, nn.Parameter]:
    """ZeRO-1 and 2: this rank's rows of masters, and of parameters where they lie in several
    pieces; `states` has what forward reads from then on."""
    masters = {}
    for name, state in graph.states.items():
        whole = states.get(name)
        if not isinstance(whole, nn.Parameter) or name not in groups:
            continue
        if state.master is not None or in_pieces(whole, groups[name]):
            states[name], masters[name] = deal(
                whole, groups[name], state.spec.dtype, state.summed.dtype
            )
    return masters


def _hold_shards(
    part: RankPart,
    states: MutableMapping[str, Tensor],
    replicas: dist.ProcessGroup,
    copies: Mapping[str, dist.ProcessGroup],
    offload: bool,
) -> HeldParameters:
    """ZeRO-3: shards over the replicas of each stage, and no parameter whole."""
    check_written(part.split.graph)
    rows = {}
    for name, state in part.split.graph.states.items():
        state_tensor = states.get(name)
        if isinstance(state_tensor, nn.Parameter):
            states[name], rows[name] = in_shards(
                state_tensor, replicas, state.spec.dtype, state.summed.dtype, offload=offload
            )
    parameters, stages = _parameters(part, states)
    shards = RowShards(parameters, dict.fromkeys(parameters, replicas), rows)
    gathered = {}
    for stage in part.stages:
        of_stage = {name: parameters[name] for name in stages[stage.index]}
        module = _lowered(part, stage, {name: states[name] for name in stage.states}).module
        units = units_of(module, of_stage)
        gathered[stage.index] = GatheredStage(shards, of_stage, replicas, units)
    varying = _varying(part.split.graph)
    gradients = ParameterShards(shards, parameters, replicas, stages, copies, varying)
    return HeldParameters(states, gradients, gathered)


def _lowered(part: RankPart, stage: Stage, states: Mapping[str, Tensor]) -> Lowered:
    """A stage lowered for training: its parts say what is gathered together."""
    split = part.split
    return lower(
        split.graph,
        stage,
        split.blocks,
        states,
        split.trace.reads,
        part.rows,
        last=stage.is_last(split.graph),
        device=part.device,
        recompute=part.plan.stages[stage.index].recompute,
        precision=part.plan.precision,
    )


def _replicas(part: RankPart, backend: str) -> dist.ProcessGroup:
    """The ranks that hold the same stages, and the same part of them; opened on every rank."""
    mesh = part.plan.mesh
    every: dict[tuple[int, int], dist.ProcessGroup] = {
        (pp, tp): group_of([mesh.rank(pp, dp, tp) for dp in range(mesh.dp)], backend, part.device)
        for pp in range(mesh.pp)
        for tp in range(mesh.tp)
    }
    return every[part.place.pp, part.place.tp]


def _groups(
    part: RankPart, backend: str, partial: Collection[str], replicas: Iterable[Sequence[int]]
) -> dict[str, dist.ProcessGroup]:
    """The group of each parameter that this rank shares with others of its replicas.

    Each tensor-parallel coordinate is by itself, but for gradients that are partial over them.

    Args:
        replicas: the data-parallel coordinates whose ranks are in one group.
    """
    mesh, owners = part.plan.mesh, _owners(part.split, part.placed)
    members = [
        (name, tuple(mesh.rank(pp, dp, tp) for pp in pps for dp in dps for tp in tps))
        for dps in replicas
        for name, pps in owners.items()
        for tps in ([range(mesh.tp)] if name in partial else [(tp,) for tp in range(mesh.tp)])
    ]
    return _open(members, part, backend)


def _owners(split: Split, placed: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """The pipeline ranks that hold each trainable parameter, by its name, in the graph's order."""
    trainable = [name for name, state in split.graph.states.items() if state.trainable]
    return {
        name: tuple(sorted({placed[stage] for stage in stages}))
        for name, stages in partition.owners(split.stages, trainable).items()
    }


def _open(
    members: Sequence[tuple[str, tuple[int, ...]]], part: RankPart, backend: str
) -> dict[str, dist.ProcessGroup]:
    """A group for each set of several ranks, on all ranks in one order; those this rank is in."""
    found: dict[str, dist.ProcessGroup] = {}
    for ranks in sorted({ranks for _, ranks in members}):
        if len(ranks) > 1:
            group = group_of(ranks, backend, part.device)
            if part.place.rank in ranks:
                found |= {name: group for name, who in members if who == ranks}
    return found
