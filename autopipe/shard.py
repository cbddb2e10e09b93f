"""From a graph and a sharding to the graph that one rank of the axis runs.

    graph                          what a rank runs
      h = norm(x)                    h   = norm(x)
                                     h>R = convert(h, "tp", I, R)
      y = gelu(h * [w])              y   = gelu(h>R * [w])             [w] is this rank's part
      z = linear(y, [v])             z   = linear(y, [v])              a part of the sum
                                     z>I = convert(z, "tp", P, I)
      return x + z                   return x + z>I

The result is a graph like any other: it is cut, lowered, rehearsed, differentiated and compiled by
what does so with graphs. Nodes keep their names, so that one plan cuts it on all ranks alike.
Sizes stay formulas in the rows of a micro-batch, so a graph serves every number of them.

Conversions stand before the first node that needs them, sums right behind the node that makes them;
column-parallel layers take theirs into themselves (`columns`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopipe.blocks import Block
from autopipe.collectives import CONVERT, TENSOR_PARALLEL
from autopipe.columns import COLUMNS, fuse
from autopipe.dataflow import Dataflow, analyse, is_random
from autopipe.functional import out_of_place
from autopipe.graph import (
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
    swap,
    values_in,
)
from autopipe.op import Model, Op
from autopipe.placements import (
    ALL_REDUCE,
    I,
    Move,
    P,
    Placement,
    R,
    Sharding,
    lengths,
    local_size,
    moves,
    part,
)
from autopipe.shapes import segment_of


@once
def shardable(graph: Graph) -> Dataflow:
    """The form of a model that is dealt out; planning and running both begin with it.

    What is found out about it holds for every degree.
    """
    return analyse(out_of_place(graph))


def shard_graph(
    flow: Dataflow, sharding: Sharding, rank: int, *, length: int | None = None
) -> Graph:
    """What rank `rank` of the axis runs of a graph.

    A node that the sharding does not know, or knows with other inputs, is replicated: so are those
    that only evaluation has.

    Args:
        length: tokens of a row for which the sharding was found, if the sequence is a symbol.
    """
    made = _Local(Model(flow, sharding.ranks, length), sharding, rank)
    for node in flow.graph.nodes:
        made.add(node)
    graph = flow.graph
    whole = Graph(
        graph.inputs,
        {
            name: replace(state, spec=made.spec(state.spec, made.lies(State(name))))
            for name, state in graph.states.items()
        },
        tuple(made.nodes),
        tuple(made.result(output) for output in graph.outputs),
        graph.constants,
    )
    return fuse(whole)


def blocks_of(graph: Graph, blocks: Sequence[Block]) -> tuple[Block, ...]:
    """The blocks of the model that was dealt out, where they stand in what a rank runs."""
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
    """What a node of such a graph sends forward and backward.

    Args:
        carrying: the values of the graph that a gradient flows through.
    """
    if node.op == COLUMNS:
        return None, ALL_REDUCE
    if node.op != CONVERT:
        return None, None
    _, _, source, target, _ = node.args
    assert isinstance(source, Placement) and isinstance(target, Placement)
    return moves(source, target, Ref(node.name) in carrying) or (None, None)


def whole_bytes(graph: Graph, node: Node, ranks: int) -> Dim:
    """Bytes of all that a node of such a graph sends, as a formula."""
    if node.op == COLUMNS:
        (x,) = values_in(node.args[0])
        return graph.spec(x).bytes
    made, target = node.outputs[0], node.args[3]
    assert made is not None and isinstance(target, Placement)
    return made.bytes * (ranks if target.sharded else 1)


def replicated(sharding: Sharding) -> frozenset[str]:
    """Parameters of which each rank has all, and the gradient in part: it is summed over them."""
    return frozenset(name for name, lies in sharding.states.items() if lies == R)


@dataclass
class _Local:
    """The graph of one rank in the making."""

    model: Model
    sharding: Sharding
    rank: int
    nodes: list[Node] = field(default_factory=list)
    _lies: dict[Value, Placement] = field(default_factory=dict)
    _converted: dict[tuple[str, Value, Placement], Value] = field(default_factory=dict)
    _wanted: dict[Value, dict[Placement, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.model.graph.nodes:
            for value, lies in self.inputs(node).items():
                self._wanted.setdefault(value, {})[self.model.normal(value, lies)] = None
        for output in self.model.graph.outputs:
            if isinstance(output, Ref | Input | State):
                self._wanted.setdefault(output, {})[I] = None

    def inputs(self, node: Node) -> dict[Value, Placement]:
        """How the tensors that a node reads are to lie."""
        tensors = self.model.tensors(node)
        known = self.sharding.nodes.get(node.name)
        if known is None or len(known[0]) != len(tensors):
            return dict.fromkeys(tensors, I)
        return dict(zip(tensors, known[0], strict=True))

    def output(self, node: Node) -> Placement:
        """How what it makes lies."""
        known = self.sharding.nodes.get(node.name)
        same = known is not None and len(known[0]) == len(self.model.tensors(node))
        return known[1] if known is not None and same else I

    def lies(self, value: Value) -> Placement:
        """How a value lies where it is made."""
        if isinstance(value, State):
            return self.model.normal(value, self.sharding.states.get(value.name, I))
        return self._lies.get(value, I)

    def spec(self, spec: TensorSpec, lies: Placement) -> TensorSpec:
        """What this rank has of a tensor."""
        if not lies.sharded:
            return spec
        shape = list(spec.shape)
        shape[lies.dim] = self.local(shape[lies.dim], lies)
        return TensorSpec(tuple(shape), spec.dtype)

    def local(self, size: Dim, lies: Placement) -> Dim:
        """What this rank has of a dim."""
        return local_size(size, lies.segments, self.sharding.ranks, self.rank)

    def emit(self, node: Node) -> Ref:
        """Put a node at the end; its first result."""
        self.nodes.append(node)
        return Ref(node.name)

    def add(self, node: Node) -> None:
        """Put a node's local form at the end, with the conversions that it is the first to need."""
        wanted, output = self.inputs(node), self.output(node)
        values = {v: self.get(v, self.model.normal(v, lies), node) for v, lies in wanted.items()}
        outputs = tuple(spec and self.spec(spec, output) for spec in node.outputs)
        args = swap(node.args, values)
        kwargs = {key: swap(arg, values) for key, arg in node.kwargs.items()}
        local = replace(node, args=args, kwargs=kwargs, outputs=outputs)
        if output.sharded and is_random(node):
            local = replace(local, stream=f"{node.name}#{TENSOR_PARALLEL}{self.rank}")
        if any(lies.sharded for lies in (*wanted.values(), output)):
            op = Op(self.model, node, lambda value: ())
            rewrite = LOCAL.get(op.name)
            if rewrite is not None:
                local = rewrite(_Rewriting(self, op, wanted, output, local))
        self.emit(local)
        for number, spec in enumerate(node.outputs):
            if spec is None:
                continue
            value = Ref(node.name, number)
            self._lies[value] = self.model.normal(value, output)
            if output == P:
                for target in self._wanted.get(value, ()):
                    self.get(value, target, node)

    def get(self, value: Value, target: Placement, near: Node) -> Value:
        """A value as it is to lie, converted at the end if it has not been so far."""
        source = self.lies(value)
        if source == target:
            return value
        # A parameter is converted where it is used: stages that share one each have it.
        own = f"{near.name}/" if isinstance(value, State) else ""
        found = self._converted.get((own, value, target))
        if found is None:
            whole = self.model.graph.spec(value)
            size: Dim = whole.shape[source.dim] if source.sharded else 0
            made = Node(
                name=f"{own}{value}>{target}",
                op=CONVERT,
                args=(value, TENSOR_PARALLEL, source, target, size),
                kwargs={},
                outputs=(self.spec(whole, target),),
                packed=False,
                scopes=near.scopes,
                place=near.place,
            )
            found = self._converted[own, value, target] = self.emit(made)
        return found

    def result(self, output: Arg) -> Arg:
        """A result of the graph, replicated."""
        if not isinstance(output, Ref | Input | State):
            return output
        return self.get(output, I, self.nodes[-1])


