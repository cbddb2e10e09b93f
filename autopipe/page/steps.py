"""A step as boxes on a time axis, a row for each rank, planned above measured.

Places are percent of the longer of the two steps, so that a browser scales them without a script.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from autopipe.planfile import predict
from autopipe.planfile.contents import Plan
from autopipe.planfile.parts import Batch
from autopipe.report.draw_text import LETTERS
from autopipe.report.recorded import Lanes, Slice
from autopipe.schedules.instructions import COMPUTE, Instruction, Kind, holders
from autopipe.schedules.phrases import describe
from autopipe.schedules.simulate import Timeline
from autopipe.util import numbers

MOST_BOXES = 3000
"""The most boxes in a picture: a browser is slow with many more, and they are too small to read."""

SHORTEST = 1e-3
"""The share of a step from which on a wait has a box of its own."""


@dataclass(frozen=True)
class Box:
    """A computation, a wait or a sum.

    Attributes:
        kind: F, B, I, W; `wait`, `sum`.
        number: the number of the micro-batch; empty if it does not matter.
        chunk: 1 for the second stage of its rank, and so on.
        shade: 0 for the first micro-batch, 1 for the last.
        left, width: percent of the picture.
        text: a sentence.
    """

    kind: str
    number: str
    chunk: int
    shade: float
    left: float
    width: float
    text: str


@dataclass(frozen=True)
class RankLane:
    """A rank: its boxes, and the share of the step in which it does not compute."""

    rank: int
    boxes: tuple[Box, ...]
    bubble: str


@dataclass(frozen=True)
class Picture:
    """Both steps on one axis.

    Attributes:
        seconds: of the axis.
        planned_step, measured_step: as texts; the latter empty without a run.
        key: the kinds that are in it, with their meanings.
        shown, total: micro-batches in the picture, and in the step.
    """

    seconds: float
    planned: tuple[RankLane, ...]
    measured: tuple[RankLane, ...]
    planned_step: str
    measured_step: str
    key: tuple[tuple[str, str], ...]
    shown: int
    total: int


def of_plan(plan: Plan, lanes: Lanes | None = None) -> Picture:
    """The picture of a plan's step, and of a run's.

    A step of too many boxes is drawn with its first micro-batches alone, without the run's.
    """
    timeline, shown = _timeline(plan, len(lanes) if lanes is not None else 0)
    all_shown = shown == plan.batch.micro_batches
    measured = lanes if all_shown else None
    ends = [slices[-1].end for slices in measured or () if slices]
    axis = max(timeline.seconds, max(ends, default=0.0)) or 1.0
    placed = holders(timeline.programs)
    planned = [[] for _ in timeline.programs]  # type: list[list[Slice]]
    for span in timeline.spans:
        planned[span.rank].append(Slice(span.instruction, span.start, span.end))
    for span in timeline.sums:
        planned[span.rank].append(Slice(span.instruction, span.start, span.end))
    kinds = {s.instruction.kind for row in planned for s in row}
    key = [(kind.value, LETTERS[kind]) for kind in COMPUTE if kind in kinds]
    key += [("sum", "sum of gradients")] if any(s.end > s.start for s in timeline.sums) else []
    key += [("wait", "waiting")]
    return Picture(
        seconds=axis,
        planned=tuple(_rows(planned, placed, axis, timeline.seconds, shown)),
        measured=tuple(_rows(measured or (), placed, axis, max(ends, default=0.0), shown)),
        planned_step=numbers.seconds(timeline.seconds),
        measured_step=numbers.seconds(max(ends)) if ends else "",
        key=tuple(key),
        shown=shown,
        total=plan.batch.micro_batches,
    )


def _timeline(plan: Plan, measured: int) -> tuple[Timeline, int]:
    """The timeline of a step, of no more micro-batches than a browser draws at once."""
    total = plan.batch.micro_batches
    shown = min(total, max(3, MOST_BOXES // (3 * (len(plan.stages) + measured))))
    if plan.programs:
        shown = total  # a written schedule is for its own number of them
    rows = plan.batch.rows // total
    return predict.timeline(replace(plan, batch=Batch(rows * shown, shown))), shown


def _rows(
    lanes: Iterable[Iterable[Slice]],
    placed: tuple[int, ...],
    axis: float,
    step: float,
    micro_batches: int,
) -> Iterable[RankLane]:
    for rank, slices in enumerate(lanes):
        stages = [stage for stage, holder in enumerate(placed) if holder == rank]
        visible = [s for s in slices if _visible(s, step)]
        busy = sum(s.end - s.start for s in visible if s.instruction.kind in COMPUTE)
        boxes = tuple(_box(s, stages, axis, micro_batches) for s in visible)
        yield RankLane(rank, boxes, numbers.percent(1 - busy / step) if step else "")


def _visible(slice_: Slice, step: float) -> bool:
    return slice_.instruction.kind in COMPUTE or slice_.end - slice_.start > SHORTEST * step


def _box(slice_: Slice, own: list[int], axis: float, micro_batches: int) -> Box:
    instruction, start, end = slice_
    kind = instruction.kind
    computes = kind in COMPUTE
    name = kind.value if computes else "sum" if kind is Kind.REDUCE else "wait"
    took, begin, until = map(numbers.seconds, (end - start, start, end))
    return Box(
        name,
        str(instruction.microbatch) if computes else "",
        own.index(instruction.stage) if computes and instruction.stage in own else 0,
        round(instruction.microbatch / max(micro_batches, 1), 3),
        round(100 * start / axis, 4),
        round(100 * (end - start) / axis, 4),
        f"{_words(instruction)}: {took}, from {begin} to {until}",
    )


def _words(instruction: Instruction) -> str:
    if instruction.kind is Kind.REDUCE:
        return f"summing the gradients of stage {instruction.stage}"
    return f"{describe(instruction)}, stage {instruction.stage}"
