"""Which initializers of an ONNX file training changes: parameters, and not constants or buffers.

ONNX has one word, initializer, for all three. Two things tell them apart:

    the op that reads it     running means, weights of classes, scales of a resize: not trained
    torch's exporter         notes at each value whether it was a parameter, a buffer or a constant,
                             and of what it was computed while exporting: val_7 of [layer.weight]

A file without such notes has its floats trained, single numbers and masks excepted, and `facts`
says so: nobody else knows which of them were buffers.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from autopipe.onnx_files.elementwise import DTYPES

if TYPE_CHECKING:
    import onnx

FIXED = {
    "BatchNormalization": (3, 4),
    "NegativeLogLikelihoodLoss": (2,),
    "Resize": (1, 2),
    "SoftmaxCrossEntropyLoss": (2,),
    "Upsample": (1,),
}
"""By the op, which of its inputs are figures that no gradient changes: means and variances, weights
of classes, scales."""

FLOATS = frozenset(number for number, dtype in DTYPES.items() if dtype.is_floating_point)
"""ONNX's numbers of the data types of floats."""

SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
"""The note of torch's exporter on all parameters and buffers that the model had."""

PARAMETER = "PARAMETER"
"""What it calls a parameter, there and in the notes on values."""

_INPUT = re.compile(r"^(\w+): (\w+) target='([^']*)'", re.MULTILINE)
"""A line of it: what a graph calls a parameter, its kind, and its name in the model."""

_MASKED = 1e30
"""From here on a number stands for infinity, in a mask."""

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The note of torch's exporter on what a value was in the model."""

FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Its note on a value that it computed itself: a list of names, as Python writes it."""

MADE = re.compile(r"(val|lifted_tensor)_\d+")
"""Names that the exporter gives to numbers in the model's code; no parameter has one."""


def signature(graph: onnx.GraphProto) -> dict[str, tuple[str, str]]:
    """The name and the kind of what the exported model had, by what its graph called it."""
    told = next((one.value for one in graph.metadata_props if one.key == SIGNATURE), "")
    return {called: (name, kind) for called, kind, name in _INPUT.findall(told)}


def folded(graph: onnx.GraphProto) -> dict[str, list[str]]:
    """Of what values the exporter computed a value that it keeps, by its name."""
    return {
        value.name: [str(name) for name in ast.literal_eval(entry.value)]
        for value in (*graph.value_info, *graph.input)
        for entry in value.metadata_props
        if entry.key == FOLDED
    }


def trained_names(graph: onnx.GraphProto) -> frozenset[str]:
    """The initializers that training changes."""
    fixed = {
        node.input[place]
        for node in _nodes(graph)
        for place in FIXED.get(node.op_type, ())
        if place < len(node.input)
    }
    notes = {
        value.name: {entry.key: entry.value for entry in value.metadata_props}
        for value in (*graph.value_info, *graph.input)
    }
    made, kinds = folded(graph), dict(signature(graph).values())
    return frozenset(
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type in FLOATS
        and tensor.name not in fixed
        and len(tensor.dims)
        and not _is_constant(tensor, notes.get(tensor.name, {}), made, kinds)
    )


def is_mask(array: np.ndarray[Any, Any]) -> bool:
    """Whether an infinity is among the entries of floats, or a number in place of one."""
    with np.errstate(invalid="ignore"):  # of an array with nan both are nan, and it is no mask
        return bool(array.size) and max(float(array.max()), -float(array.min())) >= _MASKED


def told(graph: onnx.GraphProto) -> bool:
    """Whether the exporter says of any value what it was in the model."""
    notes = (entry for value in (*graph.value_info, *graph.input) for entry in value.metadata_props)
    return bool(signature(graph)) or any(entry.key in (KIND, FOLDED) for entry in notes)


def mixed(graph: onnx.GraphProto) -> Iterator[str]:
    """Each value that the exporter computed of several parameters, or of one and a buffer: of a
    weight and its mask, of a size and a direction (`weight_norm`)."""
    kinds = dict(signature(graph).values())
    for name, names in folded(graph).items():
        known = [one for one in names if one in kinds]
        if len(known) > 1 and PARAMETER in (kinds[one] for one in known):
            yield f"{name} (of {' and '.join(known[:2])})"


def few(names: Sequence[str]) -> str:
    """Names in a line, the first four."""
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + more


def read_names(graph: onnx.GraphProto) -> frozenset[str]:
    """The values that a node reads or that are results, of a graph and of the graphs in it."""
    inner = (own.g for node in _nodes(graph) for own in node.attribute)
    results = (value.name for each in (graph, *inner) for value in each.output)
    return frozenset((*(name for node in _nodes(graph) for name in node.input), *results))


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """The nodes of a graph, and of the graphs in them."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            yield from _nodes(attribute.g)


def _is_constant(
    tensor: onnx.TensorProto,
    told: dict[str, str],
    made: dict[str, list[str]],
    kinds: dict[str, str],
) -> bool:
    """Whether the exporter says that an initializer is no parameter.

    Args:
        tensor: the initializer.
        told: what the exporter notes at it.
        made: of what values the exporter computed others, by name. Without any, a value with a
            name of its own is a number in the model's code.
        kinds: what the model's parameters and buffers were, by name.
    """
    if KIND in told:
        return told[KIND] != PARAMETER
    if tensor.name not in made:
        return bool(made) and MADE.fullmatch(tensor.name) is not None
    others = [name for name in made[tensor.name] if not MADE.fullmatch(name)]
    # Without a signature a buffer that was computed with has the notes of a parameter: trained.
    known = [name for name in others if name in kinds or not _is_op(name)]
    if kinds and all(name in kinds for name in known):
        return all(kinds[name] != PARAMETER for name in known)
    return len(others) < len(made[tensor.name]) and not known


def _is_op(name: str) -> bool:
    """Whether a name is that of a result of an op, `arange_1`, and of no parameter."""
    own = re.sub(r"(_default)?(_\d+)?$", "", name)
    return own == "convert_element_type" or hasattr(torch.ops.aten, own)
