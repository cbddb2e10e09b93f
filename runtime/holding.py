"""How a rank holds its parameters, by the plan's ZeRO stage, and with whom it shares them.

    zero  parameters            gradients             optimizer state
    0     whole                 whole, summed         whole             GradientSum
    1     whole                 own rows of the sum   of own rows       OptimizerShards
    3     own rows              own rows of the sum   of own rows       FullyShardedSum

A parameter is shared by the ranks of a stage in all data-parallel coordinates, and by stages that
are tied to each other.
"""

from __future__ import annotations

from collections.abc import Collection, MutableMapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopipe.binding import Split
from autopipe.errors import PlanError
from autopipe.lower import lower
from autopipe.partition import tied_states
from autopipe.plan import Place, Plan
from autopipe.runtime.gradients import Gradients, GradientSum
from autopipe.runtime.zero import OptimizerShards

if TYPE_CHECKING:
    from autopipe.runtime.fully_sharded import ShardedStage


def hold(
    plan: Plan,
    place: Place,
    split: Split,
    placed: Sequence[int],
    states: MutableMapping[str, Tensor],
    device: torch.device,
    backend: str,
    *,
    partial: Collection[str] = (),
    offload: bool = False,
) -> tuple[Gradients, dict[int, ShardedStage]]:
    """Open the groups that share parameters, and deal out what the plan says is dealt out.

    Every rank calls it, at the same point of its program. Under ZeRO-3 the parameters in `states`
    are DTensors afterwards.

    Args:
        placed: the pipeline rank of each stage.
        states: this rank's own, by name.
        backend: of the groups.
        partial: names of those whose gradient on each tensor-parallel rank is a part of a sum.
        offload: under ZeRO-3, keep shards in the host's memory.

    Returns:
        The gradients' sum, and this rank's stages that are in shards.
    """
    mesh, graph = plan.mesh, split.graph
    owners = _owners(split, placed)
    own = [stage for stage in split.stages if placed[stage.index] == place.pp]
    if not plan.fully_sharded:
        # In the order of the graph, which is the same on every rank.
        parameters = {n: p for n in graph.states if isinstance(p := states.get(n), nn.Parameter)}
        # Each tensor-parallel coordinate by itself, but for gradients that are partial over them.
        members = [
            (
                name,
                tuple(
                    mesh.rank(pp, dp, tp)
                    for pp in pps
                    for dp in range(mesh.dp)
                    for tp in (range(mesh.tp) if name in partial else (own_tp,))
                ),
            )
            for name, pps in owners.items()
            for own_tp in range(mesh.tp)
        ]
        groups = _open(members, place.rank, backend)
        stages = {stage.index: [n for n in stage.states if n in parameters] for stage in own}
        kind = OptimizerShards if plan.zero and mesh.dp > 1 else GradientSum
        return kind(parameters, groups, stages), {}

    if partial:
        raise PlanError(
            f"plan: under zero=3 {min(partial)!r} may not lie as R over tensor-parallel ranks, "
            "whose gradient is summed over them once a step",
            hint="plan again with zero=3, or with zero=1",
        )
    # Only here: importing torch's FSDP takes a quarter of a second, at the start of every rank.
    from autopipe.runtime.fully_sharded import FullyShardedSum, shard_stage

    replicas = {
        (pp, tp): dist.new_group([mesh.rank(pp, dp, tp) for dp in range(mesh.dp)], backend=backend)
        for pp in range(mesh.pp)
        for tp in range(mesh.tp)
    }
    sharded: dict[int, ShardedStage] = {}
    for stage in own:
        of_stage = {name: states[name] for name in stage.states}
        lowered = lower(
            graph,
            stage,
            split.blocks,
            of_stage,
            split.trace.reads,
            plan.batch.rows // (mesh.dp * plan.batch.micro_batches),
            last=stage.index == len(split.stages) - 1,
            device=device,
            recompute=plan.stages[stage.index].recompute,
            precision=plan.precision,
        )
        found = shard_stage(lowered.module, of_stage, replicas[place.pp, place.tp], offload=offload)
        sharded[stage.index] = found
        states.update(found.parameters)
    tied: dict[str, dist.ProcessGroup] = {}
    for dp in range(mesh.dp):
        copies = [
            (name, tuple(mesh.rank(pp, dp, tp) for pp in pps))
            for name, pps in owners.items()
            if len(pps) > 1
            for tp in range(mesh.tp)
        ]
        tied |= _open(copies, place.rank, backend)
    return FullyShardedSum(sharded, tied), sharded


def _owners(split: Split, placed: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Of each trainable parameter the pipeline ranks that hold it, in the order of the graph."""
    trainable = [name for name, state in split.graph.states.items() if state.trainable]
    tied = tied_states(split.stages, trainable)
    found: dict[str, tuple[int, ...]] = {}
    for name in trainable:
        stages = tied.get(name) or [s.index for s in split.stages if name in s.states][:1]
        found[name] = tuple(sorted({placed[stage] for stage in stages}))
    return found


def _open(
    members: Sequence[tuple[str, tuple[int, ...]]], rank: int, backend: str
) -> dict[str, dist.ProcessGroup]:
    """A group for each set of several ranks, on all ranks in one order; those `rank` is in."""
    found: dict[str, dist.ProcessGroup] = {}
    for ranks in sorted({ranks for _, ranks in members}):
        if len(ranks) > 1:
            group = dist.new_group(list(ranks), backend=backend)
            if rank in ranks:
                found |= {name: group for name, who in members if who == ranks}
    return found
