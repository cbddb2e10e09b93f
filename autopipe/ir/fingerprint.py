"""Hash a graph, to check that a plan was made for it and to find where two graphs differ.

It covers ops, edges, arguments, constants, parameter names and shapes. Every size that depends on
the batch becomes one symbol, so traces of a model with symbolic and with fixed rows agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TypeAlias

import sympy
import torch

from autopipe.ir.graph import Arg, Graph, TensorSpec, Value, once

_BATCH = "~"
_DIGITS = 4


def lines(graph: Graph, twin: Graph | None = None) -> list[str]:
    """The graph as text, one line per input, state, node and result, without numbers of rows.

    Args:
        twin: for a graph traced at fixed rows, the same model traced at other rows: an integer
            that differs between the two depends on the batch.
    """
    if twin is None:
        return _lines_alone(graph)
    mine, theirs = list(_lines(graph)), list(_lines(twin))
    if len(mine) != len(theirs):
        theirs = mine  # different graphs: nothing can be said about the batch
    return [
        "".join(_text(a) if a == b else _BATCH for a, b in zip(line, twin_line, strict=False))
        for line, twin_line in zip(mine, theirs, strict=True)
    ]


@once
def _lines_alone(graph: Graph) -> list[str]:
    return ["".join(map(_text, line)) for line in _lines(graph)]


def fingerprint(graph: Graph, twin: Graph | None = None) -> str:
    """The SHA-256 of a graph's lines: 64 hexadecimal digits."""
    return hashlib.sha256("\n".join(lines(graph, twin)).encode()).hexdigest()


def trail(graph: Graph) -> str:
    """Four hexadecimal digits per line, hashed from all lines up to it, to locate a difference."""
    rolling, digits = hashlib.sha256(), []
    for line in lines(graph):
        rolling.update(line.encode())
        digits.append(rolling.hexdigest()[:_DIGITS])
    return "".join(digits)


def first_difference(graph: Graph, planned: str) -> str:
    """The first line of `graph` that differs from the planned graph's `trail`."""
    mine = trail(graph)
    for position, line in enumerate(lines(graph)):
        here = slice(position * _DIGITS, (position + 1) * _DIGITS)
        if mine[here] != planned[here]:
            return line
    return "nothing: the plan's model goes on where this one ends"


Token: TypeAlias = str | int | sympy.Expr


def _lines(graph: Graph) -> Iterator[list[Token]]:
    for path, spec in graph.inputs.items():
        yield [f"<{path}> ", *_spec(spec)]
    for name, state in sorted(graph.states.items()):
        value = [digest_of(graph.constants[name])] if name in graph.constants else []
        master = [str(state.master)] if state.master is not None else []
        yield [f"[{name}] {state.kind} {state.trainable} ", *_spec(state.spec), *master, *value]
    for node in graph.nodes:
        line: list[Token] = [f"{node.name} = {node.op} {node.grad} {node.autocast} ("]
        for arg in node.args:
            line += [*_tokens(arg), ", "]
        for key, arg in sorted(node.kwargs.items()):
            line += [f"{key}=", *_tokens(arg), ", "]
        line.append(") -> ")
        for output in node.outputs:
            line += _spec(output) if output is not None else ["nothing"]
        yield line
    yield ["return ", *_tokens(graph.outputs)]


def digest_of(constant: torch.Tensor) -> str:
    """A hash of the values of a constant: they matter as much as an op's arguments."""
    raw = constant.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def _spec(spec: TensorSpec) -> list[Token]:
    tokens: list[Token] = [str(spec.dtype), "["]
    for dim in spec.shape:
        tokens += [dim, ","]
    return [*tokens, "]"]


def _tokens(arg: Arg) -> list[Token]:
    if isinstance(arg, tuple):
        tokens: list[Token] = ["("]
        for item in arg:
            tokens += [*_tokens(item), ","]
        return [*tokens, ")"]
    if isinstance(arg, Value):
        return [str(arg)]
    if isinstance(arg, int | sympy.Expr) and not isinstance(arg, bool):
        return [arg]
    return [repr(arg)]


def _text(token: Token) -> str:
    return _BATCH if isinstance(token, sympy.Expr) else str(token)
