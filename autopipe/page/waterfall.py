"""Bars of a planned step, from the devices' peak down to waiting, beside a measured one's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopipe.planfile import turns
from autopipe.planfile.contents import Plan
from autopipe.planfile.waterfall import COMPUTED
from autopipe.report.recorded import MeasuredRun
from autopipe.report.spending import Bar, bars, shares
from autopipe.util import numbers


@dataclass(frozen=True)
class WaterfallBar:
    """A part of a step.

    Attributes:
        kind: "computing" or "waiting", of "planned" or "measured".
        left, width: percent of the longer of both steps.
    """

    name: str
    seconds: str
    share: str
    kind: str
    left: float
    width: float


@dataclass(frozen=True)
class Waterfall:
    """The parts of the planned step, and those of the measured one."""

    planned: tuple[WaterfallBar, ...]
    measured: tuple[WaterfallBar, ...]


def of_plan(
    plan: Plan, parts: Mapping[str, float], measured: MeasuredRun | None = None
) -> Waterfall:
    """The bars of a plan, and of what a run of it measured.

    Args:
        parts: seconds of the step, as `planfile.waterfall` has them.
    """
    found = bars(plan, parts)
    step = found[-1].before + found[-1].seconds if found else 0.0
    scale = max(step, measured.step_seconds if measured is not None else 0.0) or 1.0
    computed = sum(seconds for name, seconds in parts.items() if name in _COMPUTED)
    return Waterfall(tuple(_drawn(found, computed, scale)), tuple(_measured(plan, measured, scale)))


_COMPUTED = {*COMPUTED, "computing"}


def computing(plan: Plan, measured: MeasuredRun) -> float:
    """Seconds for which the mean rank of a run computed in a step."""
    stages, count = plan.stages, plan.batch.micro_batches
    every = (
        turns.rounds(stages, index, count) * (own.forward_seconds + own.backward_seconds)
        for index, own in enumerate(measured.stages)
    )
    return min(math.fsum(every) / plan.mesh.pp, measured.step_seconds)


def bubble(plan: Plan, measured: MeasuredRun) -> float:
    """The share of a measured step for which the mean rank did not compute: a run's metrics have
    the same of each step. The bar of what it waited is as long."""
    return 1 - computing(plan, measured) / measured.step_seconds


def _measured(plan: Plan, measured: MeasuredRun | None, scale: float) -> Iterator[WaterfallBar]:
    if measured is None or not measured.step_seconds:
        return
    busy = computing(plan, measured)
    waits = measured.step_seconds - busy
    yield from _drawn(
        [Bar("computing", busy, 0.0), Bar("waiting (the bubble)", waits, busy)], busy, scale
    )


def _drawn(found: Sequence[Bar], computed: float, scale: float) -> Iterator[WaterfallBar]:
    """Bars of a step, of whose seconds the first `computed` are computing."""
    for bar, share in zip(found, shares(found), strict=True):
        inside = bar.before + bar.seconds <= computed * (1 + 1e-9)
        yield WaterfallBar(
            bar.name,
            numbers.seconds(bar.seconds),
            share,
            "computing" if inside else "waiting",
            round(100 * bar.before / scale, 3),
            round(100 * bar.seconds / scale, 3),
        )
