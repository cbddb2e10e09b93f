"""Find equal stages and equal blocks: the same ops on equal values, under other names.

    stage 3   h.6/linear/0 = linear(h.5/add/1, [h.6.weight])      op 0 = linear(received 0, state 0)
    stage 4   h.8/linear/0 = linear(h.7/add/1, [h.8.weight])      the same

Deep models have few classes of stages, and what is measured on one stage holds for all of its class
(`kind_of`). Equal blocks in a chain, or equal groups of them, form a `Row` (`alike`).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from autopipe.ir.blocks import Block, owners
from autopipe.ir.dataflow import Dataflow, gradient_values
from autopipe.ir.graph import Arg, Graph, Input, Ref, State, Value
from autopipe.ir.partition import Stage

KEPT = 3
"""Groups of a run that stay in a short graph: the first two and the last."""

Group = tuple[Block, ...]
"""Consecutive blocks; usually one."""


class _Shared(Exception):
    """A block's own state is read outside it, so no other block equals it."""


def kind_of(
    graph: Graph, stage: Stage, blocks: Sequence[Block], recompute: Collection[str], *, last: bool
) -> Hashable:
    """A key of a stage's class: two stages have equal keys only if they lower to the same modules.

    Names do not count.

    Args:
        recompute: paths of the blocks that are recomputed in backward, and names of nodes.
        last: whether the stage returns the graph's results.
    """
    places: dict[Value, Hashable] = {}
    for number, (received, _) in enumerate(stage.receives):
        places[received] = ("received", number, received in stage.copied)
    for number, path in enumerate(stage.inputs):
        places[Input(path)] = ("input", number, graph.inputs[path])
    for number, name in enumerate(stage.states):
        state = graph.states[name]
        look = state.spec, state.master, state.kind, state.trainable
        places[State(name)] = ("state", number, *look)
    owner = owners(blocks, stage.first, stage.stop)
    numbers: dict[str, int] = {}
    home = ""

    def key_of(arg: Arg) -> Hashable:
        if isinstance(arg, State):
            return places[arg], bool(home) and arg.name.startswith(home)
        if isinstance(arg, Value):
            return places[arg]
        if isinstance(arg, tuple):
            return tuple(key_of(item) for item in arg)
        return type(arg), arg  # 1 is not 1.0

    ops: list[Hashable] = []
    for position in stage.nodes:
        node = graph.nodes[position]
        block = owner.get(position)
        home = block.prefix if block else ""
        inside = block and (numbers.setdefault(block.path, len(numbers)), block.path in recompute)
        kwargs = tuple((key, key_of(arg)) for key, arg in sorted(node.kwargs.items()))
        again = node.name in recompute
        settings = node.outputs, node.packed, node.grad, node.autocast, inside, again
        ops.append((node.op, key_of(node.args), kwargs, settings))
        for number in range(len(node.outputs)):
            places[Ref(node.name, number)] = (len(ops) - 1, number)
    home = ""
    results = tuple(key_of(output) for output in graph.outputs) if last else None
    return tuple(ops), tuple(places[ref] for ref in stage.outgoing), results, len(stage.states)


class Forms:
    """Numbers the computations of blocks: two blocks have equal numbers only if they are equal."""

    def __init__(self, flow: Dataflow, blocks: Sequence[Block]) -> None:
        self._flow = flow
        self._before = {
            block: before for before, block in pairwise(blocks) if before.stop == block.first
        }
        self._carrying = gradient_values(flow.graph)
        self._numbers: dict[Hashable, int] = {}
        self._known: dict[tuple[Block | None, Block], int | None] = {}

    def following(self, block: Block) -> int | None:
        """A block's number, with its inputs from the block before; None: equal to no other."""
        before = self._before.get(block)
        return None if before is None else self._number(before, block)

    def alone(self, block: Block) -> int | None:
        """A block's number, wherever its inputs come from; None: equal to no other."""
        return self._number(None, block)

    def repeated(self, block: Block, again: Collection[str]) -> Hashable:
        """A key for what runs again of a block: whether all of it, and the offsets of its nodes."""
        if not again:
            return ()
        nodes = self._flow.graph.nodes[block.first : block.stop]
        offsets = tuple(offset for offset, node in enumerate(nodes) if node.name in again)
        return block.path in again, offsets

    def _number(self, before: Block | None, block: Block) -> int | None:
        if (before, block) not in self._known:
            form = _form(self._flow, self._carrying, before, block)
            number = None if form is None else self._numbers.setdefault(form, len(self._numbers))
            self._known[before, block] = number
        return self._known[before, block]


