"""Ops that compute with sizes, or move entries (onnx.ai/onnx/operators)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from autopipe.onnx_files.elementwise import dtype_of
from autopipe.onnx_files.values import (
    Function,
    NodeOf,
    Value,
    as_tensor,
    axes_of,
    ints,
    is_sizes,
    sizes,
    tensor_of,
)

_REDUCED = {"mul": "prod", "max": "amax", "min": "amin"}
"""Torch's words for how entries that go to one place are put together."""

_FAR = 2**31
"""From here on the end of a slice means the end of the dim."""


def _is(size: Any, number: int) -> bool:
    """Whether a size is a known number and equals this one; a symbol is never compared."""
    return isinstance(size, int | np.integer) and size == number


def _shape(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x = as_tensor(inputs[0])
    return sizes(list(x.shape)[node.get("start", 0) : node.get("end", x.ndim)])


def _size(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return np.array(as_tensor(inputs[0]).numel(), dtype=object)


def _identity(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return inputs[0]


def _reshape(node: NodeOf, inputs: Sequence[Value]) -> Value:
    shape = ints(node, inputs[1])
    if is_sizes(inputs[0]):
        return np.reshape(inputs[0], [int(size) for size in shape])
    x = as_tensor(inputs[0])
    if not node.get("allowzero", 0):  # a 0 keeps the dim
        shape = [x.shape[n] if _is(size, 0) else size for n, size in enumerate(shape)]
    return x.reshape(shape)


def _flatten(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, axis = as_tensor(inputs[0]), node.get("axis", 1)
    axis = axis % x.ndim if axis < 0 else axis
    if axis == 0:
        return x.reshape(1, -1)
    return x.flatten(axis).flatten(0, axis - 1) if axis < x.ndim else x.flatten()[:, None]


def _transpose(node: NodeOf, inputs: Sequence[Value]) -> Value:
    if is_sizes(inputs[0]):  # of the ends that a Pad takes, in pairs
        return np.transpose(inputs[0], node.get("perm"))
    x = as_tensor(inputs[0])
    return x.permute(node.get("perm") or tuple(reversed(range(x.ndim))))


def _squeeze(node: NodeOf, inputs: Sequence[Value]) -> Value:
    axes = axes_of(node, inputs, 1)
    if is_sizes(inputs[0]):
        return np.squeeze(inputs[0], tuple(axes) or None)
    x = as_tensor(inputs[0])
    return x.squeeze(tuple(axes)) if axes else x.squeeze()


def _unsqueeze(node: NodeOf, inputs: Sequence[Value]) -> Value:
    axes = axes_of(node, inputs, 1)
    if is_sizes(inputs[0]):
        return np.expand_dims(inputs[0], tuple(axes))
    x = as_tensor(inputs[0])
    for axis in sorted(axis % (x.ndim + len(axes)) for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _concat(node: NodeOf, inputs: Sequence[Value]) -> Value:
    if all(is_sizes(value) for value in inputs):
        return np.concatenate([np.asarray(value, dtype=object) for value in inputs])
    return torch.cat([as_tensor(value) for value in inputs], dim=node.get("axis"))


def _split(node: NodeOf, inputs: Sequence[Value]) -> tuple[Tensor, ...]:
    x, axis = as_tensor(inputs[0]), node.get("axis", 0)
    if lengths := axes_of(node, inputs, 1, "split"):
        return torch.split(x, lengths, axis)
    return torch.split(x, -(-x.shape[axis] // node.get("num_outputs", node.outputs)), axis)


def _slice(node: NodeOf, inputs: Sequence[Value]) -> Value:
    if node.version < 10:
        starts, ends, axes, steps = node.get("starts"), node.get("ends"), node.get("axes"), None
    else:
        told = [None if value is None else ints(node, value) for value in inputs[1:]]
        starts, ends, axes, steps = (*told, None, None)[:4]
    axes = list(range(len(starts))) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    x: Any = inputs[0]
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        stop = None if type(end) is int and abs(end) >= _FAR else end
        if step < 0 and not is_sizes(x):
            x = _backwards(node, as_tensor(x), axis, start, end, step)
        else:
            x = x[(slice(None),) * (axis % x.ndim) + (slice(start, stop, step),)]
    return x  # type: ignore[no-any-return]


def _backwards(node: NodeOf, x: Tensor, axis: int, start: int, end: int, step: int) -> Tensor:
    if start != -1 or end > -_FAR or step != -1:
        raise node.refuse("a slice backwards is read of a whole dim, one by one, only")
    return x.flip(axis)


def _gather(node: NodeOf, inputs: Sequence[Value]) -> Value:
    axis = node.get("axis", 0)
    if is_sizes(inputs[0]):
        return np.asarray(np.take(inputs[0], np.asarray(inputs[1], dtype=int), axis), dtype=object)
    x, given = as_tensor(inputs[0]), inputs[1]
    axis %= x.ndim
    if isinstance(given, np.ndarray) and given.ndim == 0:
        return x.select(axis, int(given))
    index = as_tensor(given)
    if is_sizes(given):  # numbers may count from the end; tokens do not
        index = _places(index, x.shape[axis])
    if axis == 0 and x.ndim == 2 and not is_sizes(given):
        return F.embedding(index, x)
    return x.index_select(axis, index.reshape(-1)).reshape(
        *x.shape[:axis], *index.shape, *x.shape[axis + 1 :]
    )


def _places(index: Tensor, size: int) -> Tensor:
    """Places in a dim of this size; negative places count from its end."""
    return torch.where(index < 0, index + size, index)


def _gather_elements(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, axis = as_tensor(inputs[0]), node.get("axis", 0)
    return torch.gather(x, axis, _places(as_tensor(inputs[1]), x.shape[axis]))


def _gather_nd(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, index = as_tensor(inputs[0]), as_tensor(inputs[1])
    rows = index.ndim - 1
    batch = [
        torch.arange(x.shape[dim]).reshape([-1 if n == dim else 1 for n in range(rows)])
        for dim in range(node.get("batch_dims", 0))
    ]
    return x[tuple([*batch, *index.unbind(-1)])]


def _scatter_nd(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, index, updates = map(as_tensor, inputs)
    how = node.get("reduction", "none")
    places = index.unbind(-1)
    if how in ("none", "add"):
        return x.index_put(places, updates, how == "add")
    row = torch.zeros_like(places[0])  # of the first dims as one
    for size, place in zip(x.shape, places, strict=False):
        row = row * size + _places(place, size)
    flat = x.flatten(0, len(places) - 1).flatten(1) if x.ndim > len(places) else x.reshape(-1, 1)
    rows = row.reshape(-1, 1).expand(-1, flat.shape[1])
    updates = updates.reshape(-1, flat.shape[1])
    return flat.scatter_reduce(0, rows, updates, _REDUCED[how]).reshape(x.shape)


def _scatter_elements(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, index, updates = map(as_tensor, inputs)
    how, axis = node.get("reduction", "none"), node.get("axis", 0)
    index = _places(index, x.shape[axis])
    if how == "none":
        return x.scatter(axis, index, updates)
    if how == "add":
        return x.scatter_add(axis, index, updates)
    return x.scatter_reduce(axis, index, updates, _REDUCED[how])


def _expand(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, shape = as_tensor(inputs[0]), ints(node, inputs[1])
    whole = [1] * (x.ndim - len(shape)) + shape
    own = [1] * (len(whole) - x.ndim) + list(x.shape)
    # A size of 1 stays as it is: ONNX expands to the larger of the two.
    wanted = [a if _is(b, 1) else b for a, b in zip(own, whole, strict=True)]
    return x.expand(wanted)


def _tile(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return as_tensor(inputs[0]).repeat(ints(node, inputs[1]))


def _range(node: NodeOf, inputs: Sequence[Value]) -> Value:
    if not all(is_sizes(value) for value in inputs):
        first, last, step = (as_tensor(value) for value in inputs)
        return torch.arange(first.item(), last.item(), step.item(), dtype=first.dtype)
    first, last, step = (ints(node, value)[0] for value in inputs)
    return torch.arange(first, last, step)


def _full(node: NodeOf, inputs: Sequence[Value]) -> Value:
    given = node.get("value")
    value = 0.0 if given is None else given.item()
    dtype = torch.float32 if given is None else tensor_of(given).dtype
    shape = ints(node, inputs[0])
    if dtype == torch.int64 and len(shape) == 1 and isinstance(shape[0], int | np.integer):
        return sizes([value] * int(shape[0]))
    return torch.full(shape, value, dtype=dtype)


def _pad(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, mode = as_tensor(inputs[0]), node.get("mode", "constant")
    pads = node.get("pads") if node.version < 11 else ints(node, inputs[1])
    axes = axes_of(node, inputs, 3) or list(range(x.ndim))
    by_axis = {axis % x.ndim: (pads[n], pads[n + len(axes)]) for n, axis in enumerate(axes)}
    order = [side for axis in reversed(range(x.ndim)) for side in by_axis.get(axis, (0, 0))]
    while len(order) > 2 and order[-2:] == [0, 0]:
        order = order[:-2]
    fill = inputs[2] if len(inputs) > 2 else None
    names = {"constant": "constant", "reflect": "reflect", "edge": "replicate"}
    if mode not in names:
        raise node.refuse(f"mode={mode!r} is not read")
    value = node.get("value", 0.0) if fill is None else as_tensor(fill).reshape(-1)[0].item()
    return F.pad(x, order, names[mode], value if mode == "constant" else None)


def _numbers(node: NodeOf, value: Value) -> list[Any]:
    """As `ints`, of a constant that the file may have as floats."""
    if type(value) is Tensor and value.is_floating_point():
        value = value.long()
    return ints(node, value)


def _one_hot(node: NodeOf, inputs: Sequence[Value]) -> Value:
    (count,), axis = _numbers(node, inputs[1]), node.get("axis", -1)
    if is_sizes(inputs[0]) and is_sizes(inputs[2]) and axis == -1:  # how often a Tile repeats
        off, on = ints(node, inputs[2])
        rows = [
            [on if n == k % count else off for n in range(count)] for k in ints(node, inputs[0])
        ]
        return np.stack([sizes(row) for row in rows])
    index = as_tensor(inputs[0]).long()
    off, on = as_tensor(inputs[2]).unbind()
    index = _places(index, count).unsqueeze(axis)
    shape = [1] * index.ndim
    shape[axis] = count
    return torch.where(index == torch.arange(count).reshape(shape), on, off)


def _trilu(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x = as_tensor(inputs[0])
    diagonal = ints(node, inputs[1])[0] if len(inputs) > 1 and inputs[1] is not None else 0
    return torch.triu(x, diagonal) if node.get("upper", 1) else torch.tril(x, diagonal)


def _eye(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, number = as_tensor(inputs[0]), node.get("dtype")
    rows, columns = (torch.arange(size) for size in x.shape)
    dtype = x.dtype if number is None else dtype_of(node, number)
    offsets = columns[None] - rows[:, None]
    return torch.eq(offsets, node.get("k", 0)).to(dtype)


def _largest(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x = as_tensor(inputs[0])
    found = x.argmax if node.op == "ArgMax" else x.argmin
    return found(node.get("axis", 0), bool(node.get("keepdims", 1)))


def _top(node: NodeOf, inputs: Sequence[Value]) -> tuple[Tensor, ...]:
    """The largest entries; of equal ones the first come first, which torch.topk leaves open."""
    count = int(ints(node, inputs[1])[0] if len(inputs) > 1 else node.get("k"))
    dim = node.get("axis", -1)
    found = torch.sort(
        as_tensor(inputs[0]), dim=dim, descending=bool(node.get("largest", 1)), stable=True
    )
    return tuple(part.narrow(dim, 0, count) for part in found)


def _nonzero(node: NodeOf, inputs: Sequence[Value]) -> Value:
    """Places of entries that are not zero, a column each; of sizes, they are sizes."""
    if is_sizes(inputs[0]):
        return np.stack(np.nonzero(inputs[0])).astype(object)
    x = as_tensor(inputs[0])
    if type(x) is not Tensor:  # in a trace
        raise node.refuse(
            "how many entries are not zero depends on values; no plan has a size for it"
        )
    return torch.nonzero(x).t()


def _compressed(node: NodeOf, inputs: Sequence[Value]) -> Value:
    """The entries that a constant chooses."""
    chosen = as_tensor(inputs[1])
    if type(chosen) is not Tensor:
        raise node.refuse("how many entries it keeps depends on values; no plan has a size for it")
    x, axis = as_tensor(inputs[0]), node.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(axis, torch.nonzero(chosen).reshape(-1))


SHAPES: dict[str, Function] = {
    "Shape": _shape,
    "Size": _size,
    "Identity": _identity,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Concat": _concat,
    "Split": _split,
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "Scatter": _scatter_elements,  # as it was called before op set 11
    "ScatterElements": _scatter_elements,
    "NonZero": _nonzero,
    "Expand": _expand,
    "Tile": _tile,
    "Range": _range,
    "ConstantOfShape": _full,
    "Pad": _pad,
    "Compress": _compressed,
    "OneHot": _one_hot,
    "Trilu": _trilu,
    "EyeLike": _eye,
    "ArgMax": _largest,
    "ArgMin": _largest,
    "TopK": _top,
}
