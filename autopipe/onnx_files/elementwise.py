"""Ops on each entry, reductions and sums up to each entry (onnx.ai/onnx/operators)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor, axes_of, ints, is_sizes

DTYPES = {
    **{1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32},
    **{7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64, 16: torch.bfloat16},
}
"""By the number of `onnx.TensorProto.DataType`."""


def dtype_of(node: NodeOf, number: int) -> torch.dtype:
    """The dtype of a number.

    Raises:
        ModelError: torch has no such dtype that gradients go through.
    """
    if number not in DTYPES:
        raise node.refuse(f"data type {number} is not read")
    return DTYPES[number]


def of_tensors(function: Callable[..., Tensor]) -> Function:
    """A node's function from a function of tensors alone."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        return function(*(as_tensor(value) for value in inputs if value is not None))

    return compute


def of_either(on_sizes: Callable[..., Any], on_tensors: Callable[..., Tensor]) -> Function:
    """A node's function that returns sizes if all inputs are sizes, else a tensor."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Value:
        if all(is_sizes(value) for value in inputs):
            return np.asarray(on_sizes(*inputs), dtype=object)
        return on_tensors(*(as_tensor(value) for value in inputs))

    return compute


def _divide(left: Tensor, right: Tensor) -> Tensor:
    if left.is_floating_point():
        return left / right
    return torch.div(left, right, rounding_mode="trunc")


def _divide_sizes(left: Any, right: Any) -> Any:
    """Integers divided towards zero. With a symbol among them they are taken for positive."""
    entries = (entry for side in (left, right) for entry in np.asarray(side).flat)
    if not all(isinstance(entry, int | np.integer) for entry in entries):
        return np.floor_divide(left, right)
    left, right = np.asarray(left, dtype=np.int64), np.asarray(right, dtype=np.int64)
    return np.sign(left) * np.sign(right) * (abs(left) // abs(right))


def _mod(node: NodeOf, inputs: Sequence[Value]) -> Value:
    if all(is_sizes(value) for value in inputs):
        return np.asarray(inputs[0] % inputs[1], dtype=object)  # type: ignore[operator]
    left, right = map(as_tensor, inputs)
    return torch.fmod(left, right) if node.get("fmod", 0) else torch.remainder(left, right)


def _cast(node: NodeOf, inputs: Sequence[Value]) -> Value:
    dtype = dtype_of(node, node.get("to"))
    if is_sizes(inputs[0]) and not dtype.is_floating_point:
        return np.asarray(inputs[0] != 0, dtype=object) if dtype == torch.bool else inputs[0]
    return as_tensor(inputs[0]).to(dtype)


def _cast_like(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return as_tensor(inputs[0]).to(as_tensor(inputs[1]).dtype)


def _clip(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x = as_tensor(inputs[0])
    least, most = ([*inputs[1:], None, None])[:2]
    low = as_tensor(least) if least is not None else node.get("min")
    high = as_tensor(most) if most is not None else node.get("max")
    if low is None and high is None:
        return x
    return torch.clamp(x, low, high)


def _gelu(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return F.gelu(as_tensor(inputs[0]), approximate=node.get("approximate", "none"))


def _softmax(function: Callable[..., Tensor]) -> Function:
    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        x = as_tensor(inputs[0])
        if node.version >= 13:
            return function(x, dim=node.get("axis", -1))
        axis = node.get("axis", 1) % max(x.ndim, 1)  # all dims from this one on are one
        return function(x.flatten(axis), dim=-1).reshape(x.shape)

    return compute


def _with(function: Callable[..., Tensor], **given: tuple[str, float]) -> Function:
    """A function of one tensor, and of attributes: torch's name = (ONNX's, default)."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        more = {ours: node.get(name, default) for ours, (name, default) in given.items()}
        return function(as_tensor(inputs[0]), **more)

    return compute


def _power(base: Tensor, exponent: Tensor) -> Tensor:
    return torch.pow(base, exponent).to(base.dtype)


