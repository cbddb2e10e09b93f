"""Find where a graph's loss begins to compare rows, and how rows lie in what it compares.

    batch --model--> [b, d] --normalize--> e [b, d]  |  e e' [b, b] --cross_entropy--> loss
                     each row by itself              |  tail: rows beside each other

The tail begins behind the last ops with parameters; ops behind them that compute each row from that
row alone, such as a norm or a mean over tokens, are left before it, as they make less to keep.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import Tensor

from autopipe.ir.dataflow import Dataflow, is_random
from autopipe.ir.graph import (
    BATCH,
    Dim,
    Graph,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    arguments,
    resolve,
    values_in,
)
from autopipe.ir.torch_private import writes


@dataclass(frozen=True)
class LossNodes:
    """The nodes from which a loss is computed, back to the last ops with parameters.

    Attributes:
        needed: their positions, those of the last ops among them.
        last: the positions of the last ops.
    """

    needed: frozenset[int]
    last: frozenset[int]


class RowsUnknown(Exception):
    """The rows of a value cannot be separated; the message gives the reason."""


def rows_in(whole: Tensor, spec: TensorSpec, part: tuple[int, int, int], minor: bool) -> Tensor:
    """Some rows of a value that a graph has for each row.

    Args:
        part: how many rows `whole` has, the first one that is taken, and how many are.
        minor: whether in a dim of 3*b the rows come last: `[3, b]` and not `[b, 3]`.

    Raises:
        RowsUnknown: a size is no multiple of the rows.
    """
    rows, first, count = part
    for dim, size in enumerate(spec.shape):
        if not isinstance(size, sympy.Expr):
            continue
        factor = size / BATCH
        if not factor.is_Integer:
            raise RowsUnknown(f"a size in it is {size}, b the rows")
        many = int(factor)
        if minor and many > 1:
            shape = (*whole.shape[:dim], many, rows, *whole.shape[dim + 1 :])
            return whole.reshape(shape).narrow(dim + 1, first, count).flatten(dim, dim + 1)
        return whole.narrow(dim, first * many, count * many)
    return whole


def drawn(
    shape: Sequence[int],
    dtype: torch.dtype,
    made_up: Callable[..., Tensor],
    generator: torch.Generator,
) -> Tensor:
    """A made-up value, floats in float64; of whole numbers zeros, of truth values ones."""
    if dtype.is_floating_point:
        return made_up(shape, generator=generator, dtype=torch.float64)
    if dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)
    return torch.full(shape, dtype == torch.bool, dtype=dtype)


def loss_nodes(flow: Dataflow) -> LossNodes:
    """Walk back from a graph's results to the last ops with parameters."""
    return _walked(flow, flow.graph.outputs)


def _walked(flow: Dataflow, results: Iterable[object]) -> LossNodes:
    graph = flow.graph
    needed: set[int] = set()
    last: set[int] = set()
    waiting = [flow.position(v) for v in values_in(tuple(results)) if isinstance(v, Ref)]
    while waiting:
        position = waiting.pop()
        if position in needed:
            continue
        node = graph.nodes[position]
        needed.add(position)
        if _is_last(graph, node):
            last.add(position)
            continue
        waiting += flow.just_before(position)
    return LossNodes(frozenset(needed), frozenset(last))


def _is_last(graph: Graph, node: Node) -> bool:
    """Whether a loss is not followed beyond a node: it has parameters, draws, or is batch norm.

    A value with two dims of rows (similarities of all pairs) cannot be cut into rows. A node that
    multiplies it by a parameter (a temperature) belongs to the loss.
    """
    if "batch_norm" in node.op or (is_random(node) and "dropout" not in node.op):
        return True
    reads = any(
        isinstance(v, State) and graph.states[v.name].kind == "parameter" for v in node.values()
    )
    twice = any(
        sum(isinstance(dim, sympy.Expr) for dim in spec.shape) > 1 for spec in node.outputs if spec
    )
    return reads and not twice


def tail(flow: Dataflow, results: Sequence[object]) -> frozenset[int]:
    """The positions of the nodes that compare rows, and of all that depends on them.

    What any stage can compute from the batch alone (`Dataflow.local`) is not among them.

    Args:
        results: the loss, or a sum and a count.
    """
    found = _walked(flow, results)
    before = flow.with_all_before(found.last)
    behind: set[int] = set()
    for position in range(len(flow.graph.nodes)):
        depends = any(p in behind for p in flow.just_before(position))
        if depends or (position in found.needed and position not in before):
            if not flow.local[position] and not (
                not depends and _row_by_row(flow, flow.graph.nodes[position])
            ):
                behind.add(position)
    return frozenset(behind)


