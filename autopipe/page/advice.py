"""Say in sentences where a step's time goes and what to change, for a plan and for a run of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autopipe.page import waterfall as chart
from autopipe.planfile import programs
from autopipe.planfile.contents import Plan
from autopipe.planfile.waterfall import WAITED
from autopipe.report import fullest
from autopipe.report.recorded import MeasuredRun
from autopipe.report.spending import WORDS
from autopipe.schedules.instructions import splits
from autopipe.util.numbers import memory, percent, seconds

NOTABLE = 0.05
"""The share of a step from which on a part is worth a sentence."""

APART = 0.1
"""How far a measured figure is from the planned one where that is worth a sentence."""

MOST = 4
"""Parts that have a sentence: the largest."""


@dataclass(frozen=True)
class Advice:
    """A finding, and what to try (may be empty)."""

    found: str
    change: str = ""


def of_plan(plan: Plan, parts: Mapping[str, float]) -> list[Advice]:
    """The largest parts of a planned step beside matmuls at peak, and what would make them smaller.

    Args:
        parts: seconds of the step, as `planfile.waterfall` has them.
    """
    step = sum(parts.values())
    large = sorted((name for name in parts if name in _CHANGES), key=lambda name: -parts[name])
    return [
        Advice(
            f"{WORDS[name]}: {seconds(parts[name])} of a step, {percent(parts[name] / step)}",
            _change(plan, name),
        )
        for name in large[:MOST]
        if step and parts[name] >= NOTABLE * step
    ]


_CHANGES = {
    "matmuls_below_peak": "larger matrices are faster: more rows in a micro-batch, where memory "
    "allows; or a lower --tp where it is above 1",
    "other_ops": "norms, activations and additions move bytes: --compile fuses them",
    "launches": "the ops are too small for the devices: --compile, more rows in a micro-batch, or "
    "fewer devices",
    "recompute": "blocks run twice to save memory: a higher ZeRO stage, more pipeline stages or "
    "smaller micro-batches would let them run once",
    "exchange": "tensor parallelism exchanges in every layer: a lower --tp, or a faster link",
    "gathering": "ZeRO-3 gathers parameters in every micro-batch, and ZeRO-2 scatters gradients: "
    "fewer, larger ones, or ZeRO-1 where memory allows",
    "copying": "blocks offload more than computing hides: more memory, a faster link to the host, "
    "or --offload off",
    "filling": "ranks wait while the pipeline fills and drains: more micro-batches (a larger "
    "batch), fewer stages, or a schedule with split backwards (zb-h1)",
    "imbalance": "stages take unlike times: fewer stages, or another number of them",
    "transfers": "activations wait for the link: eager-1f1b keeps more of them under way; larger "
    "depth and window",
    "sums": "these sums end after the last backward: more micro-batches in a step, or fewer "
    "replicas",
}
"""What makes a part of `planfile.waterfall` smaller."""


def _change(plan: Plan, name: str) -> str:
    """What makes the part smaller, but for what the plan does already or cannot do."""
    if plan.compiled and name in ("other_ops", "launches"):
        return "they are fused already: more rows in a micro-batch, or fewer devices"
    if name == "filling" and (plan.zero == 3 or splits(programs.compute(plan))):
        return "ranks wait while the pipeline fills and drains: more micro-batches, or fewer stages"
    if name == "transfers" and any(boundary.depth for boundary in plan.boundaries):
        return "activations wait for the link: larger depth and window"
    return _CHANGES[name]


def of_run(plan: Plan, parts: Mapping[str, float], measured: MeasuredRun) -> list[Advice]:
    """The differences of a run from its plan; `parts` as in `of_plan`."""
    return [*_step(plan, parts, measured), *_stages(plan, measured), *_bytes(plan, measured)]


def _step(plan: Plan, parts: Mapping[str, float], measured: MeasuredRun) -> Iterator[Advice]:
    planned, took = plan.prediction.step_seconds, measured.step_seconds
    if not planned or not took:
        return
    excess = took / planned - 1
    text = f"a step took {seconds(took)}, planned were {seconds(planned)}"
    if abs(excess) < APART:
        yield Advice(f"{text}: {percent(abs(excess))} {'more' if excess > 0 else 'less'}")
        return
    busy = chart.computing(plan, measured)
    planned_busy = sum(s for name, s in parts.items() if name not in WAITED)
    waits, planned_waits = max(took - busy, 0.0), max(planned - planned_busy, 0.0)
    cause = "computing" if abs(busy - planned_busy) >= abs(waits - planned_waits) else "waiting"
    pair = (busy, planned_busy) if cause == "computing" else (waits, planned_waits)
    change = (
        "the devices' rates are others than those planned with: autopipe probe --again, then "
        "plan again"
        if cause == "computing"
        else "ranks waited longer than planned: look for a slow rank or link in the step below"
    )
    text += f"; most of the difference is {cause}: {seconds(pair[0])}, planned {seconds(pair[1])}"
    yield Advice(text, change)


def _stages(plan: Plan, measured: MeasuredRun) -> Iterator[Advice]:
    """The stage farthest from its planned seconds, apart from what all stages are off by."""
    ratios = [
        (own.forward_seconds + own.backward_seconds)
        / (stage.predicted.forward_seconds + stage.predicted.backward_seconds)
        for own, stage in zip(measured.stages, plan.stages, strict=True)
        if stage.predicted.forward_seconds + stage.predicted.backward_seconds
    ]
    if len(ratios) < 2 or len(ratios) < len(plan.stages):
        return
    mean = sum(ratios) / len(ratios)
    worst = max(range(len(ratios)), key=lambda stage: ratios[stage])
    if mean and ratios[worst] / mean - 1 >= APART:
        own, predicted = measured.stages[worst], plan.stages[worst].predicted
        yield Advice(
            f"stage {worst} is the slowest compared with its plan: "
            f"{seconds(own.forward_seconds + own.backward_seconds)} a micro-batch, planned "
            f"{seconds(predicted.forward_seconds + predicted.backward_seconds)}",
            "is its device shared, or slower than the others? A plan for devices that differ gives "
            "it less to do",
        )


def _bytes(plan: Plan, measured: MeasuredRun) -> Iterator[Advice]:
    rank = fullest.fullest(plan)
    held = sum(measured.stages[stage].memory.seen for stage in rank.stages)
    planned = sum(plan.stages[stage].predicted.memory.seen for stage in rank.stages)
    if not held or not planned:
        return
    excess = held / planned - 1
    text = f"the fullest device held {memory(held)}, planned were {memory(planned)}"
    if excess >= APART:
        yield Advice(text, "lower --memory by as much, and plan again")
    elif excess <= -APART:
        yield Advice(text, "there is room for more rows in a micro-batch than planned")
