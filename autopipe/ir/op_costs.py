"""Compute each node's operations and bytes moved, as formulas in rows and tokens.

The rules give the operations of forward; backward, and seconds (`ir.op_seconds`), follow:

    forward    flops                        reads its tensors, writes its results
    backward   flops, once for each matrix  reads the results' gradients and its tensors,
               that needs a gradient        writes the gradients
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

import sympy
import torch

from autopipe.cluster.measured import ATTENTION, CAUSAL_ATTENTION, DROPOUT_ATTENTION, LIKE
from autopipe.ir.dataflow import gradient_values
from autopipe.ir.graph import (
    REGION_OP,
    SEQUENCE,
    Dim,
    Graph,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    arguments,
    at_batch,
    once,
    resolve,
    swap,
    values_in,
)
from autopipe.ir.torch_private import views
from autopipe.util.registry import entering


@dataclass(frozen=True)
class NodeCost:
    """Cost formulas of one node, in operations and bytes, each (forward, backward).

    Args:
        launches: (forward, backward) numbers of kernels that the host launches.
        dims: (m, k, n) of its matmul; empty if it is no matmul.
        kernel: the key of its measured rate in `Device.kernels`; empty if it has none.
        gradients: bytes that backward accumulates into the gradients of parameters.
        casts: how many of these gradients are cast to the dtype of their sums, and the bytes that
            this moves; where ops run one by one.
        model_flops: operations that MFU counts (Chowdhery et al., PaLM, 2022, appendix B): of
            products, convolutions and attention, forward and backward, each once; else 0.
        passes: (forward, backward) bytes that elementwise kernels within the op move besides.
    """

    forward_flops: Dim
    forward_bytes: Dim
    backward_flops: Dim
    backward_bytes: Dim
    launches: tuple[int, int]
    dtype: torch.dtype
    dims: tuple[Dim, ...] = ()
    kernel: str = ""
    gradients: Dim = sympy.Integer(0)
    casts: tuple[int, Dim] = (0, sympy.Integer(0))
    model_flops: Dim = sympy.Integer(0)
    passes: tuple[Dim, Dim] = (sympy.Integer(0), sympy.Integer(0))


GROUPED = "_grouped_mm", "grouped_mm_fallback"
"""The matmuls of experts: torch's, and transformers' for dtypes of which torch's has no fake."""

Specs = Sequence[TensorSpec]
Rule = Callable[[Node, Specs, TensorSpec], Dim]
"""Computes forward operations from the node, its tensor operands in order and its first result."""

RULES: dict[str, Rule] = {}
"""The rule of each op; any other op counts one operation per element, and is bound by its bytes."""


rule = entering(RULES)


def _elements(spec: TensorSpec) -> sympy.Expr:
    """The number of elements, always as an expression: fractions of it are exact."""
    return sympy.sympify(sympy.prod(spec.shape))


