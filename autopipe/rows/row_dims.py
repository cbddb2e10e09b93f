"""Where a value has the rows of a batch: in which dim, and in which order.

[b, d]                    dim 0, each row once
[s*b, d]                  row by row, s entries each; or all rows s times, one after another
[b, b]                    two dims: similarities of all pairs, which nothing cuts into rows
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import sympy
import torch
from torch import Tensor

from autopipe.ir.dataflow import Dataflow, analyse
from autopipe.ir.graph import (
    BATCH,
    Dim,
    Graph,
    Node,
    Ref,
    TensorSpec,
    Value,
    arguments,
    resolve,
    values_in,
)


class RowsUnknown(Exception):
    """The rows of a value cannot be separated; the message gives the reason."""


def rows_in(whole: Tensor, spec: TensorSpec, part: tuple[int, int, int], minor: bool) -> Tensor:
    """Some rows of a value that a graph has for each row; of a value for pairs, those among them.

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
            whole = whole.reshape(shape).narrow(dim + 1, first, count).flatten(dim, dim + 1)
        else:
            whole = whole.narrow(dim, first * many, count * many)
    return whole


def rows_dim(spec: TensorSpec) -> int | None:
    """The one dim whose size grows with the rows; None if there is none, or more than one."""
    found = [number for number, dim in enumerate(spec.shape) if BATCH in symbols(dim)]
    return found[0] if len(found) == 1 else None


def symbols(dim: Dim) -> Collection[sympy.Basic]:
    """The symbols of a size; none of a number."""
    return dim.free_symbols if isinstance(dim, sympy.Expr) else ()


