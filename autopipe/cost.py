"""What each node costs, as formulas in rows and sequence: operations and bytes moved.

The table gives operations of a forward; backward follows from it:

    forward    flops                        reads its tensors, writes its results
    backward   flops, once for each matrix  reads the results' gradients and its tensors,
               that needs a gradient        writes the gradients

Time is a roofline (Williams, Waterman, Patterson, CACM 2009): the slower of computing and moving,
and at least what the host needs to launch an op.

    seconds = max(flops / rate, bytes / bandwidth) + launches * launch

where a small matmul reaches less than the rate (`autopipe.roofline`). The matmuls of its backward
are of the same three dims. And backward adds what it has made to the gradients of parameters: they
are read twice and written.

    seconds = ... + 3 * gradients / bandwidth

That is so from the second micro-batch on. The gradients of the first are written to memory that is
in no cache, which is counted alike.

Ops that have been measured (`Device.kernels`) take their own start instead of launches, and their
own rate instead of a matmul's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from autopipe.cluster import Device
from autopipe.entering import entering
from autopipe.errors import AutopipeError
from autopipe.fake import views
from autopipe.graph import (
    BATCH,
    READ_OP,
    SEQUENCE,
    Dim,
    Graph,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    at_batch,
    once,
    resolve,
    swap,
    values_in,
)
from autopipe.roofline import reached


@dataclass(frozen=True)
class NodeCost:
    """Formulas of one node.

    Args:
        launches: (forward, backward) ops that the host starts.
        dims: those of its matmul, (m, k, n); none where it is no matmul.
        kernel: under which name a `Device` may know its pace.
        gradients: bytes that backward adds to the gradients of parameters.
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


Specs = Sequence[TensorSpec]
Rule = Callable[[Node, Specs, TensorSpec], Dim]
"""Forward operations from the node, its tensor operands in order and its first result."""

RULES: dict[str, Rule] = {}
"""Operations by op; what is not here does one per element it makes and is bound by its bytes."""


rule = entering(RULES)


def _elements(spec: TensorSpec) -> Dim:
    return sympy.prod(spec.shape)


