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
from collections import ChainMap, Counter
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from autopipe.errors import ModelError
from autopipe.onnx_files.control import InnerGraph, control
from autopipe.onnx_files.elementwise import DTYPES
from autopipe.onnx_files.entries import FileInput, entries_of, inputs_of, python_names
from autopipe.onnx_files.ops import function_of, is_default
from autopipe.onnx_files.read import read
from autopipe.onnx_files.ties import Matrices, apart, origins
from autopipe.onnx_files.trained import few, is_mask, mixed, read_names, told, trained_names
from autopipe.onnx_files.values import (
    MOST_SIZES,
    Function,
    NodeOf,
    Sizes,
    Value,
    as_tensor,
    constant,
    tensor_of,
)

if TYPE_CHECKING:
    import onnx

OWN = ("", "ai.onnx")
"""The names of ONNX's own domain."""


@dataclass(frozen=True)
class Step:
    """A node's run: its function, the names of the values it reads, and of those it makes.

    Attributes:
        bodies: the graphs in it, by the attribute; its function is then `control`.
    """

    node: NodeOf
    function: Function
    reads: tuple[str, ...]
    makes: tuple[str, ...]
    bodies: Mapping[str, InnerGraph]

    def run(self, values: MutableMapping[str, Value]) -> None:
        """Add this node's results to all values."""
        inputs = [values[name] for name in self.reads]
        if self.bodies:
            found: Any = control(self.node, self.bodies, inputs, values)
        else:
            found = self.function(self.node, inputs)
        made = found if isinstance(found, tuple) else (found,)
        # A result without a name is not asked for: no name is what an input that is left out has.
        values.update((n, one) for n, one in zip(self.makes, made, strict=False) if n)


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
        self._paths: ChainMap[str, str] = ChainMap()
        self._tied: dict[str, tuple[str, bool]] = {}
        inputs = inputs_of(graph)
        self.entries = entries_of(inputs, self._file)
        self._names = tuple(value.name for value in inputs)
        self.results = tuple(value.name for value in graph.output)
        known = [value.type.tensor_type for value in graph.output]
        said = len(known) == 1 and known[0].HasField("shape")
        self.dims = len(known[0].shape.dim) if said else None
        self._told, self._mixed = told(graph), tuple(mixed(graph))
        self._matrices, (self._new, self._lost) = Matrices(origins(graph)), apart(graph)
        self._read_names = read_names(graph)
        self._steps = self._read(graph, version, path)
        reads = Counter(name for node in graph.node for name in node.input)
        several = [path for name, path in self._paths.items() if reads[name] > 1]
        self._shared = dict.fromkeys((*several, *(path for path, _ in self._tied.values())))

    def facts(self) -> list[str]:
        """What training changes of the file, and what it does not: a sentence each."""
        every = {name: x for name, x in self.named_parameters() if x.requires_grad}
        frozen = [name for name, x in self.state_dict().items() if x.is_floating_point()]
        frozen = [name for name in frozen if name not in every]
        numbers = sum(x.numel() for x in every.values())
        fixed = f"; not {few(frozen)}" if frozen else ""
        found = [
            f"training changes {len(every)} tensors, {numbers:,} numbers: {few([*every])}{fixed}"
        ]
        if not self._told:
            found.append(
                "the file does not say which of them were buffers; in a model file, model() may "
                "freeze these (requires_grad_(False))"
            )
        if self._new:
            found.append(
                f"{few(self._new)}: parameters of their own again, which the exporter had merged "
                "with equal ones, or left out as zeros"
            )
        if shared := [name for name in self._shared if name in every]:
            doubt = "" if self._told else "; equal weights of an untrained model look so, too"
            found.append(f"several nodes read one weight, trained as one: {few(shared)}{doubt}")
        if self._lost:
            found.append(
                f"the exported model named parameters that the file has not: {few(self._lost)}; "
                "the exporter has computed with them, or they are other names of shared ones"
            )
        if self._mixed:
            made = few(self._mixed)
            found.append(f"computed by the exporter, and trained as they are: {made}")
        return [f"{self._file}: {fact}" for fact in found]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(self.forward).bind(*args, **kwargs).arguments
        values: dict[str, Value] = {"": None}
        values |= dict(zip(self._names, (given[entry.name] for entry in self.entries), strict=True))
        values |= self._held(self._known, self._paths, self._tied)
        for step in self._steps:
            step.run(values)
        results = [as_tensor(values[name]) for name in self.results]
        return results[0] if len(results) == 1 else dict(zip(self.results, results, strict=True))

    def _held(
        self,
        known: Mapping[str, Sizes],
        paths: Mapping[str, str],
        tied: Mapping[str, tuple[str, bool]],
    ) -> dict[str, Value]:
        """What a graph holds: sizes, parameters and buffers, and weights that are others' too."""
        found: dict[str, Value] = {**known, **{n: self._state(path) for n, path in paths.items()}}
        for name, (path, turned) in tied.items():
            found[name] = self._state(path).t() if turned else self._state(path)
        return found

    def _state(self, path: str) -> Tensor:
        home, _, name = path.rpartition(".")
        tensor: Tensor = getattr(self.get_submodule(home), name)
        return tensor

    def _read(self, graph: onnx.GraphProto, version: int, path: Path) -> tuple[Step, ...]:
        """Keep what a graph holds; its nodes."""
        trained = trained_names(graph)
        for tensor in graph.initializer:
            name, array = tensor.name, _array(tensor, path)
            is_trained = name in trained and not is_mask(array)
            if is_trained and (tie := self._matrices.tie(name, array)):
                self._tied[name] = tie
                continue
            self._keep(name, array, trained=is_trained)
            if is_trained:
                self._matrices.add(name, self._paths[name], array)
        steps = (self._step(node, version, path) for node in graph.node)
        return tuple(step for step in steps if step is not None)

    def _body(self, graph: onnx.GraphProto, version: int, path: Path) -> InnerGraph:
        outer = self._known, self._paths, self._tied
        # Two branches may call two constants by one name.
        self._known, self._paths, self._tied = {}, ChainMap({}, self._paths), {}
        steps = self._read(graph, version, path)
        held = self._known, self._paths.maps[0], self._tied
        self._known, self._paths, self._tied = outer
        gives = tuple(value.name for value in graph.output)

        def run(values: MutableMapping[str, Value]) -> list[Value]:
            own = ChainMap(self._held(*held), values)  # values outside are many, and stay
            for step in steps:
                step.run(own)
            return [own[name] for name in gives]

        return InnerGraph(tuple(value.name for value in graph.input), gives, run)

    def _step(self, node: onnx.NodeProto, version: int, path: Path) -> Step | None:
        """A node's run; None: what it gives is constant, and is kept."""
        from onnx import AttributeProto, helper, numpy_helper

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
                if not is_default(node, attribute, version)
                and attribute.type != AttributeProto.GRAPH
            },
            outputs=len(node.output),
            read=1 + sum(name != "" and name in self._read_names for name in node.output[1:]),
            version=version,
        )
        if node.domain not in OWN:
            raise told.refuse(f"ops of the domain {node.domain!r} are not read")
        reads, makes = tuple(node.input), tuple(node.output)
        if node.op_type == "Constant":
            self._keep(makes[0], constant(told), trained=False)
            return None
        if node.op_type == "NonZero" and (array := self._constant_of(reads[0])) is not None:
            # How many there are is no number in a trace, but for a constant it is known here.
            self._keep(makes[0], np.stack(np.nonzero(array)), trained=False)
            return None
        function = function_of(told)
        bodies = {
            own.name: self._body(own.g, version, path)
            for own in node.attribute
            if own.type == AttributeProto.GRAPH
        }
        return Step(told, function, reads, makes, bodies)

    def _constant_of(self, name: str) -> np.ndarray[Any, Any] | None:
        """The numbers of a constant; None: a node makes this value, or training changes it."""
        if name in self._known:
            return self._known[name]
        tensor = self._state(self._paths[name]) if name in self._paths else None
        return None if tensor is None or tensor.requires_grad else tensor.numpy()

    def _keep(self, name: str, array: np.ndarray[Any, Any], *, trained: bool) -> None:
        """Hold a constant of the file: as sizes, as a parameter or as a buffer."""
        few = array.ndim < 2 and array.size <= MOST_SIZES
        single = array.size == 1 and array.dtype in (np.int32, np.bool_)
        if few and array.dtype == np.int64 or single:
            self._known[name] = array
            return
        home: nn.Module = self
        *parents, last = python_names(name)
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
    model = read(path)
    names = [entry.name for entry in entries_of(inputs_of(model.graph), path.name)]

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


def _array(tensor: onnx.TensorProto, path: Path) -> np.ndarray[Any, Any]:
    from onnx import numpy_helper

    if tensor.data_type not in DTYPES:
        raise ModelError(
            f"{path.name}: {tensor.name!r} has the data type {tensor.data_type}, not read"
        )
    return numpy_helper.to_array(tensor, base_dir=str(path.parent))
