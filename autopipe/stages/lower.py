"""From a stage to modules that run it: one GraphModule per block, called by one per stage.

    stage GraphModule                       named_parameters()
      embedding(tokens, [wte.weight])         wte.weight
      h_0 = self.h.0(embedding, mask)         h.0.ln.weight, h.0.mlp.weight, ...
      h_1 = self.h.1(h_0, mask)               h.1.ln.weight, ...

Every module sits at the path the model has it, so parameters keep the model's own names. Sizes are
integers: a stage is lowered for one number of rows per micro-batch, and lowered again for another.
In mixed precision a parameter that goes to a matrix product goes there as this step's copy of it:

      linear(layer_norm, low(self.mlp.weight))
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn

from autopipe.ir.blocks import Block, next_call
from autopipe.ir.dataflow import analyse, is_random, rewritten_reads
from autopipe.ir.graph import (
    READ_OP,
    REGION_OP,
    Arg,
    Graph,
    Input,
    Node,
    Ref,
    State,
    Value,
    resolve,
    values_in,
)
from autopipe.ir.opaque_ops import KERNELS
from autopipe.ir.opaque_ops import run as run_opaque
from autopipe.ir.partition import Stage
from autopipe.ir.torch_private import in_graph_module
from autopipe.planfile.parts import Read
from autopipe.planfile.placements import Placement
from autopipe.rewriting.gpu_kernels import kernel_of
from autopipe.stages.node_calls import (
    NODE_NAME,
    check_read,
    draw_under_autocast,
    is_limit,
    opaque_under_autocast,
    repeated,
    saturated,
    take,
    under_autocast,
)
from autopipe.stages.op_tape import PLACE
from autopipe.stages.precision import copied, low, read_as_copies, saves_wide
from autopipe.stages.recompute import Recomputed, check_recompute, runs_of, written_again
from autopipe.stages.rng import draw
from autopipe.util import dims


@dataclass(frozen=True)
class Lowered:
    """A stage that runs: `module(*received, *inputs)` gives the tensors to send, then the results.

    The order of the arguments is that of `stage.incoming` and `stage.inputs`; of the results that
    of `stage.outgoing`, and in the last stage of the graph's outputs. `low` names the parameters
    that want a copy in low precision for each step (`precision.arithmetic`), `wide` whether norms
    save more than they compute in (`precision.saves_wide`).
    """

    stage: Stage
    module: fx.GraphModule
    rows: int
    low: tuple[str, ...] = ()
    wide: bool = False


def lower(
    graph: Graph,
    stage: Stage,
    blocks: Sequence[Block],
    states: Mapping[str, Tensor],
    reads: Sequence[Read] | None,
    rows: int,
    *,
    last: bool,
    device: torch.device | str = "cpu",
    recompute: Collection[str] = (),
    precision: str = "fp32",
) -> Lowered:
    """Make the modules of a stage for micro-batches of `rows` rows.

    Args:
        states: the parameters, buffers and constants of the stage, by name; taken as they are.
        reads: the record that read nodes check against; None for a rehearsal on fake tensors,
            which has no values to check and observes opaque ops.
        last: whether the stage makes the graph's results.
        recompute: paths of blocks that run again in backward, and names of nodes that do; of a
            block that the stage has only in part, that part does, unless no parameter is in it.
        precision: that of the steps to come; the module itself runs in any.

    Raises:
        PlanError: a block to recompute is none of the stage's, or would not do the same again.
    """
    root = nn.Module()
    _install(root, stage, states)
    emitter = _Emitter(graph, reads, rows, torch.device(device), precision, frozenset(recompute))
    results: list[Arg] = [*stage.outgoing, *(graph.outputs if last else ())]
    returned = tuple(values_in(tuple(results)))
    runs = runs_of(graph, stage, blocks)
    check_recompute(graph, stage, blocks, recompute)
    outer = fx.Graph()
    env = _placeholders(outer, stage)
    pieces: dict[str, nn.Module] = {}
    for number, (block, positions) in enumerate(runs):
        nodes = [graph.nodes[p] for p in positions]
        if block is None:
            emitter.emit(outer, nodes, env, prefix="")
            continue
        after = [v for _, rest in runs[number + 1 :] for p in rest for v in graph.nodes[p].values()]
        target = in_graph_module(block.module)
        path = next_call(target, pieces)  # a module called again, or a block in two pieces
        piece = emitter.piece(root.get_submodule(target), block.module, nodes, {*after, *returned})
        emitter.call_piece(outer, path, piece, env)
        pieces[path] = piece.module
        if block.path in recompute:
            pieces[path] = Recomputed(piece.module, *written_again(graph, block, positions))
    for value in returned:
        emitter.load(outer, value, env, prefix="")
    outer.output(tuple(emitter.argument(result, env) for result in results))
    # Outer ones first: a method of a block's module may call a block before the module is called.
    for path, module in sorted(pieces.items(), key=lambda piece: piece[0].count(".")):
        *parents, leaf = path.split(".")
        setattr(_reached(root, parents), leaf, module)
    _install(root, stage, states)  # again: a piece has only those that it reads itself
    module = fx.GraphModule(root, outer, class_name=f"Stage{stage.index}")
    nodes = [graph.nodes[position] for position in stage.nodes]
    wide = saves_wide(nodes, precision)
    return Lowered(stage, module, rows, copied(graph, nodes, precision), wide)


def _placeholders(outer: fx.Graph, stage: Stage) -> dict[Value, fx.Node]:
    """Write a stage's arguments: what it receives, then its inputs of the batch."""
    env: dict[Value, fx.Node] = {}
    arguments: list[Value] = [*stage.incoming, *map(Input, stage.inputs)]
    for value in arguments:
        env[value] = outer.placeholder(_identifier(str(value)))
        if value in stage.copied:
            # Written in place later: autograd forbids that on a leaf, and the buffer is not ours.
            env[value] = outer.call_function(torch.ops.aten.clone.default, (env[value],))
    return env


