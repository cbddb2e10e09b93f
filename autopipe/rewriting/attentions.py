"""Find the attentions that are written out as products and a softmax.

    q ──┐              scale   mask            cast      dropout
    k'──┴─ product ──── mul ── add ── softmax ── to ── dropout ──┐
    v ───────────────────────────────────────────────────────────┴─ product ── o

Each must equal one `scaled_dot_product_attention`: nothing else reads its intermediate results, and
its mask, if any, carries no gradient and either sets scores to a number or adds zeros and minus
infinities. An attention that adds anything else is left alone: if all keys of a query are at -1e9,
the kernels' statistic, a log of a sum, is -1e9 too, and their gradients are wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, is_random, maker, read_once
from autopipe.ir.graph import Graph, Input, Node, Ref, State, Value, arguments, once

LOWEST = -1e4
"""What scores are set to at most where they are masked: beside others it weighs nothing."""

_CASTS = frozenset("to _to_copy".split())


@dataclass(frozen=True)
class Mask:
    """A mask of scores, applied before their softmax.

    Attributes:
        value: the added tensor of zeros and minus infinities; or booleans, which say where scores
            are set to `low`.
        low: the number that masked scores are set to; None: `value` is added.
        kept: whether scores stay where the booleans are true; else where they are false.
    """

    value: Value
    low: float | None = None
    kept: bool = False


@dataclass(frozen=True)
class Scores:
    """The input of a softmax: a product of queries and transposed keys, scaled, then masked.

    `nodes` are those that compute it, the product first.
    """

    query: Value
    transposed: Value
    scale: float
    mask: Mask | None
    nodes: tuple[Node, ...]

    def through(self, node: Node) -> Scores:
        """These scores with one more node."""
        return replace(self, nodes=(*self.nodes, node))


@dataclass(frozen=True)
class Attention:
    """An attention that is written out.

    Attributes:
        query, key, value: [.., s, d], [.., t, d], [.., t, e]; of three dims or four.
        after: the nodes from the softmax on, of which the last one makes the result.
        dropout: the random node among them, or None.
    """

    query: Value
    key: Value
    value: Value
    scores: Scores
    after: tuple[Node, ...]
    dropout: Node | None

    @property
    def last(self) -> Node:
        """The node that makes the result."""
        return self.after[-1]


@once
def attentions(graph: Graph) -> tuple[Attention, ...]:
    """The attentions that are written out, in order."""
    flow = analyse(graph)
    found = (_attention(flow, node) for node in graph.nodes if node.short == "softmax")
    return tuple(attention for attention in found if attention is not None)


def _attention(flow: Dataflow, softmax: Node) -> Attention | None:
    """The attention around a softmax; None: there is none, or no single op equals it."""
    given, output = arguments(softmax), softmax.outputs[0]
    assert output is not None
    rank = max(len(output.shape), 1)  # softmax takes a scalar, too
    if given["dim"] % rank != rank - 1:
        return None
    scores, after = _scores(flow, given["self"]), _to_product(flow, softmax)
    if scores is None or not after:
        return None
    key = _before_transpose(flow.graph, scores.transposed, grad=softmax.grad)
    random = [node for node in after if is_random(node)]
    if key is None or len(random) > 1:
        return None
    dropout = random[0] if random else None
    found = Attention(scores.query, key, after[-1].values()[1], scores, after, dropout)
    return found if _equals_one_op(flow, found) else None


def _equals_one_op(flow: Dataflow, found: Attention) -> bool:
    """Whether the op's kernels compute the same, in the same dtype and under the same modes."""
    graph, output, mask = flow.graph, found.last.outputs[0], found.scores.mask
    looks = [graph.spec(each) for each in (found.query, found.key, found.value)]
    if output is None or {look.dtype for look in looks} != {output.dtype}:
        return False
    if found.scores.scale <= 0:
        return False  # flash attention takes the largest score before it multiplies
    if len({look.shape[:-2] for look in looks}) > 1 or len(output.shape) not in (3, 4):
        return False
    nodes = (*found.scores.nodes, *found.after)
    if len({(node.grad, node.autocast, node.again) for node in nodes}) > 1:
        return False
    begin = graph.index[nodes[0].name]
    read = (found.query, found.key, found.value, *([mask.value] if mask is not None else ()))
    if any(p > begin for value in read for p in flow.writers.get(flow.root[value], ())):
        return False  # the one op reads later than they did
    if any(reader.short == "view" for reader in _readers(flow, found.last)):
        return False  # which takes the result in the layout of a product's
    if mask is None:
        return True
    look = graph.spec(mask.value)
    dtype = output.dtype if mask.low is None else torch.bool
    return look.dtype == dtype and len(look.shape) in (2, len(output.shape))