@rule("linear", "columns", "inner", "mm", "bmm", "matmul", "linalg_matmul", "mv", "dot", *GROUPED)
def _matmul(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """[..., m, k] x [..., k, n] -> [..., m, n]: a multiplication and an addition per k and result.

    Of a linear layer the second operand is [n, k] or [k]; several layers of one input (columns)
    have a result each. Of experts, [t, k] x [experts, k, n], each token is multiplied by one.
    """
    results = sum((_elements(spec) for spec in node.outputs if spec), sympy.Integer(0))
    scaled = not all(spec.shape for spec in operands[:2])  # inner may have a scalar
    return results if scaled else 2 * results * operands[0].shape[-1]


@rule("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """A matmul of the second and third operand; the first is added, and addbmm adds up a batch."""
    batch = operands[1].shape[0] if node.short == "addbmm" else 1
    return 2 * _elements(made) * operands[1].shape[-1] * batch


@rule("tensordot")
def _tensordot(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """[..., k, l] x [k, l, ...]: a multiplication and an addition per k, l and result."""
    summed = (operands[0].shape[dim] for dim in arguments(node)["dims_self"])
    return 2 * _elements(made) * sympy.prod(summed)


@rule("bilinear")
def _bilinear(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """x [..., i], y [..., j], weight [n, i, j] -> [..., n]."""
    return 2 * sympy.prod(operands[0].shape[:-1]) * _elements(operands[2])


@rule("conv1d", "conv2d", "conv3d", "convolution", *(f"conv_transpose{n}d" for n in (1, 2, 3)))
def _convolution(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Weight [out, in / groups, *kernel]: each result element needs a whole filter.

    Transposed, each input element spreads over a whole filter: weight [in, out / groups, *kernel].
    """
    each, weight = operands[0] if "transpose" in node.short else made, operands[1]
    return 2 * _elements(each) * (_elements(weight) // weight.shape[0])


@rule("scaled_dot_product_attention")
def _attention(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """q [.., s, d], k [.., t, d], v [.., t, e]: 2 s t d for the scores and 2 s t e for the sum.

    A causal kernel leaves out the half above the diagonal (FlashAttention-2,
    Dao 2023, section 3.1).
    """
    query, key = operands[0], operands[1]
    scores = sympy.sympify(sympy.prod(query.shape[:-1]) * key.shape[-2])
    flops = 2 * scores * (query.shape[-1] + made.shape[-1])
    return flops / 2 if arguments(node)["is_causal"] else flops


_CELLS = {"lstm_cell": 2, "gru_cell": 1, "rnn_tanh_cell": 1, "rnn_relu_cell": 1}
"""The states of a recurrent cell, [b, h] each, which stand before its weights."""


@rule("lstm", "gru", "rnn_tanh", "rnn_relu", "packed_rnn", *_CELLS)
def _recurrent(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Every weight matrix once per time step and row: x [b, t, ...] gives b * t of them."""
    steps = sympy.prod(operands[0].shape[:-1])
    matrices = [s for s in operands[1 + _CELLS.get(node.short, 0) :] if len(s.shape) == 2]
    return sum((2 * steps * _elements(matrix) for matrix in matrices), sympy.Integer(0))


@rule("einsum")
def _einsum(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """A multiplication and an addition per combination of the letters of two operands, which are
    multiplied in their order or that of `path`; none where no letter is summed."""
    given, arrow, result = str(node.args[0]).replace(" ", "").replace("...", ".").partition("->")
    sizes: dict[str, Dim] = {}
    terms: list[set[str]] = []
    for letters, spec in zip(given.split(","), operands, strict=True):
        before, _, after = letters.partition(".")
        dots = range(len(spec.shape) - len(before) - len(after), 0, -1)
        terms.append(set(names := [*before, *(f".{n}" for n in dots), *after]))
        for name, size in zip(names, spec.shape, strict=True):
            sizes[name] = size if sizes.get(name, 1) == 1 else sizes[name]
    if not arrow:
        result = "." + "".join(letter for letter in given if given.count(letter) == 1)
    kept = {name for name in sizes if name[0] in result}
    path, flops = arguments(node)["path"], sympy.Integer(0)
    pairs = zip(path[::2], path[1::2], strict=True) if path else repeat((0, 1))
    while len(terms) > 1:
        first, second = sorted(next(pairs))
        both = terms.pop(second) | terms.pop(first)
        left = both & kept.union(*terms)
        flops += 2 * sympy.prod(sizes[name] for name in both) if left < both else 0
        terms.insert(len(terms) if path else 0, left)
    return flops


@rule("region")
def _region(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """The operations that were counted when the region was measured."""
    found: Dim = arguments(node)["flops"]
    return found


FORWARD_PASSES, BACKWARD_PASSES = 7, 9
"""How often a logit in fp32 is read or written by `sharding.vocabulary_loss`: a log-sum-exp is the
maximum, a difference, exp and a sum; the gradient a difference, exp, a product and a cast."""


@rule("vocabulary_loss")
def _vocabulary_loss(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """The logits of x [..., h] and w [v, h], from which the loss is made."""
    return 2 * _elements(operands[0]) * operands[1].shape[0]


def _dims(op: str, operands: Specs, made: TensorSpec) -> tuple[Dim, ...]:
    """(m, k, n) of the matmul that an op is; batches of them aside."""
    shapes = [spec.shape for spec in operands]
    match op:
        case "linear" | "columns" | "inner" if len(shapes[1]) > 1 and shapes[0]:
            *rows, k = shapes[0]
            return sympy.sympify(sympy.prod(rows)), k, made.shape[-1]
        case "vocabulary_loss":
            *rows, k = shapes[0]
            return sympy.sympify(sympy.prod(rows)), k, shapes[1][0]
        case "mm" | "bmm" | "matmul" | "linalg_matmul" if min(map(len, shapes)) > 1:
            return shapes[0][-2], shapes[0][-1], shapes[1][-1]
        case _ if op in GROUPED and len(shapes[1]) == 3:
            return sympy.sympify(shapes[0][-2]) / shapes[1][0], shapes[0][-1], shapes[1][-1]
        case "addmm" | "baddbmm":
            return shapes[1][-2], shapes[1][-1], shapes[2][-1]
        case "conv1d" | "conv2d" | "conv3d" | "convolution":
            out = made.shape[1]
            return _elements(made) / out, _elements(operands[1]) / out, out
        case "scaled_dot_product_attention":
            return shapes[0][-2], shapes[0][-1], shapes[1][-2]
        case _ if RULES.get(op) is _recurrent:
            matrix = next(s for s in shapes[1 + _CELLS.get(op, 0) :] if len(s) == 2)
            return shapes[0][0], matrix[1], matrix[0]
    return ()


def _kernel(node: Node) -> str:
    """The key of a node's measured rate; attention has three, by how it can be fused."""
    if node.short != "scaled_dot_product_attention":
        return LIKE.get(node.short, node.short)
    given = arguments(node)
    if given["dropout_p"]:
        return DROPOUT_ATTENTION
    return CAUSAL_ATTENTION if given["is_causal"] else ATTENTION


@once
def costs(graph: Graph) -> tuple[NodeCost, ...]:
    """The cost formulas of every node, by position; nodes with equal shapes share one object."""
    carrying = gradient_values(graph)
    found = dict[Hashable, NodeCost]()
    looks = [_look(graph, node, carrying) for node in graph.nodes]
    for node, look in zip(graph.nodes, looks, strict=True):
        if look not in found:
            found[look] = _cost(graph, node, carrying)
    return tuple(found[look] for look in looks)


def _look(graph: Graph, node: Node, carrying: frozenset[Ref | State]) -> Hashable:
    """Everything in a node that its cost depends on, names excluded."""
    looks: dict[Value, Any] = {
        value: (number, type(value), graph.spec(value), _master(graph, value), value in carrying)
        for number, value in enumerate(dict.fromkeys(node.values()))
    }
    carries = tuple(Ref(node.name, number) in carrying for number in range(len(node.outputs)))
    return node.op, swap((node.args, *node.kwargs.items()), looks), node.outputs, carries


def _master(graph: Graph, value: Value) -> torch.dtype | None:
    return graph.states[value.name].master if isinstance(value, State) else None


def _cost(graph: Graph, node: Node, carrying: frozenset[Ref | State]) -> NodeCost:
    found = _whole_cost(graph, node, carrying)
    return _in_parts(found, graph, node) if node.short == "vocabulary_loss" else found


def _in_parts(cost: NodeCost, graph: Graph, node: Node) -> NodeCost:
    """The cost of a loss that makes its logits part by part, and makes them again in backward."""
    given, (rows, inner, columns) = arguments(node), cost.dims
    width = min(int(columns), given["width"])
    parts, again = -(-int(columns) // width), min(cost.launches[1], 1)
    logits = 4 * rows * columns
    return replace(
        cost,
        dtype=graph.spec(given["weight"]).dtype,
        backward_flops=cost.backward_flops + again * cost.forward_flops,
        dims=(rows, inner, width),
        launches=(FORWARD_PASSES * parts, again * BACKWARD_PASSES * parts),
        passes=(FORWARD_PASSES * logits, again * BACKWARD_PASSES * logits),
    )


def _whole_cost(graph: Graph, node: Node, carrying: frozenset[Ref | State]) -> NodeCost:
    results = [spec for spec in node.outputs if spec is not None]
    dtype = results[0].dtype if results else torch.float32
    nothing = sympy.Integer(0)
    if not results or views(resolve(node.op)) and not node.short.endswith("_"):
        back = int(any(Ref(node.name, n) in carrying for n in range(len(node.outputs))))
        return NodeCost(nothing, nothing, nothing, nothing, (1, back), dtype)
    values = list(values_in((node.args, tuple(node.kwargs.values()))))
    operands = [graph.spec(value) for value in values]
    formula = RULES.get(node.short)
    flops = formula(node, operands, results[0]) if formula else _touched(node, operands, results[0])
    dims, kernel = _dims(node.short, operands, results[0]), _kernel(node)
    written = sum((spec.bytes for spec in results), nothing)
    read = sum((spec.bytes for spec in operands), nothing)
    if node.op == "aten.embedding.default":
        read = results[0].bytes  # only the rows that are looked up
    carried = [spec for v, spec in zip(values, operands, strict=True) if v in carrying]
    # A product of complex numbers is four of real ones.
    ahead = flops * (4 if dtype.is_complex else 1) if formula else nothing
    if not any(Ref(node.name, n) in carrying for n in range(len(node.outputs))):
        return NodeCost(
            flops, read + written, nothing, nothing, (1, 0), dtype, dims, kernel, model_flops=ahead
        )
    gradients = sum((spec.bytes for spec in carried), nothing)
    matrices = min(2, sum(len(spec.shape) > 1 for spec in carried)) if formula else 1
    if node.op.startswith("aten.scaled_dot_product"):
        # dV, dP, dQ, dK and the scores again: 5 matmuls against 2 (FlashAttention-2, section 3.1).
        back_flops = flops * sympy.Rational(5, 2)
    else:
        back_flops = flops * matrices
    trained = [graph.states[v.name] for v in {*values} if isinstance(v, State) and v in carrying]
    cast = [state for state in trained if state.summed != state.spec]
    launches = arguments(node)["launches"] if node.op == REGION_OP else None
    return NodeCost(
        forward_flops=flops,
        forward_bytes=read + written,
        backward_flops=back_flops,
        backward_bytes=written + read + gradients,
        launches=(1, len(carried)) if launches is None else (launches, launches),
        dtype=dtype,
        dims=dims,
        kernel=kernel,
        gradients=sum((state.summed.bytes for state in trained), nothing),
        casts=(len(cast), sum((s.spec.bytes + s.summed.bytes for s in cast), nothing)),
        model_flops=ahead * (1 + matrices),
    )


def _touched(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """The elements that an op without a rule processes: of its result, or of what it reduces."""
    if node.op == "aten.embedding.default":
        return _elements(made)
    every = [_elements(spec) for spec in (made, *operands)]
    lengths = (1, _MANY) if any(size.has(SEQUENCE) for size in every) else (1,)
    found = (
        max(every, key=lambda size: at_batch(size.subs(SEQUENCE, length), _MANY))
        for length in lengths
    )
    return sympy.Max(*found)


_MANY = 2**20
"""The rows and tokens at which the formulas of sizes are compared."""
