"""Galvatron's problem as autopipe's: one for every way to run all layers, each layer a unit.

A way and a number of micro-batches fix what a layer takes, by Galvatron's own formulas
(`galvatron_score`), gathers and all: so much goes into a unit's seconds, and links are free. The
first and the last unit have their end of the vocabulary besides. Left to the planner are the cuts
and which layers run again.

Memory is theirs too. States are constants, as ZeRO has dealt them out. What a recomputed layer
keeps is saved by every micro-batch in flight, and the rest by those of its layers that do not run
again; the buffer of tp and `CONTEXT` are taken off the limit, and a MiB is added to each unit, as
Galvatron rounds up. While a layer runs again autopipe counts what it makes, once; Galvatron does
not. So the limit is larger by that, which is just right for stages where a layer does run again;
if another stage makes use of it, the plan does not fit, and the limit as it is is taken.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from autopipe.cluster import Link
from autopipe.communication import Topology
from autopipe.errors import InfeasibleError
from autopipe.machine import Machine
from autopipe.planners.answer import bound
from autopipe.planners.dynamic import dynamic
from autopipe.planners.search import frames
from autopipe.problem import Constraints, Decision, Problem, Profile, Saved, Shared
from benchmarks.planners.common_ground import plan_of
from benchmarks.planners.galvatron import LAYERS, Costs, Vocabulary
from benchmarks.planners.galvatron_score import (
    CONTEXT,
    Plan,
    Score,
    Way,
    activation,
    layer_times,
    reserved,
    score,
    sharded,
    vocabulary_times,
)

MIB = 2**20


def plan(
    costs: Costs, batch: int, devices: int, limit: int, micro_batches: Iterable[int]
) -> tuple[Score, Plan] | None:
    """The best of `dynamic` over all ways, by Galvatron's formulas; None: nothing fits.

    Problems are taken in the order of what they take at least, until that is more than the best.
    """
    made = []
    for count in micro_batches:
        for pp, way in _ways(costs, batch, devices, count):
            one = problem(costs, way, pp, batch, limit, count)
            made.append((bound(one, frames(one)[0]), one, way))
    best: tuple[Score, Plan] | None = None
    for least, one, way in sorted(made, key=lambda known: known[0]):
        if best is not None and least > best[0].seconds:
            break
        found = _fitting(costs, batch, limit, one, way)
        if found is not None and (best is None or found[0].seconds < best[0].seconds):
            best = found
    return best


def _fitting(
    costs: Costs, batch: int, limit: int, lax: Problem, way: Way
) -> tuple[Score, Plan] | None:
    """The plan of the lax problem if it fits by Galvatron's formulas, else of the strict one."""
    room = lax.machine.memory[0] - _live(lax)
    strict = replace(lax, machine=replace(lax.machine, memory=(room,) * lax.machine.devices))
    for one in (lax, strict):
        try:
            found = _plan(dynamic(one).decision, way)
        except InfeasibleError:
            return None
        scored = score(costs, found, batch, limit)
        if max(scored.memory) <= limit:
            return scored, found
    return None


def _live(one: Problem) -> int:
    """Bytes of what one layer makes again."""
    return max(saved.bytes for saved in one.profiles[0].saved if saved.rerun is not None)


def _ways(costs: Costs, batch: int, devices: int, count: int) -> Iterator[tuple[int, Way]]:
    for pp in (1, *costs.transfer):
        for tp in costs.saved:
            dp = devices // pp // tp
            if dp * pp * tp == devices and pp <= min(count, LAYERS) and batch % (count * dp) == 0:
                for zero in (0, 1, 3) if dp > 1 else (0,):
                    yield pp, Way(tp, 1, dp, zero)


def problem(costs: Costs, way: Way, pp: int, batch: int, limit: int, count: int) -> Problem:
    """All cuts into `pp` stages of layers that run in one way, `count` micro-batches a batch.

    Args:
        limit: MiB a device, before anything is reserved.
    """
    rows = batch // count // way.dp
    plain = layer_times(costs, way, rows, pp)[1] / 1000
    again = layer_times(costs, replace(way, recomputed=True), rows, pp)[1] / 1000 - plain
    ends = vocabulary_times(costs, way, rows, pp)
    seconds = [plain] * LAYERS
    seconds[0] += ends[0][1] / 1000
    if pp > 1:
        seconds[-1] += ends[-1][1] / 1000
    kept = sharded(way.zero, way.dp, count)
    states = [4 * costs.parameters / way.tp * kept + 1] * LAYERS
    saved = []
    for unit, part in _vocabularies(costs, pp):
        states[unit] += part.states[way.tp] * kept + 1
        saved.append(Saved(round(part.saved[way.tp] * rows * MIB), None, (unit,)))
    whole, less = costs.saved[way.width], costs.kept / way.width
    for unit in range(LAYERS):
        saved.append(Saved(round(less * rows * MIB), None, (unit,)))
        saved.append(Saved(round((whole - less) * rows * MIB), unit, (unit,), unit))
    room = (limit - reserved(limit) - CONTEXT - int(activation(costs, rows))) * MIB
    room += round((whole - less) * rows * MIB)
    link = Link(0.0, 1e18)
    groups = pp * way.dp
    return Problem(
        units=LAYERS,
        blocks=(),
        parameters=(),
        constants=tuple(Shared(round(size * MIB), (unit,)) for unit, size in enumerate(states)),
        optimizer_factor=0.0,
        profiles=(
            Profile(
                rows=rows,
                forward=((0.0,) * LAYERS,),
                backward=(tuple(seconds),),
                saved=tuple(saved),
                crossings=(),
                again=(((again,),),) * LAYERS,
            ),
        ),
        batch=batch,
        machine=Machine(
            (0,) * groups,
            (max(room, 0),) * groups,
            Topology((0,) * groups, (0,) * groups, (link,), link),
            way.tp,
        ),
        window=1,
        constraints=Constraints(pp=pp, dp=way.dp, micro_batches=count, schedule="1f1b"),
        reruns=tuple((unit, unit + 1) for unit in range(LAYERS)),
        tp=way.tp,
    )


def _vocabularies(costs: Costs, pp: int) -> list[tuple[int, Vocabulary]]:
    """The units that have a part of the vocabulary."""
    return [(0, costs.alone)] if pp == 1 else [(0, costs.first), (LAYERS - 1, costs.last)]


def _plan(decision: Decision, way: Way) -> Plan:
    bounds = (0, *decision.cuts, LAYERS)
    layers = [last - first for first, last in zip(bounds, bounds[1:], strict=False)]
    again = [len(numbers) for numbers in decision.recompute]
    return plan_of(way, layers, again, decision.frame.micro_batches)
