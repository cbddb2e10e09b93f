"""Check a graph's invariants after each pass that rewrites it.

    names        no two nodes have one name; no alias is the name of another state
    order        each Ref names an existing output, a tensor, of an earlier node
    declared     each Input and State that is read is declared, and each constant has a value
    symbols      sizes are formulas in `BATCH` and `SEQUENCE` alone
    results      a node that is not packed has one output
    shapes       an aten op, run on fake tensors of its operands' specs, makes the outputs' specs

Passes call `after`; a pass whose result is no graph passes its own findings to `refuse`
(`ir.partition`). Both check where `util.self_checks` is on, in tests and
with `--debug`. Other namespaces' ops have no shape rule here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack
from typing import Any

import sympy
import torch

from autopipe.errors import AutopipeError
from autopipe.ir.graph import (
    BATCH,
    SEQUENCE,
    Arg,
    Autocast,
    Dim,
    Graph,
    Input,
    Node,
    State,
    TensorSpec,
    Value,
    at_batch,
    at_sequence,
    resolve,
    values_in,
)
from autopipe.ir.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    fake_mode,
)
from autopipe.util import dtypes, self_checks
from autopipe.util.dims import number_at

ROWS, LENGTH = 4, 8
"""Rows and tokens at which specs are compared with an op's real outputs."""

Look = tuple[tuple[int, ...], torch.dtype] | None
"""Shape and dtype of one output at these sizes; None: no tensor, or unknown."""


Findings = Iterator[tuple[str, str]]
"""Broken rules: the text of each, and the user's line or an empty text."""


def after(rewriting: str, graph: Graph) -> Graph:
    """Check the graph that a pass made, if self-checks are on; returns the graph.

    Args:
        rewriting: the name of the pass, for the error.

    Raises:
        AutopipeError: a rule is broken; names the pass, the node and the user's line.
    """
    refuse(rewriting, broken(graph))
    return graph


def refuse(rewriting: str, findings: Findings) -> None:
    """Raise an error for the first finding, if self-checks are on; otherwise compute none.

    Raises:
        AutopipeError: as `after`.
    """
    if self_checks.on():
        for wrong, place in findings:
            raise _error(rewriting, wrong, place)


def _error(rewriting: str, wrong: str, place: str) -> AutopipeError:
    at = f" ({place})" if place else ""
    return AutopipeError(
        f"after {rewriting} the graph is broken: {wrong}{at}",
        hint="this is a mistake of autopipe, not of the model; please report it with the model",
    )


def broken(graph: Graph) -> Findings:
    """Yield the broken rules of a graph; nothing if it is correct."""
    yield from _broken_states(graph)
    seen: dict[str, Node] = {}
    for node in graph.nodes:
        subject = f"node {node.name!r}"
        if node.name in seen:
            yield f"two nodes have the name {node.name!r}", node.place
        if not node.packed and len(node.outputs) != 1:
            yield f"{subject} is not packed and has {len(node.outputs)} outputs", node.place
        for value in node.values():
            wrong = _broken_value(graph, seen, value)
            if wrong:
                yield f"{subject} reads {value}, {wrong}", node.place
        for spec in node.outputs:
            strange = _strange_symbols(spec) if spec is not None else ""
            if strange:
                yield f"{subject} makes {spec}, of a size in {strange}", node.place
        seen[node.name] = node
        wrong = _broken_shapes(graph, node)
        if wrong:
            yield f"{subject} {wrong}", node.place
    for value in values_in(graph.outputs):
        wrong = _broken_value(graph, seen, value)
        if wrong:
            yield f"the graph gives {value}, {wrong}", ""


def _broken_states(graph: Graph) -> Findings:
    """The broken rules of the declarations of inputs and states."""
    known = set(graph.states)
    for name, state in graph.states.items():
        twice = next((alias for alias in state.aliases if alias in known), None)
        if twice is not None:
            yield f"{twice!r} is a state and an alias of the state {name!r}", ""
        known.update(state.aliases)
        if state.kind == "constant" and name not in graph.constants:
            yield f"the constant {name!r} has no value", ""


