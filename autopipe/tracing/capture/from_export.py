"""From torch.export's program to a `Graph` with autopipe's names.

    ExportedProgram                              Graph
    p_h_0_mlp_weight: placeholder           ->   State("h.0.mlp.weight")
    sym_size_int_4 = sym_size.int(a_0, 0)   ->   the expression b, wherever it was used
    mul_17 = mul.Tensor(x, y)               ->   Node("h.0.mlp/mul/0")
    wrap_with_set_grad_enabled(False, g, x) ->   g's nodes, marked grad=False
    wrap_with_autocast(...)                 ->   its nodes, marked with the autocast
    getitem(chunk, 1)                       ->   Ref("h.0/chunk/0", 1)
    alias, asserts                          ->   nothing
    embedding(..., sparse=True)             ->   sparse=False, for gradients are summed densely

A node's name is the module call it ran in, the op and the ordinal of that op within that call:
torch's own `mul_17` differs between two traces of one model.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.export.graph_signature import InputSpec as ArgumentSpec

from autopipe.frontend import user_lines
from autopipe.frontend.refusals import depends_on_values, takes_a_number
from autopipe.ir import check
from autopipe.ir.blocks import Visit
from autopipe.ir.graph import (
    Arg,
    Autocast,
    Dim,
    Graph,
    Input,
    Node,
    Ref,
    State,
    StateSpec,
    TensorSpec,
    Value,
    short_name,
)
from autopipe.ir.torch_private import expression, formal_arguments
from autopipe.planfile.node_names import NodeName
from autopipe.planfile.parts import InputSpec
from autopipe.rewriting.projections import with_projections
from autopipe.tracing.capture.exported_nodes import (
    check_op,
    check_statistics,
    constant_of,
    drawn_without_gradient,
    handed_back,
    is_fresh_constant,
    is_whole_slice,
    kind_of,
    live_nodes,
    names_by_identity,
    scopes_of,
    with_copies_beside,
)
from autopipe.tracing.capture.same_memory import SameMemory
from autopipe.tracing.capture.stubs import BEGIN, END, STAND_IN, Span
from autopipe.tracing.capture.user_checkpoints import GRAD, MARK
from autopipe.util import dims

_DROPPED = "aten._assert", "aten.sym_constrain_range", "aten._functional_assert"


@dataclass
class _Region:
    """The settings that hold for all nodes of one (sub)graph."""

    scopes: tuple[str, ...] = ()
    grad: bool = True
    autocast: Autocast | None = None


def convert(
    exported: torch.export.ExportedProgram,
    model: nn.Module,
    specs: Sequence[InputSpec],
    twins: Sequence[nn.Module] = (),
    assigned: Collection[str] = (),
) -> Graph:
    """The graph of an exported program (`export.capture`) of a model with fake parameters.

    Args:
        specs: the description of the batch that it was exported with.
        twins: modules with weights whose parameters stand for those of `model`, by name: the
            user's loss holds the model itself, not its copy with fake parameters.
        assigned: the buffers that modules assign (`eager.assigned_buffers`).

    Raises:
        CaptureError: a graph cannot express the program; the message names the user's line.
    """
    converter = _Converter(exported, model, specs, twins)
    graph = check.after("from_export", converter.convert())
    converter.memory.check(graph, assigned)
    graph = with_projections(graph)
    graph = replace(graph, nodes=drawn_without_gradient(live_nodes(graph.nodes, graph.outputs)))
    graph = check.after("projections", check_statistics(graph))
    return check.after("assigned buffers", with_copies_beside(graph, assigned))


@dataclass
class _Converter:
    """A graph under construction.

    Attributes:
        twins: as for `convert`.
        ordinals: how many nodes have each scope and op.
        symbols: export's symbols for sizes -> those of the batch's description.
        spans: the nodes of each block that others equal (`tracing.capture.stubs`), by number.
        again: the text of the user's checkpoint around the next nodes; "": none.
        grad: "on" or "off", if a mark has said so of the next nodes' gradients.
    """

    exported: torch.export.ExportedProgram
    model: nn.Module
    specs: Sequence[InputSpec]
    twins: Sequence[nn.Module]
    inputs: dict[str, TensorSpec] = field(default_factory=dict)
    states: dict[str, StateSpec] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    ordinals: Counter[tuple[str, str]] = field(default_factory=Counter)
    symbols: dict[sympy.Symbol, sympy.Symbol] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    again: str = ""
    grad: str = ""

    def __post_init__(self) -> None:
        self._aliases = names_by_identity(self.model)
        self._saved = self.model.state_dict().keys()
        self.memory = SameMemory(self.model, self.twins)

    def convert(self) -> Graph:
        signature, nodes = self.exported.graph_signature, self.exported.graph.nodes
        placeholders = {node.name: node for node in nodes if node.op == "placeholder"}
        tensors = iter([spec for spec in self.specs if spec.dtype != "python"])
        env: dict[fx.Node, Any] = {}
        for spec in signature.input_specs:
            placeholder = placeholders[spec.arg.name]
            if spec.kind is InputKind.USER_INPUT:
                env[placeholder] = self._input(next(tensors), placeholder)
            else:
                env[placeholder] = self._state(spec, placeholder)
        results = self._inline(self.exported.graph_module, env, _Region())
        outputs = tuple(
            result
            for result, spec in zip(results, signature.output_specs, strict=True)
            if spec.kind is OutputKind.USER_OUTPUT
        )
        live = live_nodes(self.nodes, outputs)
        used = {v.name for n in live for v in n.values() if isinstance(v, State)}
        states = {name: state for name, state in self.states.items() if name in used}
        return Graph(self.inputs, states, live, outputs, self.constants)

    def _input(self, described: InputSpec, placeholder: fx.Node) -> Input:
        tensor = placeholder.meta["val"]
        self._name_symbols(described, tensor)
        self.inputs[described.path] = self._spec(tensor)
        return Input(described.path)

    def _state(self, spec: ArgumentSpec, placeholder: fx.Node) -> State:
        """Note a parameter, a buffer or a constant."""
        assert spec.target is not None
        name, kind = spec.target.removeprefix("model."), kind_of(self.exported, spec)
        if kind == "constant":
            constant = constant_of(self.exported, spec.target, placeholder)
            own = self.memory.lent(constant, placeholder)
            kind, name = own or self.memory.state_of(self._name_constant(name), constant)
            if kind == "constant":
                # A frozen parameter of the loss would be one of its stage.
                self.constants.setdefault(name, constant.detach())
        name, *others = self._aliases.get(name, (name,))
        trainable = kind == "parameter" and self.model.get_parameter(name).requires_grad
        look = self._spec(placeholder.meta["val"])
        self.states[name] = StateSpec(look, kind, trainable, tuple(others), name in self._saved)
        return State(name)

    def _inline(
        self, module: fx.GraphModule, env: dict[fx.Node, Any], region: _Region
    ) -> tuple[Any, ...]:
        """Convert the nodes of one (sub)graph; returns its results."""
        for node in module.graph.nodes:
            if node.op == "get_attr":
                env[node] = getattr(module, str(node.target))
            elif node.op == "output":
                results = self._arg(node.args[0], env)
                return results if isinstance(results, tuple) else (results,)
            elif node.op == "call_function":
                env[node] = self._call(node, env, region)
        raise AssertionError("a graph without an output")

    def _call(self, node: fx.Node, env: dict[fx.Node, Any], region: _Region) -> Any:
        target = node.target
        if target is operator.getitem:
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        value = node.meta.get("val")
        if isinstance(value, int | float | torch.SymInt | torch.SymFloat | torch.SymBool):
            return value if isinstance(value, int | float) else self._dim(value, node)
        name = str(target)
        if name.startswith(_DROPPED):
            return None
        args = tuple(self._arg(arg, env) for arg in node.args)
        if name == "aten.alias.default" or (region.grad and is_whole_slice(name, args)):
            return args[0]
        scopes = scopes_of(node) or region.scopes
        if name in (BEGIN, END, STAND_IN):
            return self._stand_in(name, args[0], int(args[1]), scopes)
        if name == MARK:
            self.again = str(args[1])
            return None
        if name == GRAD:
            self.grad = str(args[1])
            return None
        if region.autocast is not None and self.grad:
            region = replace(region, grad=self.grad == "on")
        if name in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            return self._wrapped(name, node, env, _Region(scopes, region.grad, region.autocast))
        names = formal_arguments(target)
        if "sparse" in names:  # gradients are summed densely, over ranks too
            args = tuple(n != "sparse" and arg for n, arg in zip(names, args, strict=False))
        check_op(node)
        kwargs = {key: self._arg(arg, env) for key, arg in node.kwargs.items()}
        if name == "aten.detach_.default" and is_fresh_constant(self.nodes, args[0]):
            return args[0]
        result = self._append(node, name, args, kwargs, scopes, region)
        same = None if region.grad else handed_back(node)
        return result if same is None else env[same]

    def _append(
        self,
        node: fx.Node,
        op: str,
        args: tuple[Arg, ...],
        kwargs: dict[str, Arg],
        scopes: tuple[str, ...],
        region: _Region,
    ) -> Ref | tuple[Ref, ...] | None:
        name = self._name(scopes, op)
        value = node.meta.get("val")
        packed = isinstance(value, list | tuple)
        parts = value if isinstance(value, list | tuple) else [value]
        outputs = tuple(self._spec(v, node) if isinstance(v, Tensor) else None for v in parts)
        place = user_lines.of_trace(node.stack_trace)
        self.nodes.append(
            Node(
                name=name,
                op=op,
                args=args,
                kwargs=kwargs,
                outputs=outputs,
                packed=packed,
                scopes=scopes,
                place=place,
                grad=region.grad,
                autocast=region.autocast,
                again=self.again,
            )
        )
        if not packed:
            return Ref(name)
        return tuple(Ref(name, number) for number in range(len(outputs)))

    def _name(self, scopes: tuple[str, ...], op: str) -> str:
        scope = scopes[-1] if scopes else ""
        short = short_name(op)
        ordinal = self.ordinals[scope, short]
        self.ordinals[scope, short] += 1
        return str(NodeName(scope, short, ordinal))

    def _stand_in(
        self, op: str, tensors: tuple[Value, ...], number: int, scopes: tuple[str, ...]
    ) -> tuple[Value, ...] | None:
        """Note the nodes of a block, or write those of a block that equals it."""
        if op == BEGIN:
            self.spans[number] = Span(scopes, tensors, len(self.nodes), self.again)
        elif op == END:
            self.spans[number].stop, self.spans[number].results = len(self.nodes), tensors
        else:
            span = self.spans[number]
            copies, results = span.copied(self.nodes, scopes, tensors, self._name, self.states)
            self.nodes += span.called_from(copies, self.again)
            return results
        return None

    def _wrapped(self, name: str, node: fx.Node, env: dict[fx.Node, Any], region: _Region) -> Any:
        if name == "wrap_with_set_grad_enabled":
            enabled, module, *operands = node.args
            region.grad = bool(enabled)
        else:
            device_type, dtype, enabled, _cache, module, *operands = node.args
            region.autocast = Autocast(str(device_type), dtype, bool(enabled))  # type: ignore[arg-type]
        graph_module = env[module]  # type: ignore[index]
        placeholders = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
        inner = {
            placeholder: self._arg(operand, env)
            for placeholder, operand in zip(placeholders, operands, strict=True)
        }
        return self._inline(graph_module, inner, region)

    def _arg(self, arg: Any, env: Mapping[fx.Node, Any]) -> Any:
        if isinstance(arg, fx.Node):
            return env[arg]
        if isinstance(arg, list | tuple):
            return tuple(self._arg(item, env) for item in arg)
        if isinstance(arg, torch.SymInt | torch.SymFloat | torch.SymBool):
            return self._dim(arg)
        return arg

    def _dim(self, size: Any, node: fx.Node | None = None) -> Dim:
        if isinstance(size, int):
            return size
        found = expression(size)
        if not found.free_symbols <= self.symbols.keys():  # others stand for values of tensors
            module = Visit.of(["", *scopes_of(node)][-1]).module if node else ""
            refused = takes_a_number if "item" in str(node and node.target) else depends_on_values
            raise refused(user_lines.of_trace(node.stack_trace if node else None), module)
        found = dims.in_terms_of_sympy(found).subs(self.symbols)
        return int(found) if found.is_Integer else found

    def _name_symbols(self, described: InputSpec, tensor: Tensor) -> None:
        """Find export's symbols for the dims that the batch's description gives as text."""
        sizes: Sequence[Any] = tensor.shape
        for size, entry in zip(sizes, described.shape, strict=True):
            if isinstance(size, torch.SymInt):
                (theirs,) = expression(size).free_symbols
                (self.symbols[theirs],) = sympy.sympify(dims.parse(entry)).free_symbols

    def _spec(self, tensor: Tensor, node: fx.Node | None = None) -> TensorSpec:
        return TensorSpec(tuple(self._dim(size, node) for size in tensor.shape), tensor.dtype)

    def _name_constant(self, name: str) -> str:
        """Number constants of code within their module, so that equal blocks have equal names.

        Export numbers them through the whole model: `h.3.lifted_tensor_7`.
        """
        home, found, _ = name.rpartition("lifted_tensor_")
        if not found:
            return name
        self.ordinals[home, found] += 1
        return f"{home}{found}{self.ordinals[home, found] - 1}"
