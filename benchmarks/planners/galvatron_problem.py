"""Galvatron's problem as autopipe's: two for every way to run all layers.

A way and a number of micro-batches fix what a layer takes, by Galvatron's own formulas
(`galvatron_score`), gathers and all: so much goes into a unit's seconds, and links are free. The
first and the last unit have their end of the vocabulary besides. Left to the planner are which
layers run again, and, in the first of the two problems, the cuts:

    uneven     a unit is a layer: stages may have any number of them
    even       a unit is a stage of Galvatron's, LAYERS / pp layers

The second one is there because autopipe and Galvatron hold an uneven pipeline to take different
times: sum + (m - 1) * largest against `galvatron_score.bounds`. What is best by the one need not be
by the other; with even stages they agree.

Memory is Galvatron's too, whole MiB and all. States are constants, as ZeRO has dealt them out. What
a recomputed layer keeps is saved by every micro-batch in flight, and the rest by those of its
layers that do not run again; the buffer of tp and `CONTEXT` are taken off the limit. Galvatron does
not count what a layer makes again (`objective.none_recomputed`), and rounds up each layer of a
stage. With even stages that is done to the byte; with uneven ones a unit does not know its stage,
and gets the most that rounding can add.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from autopipe.cluster.cluster import Link
from autopipe.cluster.collective_time import Topology
from autopipe.planners.model.devices import Machine
from autopipe.planners.model.problem import Constraints, Decision, Problem, Profile, Saved, Shared
from benchmarks.planners.common_ground import plan_of
from benchmarks.planners.galvatron import LAYERS, Costs
from benchmarks.planners.galvatron_score import (
    CONTEXT,
    Plan,
    Score,
    Way,
    activation,
    layer_times,
    memory,
    reserved,
    score,
    sharded,
    vocabulary_times,
)
from benchmarks.planners.objective import GALVATRON, fastest

MIB = 2**20


@dataclass(frozen=True)
class Case:
    """A way to run all layers in `pp` stages, `count` micro-batches of `rows` rows a batch."""

    way: Way
    pp: int
    count: int
    rows: int


def plan(
    costs: Costs, batch: int, devices: int, limit: int, micro_batches: Iterable[int]
) -> tuple[Score, Plan] | None:
    """The best of `search.dynamic` over all ways, by Galvatron's formulas; None: nothing fits.

    Cases are taken in the order of what they take if every device computes all the time, until
    that is more than the best.
    """
    best: tuple[Score, Plan] | None = None
    known = [(_least(costs, case), case) for case in _cases(costs, batch, devices, micro_batches)]
    for least, case in sorted(known, key=lambda pair: pair[0]):
        if best is not None and least > best[0].seconds:
            break
        for even in (True, False) if case.pp > 1 else (True,):
            found = fastest(problem(costs, case, batch, limit, even=even), GALVATRON)
            if found is not None:
                made = _plan(found.decision, case.way, LAYERS // case.pp if even else 1)
                scored = score(costs, made, batch, limit)
                if best is None or scored.seconds < best[0].seconds:
                    best = scored, made
    return best


def _cases(costs: Costs, batch: int, devices: int, micro_batches: Iterable[int]) -> Iterator[Case]:
    for count in micro_batches:
        for pp in (1, *costs.transfer):
            for tp in costs.saved:
                dp = devices // pp // tp
                if (
                    dp * pp * tp == devices
                    and pp <= min(count, LAYERS)
                    and not batch % (count * dp)
                ):
                    for zero in (0, 1, 3) if dp > 1 else (0,):
                        yield Case(Way(tp, 1, dp, zero), pp, count, batch // count // dp)


def _least(costs: Costs, case: Case) -> float:
    """Seconds that one device's part of a step takes at least."""
    return case.count * sum(_seconds(costs, case)) / case.pp


def _seconds(costs: Costs, case: Case) -> list[float]:
    """Of every layer, for a micro-batch, with its part of the vocabulary."""
    plain = layer_times(costs, case.way, case.rows, case.pp)[1] / 1000
    ends = vocabulary_times(costs, case.way, case.rows, case.pp)
    seconds = [plain] * LAYERS
    seconds[0] += ends[0][1] / 1000
    if case.pp > 1:
        seconds[-1] += ends[-1][1] / 1000
    return seconds


