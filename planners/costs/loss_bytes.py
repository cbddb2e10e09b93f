"""Bytes that the loss of a large vocabulary has for a moment, beside what is kept of it.

    logits ----log_softmax----> logarithms (kept) ----nll_loss----> loss
    d logits <---------------- d logarithms <----------------------          both at once

What autograd keeps is observed (`saved_tensors`); this comes and goes within one op's backward. Of
logits of 32,000 words it was nearly all that an H200 held beside a plan's bytes (benchmarks/gpu).
Of a backward that runs compiled all is counted that its ops make, and this with it
(`joint.fullest_call`); only what one op of ours has within it comes on top.
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
    """Of each of the nodes the bytes that it has for a moment as a loss, in b and s; else 0.

    Args:
        compiled: whether its backward runs as compiled graphs.
    """
    nodes = (graph.nodes[position] for position in positions)
    found = (None if compiled and node.short != IN_PARTS else _made(graph, node) for node in nodes)
    return [GRADIENTS * spec.bytes if spec is not None else 0 for spec in found]


def passing_of(graph: Graph, units: Units, *, compiled: bool) -> Callable[[int], tuple[int, ...]]:
    """For so many rows the most that a node of each unit has."""
    sizes = loss_bytes(graph, range(len(graph.nodes)), compiled=compiled)

    def at(rows: int) -> tuple[int, ...]:
        each = [at_batch(size, rows) for size in sizes]
        return tuple(np.maximum.reduceat(each, units.starts).tolist())

    return at


def _made(graph: Graph, node: Node) -> TensorSpec | None:
    """What a node of a loss makes of its logits."""
    if node.short == "cross_entropy_loss":
        return graph.spec(node.values()[0])
    if node.short == "log_softmax":
        return node.outputs[0]
    if node.op == "autopipe.largest.default":  # of words that tensor-parallel ranks share out
        most = maker(graph, node.values()[0])
        return graph.spec(most.values()[0]) if most is not None else None
    if node.short == IN_PARTS:  # from a part of its columns at a time
        given = arguments(node)
        rows = sympy.prod(graph.spec(given["target"]).shape)
        dtype = wide(graph.spec(given["weight"]).dtype)
        return TensorSpec((rows, given["width"]), dtype)
    return None
