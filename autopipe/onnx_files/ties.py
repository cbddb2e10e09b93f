"""Weights that a file holds more than once, and those that its exporter has made one of.

    the same numbers, transposed or not, in two matrices     one weight (`Matrices`)
    one tensor of equal entries that several layers read     a parameter for each (`apart`)

An exporter writes equal tensors once. Layers of random weights are not equal by chance; but the
norms of a model that was never trained are ones, and its biases zeros: one parameter in the file,
and many in the model. Torch's exporters tell which:

    dynamo        what the model had, and at each node what its op read: linear(x, p_b_weight)
    TorchScript   a node for each:  a.weight --Identity--> b.weight
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from autopipe.onnx_files.elementwise import DTYPES
from autopipe.onnx_files.trained import FLOATS, KIND, PARAMETER, folded, signature

if TYPE_CHECKING:
    import onnx

CALL = "pkg.torch.onnx.fx_node"
"""The note of torch's exporter at a node: the op that it is made of, with its arguments."""

NORMS = ("BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization")
"""Ops that read what torch's own read, in its order."""


class Matrices:
    """Finds matrices that equal earlier ones, or the transpose of one, and are one parameter.

    Args:
        origins: of what parameter of the exported model a tensor is, by its name, if that is known.
    """

    def __init__(self, origins: Mapping[str, str]) -> None:
        self._origins = origins
        self._seen: dict[Any, list[tuple[str, np.ndarray[Any, Any]]]] = {}
        self._origin_of: dict[str, str | None] = {}

    def add(self, name: str, path: str, array: np.ndarray[Any, Any]) -> None:
        """Know a parameter by its path in the module, if it is a matrix."""
        if array.ndim == 2 and array.size:
            self._seen.setdefault(_ends(array), []).append((path, array))
            self._origin_of[path] = self._origins.get(name)

    def tie(self, name: str, array: np.ndarray[Any, Any]) -> tuple[str, bool] | None:
        """The path of a known matrix that this one equals, and whether transposed."""
        origin = self._origins.get(name)
        if array.ndim != 2 or not array.size:
            return None
        for same, turned in ((array, False), (array.T, True)):
            for path, seen in self._seen.get(_ends(same), ()):
                if np.array_equal(same, seen) and self._origin_of[path] in (None, origin):
                    # Constants of ones or zeros may be equal without being one parameter.
                    return None if (seen == seen.flat[0]).all() else (path, turned)
        return None


