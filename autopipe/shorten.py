"""A graph with three blocks in the place of many alike: what is learnt of it holds for the whole.

    whole    embed | block 0 | block 1 | block 2 | block 3 | ... | block 124 | block 125 | head
    short    embed | block 0 | block 1 | block 2 |                           | block 125 | head
                               `------- alike ---- ... ---------------------------------'

A *run* are blocks one behind the other that do the same with the same: in terms of positions that
count from a block's own first node, each reads what the others read of itself and of the block
before it, and what all of them read from further away is one value. The first of them may be given
what it reads by whom it likes. Of a run the first two blocks and the last are kept, and the last
reads from the second what it has read from the one before it.

What the kept ones show is so for all if the second block's values look as the first's do
(`Short.uniform`): then the third is given what the second was, and so on.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe import cost
from autopipe.blocks import Block
from autopipe.dataflow import Dataflow
from autopipe.graph import Arg, Graph, Ref, State, Value, swap

KEPT = 3
"""Blocks of a run that stay: the first two and the last."""


@dataclass(frozen=True)
class Run:
    """`count` blocks alike, of `length` nodes each, from position `first` on.

    Of them `kept` stay: the first ones and the last.
    """

    first: int
    length: int
    count: int
    paths: tuple[str, ...]
    kept: int = KEPT

    def block(self, position: int) -> int | None:
        """The number of the block that a node is in."""
        number, _ = divmod(position - self.first, self.length)
        return number if 0 <= number < self.count else None


class Storage(NamedTuple):
    """A storage by positions: the node that makes it, and those that keep it for backward."""

    made: int
    savers: tuple[int, ...]


class Uneven(Exception):
    """What was seen of a short graph does not tell what the whole one does."""


@dataclass(frozen=True)
class Short:
    """A short graph, and how the whole one follows from it.

    Attributes:
        graph: a part of the whole one's nodes, under their names.
        kept: positions of its nodes in the whole graph.
        like: of each node of the whole graph, the position of the short graph's that is like it.
        runs: what has been left out.
        states: of each state of the whole graph the name of the short one's that is like it.
    """

    graph: Graph
    kept: tuple[int, ...]
    like: NDArray[np.int64]
    runs: tuple[Run, ...]
    states: Mapping[str, str]

    def uniform(self, looks: Mapping[int, Hashable]) -> bool:
        """Whether in every run the second block's nodes make what the first's do.

        Args:
            looks: of what each node makes, by its position in the whole graph.
        """
        return all(
            looks.get(run.first + offset) == looks.get(run.first + run.length + offset)
            for run in self.runs
            for offset in range(run.length)
        )

    def along(self, seen: Storage) -> list[Storage]:
        """Those of the whole graph that a storage of the short one stands for.

        All by positions in the whole graph.

        Raises:
            Uneven: it lies in more than two blocks of a run, and not in all.
        """
        found = [seen]
        for run in self.runs:
            found = [whole for storage in found for whole in _along(storage, run)]
        return found


def _along(storage: Storage, run: Run) -> list[Storage]:
    """A storage that was seen at the kept blocks of a run, at all of its blocks.

    seen in block   0     copied                    0, 1, last   in the blocks between as in 1
                    1     so in 1, 2 ... n - 2      0, 1         from each to the next, but the last
                    last  copied                    1, last      from the last but one to the last
    """
    touched = {
        number for p in (storage.made, *storage.savers) if (number := run.block(p)) is not None
    }
    last = run.count - 1
    between = range(2, last)

    def shift(blocks: Mapping[int, int]) -> Storage:
        """The storage with its positions in some blocks moved to others."""

        def change(position: int) -> int:
            number = run.block(position)
            to = number if number is None else blocks.get(number, number)
            return (
                position if to is None or number is None else position + (to - number) * run.length
            )

        return Storage(change(storage.made), tuple(map(change, storage.savers)))

    if not touched or touched in ({0}, {last}):
        return [storage]
    alone = all(run.block(p) is not None for p in storage.savers)
    if touched == {1} and alone:
        return [storage, *(shift({1: number}) for number in between)]
    if touched == {0, 1} and alone:
        return [storage, *(shift({0: number - 1, 1: number}) for number in between)]
    if touched == {1, last}:
        return [shift({1: last - 1})]
    if touched == {0, 1, last}:
        offsets = [
            {p - run.first - number * run.length for p in storage.savers if run.block(p) == number}
            for number in (0, 1)
        ]
        if offsets[0] == offsets[1]:
            more = [
                run.first + number * run.length + offset
                for number in between
                for offset in offsets[1]
            ]
            return [Storage(storage.made, tuple(sorted({*storage.savers, *more})))]
    raise Uneven


def shorten(flow: Dataflow, blocks: Sequence[Block], *, from_first: bool = True) -> Short:
    """The graph without the blocks that others stand for; the whole one where there are none.

    Args:
        from_first: as `alike` has it.
    """
    found = (run_of(flow, row) for row in alike(flow, blocks, from_first=from_first))
    return leave_out(flow.graph, [run for run in found if run is not None])


def shortened(flow: Dataflow, blocks: Sequence[Block]) -> Iterator[Short]:
    """From the shortest graph to the whole one; each is for whom the one before is uneven."""
    yield shorten(flow, blocks)
    yield shorten(flow, blocks, from_first=False)
    yield shorten(flow, ())


def leave_out(graph: Graph, runs: Sequence[Run]) -> Short:
    """The graph without those blocks of runs that are not kept; without any it is the whole one.

    The last block of a run reads from the last one before it that stays.
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
            mine, other = graph.nodes[stop - run.length + offset], graph.nodes[standing + offset]
            for output in range(len(mine.outputs)):
                instead[Ref(mine.name, output)] = Ref(other.name, output)
        home = f"{run.paths[run.kept - 2]}."
        own = [name for name in graph.states if name.startswith(home)]
        for path in run.paths[run.kept - 1 : -1]:
            states.update({f"{path}." + name.removeprefix(home): name for name in own})
    kept = np.flatnonzero(~gone)
    places = np.cumsum(~gone) - 1
    nodes = tuple(
        replace(
            node,
            args=swap(node.args, instead),
            kwargs={key: swap(arg, instead) for key, arg in node.kwargs.items()},
        )
        if any(value in instead for value in node.values())
        else node
        for node in (graph.nodes[position] for position in kept)
    )
    remaining = {name: graph.states[name] for name, known in states.items() if name == known}
    short = replace(graph, nodes=nodes, states=remaining) if runs else graph
    return Short(short, tuple(kept.tolist()), places[like], tuple(runs), states)


