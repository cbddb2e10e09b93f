"""Divide a backward's calls into halves: those that the inputs' gradients need, and the others.

    dx = mm(dy, w)            the first half: another stage waits for it
    dw = mm(dy.t(), x)        the second, which is run when there is time

A call that makes gradients of both kinds, as of a convolution, becomes two.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import fx

from autopipe.joint.joint_graph import CannotSplit, JointGraph, storages, written
from autopipe.sharding.vocabulary_loss import BACKWARD


def halves(graph: JointGraph) -> tuple[list[fx.Node], list[fx.Node]]:
    """The backward's calls that the arguments' gradients need, and the other useful calls."""
    gradients = [node for node in graph.of_arguments if node is not None]
    first = leading_to(gradients, graph.backward)
    calls = _halving(graph.backward, first)
    first = leading_to(gradients, calls)
    second = leading_to(graph.of_parameters.values(), calls) - first
    # The second half takes its part of a call's results in the first half, not all of them.
    parts = {node for node in second if node.target is operator.getitem and node.args[0] in first}
    first, second = first | parts, second - parts
    order = {node: number for number, node in enumerate(calls)}
    for writer in first:
        for reader in second if (over := written(writer)) else ():
            if order[reader] < order[writer] and over & storages(reader.all_input_nodes):
                raise CannotSplit(f"{writer.target} writes over what {reader.target} is to read")
    return [node for node in calls if node in first], [node for node in calls if node in second]


def leading_to(targets: Iterable[fx.Node], calls: Sequence[fx.Node]) -> set[fx.Node]:
    """The calls of `calls` that `targets` depends on.

    A call in place comes before later readers of its storage in the trace.
    """
    writers: dict[int, list[fx.Node]] = {}
    before: dict[fx.Node, list[fx.Node]] = {}

    def with_writers(nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return [*nodes, *(w for storage in storages(nodes) for w in writers.get(storage, ()))]

    for call in calls:
        before[call] = with_writers(call.all_input_nodes)
        for storage in written(call):
            writers.setdefault(storage, []).append(call)
    needed: set[fx.Node] = set()
    pending = with_writers(list(targets))
    while pending:
        node = pending.pop()
        if node in before and node not in needed:
            needed.add(node)
            pending += before[node]
    return needed


_OF_BOTH = torch.ops.aten.convolution_backward.default, BACKWARD
"""Ops of the gradients of input, weight and bias; the last argument says which are wanted."""


def is_of_both(node: fx.Node) -> bool:
    """Whether a call makes the gradients of an input and of weights, and becomes two."""
    if node.target not in _OF_BOTH:
        return False
    mask: Any = node.args[-1]
    return bool(mask[0] and any(mask[1:]))


def _halving(calls: Sequence[fx.Node], first: Collection[fx.Node]) -> list[fx.Node]:
    """The calls, with each call of `_OF_BOTH` in the first half made two: for input, for weights.

    There the weight's gradient costs as much as the input's. A norm stays one call: a second one
    would hold the activations and read them again, for the gradients of two vectors.
    """
    made: list[fx.Node] = []
    for node in calls:
        made.append(node)
        if node in first and is_of_both(node):
            mask: Any = node.args[-1]
            with node.graph.inserting_after(node):
                other = node.graph.node_copy(node)
            node.args = (*node.args[:-1], [True, False, False])
            other.args = (*other.args[:-1], [False, *mask[1:]])
            for part in list(node.users):
                if part.args[1] != 0:
                    part.replace_input_with(node, other)
            made.append(other)
    return made
