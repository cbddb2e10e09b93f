"""Choose what a stage keeps for its backward: which cheap ops run again, so that less is kept.

    x ──norm──> n ──mm──> ...        backward reads n (for the weight of mm) and x (for norm)
                                     kept: x;  runs again: norm

What only moves memory (pointwise ops, norms, softmax, copies) may run again; products of matrices,
attention, random draws, collectives and what is written in place may not. Which tensors to keep is
a minimum cut: of each tensor that backward reads, it or what it is made from is kept, at the least
bytes in all (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, state the problem;
the cut is that of torch.compile's partitioner). Of equal cuts the latest one runs least again.

A block's ops run again from tensors that stand in that block, so that no chain of residual sums
leads back through the whole stage, and what runs again is alive for one block at a time.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from math import gcd
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow
from torch import fx

from autopipe.ir.torch_private import writes
from autopipe.joint.joint_graph import JointGraph, is_of_state, storages, written
from autopipe.stages.op_tape import AGAIN, MADE, SEGMENT

CHEAP = frozenset(
    "native_layer_norm native_group_norm _fused_rms_norm _softmax _log_softmax _safe_softmax "
    "_to_copy cat stack tril triu constant_pad_nd mean sum amax amin var var_mean "
    "full full_like zeros zeros_like ones ones_like arange scalar_tensor gather".split()
)
"""Ops of aten, beside those that torch tags as pointwise, whose time is that of moving memory."""


def chosen(graph: JointGraph, needed: Iterable[fx.Node]) -> list[fx.Node]:
    """The calls of forward that are to run again in backward, in their order.

    Args:
        needed: the values of forward that backward reads.
    """
    wanted = set(needed)
    segments: dict[str | None, list[fx.Node]] = {}
    for node in reversed(graph.forward):  # what a later block keeps costs an earlier one nothing
        segments.setdefault(node.meta[SEGMENT], []).append(node)
    blocked = frozenset(s for call in (*graph.forward, *graph.backward) for s in written(call))
    kept = storages([*graph.states, *graph.arguments])
    again: set[fx.Node] = set()
    for calls in segments.values():
        if wanted.isdisjoint(calls):
            continue
        cut = _Cut(graph, blocked, kept, calls[::-1], wanted)
        keeps, repeats = cut.solve()
        kept |= storages(keeps)
        again |= repeats
    return [node for node in graph.forward if node in again]


def run_again(
    calls: Sequence[fx.Node], outputs: Iterable[fx.Node | None], again: Sequence[fx.Node]
) -> list[fx.Node]:
    """Calls of a backward, with copies of calls of `again` before the first one that reads them.

    Args:
        outputs: what the backward returns; these are no copies.
        again: in the order of forward.
    """
    fixed = frozenset(outputs)
    position = {node: number for number, node in enumerate(again) if node not in fixed}
    copies: dict[fx.Node, fx.Node] = {}
    renamed: dict[int, int] = {}
    made: list[fx.Node] = []
    for call in calls:
        for node in sorted(_leading_to(call, position, copies), key=position.__getitem__):
            with node.graph.inserting_before(call):
                twin = node.graph.node_copy(node, lambda read: copies.get(read, read))
            twin.meta |= {MADE: node.meta[MADE].again(renamed), SEGMENT: call.meta[SEGMENT]}
            twin.meta[AGAIN] = True
            copies[node] = twin
            made.append(twin)
        for read in call.all_input_nodes:
            if read in copies:
                call.replace_input_with(read, copies[read])
        made.append(call)
    return made


def _leading_to(
    call: fx.Node, again: Collection[fx.Node], besides: Collection[fx.Node]
) -> set[fx.Node]:
    """The nodes of `again` that a call needs, directly or through others of them."""
    found: set[fx.Node] = set()
    pending = list(call.all_input_nodes)
    while pending:
        node = pending.pop()
        if node in again and node not in found and node not in besides:
            found.add(node)
            pending += node.all_input_nodes
    return found


def most_alive(calls: Sequence[fx.Node], besides: Collection[int] = ()) -> int:
    """The most bytes of what has run again that are alive at once while calls run in this order.

    Args:
        besides: storages that are counted elsewhere.
    """
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for number, call in enumerate(calls):
        if AGAIN in call.meta:
            made = {s: n for s, n in call.meta[MADE].storages.items() if s not in besides}
            sizes |= made
            for storage in made:
                born.setdefault(storage, number)
            last |= dict.fromkeys(made, number)
        last |= {s: number for s in storages(call.all_input_nodes) if s in sizes}
    change = np.zeros(len(calls) + 1, dtype=np.int64)
    for storage, size in sizes.items():
        change[born[storage]] += size
        change[last[storage] + 1] -= size
    return int(change.cumsum().max(initial=0))


class _Cut:
    """The network of one block: an edge with a capacity for each tensor that can be kept.

        source ──> made by a product ──bytes──> its value ──> norm ──bytes──> its value ──> sink
                                                                              (if needed)

    A view has no bytes of its own: it follows from what it is a view of.

    Args:
        blocked: storages that are written in place: what they hold is another thing later.
        kept: storages that are kept whatever is chosen here.
        calls: the block's, in their order.
        wanted: the values that backward reads.
    """

    SOURCE, SINK = 0, 1
    FREE = 2**30
    """A capacity that no sum of bytes reaches: this edge is never cut."""

    def __init__(
        self,
        graph: JointGraph,
        blocked: Collection[int],
        kept: Collection[int],
        calls: Sequence[fx.Node],
        wanted: Collection[fx.Node],
    ) -> None:
        self.graph = graph
        self.blocked = blocked
        self.kept = kept
        self.calls = frozenset(calls)
        self.numbers: dict[fx.Node, int] = {}
        self.edges: dict[tuple[int, int], int | None] = {}
        for node in calls:
            self._add(node)
            if node in wanted:
                self.edges[self._end(node), self.SINK] = None

    def _begin(self, node: fx.Node) -> int:
        return self.numbers.setdefault(node, 2 + 2 * len(self.numbers))

    def _end(self, node: fx.Node) -> int:
        return self._begin(node) + 1

    def _add(self, node: fx.Node) -> None:
        if not self._repeats(node):
            self._given(node)
            return
        source = _maker(node)
        own = storages([node]) - storages(source.all_input_nodes)
        parts = any(user.target is operator.getitem for user in node.users)
        self.edges[self._begin(node), self._end(node)] = (
            None if parts or not own else self._bytes(node, own)
        )
        for read in node.all_input_nodes:
            if read not in self.calls:
                self._given(read)
            self.edges[self._end(read), self._begin(node)] = None

    def _given(self, node: fx.Node) -> None:
        """A value that does not run again: it is kept if it is read, but for a state's."""
        if node in self.graph.arguments or is_of_state(self.graph, node):
            return
        self.edges[self.SOURCE, self._begin(node)] = None
        self.edges[self._begin(node), self._end(node)] = self._bytes(node, storages([node]))

    def _bytes(self, node: fx.Node, counted: Collection[int]) -> int:
        sizes = node.meta[MADE].storages
        return sum(sizes[storage] for storage in counted if storage not in self.kept)

    def _repeats(self, node: fx.Node) -> bool:
        """Whether a call of the block may run again."""
        call = _maker(node)
        op: Any = call.target
        if getattr(op, "namespace", None) != "aten" or writes(op):
            return False
        given = storages(call.all_input_nodes)
        if not given.isdisjoint(self.blocked) or not storages([call]).isdisjoint(self.blocked):
            return False
        if op.overloadpacket.__name__ in CHEAP or torch.Tag.pointwise in op.tags:
            return True
        return bool(storages([call])) and storages([call]) <= given  # a view

    def solve(self) -> tuple[set[fx.Node], set[fx.Node]]:
        """The values to keep and the calls to run again, at the least bytes."""
        sizes = [size for size in self.edges.values() if size]
        unit = max(gcd(*sizes) or 1, -(-2 * sum(sizes) // self.FREE))
        capacity = [self.FREE if s is None else -(-s // unit) for s in self.edges.values()]
        count = 2 + 2 * len(self.numbers)
        network = csr_array(
            (np.array(capacity, dtype=np.int32), tuple(zip(*self.edges, strict=True))),
            shape=(count, count),
        )
        left = network - maximum_flow(network, self.SOURCE, self.SINK).flow
        left.eliminate_zeros()
        # From what still reaches the sink nothing is cut: it lies behind the latest least cut.
        order = breadth_first_order(csr_array(left.T), self.SINK, return_predecessors=False)
        behind = frozenset(order.tolist())
        again = {n for n, number in self.numbers.items() if number in behind and self._repeats(n)}
        ends = {n for n, number in self.numbers.items() if number + 1 in behind}
        return ends - again, again & self.calls


def _maker(node: fx.Node) -> fx.Node:
    """The call that a value is a result of."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node
