"""Joint graphs of numbers of rows that were not run, from those of two that were.

    rows     1      2 .. 256                              512
             run    copies of the first, with other sizes  run

A model's joint graph has the same calls at nearly all numbers of rows (one row alone may be a
special case), and the bytes of each value are a straight line in the rows. What is kept is another
matter: the least cut through the graph goes elsewhere when sizes change. So the cut is made anew
at each number of rows, but the model need not run for it, which takes ten times as long.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import fx
from torch.fx.node import map_arg

from autopipe.joint.joint_graph import JointGraph
from autopipe.planners.saved.watched_run import POSITION, TensorLook
from autopipe.stages.op_tape import MADE, SEGMENT


class JointRun(NamedTuple):
    """A run of a short graph and its backward on tensors without memory.

    Attributes:
        graph: the joint graph; to divide it changes it.
        looks: the tensors that each node of the run made, by the node's position.
        low: the parameters of which there are copies in low precision.
    """

    graph: JointGraph
    looks: Mapping[int, tuple[TensorLook | None, ...]]
    low: tuple[str, ...]


@dataclass
class _Kind:
    """Runs whose joint graphs have the same calls.

    Attributes:
        run: one of them, with a graph that is never divided.
        sizes: by the rows of a run, the bytes of all storages of all nodes in order.
    """

    run: JointRun
    sizes: dict[int, NDArray[np.int64]]


@dataclass
class JointGraphs:
    """The joint graphs of one short graph, as far as they are known.

    Args:
        check: whether a third run must lie on the line through two before it is believed.
    """

    check: bool
    _kinds: dict[Hashable, _Kind] = field(default_factory=dict)

    def add(self, rows: int, run: JointRun) -> None:
        """Learn what a run has shown; its graph is copied if it is the first of its kind."""
        calls, sizes = _calls(run.graph)
        if calls not in self._kinds:
            self._kinds[calls] = _Kind(run._replace(graph=_copied(run.graph, sizes)), {})
        self._kinds[calls].sizes[rows] = sizes

    def at(self, rows: int) -> JointRun | None:
        """The run of a number of rows between two known ones; None: the model must run."""
        for kind in self._kinds.values():
            sizes = _between(kind.sizes, rows, self.check)
            if sizes is not None:
                return kind.run._replace(graph=_copied(kind.run.graph, sizes))
        return None


def _between(
    known: Mapping[int, NDArray[np.int64]], rows: int, check: bool
) -> NDArray[np.int64] | None:
    """Bytes at a number of rows, on the line through known ones; None: there is no such line.

    Args:
        known: the bytes of all storages, by the rows of a run.
        check: whether a third run must lie on the line through two.
    """
    low, high = min(known), max(known)
    if not low < rows < high or len(known) < 2 + check:
        return None
    rise = known[high] - known[low]
    for at, sizes in known.items():
        if ((sizes - known[low]) * (high - low) != rise * (at - low)).any():
            return None
    more, rest = np.divmod(rise * (rows - low), high - low)
    return None if rest.any() else known[low] + more


def _calls(graph: JointGraph) -> tuple[Hashable, NDArray[np.int64]]:
    """The reads and writes of a joint graph's calls with their purposes; bytes of storages."""
    nodes = _tape(graph).nodes
    place = {node: number for number, node in enumerate(nodes)}
    seen: dict[int, int] = {}
    calls, sizes = [], list[int]()
    for node in nodes:
        storages = node.meta[MADE].storages
        memory = tuple(seen.setdefault(key, len(seen)) for key in storages)
        reads = tuple(place[read] for read in node.all_input_nodes)
        of = node.meta.get(POSITION), node.meta.get(SEGMENT)
        target = node.target if node.op == "call_function" else ""
        calls.append((node.op, target, reads, memory, of))
        sizes += storages.values()
    gradients = (*graph.of_arguments, *graph.of_parameters.values())
    parts = [
        tuple(None if node is None else place[node] for node in part)
        for part in (graph.forward, graph.backward, gradients)
    ]
    return (*calls, *parts), np.array(sizes, np.int64)


def _copied(graph: JointGraph, sizes: NDArray[np.int64]) -> JointGraph:
    """A joint graph with nodes of its own, and with these bytes of all storages."""
    to: dict[fx.Node, fx.Node] = {}
    fx.Graph().graph_copy(_tape(graph), to)
    remaining = iter(sizes.tolist())
    for node in to.values():
        made = node.meta[MADE]
        node.meta[MADE] = made.sized([*islice(remaining, len(made.storages))])

    def copied(nodes: Any) -> Any:
        return map_arg(nodes, to.__getitem__)

    return JointGraph(
        states={to[node]: name for node, name in graph.states.items()},
        copies={to[node]: copy for node, copy in graph.copies.items()},
        arguments=copied(graph.arguments),
        seeds=copied(graph.seeds),
        unseeded=graph.unseeded,
        forward=copied(graph.forward),
        backward=copied(graph.backward),
        results=copied(graph.results),
        of_arguments=copied(graph.of_arguments),
        of_parameters=copied(graph.of_parameters),
    )


def _tape(graph: JointGraph) -> fx.Graph:
    """The graph that all nodes of a joint graph stand in."""
    node = next(iter((*graph.states, *graph.arguments, *graph.forward)))
    return node.graph
