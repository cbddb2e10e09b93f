"""From a graph to the planner's `Problem`: units between cuts, their seconds, bytes and crossings.

Bytes kept for backward are not modelled but observed: the graph runs once on tensors without
memory, and each storage that autograd keeps is entered with the nodes that keep it. Of blocks that
do the same few are run and costed (`autopipe.shorten`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from autopipe import cost
from autopipe.blocks import Block
from autopipe.cluster import Device
from autopipe.dataflow import Dataflow, analyse
from autopipe.fake import fake_mode, storage_key
from autopipe.graph import Graph, Ref, State, TensorSpec, bytes_at, shape_at
from autopipe.lower import NODE_NAME, lower
from autopipe.machine import Machine
from autopipe.opaque import observing
from autopipe.partition import legal_cuts, partition
from autopipe.precision import LOWERED, PRECISIONS, arithmetic, computing, wide_statistics
from autopipe.problem import Constraints, Crossing, Problem, Profile, Saved, Seconds, Shared
from autopipe.recompute import obstacle
from autopipe.rehearsal import fake_state
from autopipe.shorten import Short, Storage, Uneven, shortened

MOST_UNITS = 128
"""More units than this are made larger: planning takes time with their square."""


@dataclass(frozen=True)
class Units:
    """The graph's nodes in units: `starts[u]` is the position of unit u's first node."""

    starts: tuple[int, ...]

    def of(self, position: int) -> int:
        """The unit of the node at `position`; what comes after the last node is in the last."""
        return min(bisect_right(self.starts, position), len(self.starts)) - 1


def find_units(
    flow: Dataflow, blocks: Sequence[Block] = (), at_least: int = 1, most: int = MOST_UNITS
) -> Units:
    """Units with a trainable parameter each, so that every stage has something to train.

    Between two nodes that use parameters stands one cut, where the fewest bytes cross; of equally
    narrow places the beginning of a block is taken, else the first. More of the
    legal cuts are taken, the narrowest first, only where `at_least` units need them; where there
    would be too many, each stretch of equally many cuts keeps its narrowest.
    """
    width = _crossing_bytes(flow)
    beginnings = {block.first for block in blocks}

    def narrowest(cuts: Sequence[int]) -> int:
        return min(cuts, key=lambda cut: (width[cut], cut not in beginnings, cut))

    legal = legal_cuts(flow)
    users = sorted(
        {flow.users[State(name)][0] for name, state in flow.graph.states.items() if state.trainable}
    )
    ends = [bisect_right(legal, user) for user in users]
    gaps = [legal[left:right] for left, right in pairwise(ends)]
    cuts = sorted({narrowest(gap) for gap in gaps if gap})
    if len(cuts) >= most:
        stretch = -(-len(cuts) // (most - 1))
        cuts = [narrowest(cuts[i : i + stretch]) for i in range(0, len(cuts), stretch)]
    missing = at_least - 1 - len(cuts)
    if missing > 0:
        others = sorted(set(legal) - set(cuts), key=lambda cut: (width[cut], cut))
        cuts = sorted([*cuts, *others[:missing]])
    return Units((0, *cuts))


def _crossing_bytes(flow: Dataflow) -> list[int]:
    """Bytes that would cross a cut before each node, at one row."""
    change = [0] * (len(flow.graph.nodes) + 2)
    for value, users in flow.users.items():
        if isinstance(value, Ref) and not flow.local[flow.position(value)]:
            size = bytes_at(flow.graph.spec(value), 1)
            change[flow.position(value) + 1] += size
            change[users[-1] + 1] -= size
    width, total = [], 0
    for step in change:
        total += step
        width.append(total)
    return width


def build_problem(
    flow: Dataflow,
    blocks: Sequence[Block],
    units: Units,
    machine: Machine,
    kinds: Sequence[Device],
    *,
    batch: int,
    rows: Sequence[int],
    optimizer_factor: float,
    window: int,
    constraints: Constraints,
    precision: str = "fp32",
    recompute: Collection[str] | None = None,
    zeros: tuple[int, ...] = (0,),
    tp: int = 1,
    sending: Callable[[Graph, int], Sequence[tuple[float, float]]] | None = None,
    check: bool = True,
) -> tuple[Problem, tuple[str, ...]]:
    """The problem of splitting a graph over a machine, and the paths of its reruns.

    Args:
        kinds: the machine's kinds of devices.
        batch: rows of the whole batch.
        rows: the micro-batch sizes to consider.
        optimizer_factor: bytes of optimizer state per byte of trainable parameter.
        precision: what matrix products are computed in.
        recompute: paths of the blocks that run again in backward; None: the planner's choice of
            all that can.
        zeros: the ZeRO stages to choose from.
        tp: the tensor-parallel degree whose first rank runs the graph.
        sending: the forward and backward seconds that the nodes of the graph, or of a part of it,
            exchange something, for so many rows.
        check: whether to check that bytes are a straight line in the rows. What is so of a model is
            so of its parts.
    """
    graph = flow.graph
    may = [
        block
        for block in blocks
        if (recompute is None and obstacle(flow, range(block.first, block.stop)) is None)
        or (recompute is not None and block.path in recompute)
    ]
    again, sizes = np.array(_numbers(graph, may)), sorted(rows)
    for short in shortened(flow, blocks):
        try:
            kept, made_in, copies = _Kept(flow, short, precision, check).at(units, sizes, again)
            break
        except Uneven:
            continue
    formulas = cost.costs(short.graph)
    dtypes = _dtypes(short.graph, formulas, precision)
    parameters, constants = _states(graph, flow, units, copies)
    crossings = _crossings(flow, units, made_in)
    starts = np.array(units.starts)
    profiles = []
    for size in sizes:
        exchange = np.zeros((2, len(graph.nodes)))
        if sending is not None:
            exchange = np.array(sending(short.graph, size)).T[:, short.like]
        times = [
            np.stack(cost.seconds(formulas, size, device, dtypes))[:, short.like] + exchange
            for device in kinds
        ]
        profiles.append(
            Profile(
                size,
                tuple(_by_unit(forward, starts) for forward, _ in times),
                tuple(_by_unit(backward, starts) for _, backward in times),
                kept[size],
                crossings(size),
                tuple(
                    tuple(_of_block(forward, block, units) for forward, _ in times) for block in may
                ),
                _by_unit(exchange.sum(axis=0), starts) if sending is not None else (),
            )
        )
    problem = Problem(
        units=len(units.starts),
        blocks=tuple(_block_units(units, blocks)),
        parameters=parameters,
        constants=constants,
        optimizer_factor=optimizer_factor,
        profiles=tuple(profiles),
        batch=batch,
        machine=machine,
        window=window,
        constraints=replace(
            constraints, recompute=None if recompute is None else tuple(range(len(may)))
        ),
        reruns=tuple((units.of(block.first), units.of(block.stop - 1) + 1) for block in may),
        zeros=zeros,
        tp=tp,
    )
    return problem, tuple(block.path for block in may)


def _numbers(graph: Graph, blocks: Sequence[Block]) -> list[int]:
    """Of each node the number of the block that it is in, or -1."""
    numbers = [-1] * len(graph.nodes)
    for number, block in enumerate(blocks):
        numbers[block.first : block.stop] = [number] * (block.stop - block.first)
    return numbers


def _dtypes(graph: Graph, formulas: Sequence[cost.NodeCost], precision: str) -> list[torch.dtype]:
    """What each node computes in: in mixed precision matrix products in another dtype."""
    low = PRECISIONS[precision]
    return [
        low if low is not None and node.op.split(".")[1] in LOWERED else formula.dtype
        for node, formula in zip(graph.nodes, formulas, strict=True)
    ]


def _by_unit(seconds: NDArray[np.float64], starts: NDArray[np.int64]) -> Seconds:
    return tuple(np.add.reduceat(seconds, starts).tolist())


def _of_block(seconds: NDArray[np.float64], block: Block, units: Units) -> Seconds:
    """The seconds of a block's own nodes in each of the units it is in."""
    first, last = units.of(block.first), units.of(block.stop - 1)
    inside = [start - block.first for start in units.starts[first + 1 : last + 1]]
    own = seconds[block.first : block.stop]
    return tuple(np.add.reduceat(own, np.array([0, *inside])).tolist())


