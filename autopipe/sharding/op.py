"""The view of a graph's node that tensor-parallel rules read, and the strategy they return.

A rule names the placements of some inputs; the others are `op.free`: replicated, with gradients
that may be partial sums. `strategies.strategies` leaves out strategies with impossible shards, so a
rule need not check divisibility.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from autopipe.ir.dataflow import Dataflow, gradient_values
from autopipe.ir.graph import Dim, Graph, Node, Ref, State, Value, arguments, at_batch, at_sequence
from autopipe.planfile.placements import BIG, I, Placement, R, divides, part

UNEVEN = 16
"""A dim that the ranks do not divide is sharded unevenly if it has at least this many elements for
each: the largest part is then at most 1/16 above its share. Vocabularies are such dims."""


class Strategy(NamedTuple):
    """Placements of an op's inputs, and the one placement of all its results."""

    inputs: Mapping[Value, Placement]
    output: Placement


Shards = Callable[[Value], Iterable[Placement]]
"""The sharded placements that each value can have."""


@dataclass(frozen=True)
class Model:
    """The facts that rules read about a graph to be sharded over `ranks` ranks.

    If the sequence is a symbol, rules see rows of `length` tokens. A dim that the ranks do not
    divide has at least `least` elements for each.
    """

    flow: Dataflow
    ranks: int
    length: int | None = None
    least: int = UNEVEN

    @property
    def graph(self) -> Graph:
        """The traced graph."""
        return self.flow.graph

    @cached_property
    def carrying(self) -> frozenset[Ref | State]:
        """The values that carry a gradient."""
        return gradient_values(self.graph)

    @cached_property
    def fixed(self) -> set[Value]:
        """Values that share memory with one written in place: they are I, and never converted."""
        return {value for value, root in self.flow.root.items() if root in self.flow.writers}

    @cached_property
    def _shapes(self) -> dict[Value, tuple[int, ...]]:
        return {}

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of a value with `placements.BIG` rows in a micro-batch."""
        found = self._shapes.get(value)
        if found is None:
            found = tuple(map(self.size, self.graph.spec(value).shape))
            self._shapes[value] = found
        return found

    def size(self, dim: Dim) -> int:
        """The size of a dim with `placements.BIG` rows in a micro-batch."""
        return at_batch(dim if self.length is None else at_sequence(dim, self.length), BIG)

    def is_tensor(self, value: Value) -> bool:
        """Whether a value is a tensor; a few ops have results that are not."""
        if not isinstance(value, Ref):
            return True
        return self.graph.nodes[self.graph.index[value.node]].outputs[value.output] is not None

    @cached_property
    def _tensors(self) -> dict[str, tuple[Value, ...]]:
        return {}

    def tensors(self, node: Node) -> tuple[Value, ...]:
        """The distinct tensors that a node reads, in the order of its arguments."""
        found = self._tensors.get(node.name)
        if found is None:
            values = dict.fromkeys(node.values())
            found = self._tensors[node.name] = tuple(filter(self.is_tensor, values))
        return found

    def normal(self, value: Value, placement: Placement) -> Placement:
        """The placement itself, but I in place of R for a value without a gradient."""
        return I if placement == R and value not in self.carrying else placement

    def can_shard(self, value: Value, placement: Placement) -> bool:
        """Whether there is such a dim, and each rank gets a part of it; parts must be equal unless
        the dim is very long. Of a tensor without elements no collective sends parts."""
        shape = self.shape(value)
        if placement.dim >= len(shape) or 0 in shape:
            return False
        size = shape[placement.dim]
        if divides(size, placement.segments, self.ranks):
            return True
        if placement.segments != 1 or size % BIG == 0 or size < self.least * self.ranks:
            return False
        return part(size, self.ranks, self.ranks - 1)[1] > 0

    def divides(self, value: Value, placement: Placement) -> bool:
        """Whether all ranks get equal parts."""
        return divides(self.shape(value)[placement.dim], placement.segments, self.ranks)


@dataclass(frozen=True)
class Op:
    """A node, as a rule reads it."""

    model: Model
    node: Node
    shards: Shards

    @property
    def name(self) -> str:
        """`linear` of `aten.linear.default`."""
        return self.node.short

    @cached_property
    def inputs(self) -> tuple[Value, ...]:
        """The distinct tensors that the op reads."""
        return self.model.tensors(self.node)

    @cached_property
    def outputs(self) -> tuple[Ref, ...]:
        """The tensors that the op makes."""
        made = enumerate(self.node.outputs)
        return tuple(Ref(self.node.name, n) for n, spec in made if spec is not None)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """All arguments by their names in the op's schema, defaults included."""
        return arguments(self.node)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def shape(self, value: Value) -> tuple[int, ...]:
        """The shape of an input."""
        return self.model.shape(value)

    @cached_property
    def made(self) -> tuple[int, ...]:
        """The shape of the first result."""
        return self.model.shape(self.outputs[0])

    @cached_property
    def carries(self) -> bool:
        """Whether the op carries a gradient."""
        return any(output in self.model.carrying for output in self.outputs)

    def free(self, value: Value) -> Placement:
        """Replicated, with a gradient (if any) that may be a partial sum."""
        return R if self.carries and value in self.model.carrying else I

    def dim(self, name: str = "dim", of: Value | None = None) -> int:
        """The dim in argument `name`, as a non-negative index."""
        rank = len(self.made if of is None else self.shape(of))
        return int(self[name]) % max(rank, 1)

    def aligned(self, value: Value, dim: int) -> int | None:
        """The dim of an input aligned with dim `dim` of the result; None if it is broadcast."""
        own = dim - (len(self.made) - len(self.shape(value)))
        return own if own >= 0 and self.shape(value)[own] == self.made[dim] else None


Rule = Callable[[Op], Iterator[Strategy]]


def of_any(op: Op) -> Iterable[Placement]:
    """All sharded placements that any input can have."""
    return dict.fromkeys(placement for value in op.inputs for placement in op.shards(value))


def but(op: Op, dims: Iterable[int]) -> Iterator[Strategy]:
    """Shards of the first input in any dim but `dims`."""
    x, kept_whole = op.inputs[0], set(dims)
    for placement in op.shards(x):
        if placement.dim not in kept_whole:
            yield Strategy({x: placement}, placement)
