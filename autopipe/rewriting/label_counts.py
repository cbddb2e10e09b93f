"""Find losses that are a mean over labels, and make the graph that counts these labels.

    loss    labels, logits --cross_entropy(ignore_index=-100)--> mean --*0.5--> loss
            mask, errors ----(errors * mask).sum() / mask.sum()-> mean --------> loss
    counts  labels --ne(-100), sum--> count                or   mask --sum--> count

Micro-batches may have unequally many labels. The loss of the whole batch is then not the mean of
their losses, but

    loss = sum over micro-batches k of  loss_k * divisor_k / divisor      divisor = f(count)
                                                                          count = sum of count_k

with f(count) = count, or max(count, least) + more where the model's code guards a count of zero.
The labels come with the batch, so each divisor is known before the model has run.

A mean over labels may also be one term of a loss, beside the balance of a mixture's experts. A term
cannot be weighed alone: it is right only if all micro-batches have equally many labels.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import sympy
import torch
from torch import Tensor

from autopipe.ir import check
from autopipe.ir.dataflow import Dataflow, analyse, is_random
from autopipe.ir.graph import (
    BATCH,
    Arg,
    Dim,
    Graph,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    arguments,
    of_nodes,
    short_name,
    values_in,
)
from autopipe.rewriting.logits import LOSSES
from autopipe.sharding.vocabulary_loss import MEAN, SUM


@dataclass(frozen=True)
class LabelCounts:
    """The labels that a loss, or terms of it, are means over.

    Attributes:
        graph: computes from the batch alone `(divisor, count)` of a micro-batch, two scalars; or
            the counts of all terms.
        labels: shape and dtype of the counted tensor; no count exceeds its elements.
        least, more: the divisor is max(count, least) + more.
        place: the user's line that computes the mean.
        terms: whether the means are terms of the loss, beside other terms.
    """

    graph: Graph
    labels: TensorSpec
    least: float
    more: float
    place: str
    terms: bool = False

    def beside(self, graph: Graph) -> Graph:
        """The loss's graph with these counts as further results."""
        new = (node for node in self.graph.nodes if node.name not in graph.index)
        outputs = (*graph.outputs, *self.graph.outputs)
        return replace(graph, nodes=(*graph.nodes, *new), outputs=outputs)


_MEANS = LOSSES | {"nll_loss2d"}
_MOVES = frozenset("view reshape squeeze clone alias contiguous to _to_copy".split())
_LINEAR = frozenset("mul div neg add sub".split())
"""Ops that, with numbers beside the loss, keep a mean a mean."""


class _Divisor(NamedTuple):
    """A loss's divisor, the sum in it, the counted tensor, and how the divisor follows from it."""

    value: Value
    sum: Value
    labels: Value
    least: float = 0.0
    more: float = 0.0


def label_counts(graph: Graph, others: int = 0) -> LabelCounts | None:
    """Find the labels that a graph's loss is a mean over; None: it is no such mean.

    Args:
        others: how many of the graph's results follow the loss.
    """
    if len(graph.outputs) != 1 + others:
        return None
    flow = analyse(graph)
    mean = _made_by(flow, graph.outputs[0])
    if mean is not None and mean.short in _MEANS:
        return _of_labels(flow, mean)
    if mean is not None and mean.short == "div" and (found := _dividing(flow, mean)) is not None:
        return _counting(flow, found, mean, ())
    results = [flow.position(v) for v in values_in(graph.outputs[:1]) if isinstance(v, Ref)]
    before = (graph.nodes[p] for p in sorted(flow.with_all_before(results)))
    terms = [_term(flow, node) for node in before]
    return _all_terms(graph, [term for term in terms if term is not None])


def _term(flow: Dataflow, node: Node) -> LabelCounts | None:
    """The labels that a node is a mean over, if it is one."""
    if node.short in _MEANS:
        return _of_labels(flow, node)
    found = _dividing(flow, node) if node.short == "div" else None
    if found is None:
        return None
    return _counting(flow, found._replace(value=found.sum), node, ())  # a count is all of a term


def _dividing(flow: Dataflow, mean: Node) -> _Divisor | None:
    """The number of labels that a sum is divided by; None: the node is no sum divided by one."""
    if mean.kwargs or not _is_sum(flow, mean.args[0]):
        return None
    return _divisor(flow, mean.args[1])