@dataclass(frozen=True)
class Row:
    """At least `LEAST` consecutive groups of blocks that are equal.

    Two rows of the same groups have equal `form`.
    """

    groups: tuple[Group, ...]
    form: Hashable


LEAST = KEPT + 1
"""The fewest groups of a row: with fewer, none could be left out."""


def alike(
    forms: Forms,
    blocks: Sequence[Block],
    again: Collection[str] = (),
    *,
    from_first: bool = True,
) -> list[Row]:
    """Find the rows of equal groups among consecutive blocks.

    Args:
        again: paths of recomputed blocks, and names of recomputed nodes; blocks that do not run
            again alike are not equal.
        from_first: whether a row may begin with a block whose inputs come from elsewhere, as the
            first layer's come from the embedding.
    """
    found: list[Row] = []
    marks = [(forms.following(block), forms.repeated(block, again)) for block in blocks]
    start = 0
    while start < len(blocks):
        row = _row_at(start, forms, blocks, marks, from_first)
        found += [row] if row else []
        start += sum(map(len, row.groups)) if row else 1
    return found


Mark = tuple[int | None, Hashable]
"""A block's number (`Forms`), and what of it is recomputed."""


def _row_at(
    start: int, forms: Forms, blocks: Sequence[Block], marks: Sequence[Mark], from_first: bool
) -> Row | None:
    """The row that begins at block `start`, with the period that leaves out most blocks.

        near far near far near far near far near last      period 2: four groups, and one block more

    With a period of p, each block but the first has the mark of the block p before it.
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
        repeats = (
            marks[place][0] is not None and marks[place] == marks[place - period]
            for place in range(start + period + 1, len(blocks))
        )
        count = (period + 1 + len(list(takewhile(bool, repeats)))) // period
        if (count - KEPT) * period > (groups - KEPT) * best and as_first(start + period):
            best, groups = period, count
    if not best:
        return None
    starts = range(start, start + groups * best, best)
    return Row(
        tuple(tuple(blocks[place : place + best]) for place in starts),
        tuple(marks[start + best : start + 2 * best]),
    )


def _form(
    flow: Dataflow, carrying: frozenset[Ref | State], before: Block | None, block: Block
) -> Hashable | None:
    """A key of a block's class: equal only for equal blocks; None: equal to no other.

    Args:
        before: the block before; its values are named by relative position, as the block's own.
            None: values from outside the block are numbered in the order of use.
    """
    graph, first = flow.graph, block.first
    since = before.first if before else first
    home = block.prefix
    known: dict[Value, Hashable] = {}

    def key_of(arg: Arg) -> Hashable:
        if isinstance(arg, tuple):
            return tuple(key_of(item) for item in arg)
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
                raise _Shared
            look = state.spec, state.master, state.kind, state.trainable
            return value.name.removeprefix(home), *look
        return value

    ops: list[Hashable] = []
    try:
        for position in range(first, block.stop):
            node = graph.nodes[position]
            back = tuple(Ref(node.name, n) in carrying for n in range(len(node.outputs)))
            kwargs = tuple((key, key_of(arg)) for key, arg in sorted(node.kwargs.items()))
            settings = node.outputs, node.packed, node.grad, node.autocast, flow.local[position]
            ops.append((node.op, key_of(node.args), kwargs, settings, back))
    except _Shared:
        return None
    return tuple(ops)
