"""A stage's seconds of a micro-batch as formulas in rows b, tokens s and a bandwidth w.

    forward   sum over its nodes of  max(flops / rate, bytes / bandwidth) + launches      op_seconds
    backward  the same; and the forward of blocks that run again
    both      + exchanges of tensor-parallel ranks       rounds (n - 1) latency + sent / w
              + gathering of ZeRO-3, as far as computing does not hide it

They are the formulas that the planner evaluates. Nodes of equal cost share a term, times their
number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import chain
from typing import NamedTuple

from autopipe.cluster.cluster import Cluster, Link
from autopipe.cluster.collective_time import Levels, Topology, half_sum
from autopipe.cluster.efficiency import BESIDE
from autopipe.cluster.tp_groups import GroupKind, TpGroup, distinct, tp_groups
from autopipe.ir import op_costs, op_seconds
from autopipe.ir.blocks import owners
from autopipe.ir.graph import BATCH, SEQUENCE, Dim, State, StateSpec, bytes_at
from autopipe.ir.op_seconds import Roof
from autopipe.ir.partition import Stage
from autopipe.planfile import predict, programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.placements import Move
from autopipe.planners.costs.fused_costs import fused
from autopipe.planners.costs.part_seconds import NONE, Conversions, conversions
from autopipe.planners.costs.precision_of import computed_in
from autopipe.planners.costs.tp_degrees import exchanges
from autopipe.planners.formulas.from_sympy import of_sympy
from autopipe.planners.formulas.lengths import PlannedStages
from autopipe.scaling import links
from autopipe.scaling.expressions import (
    BANDWIDTH,
    ROWS,
    TOKENS,
    Expression,
    largest,
    product,
    total,
    value,
)
from autopipe.schedules.instructions import holders
from autopipe.stages.precision import copy_bytes

NAMES = {BATCH: ROWS, SEQUENCE: TOKENS}
"""The variables of the graph's symbols."""


class Seconds(NamedTuple):
    """The formulas of a stage's seconds for one micro-batch."""

    forward: Expression
    backward: Expression


def stage_seconds(planned: PlannedStages) -> list[Seconds]:
    """The seconds of a plan's stages.

    Raises:
        AutopipeError: the seconds of some op are no formula of sums, products and powers.
    """
    placed = holders(programs.compute(planned.plan))
    groups = {rank: _groups(planned.plan, rank) for rank in set(placed)}
    kinds = distinct(chain.from_iterable(groups.values()))
    nodes = [_Nodes(planned, kind) for kind in kinds]
    parting = _conversions(planned)
    sizes = {
        ROWS: planned.plan.batch.microbatch_rows(planned.plan.mesh.dp),
        TOKENS: planned.traced.tokens,
        BANDWIDTH: links.farthest(planned.plan.cluster).link.bandwidth,
    }
    seconds = []
    for stage, rank in zip(planned.plain.stages, placed, strict=True):
        of_rank = [
            _with_conversions(
                _gathering(planned, stage, rank, nodes[kinds.index(kind)].of(stage)),
                parting[stage.index],
                kind,
                planned.plan,
            )
            for kind in distinct(groups[rank])
        ]
        seconds.append(max(of_rank, key=lambda each: sum(value(way, sizes) for way in each)))
    return seconds


def _conversions(planned: PlannedStages) -> list[Conversions]:
    """Each stage's conversions of sent tensors to parts and back."""
    split, plan = planned.split, planned.plan
    if split.plain is None:
        return [NONE] * len(split.stages)
    added = frozenset(split.graph.index.keys() - split.plain.graph.index.keys())
    return conversions(split.graph, split.stages, added, plan.mesh.tp, plan.precision)


def _with_conversions(computing: Seconds, of: Conversions, kind: GroupKind, plan: Plan) -> Seconds:
    """A stage's seconds with those of conversions to parts and back, which nothing hides."""
    if not of.costs or kind.link is None:
        return computing
    ways = [computing.forward], [computing.backward]
    for roofs in op_seconds.roofs(of.costs, kind.device, of.dtypes):
        for way, roof in zip(ways, roofs, strict=True):
            way.append(_roof_seconds(roof))
    for moves, size in of.exchanges:
        for way, move in zip(ways, moves, strict=True):
            way.append(_sent(move, size, kind.link, plan))
    return Seconds(*(total(*way) for way in ways))


def model_flops(planned: PlannedStages) -> Expression:
    """The operations of b rows that MFU counts, of the whole model."""
    costs = op_costs.costs(planned.traced.trace.graph)
    counted = Counter(cost.model_flops for cost in costs)
    return total(*(product(float(n), of_sympy(dim, NAMES)) for dim, n in counted.items()))


def _groups(plan: Plan, rank: int) -> list[TpGroup]:
    """The tensor-parallel groups of a pipeline rank."""
    numbered, mesh = predict.devices(plan), plan.mesh
    groups_of_rank = {
        tuple(numbered[mesh.rank(rank, dp, tp)] for tp in range(mesh.tp)) for dp in range(mesh.dp)
    }
    groups = tp_groups(plan.cluster, mesh.tp, plan.mesh.pp * plan.mesh.dp)
    return [group for group in groups if group.devices in groups_of_rank]


