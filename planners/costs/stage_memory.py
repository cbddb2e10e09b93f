"""Bytes that a rank has of a stage's parameters, gradients and optimizer state, by the ZeRO stage.

sharing    the number of ranks over which each parameter's rows are sharded
memory     bytes that are held all the time, and those of the programs at their fullest moment
passing    bytes of gradients that come and go
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from autopipe.ir.graph import Dim, Graph, StateSpec, bytes_at
from autopipe.ir.partition import Stage
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import BUCKET_BYTES, Memory
from autopipe.planfile.placements import Sharding, own_rows
from autopipe.planners.model.memory import scattered_bytes
from autopipe.schedules.instructions import Kind
from autopipe.sharding.local_graph import replicated


def sharing(
    stages: Sequence[Stage], sharding: Sharding | None, placed: Sequence[int], plan: Plan
) -> dict[str, int]:
    """For each state the number of ranks over which it is sharded.

    ZeRO-2 and 3 shard each stage over its replicas, ZeRO-1 over all ranks that a gradient is summed
    over: those of tied stages too, and tensor-parallel ones that each have a part of the sum.

    Args:
        sharding: the sharding over tensor-parallel ranks; None: there is one rank.
        placed: the pipeline rank of each stage.
    """
    ranks: dict[str, set[int]] = defaultdict(set)
    for stage in stages:
        for name in stage.states:
            ranks[name].add(placed[stage.index])
    if not plan.deals:
        return dict.fromkeys(ranks, plan.mesh.dp)
    parted = replicated(sharding) if sharding is not None else ()
    return {
        name: plan.mesh.dp * len(own) * (plan.mesh.tp if name in parted else 1)
        for name, own in ranks.items()
    }


def memory(
    graph: Graph,
    over: Mapping[str, int],
    peak: Counter[str],
    copies: int,
    passing: int,
    plan: Plan,
    optimizer_factor: float,
) -> Memory:
    """The bytes that a stage holds.

    Args:
        over: for each of its states the number of ranks that have shards; without the states of an
            earlier stage of its rank.
        peak: bytes of activations and transfers at the fullest moment.
        copies: bytes of copies of parameters, and of parameters that ZeRO-3 gathers.
        passing: bytes of `Memory.passing`.
    """
    states = {name: graph.states[name] for name in over}
    sizes = {name: bytes_at(state.held, 1) for name, state in states.items()}
    # Rows are sharded; the first rank has the most.
    shards = {n: share_of(state.spec.shape, sizes[n], over[n]) for n, state in states.items()}
    parameters = [name for name, state in states.items() if state.kind == "parameter"]
    trained = [name for name, state in states.items() if state.trainable]
    held = shards if plan.zero == 3 else sizes
    updated = shards if plan.zero else sizes
    mastered = {name for name, state in states.items() if state.master is not None}
    beside = [  # shards that are no views: see `runtime.parameters.row_shards`
        name
        for name in trained
        if plan.zero in (1, 2) and name not in mastered and _strided(states[name], over[name])
    ]
    return Memory(
        parameters=sum((updated if n in mastered else held)[n] for n in parameters)
        + sum(shards[name] for name in beside),
        gradients=sum(
            shards[name] if plan.scatters else bytes_at(states[name].summed, 1) for name in trained
        ),
        optimizer=round(sum(updated[name] for name in trained) * optimizer_factor),
        buffers=sum(size for name, size in sizes.items() if name not in parameters),
        activations=peak["activations"],
        transfers=peak["transfers"],
        copies=copies,
        passing=passing,
    )


def gradient_bytes(graph: Graph, names: Iterable[str], plan: Plan) -> int:
    """Bytes of the gradients of some states, whole, as they are summed over ranks."""
    trained = [state for name in names if (state := graph.states[name]).trainable]
    return sum(bytes_at(state.held if plan.scatters else state.summed, 1) for state in trained)


def share_of(shape: Sequence[Dim], size: int, ranks: int) -> int:
    """Bytes of a parameter's rows on the first of a number of ranks."""
    sizes = [int(dim) for dim in shape]
    elements = math.prod(sizes)
    return own_rows(sizes, ranks, 0).elements(sizes) * size // elements if elements else 0


def _strided(state: StateSpec, ranks: int) -> bool:
    """Whether a rank's rows of a parameter lie in several pieces."""
    shape = [int(dim) for dim in state.spec.shape]
    return own_rows(shape, ranks, 0).strided(shape)


def passing(
    graph: Graph,
    names: Iterable[str],
    peak: Counter[str],
    loss: int,
    plan: Plan,
    *,
    compiled: bool,
) -> tuple[int, Kind | None]:
    """Bytes of `Memory.passing`, and the name of the moment of their peak; None: a backward.

    From the second micro-batch on, each gradient exists beside the sum to which it is added; in
    compiled stages it is among the bytes made by backward (`joint.fullest_call`). A bucket is
    filled at the end, when the last backward has freed its peak; then 16-bit gradients are also
    cast for the optimizer. Under ZeRO-2 and 3 every backward fills buckets.

    Args:
        loss: bytes that exist only within the backward of the stage's loss (`loss_bytes`).
        compiled: whether the stage's backward runs as compiled graphs.
    """
    trained = [state for name in names if (state := graph.states[name]).trainable]
    gradients = [bytes_at(state.summed, 1) for state in trained]
    largest = max(gradients, default=0)
    if plan.scatters:
        return loss + int(scattered_bytes(sum(gradients), largest, plan.mesh.dp)), None
    added = loss + (largest if plan.batch.micro_batches > 1 and not compiled else 0)
    several = plan.mesh.dp > 1 or plan.turns
    bucket = min(max(BUCKET_BYTES, largest), sum(gradients)) if several else 0
    wide = 0 if plan.deals else sum(bytes_at(state.held, 1) for state in trained) - sum(gradients)
    free = peak.total()
    return max(
        (added, None),
        (bucket - free, Kind.REDUCE),
        (wide - free, Kind.STEP),
        key=lambda one: one[0],
    )
