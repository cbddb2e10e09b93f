"""Observe which bytes a graph saves for backward, by running it on tensors without memory.

    graph, rows --observe_saved--> Seen: each saved storage, its bytes, the node that makes it and
                                   the nodes that save it

Autograd saves them, or, where stages are compiled, the graphs of `joint.split_backward`. Of equal
repeated blocks only a few are run (`ir.repeats`). The run with the fewest rows also gives the
levels of blocks (`joint.levels`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopipe.ir.cut_points import Units
from autopipe.ir.dataflow import Dataflow
from autopipe.ir.graph import Graph, Ref, shape_at
from autopipe.ir.opaque_ops import observing
from autopipe.ir.repeats import Short, Storage, Uneven
from autopipe.joint.joint_graph import CannotSplit, JointGraph, storages
from autopipe.joint.levels import OpLevel, levels
from autopipe.joint.split_backward import Division, divide, needed
from autopipe.joint.wanted import Wanted
from autopipe.planners.costs.watched_run import POSITION, KeptStorage, watched_stage
from autopipe.planners.model.problem import Saved
from autopipe.stages.op_tape import MADE, SEGMENT
from autopipe.stages.precision import computing
from autopipe.util.progress import phase

Made = Mapping[Ref, torch.dtype]
"""What the graph's values are made in; in mixed precision that is not what the model says."""

Levels = Mapping[str, tuple[OpLevel, ...]]
"""Ways to keep less, by the paths of a short graph's blocks; their groups are its positions."""


@dataclass(frozen=True)
class Seen:
    """The observations of one run of a graph.

    Attributes:
        storages: the saved storages, each with its bytes.
        made_in: the dtypes of the nodes' results, by position.
        copies: the parameters of which there are copies in low precision.
        levels: the levels of blocks in compiled stages, if they are wanted.
        made: in compiled stages, for each node of the short graph, the most bytes that its backward
            has made and still needs.
    """

    storages: tuple[Storage, ...]
    bytes: tuple[int, ...]
    made_in: Mapping[int, tuple[torch.dtype | None, ...]]
    copies: tuple[str, ...]
    levels: Levels
    made: NDArray[np.int64]


class KeptBytes(NamedTuple):
    """The bytes that a graph keeps, at each number of rows.

    Attributes:
        saved: the saved storages, by the rows.
        made: as `Profile` has it, by the rows.
        made_in: the dtypes of values.
        low: the parameters of which there are copies in low precision.
        levels: as `Seen` has them, at the fewest rows.
    """

    saved: dict[int, tuple[Saved, ...]]
    made: dict[int, tuple[int, ...]]
    made_in: Made
    low: frozenset[str]
    levels: Levels