# Ops whose arguments are sizes, or that are another op on a shard


@dataclass(frozen=True)
class _Rewriting:
    """A node that has shards, and its form with local tensors and global sizes."""

    graph: _Local
    op: Op
    inputs: Mapping[Value, Placement]
    output: Placement
    node: Node

    def with_arguments(self, **changed: Any) -> Node:
        """The node with other values of some arguments, by their names in the schema."""
        names = [argument for argument in self.op.arguments]
        args, kwargs = list(self.node.args), dict(self.node.kwargs)
        for name, value in changed.items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return replace(self.node, args=tuple(args), kwargs=kwargs)

    def before(
        self, word: str, op: str, *args: Arg, shape: Sequence[Dim], dtype: torch.dtype
    ) -> Ref:
        """Put a node of this one's own in front of it."""
        return self.graph.emit(
            replace(
                self.node,
                name=f"{self.node.name}/{word}",
                op=f"aten.{op}",
                args=args,
                kwargs={},
                outputs=(TensorSpec(tuple(shape), dtype),),
                packed=False,
                stream="",
            )
        )

    def convert(self, word: str, value: Ref, spec: TensorSpec) -> Ref:
        """A partial sum of this node's own, summed."""
        return self.graph.emit(
            replace(
                self.node,
                name=f"{self.node.name}/{word}",
                op=CONVERT,
                args=(value, TENSOR_PARALLEL, P, I, 0),
                kwargs={},
                outputs=(spec,),
                packed=False,
                autocast=None,
            )
        )


