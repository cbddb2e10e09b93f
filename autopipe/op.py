"""A node of a model as the rules of tensor parallelism see it, and what they say of it.

A rule writes down the inputs that it has something to say of; the others are `op.free`: replicated,
and their gradients may be partial sums. Strategies whose shards are impossible are left out by
`strategies.strategies`, so a rule need not ask what divides what.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autopipe.cost import gradient_values
from autopipe.dataflow import Dataflow
from autopipe.graph import Dim, Graph, Node, Ref, State, Value, at_batch, at_sequence, resolve
from autopipe.placements import BIG, I, Placement, R, divides

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


def of_any(op: Op) -> Iterable[Placement]:
    """The shards in which any of the inputs may come."""
    return dict.fromkeys(placement for value in op.inputs for placement in op.shards(value))


def but(op: Op, dims: Iterable[int]) -> Iterator[Strategy]:
    """Shards of all dims of the first input but these."""
    x, kept_whole = op.inputs[0], set(dims)
    for placement in op.shards(x):
        if placement.dim not in kept_whole:
            yield Strategy({x: placement}, placement)
