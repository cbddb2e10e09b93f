"""Galvatron's plans that autopipe can express too, and the best of them by Galvatron's formulas.

autopipe has one mesh tp x pp x dp and one ZeRO stage for the whole model, the vocabulary included,
and recomputes what it likes in each stage. Galvatron cuts the layers evenly and lets every layer
have its own tp or Ulysses degree and ZeRO stage. What both have is small enough to try in full:
layers are alike, so of a stage's recomputed layers only the number matters, and fewest is quickest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from benchmarks.planners.galvatron import LAYERS, Costs
from benchmarks.planners.galvatron_score import (
    Plan,
    Score,
    Way,
    memory,
    reserved,
    score,
)


def plan_of(way: Way, layers: Sequence[int], recomputed: Sequence[int], micro_batches: int) -> Plan:
    """A plan in which every layer runs in `way`, by stage so many layers, so many recomputed."""
    stages = tuple(
        (replace(way, recomputed=True),) * again + (way,) * (count - again)
        for count, again in zip(layers, recomputed, strict=True)
    )
    return Plan(stages, way, micro_batches, way.tp)


def best(
    costs: Costs, batch: int, devices: int, limit: int, micro_batches: Iterable[int]
) -> tuple[Score, Plan] | None:
    """The quickest plan that fits `limit` MiB a device; None: none does."""
    found = [
        (score(costs, plan, batch, limit), plan)
        for count in micro_batches
        for plan in _plans(costs, batch, devices, limit, count)
    ]
    return min(found, key=lambda pair: pair[0].seconds, default=None)


def _plans(costs: Costs, batch: int, devices: int, limit: int, count: int) -> Iterator[Plan]:
    room = limit - reserved(limit)
    for pp in (1, *costs.transfer):
        for tp in costs.saved:
            dp = devices // pp // tp
            if dp * pp * tp != devices or pp > min(count, LAYERS) or batch % (count * dp):
                continue
            layers = [LAYERS // pp] * pp
            for zero in (0, 1, 3) if dp > 1 else (0,):
                way = Way(tp, 1, dp, zero)
                none = memory(costs, plan_of(way, layers, [0] * pp, count), batch)
                every = memory(costs, plan_of(way, layers, layers, count), batch)
                if max(every) > room:
                    continue
                again = [
                    _fewest(used - room, (used - less) // total) if used > room else 0
                    for used, less, total in zip(none, every, layers, strict=True)
                ]
                yield plan_of(way, layers, again, count)


def _fewest(excess: int, each: int) -> int:
    return -(-excess // each)
