"""An ONNX file as a module of torch: its nodes, run one after another.

    initializers of floats that are trained (`trained`)        parameters, by their own names
    running means and variances, constants of floats           buffers
    small constants of integers, an axis among them            sizes (`onnx_files.values`)
    other constants of integers                                buffers
    a matrix that equals another one, or its transpose         the same parameter: a tied weight

Exporters transpose the weights of linear layers. So they write a weight twice that a linear layer
shares with an embedding, and a weight of several layers once for each. Training the copies apart
would train another model than the exported one.

A name as `layers.0.mlp.weight` makes submodules, as in the model that the file was exported from.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.onnx_files.elementwise import DTYPES
from autopipe.onnx_files.ops import function_of
from autopipe.onnx_files.trained import trained_names
from autopipe.onnx_files.values import (
    MOST_SIZES,
    Function,
    NodeOf,
    Sizes,
    Value,
    as_tensor,
    tensor_of,
)

if TYPE_CHECKING:
    import onnx

OWN = ("", "ai.onnx")
"""The names of ONNX's own domain."""


@dataclass(frozen=True)
class Step:
    """A node's run: its function, the names of the values it reads, and of those it makes."""

    node: NodeOf
    function: Function
    reads: tuple[str, ...]
    makes: tuple[str, ...]


@dataclass(frozen=True)
class FileInput:
    """An input of a file: its name in Python, its dtype, its dims; text is a dim that may vary."""

    name: str
    dtype: torch.dtype
    dims: tuple[int | str, ...]


class OnnxModule(nn.Module):
    """The computation of a file; forward takes its inputs, by place or by name.

    Attributes:
        entries: the file's inputs, in order.
        results: the names of its outputs; forward gives one tensor, or a dict of them by name.
        dims: of its one output; None: there are several, or the file does not say.
    """

    entries: tuple[FileInput, ...]
    results: tuple[str, ...]
    dims: int | None

    def __init__(self, model: onnx.ModelProto, path: Path) -> None:
        super().__init__()
        graph = model.graph
        version = max((o.version for o in model.opset_import if o.domain in OWN), default=1)
        self._file = path.name
        self._known: dict[str, Sizes] = {}
        self._paths: dict[str, str] = {}
        self._tied: dict[str, tuple[str, bool]] = {}
        inputs = _inputs(graph)
        self.entries = _entries(inputs, self._file)
        self._names = tuple(value.name for value in inputs)
        self.results = tuple(value.name for value in graph.output)
        known = [value.type.tensor_type for value in graph.output]
        said = len(known) == 1 and known[0].HasField("shape")
        self.dims = len(known[0].shape.dim) if said else None
        trained = trained_names(graph)
        matrices = _Matrices()
        for tensor in graph.initializer:
            array = _array(tensor, path)
            if tensor.name in trained and (tie := matrices.tie(tensor.name, array)):
                self._tied[tensor.name] = self._paths[tie[0]], tie[1]
            else:
                self._keep(tensor.name, array, trained=tensor.name in trained)
        self._steps = tuple(self._step(node, version, path) for node in graph.node)
        self._steps = tuple(step for step in self._steps if step.node.op != "Constant")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        values: dict[str, Value] = {"": None, **self._known}
        values |= dict(zip(self._names, (given[entry.name] for entry in self.entries), strict=True))
        values |= {name: self._state(path) for name, path in self._paths.items()}
        for name, (path, turned) in self._tied.items():
            values[name] = self._state(path).t() if turned else self._state(path)
        for step in self._steps:
            found = step.function(step.node, [values[name] for name in step.reads])
            made = found if isinstance(found, tuple) else (found,)
            values.update(zip(step.makes, made, strict=False))
        results = [as_tensor(values[name]) for name in self.results]
        return results[0] if len(results) == 1 else dict(zip(self.results, results, strict=True))

    def _state(self, path: str) -> Tensor:
        home, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(home), name)
        return tensor

    def _step(self, node: onnx.NodeProto, version: int, path: Path) -> Step:
        from onnx import helper, numpy_helper

        def plain(attribute: onnx.AttributeProto) -> Any:
            value = helper.get_attribute_value(attribute)
            if isinstance(value, bytes):
                return value.decode()
            if isinstance(value, list):
                return [x.decode() if isinstance(x, bytes) else x for x in value]
            return numpy_helper.to_array(value) if hasattr(value, "data_type") else value

        called = f" {node.name!r}" if node.name else ""
        told = NodeOf(
            op=node.op_type,
            where=f"{self._file}: the node{called} ({node.op_type})",
            attributes={
                attribute.name: plain(attribute)
                for attribute in node.attribute
                if not _is_default(node, attribute, version)
            },
            outputs=sum(bool(name) for name in node.output),
            version=version,
        )
        if node.domain not in OWN:
            raise told.refuse(f"ops of the domain {node.domain!r} are not read")
        reads, makes = tuple(node.input), tuple(node.output)
        if node.op_type == "Constant":
            self._keep(makes[0], _constant(told), trained=False)
            return Step(told, lambda node, inputs: (), reads, makes)
        return Step(told, function_of(told), reads, makes)

    def _keep(self, name: str, array: np.ndarray[Any, Any], *, trained: bool) -> None:
        """Hold a constant of the file: as sizes, as a parameter or as a buffer."""
        few = array.ndim < 2 and array.size <= MOST_SIZES
        if few and array.dtype == np.int64 or array.size == 1 and array.dtype == np.int32:
            self._known[name] = array
            return
        home: nn.Module = self
        *parents, last = _python_names(name)
        for place, part in enumerate(parents):
            while hasattr(home, part) and part not in dict(home.named_children()):
                part += "_"  # a tensor may be called `a`, and another one `a.b`
            if not hasattr(home, part):
                home.add_module(part, nn.Module())
            parents[place], home = part, home.get_submodule(part)
        while hasattr(home, last):  # of two names that Python cannot tell apart
            last += "_"
        tensor = tensor_of(array)
        if trained:
            home.register_parameter(last, nn.Parameter(tensor))
        else:
            home.register_buffer(last, tensor)
        self._paths[name] = ".".join((*parents, last))


