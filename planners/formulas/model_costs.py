"""What a model costs part by part, as formulas in the rows b and the sequence s of a micro-batch.

    blocks.0 to 5, each    768 b s^2 + 3,542,016 b s operations forward, 24,616 b s bytes kept

One trace gives formulas for any micro-batch and any length. Operations and bytes moved follow from
the rules of `ir.op_costs`. Bytes saved for backward are observed: the graph runs without memory at
a few sizes, and each storage gets the polynomial

    bytes(b, s) = sum of c_ij b^i s^j    (i <= 1, j <= 2)

through those sizes. One more run, of other rows and another length, must give what it predicts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from autopipe.batch.cut import two_rows
from autopipe.cluster.cluster import Cluster
from autopipe.cluster.tp_groups import slowest_kind, tp_groups
from autopipe.frontend.loss import Loss
from autopipe.ir import op_costs
from autopipe.ir.blocks import Block, find_blocks
from autopipe.ir.dataflow import analyse
from autopipe.ir.graph import BATCH, SEQUENCE, Dim, Graph, State
from autopipe.ir.repeats import Short, Storage, Uneven, shortened
from autopipe.planners.costs.precision_of import need
from autopipe.planners.costs.tp_degrees import (
    as_first,
    as_one_rank,
    check_degree,
    degrees,
    exchanges,
)
from autopipe.planners.driver import arguments
from autopipe.planners.saved.observe import observe_saved
from autopipe.sharding.local_graph import shard_graph, shardable
from autopipe.stages.precision import PRECISIONS
from autopipe.tracing.capture.low_precision import kept
from autopipe.tracing.source import Source
from autopipe.tracing.symbolic_sequence import Lengths, trace_lengths, with_tokens
from autopipe.util.gc_pause import collector_paused
from autopipe.util.progress import Say, phase

ROWS = (2, 3)
"""Rows of the runs; more than one, since one row may be a special case."""

SHARES = (1, 2, 4)
"""Lengths of the runs: the longest sequence divided by these."""

CHECK = 4, (3, 4)
"""Rows, and part of the longest sequence, of the run that checks the polynomials."""


@dataclass(frozen=True)
class Amounts:
    """Formulas in `graph.BATCH` and `graph.SEQUENCE`, for one micro-batch.

    Attributes:
        parameters: bytes of trainable parameters and others, and of buffers.
        forward_flops, backward_flops: operations.
        forward_bytes, backward_bytes: moved between memory and the device's cores.
        kept: bytes made here that stay until backward; nan if they follow no such formula.
        sent, sent_back: bytes that a rank sends to its tensor-parallel peers, forward and backward.
    """

    parameters: Dim = sympy.Integer(0)
    forward_flops: Dim = sympy.Integer(0)
    backward_flops: Dim = sympy.Integer(0)
    forward_bytes: Dim = sympy.Integer(0)
    backward_bytes: Dim = sympy.Integer(0)
    kept: Dim = sympy.Integer(0)
    sent: Dim = sympy.Integer(0)
    sent_back: Dim = sympy.Integer(0)

    @staticmethod
    def sum(amounts: Iterable[Amounts]) -> Amounts:
        """The sum of the amounts of several parts."""
        columns = zip(*(one.row for one in amounts), strict=True)
        return Amounts(*(sympy.expand(sympy.Add(*column)) for column in columns))

    @property
    def row(self) -> tuple[Dim, ...]:
        """All amounts, in the order of the fields."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ModelPart:
    """Blocks in a row that cost the same, or the nodes of one module that are in no block.

    Attributes:
        name: `model.layers.0 to 31`, or the module's.
        count: how many blocks.
        each: the amounts of one of them.
    """

    name: str
    count: int
    each: Amounts