def _scores(flow: Dataflow, value: object) -> Scores | None:
    """The scores that a value is, if nothing else reads it; None: it is none."""
    node = read_once(flow, value)
    if node is None:
        return None
    given = arguments(node)
    match node.short:
        case "matmul" | "bmm":
            query, transposed = node.values()
            return Scores(query, transposed, 1.0, None, (node,))
        case "baddbmm" if given["beta"] in (0, 1):
            plain = Scores(given["batch1"], given["batch2"], float(given["alpha"]), None, (node,))
            if not given["beta"]:
                return plain
            added = given["self"]
            return replace(plain, mask=Mask(added)) if _masks(flow, added) else None
        case "to" | "_to_copy" if _is_cast(node):
            found = _scores(flow, node.args[0])
            return found and found.through(node)
        case "mul" | "div" if given.get("rounding_mode") is None:
            return _scaled(flow, node)
        case "add" if given["alpha"] == 1:
            a, b = node.args[:2]
            for scores, mask in ((a, b), (b, a)):
                if _masks(flow, mask):
                    return _masked(flow, node, scores, mask, None)
        case "masked_fill":
            return _masked(flow, node, given["self"], given["mask"], given["value"])
        case "where" if "other" in given:
            chosen, where, other = given["self"], given["condition"], given["other"]
            found = _masked(flow, node, chosen, where, other, kept=True)
            return found or _masked(flow, node, other, where, chosen)
    return None


def _scaled(flow: Dataflow, node: Node) -> Scores | None:
    """Scores multiplied or divided by a number, before any mask."""
    a, b = node.args[:2]
    if node.short == "mul" and not isinstance(a, Ref):
        a, b = b, a
    factor, found = _number(flow, b), _scores(flow, a)
    if not factor or found is None or found.mask is not None:
        return None
    scale = found.scale * factor if node.short == "mul" else found.scale / factor
    return replace(found.through(node), scale=scale)


def _masked(
    flow: Dataflow, node: Node, scores: object, mask: object, low: object, *, kept: bool = False
) -> Scores | None:
    """Scores with a mask, which carries no gradient and is no larger than they are."""
    if not isinstance(mask, Ref | Input | State) or mask in gradient_values(flow.graph):
        return None
    found, number = _scores(flow, scores), _number(flow, low)
    if found is None or found.mask is not None:
        return None
    if low is not None and (number is None or number > LOWEST):
        return None
    after, before = node.outputs[0], found.nodes[-1].outputs[0]
    if after is None or before is None or after.shape != before.shape:
        return None
    return replace(found.through(node), mask=Mask(mask, number, kept))


