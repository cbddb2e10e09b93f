"""Compute the losses of large products from parts of their columns, so that logits are never whole.

    x [rows, h] --linear--> logits [rows, v] --float--> fp32 --cross_entropy--> loss      as traced
    x [rows, h], w [v, h], target [rows] --vocabulary_loss--> loss                  after `in_parts`

`rewriting.logits` finds these losses; `sharding.vocabulary_loss` has the op.
"""

from __future__ import annotations

from dataclasses import replace

import sympy

from autopipe.ir import check
from autopipe.ir.graph import Graph, Node, Ref, TensorSpec, arguments
from autopipe.rewriting.logits import OF_ROWS, Head, heads
from autopipe.sharding.vocabulary_loss import LOSS, wide

WIDTH = 8192
"""Columns of a part by default: enough for an efficient product."""


def usual_parts(graph: Graph) -> int:
    """Parts of at most `WIDTH` columns of the largest vocabulary; 0: no loss is of a product."""
    return max((-(-_vocabulary(graph, head) // WIDTH) for head in heads(graph)), default=0)


def in_parts(graph: Graph, parts: int) -> Graph:
    """The graph whose cross-entropies of a product are computed from parts of its columns.

    Nodes keep their names; product and casts are gone. Logits that something else reads stay.

    Args:
        parts: how many; 0 leaves the graph as it is.
    """
    found: dict[str, list[Node]] = {}
    for head in heads(graph) if parts else ():
        found |= _rewritten(graph, head, parts)
    nodes = tuple(new for node in graph.nodes for new in found.get(node.name, [node]))
    return check.after("vocabulary_loss", replace(graph, nodes=nodes)) if found else graph


def _rewritten(graph: Graph, head: Head, parts: int) -> dict[str, list[Node]]:
    """The replacements of a head's nodes, by name."""
    found: dict[str, list[Node]] = {head.product.name: []}
    if head.transposing is not None:
        found[head.transposing.name] = []
    x, spec = head.x, graph.spec(head.x)
    for node in head.between:
        found[node.name] = []
        output = node.outputs[0]
        if node.short not in OF_ROWS or output is None:
            continue
        spec = TensorSpec((*output.shape[:-1], spec.shape[-1]), spec.dtype)
        row = replace(node, args=(x, *node.args[1:]), outputs=(spec,))
        if node.short not in ("slice", "contiguous", "clone"):
            row = replace(row, op="aten.reshape.default", args=(x, spec.shape), kwargs={})
        found[node.name], x = [row], Ref(node.name)
    loss, output = arguments(head.loss), head.loss.outputs[0]
    assert output is not None
    width = -(-_vocabulary(graph, head) // parts)
    how = loss["ignore_index"], loss["reduction"], output.dtype, width, 0, ""
    count = sympy.prod(graph.spec(loss["target"]).shape)
    each = TensorSpec((count,), wide(graph.spec(head.weight).dtype))
    args = (x, head.weight, head.bias, loss["target"], *how)
    found[head.loss.name] = [
        replace(head.loss, op=LOSS, args=args, kwargs={}, outputs=(output, each), packed=True)
    ]
    return found


def _vocabulary(graph: Graph, head: Head) -> int:
    return int(graph.spec(head.weight).shape[0])
