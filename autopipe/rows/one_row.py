"""Whether a model whose code asks for a single row computes the same of one as of several.

    if batch_size != position_ids.shape[0]:                       an expand to one row gives what it
        position_ids = position_ids.expand(batch_size, -1)        is given: the graphs are alike

    x = x - x.mean(0) if len(x) > 1 else x                        they are not

A question that makes no difference is none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy

from autopipe.errors import AutopipeError
from autopipe.ir.fingerprint import digest_of
from autopipe.ir.graph import Arg, Graph, Node, Ref, Value, shape_at
from autopipe.tracing.traced import Trace
from autopipe.util import dims

_SHAPES = {
    "aten.alias.default",
    "aten.contiguous.default",
    "aten.expand.default",
    "aten.expand_as.default",
    "aten.repeat.default",
    "aten.reshape.default",
    "aten.slice.Tensor",
    "aten.view.default",
    "aten.view_as.default",
}
"""Ops that change no value where their result has the shape of their operand."""


def same_with_one_row(graph: Graph, alone: Callable[[], Trace]) -> bool:
    """Whether the graph of any rows computes of one row what the graph of one row does.

    Args:
        alone: traces the model with one row.
    """
    try:
        of_one = alone().graph
        return _steps(graph) == _steps(of_one) and _constants_alike(graph, of_one)
    except (AutopipeError, ZeroDivisionError):  # the model takes no single row, or `n / (n - 1)`
        return False


def _constants_alike(graph: Graph, other: Graph) -> bool:
    """Whether the tensors that forward makes from numbers have the same values in both."""
    pairs = [(value, other.constants.get(name)) for name, value in graph.constants.items()]
    return all(
        o is not None and (v.shape, v.dtype, digest_of(v)) == (o.shape, o.dtype, digest_of(o))
        for v, o in pairs
    )


def _steps(graph: Graph) -> list[object]:
    """The ops of a graph on one row; an argument that an op makes is the number of that op."""
    values: dict[Value, object] = {}
    steps: list[object] = []

    def given(arg: Arg) -> object:
        if isinstance(arg, Value):
            return values.get(arg, arg)
        if isinstance(arg, tuple):
            return tuple(map(given, arg))
        number: Any = dims.number_at(arg, 1) if isinstance(arg, sympy.Basic) else arg
        return type(number), number  # 1 is not 1.0

    for node in graph.nodes:
        if _changes_nothing(graph, node):
            values[Ref(node.name)] = given(node.args[0])
            continue
        kwargs = {key: given(arg) for key, arg in node.kwargs.items()}
        steps.append((node.op, given(node.args), kwargs, node.grad, node.autocast))
        values |= {Ref(node.name, n): (len(steps), n) for n in range(len(node.outputs))}
    return [*steps, given(graph.outputs)]


def _changes_nothing(graph: Graph, node: Node) -> bool:
    operand, made = node.args[0] if node.args else None, node.outputs[0]
    if node.op not in _SHAPES or not isinstance(operand, Value) or made is None:
        return False
    return shape_at(made, 1) == shape_at(graph.spec(operand), 1)
