"""Bytes that exist only within the backward of a loss over a large vocabulary.

    logits ----log_softmax----> logarithms (kept) ----nll_loss----> loss
    d logits <---------------- d logarithms <----------------------          both at once

Bytes that autograd saves are observed (`saved_tensors`); these come and go within one op's
backward. For logits of 32,000 words they were nearly all that an H200 held beside a plan's bytes
(benchmarks/gpu). In a compiled backward they are among the counted bytes of its ops
(`joint.fullest_call`); only those within a single op of autopipe's own are added here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import sympy

from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import maker
from autopipe.ir.graph import Dim, Graph, Node, TensorSpec, arguments, at_batch
from autopipe.sharding.vocabulary_loss import wide

GRADIENTS = 2
"""Of the logarithms and of the logits; each is as large as those."""

IN_PARTS = "vocabulary_loss"
"""Our op of a product and the loss of its result, which is never there as a whole."""


def loss_bytes(graph: Graph, positions: Iterable[int], *, compiled: bool) -> list[Dim]:
    """For each node the bytes that its backward holds as a loss, in b and s; 0 if it is no loss.

    Args:
        compiled: whether backward runs as compiled graphs.
    """
    nodes = (graph.nodes[position] for position in positions)
    found = (
        None if compiled and node.short != IN_PARTS else _loss_spec(graph, node) for node in nodes
    )
    return [GRADIENTS * spec.bytes if spec is not None else 0 for spec in found]


def passing_of(graph: Graph, units: Units, *, compiled: bool) -> Callable[[int], tuple[int, ...]]:
    """The most bytes that a node of each unit has, at a number of rows."""
    sizes = loss_bytes(graph, range(len(graph.nodes)), compiled=compiled)

    def at(rows: int) -> tuple[int, ...]:
        each = [at_batch(size, rows) for size in sizes]
        return tuple(np.maximum.reduceat(each, units.starts).tolist())

    return at


def _loss_spec(graph: Graph, node: Node) -> TensorSpec | None:
    """The shape and dtype of the tensor that a loss node makes from its logits; None: no loss."""
    if node.short == "cross_entropy_loss":
        return graph.spec(node.values()[0])
    if node.short == "log_softmax":
        return node.outputs[0]
    if node.op == "autopipe.largest.default":  # of words that tensor-parallel ranks share out
        most = maker(graph, node.values()[0])
        return graph.spec(most.values()[0]) if most is not None else None
    if node.short == IN_PARTS:  # from a part of its columns at a time
        args = arguments(node)
        rows = sympy.prod(graph.spec(args["target"]).shape)
        dtype = wide(graph.spec(args["weight"]).dtype)
        return TensorSpec((rows, args["width"]), dtype)
    return None