_SAME_ROWS = {
    *("view", "reshape", "flatten", "unflatten", "expand", "expand_as", "unsqueeze", "squeeze"),
    *("transpose", "permute", "clone", "alias", "detach", "contiguous", "to", "_to_copy"),
}
"""Ops that only arrange or copy: where the first dim stays the same, so do the rows in it."""

_OF_DIMS = {"select", "slice", "mean", "sum", "amax", "amin", "linalg_vector_norm", "norm"}
"""Ops over the dims that their argument `dim` names."""

_LAYERS = {
    *("linear", "matmul", "mm", "addmm", "bmm", "embedding", "conv1d", "conv2d", "conv3d"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "native_layer_norm", "softmax"),
    *("scaled_dot_product_attention", "dropout", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
}
"""Ops of layers, which leave the rows of a batch in their order."""


def _row_by_row(flow: Dataflow, node: Node) -> bool:
    """Whether a node computes each row from that row alone, the rows in the first dim of all."""
    graph, made = flow.graph, node.outputs[0]
    op = resolve(node.op)
    if node.packed or made is None or rows_dim(made) != 0 or is_random(node) or writes(op):
        return False
    values = node.values()
    if any(flow.root[v] in flow.writers for v in (*values, Ref(node.name))):
        return False
    specs = [graph.spec(v) for v in values]
    with_rows = [s for s in specs if any(BATCH in _symbols(dim) for dim in s.shape)]
    if any(rows_dim(s) != 0 or s.shape[0] != made.shape[0] for s in with_rows):
        return False
    if torch.Tag.pointwise in getattr(op, "tags", ()):
        return all(len(s.shape) == len(made.shape) for s in with_rows)
    if node.short in _OF_DIMS:
        dims = arguments(node).get("dim")
        named = [dims] if isinstance(dims, int) else list(dims or ())
        rank = len(specs[0].shape)
        return bool(named) and all(isinstance(d, int) and d % rank != 0 for d in named)
    return node.short in _SAME_ROWS


def rows_dim(spec: TensorSpec) -> int | None:
    """The one dim whose size grows with the rows; None if there is none, or more than one."""
    found = [number for number, dim in enumerate(spec.shape) if BATCH in _symbols(dim)]
    return found[0] if len(found) == 1 else None


def _symbols(dim: Dim) -> Collection[sympy.Basic]:
    return dim.free_symbols if isinstance(dim, sympy.Expr) else ()


def groups(flow: Dataflow, value: Value) -> int | None:
    """How often all rows come one after another in a value's dim of rows; None: unknown.

        cat([x, y]) of [b, d] and [b, d]     [2b, d]     all rows of x, then all of y     2
        x.flatten(0, 1) of [b, s, d]         [s*b, d]    all of row 0, then all of row 1  1

    Args:
        value: has one dim of rows.
    """
    while True:
        spec = flow.graph.spec(value)
        dim = rows_dim(spec)
        assert dim is not None
        if spec.shape[dim] == BATCH:
            return 1
        if not isinstance(value, Ref):
            return None
        node = flow.graph.nodes[flow.position(value)]
        if node.short == "cat":
            return _of_parts(flow, node, dim)
        if not _keeps_order(node):
            return None
        others = [
            (v, before) for v in node.values() if rows_dim(before := flow.graph.spec(v)) == dim
        ]
        same = [v for v, before in others if before.shape[dim] == spec.shape[dim]]
        if not same:
            return _merged(flow, node, dim)
        value = same[0]


def _keeps_order(node: Node) -> bool:
    """Whether a node that keeps a dim's size also keeps the order of its entries."""
    known = _SAME_ROWS | _OF_DIMS | _LAYERS
    return torch.Tag.pointwise in getattr(resolve(node.op), "tags", ()) or node.short in known


def _of_parts(flow: Dataflow, node: Node, dim: int) -> int | None:
    """Of tensors that are put together along a dim: all rows of one, then all of the next."""
    parts = [flow.graph.spec(v) for v in values_in(node.args[0])]
    along = arguments(node)["dim"]
    whole = all(rows_dim(p) == dim and p.shape[dim] == BATCH for p in parts)
    return len(parts) if whole and along % len(parts[0].shape) == dim else None


def _merged(flow: Dataflow, node: Node, dim: int) -> int | None:
    """Of dims that are made one: those before the rows say how often all rows come."""
    for value in node.values() if node.short in _SAME_ROWS else ():
        before = flow.graph.spec(value)
        at = rows_dim(before)
        if at is not None and at >= dim and before.shape[at] == BATCH:
            return math.prod(int(size) for size in before.shape[dim:at])
    return None