def _block_units(units: Units, blocks: Sequence[Block]) -> list[tuple[int, int]]:
    """Blocks as ranges of units; one that no cut can separate from the last is left out."""
    ranges: list[tuple[int, int]] = []
    for block in blocks:
        first, stop = units.of(block.first), units.of(block.stop - 1) + 1
        if units.starts[first] == block.first and (not ranges or ranges[-1][1] <= first):
            ranges.append((first, stop))
    return ranges


def _states(
    graph: Graph, flow: Dataflow, units: Units, copies: Collection[str]
) -> tuple[tuple[Shared, ...], tuple[Shared, ...]]:
    """Trainable parameters, and all else that is held: copies in low precision are among it."""
    trainable: Counter[tuple[int, ...]] = Counter()
    other: Counter[tuple[int, ...]] = Counter()
    for name, state in graph.states.items():
        used = tuple(sorted({units.of(position) for position in flow.users[State(name)]}))
        size = bytes_at(state.spec, 1)
        (trainable if state.trainable else other)[used] += size
        if name in copies:
            other[used] += size // 2
    return (
        tuple(Shared(size, used) for used, size in trainable.items()),
        tuple(Shared(size, used) for used, size in other.items()),
    )


Made = Mapping[Ref, torch.dtype]
"""What the graph's values are made in; in mixed precision that is not what the model says."""


