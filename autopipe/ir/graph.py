"""The graph of a training step's forward and loss: ops as plain data, in the order they run.

    Graph   ::= inputs, states, nodes, outputs
    Node    ::= name = op(arg, ..., key=arg, ...)          name: `transformer.h.3.mlp/linear/0`
    arg     ::= Value | Dim | number | text | dtype | (arg, ...)
    Value   ::= Ref(node, output)                          made by a node
              | Input(path)                                a leaf of the batch
              | State(name)                                a parameter, buffer or constant
    Dim     ::= integer | expression in b, s               b: rows of a micro-batch, s: sequence

There are no nodes for sizes, asserts and aliases: sizes are expressions in `BATCH`, so one graph
serves every micro-batch size; in `SEQUENCE` too if traced so (`tracing.symbolic_sequence`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, reduce, wraps
from typing import Any, Protocol, TypeAlias, TypeVar, cast

import sympy
import torch

from autopipe.ir.torch_private import formal_arguments
from autopipe.planfile.regions import Region
from autopipe.util import dims, dtypes

BATCH, SEQUENCE = dims.symbols()
"""The symbols b and s: the rows of one micro-batch, and the tokens of a row."""

Dim: TypeAlias = int | sympy.Expr

READ_OP = "autopipe.read.default"  # at which Python reads a value (`tracing.capture.value_guards`)
REGION_OP = "autopipe.region.default"  # a call of the user's own code (`opaque.regions`)


@dataclass(frozen=True, slots=True)
class Ref:
    """Output number `output` of node `node`."""

    node: str
    output: int = 0

    def __str__(self) -> str:
        return self.node if self.output == 0 else f"{self.node}:{self.output}"


@dataclass(frozen=True, slots=True)
class Input:
    """A leaf of the batch, named by its path."""

    path: str

    def __str__(self) -> str:
        return f"<{self.path}>"


@dataclass(frozen=True, slots=True)
class State:
    """A parameter, buffer or constant, named as in the model."""

    name: str

    def __str__(self) -> str:
        return f"[{self.name}]"


Value = Ref | Input | State
Arg = object
"""An `arg` of the grammar; anything but a `Value` or a `Dim` is passed to the op unchanged."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype of a tensor, without its values."""

    shape: tuple[Dim, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> Dim:
        """Bytes of the dense tensor: an integer, or an expression in b and s."""
        return sympy.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtypes.name_of(self.dtype)}[{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Autocast:
    """The autocast region around a node; it decides the dtype in which the op computes."""

    device_type: str
    dtype: torch.dtype | None
    enabled: bool


@dataclass(frozen=True, slots=True)
class Node:
    """One op.

    Attributes:
        name: module path / op / ordinal: `transformer.h.3.mlp/linear/0`.
        op: torch's own name of the op: `aten.linear.default`.
        outputs: the tensors it returns; None in the place of anything else.
        packed: whether it returns a tuple, of which `outputs` are the parts.
        scopes: the module calls it ran in, outermost first (`transformer.h.3`,
            `transformer.h.3.mlp`; `shared@1` is the second call of one module), without the model.
        place: the user's line that called it.
        grad: whether gradients are recorded; not inside `torch.no_grad()`.
        autocast: the autocast region around it; None: there is none.
        stream: the random stream that a random op draws from; "": that of its name. On shards each
            rank has a stream of its own.
        again: the user's `torch.utils.checkpoint` that asks to recompute it; "": none does.
    """

    name: str
    op: str
    args: tuple[Arg, ...]
    kwargs: Mapping[str, Arg]
    outputs: tuple[TensorSpec | None, ...]
    packed: bool
    scopes: tuple[str, ...]
    place: str
    grad: bool = True
    autocast: Autocast | None = None
    stream: str = ""
    again: str = ""
    _values: tuple[Value, ...] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def short(self) -> str:
        """The short name of the op: `linear` for `aten.linear.default`."""
        return short_name(self.op)

    def values(self) -> tuple[Value, ...]:
        """The values that the node reads, in the order of its arguments, repeats included."""
        found = self._values
        if found is None:  # everyone asks
            found = tuple(values_in((self.args, tuple(self.kwargs.values()))))
            object.__setattr__(self, "_values", found)
        return found

    def reading(self, values: Mapping[Value, Value]) -> Node:
        """The node, which reads the value of each key of `values` in the place of the key."""
        if not any(value in values for value in self.values()):
            return self
        kwargs = {key: swap(arg, values) for key, arg in self.kwargs.items()}
        return replace(self, args=swap(self.args, values), kwargs=kwargs)

    def __str__(self) -> str:
        words = [*map(dtypes.text_of, self.args)]
        words += [f"{key}={dtypes.text_of(arg)}" for key, arg in self.kwargs.items()]
        outputs = ", ".join(str(s) for s in self.outputs)
        return f"{self.name} = {self.op}({', '.join(words)}) -> {outputs}"


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that the model owns.

    Attributes:
        spec: shape and dtype of what nodes read.
        kind: "parameter", "buffer" or "constant".
        aliases: the other names of a tied parameter.
        persistent: whether it is in the model's state dict; some buffers are not.
        master: the dtype of the parameter itself, if nodes read a copy of it; None: they read it.
        gradient: the dtype in which its gradients are summed; None: that of the parameter.
        projection: what forward does to the parameter in place before it is read: an op, and its
            arguments after the tensor (`rewriting.projections`).
    """

    spec: TensorSpec
    kind: str
    trainable: bool = False
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    master: torch.dtype | None = None
    gradient: torch.dtype | None = None
    projection: tuple[str, tuple[Arg, ...]] | None = None

    @property
    def held(self) -> TensorSpec:
        """Shape and dtype of the tensor that a rank holds."""
        return TensorSpec(self.spec.shape, self.master or self.spec.dtype)

    @property
    def summed(self) -> TensorSpec:
        """Shape and dtype of the sum of its gradients; `gradient` is its dtype, else that held."""
        return TensorSpec(self.spec.shape, self.gradient or self.held.dtype)

    def __str__(self) -> str:
        master = f", of {dtypes.name_of(self.master)}" if self.master is not None else ""
        return f"{self.kind} {self.spec}{master}"


class UserCall(Protocol):
    """A call of the user's own code, which runs in this process by its `key`."""

    @property
    def region(self) -> Region: ...
    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class Graph:
    """A traced model and its loss. `outputs` is (loss,) or (sum, count).

    `constants` are the tensors that forward made from Python numbers, by name, and `regions` the
    calls of the user's own code, by the names that nodes of `REGION_OP` have for them.
    """

    inputs: Mapping[str, TensorSpec]
    states: Mapping[str, StateSpec]
    nodes: tuple[Node, ...]
    outputs: tuple[Arg, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict, compare=False)
    regions: Mapping[str, UserCall] = field(default_factory=dict, compare=False)

    def called(self, node: Node) -> UserCall:
        """The call that a node of `REGION_OP` runs."""
        return self.regions[str(node.args[-1])]

    def spec(self, value: Value) -> TensorSpec:
        """Shape and dtype of a value."""
        if isinstance(value, Input):
            return self.inputs[value.path]
        if isinstance(value, State):
            return self.states[value.name].spec
        found = self.nodes[self.index[value.node]].outputs[value.output]
        assert found is not None, f"{value} is no tensor"
        return found

    @cached_property
    def index(self) -> dict[str, int]:
        """Position of each node by its name."""
        return {node.name: position for position, node in enumerate(self.nodes)}

    @cached_property
    def _found(self) -> dict[str, Any]:
        """Cached results of the functions decorated with `once`, by function name."""
        return {}

    def __str__(self) -> str:
        lines = [f"<{path}>: {spec}" for path, spec in self.inputs.items()]
        lines += [f"[{name}]: {state}" for name, state in self.states.items()]
        return "\n".join([*lines, *map(str, self.nodes), f"return {dtypes.text_of(self.outputs)}"])


_T = TypeVar("_T")


def once(find: Callable[[Graph], _T]) -> Callable[[Graph], _T]:
    """Cache a function of a graph: it runs once per graph; callers must not change its result."""
    name = f"{find.__module__}.{find.__qualname__}"

    @wraps(find)
    def found(graph: Graph) -> _T:
        if name not in graph._found:
            graph._found[name] = find(graph)
        return cast(_T, graph._found[name])

    return found


def of_nodes(graph: Graph, nodes: tuple[Node, ...], outputs: tuple[Arg, ...]) -> Graph:
    """The graph with these nodes, and the states that these read."""
    read = {v.name for node in nodes for v in node.values() if isinstance(v, State)}
    return replace(
        graph,
        states={name: state for name, state in graph.states.items() if name in read},
        nodes=nodes,
        outputs=outputs,
        constants={name: tensor for name, tensor in graph.constants.items() if name in read},
    )


def short_name(op: str) -> str:
    """`linear` for `aten.linear.default`, `mul` for Python's `mul`."""
    return op.split(".")[1] if "." in op else op


def resolve(op: str) -> Any:
    """The torch op named `op`, such as `aten.linear.default`."""
    return reduce(getattr, op.split("."), torch.ops)


def arguments(node: Node) -> dict[str, Any]:
    """All arguments of a node by their names in the op's schema, defaults included."""
    formal = formal_arguments(resolve(node.op))
    return {**formal, **dict(zip(formal, node.args, strict=False)), **node.kwargs}


def values_in(arg: Arg) -> Iterator[Value]:
    """The values inside an argument, nested ones included."""
    found: list[Value] = []
    _collect(arg, found)
    return iter(found)


def _collect(arg: Arg, found: list[Value]) -> None:
    if isinstance(arg, (Ref, Input, State)):
        found.append(arg)
    elif isinstance(arg, tuple):
        for item in arg:
            _collect(item, found)


def swap(arg: Arg, values: Mapping[Value, Value]) -> Any:
    """An argument in which each key of `values` is replaced by its value."""
    if isinstance(arg, Ref | Input | State):
        return values.get(arg, arg)
    if isinstance(arg, tuple) and not hasattr(arg, "_fields"):
        return tuple(swap(item, values) for item in arg)
    return arg


def at_batch(dim: Dim, rows: int) -> int:
    """The integer size of a dim for micro-batches of `rows` rows."""
    return dim if isinstance(dim, int) else _substituted(dim, rows)


@lru_cache(maxsize=2**14)
def _substituted(dim: sympy.Expr, rows: int) -> int:
    return int(dim.subs(BATCH, rows))


def at_sequence(dim: Dim, length: int) -> Dim:
    """A dim with s = `length` tokens: an integer or an expression in b."""
    return dim if isinstance(dim, int) else _shortened(dim, length)


@lru_cache(maxsize=2**14)
def _shortened(dim: sympy.Expr, length: int) -> Dim:
    found = dim.subs(SEQUENCE, length)
    return int(found) if found.is_Integer else found


def shape_at(spec: TensorSpec, rows: int) -> tuple[int, ...]:
    """The shape of a tensor for micro-batches of `rows` rows."""
    return tuple(at_batch(dim, rows) for dim in spec.shape)


def bytes_at(spec: TensorSpec, rows: int) -> int:
    """Bytes of the dense tensor for micro-batches of `rows` rows."""
    return math.prod(shape_at(spec, rows)) * spec.dtype.itemsize