def in_groups(tensor: Tensor, dim: int, groups: int) -> Tensor:
    """A value of some rows with two dims in place of that of rows: groups, rows of a group."""
    before, behind = tensor.shape[:dim], tensor.shape[dim + 1 :]
    return tensor.reshape(*before, groups, tensor.shape[dim] // groups, *behind)


def joined(parts: Sequence[Tensor], dim: int, groups: int) -> Tensor:
    """A value of all rows, from those of their parts in the order of the rows.

    Args:
        groups: how many times the dim goes through all rows, as the function of that name has it.
    """
    apart = [in_groups(part, dim, groups) for part in parts]
    return torch.cat(apart, dim + 1).flatten(dim, dim + 1)


def parted(whole: Tensor, dim: int, groups: int, count: int) -> list[Tensor]:
    """A value of each of `count` equal parts of the rows: the inverse of `joined`."""
    apart = in_groups(whole, dim, groups).chunk(count, dim + 1)
    return [part.flatten(dim, dim + 1) for part in apart]


SAME_ROWS = {
    *("view", "reshape", "flatten", "unflatten", "expand", "expand_as", "unsqueeze", "squeeze"),
    *("transpose", "permute", "clone", "alias", "detach", "contiguous", "to", "_to_copy"),
}
"""Ops that only arrange or copy: where the first dim stays the same, so do the rows in it."""

OF_DIMS = {"select", "slice", "mean", "sum", "amax", "amin", "linalg_vector_norm", "norm"}
"""Ops over the dims that their argument `dim` names."""

_LAYERS = {
    *("linear", "matmul", "mm", "addmm", "bmm", "embedding", "conv1d", "conv2d", "conv3d"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "bilinear", "einsum", "pad"),
    *("layer_norm", "rms_norm", "group_norm", "batch_norm", "native_layer_norm", "instance_norm"),
    *("softmax", "log_softmax", "logsumexp", "log_sigmoid", "glu", "prelu", "pixel_shuffle"),
    *("scaled_dot_product_attention", "dropout", "cosine_similarity", "cross_entropy_loss"),
    *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d"),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
    *("argmax", "argmin", "max", "min", "one_hot", "var", "std", "cat", "stack", "chunk", "split"),
}
"""Ops of layers and of what comes behind them, which leave the rows of a batch in their order."""

_SCALES = "upsample_", "_upsample_"
"""How the names of such ops begin, of which there is one for each way to scale."""

_ALONG = {"topk", "sort", "gather", "index_select", "flip", "cumsum"}
"""Ops that leave rows in their order along any other dim than theirs."""


def rows_lie(flow: Dataflow, value: Value) -> tuple[int, int] | None:
    """The dim of a value's rows, and its `groups`; None: there is no such dim, or several, or the
    order of the rows in it is unknown."""
    dim = rows_dim(flow.graph.spec(value))
    many = None if dim is None else groups(flow, value)
    return None if dim is None or many is None else (dim, many)


def outputs_lie(
    graph: Graph, count: int, *, alone: bool = False
) -> tuple[tuple[int, int] | None, ...]:
    """How the rows of a graph's last `count` results lie, each as `rows_lie` has it.

    Args:
        alone: whether a result has all rows, so that their order in its dim does not matter.
    """
    outputs = graph.outputs[len(graph.outputs) - count :]
    found = [next(values_in((output,))) for output in outputs]
    if alone:
        dims = (rows_dim(graph.spec(value)) for value in found)
        return tuple(None if dim is None else (dim, 1) for dim in dims)
    return tuple(rows_lie(analyse(graph), value) for value in found)


def groups(flow: Dataflow, value: Value) -> int | None:
    """How many times a value's dim of rows goes through all rows; None: unknown.

        cat([x, y]) of [b, d] and [b, d]     [2b, d]     all rows of x, then all of y     2
        x.repeat(2, 1) of [b, d]             [2b, d]     all rows, and again              2
        x.repeat_interleave(2, 0)            [2b, d]     row 0 twice, then row 1 twice    1
        x.flatten(0, 1) of [b, s, d]         [s*b, d]    all of row 0, then all of row 1  1

    Args:
        value: has one dim of rows.
    """
    times = 1
    while True:
        spec = flow.graph.spec(value)
        dim = rows_dim(spec)
        assert dim is not None
        if spec.shape[dim] == BATCH:
            return times
        if not isinstance(value, Ref):
            return None
        node = flow.graph.nodes[flow.position(value)]
        if node.short in _REPEATS:
            many = _repeated(flow, node, dim)
            if many is None:
                return None
            times, value = times * many, node.values()[0]
            continue
        if node.short == "cat" and arguments(node)["dim"] % len(spec.shape) == dim:
            many = _of_parts(flow, node, dim)
            return None if many is None else times * many
        if not _keeps_order(node, dim, len(spec.shape)):
            return None
        others = [
            (v, before) for v in node.values() if rows_dim(before := flow.graph.spec(v)) == dim
        ]
        same = [v for v, before in others if before.shape[dim] == spec.shape[dim]]
        if not same:
            many = _merged(flow, node, dim)
            return None if many is None else times * many
        value = same[0]


def _keeps_order(node: Node, dim: int, ndim: int) -> bool:
    """Whether a node that keeps a dim's size also keeps the order of its entries."""
    if node.short in _ALONG:
        told = arguments(node)
        along = told["dims"] if "dims" in told else [told["dim"]]
        return all(isinstance(one, int) and one % ndim != dim for one in along)
    known = node.short in SAME_ROWS | OF_DIMS | _LAYERS or node.short.startswith(_SCALES)
    return known or torch.Tag.pointwise in getattr(resolve(node.op), "tags", ())


_REPEATS = {"repeat", "tile", "repeat_interleave"}


def _repeated(flow: Dataflow, node: Node, dim: int) -> int | None:
    """How many times a node repeats what lies along a dim, all of it: 1, if entry by entry."""
    before, told = flow.graph.spec(node.values()[0]), arguments(node)
    if rows_dim(before) != dim:
        return None
    if node.short == "repeat_interleave":
        along: object = told.get("dim")
        whole = isinstance(told.get("repeats"), int)
        return 1 if whole and isinstance(along, int) and along % len(before.shape) == dim else None
    repeats = told["dims" if node.short == "tile" else "repeats"]
    many = repeats[dim] if len(repeats) == len(before.shape) else None
    return many if isinstance(many, int) else None


def _of_parts(flow: Dataflow, node: Node, dim: int) -> int | None:
    """The groups of a `cat` along the rows: all rows of one tensor, then all of the next."""
    parts = [flow.graph.spec(v) for v in values_in(node.args[0])]
    all_rows = all(rows_dim(p) == dim and p.shape[dim] == BATCH for p in parts)
    return len(parts) if all_rows else None


def _merged(flow: Dataflow, node: Node, dim: int) -> int | None:
    """The groups after dims are merged: the product of the sizes before the dim of rows."""
    for value in node.values() if node.short in SAME_ROWS else ():
        before = flow.graph.spec(value)
        at = rows_dim(before)
        if at is not None and at >= dim and before.shape[at] == BATCH:
            return math.prod(int(size) for size in before.shape[dim:at])
    return None
