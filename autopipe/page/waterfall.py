"""A step from the devices' peak down to waiting, as bars, and beside them what a run measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.waterfall import COMPUTED
from autopipe.report.recorded import MeasuredRun
from autopipe.report.spending import bars
from autopipe.schedules.instructions import holders
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
    step = sum(bar.seconds for bar in found)
    scale = max(step, measured.step_seconds if measured is not None else 0.0) or 1.0
    computed = sum(seconds for name, seconds in parts.items() if name in _COMPUTED)
    planned = [
        _bar(
            bar.name,
            bar.seconds,
            bar.before,
            step,
            scale,
            "computing" if bar.before + bar.seconds <= computed * (1 + 1e-9) else "waiting",
        )
        for bar in found
    ]
    return Waterfall(tuple(planned), tuple(_measured(plan, measured, scale)))


_COMPUTED = {*COMPUTED, "computing"}


def computing(plan: Plan, measured: MeasuredRun) -> float:
    """Seconds for which the mean rank of a run computed in a step."""
    ranks = holders(programs.compute(plan))
    both = (stage.forward_seconds + stage.backward_seconds for stage in measured.stages)
    return plan.batch.micro_batches * sum(both) / (max(ranks) + 1)


def _measured(plan: Plan, measured: MeasuredRun | None, scale: float) -> Iterator[WaterfallBar]:
    if measured is None or not measured.step_seconds:
        return
    step = measured.step_seconds
    busy = min(computing(plan, measured), step)
    yield _bar("computing", busy, 0.0, step, scale, "computing")
    yield _bar("waiting", step - busy, busy, step, scale, "waiting")


def _bar(
    name: str, seconds: float, before: float, step: float, scale: float, kind: str
) -> WaterfallBar:
    return WaterfallBar(
        name,
        numbers.seconds(seconds),
        numbers.percent(seconds / step) if step else "",
        kind,
        round(100 * before / scale, 3),
        round(100 * seconds / scale, 3),
    )
