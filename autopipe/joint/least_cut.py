"""Choose what a block keeps for backward at the least cost, by a minimum cut of its graph.

    source ──> made by a product ──bytes──> its value ──> norm ──bytes──> its value ──> sink
                                                                          (if backward reads it)

For each tensor that backward reads, either it is kept or tensors from which it is made again, at
the least bytes in all (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, state
the problem; the cut is that of torch.compile's partitioner). Calls behind the cut run again. Calls
may have a price in bytes: another edge from the source, cut if any call of its group runs again.

    source ──price──> group of calls ──> each of them

The cut is then the least of bytes kept and prices paid. Of equal cuts the latest one runs least
again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, gcd
from typing import Any, Final

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from autopipe.ir.torch_private import writes
from autopipe.joint.joint_graph import JointGraph, called, is_of_state, storages, written
from autopipe.stages.op_tape import MADE

FREE: Final = -1
"""The price of a call that may run again at no cost."""

Price = int | None
"""`FREE`; the number of the group that a call is priced with; None: it may not run again."""


Chains = Mapping[fx.Node, tuple[fx.Node, ...]]
"""Of each call of a chain all of them, in their order."""


@dataclass(frozen=True)
class Cut:
    """A choice of what a block keeps for backward.

    Attributes:
        keeps: the values to keep, including values from outside of the block.
        again: the block's calls that run again.
        paid: the groups of calls that run again at a price.
        sizes: bytes of each value to keep, except those that are kept in any case.
    """

    keeps: frozenset[fx.Node]
    again: frozenset[fx.Node]
    paid: frozenset[int]
    sizes: Mapping[fx.Node, int]

    @property
    def bytes(self) -> int:
        """Bytes of all values to keep, except those that are kept in any case."""
        return sum(self.sizes.values())


_Edge = tuple[int, int]


class Network:
    """The network of one block: an edge with a capacity for each tensor that can be kept.

    A view has no bytes of its own: it follows from what it is a view of.

    Args:
        blocked: storages that are written in place, and so hold other values later.
        chains: chains of calls that make noise (`chains`).
        kept: storages that are kept in any case.
        calls: the block's calls, in order.
        wanted: the values that backward reads.
        price: gives the group of a call that is no view and writes nothing in place.
    """

    SOURCE, SINK = 0, 1
    ENDLESS = 2**30
    """A capacity that no sum reaches: this edge is never cut."""

    def __init__(
        self,
        graph: JointGraph,
        blocked: frozenset[int],
        chains: Chains,
        kept: Collection[int],
        calls: Sequence[fx.Node],
        wanted: Collection[fx.Node],
        price: Callable[[fx.Node], Price],
    ) -> None:
        self._graph = graph
        self._blocked = blocked
        self._chains = chains
        self._kept = kept
        self._calls = frozenset(calls)
        self._price = price
        self._numbers: dict[fx.Node | int, int] = {}
        self._edges: dict[_Edge, int | None] = {}
        for node in calls:
            self._add(node)
            if node in wanted:
                self._edges[self._end(node), self.SINK] = None

    @property
    def groups(self) -> frozenset[int]:
        """The groups of the block's calls that have a price."""
        return frozenset(key for key in self._numbers if isinstance(key, int))

    def least(self, prices: Mapping[int, float]) -> Cut:
        """The cut that keeps the fewest bytes, calls that run again at a price counted as bytes.

        Args:
            prices: of each group the bytes that running it again counts for; one that is not among
                them does not run again.
        """
        edges: dict[_Edge, float | None] = {**self._edges}
        for group in self.groups:
            edges[self.SOURCE, self._numbers[group]] = prices.get(group)
        sizes = [size for size in edges.values() if size]
        exact = all(isinstance(size, int) for size in sizes)
        finest = ceil(2 * sum(sizes) / self.ENDLESS)
        unit = max(gcd(*sizes) if exact else 1, finest, 1)  # type: ignore[arg-type]
        behind = self._behind_cut(
            {edge: self.ENDLESS if s is None else ceil(s / unit) for edge, s in edges.items()}
        )
        again = {n for n, k in self._numbers.items() if k in behind and not isinstance(n, int)}
        again = {n for n in again if self._price_of(n) is not None}
        ends = {n for n, k in self._numbers.items() if k + 1 in behind and not isinstance(n, int)}
        through = ((n, (k, k + 1)) for n, k in self._numbers.items() if not isinstance(n, int))
        cut = {n: edge for n, edge in through if edge[0] not in behind and edge[1] in behind}
        return Cut(
            frozenset(ends - again),
            frozenset(again & self._calls),
            frozenset(g for g in self.groups if self._numbers[g] in behind),
            {n: self._edges.get(edge) or 0 for n, edge in cut.items()},
        )

    def _behind_cut(self, capacities: Mapping[_Edge, int]) -> frozenset[int]:
        """The numbers of nodes behind the latest minimum cut: those that still reach the sink."""
        count = 2 + 2 * len(self._numbers)
        # All of 32 bits: scipy before 1.15 finds no flow where numbers of nodes are longer.
        flows = np.array([*capacities.values()], np.int32)
        begins, ends = np.array([*capacities], np.int32).T
        network = csr_array((flows, (begins, ends)), shape=(count, count))
        residual = network - maximum_flow(network, self.SOURCE, self.SINK).flow
        residual.eliminate_zeros()
        order = breadth_first_order(csr_array(residual.T), self.SINK, return_predecessors=False)
        return frozenset(order.tolist())

    def _begin(self, node: fx.Node | int) -> int:
        return self._numbers.setdefault(node, 2 + 2 * len(self._numbers))

    def _end(self, node: fx.Node) -> int:
        return self._begin(node) + 1

    def _add(self, node: fx.Node) -> None:
        price = self._price_of(node)
        if price is None:
            self._add_input(node)
            return
        if price != FREE:
            self._edges[self._begin(price), self._begin(node)] = None
        chain = self._chains.get(node, (node,))
        new = storages([node]) - storages(maker(chain[0]).all_input_nodes)
        parts = any(user.target is operator.getitem for user in node.users)
        self._edges[self._begin(node), self._end(node)] = (
            None if parts or not new or node is not chain[-1] else self._bytes(node, new)
        )
        for argument in node.all_input_nodes:
            if argument not in self._calls:
                self._add_input(argument)
            self._edges[self._end(argument), self._begin(node)] = None

    def _add_input(self, node: fx.Node) -> None:
        """A value that does not run again: it is kept if it is read, but for a state's."""
        if node in self._graph.arguments or is_of_state(self._graph, node):
            return
        self._edges[self.SOURCE, self._begin(node)] = None
        self._edges[self._begin(node), self._end(node)] = self._bytes(node, storages([node]))

    def _bytes(self, node: fx.Node, counted: Collection[int]) -> int:
        sizes = node.meta[MADE].storages
        return sum(sizes[storage] for storage in counted if storage not in self._kept)

    def _price_of(self, node: fx.Node) -> Price:
        """The price of running a value's call again; None: it does not run again."""
        call = maker(node)
        op: Any = call.target
        if node not in self._calls:
            return None
        chain = self._chains.get(call, (call,))
        if call not in self._chains and writes(op):
            return None
        outputs = storages([call])
        inputs = storages(argument for each in chain for argument in each.all_input_nodes)
        if not self._blocked.isdisjoint(outputs | inputs):
            return None
        is_view = bool(outputs) and outputs <= inputs and len(chain) == 1
        if getattr(op, "namespace", None) == "aten" and is_view:
            return FREE
        return self._price(call)