@dataclass(frozen=True)
class Alike:
    """Blocks in a row that are of one form: they do the same with the same."""

    blocks: tuple[Block, ...]
    form: Hashable


def alike(flow: Dataflow, blocks: Sequence[Block], *, from_first: bool = True) -> list[Alike]:
    """Blocks in a row of one form, as many as there are.

    Args:
        from_first: with the block before them that does the same with what comes from elsewhere,
            as a model's first one does with embeddings.
    """
    carrying = cost.gradient_values(flow.graph)
    rows: list[tuple[Hashable, list[Block]]] = []
    known: Hashable = None
    for before, block in pairwise(blocks):
        form = _form(flow, carrying, before, block) if before.stop == block.first else None
        if form is not None and form == known:
            rows[-1][1].append(block)
        elif form is not None:
            rows.append((form, [block]))
        known = form
    if from_first:
        rows = _with_first(flow, carrying, blocks, rows)
    return [Alike(tuple(row), form) for form, row in rows]


def _with_first(
    flow: Dataflow,
    carrying: frozenset[Ref | State],
    blocks: Sequence[Block],
    rows: Sequence[tuple[Hashable, list[Block]]],
) -> list[tuple[Hashable, list[Block]]]:
    """The rows, each with the block before it where that does the same with what it is given."""
    earlier = {block: before for before, block in pairwise(blocks)}
    found: list[tuple[Hashable, list[Block]]] = []
    for form, row in rows:
        first = earlier[row[0]]
        own = found[-1][1] if found and found[-1][1][-1] == first else []
        if len(row) > 1 and len(own) < 2:
            inside = [_form(flow, carrying, None, block) for block in (first, row[0])]
            if inside[0] is not None and inside[0] == inside[1]:
                found = found[:-1] if own else found
                row = [first, *row]
        found.append((form, row))
    return found


def run_of(flow: Dataflow, row: Alike, kept: int = KEPT) -> Run | None:
    """The run of blocks of one form, if some of them can be left out."""
    first, stops = row.blocks[0], [block.stop for block in row.blocks[1:]]
    uses = (_last_use(flow, block) for block in row.blocks[1:-1])
    if len(row.blocks) <= kept or any(
        use >= stop for use, stop in zip(uses, stops[1:], strict=True)
    ):
        return None
    paths = tuple(block.path for block in row.blocks)
    return Run(first.first, first.stop - first.first, len(paths), paths, kept)


def _last_use(flow: Dataflow, block: Block) -> int:
    """The last position that reads what a block makes."""
    nodes = flow.graph.nodes[block.first : block.stop]
    made = (Ref(node.name, output) for node in nodes for output in range(len(node.outputs)))
    return max((flow.users[ref][-1] for ref in made if ref in flow.users), default=-1)


def _form(
    flow: Dataflow, carrying: frozenset[Ref | State], before: Block | None, block: Block
) -> Hashable | None:
    """What equals another block's only if both do the same; None: the block is like no other.

    Args:
        before: the block whose values are named by how far back they are, as the block's own;
            None: what comes from outside the block is numbered, wherever it is from.
    """
    graph, first = flow.graph, block.first
    since = before.first if before else first
    home = block.path.partition("@")[0] + "."
    known: dict[Value, Hashable] = {}

    def told(arg: Arg) -> Hashable:
        if isinstance(arg, tuple):
            return tuple(told(item) for item in arg)
        if not isinstance(arg, Value):
            return type(arg), arg  # 1 is not 1.0
        if arg not in known:
            known[arg] = place(arg)
        return known[arg]

    def place(value: Value) -> Hashable:
        if isinstance(value, Ref):
            position = graph.index[value.node]
            if position >= since:
                return position - first, value.output
            return value if before else ("given", len(known))
        if isinstance(value, State) and value.name.startswith(home):
            state, users = graph.states[value.name], flow.users[value]
            if users[0] < first or users[-1] >= block.stop:
                raise Uneven
            return value.name.removeprefix(home), state.spec, state.kind, state.trainable
        return value

    made: list[Hashable] = []
    try:
        for position in range(first, block.stop):
            node = graph.nodes[position]
            back = tuple(Ref(node.name, n) in carrying for n in range(len(node.outputs)))
            kwargs = tuple((key, told(arg)) for key, arg in sorted(node.kwargs.items()))
            around = node.outputs, node.packed, node.grad, node.autocast, flow.local[position]
            made.append((node.op, told(node.args), kwargs, around, back))
    except Uneven:
        return None
    return tuple(made)