LOCAL: dict[str, Callable[[_Rewriting], Node]] = {}
"""By op; one that is not here runs on shards as it stands."""


def _rewrite(
    *names: str,
) -> Callable[[Callable[[_Rewriting], Node]], Callable[[_Rewriting], Node]]:
    def enter(function: Callable[[_Rewriting], Node]) -> Callable[[_Rewriting], Node]:
        LOCAL.update(dict.fromkeys(names, function))
        return function

    return enter


def _made(rewriting: _Rewriting) -> tuple[Dim, ...]:
    spec = rewriting.node.outputs[0]
    assert spec is not None
    return spec.shape


@_rewrite("view", "_unsafe_view", "expand", "reshape")
def _sizes(rewriting: _Rewriting) -> Node:
    return replace(rewriting.node, args=(rewriting.node.args[0], _made(rewriting)), kwargs={})


@_rewrite("unflatten", "flatten")
def _reshape(rewriting: _Rewriting) -> Node:
    return replace(_sizes(rewriting), op="aten.reshape.default")


@_rewrite("split", "split_with_sizes", "chunk")
def _split(rewriting: _Rewriting) -> Node:
    dim = rewriting.op.dim(of=rewriting.op.inputs[0])
    sizes = tuple(spec.shape[dim] for spec in rewriting.node.outputs if spec is not None)
    args = (rewriting.node.args[0], sizes, dim)
    return replace(rewriting.node, op="aten.split_with_sizes.default", args=args, kwargs={})


@_rewrite("slice")
def _slice(rewriting: _Rewriting) -> Node:
    (x,) = rewriting.op.inputs
    dim, lies = rewriting.op.dim(of=x), rewriting.inputs[x]
    if lies.dim != dim:
        return rewriting.node
    number = segment_of(rewriting.op, x, dim, lies)
    if number is None:  # all of it
        return rewriting.with_arguments(start=0, end=_made(rewriting)[dim])
    size = rewriting.op.shape(x)[dim]
    own = [
        part(length, rewriting.graph.sharding.ranks, rewriting.graph.rank)[1]
        for length in lengths(size, lies.segments)
    ]
    begin = sum(own[:number])
    return rewriting.with_arguments(start=begin, end=begin + own[number])


