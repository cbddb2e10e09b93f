"""Shorten a graph to three of many equal blocks, and extend what is measured on it to the whole.

    whole    embed | block 0 | block 1 | block 2 | block 3 | ... | block 124 | block 125 | head
    short    embed | block 0 | block 1 | block 2 |                           | block 125 | head
                               `------- alike ---- ... ---------------------------------'

A *run* is a chain of consecutive blocks with isomorphic graphs: counted from a block's first node,
each block reads the same positions of itself and of the block before it, and all of them read the
same values from further away. The inputs of the first block may come from anywhere. The first two
blocks of a run and the last are kept; the last then reads from the second what it has read from the
block before it.

If layers of several classes alternate, groups of them are equal:

    whole    embed | near 0  far 1 | near 2  far 3 | ... | near 38  far 39 | near 40  far 41 | head
    short    embed | near 0  far 1 | near 2  far 3 |                       | near 40  far 41 | head

What is measured on the kept groups holds for all if the second group's values have the shapes and
layouts of the first's (`Short.uniform`): then the third group has the inputs of the second, and so
on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe.ir import check
from autopipe.ir.blocks import Block
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Graph, Ref, Value
from autopipe.ir.stage_classes import KEPT, Forms, Group, Row, alike
from autopipe.util import shortcuts


@dataclass(frozen=True)
class Run:
    """A chain of `count` equal groups of `length` nodes each, from position `first` on.

    `kept` of them stay: the first `kept - 1` and the last. `paths`: each group's blocks' paths.
    """

    first: int
    length: int
    count: int
    paths: tuple[tuple[str, ...], ...]
    kept: int = KEPT

    def group(self, position: int) -> int | None:
        """The index of the group that contains the node at `position`."""
        number, _ = divmod(position - self.first, self.length)
        return number if 0 <= number < self.count else None


class Storage(NamedTuple):
    """A storage, by node positions: the node that makes it, and those that save it for backward."""

    made: int
    savers: tuple[int, ...]


class Uneven(Exception):
    """What was measured on a short graph cannot be extended to the whole graph."""


@dataclass(frozen=True)
class Short:
    """A short graph, and how it maps to the whole graph.

    Attributes:
        graph: some of the whole graph's nodes, under the same names.
        kept: positions of these nodes in the whole graph.
        like: for each node of the whole graph, the position of its equal in the short graph.
        runs: the runs from which groups were left out.
        states: for each state of the whole graph, the name of its equal in the short graph.
    """

    graph: Graph
    kept: tuple[int, ...]
    like: NDArray[np.int64]
    runs: tuple[Run, ...]
    states: Mapping[str, str]

    def uniform(self, looks: Mapping[int, Hashable]) -> bool:
        """Whether, in every run, the second group's values look like the first's.

        Args:
            looks: the shapes and layouts of each node's results, by position in the whole graph.
        """
        return all(
            looks.get(run.first + offset) == looks.get(run.first + run.length + offset)
            for run in self.runs
            for offset in range(run.length)
        )

    def along(self, seen: Storage) -> list[Storage]:
        """The storages of the whole graph that correspond to a storage of the short graph.

        All positions are those of the whole graph.

        Raises:
            Uneven: the storage spans more than two groups of a run, but not all.
        """
        found = [seen]
        for run in self.runs:
            found = [extended for storage in found for extended in storage_along(storage, run)]
        return found


def storage_along(storage: Storage, run: Run) -> list[Storage]:
    """A storage that was seen at the kept groups of a run, at all of its groups.

    seen in group   0     copied                    0, 1, last   in the groups between as in 1
                    1     so in 1, 2 ... n - 2      0, 1         from each to the next, but the last
                    last  copied                    1, last      from the last but one to the last
    """
    touched = {
        number for p in (storage.made, *storage.savers) if (number := run.group(p)) is not None
    }
    last = run.count - 1
    between = range(2, last)

    def shift(groups: Mapping[int, int]) -> Storage:
        """The storage with its positions in some groups moved to others."""

        def change(position: int) -> int:
            number = run.group(position)
            if number is None:
                return position
            return position + (groups.get(number, number) - number) * run.length

        return Storage(change(storage.made), tuple(map(change, storage.savers)))

    if not touched or touched in ({0}, {last}):
        return [storage]
    alone = all(run.group(p) is not None for p in storage.savers)
    if touched == {1} and alone:
        return [storage, *(shift({1: number}) for number in between)]
    if touched == {0, 1} and alone:
        return [storage, *(shift({0: number - 1, 1: number}) for number in between)]
    if touched == {1, last}:
        return [shift({1: last - 1})]
    if touched == {0, 1, last}:
        offsets = [
            {p - run.first - number * run.length for p in storage.savers if run.group(p) == number}
            for number in (0, 1)
        ]
        if offsets[0] == offsets[1]:
            added = [
                run.first + number * run.length + offset
                for number in between
                for offset in offsets[1]
            ]
            return [Storage(storage.made, tuple(sorted({*storage.savers, *added})))]
    raise Uneven


def shorten(flow: Dataflow, blocks: Sequence[Block], *, from_first: bool = True) -> Short:
    """Leave out the blocks that kept ones represent; without any, return the whole graph.

    Args:
        from_first: as for `stage_classes.alike`.
    """
    found = (run_of(flow, row) for row in alike(Forms(flow, blocks), blocks, from_first=from_first))
    return leave_out(flow.graph, [run for run in found if run is not None])


def shortened(flow: Dataflow, blocks: Sequence[Block]) -> Iterator[Short]:
    """Yield the shortest graph, then longer ones, to try if the one before was `Uneven`."""
    if shortcuts.on("repeated costs"):
        yield shorten(flow, blocks)
        yield shorten(flow, blocks, from_first=False)
    yield shorten(flow, ())


def leave_out(graph: Graph, runs: Sequence[Run]) -> Short:
    """Leave out the groups of runs that are not kept; without any, return the whole graph.

    The last group of a run then reads from the last kept group before it.
    """
    like = np.arange(len(graph.nodes))
    instead: dict[Value, Value] = {}
    states = {name: name for name in graph.states}
    gone = np.zeros(len(graph.nodes), bool)
    for run in runs:
        standing = run.first + (run.kept - 2) * run.length
        stop = run.first + (run.count - 1) * run.length
        for number in range(run.kept - 1, run.count - 1):
            begin = run.first + number * run.length
            like[begin : begin + run.length] = np.arange(standing, standing + run.length)
        gone[standing + run.length : stop] = True
        for offset in range(run.length):
            last, kept_node = (
                graph.nodes[stop - run.length + offset],
                graph.nodes[standing + offset],
            )
            for output in range(len(last.outputs)):
                instead[Ref(last.name, output)] = Ref(kept_node.name, output)
        for place, path in enumerate(run.paths[run.kept - 2]):
            names = [name for name in graph.states if name.startswith(f"{path}.")]
            for paths in run.paths[run.kept - 1 : -1]:
                states.update({paths[place] + name.removeprefix(path): name for name in names})
    kept = np.flatnonzero(~gone)
    places = np.cumsum(~gone) - 1
    nodes = tuple(graph.nodes[position].reading(instead) for position in kept)
    remaining = {name: graph.states[name] for name, known in states.items() if name == known}
    short = graph
    if runs:
        short = check.after("repeats", replace(graph, nodes=nodes, states=remaining))
    return Short(short, tuple(kept.tolist()), places[like], tuple(runs), states)


def run_of(flow: Dataflow, row: Row, kept: int = KEPT) -> Run | None:
    """The run of a row, if some of its groups can be left out; else None."""
    groups = row.groups
    first, stops = groups[0][0].first, [group[-1].stop for group in groups[1:]]
    uses = (_last_use(flow, group) for group in groups[1:-1])
    if any(use >= stop for use, stop in zip(uses, stops[1:], strict=True)):
        return None
    paths = tuple(tuple(block.path for block in group) for group in groups)
    return Run(first, groups[0][-1].stop - first, len(groups), paths, kept)


def _last_use(flow: Dataflow, group: Group) -> int:
    """The last position that reads a value made by a group."""
    nodes = flow.graph.nodes[group[0].first : group[-1].stop]
    made = (Ref(node.name, output) for node in nodes for output in range(len(node.outputs)))
    return max((flow.users[ref][-1] for ref in made if ref in flow.users), default=-1)
