"""Piper's problems as autopipe's: one for every tensor-parallel degree, each layer a unit.

Each device stands for t of Piper's. What is minimised is a period (`objective`), so that with
N micro-batches a batch, m = N / d of them for each of d replicas, and a reduction of all gradients,
reduce_s, a step takes

    step / N  =  max over stages of  ( t_s / d  +  reduce_s / N )

which is Piper's objective (`piper`) if reduce_s is 4 (d - 1) / d * w / bw. Here it is

    2 (d - 1) / d * W / bw        so a layer's parameters are W = 2 w

What Piper counts in memory is bytes besides, b, and a * y in flight. A recomputed layer has a' < a
and b' = b + (a - a') within a quarter of a MiB: its activations stay where they are made again,
those of one micro-batch (`objective.all_recomputed`). The larger of b and b' - (a - a') is taken.
Parameters and crossings must count for time alone. They are in `TRAFFIC` and memory is in `MEMORY`,
so that they weigh 2^18 times less beside it.
"""

from __future__ import annotations

from collections.abc import Iterator

from autopipe.cluster.cluster import Link
from autopipe.cluster.collective_time import Topology
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.problem import (
    Constraints,
    Crossing,
    Decision,
    Problem,
    Profile,
    Saved,
    Shared,
)
from benchmarks.planners.objective import PIPER, fastest
from benchmarks.planners.piper import Conditions, Graph, Stage, Variant, score

TRAFFIC = 2**8
"""Bytes that one byte of a crossing or a parameter stands for."""

MEMORY = 2**-10
"""The same for all other bytes."""

Found = tuple[float, list[Stage]]
"""Seconds a micro-batch by autopipe's estimate, and the plan."""


def plan(graph: Graph, conditions: Conditions) -> Found | None:
    """The best of `search.dynamic` over all degrees, by Piper's formulas; None: nothing fits.

    Degrees are tensor-parallel ones. The seconds are those of `problem`: at cuts where their ranks
    synchronise they may be more than Piper's.
    """
    found = list(_plans(graph, conditions))
    return min(found, key=lambda one: score(graph, conditions, one[1]).objective, default=None)


def _plans(graph: Graph, conditions: Conditions) -> Iterator[Found]:
    for tp in graph.degrees():
        if tp <= conditions.devices:
            found = fastest(problem(graph, conditions, tp), PIPER)
            if found is not None:
                seconds = found.seconds / conditions.micro_batches
                yield seconds, _stages(graph, found.decision, tp)


def problem(graph: Graph, conditions: Conditions, tp: int) -> Problem:
    """All plans with one tp and one dp for the whole model, layers in the graph's order.

    Where ranks synchronise at an edge, Piper has its two ends pay for different bytes. Here both
    pay for the larger ones, so that a plan may look worse than it is, but never better.
    """
    plain = [layer.variants[tp, False] for layer in graph.layers]
    again = [layer.variants[tp, True] for layer in graph.layers]
    units = range(len(plain))
    blocks = [u for u in units if plain[u].in_flight > again[u].in_flight]
    saved = [
        Saved(_counted(variant.in_flight), None, (unit,))
        for unit, variant in enumerate(again)
        if variant.in_flight
    ]
    for number, unit in enumerate(blocks):
        size = _counted(plain[unit].in_flight) - _counted(again[unit].in_flight)
        saved.append(Saved(size, unit, (unit,), number))
    profile = Profile(
        rows=1,
        forward=((0.0,) * len(plain),),
        backward=(tuple(variant.seconds for variant in plain),),
        saved=tuple(saved),
        crossings=_crossings(graph, plain),
        recompute=tuple(((again[u].seconds - plain[u].seconds,),) for u in blocks),
    )
    link = Link(0.0, conditions.bandwidth / TRAFFIC)
    count = conditions.devices // tp
    places = Topology((0,) * count, (0,) * count, (link,), link)
    return Problem(
        units=len(plain),
        blocks=(),
        parameters=tuple(
            Shared(round(2 * variant.parameters / TRAFFIC), (unit,))
            for unit, variant in enumerate(plain)
        ),
        constants=tuple(
            Shared(max(_counted(a.fixed), _counted(b.fixed + b.in_flight - a.in_flight)), (unit,))
            for unit, (a, b) in enumerate(zip(plain, again, strict=True))
        ),
        optimizer_factor=0.0,
        profiles=(profile,),
        batch=conditions.micro_batches,
        machine=Machine((0,) * count, (_counted(conditions.memory),) * count, places, tp),
        window=1,
        constraints=Constraints(schedule="1f1b"),
        recomputable=tuple((unit, unit + 1) for unit in blocks),
        tp=tp,
    )


def _counted(size: float) -> int:
    return round(size / MEMORY)


def _crossings(graph: Graph, plain: list[Variant]) -> tuple[Crossing, ...]:
    at = {layer.name: unit for unit, layer in enumerate(graph.layers)}
    found = []
    for (source, destination), size in graph.edges.items():
        first, then = at[source], at[destination]
        synchronised = max(plain[first].leaving[destination], plain[then].entering[source])
        found.append(Crossing(round((size + synchronised) / TRAFFIC), first, (then,), True))
    return tuple(found)


def _stages(graph: Graph, decision: Decision, tp: int) -> list[Stage]:
    names = [layer.name for layer in graph.layers]
    blocks = [
        layer.name
        for layer in graph.layers
        if layer.variants[tp, False].in_flight > layer.variants[tp, True].in_flight
    ]
    bounds = (0, *decision.cuts, len(names))
    turns = decision.config.turns or (1,) * decision.stages
    return [
        Stage(
            frozenset(names[first:last]),
            decision.config.dp * of,
            tp,
            frozenset(blocks[again.block] for again in own),
        )
        for first, last, own, of in zip(bounds, bounds[1:], decision.recompute, turns, strict=False)
    ]