def _is_infinite(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, none = as_tensor(inputs[0]), torch.zeros((), dtype=torch.bool)
    up = torch.isposinf(x) if node.get("detect_positive", 1) else none
    return up | (torch.isneginf(x) if node.get("detect_negative", 1) else none)


def _selu(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, own = as_tensor(inputs[0]), node.attributes.keys() & {"alpha", "gamma"}
    if not own:  # of the paper, which are torch's
        return F.selu(x)
    alpha, gamma = node.get("alpha", 1.6732631921768188), node.get("gamma", 1.0507010221481323)
    made: Tensor = gamma * F.elu(x, alpha)
    return made


def _thresholded(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    return F.threshold(as_tensor(inputs[0]), node.get("alpha", 1.0), 0.0)


def _shrunk(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, bias, edge = as_tensor(inputs[0]), node.get("bias", 0.0), node.get("lambd", 0.5)
    outer = torch.where(x > edge, x - bias, torch.zeros_like(x))
    return torch.where(x < -edge, x + bias, outer)


def _prelu(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, slope = map(as_tensor, inputs)
    if node.version < 7 and slope.numel() > 1:  # then one for each channel; later, as * broadcasts
        slope = slope.reshape(-1, *(1 for _ in x.shape[2:]))
    return torch.where(x >= 0, x, x * slope)


def _swish(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x, alpha = as_tensor(inputs[0]), node.get("alpha", 1.0)
    return F.silu(x) if alpha == 1.0 else x * torch.sigmoid(alpha * x)


def _hard_sigmoid(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    x = as_tensor(inputs[0])
    return torch.clamp(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0.0, 1.0)


def _many(function: Callable[[Tensor, Tensor], Tensor]) -> Function:
    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        found: Tensor = functools.reduce(function, map(as_tensor, inputs))
        return found

    return compute


def _mean(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
    total: Tensor = functools.reduce(torch.add, map(as_tensor, inputs))
    return total / len(inputs)


def _reduced(function: Callable[..., Tensor]) -> Function:
    """A reduction over the axes of an attribute or of the second input."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        x, axes = as_tensor(inputs[0]), axes_of(node, inputs, 1)
        if not axes and node.get("noop_with_empty_axes", 0):
            return x
        dims = tuple(axes) or tuple(range(x.ndim))
        return function(x, dims, bool(node.get("keepdims", 1)))

    return compute


def _product(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    for dim in sorted((dim % x.ndim for dim in dims), reverse=True):
        x = x.prod(dim, keepdim)
    return x


def _norm(x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(x, 2, dims, keepdim)
    return found


def _where(condition: Any, yes: Any, no: Any) -> Any:
    return np.where(condition.astype(bool), yes, no)


def _cumulated(function: Callable[..., Tensor], before: float) -> Function:
    """Sums or products up to each place; `before` is the sum or product of no entries."""

    def compute(node: NodeOf, inputs: Sequence[Value]) -> Tensor:
        x, axis = as_tensor(inputs[0]), int(ints(node, inputs[1])[0])
        x = x.flip(axis) if node.get("reverse", 0) else x
        if node.get("exclusive", 0):
            none = torch.full_like(x.narrow(axis, 0, 1), before)
            x = torch.cat([none, x.narrow(axis, 0, x.shape[axis] - 1)], axis)
        made = function(x, axis, dtype=x.dtype)
        return made.flip(axis) if node.get("reverse", 0) else made

    return compute


ELEMENTWISE: dict[str, Function] = {
    "Add": of_either(np.add, torch.add),
    "Sub": of_either(np.subtract, torch.sub),
    "Mul": of_either(np.multiply, torch.mul),
    "Div": of_either(_divide_sizes, _divide),
    "Mod": _mod,
    "Equal": of_either(np.equal, torch.eq),
    "Where": of_either(_where, torch.where),
    "Neg": of_either(np.negative, torch.neg),
    "Pow": of_tensors(_power),
    **{
        name: of_tensors(getattr(torch, name.lower()))
        for name in (
            *("Abs", "Sqrt", "Exp", "Log", "Erf", "Tanh", "Sigmoid", "Relu", "Sin", "Cos", "Tan"),
            *("Asin", "Acos", "Atan", "Sinh", "Cosh", "Reciprocal", "Floor", "Ceil", "Round"),
            *("Asinh", "Acosh", "Atanh", "Sign", "IsNaN"),
        )
    },
    **{
        f"Bitwise{name}": of_tensors(getattr(torch, f"bitwise_{name.lower()}"))
        for name in ("And", "Or", "Xor", "Not")
    },
    "IsInf": _is_infinite,
    "Greater": of_either(np.greater, torch.gt),
    "Less": of_either(np.less, torch.lt),
    "GreaterOrEqual": of_either(np.greater_equal, torch.ge),
    "LessOrEqual": of_either(np.less_equal, torch.le),
    "Not": of_either(np.logical_not, torch.logical_not),
    "And": of_either(np.logical_and, torch.logical_and),
    "Or": of_either(np.logical_or, torch.logical_or),
    "Xor": of_tensors(torch.logical_xor),
    "Cast": _cast,
    "CastLike": _cast_like,
    "Clip": _clip,
    "Gelu": _gelu,
    "PRelu": _prelu,
    "Swish": _swish,
    "HardSigmoid": _hard_sigmoid,
    "HardSwish": of_tensors(F.hardswish),
    "Mish": of_tensors(F.mish),
    "Softplus": of_tensors(F.softplus),
    "Softsign": of_tensors(F.softsign),
    "LeakyRelu": _with(F.leaky_relu, negative_slope=("alpha", 0.01)),
    "Elu": _with(F.elu, alpha=("alpha", 1.0)),
    "Celu": _with(F.celu, alpha=("alpha", 1.0)),
    "Selu": _selu,
    "ThresholdedRelu": _thresholded,
    "Shrink": _shrunk,
    "Softmax": _softmax(torch.softmax),
    "LogSoftmax": _softmax(torch.log_softmax),
    "Sum": _many(torch.add),
    "Mean": _mean,
    "Max": _many(torch.maximum),
    "Min": _many(torch.minimum),
    "CumSum": _cumulated(torch.cumsum, 0),
    "CumProd": _cumulated(torch.cumprod, 1),
    "ReduceMean": _reduced(torch.mean),
    "ReduceSum": _reduced(torch.sum),
    "ReduceMax": _reduced(torch.amax),
    "ReduceMin": _reduced(torch.amin),
    "ReduceProd": _reduced(_product),
    "ReduceL1": _reduced(lambda x, dims, keepdim: x.abs().sum(dims, keepdim)),
    "ReduceL2": _reduced(_norm),
    "ReduceLogSum": _reduced(lambda x, dims, keepdim: x.sum(dims, keepdim).log()),
    "ReduceSumSquare": _reduced(lambda x, dims, keepdim: x.square().sum(dims, keepdim)),
    "ReduceLogSumExp": _reduced(torch.logsumexp),
}
