"""Tensor-parallel degrees: which to try, and the model as one rank of each runs it.

    degree 1      the model as traced
    degree 2, 4   its shard of every tensor that can be sharded, by the best sharding

The ranks of a tensor-parallel group communicate in every layer, so they stand on one node as far as
nodes have enough devices.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property

import sympy
import torch

from autopipe.cluster.cluster import Cluster, Link
from autopipe.cluster.tp_groups import GroupKind
from autopipe.errors import InfeasibleError
from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values
from autopipe.ir.graph import BATCH, Dim, Graph, Ref, State, at_batch
from autopipe.planfile.placements import Move, Sharding
from autopipe.sharding import collectives
from autopipe.sharding.collectives import Planned
from autopipe.sharding.column_linear import COLUMNS
from autopipe.sharding.ilp import AxisCosts, shard
from autopipe.sharding.local_graph import (
    blocks_of,
    held_whole,
    sent_by,
    shard_graph,
    shardable,
    whole_bytes,
)
from autopipe.sharding.op import Model
from autopipe.stages.precision import AUTOCAST, COMPUTED_LOW
from autopipe.stages.sent_parts import HeldWhole, part_dim
from autopipe.tracing.traced import Trace

MOST = 16
"""The highest degree that is tried unless one is asked for: the devices of a large node."""


@dataclass(frozen=True)
class Degree:
    """A model as the first rank of a tensor-parallel group runs it.

    The first rank has the largest shard of a dim that does not divide evenly.

    Attributes:
        whole: the model as traced, and its blocks.
        sharding: None at degree 1.
    """

    tp: int
    whole: Trace = field(repr=False)
    whole_blocks: tuple[Block, ...] = field(repr=False)
    sharding: Sharding | None = field(repr=False)
    trace: Trace = field(repr=False)
    flow: Dataflow = field(repr=False)
    blocks: tuple[Block, ...]

    @cached_property
    def dividing(self) -> HeldWhole:
        """The tensors of which each rank may send a part to a later stage."""
        if self.sharding is None:
            return {}
        graph = self.trace.graph
        held = held_whole(shardable(self.whole.graph), graph, self.sharding)
        return {r: lies for r, lies in held.items() if part_dim(graph.spec(r), self.tp) is not None}


def degrees(cluster: Cluster, asked: int | None, graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The degrees to try, ascending, and the degrees to try if nothing fits at those.

    First those within a node: degrees that divide every node's devices, and degrees that divide the
    model, which may leave devices or whole smaller nodes idle. Larger degrees come second.

    Args:
        asked: the degree that the user wants; None: any.
        graph: the model as traced.

    Raises:
        InfeasibleError: the degree is larger than the number of devices.
    """
    devices, nodes = cluster.num_devices, cluster.devices_per_node
    if asked is not None:
        if asked > devices:
            raise InfeasibleError(
                f"tp={asked} was asked for, and {cluster.name} has {devices} devices",
                hint=f"tp of at most {devices}",
            )
        return ((asked,),)
    usual = tuple(
        tp
        for tp in range(1, min(max(nodes), MOST) + 1)
        if all(node % tp == 0 for node in nodes) or _divides(graph, tp)
    )
    wider = tuple(tp for tp in (2, 4, 8, 16) if max(usual) < tp <= devices and devices % tp == 0)
    return usual, wider


def _divides(graph: Graph, tp: int) -> bool:
    """Whether the heads of every attention divide by a degree, and most of all matrices."""
    if any(heads % tp for heads in _heads(graph).values()):
        return False
    shapes = [s.spec.shape for s in graph.states.values() if s.kind == "parameter"]
    matrices = [[int(dim) for dim in shape] for shape in shapes if len(shape) > 1]
    dividing = [math.prod(m) for m in matrices if any(dim % tp == 0 for dim in m)]
    return 2 * sum(dividing) > sum(map(math.prod, matrices))


def as_one_rank(
    tp: int,
    traced: Trace,
    flow: Dataflow,
    blocks: tuple[Block, ...],
    cluster: Cluster,
    rows: int,
    *,
    slowest: GroupKind,
    sequence: bool = False,
) -> Degree:
    """The model at one degree.

    Args:
        rows: the rows of the micro-batch for which the sharding is optimal.
        slowest: the device and the link for which it is optimal.
        sequence: whether to consider shards of the batch's second dim.

    Raises:
        InfeasibleError: no tensor of the model divides into so many parts.
    """
    if slowest.link is None:
        return Degree(tp, traced, blocks, None, traced, flow, blocks)
    axis = AxisCosts(tp, slowest.link, slowest.device)
    flow = shardable(traced.graph)
    # Writes in place, gone from this graph, leave its blocks at other positions.
    blocks_here = blocks if flow.graph is traced.graph else find_blocks(flow.graph)
    sharding = shard(flow, blocks_here, axis, rows, sequence=sequence)
    _check_divides(flow, sharding, cluster)
    graph = shard_graph(flow, sharding, 0)
    local = replace(traced, graph=graph)
    local_blocks = blocks_of(graph, blocks)
    return Degree(tp, traced, blocks, sharding, local, analyse(graph), local_blocks)


