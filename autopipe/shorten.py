"""A graph with three blocks in the place of many alike: what is learnt of it holds for the whole.

    whole    embed | block 0 | block 1 | block 2 | block 3 | ... | block 124 | block 125 | head
    short    embed | block 0 | block 1 | block 2 |                           | block 125 | head
                               `------- alike ---- ... ---------------------------------'

A *run* are blocks one behind the other that do the same with the same: in terms of positions that
count from a block's own first node, each reads what the others read of itself and of the block
before it, and what all of them read from further away is one value. The first of them may be given
what it reads by whom it likes. Of a run the first two blocks and the last are kept, and the last
reads from the second what it has read from the one before it.

Where layers of several kinds take turns, it is groups of them that are alike:

    whole    embed | near 0  far 1 | near 2  far 3 | ... | near 38  far 39 | near 40  far 41 | head
    short    embed | near 0  far 1 | near 2  far 3 |                       | near 40  far 41 | head

What the kept ones show is so for all if the second group's values look as the first's do
(`Short.uniform`): then the third is given what the second was, and so on.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopipe import cost
from autopipe.blocks import Block
from autopipe.dataflow import Dataflow
from autopipe.graph import Arg, Graph, Ref, State, Value, swap

KEPT = 3
"""Groups of a run that stay: the first two and the last."""

Group = tuple[Block, ...]
"""Blocks one behind the other; most often one."""


@dataclass(frozen=True)
class Run:
    """`count` groups alike, of `length` nodes each, from position `first` on.

    Of them `kept` stay: the first ones and the last. `paths` are those of each group's blocks.
    """

    first: int
    length: int
    count: int
    paths: tuple[tuple[str, ...], ...]
    kept: int = KEPT

    def group(self, position: int) -> int | None:
        """The number of the group that a node is in."""
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
        """Whether in every run the second group's nodes make what the first's do.

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
            Uneven: it lies in more than two groups of a run, and not in all.
        """
        found = [seen]
        for run in self.runs:
            found = [whole for storage in found for whole in _along(storage, run)]
        return found


def _along(storage: Storage, run: Run) -> list[Storage]:
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
            to = number if number is None else groups.get(number, number)
            return (
                position if to is None or number is None else position + (to - number) * run.length
            )

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
    found = (run_of(flow, row) for row in alike(Forms(flow, blocks), blocks, from_first=from_first))
    return leave_out(flow.graph, [run for run in found if run is not None])


def shortened(flow: Dataflow, blocks: Sequence[Block]) -> Iterator[Short]:
    """From the shortest graph to the whole one; each is for whom the one before is uneven."""
    yield shorten(flow, blocks)
    yield shorten(flow, blocks, from_first=False)
    yield shorten(flow, ())


def leave_out(graph: Graph, runs: Sequence[Run]) -> Short:
    """The graph without those groups of runs that are not kept; without any it is the whole one.

    The last group of a run reads from the last one before it that stays.
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
        for place, path in enumerate(run.paths[run.kept - 2]):
            own = [name for name in graph.states if name.startswith(f"{path}.")]
            for paths in run.paths[run.kept - 1 : -1]:
                states.update({paths[place] + name.removeprefix(path): name for name in own})
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


class Forms:
    """What blocks do, as numbers: equal for two blocks only if both do the same."""

    def __init__(self, flow: Dataflow, blocks: Sequence[Block]) -> None:
        self._flow = flow
        self._before = {
            block: before for before, block in pairwise(blocks) if before.stop == block.first
        }
        self._carrying = cost.gradient_values(flow.graph)
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[tuple[Block | None, Block], int | None] = {}

    def following(self, block: Block) -> int | None:
        """What it does with what the block before it makes; None: it is like no other."""
        before = self._before.get(block)
        return None if before is None else self._number(before, block)

    def alone(self, block: Block) -> int | None:
        """What it does with what it is given by whom it may be; None: it is like no other."""
        return self._number(None, block)

    def _number(self, before: Block | None, block: Block) -> int | None:
        if (before, block) not in self._known:
            form = _form(self._flow, self._carrying, before, block)
            number = None if form is None else self._numbers.setdefault(form, len(self._numbers))
            self._known[before, block] = number
        return self._known[before, block]


@dataclass(frozen=True)
class Row:
    """Groups of blocks in a row, alike: they do the same with the same. At least `LEAST`.

    `form` is equal for another row of the same groups.
    """

    groups: tuple[Group, ...]
    form: Hashable


LEAST = KEPT + 1
"""Groups that make a row: of fewer nothing is left out."""


def alike(
    forms: Forms,
    blocks: Sequence[Block],
    again: Collection[str] = (),
    *,
    from_first: bool = True,
) -> list[Row]:
    """The rows among blocks that stand in a row, or in several.

    Args:
        again: paths of those that run again in backward; they are not like those that do not.
        from_first: with a first block that is like the others but for who gives it what it reads,
            as embeddings do for a model's first one.
    """
    found: list[Row] = []
    marks = [(forms.following(block), block.path in again) for block in blocks]
    start = 0
    while start < len(blocks):
        row = _row_at(start, forms, blocks, marks, from_first)
        found += [row] if row else []
        start += sum(map(len, row.groups)) if row else 1
    return found


Mark = tuple[int | None, bool]
"""What a block does, and whether it runs again."""


def _row_at(
    start: int, forms: Forms, blocks: Sequence[Block], marks: Sequence[Mark], from_first: bool
) -> Row | None:
    """The row that begins with a block, in the period in which most can be left out.

        near far near far near far near far near last      period 2: four groups, and one block more

    With a period of p each block but the first has the mark of the one p before it.
    """

    def as_first(other: int) -> bool:
        if marks[start] == marks[other]:
            return marks[start][0] is not None
        if not from_first or marks[start][1] != marks[other][1]:
            return False
        form = forms.alone(blocks[start])
        return form is not None and form == forms.alone(blocks[other])

    best, groups = 0, 0
    for period in range(1, (len(blocks) - start) // LEAST + 1):
        more = (
            marks[place][0] is not None and marks[place] == marks[place - period]
            for place in range(start + period + 1, len(blocks))
        )
        count = (period + 1 + len(list(takewhile(bool, more)))) // period
        if (count - KEPT) * period > (groups - KEPT) * best and as_first(start + period):
            best, groups = period, count
    if not best:
        return None
    starts = range(start, start + groups * best, best)
    return Row(
        tuple(tuple(blocks[place : place + best]) for place in starts),
        tuple(marks[start + best : start + 2 * best]),
    )


def run_of(flow: Dataflow, row: Row, kept: int = KEPT) -> Run | None:
    """The run of a row, if some of it can be left out."""
    groups = row.groups
    first, stops = groups[0][0].first, [group[-1].stop for group in groups[1:]]
    uses = (_last_use(flow, group) for group in groups[1:-1])
    if any(use >= stop for use, stop in zip(uses, stops[1:], strict=True)):
        return None
    paths = tuple(tuple(block.path for block in group) for group in groups)
    return Run(first, groups[0][-1].stop - first, len(groups), paths, kept)


def _last_use(flow: Dataflow, group: Group) -> int:
    """The last position that reads what a group makes."""
    nodes = flow.graph.nodes[group[0].first : group[-1].stop]
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