def parameters_of(module: nn.Module, names: Sequence[str]) -> list[nn.Parameter]:
    """A stage's parameters by their names in the model."""
    return [module.get_parameter(in_graph_module(name)) for name in names]


def _install(root: nn.Module, stage: Stage, states: Mapping[str, Tensor]) -> None:
    """Register a stage's states under their dotted names."""
    for name in stage.states:
        *path, leaf = in_graph_module(name).split(".")
        module, tensor = _reached(root, path), states[name]
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(leaf, tensor)
        else:
            module.register_buffer(leaf, tensor)


def _reached(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path, with plain ones on the way where there are none."""
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


@dataclass(frozen=True)
class _Piece:
    module: fx.GraphModule
    arguments: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass(frozen=True)
class _Emitter:
    """Writes nodes into an fx graph for one number of rows and one device.

    In `precision` nodes read copies of parameters. The nodes `again` are marked for joint graphs.
    """

    graph: Graph
    reads: Sequence[Read] | None
    rows: int
    device: torch.device
    precision: str
    again: frozenset[str]

    def piece(
        self, root: nn.Module, home: str, nodes: Sequence[Node], wanted: set[Value]
    ) -> _Piece:
        """One block's module: what it reads from outside are its arguments."""
        inside = {Ref(n.name, i) for n in nodes for i in range(len(n.outputs))}
        inner, env = fx.Graph(), {}
        arguments: list[Value] = []
        for value in dict.fromkeys(v for node in nodes for v in node.values()):
            own_state = isinstance(value, State) and value.name.startswith(home + ".")
            if value not in inside and not own_state:
                arguments.append(value)
                env[value] = inner.placeholder(_identifier(str(value)))
        results = tuple(sorted(inside & wanted, key=lambda r: (self.graph.index[r.node], r.output)))
        self.emit(inner, nodes, env, prefix=home + ".")
        inner.output(tuple(env[value] for value in results))
        name = "".join(part.capitalize() for part in _identifier(home).split("_"))
        return _Piece(fx.GraphModule(root, inner, class_name=name), tuple(arguments), results)

    def call_piece(
        self, into: fx.Graph, path: str, piece: _Piece, env: dict[Value, fx.Node]
    ) -> None:
        """Write the call of a block's module, and take its results apart."""
        for value in piece.arguments:
            self.load(into, value, env, prefix="")
        call = into.call_module(path, tuple(env[value] for value in piece.arguments))
        for position, value in enumerate(piece.results):
            env[value] = into.call_function(take, (call, position))

    def emit(
        self, into: fx.Graph, nodes: Sequence[Node], env: dict[Value, fx.Node], prefix: str
    ) -> None:
        for node in nodes:
            if node.op == READ_OP and self.reads is None:
                continue
            for value in node.values():
                self.load(into, value, env, prefix)
            args, kwargs = self._arguments(into, node, env)
            call = self._call(into, node, args, kwargs)
            call.meta[NODE_NAME], call.meta[PLACE] = node.name, node.place
            if not node.packed:
                env[Ref(node.name)] = call
                continue
            for number in range(len(node.outputs)):
                env[Ref(node.name, number)] = into.call_function(take, (call, number))

    def load(self, into: fx.Graph, value: Value, env: dict[Value, fx.Node], prefix: str) -> None:
        """Bring a state into reach at its first use."""
        if isinstance(value, State) and value not in env:
            env[value] = into.get_attr(in_graph_module(value.name.removeprefix(prefix)))

    def argument(self, arg: Arg, env: Mapping[Value, Any]) -> Any:
        """An argument as fx takes it: nodes, integers, lists."""
        if isinstance(arg, Value):
            return env[arg]
        if isinstance(arg, Placement):
            return str(arg.at(self.rows))
        if isinstance(arg, tuple):
            return tuple(self.argument(item, env) for item in arg)
        if isinstance(arg, sympy.Basic):
            return dims.number_at(arg, self.rows)
        return self.device if isinstance(arg, torch.device) else arg

    def _arguments(
        self, into: fx.Graph, node: Node, env: Mapping[Value, fx.Node]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        clone = torch.ops.aten.clone.default
        rewritten = rewritten_reads(self.graph).get(node.name, ())
        copies = read_as_copies(self.graph, node, self.precision)
        own = {v: into.call_function(clone, (env[v],)) for v in rewritten}
        own |= {v: into.call_function(low, (env[v],)) for v in copies}  # none that is rewritten
        env = {**env, **own} if own else env
        if not node.grad:
            # Inside torch.no_grad(): what comes in from outside must not carry a gradient through.
            env = {
                value: into.call_function(torch.ops.aten.detach.default, (env[value],))
                for value in dict.fromkeys(node.values())
            }
        args = tuple(self.argument(arg, env) for arg in node.args)
        if node.op == REGION_OP:
            args = (*args[:-1], self.graph.called(node).key)
        return args, {key: self.argument(arg, env) for key, arg in node.kwargs.items()}

    def _call(
        self, into: fx.Graph, node: Node, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> fx.Node:
        if node.op == READ_OP and self.reads is not None:
            read = self.reads[args[1]]
            return into.call_function(check_read, (args[0], read.kind, read.value, read.place))
        op, auto = self._op(node), node.autocast
        around = () if auto is None else (auto.device_type, auto.dtype, auto.enabled)
        given: tuple[Any, ...] = (op, *args)
        if self.reads is None and node.op in KERNELS:  # on fake tensors, which draw nothing
            given = (opaque_under_autocast if around else run_opaque, *around, *given)
        elif is_random(node):
            given = (op, node.stream or node.name, *args)
            given = (draw_under_autocast if around else draw, *around, *given)
        elif around:
            given = (under_autocast, *around, *given)
        elif args and isinstance(args[0], fx.Node) and any(map(is_limit, args)):
            given = (saturated, *given)
        if node.name in self.again:
            call = given[0] if given[0] is op else given[0].__name__
            given = (repeated, call, *given[1:])
        return into.call_function(kernel_of(given[0]), given[1:], kwargs)

    def _op(self, node: Node) -> Any:
        """The op of a node; a view becomes a reshape, unless its memory is written in place.

        Kernels of a GPU give other strides than those of the CPU that the model was traced for,
        such as attention's, and then what was a view there has to copy.
        """
        op = resolve(node.op)
        if op is not torch.ops.aten.view.default:
            return op
        flow = analyse(self.graph)
        written = flow.root[Ref(node.name)] in flow.writers
        return op if written else torch.ops.aten.reshape.default


def _identifier(text: str) -> str:
    """A Python name for a path: `<image.mask>` -> `image_mask`."""
    name = "".join(c if c.isalnum() else "_" for c in text).strip("_")
    return name if name and not name[0].isdigit() else f"v_{name}"