def check_degree(graph: Graph, tp: int, most: int | None = None) -> None:
    """Refuse a degree that is asked for and divides nothing, before anything is measured for it.

    Args:
        most: the number of devices, if it is known; `degrees` refuses larger degrees.

    Raises:
        InfeasibleError: no dim of a parameter divides, or no attention's heads do; names the first.
    """
    if not 1 < tp <= (most or tp):
        return
    _check_heads(graph, tp)
    sizes = [size for s in graph.states.values() if s.kind == "parameter" for size in s.spec.shape]
    if not any(isinstance(size, int) and size % tp == 0 for size in sizes):
        raise _undivided(graph, tp, most or max(tp, 8))


def _check_heads(graph: Graph, tp: int) -> None:
    """Refuse a degree that is asked for and leaves every attention whole on every rank.

    Such a plan is right, but its ranks repeat the same work, which nobody asks for on purpose. (A
    search may still choose it if nothing else fits.) In a model whose attentions have 1, 2, 4 and 8
    heads (SegFormer), those that do not divide stay whole; so does an attention of one head, which
    no degree divides, between the convolutions of an autoencoder.
    """
    attentions = {name: heads for name, heads in _heads(graph).items() if heads > 1}
    if attentions and all(heads % tp for heads in attentions.values()):
        name, heads = next(iter(attentions.items()))
        dividing = [n for n in range(1, heads + 1) if heads % n == 0]
        raise InfeasibleError(
            f"tp={tp} was asked for, and the {heads} heads of {name} do not divide into "
            f"{tp} equal parts",
            hint=f"tp of {', '.join(map(str, dividing))}",
        )


def _heads(graph: Graph) -> dict[str, int]:
    """The heads of each attention whose number is known, by the name of its node.

    It is unknown where heads share a dim with the rows, or with windows of a picture: [12b, n, d].
    """
    found = {}
    for node in graph.nodes:
        if node.op.startswith("aten.scaled_dot_product_attention"):
            *rows, _, _ = graph.spec(node.values()[0]).shape
            heads = 1 if rows == [BATCH] else rows[-1] if rows else 1
            if isinstance(heads, int):
                found[node.name] = heads
    return found


def _check_divides(flow: Dataflow, sharding: Sharding, cluster: Cluster) -> None:
    graph, model = flow.graph, Model(flow, sharding.ranks)
    if any(
        lies.sharded and model.divides(State(name), lies) for name, lies in sharding.states.items()
    ):
        return
    raise _undivided(graph, sharding.ranks, cluster.num_devices)


def _undivided(graph: Graph, tp: int, most: int) -> InfeasibleError:
    """The error if `tp` divides no parameter; the hint names degrees up to `most` that do."""
    sizes = {
        int(size)
        for state in graph.states.values()
        if state.kind == "parameter" and len(state.spec.shape) > 1
        for size in state.spec.shape
    }
    dividing = [n for n in range(2, most + 1) if any(size % n == 0 for size in sizes)]
    shown = ", ".join(map(str, sorted(sizes, reverse=True)[:6]))
    found = f"their matrices have dims of {shown}" if sizes else "none of them is a matrix"
    return InfeasibleError(
        f"tp={tp} was asked for, and no parameter divides into {tp} equal parts: {found}",
        hint=f"tp of {', '.join(map(str, dividing[:6]))}" if dividing else "leave tp out",
    )


Exchange = tuple[tuple[Move | None, Move | None], Dim]
"""What a node sends forward and backward, and the bytes of the whole tensor as a formula."""


def exchanges(graph: Graph, ranks: int, precision: str = "fp32") -> list[Exchange]:
    """What each node of a rank's graph exchanges with the other ranks of its group.

    Most nodes exchange nothing: ((None, None), 0).

    Under autocast results of matrix products are sent in their own dtype, and so are gradients of
    the inputs of column-parallel layers (`sharding.column_linear`); all else is sent in fp32.
    """
    low = AUTOCAST.get(precision)
    lowered = {node.name for node in graph.nodes if node.short in COMPUTED_LOW}
    carrying = gradient_values(graph)
    found: list[Exchange] = []
    for node in graph.nodes:
        moves = sent_by(node, carrying)
        size = sympy.sympify(whole_bytes(graph, node, ranks) if any(moves) else 0)
        products = [v for v in node.values() if isinstance(v, Ref) and v.node in lowered]
        wide = any(spec.dtype == torch.float32 for spec in node.outputs if spec is not None)
        if low is not None and wide and (node.op == COLUMNS or products):
            size = size * low.itemsize / torch.float32.itemsize
        found.append((moves, size))
    return found


def sending_seconds(
    graph: Graph, rows: int, link: Link, ranks: int, precision: str = "fp32"
) -> list[tuple[float, float]]:
    """Forward and backward seconds of each node's collective; 0 without one.

    Args:
        graph: the graph of one rank, or a part of it.
        link: the link between the ranks.
    """
    found = []
    for (there, back), formula in exchanges(graph, ranks, precision):
        way = at_batch(formula, rows), link, ranks
        found.append((move_seconds(there, *way), move_seconds(back, *way)))
    return found


def move_seconds(move: Move | None, size: float, link: Link, ranks: int) -> float:
    """Seconds of a collective of a tensor of `size` bytes as a whole; 0 for none.

    On a ring (Patarasuk and Yuan, JPDC 2009): `placements.Move`.
    """
    if move is None:
        return 0.0
    return link.steps(move.rounds * (ranks - 1)) + move.sent(size, ranks) / move.rate(link)


def as_first(tp: int) -> AbstractContextManager[None]:
    """A context in which fake tensors run as on the first rank of a group of `tp`."""
    return collectives.bind(collectives.TENSOR_PARALLEL, Planned(tp, 0))