def _ends(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Shape, dtype and two corners of a matrix, which tell most matrices apart."""
    return array.shape, array.dtype.str, float(array[0, 0]), float(array[-1, -1])


def origins(graph: onnx.GraphProto) -> dict[str, str]:
    """Of what single parameter of the model each value is that the exporter has kept."""
    kinds = dict(signature(graph).values())
    found = {name: name for name, kind in kinds.items() if kind == PARAMETER}
    for name, names in folded(graph).items():
        own = [one for one in names if kinds.get(one) == PARAMETER]
        if len(own) == 1:
            found[name] = own[0]
    return found


def apart(graph: onnx.GraphProto) -> tuple[list[str], list[str]]:
    """Give each layer a parameter of its own where an exporter has made one of several equal ones,
    and its zeros back where it has left them out. Changes the graph.

    Returns:
        the names of the parameters that are new in it; and of those that the exported model had,
        and that are not in it.
    """
    held = {t.name: t for t in graph.initializer if t.data_type in FLOATS and len(t.dims)}
    copies = [*_by_copies(graph, held)]
    new, lost = Merged(graph, held).apart()
    return copies + new, lost


def _by_copies(graph: onnx.GraphProto, held: dict[str, onnx.TensorProto]) -> Iterator[str]:
    """What TorchScript's exporter copies under the names of other parameters."""
    for node in [*graph.node]:
        if node.op_type == "Identity" and node.input[0] in held and _is_even(held[node.input[0]]):
            graph.node.remove(node)
            yield _copied(graph, held[node.input[0]], node.output[0])


class Merged:
    """Parameters that a file of the dynamo exporter has not under their names.

    Args:
        graph: the graph, which `apart` changes.
        held: its tensors of floats, by name.
    """

    def __init__(self, graph: onnx.GraphProto, held: dict[str, onnx.TensorProto]) -> None:
        self._graph, self._held, self._new = graph, held, list[str]()
        self._signed, self._folded = signature(graph), folded(graph)
        self._kinds = dict(self._signed.values())
        there = {*held, *(name for names in self._folded.values() for name in names)}
        self._gone = {n for n, kind in self._kinds.items() if kind == PARAMETER and n not in there}
        reads = Counter(name for node in graph.node for name in node.input)
        self._merged = {name for name in held if reads[name] > 1}

    def apart(self) -> tuple[list[str], list[str]]:
        """Do so; the names of the new parameters, and of those that are not found."""
        for node in self._graph.node:
            read = self._read_by(node)
            if len(node.input) == 2 and node.op_type in ("Conv", "Gemm"):
                self._give_zeros(node, read)
            for place, name in enumerate(node.input):
                if name in self._merged and _note(node):
                    node.input[place] = self._own(node, place, name, read)
        return self._new, [name for name in self._kinds if name in self._gone]

    def _read_by(self, node: onnx.NodeProto) -> list[str]:
        """The parameters and buffers that a node's op had among its arguments, in order."""
        called = re.findall(r"%(\w+)", _note(node).partition("args = ")[2])
        return [self._signed[one][0] for one in called if one in self._signed]

    def _own(self, node: onnx.NodeProto, place: int, name: str, read: list[str]) -> str:
        """The name of what a node reads at a place, where the file has a merged tensor."""
        exact = node.op_type in NORMS and 1 <= place <= len(read)
        others = [one for one in read if one in self._gone or one in self._new]
        if exact:
            own = read[place - 1]
        elif name in read or not others:
            own = name
        else:  # a bias comes after a matrix
            own = others[-1 if len(self._held[name].dims) == 1 else 0]
        if own in self._gone:
            self._gone.discard(own)
            self._new.append(_copied(self._graph, self._held[name], own))
            return own
        if own in self._new:
            return own
        told = own == name and (exact or name in read or name not in self._kinds)
        if told or own in self._held.keys() - {name} or not _is_even(self._held[name]):
            return name
        # A buffer; or numbers that were computed, and equal a parameter.
        return _copied(self._graph, self._held[name], self._free(name), "BUFFER")

    def _free(self, name: str) -> str:
        taken = {tensor.name for tensor in self._graph.initializer}
        return next(one for n in range(len(taken) + 2) if (one := f"{name}_{n}") not in taken)

    def _give_zeros(self, node: onnx.NodeProto, read: list[str]) -> None:
        """The bias of a layer that has lost it: the exporter adds no zeros."""
        lost = [one for one in read if one in self._gone and one.rpartition(".")[2] == "bias"]
        weight = self._held.get(node.input[1])
        if weight is None or len(lost) != 1:
            return
        first = node.op_type == "Conv" or any(a.name == "transB" and a.i for a in node.attribute)
        from onnx import TensorProto

        zeros = TensorProto(data_type=weight.data_type, dims=[weight.dims[0 if first else 1]])
        width = DTYPES[weight.data_type].itemsize
        zeros.raw_data = bytes(zeros.dims[0] * width)
        self._gone.discard(lost[0])
        self._new.append(_copied(self._graph, zeros, lost[0]))
        node.input.append(lost[0])


def _note(node: onnx.NodeProto) -> str:
    return next((one.value for one in node.metadata_props if one.key == CALL), "")


def _is_even(tensor: onnx.TensorProto) -> bool:
    """Whether all entries are one number; large weights, which lie beside the file, are none."""
    from onnx import TensorProto, numpy_helper

    if tensor.data_location == TensorProto.EXTERNAL or not all(tensor.dims):
        return False
    entries = numpy_helper.to_array(tensor)
    return bool((entries == entries.flat[0]).all())


def _copied(
    graph: onnx.GraphProto, tensor: onnx.TensorProto, name: str, kind: str = PARAMETER
) -> str:
    """Another tensor of the same entries, under a new name; its name."""
    from onnx import ValueInfoProto

    own, told = graph.initializer.add(), ValueInfoProto(name=name)
    own.CopyFrom(tensor)
    own.name = name
    told.metadata_props.add(key=KIND, value=kind)
    graph.value_info.append(told)
    return name
