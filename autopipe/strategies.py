"""What each op can do with shards: the rule table of tensor parallelism.

A strategy says how an op's tensors lie when each rank runs it on its parts:

    linear    x: R             w: S(0)   b: S(0)    ->  S(-1)      column-parallel
              x: S(-1)         w: S(1)   b: P       ->  P          row-parallel
              x: S(d)          w: R      b: R       ->  S(d)       shards of the rows
    mul       a: P             b: R                 ->  P
    sum       x: S(d), summed over d                ->  P

(The first two are Megatron-LM's, arXiv:1909.08053, section 3.) Every op has two strategies more:
all I, and all R. An op that is not in the table has those only: it is replicated, never wrong.

A rule writes down the inputs that it has something to say of; the others are `op.free`: replicated,
and their gradients may be partial sums. Strategies whose shards are impossible are left out by
`strategies`, so a rule need not ask what divides what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from autopipe.cost import gradient_values
from autopipe.dataflow import Dataflow
from autopipe.graph import Dim, Graph, Node, Ref, State, Value, at_batch, at_sequence, values_in
from autopipe.placements import (
    BIG,
    I,
    P,
    Placement,
    R,
    S,
    divides,
    through_view,
)
from autopipe.trace import READ_OP, resolve

UNEVEN = 16
"""A dim that does not divide is dealt out unevenly where each rank gets so much at least: the
largest part is then a sixteenth more than its share, at most. Vocabularies are such dims."""


class Strategy(NamedTuple):
    """How an op's tensors lie, and what it makes; all of its results lie alike."""

    inputs: Mapping[Value, Placement]
    output: Placement


Shards = Callable[[Value], Iterable[Placement]]
"""The sharded placements in which a value may come."""


@dataclass(frozen=True)
class Model:
    """What rules ask of a graph that is to be dealt out to `ranks` ranks.

    Where the sequence is a symbol, rules see rows of `length` tokens.
    """

    flow: Dataflow
    ranks: int
    length: int | None = None

    @property
    def graph(self) -> Graph:
        """The model as traced."""
        return self.flow.graph

    @cached_property
    def carrying(self) -> frozenset[Ref | State]:
        """The values that a gradient flows through."""
        return gradient_values(self.graph)

    @cached_property
    def fixed(self) -> set[Value]:
        """Those that share memory with one that is written in place: they stay replicated."""
        return {value for value, root in self.flow.root.items() if root in self.flow.writers}

    @cached_property
    def _shapes(self) -> dict[Value, tuple[int, ...]]:
        return {}

    def shape(self, value: Value) -> tuple[int, ...]:
        """Sizes, with `placements.BIG` rows in a micro-batch."""
        found = self._shapes.get(value)
        if found is None:
            found = tuple(map(self.size, self.graph.spec(value).shape))
            self._shapes[value] = found
        return found

    def size(self, dim: Dim) -> int:
        """A dim, with `placements.BIG` rows in a micro-batch."""
        return at_batch(dim if self.length is None else at_sequence(dim, self.length), BIG)

    def is_tensor(self, value: Value) -> bool:
        """Whether a value is one; a few ops have results that are none."""
        if not isinstance(value, Ref):
            return True
        return self.graph.nodes[self.graph.index[value.node]].outputs[value.output] is not None

    @cached_property
    def _tensors(self) -> dict[str, tuple[Value, ...]]:
        return {}

    def tensors(self, node: Node) -> tuple[Value, ...]:
        """The distinct tensors that a node reads, in their order."""
        found = self._tensors.get(node.name)
        if found is None:
            values = dict.fromkeys(node.values())
            found = self._tensors[node.name] = tuple(filter(self.is_tensor, values))
        return found

    def normal(self, value: Value, lies: Placement) -> Placement:
        """Without a gradient there is one way to be replicated."""
        return I if lies == R and value not in self.carrying else lies

    def can_shard(self, value: Value, placement: Placement) -> bool:
        """Whether each rank gets a part, and all equally much but of a very long dim."""
        size = self.shape(value)[placement.dim]
        if divides(size, placement.segments, self.ranks):
            return True
        return placement.segments == 1 and size % BIG != 0 and size >= UNEVEN * self.ranks

    def divides(self, value: Value, placement: Placement) -> bool:
        """Whether all get equally much."""
        return divides(self.shape(value)[placement.dim], placement.segments, self.ranks)


