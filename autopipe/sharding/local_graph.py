"""Make the graph that one tensor-parallel rank runs from a graph and a sharding.

    graph                          what a rank runs
      h = norm(x)                    h   = norm(x)
                                     h>R = convert(h, "tp", I, R)
      y = gelu(h * [w])              y   = gelu(h>R * [w])             [w] is this rank's part
      z = linear(y, [v])             z   = linear(y, [v])              a part of the sum
                                     z>I = convert(z, "tp", P, I)
      return x + z                   return x + z>I

The result is an ordinary graph: it is cut, lowered, dry-run, differentiated and compiled like any
other. Nodes keep their names, so that one plan cuts it at the same nodes on all ranks. Sizes stay
formulas in the rows of a micro-batch.

A conversion is before the first node that needs it, a sum right behind the node that makes it;
column-parallel layers contain their conversions (`sharding.column_linear`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autopipe.ir import check
from autopipe.ir.blocks import Block, find_blocks, owners
from autopipe.ir.dataflow import Dataflow, analyse, gradient_values, is_random
from autopipe.ir.graph import (
    Arg,
    Dim,
    Graph,
    Input,
    Node,
    Ref,
    State,
    TensorSpec,
    Value,
    once,
    values_in,
)
from autopipe.planfile.placements import (
    ALL_REDUCE,
    I,
    Move,
    P,
    Placement,
    R,
    Sharding,
    local_size,
    moves,
)
from autopipe.sharding.collectives import CONVERT, TENSOR_PARALLEL
from autopipe.sharding.column_linear import COLUMNS, fuse
from autopipe.sharding.functionalize import out_of_place
from autopipe.sharding.local_ops import LOCAL, Rewriting
from autopipe.sharding.op import Model, Op
from autopipe.sharding.vocabulary_loss import LOSS


@once
def shardable(graph: Graph) -> Dataflow:
    """The form of a graph that can be sharded; planning and running both begin with it.

    It does not depend on the tensor-parallel degree.
    """
    return analyse(out_of_place(graph))


def shard_graph(
    flow: Dataflow, sharding: Sharding, rank: int, *, length: int | None = None
) -> Graph:
    """Make the graph that rank `rank` of the axis runs.

    A node that is not in the sharding, or is there with other inputs, is replicated: for example
    the nodes of an evaluation graph alone.

    Args:
        length: tokens of a row for which the sharding was computed, if the sequence is a symbol.
    """
    local = _Local(Model(flow, sharding.ranks, length), sharding, rank)
    for node in flow.graph.nodes:
        local.add(node)
    graph = flow.graph
    outputs = tuple(local.result(output) for output in graph.outputs)  # these may add nodes
    sharded = replace(
        graph,
        states={
            name: replace(state, spec=local.spec(state.spec, local.placement_of(State(name))))
            for name, state in graph.states.items()
        },
        nodes=tuple(local.nodes),
        outputs=outputs,
    )
    inside = owners(find_blocks(graph), 0, len(graph.nodes))
    blocks = {graph.nodes[position].name: block for position, block in inside.items()}
    return check.after("local_graph", fuse(sharded, blocks))


def blocks_of(graph: Graph, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The model's blocks, with their node positions in the graph of a rank."""
    positions: dict[str, list[int]] = {block.path: [] for block in blocks}
    for position, node in enumerate(graph.nodes):
        for scope in node.scopes:
            if scope in positions:
                positions[scope].append(position)
    return tuple(
        replace(block, first=positions[block.path][0], stop=positions[block.path][-1] + 1)
        for block in blocks
    )


def sent_by(node: Node, carrying: Collection[Ref | State]) -> tuple[Move | None, Move | None]:
    """The collectives of a node of a rank's graph, forward and backward.

    Args:
        carrying: the values of the graph that carry a gradient.
    """
    if node.op == COLUMNS:
        return None, ALL_REDUCE
    if node.op == LOSS:
        return (ALL_REDUCE if node.args[-1] else None), None
    if node.op != CONVERT:
        return None, None
    _, _, source, target, _ = node.args
    assert isinstance(source, Placement) and isinstance(target, Placement)
    return moves(source, target, Ref(node.name) in carrying) or (None, None)


def whole_bytes(graph: Graph, node: Node, ranks: int) -> Dim:
    """Bytes of the whole tensors in the collectives of a node, as a formula in rows."""
    if node.op == COLUMNS:
        (x,) = values_in(node.args[0])
        return graph.spec(x).bytes
    if node.op == LOSS:  # of each row a maximum, a sum and the target's logit
        each = node.outputs[1]
        assert each is not None
        return 3 * each.bytes
    made, target = node.outputs[0], node.args[3]
    assert made is not None and isinstance(target, Placement)
    return made.bytes * (ranks if target.sharded else 1)


