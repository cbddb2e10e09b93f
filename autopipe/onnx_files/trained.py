"""Which initializers of an ONNX file training changes: parameters, and not constants or buffers.

ONNX has one word, initializer, for all three. Two things tell them apart:

    the op that reads it     running means, weights of classes, scales of a resize: not trained
    torch's exporter         notes at each value whether it was a parameter, a buffer or a constant,
                             and of what it was computed while exporting: val_7 of [layer.weight]

A file without such notes has its floats trained, single numbers excepted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

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

KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
"""The note of torch's exporter on what a value was in the model."""

FOLDED = "pkg.onnxscript.optimizer.folded_from"
"""Its note on a value that it computed itself: a list of names, as Python writes it."""

MADE = re.compile(r"(val|lifted_tensor)_\d+")
"""Names that the exporter gives to numbers in the model's code; no parameter has one."""


def trained_names(graph: onnx.GraphProto) -> frozenset[str]:
    """The initializers that training changes."""
    fixed = {
        node.input[place]
        for node in _nodes(graph)
        for place in FIXED.get(node.op_type, ())
        if place < len(node.input)
    }
    floating = {number for number, dtype in DTYPES.items() if dtype.is_floating_point}
    notes = {
        value.name: {entry.key: entry.value for entry in value.metadata_props}
        for value in (*graph.value_info, *graph.input)
    }
    exact = any(FOLDED in told for told in notes.values())
    return frozenset(
        tensor.name
        for tensor in graph.initializer
        if tensor.data_type in floating
        and tensor.name not in fixed
        and len(tensor.dims)
        and not _is_constant(tensor, notes.get(tensor.name, {}), exact)
    )


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


def _is_constant(tensor: onnx.TensorProto, told: dict[str, str], exact: bool) -> bool:
    """Whether the exporter says that an initializer is no parameter.

    Args:
        tensor: the initializer.
        told: what the exporter notes at it.
        exact: whether the file has notes on what values were computed of: without one, a value
            with a name of the exporter's own is then a number in the model's code.
    """
    if KIND in told:
        return told[KIND] != "PARAMETER"
    if FOLDED not in told:
        return exact and MADE.fullmatch(tensor.name) is not None
    names = [str(name) for name in ast.literal_eval(told[FOLDED])]
    numbers = [name for name in names if MADE.fullmatch(name)]
    # A buffer and a parameter that were computed with have the same notes: both are trained.
    return bool(numbers) and all(name in numbers or _is_op(name) for name in names)


def _is_op(name: str) -> bool:
    """Whether a name is that of a result of an op, `arange_1`, and of no parameter."""
    own = re.sub(r"(_default)?(_\d+)?$", "", name)
    return own == "convert_element_type" or hasattr(torch.ops.aten, own)