def maker(node: fx.Node) -> fx.Node:
    """The call that a value is a result of."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def chains(calls: Iterable[fx.Node]) -> Chains:
    """The chains that make noise: a tensor that draws fill in place before anything reads it.

        empty_like ── bernoulli_ ── div_ ──┬── mul        dropout on a CPU; one op on a GPU
                                           └── backward

    A tensor that is written in place has other values later, so its readers cannot run again. Noise
    is written by the calls of its own chain only: these run again together, and then its readers
    can, as with the single op that the chain is on a GPU.

    Args:
        calls: all calls of a joint graph, in order.
    """
    known: dict[fx.Node, tuple[fx.Node, ...]] = {}
    besides: set[int] = set()
    for call in calls:
        before = _filled(call)
        if before is not None and len(before.users) == 1 and (before in known or _is_new(before)):
            chain = (*known.get(before, (before,)), call)
            known |= dict.fromkeys(chain, chain)
        else:
            besides |= written(call)
    return {
        call: chain
        for call, chain in known.items()
        if any(map(_draws, chain)) and besides.isdisjoint(storages([call]))
    }


def _draws(call: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(called(call)[0], "tags", ())


def _filled(call: fx.Node) -> fx.Node | None:
    """The argument that a call writes in place and returns; None if it does anything else."""
    op, args = called(call)
    read: Any = args[0] if args else None
    if writes(op) != (0,) or not isinstance(read, fx.Node):
        return None
    return read if storages([call]) == storages([read]) else None


def _is_new(node: fx.Node) -> bool:
    """Whether a call has made a value in memory of its own."""
    return node.op == "call_function" and storages([node]).isdisjoint(
        storages(node.all_input_nodes)
    )