@_rewrite("conv1d", "conv2d", "conv3d")
def _convolution(rewriting: _Rewriting) -> Node:
    groups = rewriting.op["groups"]
    if groups == 1:
        return rewriting.node
    return rewriting.with_arguments(groups=groups // rewriting.graph.sharding.ranks)


@_rewrite("repeat_interleave")
def _repeat_interleave(rewriting: _Rewriting) -> Node:
    kwargs = {k: v for k, v in rewriting.node.kwargs.items() if k != "output_size"}
    return replace(rewriting.node, kwargs=kwargs)


@_rewrite("mean")
def _mean(rewriting: _Rewriting) -> Node:
    """Of equal parts the mean is the sum of their means over the number of them."""
    (x,) = rewriting.op.inputs
    if not rewriting.inputs[x].sharded or rewriting.output != P:
        return rewriting.node
    node, made = rewriting.node, rewriting.node.outputs[0]
    assert made is not None
    own = rewriting.graph.emit(replace(node, name=f"{node.name}/part"))
    args = (own, rewriting.graph.sharding.ranks)
    return replace(node, op="aten.div.Scalar", args=args, kwargs={})


@_rewrite("embedding")
def _embedding(rewriting: _Rewriting) -> Node:
    """Rows of a vocabulary: zeros for the words of other ranks."""
    op, node = rewriting.op, rewriting.node
    w, ids = op["weight"], op["indices"]
    if rewriting.inputs[w].dim != 0 or not rewriting.inputs[w].sharded:
        return node
    begin, length = part(op.shape(w)[0], rewriting.graph.sharding.ranks, rewriting.graph.rank)
    weight, indices = node.args[:2]
    asked = rewriting.graph.model.graph.spec(ids)
    shape, dtype = asked.shape, asked.dtype
    made = node.outputs[0]
    assert made is not None
    own = rewriting.before("own", "sub.Scalar", indices, begin, shape=shape, dtype=dtype)
    low = rewriting.before("low", "lt.Scalar", own, 0, shape=shape, dtype=torch.bool)
    high = rewriting.before("high", "ge.Scalar", own, length, shape=shape, dtype=torch.bool)
    other = rewriting.before(
        "other", "logical_or.default", low, high, shape=shape, dtype=torch.bool
    )
    rows = rewriting.before("rows", "masked_fill.Scalar", own, other, 0, shape=shape, dtype=dtype)
    padding = op["padding_idx"] - begin
    padding = padding if op["padding_idx"] >= 0 and 0 <= padding < length else -1
    found = rewriting.before(
        "found", "embedding.default", weight, rows, padding, shape=made.shape, dtype=made.dtype
    )
    mask = rewriting.before(
        "mask", "unsqueeze.default", other, -1, shape=(*shape, 1), dtype=torch.bool
    )
    return replace(node, op="aten.masked_fill.Scalar", args=(found, mask, 0.0), kwargs={})


@_rewrite("cross_entropy_loss")
def _cross_entropy(rewriting: _Rewriting) -> Node:
    """log(sum(exp(x))) - x[target], with the maximum, the sum and the target's x over all ranks.

    Section 3 of Megatron-LM (arXiv:1909.08053). Kept for backward is one tensor of the logits'
    shape, exp(x - max).
    """
    op, node = rewriting.op, rewriting.node
    x, target = node.args[:2]
    begin, length = part(
        op.shape(op["self"])[1], rewriting.graph.sharding.ranks, rewriting.graph.rank
    )
    rows = rewriting.graph.model.graph.spec(op["self"]).shape[0]
    wide, whole, truth = torch.float32, (rows, length), torch.bool
    made = node.outputs[0]
    assert made is not None
    if made.dtype == torch.float64:
        wide = torch.float64

    def before(word: str, name: str, *args: Arg, shape: Sequence[Dim] = (rows,),
               dtype: torch.dtype = wide) -> Ref:  # fmt: skip
        return rewriting.before(word, name, *args, shape=shape, dtype=dtype)

    logits = before("wide", "to.dtype", x, wide, shape=whole)
    detached = before("values", "detach.default", logits, shape=whole)
    own_most = before("own most", "amax.default", detached, (1,), True, shape=(rows, 1))
    most = rewriting.graph.emit(
        replace(
            node,
            name=f"{node.name}/most",
            op="autopipe.largest.default",
            args=(own_most, TENSOR_PARALLEL),
            kwargs={},
            outputs=(TensorSpec((rows, 1), wide),),
            packed=False,
        )  # fmt: skip
    )
    lower = before("lower", "sub.Tensor", logits, most, shape=whole)
    powers = before("powers", "exp.default", lower, shape=whole)
    own_sum = before("own sum", "sum.dim_IntList", powers, (1,))
    spec = TensorSpec((rows,), wide)
    total = rewriting.convert("sum", own_sum, spec)
    log = before("log", "log.default", total)
    ids = torch.int64
    ignored = before("ignored", "eq.Scalar", target, op["ignore_index"], dtype=truth)
    own = before("own", "sub.Scalar", target, begin, dtype=ids)
    low = before("low", "lt.Scalar", own, 0, dtype=truth)
    high = before("high", "ge.Scalar", own, length, dtype=truth)
    outside = before("outside", "logical_or.default", low, high, dtype=truth)
    other = before("other", "logical_or.default", outside, ignored, dtype=truth)
    columns = before("columns", "masked_fill.Scalar", own, other, 0, dtype=ids)
    column = before("column", "unsqueeze.default", columns, 1, shape=(rows, 1), dtype=ids)
    picked = before("picked", "gather.default", lower, 1, column, shape=(rows, 1))
    flat = before("flat", "squeeze.dim", picked, 1)
    own_truth = before("own truth", "masked_fill.Scalar", flat, other, 0.0)
    truth_ = rewriting.convert("truth", own_truth, spec)
    each = before("each", "sub.Tensor", log, truth_)
    kept = before("kept", "masked_fill.Scalar", each, ignored, 0.0)
    total_loss = before("total", "sum.default", kept, shape=())
    if op["reduction"] == 1:
        count = before("counted", "logical_not.default", ignored, dtype=truth)
        many = before("many", "sum.default", count, shape=(), dtype=ids)
        total_loss = before("mean", "div.Tensor", total_loss, many, shape=())
    return replace(node, op="aten.to.dtype", args=(total_loss, made.dtype), kwargs={})