@dataclass(frozen=True)
class Formulas:
    """A model's costs.

    Attributes:
        nodes: the amounts of every node, by name, in the graph's order.
        parts: the amounts of blocks, and of modules around them.
        longest: the length up to which the formulas hold; None: the sequence is no symbol.
        why: why the sequence is no symbol.
    """

    nodes: Mapping[str, Amounts]
    parts: tuple[ModelPart, ...]
    longest: int | None
    why: str

    @property
    def total(self) -> Amounts:
        """The sum over all nodes of the model."""
        return Amounts.sum(
            Amounts(*(part.count * dim for dim in part.each.row)) for part in self.parts
        )

    def at(self, rows: ArrayLike, sequence: ArrayLike = 0) -> dict[str, NDArray[np.float64]]:
        """The whole model's amounts by their names, for many micro-batches at once.

        Args:
            rows, sequence: arrays that broadcast; a length only where it is a symbol.
        """
        evaluate = sympy.lambdify((BATCH, SEQUENCE), self.total.row, "numpy")
        amounts = evaluate(np.asarray(rows, float), np.asarray(sequence, float))
        shape = np.broadcast_shapes(np.shape(rows), np.shape(sequence))
        return {
            field.name: np.broadcast_to(values, shape)
            for field, values in zip(fields(Amounts), amounts, strict=True)
        }


@collector_paused()
def cost_formulas(
    model: Source,
    inputs: Any,
    *,
    loss: Loss | None = None,
    precision: str = "fp32",
    tp: int = 1,
    cluster: str | Path | Cluster | None = None,
    say: Say | None = None,
) -> Formulas:
    """Trace a model and compute its cost formulas.

    Args:
        model, inputs, loss, precision: as for `autopipe.plan`.
        tp: the number of tensor-parallel ranks; the costs are those of the first one's part.
        cluster: the cluster for whose links the sharding is optimal; as for `autopipe.plan`.
        say: gets a line of talk at a time.

    Raises:
        ModelError: the inputs do not fit the model, or (CaptureError) it cannot be captured.
        InfeasibleError: the model does not divide into `tp` parts, or there are fewer devices.
    """
    arguments.refuse_unknown("precision", precision, PRECISIONS)
    example, specs = arguments.example_of(inputs)
    with phase("tracing"):
        pair = two_rows(example, specs)
        traced = trace_lengths(model, pair, specs, loss, kept(precision))
    graph, blocks = traced.trace.graph, find_blocks(traced.trace.graph)
    if tp > 1:
        check_degree(graph, tp)
        say = say or (lambda line: None)
        devices = arguments.cluster_meant(cluster, (tp,), say)
        machine = arguments.measured(devices, need(graph, precision), say)
        degrees(machine, tp, graph)
        graph, blocks = _of_first_rank(traced, blocks, tp, machine)
    with as_first(tp), phase("costs of each node"):
        nodes = _by_node(graph, blocks, traced.longest, precision, tp)
    return Formulas(
        dict(zip((node.name for node in graph.nodes), nodes, strict=True)),
        tuple(_parts(graph, blocks, nodes)),
        traced.longest,
        traced.why,
    )


def _of_first_rank(
    traced: Lengths, blocks: tuple[Block, ...], tp: int, cluster: Cluster
) -> tuple[Graph, tuple[Block, ...]]:
    """The graph of the first rank, by the best sharding for the longest sequence."""
    graph = traced.trace.graph
    fixed = graph if traced.longest is None else with_tokens(graph, traced.longest)
    trace = replace(traced.trace, graph=fixed)
    kind = slowest_kind(tp_groups(cluster, tp))
    degree = as_one_rank(tp, trace, analyse(fixed), blocks, cluster, ROWS[0], slowest=kind)
    assert degree.sharding is not None
    sharded = shard_graph(shardable(graph), degree.sharding, 0, length=traced.longest)
    return sharded, degree.blocks


