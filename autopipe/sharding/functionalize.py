"""Replace ops in place by ops that make a new tensor, where the results stay equal.

    y = conv(x)                y = conv(x)
    z = relu_(y)          ->   z = relu(y)           no later node reads y
    w = add(z, x)              w = add(z, x)

    k = new_empty(8, 96)
    copy_(k[:, :64], a)   ->   k = cat([a, b], 1)    the slices are all of k, each written once
    copy_(k[:, 64:], b)

A tensor that shares memory with a written one cannot be sharded by itself, so this pass runs before
tensor parallelism; without sharding, ops in place save memory and stay. Names are kept; `cat` has
that of the last copy.

An op stays in place if an earlier value in the same memory is read after it, if the memory belongs
to the batch or the model, or if the new op would give another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch

from autopipe.ir import check
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, is_random
from autopipe.ir.graph import Graph, Node, Ref, State, Value, arguments, resolve, swap, values_in
from autopipe.ir.torch_private import argument_types, writes
from autopipe.sharding.strategies import is_pointwise


def out_of_place(graph: Graph) -> Graph:
    """The same graph with as few ops in place as possible."""
    flow = analyse(graph)
    if not flow.writers:
        return graph
    graph = _put_together(flow)
    flow = analyse(graph)
    last = _last_reads(flow)
    carrying = gradient_values(graph)
    nodes = tuple(_out_of_place(flow, node, last, carrying) for node in graph.nodes)
    return check.after("functionalize", replace(graph, nodes=nodes))


def _put_together(flow: Dataflow) -> Graph:
    """The graph in which tensors that are filled slice by slice are made of what fills them."""
    graph = flow.graph
    values: dict[Value, Value] = {}
    instead: dict[str, Node | None] = {}
    for root, writers in flow.writers.items():
        filled = _filled(flow, root, writers)
        if isinstance(root, Ref) and filled is not None:
            slices, made = filled
            instead |= dict.fromkeys((root.node, *slices))
            instead |= {graph.nodes[position].name: None for position in writers}
            instead[made.name] = made
            values[root] = Ref(made.name)
    if not values:
        return graph
    left = (instead.get(node.name, node) for node in graph.nodes)
    nodes = tuple(node.reading(values) for node in left if node is not None)
    return replace(graph, nodes=nodes, outputs=swap(graph.outputs, values))


def _filled(flow: Dataflow, root: Value, writers: Sequence[int]) -> tuple[list[str], Node] | None:
    """How a blank tensor that is filled slice by slice becomes one `cat` of the slices' sources.

        out = empty(...); out[:, :4].copy_(a); out[:, 4:].copy_(b)    ->    out = cat([a, b], 1)

    Returns the names of the slices, and the `cat` that takes the place of the last copy; None where
    the copies do not fill the tensor exactly, or something else reads it before the last of them.
    """
    nodes, blank = flow.graph.nodes, flow.position(root)
    if blank < 0 or nodes[blank].short not in _BLANK:
        return None
    spec, last = flow.graph.spec(root), nodes[writers[-1]]
    parts: dict[int, tuple[int, Value]] = {}
    slices, dims = [], set[int]()
    for position in writers:
        copied = _copied(flow, root, position)
        if copied is None or nodes[position].grad != last.grad:
            return None
        slice_, source = copied
        args = arguments(slice_)
        dim = args["dim"] % len(spec.shape)
        size = spec.shape[dim]
        bounds = args["start"] or 0, args["end"]
        if args["step"] != 1 or not all(isinstance(n, int) for n in (*bounds, size)):
            return None
        parts[bounds[0]] = min(bounds[1], size), source
        slices.append(slice_.name)
        dims.add(dim)
    begins = sorted(parts)
    ends = [parts[begin][0] for begin in begins]
    readers = set(flow.users[root]) - {flow.graph.index[name] for name in slices}
    every = len(dims) == 1 and [*begins, size] == [0, *ends] and len(parts) == len(writers)
    if not every or min(readers, default=len(nodes)) < writers[-1]:
        return None
    sources = tuple(parts[begin][1] for begin in begins)
    return slices, replace(
        last, op="aten.cat.default", args=(sources, dim), kwargs={}, outputs=nodes[blank].outputs
    )


_BLANK = frozenset("empty new_empty empty_like zeros new_zeros zeros_like".split())
"""Ops whose values do not matter if the whole result is overwritten."""


def _copied(flow: Dataflow, root: Value, position: int) -> tuple[Node, Value] | None:
    """The slice of a tensor that a node copies into, and the source of the copy.

    None unless the slice has no other reader, the copy's result none, and the source has the
    slice's shape and dtype and is never written.
    """
    graph, node = flow.graph, flow.graph.nodes[position]
    target, source = (*values_in(node.args[:2]), None, None)[:2]
    if node.op != "aten.copy_.default" or target is None or source is None:
        return None
    slice_ = graph.nodes[flow.position(target)]
    alike = graph.spec(target) == graph.spec(source) and flow.root[source] not in flow.writers
    used = flow.users[target] == (position,) and Ref(node.name) not in flow.users
    if slice_.op != "aten.slice.Tensor" or slice_.args[0] != root or not (alike and used):
        return None
    return slice_, source


def _last_reads(flow: Dataflow) -> dict[Value, dict[int, int]]:
    """For each written storage: the positions that make its values -> the last reader of each."""
    found: dict[Value, dict[int, int]] = {root: {} for root in flow.writers}
    for value, readers in flow.users.items():
        reads = found.get(flow.root[value])
        if reads is not None:
            made = flow.position(value)
            reads[made] = max(readers[-1], reads.get(made, -1))
    return found


def _out_of_place(
    flow: Dataflow,
    node: Node,
    last: dict[Value, dict[int, int]],
    carrying: frozenset[Ref | State],
) -> Node:
    """The node with its op out of place, or the unchanged node."""
    if not node.outputs or writes(resolve(node.op)) != (0,):
        return node
    twin = _twin(node.op)
    if twin is None:
        return node
    written, result = node.args[0], node.outputs[0]
    if not isinstance(written, Ref) or not isinstance(flow.root[written], Ref) or result is None:
        return node
    at = flow.graph.index[node.name]
    old_value_read = any(begin < at < end for begin, end in last[flow.root[written]].items())
    # Written without autograd, a tensor keeps its history; a new one would have none.
    cut = not node.grad and written in carrying
    # In place the result has the written tensor's dtype, out of place the widest of all.
    dtypes = {flow.graph.spec(value).dtype for value in node.values()}
    same_dtype = dtypes == {result.dtype} or node.op.startswith("aten.masked_fill_.")
    if node.short.removesuffix("_") in _ANSWERS:
        same_dtype = result.dtype == torch.bool
    cast = node.autocast is not None and node.autocast.enabled
    if old_value_read or cut or cast or not same_dtype or is_random(node):
        return node
    twin_node = _by_its_twin(node, twin)
    return twin_node if is_pointwise(twin_node) else node


_ANSWERS = frozenset("eq ne lt le gt ge logical_and logical_or logical_xor logical_not".split())
"""Ops whose result is of booleans, where it does not stand in a tensor of another dtype."""


@cache
def _twin(op: str) -> str | None:
    """The op that computes from the same arguments what `op` writes in place; None: there is none.

    It may be another overload, or take them in another order: `pow_.Scalar` is x**2, which is
    `pow.Tensor_Scalar` while `pow.Scalar` is 2**x; `polygamma_(x, n)` is `polygamma(n, x)`.
    """
    space, name, _ = op.split(".")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    taken = argument_types(resolve(op))
    for overload in packet.overloads():
        twin = getattr(packet, overload)
        if not writes(twin) and argument_types(twin) == taken:
            return f"{space}.{name.removesuffix('_')}.{overload}"
    return None


def _by_its_twin(node: Node, twin: str) -> Node:
    """The node with the op out of place, its arguments in that op's order."""
    placed = dict(zip(argument_types(resolve(node.op)), node.args, strict=False))
    args = tuple(placed.pop(name) for name in argument_types(resolve(twin)) if name in placed)
    return replace(node, op=twin, args=args)
