"""Find states that forward moves from call to call, and the loss is computed with.

    loss = (out - self.centre).square().mean()          reads what the call before has left
    self.centre = 0.9 * self.centre + 0.1 * out.mean(0)

Such a state moves once in each micro-batch of each replica, and not once in each step, as in one
process that accumulates gradients. That changes no gradient of a micro-batch, and may be what is
meant (a count of calls) or not (the centre of DINO, a teacher that follows), so it is said.

The running statistics of a batch norm are no such state: training does not compute with them. Nor
is what forward writes as a whole before it reads it (a cache), or a trained parameter (a clamp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autopipe.errors import CaptureError
from autopipe.ir.dataflow import (
    Dataflow,
    analyse,
    gradient_values,
    only_writes,
    written_statistics,
)
from autopipe.ir.graph import REGION_OP, Graph, Node, Ref, State, Value, resolve, values_in
from autopipe.ir.torch_private import views
from autopipe.rewriting.second_writes import KEEPING_NOTHING

_OVERWRITES = frozenset(("copy_", "fill_", "zero_"))


def remark(graph: Graph) -> str | None:
    """A line for the user that names the first such state; None: there is none.

    Parts that run as they are are not looked into.
    """
    flow = analyse(graph)
    ends = [flow.position(value) for value in values_in(graph.outputs) if isinstance(value, Ref)]
    needed, readers = _computed_with(flow, ends), _readers(flow)
    for state, (first, *_) in flow.writers.items():
        if not isinstance(state, State) or graph.states[state.name].trainable:
            continue
        if graph.nodes[first].op == REGION_OP:
            continue
        if _carried_over(flow, state, first, readers[state] & needed):
            return (
                f"{_place(flow, sorted(readers[state]))}forward moves {state.name!r}, and the loss "
                "is computed with it: it moves in each micro-batch of each replica, as where one "
                "process accumulates gradients; --micro-batches 1 --dp 1 moves it once in a step"
            )
    return None


def check(graph: Graph) -> None:
    """Refuse a node whose backward reads running statistics that a later batch norm writes.

    Raises:
        CaptureError: names the statistics, the user's line, and that of the batch norm.
    """
    flow = analyse(graph)
    writers = {
        flow.root[value]: node for node in graph.nodes for value in written_statistics(node)
    }  # the last one of each
    for position, node in enumerate(graph.nodes) if writers else ():
        own = {flow.root[value] for value in written_statistics(node)}
        for root in {flow.root[value] for value in node.values()} & writers.keys() - own:
            last = writers[root]
            if position < graph.index[last.name] and _keeps(graph, node):
                raise CaptureError(
                    f"{node.place}: {node.short}() computes with {root}, which the batch norm at "
                    f"{last.place} writes afterwards, unseen by autograd: its gradient would be "
                    "computed from what later micro-batches have written",
                    hint="compute with a copy: self.norm.running_var.clone(); or --micro-batches 1",
                )


def _keeps(graph: Graph, node: Node) -> bool:
    """Whether autograd may keep what a node reads."""
    carries = any(Ref(node.name, n) in gradient_values(graph) for n in range(len(node.outputs)))
    return carries and node.short not in KEEPING_NOTHING and not views(resolve(node.op))


def _place(flow: Dataflow, readers: Sequence[int]) -> str:
    """The user's line that reads or writes a state first, of the positions that do.

    An assigned state is copied and written by nodes without one: then a line that reads the copy.
    """
    nodes = flow.graph.nodes
    copies = [Ref(nodes[position].name) for position in readers]
    positions = [*readers, *(p for copy in copies for p in flow.users.get(copy, ()))]
    places = (nodes[position].place for position in positions if position < len(nodes))
    return next((f"{place}: " for place in places if place), "")


def _readers(flow: Dataflow) -> Mapping[Value, set[int]]:
    """For each root the positions of the nodes that read or write it, or a view of it."""
    found: dict[Value, set[int]] = defaultdict(set)
    for value, positions in flow.users.items():
        found[flow.root[value]].update(p for p in positions if p < len(flow.graph.nodes))
    return found


def _computed_with(flow: Dataflow, ends: Iterable[int]) -> set[int]:
    """The positions of the nodes from whose values those at `ends` are computed.

    What only comes before them is not among it: an earlier write of a batch norm's statistics.
    """
    found, waiting = set[int](), [*ends]
    while waiting:
        position = waiting.pop()
        if position in found or position < 0:
            continue
        found.add(position)
        node = flow.graph.nodes[position]
        for value in set(node.values()) - set(written_statistics(node)):
            writers = flow.writers.get(flow.root[value], ())
            waiting += [flow.position(value), *(p for p in writers if p < position)]
    return found


def _carried_over(flow: Dataflow, state: State, first: int, readers: Iterable[int]) -> bool:
    """Whether nodes that read a state compute with what the call before left in it.

    Args:
        first: the position of the first node that writes the state.
        readers: the positions of those from which the loss is computed.
    """
    overwritten = flow.graph.nodes[first].short in _OVERWRITES
    overwritten &= flow.graph.nodes[first].args[0] == state  # and not a part of it
    return any(
        position <= first or not overwritten
        for position in readers
        if not only_writes(flow, position, state)
    )
