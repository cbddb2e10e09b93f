"""From a graph to the planner's `Problem`: units between cuts, their seconds, bytes and crossings.

Bytes kept for backward are not modelled but observed: the whole graph runs once on tensors without
memory, and each storage that autograd keeps is entered with the nodes that keep it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from autopipe import cost
from autopipe.blocks import Block
from autopipe.cluster import Device
from autopipe.dataflow import Dataflow
from autopipe.fake import fake_mode, storage_key
from autopipe.graph import Graph, Ref, State, bytes_at, shape_at
from autopipe.lower import NODE_NAME, lower
from autopipe.machine import Machine
from autopipe.opaque import observing
from autopipe.partition import legal_cuts, partition
from autopipe.precision import LOWERED, PRECISIONS, WideStatistics, arithmetic, computing
from autopipe.problem import Constraints, Crossing, Problem, Profile, Saved, Seconds, Shared
from autopipe.recompute import obstacle
from autopipe.rehearsal import fake_state

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
    gaps = [[cut for cut in legal if left < cut <= right] for left, right in pairwise(users)]
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
    sending: Callable[[int], Sequence[tuple[float, float]]] | None = None,
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
        sending: for so many rows the forward and backward seconds that nodes exchange something.
    """
    graph = flow.graph
    formulas = cost.costs(graph)
    may = [
        block
        for block in blocks
        if (recompute is None and obstacle(flow, range(block.first, block.stop)) is None)
        or (recompute is not None and block.path in recompute)
    ]
    again = np.array(_numbers(graph, may))
    dtypes = _dtypes(graph, formulas, precision)
    kept, made_in, copies = _kept(flow, units, sorted(rows), again, precision)
    parameters, constants = _states(graph, flow, units, copies)
    starts = np.array(units.starts)
    profiles = []
    for size in sorted(rows):
        exchange = np.zeros((2, len(graph.nodes)))
        if sending is not None:
            exchange = np.array(sending(size)).T
        times = [cost.seconds(formulas, size, device, dtypes) + exchange for device in kinds]
        profiles.append(
            Profile(
                size,
                tuple(_by_unit(forward, starts) for forward, _ in times),
                tuple(_by_unit(backward, starts) for _, backward in times),
                kept[size],
                _crossings(flow, units, size, made_in),
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
    trainable: list[Shared] = []
    other: list[Shared] = []
    for name, state in graph.states.items():
        used = sorted({units.of(position) for position in flow.users[State(name)]})
        shared = Shared(bytes_at(state.spec, 1), tuple(used))
        (trainable if state.trainable else other).append(shared)
        if name in copies:
            other.append(Shared(shared.bytes // 2, shared.units))
    return tuple(trainable), tuple(other)


Copies = tuple[str, ...]
"""Names of the parameters of which there is a copy in low precision."""

Made = Mapping[Ref, torch.dtype]
"""What the graph's values are made in; in mixed precision that is not what the model says."""


def _crossings(flow: Dataflow, units: Units, rows: int, made_in: Made) -> tuple[Crossing, ...]:
    """Every tensor that leaves the unit it is made in."""
    carrying = cost.gradient_values(flow.graph)
    found = []
    for value, users in flow.users.items():
        if not isinstance(value, Ref) or flow.local[flow.position(value)]:
            continue
        producer = units.of(flow.position(value))
        later = sorted({units.of(user) for user in users} - {producer})
        if later:
            spec = flow.graph.spec(value)
            size = bytes_at(spec, rows) * made_in[value].itemsize // spec.dtype.itemsize
            found.append(Crossing(size, producer, tuple(later), value in carrying))
    return tuple(found)


@dataclass
class _Storage:
    """A storage that autograd keeps: the node that makes it, and those that keep it."""

    bytes: int
    made: int
    savers: list[int]


def _kept(
    flow: Dataflow, units: Units, rows: Sequence[int], again: NDArray[np.int64], precision: str
) -> tuple[dict[int, tuple[Saved, ...]], Made, Copies]:
    """What autograd keeps at each number of rows, what values are made in, and the low copies.

    Bytes are a straight line in the rows for nearly every model. It is drawn through two runs and
    checked by a third; only where the check fails is every size run.
    """
    observe = partial(_observe, flow, units, again, precision)
    observed = {size: observe(size) for size in _spread(rows)}
    runs = {size: saved for size, (saved, *_) in observed.items()}
    _, made_in, copies = observed[rows[0]]
    if len(runs) == 3:
        low, middle, high = (runs[size] for size in sorted(runs))
        small, between, large = sorted(runs)
        guess = _line(low, high, small, large, between)
        if guess == middle:
            line = {size: _line(low, high, small, large, size) or low for size in rows}
            return line, made_in, copies
    return {size: runs.get(size) or observe(size)[0] for size in rows}, made_in, copies


def _spread(rows: Sequence[int]) -> set[int]:
    return {rows[0], rows[len(rows) // 2], rows[-1]}


def _line(
    low: tuple[Saved, ...], high: tuple[Saved, ...], small: int, large: int, rows: int
) -> tuple[Saved, ...] | None:
    """The storages at `rows` on the line through two runs; None if they are not the same ones."""
    if len(low) != len(high):
        return None
    line = []
    for a, b in zip(low, high, strict=True):
        rise, rest = divmod((b.bytes - a.bytes) * (rows - small), large - small)
        if rest or replace(b, bytes=a.bytes) != a:
            return None
        line.append(replace(a, bytes=a.bytes + rise))
    return tuple(line)


def _observe(
    flow: Dataflow, units: Units, again: NDArray[np.int64], precision: str, rows: int
) -> tuple[tuple[Saved, ...], Made, Copies]:
    """Run the graph on tensors without memory; note who made and who keeps each kept storage.

    Args:
        again: of each node the number of the block that it may run again with, or -1.

    Returns:
        The storages, what each value was made in, and the parameters that have low copies.
    """
    graph = flow.graph
    (whole,) = partition(flow, ())
    with fake_mode(), WideStatistics():
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
    saved = []
    for storage in watch.kept.values():
        producer = None if flow.local[storage.made] else units.of(storage.made)
        savers = tuple(sorted({units.of(position) for position in storage.savers}))
        alone = {int(again[storage.made]), *again[storage.savers].tolist()}
        number = alone.pop() if len(alone) == 1 else -1
        saved.append(Saved(storage.bytes, producer, savers, number if number >= 0 else None))
    return tuple(saved), watch.made_in, tuple(lowered.low)


class _Watch(fx.Interpreter):
    """Interprets a lowered graph and remembers which node made and which keep a storage."""

    def __init__(self, flow: Dataflow, module: fx.GraphModule, owned: set[int]) -> None:
        super().__init__(module, garbage_collect_values=False)  # storages keep their addresses
        self.kept: dict[int, _Storage] = {}
        self.made_in: dict[Ref, torch.dtype] = {}
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
        for number, tensor in enumerate(result if isinstance(result, list | tuple) else [result]):
            if isinstance(tensor, Tensor):
                if name is not None:
                    self.made_in[Ref(name, number)] = tensor.dtype
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
