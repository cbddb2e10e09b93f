"""Evaluate a sheet at a point, as the script of a page does (`page/assets/formulas.js`).

seconds   max over paths of sum(n * cost)
bytes     at the moment with the most: sum over the rank's stages of
          held + max(sum(n * size) + added + passing, bucket)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopipe.scaling.expressions import BANDWIDTH, ROWS, TOKENS, value
from autopipe.scaling.sheet import Count, Form, Moment, PlanAt, Point, RankBytes, Sheet


def at(sheet: Sheet, point: Point) -> PlanAt | None:
    """A plan's seconds and bytes at a point; None: the batch does not divide there, or into a
    number of micro-batches that the sheet lacks."""
    micro_batches, rest = divmod(point.batch, sheet.dp * point.rows)
    count = sheet.counts.get(micro_batches)
    if rest or count is None:
        return None
    where = {ROWS: point.rows, TOKENS: point.tokens, BANDWIDTH: point.bandwidth}
    costs = [value(cost, where) for cost in sheet.costs]
    step = max(_sum(path, costs) for path in count.paths)
    busy = micro_batches * _sum(sheet.computing, costs)
    return PlanAt(
        step, 1 - busy / step if step else 0.0, tuple(peaks(sheet, count, where, micro_batches))
    )


def peaks(sheet: Sheet, count: Count, where: dict[str, float], micro_batches: int) -> list[int]:
    """Bytes of each rank when it is fullest."""
    sizes = [value(size, where) for size in sheet.sizes]
    return [
        _peak(rank, moments, sizes, where, again=micro_batches > 1)
        for rank, moments in zip(sheet.ranks, count.moments, strict=True)
    ]


def _peak(
    rank: RankBytes,
    moments: Sequence[Moment],
    sizes: Sequence[float],
    where: dict[str, float],
    *,
    again: bool,
) -> int:
    there = max(
        ({stage: _sum(form, sizes) for stage, form in moment.items()} for moment in moments),
        key=lambda held: math.fsum(held.values()),
    )
    return round(
        sum(
            own.held
            + max(
                there[stage] + (own.added if again else 0) + value(own.passing, where), own.bucket
            )
            for stage, own in rank.stages.items()
        )
    )


def _sum(form: Form, values: Sequence[float]) -> float:
    return math.fsum(values[number] * times for number, times in form)
