"""Find the losses of large products: each a cross-entropy of logits that nothing else reads.

    x [.., h] --linear--> logits [.., v] --float, view, slice--> [rows, v] --cross_entropy--> loss
              product                    between                              loss

The nodes between product and loss only move whole rows and cast to wider dtypes, so the loss can be
computed from x without the logits (`rewriting.loss_in_parts`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopipe.ir.dataflow import Dataflow, analyse, read_once
from autopipe.ir.graph import (
    Graph,
    Node,
    TensorSpec,
    Value,
    arguments,
    bytes_at,
    once,
    values_in,
)
from autopipe.sharding.vocabulary_loss import MEAN, SUM

OF_ROWS = frozenset("view _unsafe_view reshape flatten contiguous clone slice".split())
"""Ops that can move or leave out rows of logits, and would do so with the rows of x."""

LOSSES = frozenset("cross_entropy_loss nll_loss nll_loss_nd".split())
_CASTS = frozenset("to _to_copy".split())
_TURNS = frozenset("transpose permute".split())
_TRANSPOSES = _TURNS | {"t", "numpy_T"}


@dataclass(frozen=True)
class Head:
    """A loss, the product that makes its logits, and the nodes between them, in order.

    Attributes:
        x, weight, bias: the product's operands: [..., h], [v, h], [v] or None.
        transposing: the node that transposes the weight, if there is one.
    """

    loss: Node
    between: tuple[Node, ...]
    product: Node
    x: Value
    weight: Value
    bias: Value | None
    transposing: Node | None

    def logits_bytes(self, rows: int) -> int:
        """Bytes of the logits in fp32 of a micro-batch of `rows` rows."""
        logits = self.product.outputs[0]
        assert logits is not None
        return bytes_at(TensorSpec(logits.shape, torch.float32), rows)


@once
def heads(graph: Graph) -> tuple[Head, ...]:
    """The losses of products, in order."""
    flow = analyse(graph)
    found = (_head(flow, node) for node in graph.nodes if node.short in LOSSES)
    return tuple(head for head in found if head is not None)


def _head(flow: Dataflow, loss: Node) -> Head | None:
    """The head of a loss; None: no product makes its logits, or something else reads them."""
    graph, given, between = flow.graph, arguments(loss), list[Node]()
    if given["weight"] is not None or given["reduction"] not in (MEAN, SUM):
        return None
    if given.get("label_smoothing"):
        return None
    if graph.spec(given["target"]).dtype != torch.int64:
        return None  # probabilities of all words, or bytes, which no op gathers by
    node = read_once(flow, given["self"])
    if node is not None and _turns(graph, node):
        between, node = [node], read_once(flow, node.args[0])
    elif len(graph.spec(given["self"]).shape) != 2:
        return None
    while node is not None and _keeps_columns(graph, node):
        between.insert(0, node)
        node = read_once(flow, node.args[0])
    logs = any(part.short == "log_softmax" for part in between)  # a second one changes nothing
    if loss.short != "cross_entropy_loss" and not logs:
        return None
    if node is None or node.autocast or loss.autocast:
        return None
    transposing, operands = None, list(values_in(node.args))
    if node.short in ("matmul", "mm") and len(operands) == 2:
        transposing = _transposing(flow, operands[1])
        operands[1:] = transposing.values() if transposing is not None else ()
    elif node.short != "linear":
        return None
    if len(operands) < 2 or operands[0] == operands[1]:
        return None
    parts = (*between, node, *([transposing] if transposing is not None else ()))
    if any(part.grad != loss.grad for part in parts):
        return None
    begin = graph.index[node.name]
    if any(p > begin for v in operands for p in flow.writers.get(flow.root[v], ())):
        return None  # parts of the loss read them later than the product did
    x, weight, *bias = operands
    if min(len(graph.spec(operand).shape) for operand in (x, weight)) < 2:
        return None
    if any(graph.spec(b).shape != graph.spec(weight).shape[:1] for b in bias):
        return None  # parts of the columns have no parts of one number for all, or of rows of them
    return Head(loss, tuple(between), node, x, weight, bias[0] if bias else None, transposing)


def _turns(graph: Graph, node: Node) -> bool:
    """Whether a node makes [b, v, s] of [b, s, v], the order in which `cross_entropy` takes it."""
    if node.short not in _TURNS:
        return False
    after, before = node.outputs[0], graph.spec(node.values()[0]).shape
    dims = _order(node, len(before))
    return after is not None and len(before) == 3 and dims == [0, 2, 1]


def _order(node: Node, rank: int) -> list[int]:
    """For each dim of a transposed tensor, the dim of its operand."""
    given, order = arguments(node), list(range(rank))
    if node.short == "permute":
        return [dim % rank for dim in given["dims"]]
    if node.short == "transpose":
        a, b = given["dim0"] % rank, given["dim1"] % rank
        order[a], order[b] = order[b], order[a]
        return order
    return order[::-1]


def _keeps_columns(graph: Graph, node: Node) -> bool:
    """Whether a node casts logits to a dtype at least as wide, or moves whole rows of them."""
    after, values = node.outputs[0], node.values()
    if after is None or len(values) != 1:
        return False
    before = graph.spec(values[0])
    if node.short in _CASTS:
        return after.dtype.is_floating_point and after.dtype.itemsize >= before.dtype.itemsize
    last = len(before.shape) - 1
    if node.short == "log_softmax":
        return bool(arguments(node)["dim"] % (last + 1) == last)
    if node.short == "slice" and arguments(node)["dim"] % (last + 1) == last:
        return False
    return node.short in OF_ROWS and after.shape[-1:] == before.shape[-1:]


def _transposing(flow: Dataflow, value: Value) -> Node | None:
    """The node that makes a matrix by transposing another, if nothing else reads it."""
    node = read_once(flow, value)
    if node is None or node.short not in _TRANSPOSES:
        return None
    rank = len(flow.graph.spec(node.values()[0]).shape)
    return node if rank == 2 and _order(node, rank) == [1, 0] else None
