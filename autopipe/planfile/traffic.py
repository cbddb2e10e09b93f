"""Count the bytes that a plan's step sends over its farthest links: between sites or nodes.

    site 0              site 1                    over the farthest link, in a step
    stage 0, stage 1    stage 2, stage 3          activations of 1 -> 2, their gradients back
    dp 0                dp 1                      sums of gradients: 2 (n - 1) times their bytes

A sum over n places sends (n - 1) / n of the bytes from each place twice, on a ring (Patarasuk and
Yuan, JPDC 2009); all places together so 2 (n - 1) times the bytes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autopipe.cluster.cluster import Link
from autopipe.cluster.collective_time import Topology
from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.turns import taking_turns
from autopipe.schedules.instructions import Flow, holders


@dataclass(frozen=True)
class Traffic:
    """Bytes that a step sends over all farthest links together.

    Exchanges of tensor-parallel ranks are not counted: a node holds them all if it has room.

    Attributes:
        kind: `sites` or `nodes`.
        places: how many of them the plan uses.
        link: the link between two of them.
        activations, gradients: bytes of crossing tensors, there and back.
        pairs: the pairs of stages between which these go.
        sums: bytes of gradients that are summed (under ZeRO-2 and 3 scattered in every
            micro-batch), and of parameters that ZeRO gathers.
        sum_of_all: bytes that summing the gradients of the whole model over all places would send.
        busy: seconds for which the busiest wire carries crossing tensors.
    """

    kind: str
    places: int
    link: Link
    activations: int
    gradients: int
    pairs: tuple[tuple[int, int], ...]
    sums: int
    sum_of_all: int
    busy: float


def traffic(plan: Plan) -> Traffic | None:
    """The traffic of a plan; None if it stays on one node."""
    topology, device = Topology.of(plan.cluster), predict.devices(plan)
    sites = len({topology.sites[number] for number in device}) > 1
    of_device = topology.sites if sites else topology.nodes
    where = [of_device[number] for number in device]
    places = len(set(where))
    if places == 1:
        return None
    link = topology.across if sites else topology.between
    assert link is not None, "a checked cluster of several sites has the link"
    crossing, sums = _crossing(plan, where, sites=sites), _sums(plan, where)
    return Traffic(
        kind="sites" if sites else "nodes",
        places=places,
        link=link,
        activations=crossing.moved[Flow.ACTIVATION],
        gradients=crossing.moved[Flow.GRADIENT],
        pairs=tuple(sorted(crossing.pairs)),
        sums=sums.crossing,
        sum_of_all=2 * (places - 1) * sums.gradients,
        busy=crossing.busiest / link.bandwidth,
    )


class _Crossing(NamedTuple):
    """Bytes of tensors that cross in a step, and of them those on the busiest wire; the pairs of
    stages between which they go."""

    moved: Counter[Flow]
    busiest: int
    pairs: set[tuple[int, int]]


def _crossing(plan: Plan, where: Sequence[int], *, sites: bool) -> _Crossing:
    """What crosses between stages.

    Args:
        where: of each rank its place, a site or a node.
        sites: whether places are sites.
    """
    mesh, placed = plan.mesh, holders(programs.compute(plan))
    moved: Counter[Flow] = Counter()
    wires: Counter[tuple[int, int]] = Counter()
    pairs = set()
    for channel, size in predict.crossing_bytes(plan).items():
        ends = channel.source, channel.target
        turns = math.lcm(*(len(taking_turns(plan.stages, end)) for end in ends))
        total = size * plan.batch.micro_batches // turns
        for dp in range(mesh.dp):
            for tp in range(mesh.tp):
                source, target = (mesh.rank(placed[end], dp, tp) for end in ends)
                if where[source] == where[target]:
                    continue
                moved[channel.flow] += total
                # All of a site send over one wire; nodes have as many as devices.
                wires[(where[source], where[target]) if sites else (source, target)] += total
                pairs.add((min(ends), max(ends)))
    return _Crossing(moved, max(wires.values(), default=0), pairs)


class _Sums(NamedTuple):
    """Bytes that cross in a step to sum gradients, and to gather parameters; bytes of the gradients
    of the whole model."""

    crossing: int
    gradients: int


def _sums(plan: Plan, where: Sequence[int]) -> _Sums:
    """What crosses between replicas; `where` as of `_crossing`."""
    mesh, placed = plan.mesh, holders(programs.compute(plan))
    crossing = gradients = 0
    for index, stage in enumerate(plan.stages):
        entries = taking_turns(plan.stages, index)
        if index != entries[0]:
            continue
        size = stage.predicted.memory.gradients * (mesh.dp if plan.scatters else 1)
        together, tied = predict.summed_together(plan, index), stage.predicted.tied
        first = not together or min(together) in entries
        gradients += (size if first else size - tied) * mesh.tp
        if together and first:
            crossing += _of_tied(plan, where, sorted({placed[other] for other in together}), tied)
        size -= 0 if plan.scatters else tied
        rounds = 1 + (plan.gathered_share if plan.zero else 1.0)
        if plan.scatters:  # in every micro-batch; there ZeRO-3 gathers twice too
            gathers = 2 * plan.batch.micro_batches if plan.fully_sharded else 1
            rounds = plan.scattered_share * plan.batch.micro_batches
            rounds += plan.gathered_share * gathers
        for tp in range(mesh.tp):
            ranks = [mesh.rank(placed[entry], dp, tp) for entry in entries for dp in range(mesh.dp)]
            over = len({where[rank] for rank in ranks})
            crossing += int(rounds * (over - 1) * size)
    return _Sums(crossing, gradients)


def _of_tied(plan: Plan, where: Sequence[int], pps: Sequence[int], size: int) -> int:
    """What crosses between pipeline ranks to sum gradients that they all have."""
    mesh = plan.mesh
    replicas = [[dp] for dp in range(mesh.dp)] if plan.scatters else [[*range(mesh.dp)]]
    rounds = 2.0 if plan.scatters else 1 + (plan.gathered_share if plan.zero_at_work else 1.0)
    over = [
        len({where[mesh.rank(pp, dp, tp)] for pp in pps for dp in dps})
        for dps in replicas
        for tp in range(mesh.tp)
    ]
    return int(rounds * sum(places - 1 for places in over) * size / len(replicas))