@dataclass(frozen=True)
class Op:
    """A node as a rule sees it."""

    model: Model
    node: Node
    shards: Shards

    @property
    def name(self) -> str:
        """`linear` of `aten.linear.default`."""
        return self.node.op.split(".")[1]

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The distinct tensors it reads."""
        return self.model.tensors(self.node)

    @cached_property
    def outputs(self) -> tuple[Ref, ...]:
        """The tensors it makes."""
        made = enumerate(self.node.outputs)
        return tuple(Ref(self.node.name, n) for n, spec in made if spec is not None)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by the names of the op's schema; what is not given has its default."""
        schema = resolve(self.node.op)._schema.arguments
        given = dict(zip((a.name for a in schema), self.node.args, strict=False))
        return {a.name: a.default_value for a in schema} | given | dict(self.node.kwargs)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, value: Value) -> tuple[int, ...]:
        """Sizes of an input."""
        return self.model.shape(value)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """Sizes of the first result."""
        return self.model.shape(self.outputs[0])

    @cached_property
    def carries(self) -> bool:
        """Whether a gradient flows through it."""
        return any(output in self.model.carrying for output in self.outputs)

    def free(self, value: Value) -> Placement:
        """Replicated, where the gradient may be partial if there is one."""
        return R if self.carries and value in self.model.carrying else I

    def dim(self, name: str = "dim", of: Value | None = None) -> int:
        """A dim among the arguments, counted from the front."""
        rank = len(self.made if of is None else self.shape(of))
        return int(self[name]) % max(rank, 1)

    def aligned(self, value: Value, dim: int) -> int | None:
        """The dim of an input that stands at `dim` of the result; None where it is spread."""
        own = dim - (len(self.made) - len(self.shape(value)))
        return own if own >= 0 and self.shape(value)[own] == self.made[dim] else None


Rule = Callable[[Op], Iterator[Strategy]]

RULES: dict[str, Rule] = {}
"""The table, by op. `strategies` adds what every op can."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter a function in the table; an op that is there already is refused."""

    def enter(function: Rule) -> Rule:
        for name in names:
            assert name not in RULES, f"two rules for {name}"
            RULES[name] = function
        return function

    return enter


def strategies(model: Model, node: Node, shards: Shards) -> tuple[Strategy, ...]:
    """All that a node can do, the replicated strategies first, each once."""
    op = Op(model, node, shards)
    found = [Strategy(dict.fromkeys(op.inputs, I), I)]
    if op.carries:
        found.append(Strategy({v: op.free(v) for v in op.inputs}, R))
    fixed = any(value in model.fixed for value in (*op.inputs, *op.outputs))
    if op.outputs and node.op != READ_OP and not fixed:
        named = RULES.get(op.name) or (pointwise if is_pointwise(node) else None)
        found += named(op) if named is not None else ()
    kept: dict[tuple[tuple[Placement, ...], Placement], Strategy] = {}
    for inputs, output in found:
        lie = {value: inputs.get(value, op.free(value)) for value in op.inputs}
        placed = [*lie.items(), *((made, output) for made in op.outputs)]
        if all(model.can_shard(v, p) for v, p in placed if p.sharded):
            kept.setdefault((tuple(lie.values()), output), Strategy(lie, output))
    return tuple(kept.values())


# Element by element

_POINTWISE = frozenset(
    "to contiguous clone alias detach dropout type_as where masked_fill zeros_like ones_like "
    "empty_like full_like lift_fresh_copy _to_copy bernoulli rsub silu relu6 hardswish".split()
)
"""Ops that act on each element by itself and are not tagged so by torch."""

