"""Observe which bytes a graph saves for backward, by running it on tensors without memory.

    graph, rows --observe_saved--> Seen: each saved storage, its bytes, the node that makes it and
                                   the nodes that save it

Autograd saves them, or, where stages are compiled, the graphs of `joint.split_backward`. Of equal
repeated blocks only a few are run (`ir.repeats`). The run with the fewest rows also gives the
levels of blocks (`joint.levels`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import fx

from autopipe.ir.graph import Graph, shape_at
from autopipe.ir.opaque_ops import observing
from autopipe.ir.repeats import Short, Storage, Uneven
from autopipe.joint.joint_graph import CannotSplit, JointGraph, storages
from autopipe.joint.levels import OpLevel, levels
from autopipe.joint.split_backward import Division, divide, needed
from autopipe.joint.wanted import Wanted
from autopipe.planners.saved.between_halves import more_between, positions
from autopipe.planners.saved.other_rows import JointGraphs, JointRun
from autopipe.planners.saved.watched_run import (
    POSITION,
    KeptStorage,
    TensorLook,
    Watch,
    WatchedStage,
    watched_stage,
)
from autopipe.stages.op_tape import MADE, SEGMENT
from autopipe.stages.precision import computing
from autopipe.util.progress import phase

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
        waiting: in compiled stages, for each node of the short graph, the bytes that a micro-batch
            holds more between the halves of its backward than before them.
    """

    storages: tuple[Storage, ...]
    bytes: tuple[int, ...]
    made_in: Mapping[int, tuple[torch.dtype | None, ...]]
    copies: tuple[str, ...]
    levels: Levels
    made: NDArray[np.int64] = field(compare=False)  # whether arrays are equal has many answers
    waiting: NDArray[np.int64] = field(compare=False)


def observe_saved(
    short: Short,
    precision: str,
    rows: int,
    segments: Sequence[str | None] = (),
    *,
    compiled: bool = False,
    seconds: Mapping[int, float] = MappingProxyType({}),
    known: JointGraphs | None = None,
) -> Seen:
    """Run a graph on tensors without memory; note which nodes make and which save each storage.

    Args:
        segments: the block of each node; None: there are no blocks.
        compiled: whether stages run compiled and keep the least (`joint.run_again`); else they keep
            what autograd saves.
        seconds: the seconds of nodes that may run again, by position, if levels of compiled stages
            are wanted.
        known: the known joint graphs of this graph; numbers of rows that they cover are not run.

    Raises:
        CannotSplit: the graph cannot be differentiated, and compiled stages are asked for.
        Uneven: blocks that should be equal make tensors of other shapes or dtypes.
    """
    if compiled:
        run = known.at(rows) if known else None
        if run is None:
            run = _joint_run(short, precision, rows, segments)
            if known:
                known.add(rows, run)
        return _of_graphs(short, run, segments, seconds)
    with _watching(short, precision, rows, segments) as (stage, watch):
        with observing(watch.pack), computing(stage.arithmetic):
            results = watch.run(*stage.inputs)  # what leads to them is kept
            kept = watch.kept()
            del results
    none = np.zeros(len(short.graph.nodes), np.int64)
    return _seen(short, kept, watch.looks, tuple(stage.lowered.low), {}, none, none)


@contextmanager
def _watching(
    short: Short, precision: str, rows: int, segments: Sequence[str | None]
) -> Iterator[tuple[WatchedStage, Watch]]:
    """A stage of so many rows, and what notes its run; a phase counts the nodes that have run."""
    with watched_stage(short, precision, rows, segments) as stage:
        nodes = len(stage.lowered.module.graph.nodes)
        with phase(f"counting what is kept of {rows} rows", of=nodes) as done:
            yield stage, stage.watch(done)


def _joint_run(short: Short, precision: str, rows: int, segments: Sequence[str | None]) -> JointRun:
    with _watching(short, precision, rows, segments) as (stage, watch):
        return JointRun(stage.joint(watch), watch.looks, tuple(stage.lowered.low))


def _of_graphs(
    short: Short,
    run: JointRun,
    segments: Sequence[str | None],
    seconds: Mapping[int, float],
) -> Seen:
    """The storages that compiled stages keep; divides, and so changes, the run's joint graph."""
    found = _levels(short.graph, run.graph, seconds, least=True)
    division = divide(run.graph, Wanted(halves=False, least=True))
    kept, nodes = _kept_by_graphs(division), len(short.graph.nodes)
    of = positions(division.first, POSITION, nodes - 1)
    made_by = _made_by(division, of, nodes, segments)
    kept_by = {storage: max(each.savers) for storage, each in kept.items()}
    waiting = more_between(division, of, kept_by, nodes)
    return _seen(short, kept, run.looks, run.low, found, made_by, waiting)


def _seen(
    short: Short,
    kept: Mapping[int, KeptStorage],
    looks: Mapping[int, tuple[TensorLook | None, ...]],
    low: tuple[str, ...],
    found: Levels,
    made_by: NDArray[np.int64],
    waiting: NDArray[np.int64],
) -> Seen:
    """The observations of a short graph, by positions in the graph that it shortens."""
    at = short.kept
    if not short.uniform({at[position]: look for position, look in looks.items()}):
        raise Uneven
    return Seen(
        tuple(
            Storage(at[each.made], tuple(at[saver] for saver in each.savers))
            for each in kept.values()
        ),
        tuple(each.bytes for each in kept.values()),
        {
            at[position]: tuple(None if spec is None else spec.dtype for spec in look)
            for position, look in looks.items()
        },
        low,
        found,
        made_by,
        waiting,
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


def _made_by(
    division: Division, of: Mapping[fx.Node, int], nodes: int, segments: Sequence[str | None]
) -> NDArray[np.int64]:
    """`Seen.made` of the first `nodes` nodes, from the node that each call belongs to."""
    found = np.zeros(nodes, np.int64)
    for call in division.first:
        call.meta[SEGMENT] = segments[of[call]] if segments else None
    half, parts = division.halves[0], _parts_of_sums(division)
    made = half.made() - half.existing(parts)
    for number, call in enumerate(division.first):  # a stage of one use hands its part over there
        made[number] += sum(parts.pop(s, 0) for s in call.meta[MADE].storages)
    np.maximum.at(found, [of[call] for call in division.first], made)
    return found


def _parts_of_sums(division: Division) -> dict[int, int]:
    """The bytes of the storages that are added up to the gradient of a parameter used twice."""
    found: dict[int, int] = {}
    calls, pending = set(division.first), list(division.graph.of_parameters.values())
    while pending:
        gradient = pending.pop()
        if gradient.target in _SUMS:
            parts = [part for part in gradient.all_input_nodes if part in calls]
            found |= {s: n for part in parts for s, n in part.meta[MADE].storages.items()}
            pending += parts
    return found


_SUMS = torch.ops.aten.add.Tensor, torch.ops.aten._to_copy.default
"""The ops between the parts of a gradient and their sum."""