@dataclass(frozen=True)
class Saving:
    """Finds the bytes that a graph saves, from runs of a shorter graph.

    Args:
        check: whether to check that bytes are a straight line in the rows.
        segments: the block of each node of the short graph.
        compiled: whether stages run compiled and keep the least (`joint.run_again`); else they keep
            what autograd saves.
        seconds: the seconds, at the fewest rows, of the short graph's nodes in blocks that may run
            again, by position.
        room: if the fewest rows keep no more bytes than this, nothing has to run again, and no
            levels are made. (Levels of compiled stages come along with their kept bytes.)
    """

    flow: Dataflow
    short: Short
    precision: str
    check: bool
    segments: Sequence[str | None]
    compiled: bool
    seconds: Mapping[int, float]
    room: float

    def at(self, units: Units, rows: Sequence[int], again: NDArray[np.int64]) -> KeptBytes:
        """The kept bytes at each number of rows.

        They are a straight line in the rows for nearly every model, but the smallest number of rows
        may be off the line. Two runs give the line; a third one checks it if asked to.

        Args:
            again: for each node the number of the block with which it may run again, or -1.

        Raises:
            Uneven: the short graph's bytes do not hold for the whole graph.
        """
        observe = cache(partial(self._observe, rows[0]))
        first, where = observe(rows[0]), cache(partial(self._by_unit, units, again))
        sizes: dict[int, tuple[Saved, ...]] = {}
        made_of: dict[int, tuple[int, ...]] = {}
        lines = _lines(observe, rows, self.check)
        for size in rows:
            line = lines[size]
            sizes[size] = tuple(
                Saved(sum(line.bytes[number] for number in numbers), *place)
                for place, numbers in where(line.seen.storages).items()
            )
            of_units = np.maximum.reduceat(line.made[self.short.like], np.array(units.starts))
            made_of[size] = tuple(of_units.tolist()) if self.compiled else ()
        nodes, like = self.flow.graph.nodes, self.short.like.tolist()
        kept = self.short.kept
        made_in = {
            Ref(node.name, number): dtype
            for node, standing in zip(nodes, like, strict=True)
            for number, dtype in enumerate(first.made_in.get(kept[standing], ()))
            if dtype is not None
        }
        low, levels = set(first.copies), first.levels
        if not self.compiled and sum(own.bytes for own in sizes[rows[0]]) > self.room:
            levels = eager_levels(self.short, self.precision, rows[0], self.segments, self.seconds)
        return KeptBytes(
            sizes,
            made_of,
            made_in,
            frozenset(n for n, known in self.short.states.items() if known in low),
            levels,
        )

    def _observe(self, fewest: int, rows: int) -> Seen:
        return observe_saved(
            self.short,
            self.precision,
            rows,
            segments=self.segments,
            compiled=self.compiled,
            seconds=self.seconds if self.compiled and rows == fewest else {},
        )

    def _by_unit(
        self, units: Units, again: NDArray[np.int64], storages: tuple[Storage, ...]
    ) -> dict[tuple[int | None, tuple[int, ...], int | None], list[int]]:
        """The numbers of the storages that the same units keep, by these units."""
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


class _SavedLine(NamedTuple):
    """The bytes of a run at a number of rows: of saved storages, and made in backward."""

    seen: Seen
    bytes: Sequence[int]
    made: NDArray[np.int64]