class _Nodes:
    """The formulas of all nodes on one kind of device."""

    def __init__(self, planned: PlannedStages, kind: GroupKind) -> None:
        plan, graph = planned.plan, planned.plain.graph
        costs = op_costs.costs(graph)
        dtypes = computed_in(graph, costs, plan.precision)
        owner = {p: b.path for b in planned.plain.blocks for p in range(b.first, b.stop)}
        if plan.compiled:
            costs = fused(graph, costs, [owner.get(p) for p in range(len(graph.nodes))])
        again = {name for stage in plan.stages for name in stage.recompute}
        self._roofs = op_seconds.roofs(costs, kind.device, dtypes)
        self._again = [
            node.name in again or owner.get(p) in again for p, node in enumerate(graph.nodes)
        ]
        self._sent: list[tuple[Expression, Expression]] = [(0.0, 0.0)] * len(graph.nodes)
        if kind.link is not None:
            moves = exchanges(graph, plan.mesh.tp, plan.precision)
            self._sent = [
                (_sent(there, size, kind.link, plan), _sent(back, size, kind.link, plan))
                for (there, back), size in moves
            ]
        self._seconds_of = cache(_roof_seconds)

    def of(self, stage: Stage) -> Seconds:
        """Forward and backward seconds of a stage's nodes."""
        ways: tuple[Counter[Roof], Counter[Roof]] = Counter(), Counter()
        sent: tuple[list[Expression], list[Expression]] = [], []
        for position in range(stage.first, stage.stop):
            both, moved = self._roofs[position], self._sent[position]
            for way in (0, 1):
                ways[way][both[way]] += 1
                sent[way].append(moved[way])
            if self._again[position]:
                ways[1][both[0]] += 1
                sent[1].append(moved[0])
        return Seconds(*(self._sum(*pair) for pair in zip(ways, sent, strict=True)))

    def _sum(self, roofs: Counter[Roof], sent: Iterable[Expression]) -> Expression:
        return total(
            *(product(float(n), self._seconds_of(roof)) for roof, n in roofs.items()), *sent
        )


def _roof_seconds(roof: Roof) -> Expression:
    computing, moving, besides = (of_sympy(part, NAMES) for part in roof)
    return total(largest(computing, moving), besides)


def _sent(move: Move | None, size: Dim, link: Link, plan: Plan) -> Expression:
    """Seconds of a node's exchange over a tensor-parallel group's link, as in
    `tp_degrees.sending_seconds`."""
    if move is None:
        return 0.0
    ranks, farthest = plan.mesh.tp, links.farthest(plan.cluster).link
    share = move.rate(link) / farthest.bandwidth
    at_farthest = link.latency == farthest.latency and share <= 1
    a_byte = product(1 / share, ("^", BANDWIDTH, -1.0)) if at_farthest else 1 / move.rate(link)
    moved = of_sympy(move.sent(size, ranks), NAMES)
    return total(link.steps(move.rounds * (ranks - 1)), product(moved, a_byte))


def _gathering(planned: PlannedStages, stage: Stage, rank: int, computing: Seconds) -> Seconds:
    """The seconds with ZeRO's gathers and scatters, as in `planners.model.stage_costs`."""
    plan, graph = planned.plan, planned.plain.graph
    if not plan.scatters:
        return computing
    states = [graph.states[name] for name in stage.states]
    summed = sum(bytes_at(state.summed, 1) for state in states if state.trainable)
    half = partial(half_sum, copying=plan.cluster.copying)
    scatters = _exchange(plan, rank, half, summed)
    gathers = _exchange(plan, rank, half, _read(states)) if plan.fully_sharded else 0.0
    if not plan.cluster.all_gpus:
        return Seconds(
            total(computing.forward, gathers), total(computing.backward, gathers, scatters)
        )
    if not plan.fully_sharded:
        return Seconds(computing.forward, _overlapped(computing.backward, 0.0, scatters))
    first, last = (_exchange(plan, rank, half, size) for size in _edges(planned, stage))
    return Seconds(
        _overlapped(computing.forward, first, gathers),
        _overlapped(computing.backward, last, total(gathers, scatters)),
    )


def _overlapped(computing: Expression, first: Expression, moved: Expression) -> Expression:
    """Seconds of computing and of collectives, of which the first one blocks computing and the
    others run beside it."""
    slowed = total(product(1 - BESIDE, first), product(BESIDE, moved))
    return largest(total(computing, slowed), moved)


def _edges(planned: PlannedStages, stage: Stage) -> tuple[int, int]:
    """Bytes that forward reads of the parameters of a stage's first and of its last block."""
    graph, owner = planned.plain.graph, owners(planned.plain.blocks, stage.first, stage.stop)

    def read(positions: Iterable[int]) -> int:
        names = {v.name for p in positions for v in graph.nodes[p].values() if isinstance(v, State)}
        return _read(graph.states[name] for name in names)

    def edge(positions: Iterable[int]) -> int:
        for position in positions:
            if alone := read([position]):
                block = owner.get(position)
                return read(range(block.first, block.stop)) if block is not None else alone
        return 0

    positions_of_stage = range(stage.first, stage.stop)
    return edge(positions_of_stage), edge(reversed(positions_of_stage))


def _read(states: Iterable[StateSpec]) -> int:
    """Bytes of parameters as forward reads them: for a master those of its copy."""
    return sum(
        bytes_at(state.held, 1) - (copy_bytes(state) if state.master is not None else 0)
        for state in states
        if state.kind == "parameter"
    )


def _exchange(
    plan: Plan, rank: int, taking: Callable[[float, Levels, int], float], size: int
) -> Expression:
    """Seconds in which a rank's replicas gather or scatter `size` bytes."""
    numbered, mesh = predict.devices(plan), plan.mesh
    replicas = [numbered[mesh.rank(rank, dp)] for dp in range(mesh.dp)]

    def seconds(cluster: Cluster) -> float:
        return taking(size, Topology.of(cluster).levels(replicas), mesh.tp)

    return links.on_farthest(plan.cluster, seconds)