def _masks(flow: Dataflow, value: object) -> bool:
    """Whether a value is known to have no entries but zeros and minus infinities."""
    if not isinstance(value, Ref):
        return False
    graph, position, root = flow.graph, flow.position(value), flow.root[value]
    node, writers = graph.nodes[position], flow.writers.get(root, ())
    if writers:
        writer = graph.nodes[writers[0]]
        alone = len(writers) == 1 and writers[0] <= position and writer.short == "masked_fill_"
        return alone and _filled(flow, root, 0.0) and _number(flow, writer.args[2]) == -math.inf
    given = arguments(node)
    match node.short:
        case "masked_fill":
            number = _number(flow, given["value"])
            return _all_of(flow, given["self"], 0.0) and number == -math.inf
        case "where" if "other" in given:
            return {_number(flow, given[n]) for n in ("self", "other")} == {0.0, -math.inf}
        case "triu" | "tril":
            return _all_of(flow, node.args[0], -math.inf)
        case "to" | "_to_copy" | "view" | "reshape" | "expand" | "unsqueeze" | "slice" | "clone":
            return _masks(flow, node.args[0])
    return False


def _all_of(flow: Dataflow, value: object, number: float) -> bool:
    """Whether a tensor has one number alone."""
    written = isinstance(value, Ref) and flow.root[value] in flow.writers
    return not written and _filled(flow, value, number)


def _filled(flow: Dataflow, value: object, number: float) -> bool:
    """Whether a tensor is made of one number alone; it may have others where it is written."""
    node = maker(flow.graph, value)
    if node is None:
        return False
    if node.short in ("zeros", "zeros_like", "new_zeros"):
        return number == 0.0
    filled = node.short in ("full", "full_like", "new_full")
    return filled and _number(flow, arguments(node)["fill_value"]) == number


def _to_product(flow: Dataflow, softmax: Node) -> tuple[Node, ...]:
    """The nodes from a softmax to the product of its result and values; empty: there is none."""
    found = [softmax]
    while True:
        readers = _readers(flow, found[-1])
        if len(readers) != 1 or read_once(flow, Ref(found[-1].name)) is None:
            return ()
        (node,) = readers
        if node.short in ("matmul", "bmm"):
            (weights, values), mine = node.values(), Ref(found[-1].name)
            return (*found, node) if weights == mine and values != mine else ()
        if not _is_cast(node) and node.short != "dropout":
            return ()
        found.append(node)


def _is_cast(node: Node) -> bool:
    """Whether a node gives the same numbers to a rounding: integers are something else."""
    after = node.outputs[0]
    return node.short in _CASTS and after is not None and after.dtype.is_floating_point


def _readers(flow: Dataflow, node: Node) -> list[Node]:
    """The nodes that read what a node makes."""
    nodes = flow.graph.nodes
    return [nodes[p] for p in flow.users.get(Ref(node.name), ()) if p < len(nodes)]


def _before_transpose(graph: Graph, value: Value, *, grad: bool) -> Value | None:
    """The value of which this one is the transpose in the last two dims; None: there is none.

    Args:
        grad: whether gradients are recorded where the transpose is read, and so must be here.
    """
    node = maker(graph, value)
    if node is None or node.grad != grad:
        return None
    rank = len(graph.spec(value).shape)
    if node.short == "transpose":
        given = arguments(node)
        swapped = {given["dim0"] % rank, given["dim1"] % rank} == {rank - 2, rank - 1}
    elif node.short == "permute":
        order = [dim % rank for dim in arguments(node)["dims"]]
        swapped = order == [*range(rank - 2), rank - 1, rank - 2]
    else:
        swapped = node.short == "mT"
    return node.values()[0] if swapped else None


def _number(flow: Dataflow, arg: object) -> float | None:
    """The number that an argument is: itself, or a constant or a `full` of no dims."""
    if isinstance(arg, int | float) and not isinstance(arg, bool):
        return float(arg)
    if not isinstance(arg, Ref | State) or flow.root[arg] in flow.writers:
        return None
    if isinstance(arg, State):
        tensor = flow.graph.constants.get(arg.name)
        return float(tensor) if tensor is not None and tensor.ndim == 0 else None
    node = maker(flow.graph, arg)
    given = arguments(node) if node and node.short in ("full", "scalar_tensor") else {}
    if not given or given.get("size"):
        return None
    number = _number(flow, given.get("fill_value", given.get("s")))
    return None if number is None else float(torch.tensor(number, dtype=flow.graph.spec(arg).dtype))
