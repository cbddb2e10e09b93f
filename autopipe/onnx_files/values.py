"""The values between the nodes of an ONNX graph: tensors, and sizes.

    x --Shape--> [s, 12, 64] --Gather 0--> s --Concat--> [s, 768] --Reshape--> a tensor

ONNX computes shapes with tensors of integers. A trace must know them as numbers, one of which is
the symbol of the rows. So `Shape` gives numbers, an array of Python's ints and of symbols, and ops
on nothing but sizes give sizes (numpy's arrays of objects compute with both). A size that an op on
tensors takes becomes a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autopipe.errors import ModelError

Sizes: TypeAlias = NDArray[Any]
"""Integers, some of which may be symbols."""

Value: TypeAlias = Tensor | Sizes | list[Tensor] | None
"""A list is a sequence (`onnx_files.sequences`); None: an optional input that is not given."""

MOST_SIZES = 64
"""Entries up to which a constant of integers, in one dim or none, may be sizes."""


@dataclass(frozen=True)
class NodeOf:
    """A node of the file.

    Attributes:
        op: its op's name.
        where: for messages: the file, the node's name and its op.
        attributes: as `onnx.helper.get_attribute_value` gives them, text decoded.
        outputs: the number of its results, unnamed ones included.
        read: the number of those that something reads; the first one counts always.
        version: of the op set of the file.
    """

    op: str
    where: str
    attributes: Mapping[str, Any]
    outputs: int
    read: int
    version: int

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute, or its default where the node has none."""
        return self.attributes.get(name, default)

    def refuse(self, what: str, hint: str | None = None) -> ModelError:
        """The error for a node that is not read."""
        return ModelError(f"{self.where}: {what}", hint=hint)


Function = Callable[[NodeOf, Sequence[Value]], Any]
"""Computes a node: of its inputs the result, or a tuple of results."""


def is_sizes(value: Value) -> TypeGuard[Sizes]:
    """Whether a value is known as numbers."""
    return isinstance(value, np.ndarray)


def sizes(values: Sequence[Any]) -> Sizes:
    """Sizes from ints and symbols."""
    found = np.empty(len(values), dtype=object)
    found[:] = list(values)
    return found


def tensor_of(array: NDArray[Any]) -> Tensor:
    """A new tensor of an array's numbers; also of bfloat16, which `ml_dtypes` adds to numpy."""
    own = np.array(array)
    if own.dtype.name == "bfloat16":  # `torch.from_numpy` does not know it
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def as_tensor(value: Value) -> Tensor:
    """A value as a tensor; sizes become one of int64."""
    assert value is not None and not isinstance(value, list)
    if isinstance(value, Tensor):
        return value
    if value.dtype != object:
        return tensor_of(value)
    if value.size and all(isinstance(entry, bool | np.bool_) for entry in value.flat):
        return torch.tensor(value.astype(np.bool_).tolist())
    if all(isinstance(entry, int | np.integer) for entry in value.flat):
        return torch.tensor(value.astype(np.int64).tolist(), dtype=torch.int64)
    made = [torch.full((), entry, dtype=torch.int64) for entry in value.flat]
    return torch.stack(made).reshape(value.shape)


def ints(node: NodeOf, value: Value) -> list[Any]:
    """A value as a list of ints and symbols.

    Raises:
        ModelError: it is computed from the entries of a tensor.
    """
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1))
    if isinstance(value, Tensor) and not value.is_floating_point() and value.numel() <= MOST_SIZES:
        if value.device.type == "cpu" and type(value) is Tensor:
            return [int(entry) for entry in value.reshape(-1).tolist()]
    raise node.refuse("a size is computed from the values of a tensor, and is no number in a trace")


def axes_of(node: NodeOf, inputs: Sequence[Value], place: int, name: str = "axes") -> list[int]:
    """Axes, which newer op sets give as an input and older ones as an attribute; empty: none."""
    given = inputs[place] if len(inputs) > place else None
    if given is not None:
        return [int(axis) for axis in ints(node, given)]
    own = node.get(name)
    return [] if own is None else [int(axis) for axis in ([own] if isinstance(own, int) else own)]


def constant(node: NodeOf) -> NDArray[Any]:
    """What a Constant node holds.

    Raises:
        ModelError: text, or a tensor that is written down by its few entries.
    """
    for name, value in node.attributes.items():
        if name in ("value", "value_int", "value_float", "value_ints", "value_floats"):
            kind = np.float32 if "float" in name else None
            return np.asarray(value, dtype=kind)
    raise node.refuse("a constant of text, or one of few entries, is not read")