def _by_node(
    graph: Graph, blocks: Sequence[Block], length: int | None, precision: str, tp: int
) -> list[Amounts]:
    """The amounts of every node; of equal blocks only a few are costed and run."""
    flow = analyse(graph)
    saved_by_node: dict[int, list[Dim]] = defaultdict(list)
    for short in shortened(flow, blocks):
        try:
            for storage, formula in _storages(short, length, precision):
                for each in short.along(storage):
                    saved_by_node[each.made].append(formula)
            break
        except Uneven:
            saved_by_node.clear()
    owned: dict[int, list[Dim]] = defaultdict(list)
    for name, state in graph.states.items():
        owned[flow.users[State(name)][0]].append(state.held.bytes)
    costs = op_costs.costs(short.graph)
    sent = [
        tuple(sympy.nsimplify(move.sent(size, tp)) if move else 0 for move in moves)
        for moves, size in exchanges(short.graph, tp, precision)
    ]
    return [
        Amounts(
            sympy.Add(*owned[position]),
            costs[like].forward_flops,
            costs[like].backward_flops,
            costs[like].forward_bytes,
            costs[like].backward_bytes,
            sympy.Add(*saved_by_node[position]),
            *sent[like],
        )
        for position, like in enumerate(short.like.tolist())
    ]


def _storages(short: Short, length: int | None, precision: str) -> list[tuple[Storage, Dim]]:
    """The storages that autograd keeps of a short graph, each with its bytes as a formula.

    Raises:
        Uneven: the short graph does not tell.
    """

    def seen(rows: int, tokens: int) -> tuple[tuple[Storage, ...], tuple[int, ...]]:
        fixed = short.graph if length is None else with_tokens(short.graph, tokens)
        found = observe_saved(replace(short, graph=fixed), precision, rows)
        return found.storages, found.bytes

    lengths = [0] if length is None else [length // share for share in SHARES]
    points = list(product(ROWS, lengths))
    rows, (some, of) = CHECK
    other = rows, length * some // of if length is not None else 0
    runs = []
    with phase("counting bytes kept for backward", of=len(points) + 1) as done:
        for point in (*points, other):
            runs.append(seen(*point))
            done()
    storages = runs[0][0]
    if any(found != storages for found, _ in runs):
        return [(storage, sympy.nan) for storage in storages]
    fit = cache(lambda values: _through(points, values, other))
    columns = zip(*(sizes for _, sizes in runs), strict=True)
    return [(storage, fit(values)) for storage, values in zip(storages, columns, strict=True)]


def _through(
    points: Sequence[tuple[int, int]], values: tuple[int, ...], other: tuple[int, int]
) -> Dim:
    """The formula through values at some points; nan if it misses the last value, at `other`."""
    powers = [
        BATCH**i * SEQUENCE**j for i in range(len(ROWS)) for j in range(len(points) // len(ROWS))
    ]
    basis = sympy.lambdify((BATCH, SEQUENCE), powers, "math")
    matrix = sympy.Matrix([basis(*point) for point in points])
    factors = matrix.LUsolve(sympy.Matrix(values[:-1]))
    formula = sympy.Add(*(factor * power for factor, power in zip(factors, powers, strict=True)))
    predicted = formula.subs(dict(zip((BATCH, SEQUENCE), other, strict=True)))
    return formula if predicted == values[-1] else sympy.nan


def _parts(graph: Graph, blocks: Sequence[Block], nodes: Sequence[Amounts]) -> Iterator[ModelPart]:
    """Parts: rows of blocks that cost the same, and the modules around them."""
    inside = {p: block for block in blocks for p in range(block.first, block.stop)}
    members: dict[Block | str, list[Amounts]] = defaultdict(list)
    for position, (node, amounts) in enumerate(zip(graph.nodes, nodes, strict=True)):
        around = node.scopes[-1] if node.scopes else "the model itself"
        members[inside.get(position, around)].append(amounts)
    sums = [(place, Amounts.sum(own)) for place, own in members.items()]
    for (is_block, each), group in groupby(sums, lambda one: (isinstance(one[0], Block), one[1])):
        names = [place.path if isinstance(place, Block) else place for place, _ in group]
        if is_block and len(names) > 1:
            yield ModelPart(f"{names[0]} to {names[-1].rpartition('.')[2]}", len(names), each)
        else:
            yield from (ModelPart(name, 1, each) for name in names)