def _crossings(
    flow: Dataflow, units: Units, made_in: Made
) -> Callable[[int], tuple[Crossing, ...]]:
    """For so many rows the tensors that leave the unit they are made in; those that go the same way
    as one."""
    carrying = cost.gradient_values(flow.graph)
    ways: dict[tuple[int, tuple[int, ...], bool], Counter[TensorSpec]] = defaultdict(Counter)
    for value, users in flow.users.items():
        if not isinstance(value, Ref) or flow.local[flow.position(value)]:
            continue
        producer = units.of(flow.position(value))
        later = tuple(sorted({units.of(user) for user in users} - {producer}))
        if later:
            spec = replace(flow.graph.spec(value), dtype=made_in[value])
            ways[producer, later, value in carrying][spec] += 1

    def at(rows: int) -> tuple[Crossing, ...]:
        return tuple(
            Crossing(sum(bytes_at(spec, rows) * n for spec, n in specs.items()), *way)
            for way, specs in ways.items()
        )

    return at


@dataclass(frozen=True)
class _Seen:
    """What one run of a graph has shown.

    Attributes:
        storages: those that autograd keeps, each with its bytes.
        made_in: what the nodes' results are made in, by the nodes' positions.
        copies: the parameters of which there are copies in low precision.
    """

    storages: tuple[Storage, ...]
    bytes: tuple[int, ...]
    made_in: Mapping[int, tuple[torch.dtype | None, ...]]
    copies: tuple[str, ...]


@dataclass(frozen=True)
class _Kept:
    """What autograd keeps of a graph, from runs of a short one in its place."""

    flow: Dataflow
    short: Short
    precision: str
    check: bool

    def at(
        self, units: Units, rows: Sequence[int], again: NDArray[np.int64]
    ) -> tuple[dict[int, tuple[Saved, ...]], Made, frozenset[str]]:
        """What is kept at each number of rows, what values are made in, and the low copies.

        Bytes are a straight line in the rows for nearly every model, but that few rows may be
        another case. It is drawn through two runs and, if asked to, checked by a third.

        Args:
            again: of each node the number of the block that it may run again with, or -1.

        Raises:
            Uneven: the short graph does not tell.
        """
        observe = cache(partial(_observe, self.short, self.precision))
        first, where = observe(rows[0]), cache(partial(self._by_unit, units, again))
        sizes: dict[int, tuple[Saved, ...]] = {}
        lines = _lines(observe, rows, self.check)
        for size in rows:
            seen, bytes = lines[size]
            sizes[size] = tuple(
                Saved(sum(bytes[number] for number in numbers), *place)
                for place, numbers in where(seen.storages).items()
            )
        nodes, like = self.flow.graph.nodes, self.short.like.tolist()
        kept = self.short.kept
        made_in = {
            Ref(node.name, number): dtype
            for node, standing in zip(nodes, like, strict=True)
            for number, dtype in enumerate(first.made_in.get(kept[standing], ()))
            if dtype is not None
        }
        low = set(first.copies)
        return (
            sizes,
            made_in,
            frozenset(n for n, known in self.short.states.items() if known in low),
        )

    def _by_unit(
        self, units: Units, again: NDArray[np.int64], storages: tuple[Storage, ...]
    ) -> dict[tuple[int | None, tuple[int, ...], int | None], list[int]]:
        """Numbers of the storages that are kept in the same units, by those."""
        found: dict[tuple[int | None, tuple[int, ...], int | None], list[int]] = defaultdict(list)
        for number, seen in enumerate(storages):
            for made, savers in self.short.along(seen):
                alone = {int(again[made]), *again[list(savers)].tolist()}
                rerun = alone.pop() if len(alone) == 1 else -1
                place = (
                    None if self.flow.local[made] else units.of(made),
                    tuple(sorted({units.of(position) for position in savers})),
                    rerun if rerun >= 0 else None,
                )
                found[place].append(number)
        return found