def problem(costs: Costs, case: Case, batch: int, limit: int, *, even: bool) -> Problem:
    """All cuts into stages, even or not, and all choices of layers that are recomputed.

    Args:
        limit: MiB a device, before anything is reserved.
    """
    way, pp, rows = case.way, case.pp, case.rows
    layers = LAYERS // pp if even else 1
    units = LAYERS // layers
    each = _seconds(costs, case)
    again = layer_times(costs, replace(way, recomputed=True), rows, pp)[1] / 1000
    again -= layer_times(costs, way, rows, pp)[1] / 1000
    room, states, saved = (_even if even else _uneven)(costs, case, batch)
    link = Link(0.0, 1e18)
    groups = pp * way.dp
    return Problem(
        units=units,
        blocks=(),
        parameters=(),
        constants=tuple(Shared(round(size * MIB), (unit,)) for unit, size in enumerate(states)),
        optimizer_factor=0.0,
        profiles=(
            Profile(
                rows=rows,
                forward=((0.0,) * units,),
                backward=(
                    tuple(
                        math.fsum(each[first : first + layers])
                        for first in range(0, LAYERS, layers)
                    ),
                ),
                saved=saved,
                crossings=(),
                recompute=(((again,),),) * LAYERS,
            ),
        ),
        batch=batch,
        machine=Machine(
            (0,) * groups,
            (max(limit - reserved(limit) - room, 0) * MIB,) * groups,
            Topology((0,) * groups, (0,) * groups, (link,), link),
            way.tp,
        ),
        window=1,
        constraints=Constraints(pp=pp, dp=way.dp, micro_batches=case.count, schedule="1f1b"),
        recomputable=tuple((layer // layers, layer // layers + 1) for layer in range(LAYERS)),
        tp=way.tp,
    )


Memory = tuple[int, list[float], tuple[Saved, ...]]
"""MiB off the limit, MiB that each unit holds whatever is recomputed, and what it saves besides."""


def _even(costs: Costs, case: Case, batch: int) -> Memory:
    """Of stages as units: what their layers hold if all run again, and what they do not save."""
    layers = LAYERS // case.pp
    whole, least = (
        memory(costs, plan_of(case.way, [layers] * case.pp, [again] * case.pp, case.count), batch)
        for again in (0, layers)
    )
    saved = []
    for layer in range(LAYERS):
        unit = layer // layers
        flights = 1 if case.pp == 1 else case.pp - unit
        size = (whole[unit] - least[unit]) * MIB // layers
        saved.append(Saved(math.ceil(size / flights), unit, (unit,), layer))
    return 0, list(map(float, least)), tuple(saved)


def _uneven(costs: Costs, case: Case, batch: int) -> Memory:
    """Of layers as units, wherever they are."""
    way, rows = case.way, case.rows
    kept = sharded(way.zero, way.dp, case.count)
    states = [4 * costs.parameters / way.tp * kept] * LAYERS
    whole, less = costs.saved[way.width] * rows, costs.kept / way.width * rows
    rounding = max(
        math.ceil(held) - held
        for size in (whole, less)
        for flights in range(1, case.pp + 1)
        for held in [states[0] + size * flights]
    )
    states = [size + rounding for size in states]
    saved = []
    for unit, part in ((0, costs.first), (LAYERS - 1, costs.last)):
        states[unit] += part.states[way.tp] * kept + 1
        saved.append(Saved(round(part.saved[way.tp] * rows * MIB), None, (unit,)))
    for unit in range(LAYERS):
        saved.append(Saved(round(less * MIB), None, (unit,)))
        saved.append(Saved(round((whole - less) * MIB), unit, (unit,), unit))
    return CONTEXT + int(activation(costs, rows)), states, tuple(saved)


def _plan(decision: Decision, way: Way, layers: int) -> Plan:
    """The decision on units of so many layers."""
    bounds = (0, *(cut * layers for cut in decision.cuts), LAYERS)
    lengths = [last - first for first, last in pairwise(bounds)]
    again = [len(numbers) for numbers in decision.recompute]
    return plan_of(way, lengths, again, decision.config.micro_batches)