_LINEAR = frozenset("to _to_copy contiguous clone alias neg type_as".split())


def is_pointwise(node: Node) -> bool:
    """Whether an op acts on each element by itself."""
    op = resolve(node.op)
    return node.op.split(".")[1] in _POINTWISE or torch.Tag.pointwise in getattr(op, "tags", ())


def pointwise(op: Op) -> Iterator[Strategy]:
    """Shards of any dim; operands that are spread over it are whole."""
    rank = len(op.made)
    wanted = {
        S(placement.dim + rank - len(op.shape(value)), placement.segments): None
        for value in op.inputs
        for placement in op.shards(value)
    }
    for target in wanted:
        dims = {value: op.aligned(value, target.dim) for value in op.inputs}
        shared = {v: S(d, target.segments) for v, d in dims.items() if d is not None}
        if shared and op.made[target.dim] > 1:
            yield Strategy(shared, target)
    if not op.carries:
        return
    first = op.node.args[0]
    carrying = [value for value in op.inputs if value in op.model.carrying]
    if op.name in _LINEAR and first in carrying:
        yield Strategy({first: P}, P)
    elif op.name in ("add", "sub") and len(op.inputs) == len(op.node.args):
        yield Strategy(dict.fromkeys(op.inputs, P), P)
    elif op.name in ("mul", "div"):
        a, b = op.node.args[:2]
        for scaled, by in ((a, b), (b, a))[: 1 if op.name == "div" else 2]:
            if scaled in carrying and scaled != by:
                yield Strategy({scaled: P}, P)


# Shapes


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
def view(op: Op) -> Iterator[Strategy]:
    """A shard stays one where its elements stand in one dim of the result."""
    (x,) = op.inputs
    for placement in op.shards(x):
        target = through_view(
            op.shape(x), op.made, placement.dim, placement.segments, op.model.ranks
        )
        if target is not None:
            yield Strategy({x: placement}, target)
    if op.carries:
        yield Strategy({x: P}, P)


def permutation(op: Op) -> list[int]:
    """Which dim of the input stands at each dim of the result."""
    rank = len(op.made)
    if op.name == "permute":
        return [dim % rank for dim in op["dims"]]
    order = list(range(rank))
    if op.name == "transpose":
        a, b = op.dim("dim0"), op.dim("dim1")
        order[a], order[b] = order[b], order[a]
        return order
    return order[::-1]  # t, numpy_T


@rule("transpose", "permute", "t", "numpy_T")
def permute(op: Op) -> Iterator[Strategy]:
    """The shard's dim goes where the permutation puts it."""
    (x,), order = op.inputs, permutation(op)
    for placement in op.shards(x):
        yield Strategy({x: placement}, S(order.index(placement.dim), placement.segments))
    if op.carries:
        yield Strategy({x: P}, P)


@rule("expand")
def expand(op: Op) -> Iterator[Strategy]:
    """Dims that are not spread keep their shards."""
    x = op.inputs[0]
    offset = len(op.made) - len(op.shape(x))
    for placement in op.shards(x):
        if op.made[placement.dim + offset] == op.shape(x)[placement.dim]:
            yield Strategy({x: placement}, S(placement.dim + offset, placement.segments))


@rule("split", "split_with_sizes", "chunk")
def split(op: Op) -> Iterator[Strategy]:
    """Of a fused dim each rank has a part of every piece: its segments are the pieces."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim:
            yield Strategy({x: placement}, placement)
        elif placement.segments == S(dim, pieces(op, dim)).segments:
            yield Strategy({x: placement}, S(dim))


def pieces(op: Op, dim: int) -> tuple[int, ...]:
    """The lengths into which a dim is split."""
    return tuple(op.model.shape(output)[dim] for output in op.outputs)


@rule("slice")
def slice_(op: Op) -> Iterator[Strategy]:
    """Another dim, or exactly one segment of this one."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim or op.made[dim] == op.shape(x)[dim]:
            yield Strategy({x: placement}, placement)
        elif segment_of(op, x, dim, placement) is not None:
            yield Strategy({x: placement}, S(dim))


