"""Cost formulas of a graph whose memory-bound ops a compiler fuses.

    eager      linear   add      pow    mean   rsqrt   mul    mul    linear
    compiled   linear  |------------ one kernel -----------------|   linear
                        reads what comes in, writes what goes out

Between two products (or attentions, draws, collectives) of one block, all ops are one kernel:

    forward    bytes of the values that it reads, and of its results that other ops read
    backward   the same, and the gradients of the values that it reads; values that forward did not
               keep are computed again in the kernel, which moves no bytes

The first node carries the kernel's cost; the others cost nothing. A view moves nothing. Gradients
leave a compiled stage in their own dtype, and are added to their sums without a cast.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

import sympy

from autopipe.ir.dataflow import gradient_values, is_random
from autopipe.ir.graph import READ_OP, Dim, Graph, Node, Ref, State, Value, resolve, values_in
from autopipe.ir.op_costs import NodeCost
from autopipe.ir.opaque_ops import OPAQUE
from autopipe.ir.torch_private import views

NOTHING = sympy.Integer(0)


def fused(
    graph: Graph, costs: Sequence[NodeCost], segments: Sequence[Hashable]
) -> tuple[NodeCost, ...]:
    """The costs of a graph's nodes where each segment's memory-bound ops are fused.

    Args:
        costs: of the nodes one by one (`op_costs.costs`).
        segments: of each node the block that it is in; no kernel spans two.
    """
    found = [replace(cost, casts=(0, NOTHING)) if cost.casts[0] else cost for cost in costs]
    read_by = _readers(graph)
    for kernel in _kernels(graph, costs, segments):
        first, *rest = kernel
        found[first] = _kernel_cost(graph, costs, kernel, read_by)
        for position in rest:
            found[position] = _free(costs[position])
    return tuple(found)


def _kernels(
    graph: Graph, costs: Sequence[NodeCost], segments: Sequence[Hashable]
) -> Iterator[list[int]]:
    """Positions of the nodes of each kernel: neighbours without a product between them."""

    def key(position: int) -> tuple[bool, Hashable]:
        return _fuses(graph.nodes[position], costs[position]), segments[position]

    for (fuses, _), positions in groupby(range(len(graph.nodes)), key):
        if fuses:
            yield list(positions)


def _fuses(node: Node, cost: NodeCost) -> bool:
    return (
        node.op.startswith("aten.")
        and not cost.model_flops
        and node.op not in (READ_OP, *OPAQUE)
        and not is_random(node)
    )


def _readers(graph: Graph) -> dict[Value, list[int]]:
    """The positions of the nodes that read each value; the graph's end reads its outputs."""
    found: dict[Value, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        for value in node.values():
            found.setdefault(value, []).append(position)
    for value in values_in(tuple(graph.outputs)):
        found.setdefault(value, []).append(len(graph.nodes))
    return found


def _kernel_cost(
    graph: Graph,
    costs: Sequence[NodeCost],
    kernel: Sequence[int],
    readers: Mapping[Value, Sequence[int]],
) -> NodeCost:
    carrying = gradient_values(graph)
    base: dict[Value, Value] = {}
    """Of each value made here the one whose memory it is in: itself unless it is a view."""
    for position in kernel:
        node = graph.nodes[position]
        is_view = views(resolve(node.op)) and not node.short.endswith("_")
        for number, spec in enumerate(node.outputs):
            ref = Ref(node.name, number)
            if spec is not None and is_view:
                base[ref] = base.get(node.values()[0], node.values()[0])
            elif spec is not None:
                base[ref] = ref
    if not any(value == of for value, of in base.items()):
        return _free(costs[kernel[0]])  # views alone
    read = {base.get(v, v): None for p in kernel for v in graph.nodes[p].values()}
    inputs = [value for value in read if value not in base]
    last = kernel[-1]
    outputs = {base[v]: None for v in base if any(r > last for r in readers.get(v, ()))}
    moved = _bytes(graph, inputs) + _bytes(graph, [value for value in outputs if value in base])
    gradients = _bytes(graph, [value for value in inputs if value in carrying])
    carries = any(value in carrying for value in base)
    learns = any(isinstance(value, State) for value in inputs if value in carrying)
    return NodeCost(
        sum((costs[p].forward_flops for p in kernel), NOTHING),
        moved,
        sum((costs[p].backward_flops for p in kernel), NOTHING),
        moved + gradients if carries else NOTHING,
        (1, (1 + learns) if carries else 0),  # a parameter's gradient is a reduction of its own
        next(costs[p].dtype for p in kernel if costs[p].launches[0]),
        gradients=sum((costs[p].gradients for p in kernel), NOTHING),
    )


def _bytes(graph: Graph, values: Iterable[Value]) -> Dim:
    return sum((graph.spec(value).bytes for value in values), NOTHING)


def _free(cost: NodeCost) -> NodeCost:
    return NodeCost(NOTHING, NOTHING, NOTHING, NOTHING, (0, 0), cost.dtype)