def held_whole(
    flow: Dataflow, local: Graph, sharding: Sharding, *, length: int | None = None
) -> dict[Ref, Placement]:
    """The tensors of a rank's graph that each rank has whole, and how their gradients lie: I or R.

    Those of nodes that only a rank's graph has are left out, conversions aside: nobody says how
    they lie.

    Args:
        flow: of the graph that was sharded, into `local`.
        length: as `shard_graph` has it.
    """
    made = _Local(Model(flow, sharding.ranks, length), sharding, 0)
    placement_by_name: dict[str, object] = {
        node.name: made.output(node) for node in flow.graph.nodes
    }
    placement_by_name |= {node.name: node.args[3] for node in local.nodes if node.op == CONVERT}
    carrying, placements = gradient_values(local), dict[Ref, Placement]()
    for node in local.nodes:
        for placement in (I, R):
            if placement_by_name.get(node.name) == placement:
                refs = (
                    Ref(node.name, n) for n, spec in enumerate(node.outputs) if spec is not None
                )
                placements |= {ref: placement if ref in carrying else I for ref in refs}
    return placements


def replicated(sharding: Sharding) -> frozenset[str]:
    """The replicated parameters with partial gradients, which must be summed over the ranks."""
    return frozenset(name for name, placement in sharding.states.items() if placement == R)


@dataclass
class _Local:
    """The graph of one rank in the making."""

    model: Model
    sharding: Sharding
    rank: int
    nodes: list[Node] = field(default_factory=list)
    _placements: dict[Value, Placement] = field(default_factory=dict)
    _converted: dict[tuple[str, Value, Placement], Value] = field(default_factory=dict)
    _wanted: dict[Value, dict[Placement, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.model.graph.nodes:
            for value, placement in self.inputs(node).items():
                self._wanted.setdefault(value, {})[self.model.normal(value, placement)] = None
        for output in self.model.graph.outputs:
            if isinstance(output, Ref | Input | State):
                self._wanted.setdefault(output, {})[I] = None

    def inputs(self, node: Node) -> dict[Value, Placement]:
        """The placement in which a node wants each tensor that it reads."""
        tensors = self.model.tensors(node)
        known = self.sharding.nodes.get(node.name)
        if known is None or len(known[0]) != len(tensors):
            return dict.fromkeys(tensors, I)
        return dict(zip(tensors, known[0], strict=True))

    def output(self, node: Node) -> Placement:
        """The placement of a node's results."""
        known = self.sharding.nodes.get(node.name)
        same = known is not None and len(known[0]) == len(self.model.tensors(node))
        return known[1] if known is not None and same else I

    def placement_of(self, value: Value) -> Placement:
        """The placement of a value where it is made."""
        if isinstance(value, State):
            return self.model.normal(value, self.sharding.states.get(value.name, I))
        return self._placements.get(value, I)

    def spec(self, spec: TensorSpec, placement: Placement) -> TensorSpec:
        """Shape and dtype of this rank's part of a tensor."""
        if not placement.sharded:
            return spec
        shape = list(spec.shape)
        shape[placement.dim] = self.local(shape[placement.dim], placement)
        return TensorSpec(tuple(shape), spec.dtype)

    def local(self, size: Dim, placement: Placement) -> Dim:
        """The size of this rank's part of a dim."""
        return local_size(size, placement.segments, self.sharding.ranks, self.rank)

    def emit(self, node: Node) -> Ref:
        """Put a node at the end; returns its first result."""
        self.nodes.append(node)
        return Ref(node.name)

    def add(self, node: Node) -> None:
        """Put a node's local form at the end, with the conversions that it is the first to need."""
        placements, output = self.inputs(node), self.output(node)
        values = {v: self.get(v, self.model.normal(v, p), node) for v, p in placements.items()}
        outputs = tuple(spec and self.spec(spec, output) for spec in node.outputs)
        local = replace(node.reading(values), outputs=outputs)
        if output.sharded and is_random(node):
            local = replace(local, stream=f"{node.name}#{TENSOR_PARALLEL}{self.rank}")
        if any(p.sharded for p in (*placements.values(), output)):
            op = Op(self.model, node, lambda value: ())
            rewrite = LOCAL.get(op.name)
            if rewrite is not None:
                local = rewrite(
                    Rewriting(
                        op, self.sharding.ranks, self.rank, self.emit, placements, output, local
                    )
                )
        self.emit(local)
        for number, spec in enumerate(node.outputs):
            if spec is None:
                continue
            value = Ref(node.name, number)
            self._placements[value] = self.model.normal(value, output)
            if output == P:
                for target in self._wanted.get(value, ()):
                    self.get(value, target, node)

    def get(self, value: Value, target: Placement, reader: Node) -> Value:
        """A value in a placement; the conversion, if it is the first to it, is put at the end."""
        source = self.placement_of(value)
        if source == target:
            return value
        # A parameter is converted where it is used: stages that share one each have it.
        prefix = f"{reader.name}/" if isinstance(value, State) else ""
        converted = self._converted.get((prefix, value, target))
        if converted is None:
            spec = self.model.graph.spec(value)
            size: Dim = spec.shape[source.dim] if source.sharded else 0
            conversion = Node(
                name=f"{prefix}{value}>{target}",
                op=CONVERT,
                args=(value, TENSOR_PARALLEL, source, target, size),
                kwargs={},
                outputs=(self.spec(spec, target),),
                packed=False,
                scopes=reader.scopes,
                place=reader.place,
            )
            converted = self._converted[prefix, value, target] = self.emit(conversion)
        return converted

    def result(self, output: Arg) -> Arg:
        """A result of the graph, replicated."""
        if not isinstance(output, Ref | Input | State):
            return output
        return self.get(output, I, self.nodes[-1])