def _broken_value(graph: Graph, seen: dict[str, Node], value: Value) -> str:
    """The broken rule of a value that is read after the nodes of `seen`; empty if none."""
    if isinstance(value, Input):
        return "" if value.path in graph.inputs else "which is no input"
    if isinstance(value, State):
        return "" if value.name in graph.states else "which is no state"
    maker = seen.get(value.node)
    if maker is None:
        later = value.node in graph.index
        return "which a later node makes" if later else "which no node makes"
    if value.output >= len(maker.outputs):
        return f"and {maker.name!r} has {len(maker.outputs)} outputs"
    return "" if maker.outputs[value.output] is not None else "which is no tensor"


def _strange_symbols(spec: TensorSpec) -> str:
    symbols = {symbol for dim in spec.shape for symbol in sympy.sympify(dim).free_symbols}
    return ", ".join(sorted(map(str, symbols - {BATCH, SEQUENCE})))


def _broken_shapes(graph: Graph, node: Node) -> str:
    """How a node's outputs differ from its op's real outputs; empty if equal or unknown."""
    if not node.op.startswith("aten."):
        return ""
    actual = _actual_outputs(graph, node)
    if isinstance(actual, str):
        return f"cannot run on its operands: {actual}"
    for number, (spec, look) in enumerate(zip(node.outputs, actual, strict=False)):
        if spec is not None and look is not None and _look(spec) != look:
            shape, dtype = look
            return (
                f"has output {number} as {spec}, and {node.op} makes "
                f"{dtypes.name_of(dtype)}{list(shape)} with {ROWS} rows"
            )
    return ""


def _size(dim: Dim) -> int:
    return at_batch(at_sequence(dim, LENGTH), ROWS)


def _look(spec: TensorSpec) -> tuple[tuple[int, ...], torch.dtype]:
    return tuple(map(_size, spec.shape)), spec.dtype


_known: dict[Hashable, tuple[Look, ...] | str] = {}
"""The outputs of an op by its arguments' specs, cached: layers repeat, and so do tests' models."""


def _actual_outputs(graph: Graph, node: Node) -> tuple[Look, ...] | str:
    """The op's outputs at `ROWS` and `LENGTH`, or the error that it raises."""

    def key_of(arg: Arg) -> Hashable:
        if isinstance(arg, Value):
            return "tensor", _look(graph.spec(arg))
        if isinstance(arg, tuple):
            return tuple(map(key_of, arg))
        return type(arg), arg  # 1 is not 1.0

    kwargs = tuple((key, key_of(arg)) for key, arg in node.kwargs.items())
    key = node.op, key_of(node.args), kwargs, node.autocast
    if key not in _known:
        _known[key] = _run(graph, node)
    return _known[key]


def _run(graph: Graph, node: Node) -> tuple[Look, ...] | str:
    """Run a node's op on fake tensors."""
    with fake_mode(), torch.no_grad(), ExitStack() as until:
        if node.autocast is not None and node.autocast.device_type == "cpu":
            until.enter_context(_autocast(node.autocast))  # a GPU's casts nothing here

        def given(arg: Arg) -> Any:
            if isinstance(arg, Value):
                shape, dtype = _look(graph.spec(arg))
                return torch.empty(shape, dtype=dtype)
            if isinstance(arg, tuple):
                return tuple(map(given, arg))
            if isinstance(arg, sympy.Basic):
                return number_at(sympy.sympify(at_sequence(arg, LENGTH)), ROWS)
            return arg

        args = tuple(map(given, node.args))
        kwargs = {key: given(arg) for key, arg in node.kwargs.items()}
        op: Callable[..., Any] = resolve(node.op)
        try:
            result = op(*args, **kwargs)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            NotImplementedError,
        ):
            return ()
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return str(error).splitlines()[0]
    parts = result if isinstance(result, list | tuple) else (result,)
    return tuple(
        (tuple(part.shape), part.dtype) if isinstance(part, torch.Tensor) else None
        for part in parts
    )


def _autocast(region: Autocast) -> torch.autocast:
    return torch.autocast(region.device_type, dtype=region.dtype, enabled=region.enabled)
