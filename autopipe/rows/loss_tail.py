"""Find where a graph's loss begins to compare rows with each other.

    batch --model--> [b, d] --normalize--> e [b, d]  |  e e' [b, b] --cross_entropy--> loss
                     each row by itself              |  tail: rows beside each other

The tail begins behind the last ops with parameters; ops behind them that compute each row from that
row alone, such as a norm or a mean over tokens, are left before it, as they make less to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sympy
import torch

from autopipe.ir.dataflow import Dataflow, is_random
from autopipe.ir.graph import (
    BATCH,
    Graph,
    Node,
    Ref,
    State,
    arguments,
    resolve,
    values_in,
)
from autopipe.ir.torch_private import writes
from autopipe.rows.row_dims import OF_DIMS, SAME_ROWS, rows_dim, symbols


@dataclass(frozen=True)
class LossNodes:
    """The nodes from which a loss is computed, back to the last ops with parameters.

    Attributes:
        needed: their positions, those of the last ops among them.
        last: the positions of the last ops.
    """

    needed: frozenset[int]
    last: frozenset[int]


def loss_nodes(flow: Dataflow) -> LossNodes:
    """Walk back from a graph's results to the last ops with parameters."""
    return _walked(flow, flow.graph.outputs)


def _walked(flow: Dataflow, results: Iterable[object]) -> LossNodes:
    graph = flow.graph
    needed: set[int] = set()
    last: set[int] = set()
    waiting = [flow.position(v) for v in values_in(tuple(results)) if isinstance(v, Ref)]
    while waiting:
        position = waiting.pop()
        if position in needed:
            continue
        node = graph.nodes[position]
        needed.add(position)
        if _is_last(graph, node):
            last.add(position)
            continue
        waiting += flow.just_before(position)
    return LossNodes(frozenset(needed), frozenset(last))


def _is_last(graph: Graph, node: Node) -> bool:
    """Whether a loss is not followed beyond a node: it has parameters, draws, or is batch norm.

    A value with two dims of rows (similarities of all pairs) cannot be cut into rows. A node that
    multiplies it by a parameter (a temperature) belongs to the loss.
    """
    if "batch_norm" in node.op or (is_random(node) and "dropout" not in node.op):
        return True
    reads = any(
        isinstance(v, State) and graph.states[v.name].kind == "parameter" for v in node.values()
    )
    twice = any(
        sum(isinstance(dim, sympy.Expr) for dim in spec.shape) > 1 for spec in node.outputs if spec
    )
    return reads and not twice


def tail(flow: Dataflow, results: Sequence[object]) -> frozenset[int]:
    """The positions of the nodes that compare rows, and of all that depends on them.

    What any stage can compute from the batch alone (`Dataflow.local`) is not among them.

    Args:
        results: the loss, or a sum and a count.
    """
    found = _walked(flow, results)
    before = flow.with_all_before(found.last)
    tail_nodes: set[int] = set()
    for position in range(len(flow.graph.nodes)):
        depends = any(p in tail_nodes for p in flow.just_before(position))
        in_loss = position in found.needed and position not in before
        if flow.local[position] or not (depends or in_loss):
            continue
        if depends or not _row_by_row(flow, flow.graph.nodes[position]):
            tail_nodes.add(position)
    return frozenset(tail_nodes)


def _row_by_row(flow: Dataflow, node: Node) -> bool:
    """Whether a node computes each row from that row alone, the rows in the first dim of all."""
    graph, output = flow.graph, node.outputs[0]
    op = resolve(node.op)
    if node.packed or output is None or rows_dim(output) != 0 or is_random(node) or writes(op):
        return False
    values = node.values()
    if any(flow.root[v] in flow.writers for v in (*values, Ref(node.name))):
        return False
    specs = [graph.spec(v) for v in values]
    with_rows = [s for s in specs if any(BATCH in symbols(dim) for dim in s.shape)]
    if any(rows_dim(s) != 0 or s.shape[0] != output.shape[0] for s in with_rows):
        return False
    if torch.Tag.pointwise in getattr(op, "tags", ()):
        return all(len(s.shape) == len(output.shape) for s in with_rows)
    if node.short in OF_DIMS:
        dims = arguments(node).get("dim")
        named = [dims] if isinstance(dims, int) else list(dims or ())
        rank = len(specs[0].shape)
        return bool(named) and all(isinstance(d, int) and d % rank != 0 for d in named)
    return node.short in SAME_ROWS