@rule("linear")
def _linear(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """[..., k] x [n, k] -> [..., n]: a multiplication and an addition per k and result."""
    return 2 * _elements(made) * operands[1].shape[1]


@rule("columns")
def _columns(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Linear layers of one input beside each other."""
    results = sum((_elements(spec) for spec in node.outputs if spec), sympy.Integer(0))
    return 2 * results * operands[0].shape[-1]


@rule("mm", "bmm", "matmul", "mv", "dot")
def _matmul(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """[..., m, k] x [..., k, n] -> [..., m, n]."""
    return 2 * _elements(made) * operands[0].shape[-1]


@rule("addmm", "baddbmm", "addbmm", "addmv")
def _addmm(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """A matmul of the second and third operand; the first is added."""
    return 2 * _elements(made) * operands[1].shape[-1]


@rule("conv1d", "conv2d", "conv3d", "convolution")
def _convolution(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Weight [out, in / groups, *kernel]: each result element needs a whole filter."""
    weight = operands[1]
    return 2 * _elements(made) * (_elements(weight) // weight.shape[0])


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _transposed(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Weight [in, out / groups, *kernel]: each input element spreads over a whole filter."""
    weight = operands[1]
    return 2 * _elements(operands[0]) * (_elements(weight) // weight.shape[0])


@rule("scaled_dot_product_attention")
def _attention(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """q [.., s, d], k [.., t, d], v [.., t, e]: 2 s t d for the scores and 2 s t e for the sum.

    A causal kernel leaves out the half above the diagonal (FlashAttention-2,
    Dao 2023, section 3.1).
    """
    query, key = operands[0], operands[1]
    causal = node.args[5] if len(node.args) > 5 else node.kwargs.get("is_causal", False)
    scores = sympy.prod(query.shape[:-1]) * key.shape[-2]
    flops = 2 * scores * (query.shape[-1] + made.shape[-1])
    return flops / 2 if causal else flops


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Every weight matrix once per time step and row: x [b, t, ...] gives b * t of them."""
    steps = sympy.prod(operands[0].shape[:-1])
    matrices = [spec for spec in operands[1:] if len(spec.shape) == 2]
    return sum((2 * steps * _elements(matrix) for matrix in matrices), sympy.Integer(0))


@rule("einsum")
def _einsum(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """A multiplication and an addition per combination of all the letters."""
    equation = str(node.args[0]).replace(" ", "").split("->")[0]
    sizes: dict[str, Dim] = {}
    for letters, spec in zip(equation.split(","), operands, strict=False):
        if "." in letters or len(letters) != len(spec.shape):
            return 2 * _elements(made)
        sizes.update(zip(letters, spec.shape, strict=True))
    return 2 * sympy.prod(sizes.values())


def _dims(op: str, operands: Specs, made: TensorSpec) -> tuple[Dim, ...]:
    """(m, k, n) of the matmul that an op is; batches of them aside."""
    shapes = [spec.shape for spec in operands]
    match op:
        case "linear" | "columns":
            k = shapes[0][-1]
            return _elements(operands[0]) / k, k, made.shape[-1]
        case "mm" | "bmm" | "matmul" if len(shapes[0]) > 1 and len(shapes[1]) > 1:
            return shapes[0][-2], shapes[0][-1], shapes[1][-1]
        case "addmm" | "baddbmm":
            return shapes[1][-2], shapes[1][-1], shapes[2][-1]
        case "conv1d" | "conv2d" | "conv3d" | "convolution":
            out = made.shape[1]
            return _elements(made) / out, _elements(operands[1]) / out, out
        case "scaled_dot_product_attention":
            return shapes[0][-2], shapes[0][-1], shapes[1][-2]
        case "lstm" | "gru" | "rnn_tanh" | "rnn_relu":
            matrix = next(shape for shape in shapes[1:] if len(shape) == 2)
            return shapes[0][0], matrix[1], matrix[0]
    return ()


_LIKE = {
    **dict.fromkeys(("conv1d", "conv3d", "convolution"), "conv2d"),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), "conv2d"),
    **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), "lstm"),
    **dict.fromkeys(("columns", "addmm", "mm", "bmm", "matmul", "baddbmm"), "linear"),
    **dict.fromkeys(("group_norm", "instance_norm", "rms_norm"), "layer_norm"),
    **dict.fromkeys(("_softmax", "_safe_softmax"), "softmax"),
    **dict.fromkeys(("log", "sin", "cos", "erf"), "exp"),
    "softplus": "sigmoid",
}
"""Ops whose pace is taken from a relative's."""


def _kernel(node: Node, operands: Specs) -> str:
    """The name of a node's pace; attention has three, by what it can be fused with."""
    op = node.op.split(".")[1]
    if op != "scaled_dot_product_attention":
        return _LIKE.get(op, op)
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), node.args[3:], strict=False))
    given |= node.kwargs
    if given.get("dropout_p"):
        return "attention with dropout"
    return "causal attention" if given.get("is_causal") else "attention"


@once
def costs(graph: Graph) -> tuple[NodeCost, ...]:
    """The formulas of every node; they are made once for all nodes that look the same."""
    carrying = gradient_values(graph)
    found = dict[Hashable, NodeCost]()
    looks = [_look(graph, node, carrying) for node in graph.nodes]
    for node, look in zip(graph.nodes, looks, strict=True):
        if look not in found:
            found[look] = _cost(graph, node, carrying)
    return tuple(found[look] for look in looks)


def _look(graph: Graph, node: Node, carrying: frozenset[Ref | State]) -> Hashable:
    """All of a node that its cost depends on: its own name and those of what it reads are not."""
    looks: dict[Value, Any] = {
        value: (number, type(value), graph.spec(value), value in carrying)
        for number, value in enumerate(dict.fromkeys(node.values()))
    }
    carries = tuple(Ref(node.name, number) in carrying for number in range(len(node.outputs)))
    return node.op, swap((node.args, *node.kwargs.items()), looks), node.outputs, carries