def _is_sum(flow: Dataflow, value: Arg, writers: tuple[int, ...] | None = None) -> bool:
    """Whether a value is a multiple of a sum over elements, or several of these added up.

        total = 0.0
        for logits, labels in parts:
            total += F.cross_entropy(logits, labels, reduction="sum")

    Args:
        writers: the nodes before this one that write the value in place; None: all of them.
    """
    if not isinstance(value, Ref):
        return False
    position = flow.position(value)
    node = flow.graph.nodes[position]
    if writers is None:
        writers = flow.writers.get(flow.root[value], ())
    if writers and writers[-1] != position:  # it was written after it was made
        return False
    before = writers[:-1] if writers else None
    parts, name = node.values(), node.short.removesuffix("_")
    if name in _LINEAR | _MOVES and not {"rounding_mode", "alpha"} & node.kwargs.keys():
        if parts == node.args[:1]:
            return _is_sum(flow, parts[0], before)
        both = name in ("add", "sub") and len(parts) == 2
        return both and _is_sum(flow, parts[0], before) and _is_sum(flow, parts[1])
    return node.short == "sum" or arguments(node).get("reduction") == SUM


def leaving_out(leaves: Mapping[str, Any], read: Collection[str]) -> list[dict[str, Any]]:
    """Three variants of a batch in which some labels do not count.

    An example batch may count all its labels, and then does not show what a loss leaves out. In
    each variant a random part of the labels becomes a number that often means "no label" (0, -1,
    -100; of floats nan), and a mask of equal entries gets some of the other value. They are odd in
    number, and fewer than half of all: no two halves of the batch leave out equally many, and of
    several places none leaves out every one.

    Args:
        leaves: the batch by path.
        read: the paths that the loss reads.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for number in (0, -1, -100):
        changed = dict(leaves)
        for path in read:
            leaf = leaves[path]
            if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_complex():
                out = _some_of(leaf.shape, generator)
                if bool(((leaf == 0).all()) | (leaf == 1).all()):
                    changed[path] = torch.where(out, leaf == 0, leaf == 1).to(leaf.dtype)
                elif leaf.dtype != torch.bool:
                    none = math.nan if number == -100 and leaf.is_floating_point() else number
                    changed[path] = leaf.masked_fill(out, none)
        found.append(changed)
    return found


_LEFT_OUT = 0.3


def lower(leaves: Mapping[str, Any], read: Collection[str]) -> dict[str, Any]:
    """A variant of a batch whose later half has integers half as large: the lengths of an example
    may all be equal, so that its halves have the same longest row.

    Args:
        leaves, read: as for `leaving_out`.
    """
    changed = dict(leaves)
    for path in read:
        leaf = leaves[path]
        if isinstance(leaf, Tensor) and leaf.ndim and not leaf.is_complex():
            if not (leaf.dtype == torch.bool or leaf.is_floating_point()):
                half = len(leaf) // 2
                changed[path] = torch.cat([leaf[:half], leaf[half:] // 2])
    return changed


def _some_of(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """An odd number of places of this shape, fewer than half of them; of one or two, the first."""
    out = torch.rand(shape, generator=generator) < _LEFT_OUT
    first = out.view(-1)[0]
    if int(out.sum()) % 2 == 0:
        first.logical_not_()
    if 2 * int(out.sum()) >= out.numel():
        out.zero_()
        first.fill_(True)
    return out


def _all_terms(graph: Graph, terms: Sequence[LabelCounts]) -> LabelCounts | None:
    """The counts of all terms of a loss."""
    if not terms:
        return None
    nodes = {node.name: node for term in terms for node in term.graph.nodes}
    last = len(graph.nodes)
    order = sorted(nodes, key=lambda name: graph.index.get(name, last))  # what is added stays last
    counts = tuple(term.graph.outputs[1] for term in terms)
    counting = of_nodes(graph, tuple(nodes[name] for name in order), counts)
    return replace(terms[0], graph=check.after("label_counts", counting), terms=True)


def _made_by(flow: Dataflow, value: object) -> Node | None:
    """The node of whose result a value is a multiple."""
    while isinstance(value, Ref) and flow.root[value] not in flow.writers:
        node = flow.graph.nodes[flow.position(value)]
        linear = node.short in _LINEAR and not {"rounding_mode", "alpha"} & node.kwargs.keys()
        if node.values() != node.args[:1] or not (linear or node.short in _MOVES):
            return node
        value = node.args[0]
    return None


def _of_labels(flow: Dataflow, loss: Node) -> LabelCounts | None:
    """The labels of a cross-entropy but those that it ignores; each weighs as its class does."""
    given = arguments(loss)
    labels, weight = given["target"], given["weight"]
    spec = flow.graph.spec(labels)
    if given["reduction"] != MEAN or spec.dtype.is_floating_point:
        return None
    nodes: list[Node] = []

    def add(op: str, *args: Arg, shape: Sequence[Dim] = spec.shape, dtype: torch.dtype) -> Ref:
        look = TensorSpec(tuple(shape), dtype)
        name = f"label_counts/{loss.name}/{short_name(op)}/{len(nodes)}"
        nodes.append(Node(name, op, args, {}, (look,), packed=False, scopes=(), place=""))
        return Ref(name)

    counted = torch.int64
    kept = add("aten.ne.Scalar", labels, given["ignore_index"], dtype=torch.bool)
    if weight is not None:
        counted = flow.graph.spec(weight).dtype
        classes = add("aten.mul.Tensor", labels, kept, dtype=spec.dtype)
        each = add("aten.take.default", weight, classes, dtype=counted)
        kept = add("aten.mul.Tensor", each, kept, dtype=counted)
    count = add("aten.sum.default", kept, shape=(), dtype=counted)
    return _counting(flow, _Divisor(count, count, labels), loss, tuple(nodes))


def _divisor(flow: Dataflow, divisor: object) -> _Divisor | None:
    """A divisor that is a sum over the batch, with or without a guard against zero."""
    value, least, plus = divisor, 0.0, 0.0
    while isinstance(value, Ref) and isinstance(divisor, Ref):
        node = flow.graph.nodes[flow.position(value)]
        given = arguments(node)
        if node.short == "sum":
            (labels,) = node.values()
            has_rows = BATCH in _symbols(flow.graph.spec(labels))
            is_scalar = node.outputs[0] is not None and not node.outputs[0].shape
            return _Divisor(divisor, value, labels, least, plus) if has_rows and is_scalar else None
        if node.short in ("clamp", "clamp_min") and given.get("max") is None and not least:
            least = given["min"]
            number = isinstance(least, int | float)
        elif node.short == "add" and not (least or plus):
            plus = given["other"]
            number = isinstance(plus, int | float) and "alpha" not in node.kwargs
        else:
            number = node.short in _MOVES
        if not number or node.values() != node.args[:1]:
            return None
        value = node.args[0]
    return None


def _symbols(spec: TensorSpec) -> set[sympy.Basic]:
    return {s for dim in spec.shape if isinstance(dim, sympy.Expr) for s in dim.free_symbols}


def _counting(
    flow: Dataflow, found: _Divisor, loss: Node, extra: tuple[Node, ...]
) -> LabelCounts | None:
    """The graph of the counts; None: they depend on the model's results or on random numbers."""
    graph, added = flow.graph, {node.name for node in extra}
    end = graph.index[loss.name]
    waiting = [v for node in extra for v in node.values()] + [found.value, found.sum]
    needed: set[int] = set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, State) and graph.states[value.name].kind != "constant":
            return None
        if isinstance(value, Ref) and value.node in added:
            continue
        writers = flow.writers.get(flow.root[value], ())
        if any(p >= end for p in writers):
            return None
        for position in {flow.position(value), *writers} - {-1} - needed:
            if not _repeats(graph.nodes[position]):
                return None
            needed.add(position)
            waiting += graph.nodes[position].values()
    nodes = (*(graph.nodes[p] for p in sorted(needed)), *extra)
    counts = check.after("label_counts", of_nodes(graph, nodes, (found.value, found.sum)))
    labels = graph.spec(found.labels)
    return LabelCounts(counts, labels, found.least, found.more, loss.place)


def _repeats(node: Node) -> bool:
    """Whether a node is an op of torch's that gives the same when it is computed again."""
    return not (node.op.startswith("autopipe.") or is_random(node))