def _lines(
    observe: Callable[[int], _Seen], rows: Sequence[int], check: bool
) -> dict[int, tuple[_Seen, Sequence[int]]]:
    """The storages at each number of rows, and their bytes."""
    if len(rows) > 3:
        small, between, large = rows[0], rows[len(rows) // 2], rows[-1]
        low, high = observe(small), observe(large)
        middle = observe(between) if check else None
        if low.storages == high.storages and (not middle or middle.storages == low.storages):
            sizes = np.array(low.bytes), np.array(high.bytes)
            lines = {}
            for size in rows:
                rise, rest = np.divmod((sizes[1] - sizes[0]) * (size - small), large - small)
                off = middle and size == between and (sizes[0] + rise).tolist() != [*middle.bytes]
                if rest.any() or off:
                    break
                lines[size] = low, (sizes[0] + rise).tolist()
            else:
                return lines
        return _lines(observe, rows[1:], check) | {small: (low, low.bytes)}
    return {size: (observe(size), observe(size).bytes) for size in rows}


def _observe(short: Short, precision: str, rows: int) -> _Seen:
    """Run a graph on tensors without memory; note who made and who keeps each kept storage.

    Raises:
        Uneven: blocks that should be alike do not make what looks the same.
    """
    graph = short.graph
    flow = analyse(graph)
    (whole,) = partition(flow, ())
    with fake_mode(), wide_statistics(node.op for node in graph.nodes):
        states = {name: fake_state(graph, name) for name in whole.states}
        inputs = [
            torch.empty(shape_at(graph.inputs[path], rows), dtype=graph.inputs[path].dtype)
            for path in whole.inputs
        ]
        lowered = lower(graph, whole, (), states, None, rows, last=True, precision=precision)
        how = arithmetic(precision, "cpu", [states[name] for name in lowered.low])
        copies = how.copies.values()
        owned = {storage_key(tensor) for tensor in (*states.values(), *inputs, *copies)}
        watch = _Watch(flow, lowered.module, owned)
        with observing(watch.pack), computing(how):
            watch.run(*inputs)
    at = short.kept
    if not short.uniform({at[position]: look for position, look in watch.looks.items()}):
        raise Uneven
    return _Seen(
        tuple(
            Storage(at[kept.made], tuple(at[saver] for saver in kept.savers))
            for kept in watch.kept.values()
        ),
        tuple(kept.bytes for kept in watch.kept.values()),
        {
            at[position]: tuple(None if one is None else one.dtype for one in look)
            for position, look in watch.looks.items()
        },
        tuple(lowered.low),
    )


@dataclass
class _Storage:
    """A storage that autograd keeps: the node that makes it, and those that keep it."""

    bytes: int
    made: int
    savers: list[int]


class _Look(NamedTuple):
    """What a tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    carries: bool


class _Watch(fx.Interpreter):
    """Interprets a lowered graph and remembers which node made and which keep a storage."""

    def __init__(self, flow: Dataflow, module: fx.GraphModule, owned: set[int]) -> None:
        super().__init__(module, garbage_collect_values=False)  # storages keep their addresses
        self.kept: dict[int, _Storage] = {}
        self.looks: dict[int, tuple[_Look | None, ...]] = {}
        self._index = flow.graph.index
        self._owned = owned
        self._made: dict[int, int] = {}
        self._writing = {p for positions in flow.writers.values() for p in positions}
        self._alive: list[Tensor] = []  # a storage that is gone would lend its key to another
        self._position = 0

    def run_node(self, n: fx.Node) -> Any:
        name = n.meta.get(NODE_NAME)
        if name is not None:
            self._position = self._index[name]
        result = super().run_node(n)
        made = result if isinstance(result, list | tuple) else [result]
        if name is not None:
            self.looks[self._position] = tuple(map(_look, made))
        for tensor in made:
            if isinstance(tensor, Tensor):
                key = storage_key(tensor)
                # A stage writes a copy of what it has received: that copy is made by the write.
                if key not in self._made or self._position in self._writing:
                    self._made[key] = self._position
                    if key in self.kept:
                        self.kept[key].made = self._position
        return result

    def pack(self, tensor: Tensor) -> Tensor:
        key = storage_key(tensor)
        if key in self._owned:
            return tensor
        self._alive.append(tensor)
        if key not in self.kept:
            made = self._made.get(key, self._position)
            self.kept[key] = _Storage(tensor.untyped_storage().nbytes(), made, [])
        self.kept[key].savers.append(self._position)
        return tensor


def _look(made: Any) -> _Look | None:
    if not isinstance(made, Tensor):
        return None
    return _Look(tuple(made.shape), made.stride(), made.dtype, made.requires_grad)
