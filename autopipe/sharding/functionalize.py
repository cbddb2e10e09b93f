"""Replace ops in place by ops that make a new tensor, where the results stay equal.

    y = conv(x)                y = conv(x)
    z = relu_(y)          ->   z = relu(y)           no later node reads y
    w = add(z, x)              w = add(z, x)

A tensor that shares memory with a written one cannot be sharded by itself, so this pass runs before
tensor parallelism; without sharding, ops in place save memory and stay. Names are kept.

An op stays in place if an earlier value in the same memory is read after it, if the memory belongs
to the batch or the model, or if the new op would give another dtype.
"""

from __future__ import annotations

from dataclasses import replace

from autopipe.ir import check
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, is_random
from autopipe.ir.graph import Graph, Node, Ref, State, Value, resolve
from autopipe.ir.torch_private import writes
from autopipe.sharding.strategies import is_pointwise


def out_of_place(graph: Graph) -> Graph:
    """The same graph with as few ops in place as possible."""
    flow = analyse(graph)
    if not flow.writers:
        return graph
    last = _last_reads(flow)
    carrying = gradient_values(graph)
    nodes = tuple(_made_new(flow, node, last, carrying) for node in graph.nodes)
    return check.after("functionalize", replace(graph, nodes=nodes))


def _last_reads(flow: Dataflow) -> dict[Value, dict[int, int]]:
    """For each written storage: the positions that make its values -> the last reader of each."""
    found: dict[Value, dict[int, int]] = {root: {} for root in flow.writers}
    for value, readers in flow.users.items():
        reads = found.get(flow.root[value])
        if reads is not None:
            made = flow.position(value)
            reads[made] = max(readers[-1], reads.get(made, -1))
    return found


def _made_new(
    flow: Dataflow,
    node: Node,
    last: dict[Value, dict[int, int]],
    carrying: frozenset[Ref | State],
) -> Node:
    """The node with its op out of place, or the unchanged node."""
    twin = node.op.replace("_.", ".", 1)
    if twin == node.op or writes(resolve(node.op)) != (0,) or not node.outputs:
        return node
    written, made = node.args[0], node.outputs[0]
    if not isinstance(written, Ref) or not isinstance(flow.root[written], Ref) or made is None:
        return node
    at = flow.graph.index[node.name]
    old = any(begin < at < end for begin, end in last[flow.root[written]].items())
    # Written without autograd, a tensor keeps its history; a new one would have none.
    cut = not node.grad and written in carrying
    # In place the result has the dtype of what is written, out of place the wider one of all.
    dtypes = {flow.graph.spec(value).dtype for value in node.values()}
    same = dtypes == {made.dtype} or node.op.startswith("aten.masked_fill_.")
    cast = node.autocast is not None and node.autocast.enabled
    if old or cut or cast or not same or is_random(node):
        return node
    new = replace(node, op=twin)
    return new if _exists(twin) and is_pointwise(new) else node


def _exists(op: str) -> bool:
    try:
        return not writes(resolve(op))
    except AttributeError:
        return False