class _Matrices:
    """Finds matrices that equal earlier ones, or the transpose of one."""

    def __init__(self) -> None:
        self._seen: dict[Any, list[tuple[str, np.ndarray[Any, Any]]]] = {}

    def tie(self, name: str, array: np.ndarray[Any, Any]) -> tuple[str, bool] | None:
        """The name of an earlier matrix that this one equals, and whether transposed."""
        if array.ndim != 2 or not array.size:
            return None
        for same, turned in ((array, False), (array.T, True)):
            for other, seen in self._seen.get(_ends(same), ()):
                if np.array_equal(same, seen):
                    # Constants of ones or zeros may be equal without being one parameter.
                    return None if (seen == seen.flat[0]).all() else (other, turned)
        self._seen.setdefault(_ends(array), []).append((name, array))
        return None


def _ends(array: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    """Shape, dtype and two corners of a matrix, which tell most matrices apart."""
    return array.shape, array.dtype.str, float(array[0, 0]), float(array[-1, -1])


def from_onnx(path: str | Path) -> nn.Module:
    """The model of an ONNX file, with its weights, as a module that can be planned and trained.

    Its forward has the file's inputs as its arguments. Gradients go through all of it. As
    files are exported, batch norm keeps its running figures; dropout drops where the file says so.

    Args:
        path: the file; large weights may lie in files beside it.

    Returns:
        a module in the dtypes of the file's initializers, mostly fp32.

    Raises:
        ModelError: onnx is not installed, this is no ONNX file, or an op of it is not read.
    """
    path = Path(path)
    model = _read(path)
    names = [entry.name for entry in _entries(_inputs(model.graph), path.name)]

    def forward(self: OnnxModule, *args: Any, **kwargs: Any) -> Any:
        return OnnxModule.forward(self, *args, **kwargs)

    takes = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("self", *names)
    ]
    forward.__signature__ = inspect.Signature(takes)  # type: ignore[attr-defined]
    own = type("OnnxModule", (OnnxModule,), {"forward": forward, "__module__": __name__})
    made: nn.Module = own(model, path)
    return made