def segment_of(op: Op, x: Value, dim: int, placement: Placement) -> int | None:
    """The number of the segment that a slice takes, or None where it takes something else."""
    begin, end = bounds(op, x, dim)
    at = 0
    for number, length in enumerate(_few_lengths(op.shape(x)[dim], placement)):
        if (begin, end) == (at, at + length):
            return number
        at += length
    return None


def bounds(op: Op, x: Value, dim: int) -> tuple[int, int]:
    """Where a slice begins and ends; (0, 0) if it takes not all in between."""
    size = op.shape(x)[dim]

    def inside(given: Any, default: int) -> int:
        at = default if given is None else op.model.size(given)
        return min(max(at + size if at < 0 else at, 0), size)

    if op["step"] != 1:
        return 0, 0
    return inside(op["start"], 0), inside(op["end"], size)


def _few_lengths(size: int, placement: Placement) -> Sequence[int]:
    if isinstance(placement.segments, tuple):
        return placement.segments
    few = placement.segments if placement.segments <= 64 else 0
    return (size // placement.segments,) * few


@rule("select", "unbind")
def select(op: Op) -> Iterator[Strategy]:
    """The dim that goes is whole; those after it move up."""
    (x,) = op.inputs
    dim = op.dim(of=x)
    for placement in op.shards(x):
        if placement.dim != dim:
            moved = placement.dim - (placement.dim > dim)
            yield Strategy({x: placement}, S(moved, placement.segments))


@rule("cat")
def cat(op: Op) -> Iterator[Strategy]:
    """Another dim; or the pieces become segments of this one."""
    dim = op.dim()
    for placement in _of_any(op):
        if placement.dim != dim:
            yield Strategy(dict.fromkeys(op.inputs, placement), placement)
        elif placement.segments == 1 and all(op.model.divides(x, placement) for x in op.inputs):
            sizes = tuple(op.shape(x)[dim] for x in values_in(op["tensors"]))
            yield Strategy(dict.fromkeys(op.inputs, placement), S(dim, sizes))


@rule("stack")
def stack(op: Op) -> Iterator[Strategy]:
    """The new dim is whole; those from it on move down."""
    for placement in _of_any(op):
        moved = placement.dim + (placement.dim >= op.dim())
        yield Strategy(dict.fromkeys(op.inputs, placement), S(moved, placement.segments))


def _of_any(op: Op) -> Iterable[Placement]:
    return dict.fromkeys(placement for value in op.inputs for placement in op.shards(value))


def _but(op: Op, dims: Iterable[int]) -> Iterator[Strategy]:
    """Shards of all dims of the first input but these."""
    x, kept_whole = op.inputs[0], set(dims)
    for placement in op.shards(x):
        if placement.dim not in kept_whole:
            yield Strategy({x: placement}, placement)


@rule("pad", "constant_pad_nd")
def pad(op: Op) -> Iterator[Strategy]:
    """A dim that grows is whole; the list of amounts begins with the last dim's."""
    amounts = tuple(op["pad"])
    yield from _but(op, {len(op.made) - 1 - n // 2 for n, by in enumerate(amounts) if by != 0})


@rule("softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod", "glu")
def along(op: Op) -> Iterator[Strategy]:
    """What looks along one dim has that one whole."""
    yield from _but(op, {op.dim(of=op.inputs[0])})


@rule("roll", "flip")
def turn(op: Op) -> Iterator[Strategy]:
    """The dims that turn are whole; without any named, all."""
    rank = len(op.made)
    yield from _but(op, {dim % rank for dim in op["dims"]} or range(rank))


@rule("repeat")
def repeat(op: Op) -> Iterator[Strategy]:
    """Dims that are not repeated keep their shards."""
    (x,) = op.inputs
    offset = len(op.made) - len(op.shape(x))
    for placement in op.shards(x):
        if op["repeats"][placement.dim + offset] == 1:
            yield Strategy({x: placement}, S(placement.dim + offset, placement.segments))


@rule("repeat_interleave")
def repeat_interleave(op: Op) -> Iterator[Strategy]:
    """Each element is repeated beside itself: a rank's part of the result is that of its own."""
    if len(op.inputs) == 1 and op.arguments.get("dim") is not None:
        (x,) = op.inputs
        for placement in op.shards(x):
            if (
                placement.dim != op.dim()
                or placement.segments == 1
                and op.model.divides(x, placement)
            ):
                yield Strategy({x: placement}, placement)


@rule("mean", "sum")
def reduce(op: Op) -> Iterator[Strategy]:
    """Each rank sums what it has: a partial sum. Dims that stay keep their shards."""
    x = op.inputs[0]
    rank = len(op.shape(x))
    dims = {dim % rank for dim in op.arguments.get("dim") or range(rank)}
    for placement in op.shards(x):
        if placement.dim not in dims:
            before = sum(dim < placement.dim for dim in dims)
            moved = placement.dim if op.arguments.get("keepdim") else placement.dim - before
            yield Strategy({x: placement}, S(moved, placement.segments))
        elif op.carries and op.model.divides(x, placement):
            yield Strategy({x: placement}, P)
    if op.carries:
        yield Strategy({x: P}, P)


@rule("index")
def index(op: Op) -> Iterator[Strategy]:
    """One vector of positions picks from one dim; the others keep their shards."""
    positions = op["indices"]
    given = [dim for dim, at in enumerate(positions) if at is not None]
    if len(given) == 1 and len(op.shape(positions[given[0]])) == 1:
        yield from _but(op, given)


# Products


@rule("linear")
def linear(op: Op) -> Iterator[Strategy]:
    """x [..., k] with w [n, k] gives [..., n]: column, row, or shards of the rows."""
    yield from _product(op, op["input"], op["weight"], 1, 0, op["bias"])


@rule("addmm")
def addmm(op: Op) -> Iterator[Strategy]:
    """b + x w, with w [k, n]."""
    if op["beta"] == 1 and op["alpha"] == 1 and len(op.shape(op["self"])) == 1:
        yield from _product(op, op["mat1"], op["mat2"], 0, 1, op["self"])


@rule("mm", "bmm", "matmul")
def matmul(op: Op) -> Iterator[Strategy]:
    """[..., m, k] x [..., k, n] gives [..., m, n]; dims in front of both are of a batch."""
    x, w = operands(op)
    rank = len(op.shape(w))
    if min(len(op.shape(x)), rank) >= 2:
        yield from _product(op, x, w, rank - 2, rank - 1, None)


def operands(op: Op) -> tuple[Value, Value]:
    """Both tensors of a product."""
    x, w = values_in(op.node.args[:2])
    return x, w


def _product(op: Op, x: Any, w: Any, inner: int, outer: int, bias: Any) -> Iterator[Strategy]:
    """What a product can do whose weight has k at dim `inner` and n at dim `outer`.

    A bias is added once: sharded with the columns, or a part of it on each rank with partial sums.
    """
    if x == w:
        return
    last, offset = len(op.shape(x)) - 1, len(op.made) - len(op.shape(x))
    paired = len(op.shape(x)) == len(op.shape(w)) == len(op.made) > 2

    def with_bias(lie: Placement | None) -> dict[Value, Placement]:
        return {} if bias is None else {bias: op.free(bias) if lie is None else lie}

    for placement in op.shards(w):
        segments = placement.segments
        if placement.dim == outer:
            columns = S(len(op.made) - 1, segments)
            yield Strategy({w: placement} | with_bias(S(0, segments)), columns)
        elif placement.dim == inner:
            if op.carries:
                yield Strategy({x: S(last, segments), w: placement} | with_bias(P), P)
        elif paired:
            yield Strategy({x: placement, w: placement}, placement)
    for placement in op.shards(x):
        segments = placement.segments
        if placement.dim == last:
            if op.carries:
                yield Strategy({x: placement, w: S(inner, segments)} | with_bias(P), P)
        elif len(op.shape(w)) == 2 or placement.dim == last - 1:
            yield Strategy({x: placement}, S(placement.dim + offset, segments))
        elif paired and op.shape(w)[placement.dim] == op.shape(x)[placement.dim]:
            yield Strategy({x: placement, w: placement}, placement)
    if x in op.model.carrying:
        yield Strategy({x: P} | with_bias(P), P)


@rule("conv1d", "conv2d", "conv3d")
def convolution(op: Op) -> Iterator[Strategy]:
    """Weight [out, in / groups, ...]: channels as the columns and rows of a linear layer.

    Groups are convolutions beside each other: each rank has some of them.
    """
    x, w, bias = op["input"], op["weight"], op["bias"]
    if len(op.shape(x)) != len(op.shape(w)):
        return  # a single example, without a batch

    def with_bias(lie: Placement) -> dict[Value, Placement]:
        return {} if bias is None else {bias: lie}

    if op["groups"] != 1:
        if op["groups"] % op.model.ranks == 0:
            yield Strategy({x: S(1), w: S(0)} | with_bias(S(0)), S(1))
        return
    for placement in op.shards(w):
        if placement.dim == 0:
            segments = placement.segments
            yield Strategy({w: placement} | with_bias(S(0, segments)), S(1, segments))
        elif placement.dim == 1 and op.carries:
            yield Strategy({x: placement, w: placement} | with_bias(P), P)


# Layers


@rule("embedding")
def embedding(op: Op) -> Iterator[Strategy]:
    """Columns; rows of the vocabulary, others giving zeros; or shards of what is looked up."""
    w, ids = op["weight"], op["indices"]
    for placement in op.shards(w):
        if placement.dim == 1:
            yield Strategy({w: placement}, S(len(op.made) - 1, placement.segments))
        elif placement.segments == 1 and w in op.model.carrying and not op["scale_grad_by_freq"]:
            yield Strategy({w: placement}, P)
    for placement in op.shards(ids):
        yield Strategy({ids: placement}, placement)


@rule("layer_norm", "rms_norm")
def normalize(op: Op) -> Iterator[Strategy]:
    """The dims that are normalized are whole."""
    rank = len(op.made)
    yield from _but(op, range(rank - len(op["normalized_shape"]), rank))


@rule("scaled_dot_product_attention")
def attention(op: Op) -> Iterator[Strategy]:
    """Heads, or rows, of queries, keys and values together; the mask with them where it has any."""
    query, key, value, mask = op["query"], op["key"], op["value"], op["attn_mask"]
    rank = len(op.made)
    for placement in _of_any(op):
        lie = dict.fromkeys((query, key, value), placement)
        if placement.dim >= rank - 2 or not all(op.model.divides(x, placement) for x in lie):
            continue
        if mask is not None:
            dim = op.aligned(mask, placement.dim)
            lie[mask] = op.free(mask) if dim is None else S(dim, placement.segments)
        yield Strategy(lie, placement)


@rule("cross_entropy_loss")
def cross_entropy(op: Op) -> Iterator[Strategy]:
    """Shards of the classes: three small all-reduces stand for the gathering of all logits."""
    x, target = op["self"], op["target"]
    plain = op["weight"] is None and op["label_smoothing"] == 0 and op["reduction"] != 0
    if plain and len(op.shape(x)) == 2 and len(op.shape(target)) == 1:
        for placement in op.shards(x):
            if placement.dim == 1 and placement.segments == 1:
                yield Strategy({x: placement, target: I}, I)