@once
def gradient_values(graph: Graph) -> frozenset[Ref | State]:
    """The values through which a gradient flows back to a trainable parameter."""
    carrying: set[Ref | State] = {State(n) for n, s in graph.states.items() if s.trainable}
    for node in graph.nodes:
        if node.grad and node.op not in (READ_OP, "aten.detach.default"):
            if any(value in carrying for value in node.values()):
                carrying |= {
                    Ref(node.name, number)
                    for number, spec in enumerate(node.outputs)
                    if spec is not None and spec.dtype.is_floating_point
                }
    return frozenset(carrying)


def _cost(graph: Graph, node: Node, carrying: frozenset[Ref | State]) -> NodeCost:
    made = [spec for spec in node.outputs if spec is not None]
    dtype = made[0].dtype if made else torch.float32
    nothing = sympy.Integer(0)
    if not made or views(resolve(node.op)) and not node.op.split(".")[1].endswith("_"):
        back = int(any(Ref(node.name, n) in carrying for n in range(len(node.outputs))))
        return NodeCost(nothing, nothing, nothing, nothing, (1, back), dtype)
    values = list(values_in((node.args, tuple(node.kwargs.values()))))
    operands = [graph.spec(value) for value in values]
    formula = RULES.get(node.op.split(".")[1])
    flops = formula(node, operands, made[0]) if formula else _touched(node, operands, made[0])
    dims, kernel = _dims(node.op.split(".")[1], operands, made[0]), _kernel(node, operands)
    written = sum((spec.bytes for spec in made), nothing)
    read = sum((spec.bytes for spec in operands), nothing)
    if node.op == "aten.embedding.default":
        read = made[0].bytes  # only the rows that are looked up
    wanted = [spec for v, spec in zip(values, operands, strict=True) if v in carrying]
    if not any(Ref(node.name, n) in carrying for n in range(len(node.outputs))):
        return NodeCost(flops, read + written, nothing, nothing, (1, 0), dtype, dims, kernel)
    gradients = sum((spec.bytes for spec in wanted), nothing)
    matrices = min(2, sum(len(spec.shape) > 1 for spec in wanted)) if formula else 1
    if node.op.startswith("aten.scaled_dot_product"):
        # dV, dP, dQ, dK and the scores again: 5 matmuls against 2 (FlashAttention-2, section 3.1).
        back_flops = flops * sympy.Rational(5, 2)
    else:
        back_flops = flops * matrices
    moved_back = written + read + gradients
    trained = {v for v in values if isinstance(v, State) and v in carrying}
    added = sum((graph.spec(state).bytes for state in trained), nothing)
    launches = 1, len(wanted)
    return NodeCost(
        flops, read + written, back_flops, moved_back, launches, dtype, dims, kernel, added
    )


def _touched(node: Node, operands: Specs, made: TensorSpec) -> Dim:
    """Elements that an op without a rule works through: those it makes, or all that it reduces."""
    if node.op == "aten.embedding.default":
        return _elements(made)
    every = [sympy.sympify(_elements(spec)) for spec in (made, *operands)]
    lengths = (1, _MANY) if any(size.has(SEQUENCE) for size in every) else (1,)
    found = (
        max(every, key=lambda size: at_batch(size.subs(SEQUENCE, length), _MANY))
        for length in lengths
    )
    return sympy.Max(*found)


_MANY = 2**20
"""Rows, and tokens of a row, by which sizes are compared."""