def _read(path: Path) -> onnx.ModelProto:
    try:
        import onnx
        from onnx import inliner
    except ImportError as error:
        raise ModelError(
            f"{path} is read by onnx, which is not installed", hint="pip install onnx"
        ) from error
    if not path.is_file():
        raise ModelError(f"there is no ONNX file {str(path)!r}", hint="check the path")
    try:
        model = onnx.load(str(path))
        onnx.checker.check_model(str(path))
    except Exception as error:  # protobuf and the checker raise of every kind
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"{path} is no ONNX file that can be read: {reason}",
            hint="was it copied whole, with the files of weights beside it? "
            "torch.onnx.export(model, inputs, FILE) writes one",
        ) from error
    return inliner.inline_local_functions(model)


def _inputs(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """The inputs of a run; old files list their initializers among them."""
    held = {tensor.name for tensor in graph.initializer}
    return [value for value in graph.input if value.name not in held]


def _array(tensor: onnx.TensorProto, path: Path) -> np.ndarray[Any, Any]:
    from onnx import numpy_helper

    if tensor.data_type not in DTYPES:
        raise ModelError(
            f"{path.name}: {tensor.name!r} has the data type {tensor.data_type}, not read"
        )
    return numpy_helper.to_array(tensor, base_dir=str(path.parent))


def _is_default(node: onnx.NodeProto, own: onnx.AttributeProto, version: int) -> bool:
    """Whether an attribute has its op's default value."""
    from onnx import defs, helper

    if not defs.has(node.op_type, version, ""):
        return False
    known = defs.get_schema(node.op_type, version, "").attributes.get(own.name)
    if known is None or known.default_value.type != own.type:
        return False
    value = helper.get_attribute_value(known.default_value)
    return bool(value == helper.get_attribute_value(own))


def _constant(node: NodeOf) -> np.ndarray[Any, Any]:
    for name, value in node.attributes.items():
        if name in ("value", "value_int", "value_float", "value_ints", "value_floats"):
            kind = np.float32 if "float" in name else None
            return np.asarray(value, dtype=kind)
    raise node.refuse("a constant of text, or one of few entries, is not read")


def _entries(values: Sequence[onnx.ValueInfoProto], file: str) -> tuple[FileInput, ...]:
    """The inputs of the file, each with a name that an argument may have: `0` is `input_0`.

    Raises:
        ModelError: an entry is no tensor, or has a dtype that is not read.
    """
    found: dict[str, FileInput] = {}
    for value in values:
        tensor = value.type.tensor_type
        if not value.type.HasField("tensor_type") or tensor.elem_type not in DTYPES:
            raise ModelError(
                f"{file}: the input {value.name!r} is no tensor of a dtype that is read"
            )
        dims = tuple(
            dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{n}"
            for n, dim in enumerate(tensor.shape.dim)
        )
        name = "_".join(_python_names(value.name))
        name = f"input_{name}" if name[0].isdigit() else name
        while name in found:  # of two names that Python cannot tell apart
            name += "_"
        found[name] = FileInput(name, DTYPES[tensor.elem_type], dims)
    return tuple(found.values())


def _python_names(name: str) -> Sequence[str]:
    """The parts of a name between its dots, each as an attribute that a module may have."""
    found = [re.sub(r"\W", "_", part) for part in name.split(".") if part] or ["value"]
    taken = dir(nn.Module())
    return [f"{part}_" if keyword.iskeyword(part) or part in taken else part for part in found]
