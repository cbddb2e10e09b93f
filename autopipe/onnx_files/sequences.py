"""Ops on sequences of tensors: lists of Python, as torch's exporter writes a split.

    x --SplitToSequence--> [a, b, c] --SequenceAt 1--> b

How many tensors there are must be known in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopipe.onnx_files.values import Function, NodeOf, Value, as_tensor, ints, sizes


def _split(node: NodeOf, inputs: Sequence[Value]) -> Value:
    x, axis = as_tensor(inputs[0]), node.get("axis", 0)
    if len(inputs) < 2 or inputs[1] is None:
        parts = torch.split(x, 1, axis)
        return [*parts] if node.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    given, single = ints(node, inputs[1]), as_tensor(inputs[1]).ndim == 0
    return [*torch.split(x, int(given[0]) if single else given, axis)]


def _place(node: NodeOf, value: Value) -> int:
    return int(ints(node, value)[0])


def _at(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return _tensors(node, inputs[0])[_place(node, inputs[1])]


def _made(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return [as_tensor(value) for value in inputs]


def _inserted(node: NodeOf, inputs: Sequence[Value]) -> Value:
    found = [*_tensors(node, inputs[0])]
    place = _place(node, inputs[2]) if len(inputs) > 2 else len(found)
    found.insert(place, as_tensor(inputs[1]))
    return found


def _erased(node: NodeOf, inputs: Sequence[Value]) -> Value:
    found = [*_tensors(node, inputs[0])]
    del found[_place(node, inputs[1]) if len(inputs) > 1 else -1]
    return found


def _length(node: NodeOf, inputs: Sequence[Value]) -> Value:
    return sizes([len(_tensors(node, inputs[0]))]).reshape(())


def _joined(node: NodeOf, inputs: Sequence[Value]) -> Value:
    join = torch.stack if node.get("new_axis", 0) else torch.cat
    return join(_tensors(node, inputs[0]), node.get("axis"))


def _tensors(node: NodeOf, value: Value) -> list[Tensor]:
    """A value that is a sequence.

    Raises:
        ModelError: the value is no sequence.
    """
    if not isinstance(value, list):
        raise node.refuse("it is given one tensor, no sequence")
    return value


SEQUENCES: dict[str, Function] = {
    "SplitToSequence": _split,
    "SequenceAt": _at,
    "SequenceConstruct": _made,
    "SequenceEmpty": _made,
    "SequenceInsert": _inserted,
    "SequenceErase": _erased,
    "SequenceLength": _length,
    "ConcatFromSequence": _joined,
}