_RATE = {
    **dict.fromkeys((torch.float32, torch.complex64), "fp32"),
    **dict.fromkeys((torch.float64, torch.complex128), "fp64"),
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The rate of a dtype's products. Whole numbers are counted as fp32: they index and mask."""


def rate_name(dtype: torch.dtype) -> str:
    """The word of `Device.flops` for what a matrix product in `dtype` computes in.

    A dtype of another kind (of 8 bits) is called by its own name, for a cluster file to have.
    """
    return _RATE.get(
        dtype, str(dtype).removeprefix("torch.") if dtype.is_floating_point else "fp32"
    )


def seconds(
    formulas: Sequence[NodeCost],
    rows: int,
    device: Device,
    dtypes: Sequence[torch.dtype] | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward and backward seconds of every node with micro-batches of `rows` rows.

    Args:
        dtypes: what each node computes in, where that is not what the model says.

    Raises:
        AutopipeError: the device has no rate for a dtype that matrix products are in.
    """
    forward_flops, forward_bytes, backward_flops, backward_bytes, added = (
        _evaluate([getattr(cost, name) for cost in formulas], rows)
        for name in (
            "forward_flops",
            "forward_bytes",
            "backward_flops",
            "backward_bytes",
            "gradients",
        )
    )
    dtypes = dtypes or [cost.dtype for cost in formulas]
    shares = _evaluate([_share(cost.dims, device.half) for cost in formulas], rows)
    rates = np.array([_rate(device, d, c) for d, c in zip(dtypes, formulas, strict=True)])
    forward_starts, forward_rates, backward_starts, backward_rates = _paces(
        formulas, device, rates, rates * shares
    )
    forward = np.maximum(forward_flops / forward_rates, forward_bytes / device.bandwidth)
    backward = np.maximum(backward_flops / backward_rates, backward_bytes / device.bandwidth)
    backward += ADDING * added / device.bandwidth
    return forward + forward_starts, backward + backward_starts


ADDING = 3
"""Times that a gradient's bytes move when it is added to another: two are read, one is written."""


def _paces(
    formulas: Sequence[NodeCost],
    device: Device,
    rates: NDArray[np.float64],
    matmuls: NDArray[np.float64],
) -> tuple[NDArray[np.float64], ...]:
    """Starts and rates, forward and backward.

    A kernel's rate is that of fp32. One that multiplies matrices is taken to be as much quicker in
    another dtype as a matmul; the others are as fast in 16 bits as in 32, to which a CPU converts
    them, and in 64 half as fast.
    """
    found = []
    for way in (0, 1):
        starts = np.array([cost.launches[way] * device.launch for cost in formulas])
        own = matmuls.copy()
        for number, cost in enumerate(formulas):
            kernel = device.kernels.get(cost.kernel)
            if kernel is None or not cost.launches[way]:
                continue
            pace = kernel.backward if way else kernel.forward
            starts[number] = pace.start
            if pace.rate and cost.dims:
                own[number] = pace.rate * rates[number] / device.flops.get("fp32", rates[number])
            elif pace.rate:
                own[number] = pace.rate * min(1.0, 4 / cost.dtype.itemsize)
        found += [starts, own]
    return tuple(found)


@lru_cache(maxsize=2**12)
def _share(dims: tuple[Dim, ...], half: float) -> Dim:
    """`roofline.reached` as a formula; one object for all nodes alike."""
    found: Dim = reached(dims, half)
    return found


def _rate(device: Device, dtype: torch.dtype, cost: NodeCost) -> float:
    """Where no matrices are multiplied a rate hardly matters: that of fp32 serves any dtype."""
    name = rate_name(dtype)
    if name not in device.flops and not cost.dims:
        name = "fp32" if "fp32" in device.flops else next(iter(device.flops))
    if name not in device.flops:
        raise AutopipeError(
            f"the model computes in {name}, and {device.kind} has no rate for it, only for "
            f"{', '.join(device.flops)}",
            hint=f"add {name!r} to the device's flops in the cluster file",
        )
    # A product of complex numbers is four of real ones.
    return device.flops[name] / (4 if dtype.is_complex and cost.dims else 1)


def _evaluate(formulas: Sequence[Dim], rows: int) -> NDArray[np.float64]:
    """The formulas at `rows`; equal ones, of which a deep model has many, are evaluated once."""
    number: dict[Dim, int] = {}
    numbers = [number.setdefault(formula, len(number)) for formula in formulas]
    values = _compiled(tuple(number))(rows)
    return np.array([float(value) for value in values])[numbers]


@lru_cache(maxsize=64)
def _compiled(formulas: tuple[Dim, ...]) -> Callable[[int], list[float]]:
    """Python code for some formulas; it serves every number of rows."""
    compiled: Callable[[int], list[float]] = sympy.lambdify(BATCH, list(formulas), "math")
    return compiled