def _lines(
    observe: Callable[[int], Seen], rows: Sequence[int], check: bool
) -> dict[int, _SavedLine]:
    """The storages at each number of rows, and their bytes."""
    if len(rows) > 3:
        small, between, large = rows[0], rows[len(rows) // 2], rows[-1]
        low, high = observe(small), observe(large)
        same = low.storages == high.storages
        middle = observe(between) if check and same else None
        if same and (not middle or middle.storages == low.storages):
            sizes = np.array(low.bytes), np.array(high.bytes)
            lines = {}
            for size in rows:
                share = size - small, large - small
                rise, rest = np.divmod((sizes[1] - sizes[0]) * share[0], share[1])
                off = middle and size == between and (sizes[0] + rise).tolist() != [*middle.bytes]
                if rest.any() or off:
                    break
                # The most of several sums: never above the line between two of its points.
                more = -((low.made - high.made) * share[0] // share[1])
                lines[size] = _SavedLine(low, (sizes[0] + rise).tolist(), low.made + more)
            else:
                return lines
        return _lines(observe, rows[1:], check) | {small: _as_it_is(low)}
    return {size: _as_it_is(observe(size)) for size in rows}


def _as_it_is(seen: Seen) -> _SavedLine:
    return _SavedLine(seen, seen.bytes, seen.made)


def observe_saved(
    short: Short,
    precision: str,
    rows: int,
    segments: Sequence[str | None] = (),
    *,
    compiled: bool = False,
    seconds: Mapping[int, float] = MappingProxyType({}),
) -> Seen:
    """Run a graph on tensors without memory; note which nodes make and which save each storage.

    Args:
        segments, compiled: as `Saving` has them; without segments, there are no blocks.
        seconds: as `Saving` has them, if levels of compiled stages are wanted.

    Raises:
        CannotSplit: the graph cannot be differentiated, and compiled stages are asked for.
        Uneven: blocks that should be equal make tensors of other shapes or dtypes.
    """
    found: Levels = {}
    nodes = len(short.graph.nodes)
    made_by = np.zeros(nodes, np.int64)
    with watched_stage(short, precision, rows, segments) as stage:
        name = f"counting what is kept of {rows} rows"
        with phase(name, of=len(stage.lowered.module.graph.nodes)) as done:
            watch = stage.watch(done)
            if compiled:
                made = stage.joint(watch)
                found = _levels(short.graph, made, seconds, least=True)
                division = divide(made, Wanted(halves=False, least=True))
                watch.kept = _kept_by_graphs(division)
                made_by = _made_by(division, nodes, segments)
            else:
                with observing(watch.pack), computing(stage.arithmetic):
                    watch.run(*stage.inputs)
    at = short.kept
    if not short.uniform({at[position]: look for position, look in watch.looks.items()}):
        raise Uneven
    return Seen(
        tuple(
            Storage(at[kept.made], tuple(at[saver] for saver in kept.savers))
            for kept in watch.kept.values()
        ),
        tuple(kept.bytes for kept in watch.kept.values()),
        {
            at[position]: tuple(None if one is None else one.dtype for one in look)
            for position, look in watch.looks.items()
        },
        tuple(stage.lowered.low),
        found,
        made_by,
    )


def eager_levels(
    short: Short,
    precision: str,
    rows: int,
    segments: Sequence[str | None],
    seconds: Mapping[int, float],
) -> Levels:
    """The levels of the blocks of stages that run as they are, as `Seen` has them.

    Empty where the graph cannot be differentiated: then only whole blocks run again.
    """
    with watched_stage(short, precision, rows, segments) as stage, suppress(CannotSplit):
        return _levels(short.graph, stage.joint(stage.watch()), seconds, least=False)
    return {}


def _levels(
    graph: Graph, joint: JointGraph, seconds: Mapping[int, float], *, least: bool
) -> Levels:
    def group(call: fx.Node) -> int | None:
        position: int = call.meta[POSITION]
        return position if position in seconds else None

    def fixed(value: fx.Node) -> bool:
        made, position = value.meta[MADE].shape, value.meta.get(POSITION)
        specs = () if position is None else graph.nodes[position].outputs
        return any(shape_at(s, 1) == shape_at(s, 2) == made for s in specs if s is not None)

    return levels(joint, needed(joint), group, seconds, fixed, least=least) if seconds else {}


def _kept_by_graphs(division: Division) -> dict[int, KeptStorage]:
    """The storages that the joint graph of a whole model keeps, each with the nodes that read it.

    A storage that only backward reads (an in-place activation's copy of its input) counts as kept
    by the node that makes it.
    """
    found: dict[int, KeptStorage] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for node in division.graph.forward:
        for storage in storages(node.all_input_nodes):
            readers[storage].append(node.meta[POSITION])
    for node in division.kept:
        for storage, size in node.meta[MADE].storages.items():
            made = node.meta[POSITION]
            found[storage] = KeptStorage(size, made, readers[storage] or [made])
    return found


def _made_by(division: Division, nodes: int, segments: Sequence[str | None]) -> NDArray[np.int64]:
    """`Seen.made` of the first `nodes` nodes.

    A call of backward belongs to the node whose values it reads or, if it reads none, to the node
    of the call before.
    """
    found, of = np.zeros(nodes, np.int64), list[int]()
    for call in division.first:
        read = [n.meta[POSITION] for n in (call, *call.all_input_nodes) if POSITION in n.meta]
        of.append(max(read, default=of[-1] if of else nodes - 1))
        call.meta[SEGMENT] = segments[of[-1]] if segments else None
    np.maximum.at(found, of, division.halves[0].made())
    return found
